"""Silent failure 02: a fresh group id per rollout, so that every group has one member and the advantage is the reward."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from silent_kit import TASKS, make_engine, make_group, make_runtime, prepare, tiny_net

from surefoot import loop
from surefoot.errors import InvariantError, ShapeError
from surefoot.learner.samples import to_samples
from surefoot.maths.advantages import compute_advantages
from surefoot.records import Group


def test_every_collected_group_has_the_size_that_was_asked_for() -> None:
    groups = make_runtime(make_engine(tiny_net())).collect(TASKS, step=1)
    sizes = Counter(sample.group for sample in prepare(groups))
    assert sorted(sizes.values()) == [4, 4, 4]


def test_a_group_of_one_has_nothing_to_compare_with() -> None:
    assert compute_advantages([1.0, 0.0, 1.0], ["a", "b", "c"]).tolist() == [0.0, 0.0, 0.0]


def test_planted_id_per_rollout_is_refused_by_the_record() -> None:
    group = make_group([1.0, 0.0])
    with pytest.raises(ShapeError, match="strangers"):
        Group(group.task, group.id, tuple(replace(r, group=f"uuid-{r.index}") for r in group.rollouts))


def test_planted_id_per_sample_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def per_rollout(groups: Any, *, scale: str) -> Any:
        return [replace(s, group=f"uuid-{s.index}", advantage=s.reward) for s in to_samples(groups, scale=scale)]

    monkeypatch.setattr(loop, "to_samples", per_rollout)
    with pytest.raises(InvariantError, match="belongs to no rollout"):
        prepare([make_group([1.0, 0.0, 1.0, 0.0])])
