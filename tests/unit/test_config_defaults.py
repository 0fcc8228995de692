"""What a config says that leaves everything out: people's runs depend on each of these values, so none changes by accident."""

from __future__ import annotations

import pytest
from key_effects import all_defaults, decided_defaults

from surefoot.config import Config


def changed() -> dict[str, str]:
    decided = decided_defaults()
    return {key: value for key, value in all_defaults().items() if decided.get(key, value) != value}


def test_every_default_is_the_one_that_was_decided() -> None:
    assert changed() == {}, "a changed default is a decision, and breaking: tests/repo/config_keys.txt and CHANGELOG.md"


def test_a_planted_default_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Config.model_fields["tasks_per_step"], "default", 5)
    assert changed() == {"tasks_per_step": "5"}
