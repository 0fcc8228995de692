"""What a person hears after step 1: each warning fires for its reason, with its remedy, and for no other."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from surefoot.config import Config
from surefoot.guards.noise import proportion_se
from surefoot.loop_state import StepClock, _noise, step_one_warnings, warnings_of
from surefoot.protocols import ParameterUpdates

MOVED = ParameterUpdates(total=3, with_gradient=3, moved=3, still=())
HEALTHY = {"completions/clipped_ratio": 0.1, "frac_reward_zero_std": 0.5}


def notes(
    metrics: dict[str, float] | None = None, census: ParameterUpdates | None = MOVED, **keys: Any
) -> list[tuple[str, str]]:
    return list(step_one_warnings(HEALTHY | (metrics or {}), census, Config(model="m", tasks="t", **keys)))


def test_a_healthy_first_step_is_met_with_silence() -> None:
    assert notes() == []


@pytest.mark.config_key("max_completion_length")
def test_mostly_truncated_completions_are_told_with_the_limit() -> None:
    ((what, remedy),) = notes({"completions/clipped_ratio": 0.97}, max_completion_length=77)
    assert "97% of completions were cut at max_completion_length = 77" in what
    assert "raise max_completion_length" in remedy


@pytest.mark.parametrize(("share", "warned"), [(0.5, False), (0.51, True)])
def test_half_truncated_is_not_most(share: float, warned: bool) -> None:
    assert bool(notes({"completions/clipped_ratio": share})) == warned


@pytest.mark.parametrize(("share", "warned"), [(0.99, False), (1.0, True)])
def test_equal_rewards_are_told_when_no_group_has_any_other(share: float, warned: bool) -> None:
    got = notes({"frac_reward_zero_std": share})
    assert bool(got) == warned
    if warned:
        ((what, remedy),) = got
        assert "all rewards were equal" in what
        assert "num_generations" in remedy


@pytest.mark.parametrize("census", [None, ParameterUpdates(3, 3, 0, ("a", "b", "c"))])
def test_weights_that_did_not_move_are_told_with_the_learning_rate(census: ParameterUpdates | None) -> None:
    ((what, remedy),) = notes(census=census, learning_rate=0.0)
    assert "no parameter changed" in what
    assert "learning_rate (now 0)" in remedy


def test_a_part_that_did_not_move_is_named() -> None:
    ((what, _),) = notes(census=ParameterUpdates(3, 2, 2, ("lm_head.weight",)))
    assert "1 of 3 parameter tensors did not move, first lm_head.weight" in what


RIGHT_OR_WRONG = {"eval_accuracy": 0.25, "eval_right": 15.0, "eval_n": 60.0, "eval_accuracy_stderr": 0.056}


@pytest.mark.parametrize(
    ("evaluation", "error"),
    [
        (RIGHT_OR_WRONG, proportion_se(0.25, 60)),
        (RIGHT_OR_WRONG | {"eval_pass@1": 0.25, "eval_pass@4": 0.5, "eval_accuracy_stderr": 0.11}, 0.11),
        ({"eval_accuracy": 0.25, "eval_n": 60.0, "eval_accuracy_stderr": 0.004}, 0.004),
        ({"eval_accuracy": 0.25, "eval_n": 60.0, "eval_accuracy_stderr": 0.0}, None),
        ({"eval_accuracy": 0.25, "eval_n": 1.0}, None),
    ],
    ids=["right or wrong", "several answers", "partial credit", "all the same", "one answer"],
)
def test_the_guard_is_told_the_noise_that_this_metric_has(evaluation: dict[str, float], error: float | None) -> None:
    """A share of 60 coins is neither a mean of 60 marks nor one of 15 tasks with four answers each."""
    assert _noise(evaluation, "eval_accuracy", 0.25) == error
    assert _noise(evaluation | {"eval_reward": 0.25}, "eval_reward", 0.25) is None


@pytest.mark.parametrize(("step", "warned"), [(1, True), (2, False)])
def test_the_loop_asks_for_them_after_its_first_step_alone(step: int, warned: bool) -> None:
    silent = SimpleNamespace(step=lambda metrics, groups: iter(()))
    run: Any = SimpleNamespace(
        step=step, config=Config(model="m", tasks="t"), tool_alarms=silent,
        learner=SimpleNamespace(facts=SimpleNamespace(parameter_updates=MOVED)),
    )  # fmt: skip
    found = list(warnings_of(run, HEALTHY | {"completions/clipped_ratio": 0.97}, ()))
    assert bool(found) == warned


def test_a_clock_that_was_not_started_shows_nothing() -> None:
    clock = StepClock()
    assert (clock.seconds, clock.eval_seconds, clock.seconds_before) == (0.0, 0.0, 0.0)


def test_tokens_per_second_of_a_short_step_are_those_of_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 10.25])
    monkeypatch.setattr("surefoot.loop_state.time.perf_counter", lambda: next(now))
    clock = StepClock()
    clock.start_step()
    line = clock.line(100)
    assert (line["step_time"], line["tokens_per_second"]) == (0.25, 400.0)
