"""Silent failure 01: siblings found by counting to the configured group size, so that advantages compare strangers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from silent_kit import TASKS, make_group, prepare

from surefoot.errors import InvariantError
from surefoot.learner import samples
from surefoot.maths.advantages import compute_advantages

SIZE = 4


def by_counting(rewards: Sequence[float], group_ids: Sequence[str], **_: Any) -> torch.Tensor:
    """The planted bug: row i belongs to group i // SIZE, whatever its id says."""
    return compute_advantages(rewards, [i // SIZE for i in range(len(rewards))])


def test_interleaved_siblings_get_the_advantages_of_their_own_group() -> None:
    a, b = [1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]
    mixed = compute_advantages([r for pair in zip(a, b, strict=True) for r in pair], ["a", "b"] * SIZE)
    assert mixed[0::2].tolist() == compute_advantages(a, ["a"] * SIZE).tolist()
    assert mixed[1::2].tolist() == compute_advantages(b, ["b"] * SIZE).tolist()


def test_a_lost_sibling_leaves_every_other_group_as_it_was() -> None:
    first, second = make_group([1.0, 0.0, None, 1.0]), make_group([0.0, 1.0, 1.0, 1.0], task=TASKS[1], name="train/1/1")
    alone = [s.advantage for s in prepare([second])]
    together = [s.advantage for s in prepare([first, second], partial_groups="train") if s.group == second.id]
    assert together == alone


def test_planted_counting_is_refused_when_a_sibling_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make_group([1.0, 0.0, None, 1.0]), make_group([0.0, 1.0, 1.0, 1.0], task=TASKS[1], name="train/1/1")
    monkeypatch.setattr(samples, "compute_advantages", by_counting)
    with pytest.raises(InvariantError, match="add up to"):
        prepare([first, second], partial_groups="train")


def test_planted_counting_is_refused_when_siblings_are_interleaved(monkeypatch: pytest.MonkeyPatch) -> None:
    def interleaved(rewards: Sequence[float], group_ids: Sequence[str], **_: Any) -> torch.Tensor:
        columns = torch.arange(len(rewards)) % 2  # [p1, p2] * G, reshaped as if it were G copies of each
        return compute_advantages(rewards, columns)

    monkeypatch.setattr(samples, "compute_advantages", interleaved)
    with pytest.raises(InvariantError, match="add up to"):
        prepare([make_group([1.0, 0.0, 0.0, 0.0]), make_group([0.0, 1.0, 1.0, 1.0], task=TASKS[1], name="train/1/1")])
