"""Silent failure 57: one rollout's world is seen by another, and rewards depend on the order of play."""

from __future__ import annotations

import pytest
from tool_kit import call, play

from surefoot.protocols import Request
from surefoot.records import Rollout
from surefoot.tools.python.environments import EnvironmentToolkit


class Counter:
    """A world that remembers."""

    def reset(self, **row: object) -> None:
        self.count = 0

    def add(self) -> int:
        """Count one more."""
        self.count += 1
        return self.count


def counts_twice(request: Request, context: str) -> str:
    return "done" if context.count("<|tool|>") >= 2 else call("add")


def seen() -> list[list[str]]:
    """What each rollout was told, over two steps of the same worlds."""
    toolkit = EnvironmentToolkit(Counter)
    told: list[list[str]] = []
    try:
        for _ in range(2):
            (one,) = play(counts_twice, toolkit)  # type: ignore[arg-type]
            told += [answers(rollout) for rollout in one.group.rollouts]
    finally:
        toolkit.close()
    return told


def answers(rollout: Rollout) -> list[str]:
    return [each.answer for turn in rollout.turns for each in turn.calls]


def test_every_rollout_counts_from_the_beginning() -> None:
    assert seen() == [["1", "2"]] * 4


def test_planted_world_that_everybody_shares_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Counter()
    one.reset()
    monkeypatch.setattr(Counter, "__new__", lambda cls, *_: one)
    monkeypatch.setattr(Counter, "reset", lambda self, **row: None)
    assert seen() != [["1", "2"]] * 4
