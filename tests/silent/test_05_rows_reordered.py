"""Silent failure 05: rows sorted by length on the way to the learner, while the rewards stay in the old order."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from silent_kit import TASKS, make_engine, make_group, make_runtime, prepare, tiny_net

from surefoot import loop
from surefoot.errors import EngineError, InvariantError
from surefoot.learner.samples import to_samples


def test_every_reward_stays_with_the_tokens_that_earned_it() -> None:
    groups = make_runtime(make_engine(tiny_net())).collect(TASKS, step=1)
    for sample in prepare(groups):
        assert sample.reward == sum(sample.completion_ids) % 2


def test_planted_reordering_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def reordered(groups: Any, *, scale: str) -> Any:
        samples = to_samples(groups, scale=scale)
        rows = sorted(samples, key=lambda s: s.completion_ids, reverse=True)
        return [replace(row, reward=s.reward, advantage=s.advantage) for row, s in zip(rows, samples, strict=True)]

    monkeypatch.setattr(loop, "to_samples", reordered)
    with pytest.raises(InvariantError, match="another reward"):
        prepare([make_group([1.0, 0.0, 0.0, 1.0]), make_group([0.0, 1.0, 1.0, 1.0], task=TASKS[1], name="train/1/1")])


def test_planted_answers_in_another_order_are_refused() -> None:
    engine = make_engine(tiny_net())
    answer = engine.generate
    engine.generate = lambda requests: answer(requests)[::-1]  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="another order"):
        make_runtime(engine).collect(TASKS, step=1)
