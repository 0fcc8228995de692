"""Text that a model, a task or a reward wrote reaches no terminal raw, whichever view shows it and wherever it enters."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from surefoot.records import Verdict
from surefoot.report.console import RichView
from surefoot.report.view import PlainView, View

CANARY = "canary-of-the-view"
STEERING = [
    "\x1b[2J", "\x1b]0;title\x07", "\x1b]8;;http://example.org\x1b\\", "\x9b31m", "\r", "\b\b\b", "\x00", "\u202e", "\u2066", "\u2028", "\u2029",
    "\u200b", "\ud800",
]  # fmt: skip
HOSTILE = "".join(STEERING) + f" [bold red]markup[/] {CANARY} https://me:pass1234@example.org"


@dataclass(frozen=True)
class Outcome:
    verdict: Verdict
    reasons: tuple[str, ...]
    run_dir: Path
    evaluate_with: str = ""
    seconds: float | None = None


def show_everything(view: View, tmp_path: Path) -> None:
    view.start([f"model     {HOSTILE}"])
    view.warn(HOSTILE, HOSTILE)
    view.note([HOSTILE])
    view.finish(Outcome(Verdict.FAIL, (HOSTILE,), tmp_path))
    view.close()


@pytest.mark.parametrize("kind", ["plain", "rich"])
def test_no_view_shows_control_characters_or_secrets(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VIEW_TOKEN", CANARY)
    stream = io.StringIO()
    if kind == "plain":
        show_everything(PlainView(1, stream), tmp_path)
    else:  # no cursor of its own: every control character in the output would be the text's
        show_everything(RichView(1, Console(file=stream, force_terminal=False, highlight=False, width=2000)), tmp_path)
    shown = stream.getvalue()
    assert shown.count("\\x1b[2J") == 5
    assert shown.count("[bold red]markup[/]") == 5, "markup is text"
    assert [char for char in "\x1b\x9b\x07\r\b\x00\u202e\u2066\u200b\ud800\u2028\u2029" if char in shown] == []
    assert CANARY not in shown
    assert "pass1234" not in shown
    assert shown.count("https://***@example.org") == 5


def test_planted_view_that_prints_raw_text_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.report.view.printable", lambda text: text)
    stream = io.StringIO()
    show_everything(PlainView(1, stream), tmp_path)
    assert "\x1b[2J" in stream.getvalue()
