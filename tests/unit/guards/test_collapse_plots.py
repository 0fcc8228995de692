"""The pictures in the documentation are those that the script draws."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import plot_guard
import pytest

IMAGES = Path(__file__).resolve().parents[3] / "docs" / "img"


@pytest.mark.parametrize("name", plot_guard.PLOTS)
def test_the_picture_is_up_to_date(name: str) -> None:
    drawn = plot_guard.PLOTS[name]()
    assert (IMAGES / name).read_text(encoding="utf-8") == drawn, "run: python scripts/plot_guard.py"
    assert ET.fromstring(drawn).tag.endswith("svg")
    assert "nan" not in drawn


def test_a_picture_that_no_longer_shows_what_it_says_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot_guard, "together", plot_guard.hacked)
    with pytest.raises(RuntimeError, match="must not show a stop"):
        plot_guard.plot_healthy()
    monkeypatch.setattr(plot_guard, "together", lambda t: (0.5, 0.5 + t / 100))
    with pytest.raises(RuntimeError, match="another seed"):
        plot_guard.plot_healthy()
