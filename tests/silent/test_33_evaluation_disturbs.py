"""Silent failure 33: evaluation draws from the training streams, so that looking on changes what is trained."""

from __future__ import annotations

import itertools

import pytest
import torch
from silent_kit import TASKS, make_engine, make_runtime, tiny_net

from surefoot.records import Group
from surefoot.runtime import requests


def collected(*, look: bool) -> list[Group]:
    runtime = make_runtime(make_engine(tiny_net()))
    groups = runtime.collect(TASKS, 1)
    if look:
        for _ in range(2):
            runtime.evaluate(TASKS, step=1)
    return groups + runtime.collect(TASKS, 2)


def check() -> None:
    assert collected(look=True) == collected(look=False)


def test_evaluation_changes_no_training_rollout() -> None:
    check()


def test_two_evaluations_of_the_same_weights_are_equal_and_leave_the_global_dice_alone() -> None:
    runtime = make_runtime(make_engine(tiny_net()))
    state = torch.random.get_rng_state()
    assert runtime.evaluate(TASKS, step=1) == runtime.evaluate(TASKS, step=5)
    assert torch.equal(state, torch.random.get_rng_state())


def test_planted_running_counter_as_seed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_with_counter() -> None:
        left, right = itertools.count(), itertools.count()
        monkeypatch.setattr(requests, "derive_seed", lambda *names: next(left))
        with_eval = collected(look=True)
        monkeypatch.setattr(requests, "derive_seed", lambda *names: next(right))
        assert with_eval == collected(look=False)

    with pytest.raises(AssertionError):
        check_with_counter()
