"""Silent failure 32: a fixed or reused seed per request, so that siblings, tasks or visits repeat each other's dice."""

from __future__ import annotations

from typing import Any

import pytest
from silent_kit import TASKS, make_engine, make_runtime, tiny_net

from surefoot.engines.scripted import ScriptedEngine
from surefoot.errors import InvariantError
from surefoot.guards.invariants import DiversityGuard
from surefoot.records import Group
from surefoot.runtime import requests

STEPS = (1, 2, 3)


def play(seed: int = 0) -> list[list[Group]]:
    """Three visits of the same tasks with unchanged weights: what repeats, repeats because of the seeds."""
    runtime = make_runtime(make_engine(tiny_net(spread=0.1)), seed=seed, size=8)
    return [runtime.collect(TASKS, step) for step in STEPS]


def seeds(seed: int = 0) -> list[int]:
    """The seed of every request of three steps and one evaluation."""
    engine = ScriptedEngine(lambda request: [3, 2])
    runtime = make_runtime(engine, seed=seed)
    for step in STEPS:
        runtime.collect(TASKS, step)
    runtime.evaluate(TASKS, step=3)
    return [request.seed for request in engine.requests]


def check() -> None:
    guard = DiversityGuard()
    for groups in play():
        guard.check(groups)


def check_unique() -> None:
    assert len(set(seeds())) == len(seeds()) == 48


def test_independent_draws_raise_no_alarm() -> None:
    check()


def test_every_request_of_a_run_has_its_own_seed() -> None:
    check_unique()


def test_the_seed_of_the_run_decides_every_rollout() -> None:
    assert play(seed=0) == play(seed=0)
    assert not set(seeds(0)) & set(seeds(1))


def test_a_policy_that_is_sure_of_itself_raises_no_alarm() -> None:
    runtime = make_runtime(ScriptedEngine(lambda request: [3, 2], logprob=-0.001), size=8)
    guard = DiversityGuard()
    assert [guard.check(runtime.collect(TASKS, step)) for step in STEPS] == [3, 3, 3]


@pytest.mark.parametrize(
    ("bug", "said"),
    [
        (lambda seed, *names: 42, "siblings are identical"),
        (lambda seed, *names: int(names[-1]), "equals the one of its last visit"),
    ],
    ids=["one seed for all", "the sibling's number only"],
)
def test_planted_seed_is_refused(monkeypatch: pytest.MonkeyPatch, bug: Any, said: str) -> None:
    monkeypatch.setattr(requests, "derive_seed", bug)
    with pytest.raises(InvariantError, match=said):
        check()
    with pytest.raises(AssertionError):
        check_unique()


def test_planted_seed_from_a_local_index_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Different tasks with the same dice: the guard cannot see it in the tokens, the seeds show it."""
    monkeypatch.setattr(requests, "derive_seed", lambda seed, purpose, step, task, i: hash((seed, purpose, step, i)))
    with pytest.raises(AssertionError):
        check_unique()
