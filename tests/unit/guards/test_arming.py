"""Armed or not: by simulated runs that the real guard folds, with a remedy that was tried."""

from __future__ import annotations

import random
import re
import time
from typing import Any

import pytest

from surefoot.config import Config
from surefoot.config.schedule import Answered
from surefoot.errors import ConfigError
from surefoot.guards import arming
from surefoot.guards.arming import (
    ASSUMED,
    MOST_FALSE,
    Arming,
    ArmingInputs,
    Question,
    falling,
    falls_stopped,
    false_alarms,
    guard_lines,
    judge_arming,
    level,
    refuse_unarmed,
    thinned,
)
from surefoot.guards.auto_settings import ROWS, derived, guard_settings, row_for
from surefoot.guards.collapse import HeldOutGuard
from surefoot.guards.noise import proportion_se

OLD: dict[str, Any] = {"min_evals": 10, "decline_patience": 3, "ema_alpha": 0.1, "margin_se": 4.2}
"""What a run's guard had before its settings went by the number of evaluations."""


@pytest.fixture(autouse=True)
def _fresh() -> None:
    falls_stopped.cache_clear()
    false_alarms.cache_clear()


def config(**keys: Any) -> Config:
    return Config(model="m", tasks="t", **keys)


def judged(heldout: int, *, first: float | None = None, metric: str = "eval_accuracy", **keys: Any) -> Arming:
    found = judge_arming(config(**keys), heldout=Answered(heldout), metric=metric, first=first)
    assert found is not None
    return found


def asked(evaluations: int, tasks: int, first: float, *, metric: str = "eval_accuracy", **guard: Any) -> Question:
    keys = config(max_steps=evaluations - 1, eval_steps=1, eval_tasks=tasks, tasks_per_step=8, guard=guard)
    return ArmingInputs(metric, first).question(keys, tasks)


# -- the definition -------------------------------------------------------------------------------


def test_the_fall_is_over_the_middle_third_and_the_reward_gains_what_held_out_loses() -> None:
    question = asked(13, 60, 0.5)
    assert falling(question) == pytest.approx([0.5, 0.5, 0.5, 0.5, 0.5, 0.375, 0.25, 0.125, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert level(question) == [0.5] * 13
    assert [mean for mean, _ in arming._rewards(question, falling(question))][-1] == 1.0
    assert {mean for mean, _ in arming._rewards(question, level(question))} == {0.5}


def test_counts_of_right_answers_are_binomial() -> None:
    lowest, table = arming._cumulative(10, 0.3)
    chances = [b - a for a, b in zip([0.0, *table], [*table, 1.0], strict=True)]
    assert lowest == 0
    assert chances == pytest.approx(
        [0.0282, 0.1211, 0.2335, 0.2668, 0.2001, 0.1029, 0.0368, 0.0090, 0.0014, 0.0001, 0], abs=1e-4
    )
    assert arming._cumulative(5, 0.0) == (0, [])
    assert arming._cumulative(5, 1.0) == (5, [])
    low, large = arming._cumulative(100_000, 0.25)
    assert 20_000 < low < 25_000
    assert large[-1] == pytest.approx(1.0)


def test_a_simulated_fold_is_a_fold() -> None:
    """`fires` says after each value what `update` says: the simulated guard is the one that runs have."""
    dice = random.Random(3)
    for run in range(40):
        settings = guard_settings(config(), dice.choice([6, 9, 13, 21, 45]), "eval_accuracy") | {
            "max_proxy_real_gap": 0.3
        }
        one, other = HeldOutGuard(**settings), HeldOutGuard(**settings)
        for t in range(30):
            value = min(1.0, max(0.0, dice.gauss(0.5 - 0.02 * max(0, t - run / 2), 0.05)))
            reward, se = dice.gauss(0.5 + 0.01 * t, 0.03), proportion_se(value, 60) if run % 2 else None
            assert one.fires(reward, value, se) == other.update(t, reward, value, heldout_se=se).fire
    assert other.should_halt() == one.should_halt()


def test_a_fall_from_a_fifth_in_sixteen_evaluations_of_sixty_tasks_is_stopped() -> None:
    """It once ended in PASS: with the old settings the guard was not armed, and now it would say so."""
    now = judged(60, first=0.2, max_steps=15, eval_steps=1)
    assert now.evaluations == 16
    assert now.armed
    assert now.seen > 0.95
    before = judged(60, first=0.2, max_steps=15, eval_steps=1, guard=OLD)
    assert not before.armed
    assert "with 16 evaluations of 60 answers it stops" in before.why
    assert before.would_do == ("leaving out guard.min_evals, guard.decline_patience, guard.ema_alpha, guard.margin_se",)


def test_the_same_question_gets_the_same_answer() -> None:
    one = judged(40, max_steps=50, tasks_per_step=8)
    falls_stopped.cache_clear()
    false_alarms.cache_clear()
    assert judged(40, max_steps=50, tasks_per_step=8) == one
    assert one.first == ASSUMED
    assert not one.measured


def test_more_tasks_see_more_and_a_reward_without_a_standard_error_less() -> None:
    seen = [falls_stopped(asked(9, tasks, 0.25)) for tasks in (10, 20, 40, 80)]
    assert seen == sorted(seen)
    assert seen[-1] > 0.95
    assert falls_stopped(asked(9, 40, 0.25, metric="eval_reward")) < seen[2]


@pytest.mark.parametrize("evaluations", [6, 9, 13, 21])
@pytest.mark.parametrize(("first", "tasks"), [(0.1, 20), (0.5, 10), (0.8, 20), (0.95, 200)])
def test_settings_by_the_number_of_evaluations_keep_false_alarms_low(
    evaluations: int, first: float, tasks: int
) -> None:
    """A small form of benchmarks/guard_armed.py: at most 1 % of 400, with a chance of 1 in 1,000 to be wrong."""
    assert false_alarms(asked(evaluations, tasks, first), 400) <= 11 / 400


def test_planted_settings_without_a_margin_are_false_alarms() -> None:
    found = judged(60, max_steps=15, eval_steps=1, guard={"margin_se": 1.0})
    assert found.false_alarms > MOST_FALSE
    assert found.why.startswith("it would stop ")
    assert found.would_do == ("leaving out guard.margin_se",)


# -- not armed ------------------------------------------------------------------------------------


def test_a_guard_that_never_fires_is_not_armed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(60, max_steps=15, eval_steps=1).armed
    falls_stopped.cache_clear()
    monkeypatch.setattr(HeldOutGuard, "fires", lambda self, *numbers: False)
    found = judged(60, max_steps=15, eval_steps=1)
    assert not found.armed
    assert found.seen == 0.0
    assert found.would_do == (), "nothing helps a guard that is broken"


def test_a_guard_that_always_fires_is_not_armed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeldOutGuard, "fires", lambda self, *numbers: True)
    found = judged(60, max_steps=15, eval_steps=1)
    assert not found.armed
    assert found.false_alarms == 1.0


def test_endless_patience_is_not_armed_and_leaving_it_out_would_do() -> None:
    found = judged(60, max_steps=15, eval_steps=1, guard={"decline_patience": 100})
    assert not found.armed
    assert found.would_do == ("leaving out guard.decline_patience",)


def test_a_rule_that_does_not_look_at_held_out_does_not_arm() -> None:
    assert not judged(60, max_steps=15, eval_steps=1, guard={"rules": ("entropy_collapse",)}).armed


def test_a_start_at_zero_cannot_fall() -> None:
    for first, said in ((0.0, "nothing that could fall"), (-1.0, "nothing that could fall"), (7.0, "between 0 and 1")):
        found = judged(60, first=first, max_steps=15, eval_steps=1)
        assert not found.armed
        assert said in found.why
        assert found.would_do == ()


def test_off_and_nothing_held_out_are_neither() -> None:
    keys = {"heldout": Answered(60), "metric": "eval_accuracy"}
    assert judge_arming(config(guard={"mode": "off"}), **keys) is None  # type: ignore[arg-type]
    assert judge_arming(config(heldout_fraction=0.0, eval_steps=0), **keys) is None  # type: ignore[arg-type]
    assert judge_arming(config(), heldout=Answered(0), metric="eval_accuracy") is None


# -- what would do --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heldout", "keys"),
    [
        (100, {}), (200, {}), (24, {"max_steps": 60}), (24, {"max_steps": 60, "eval_steps": 20}),
        (8, {"max_steps": 2, "tasks_per_step": 2, "num_generations": 4}), (9, {"max_steps": 50, "tasks_per_step": 8}),
        (5, {"max_steps": 20, "eval_steps": 1}), (60, {"max_steps": 6, "eval_steps": 0}),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_said_to_do_does(heldout: int, keys: dict[str, Any]) -> None:
    found = judged(heldout, **keys)
    assert not found.armed
    assert found.would_do, found.words()
    for remedy in found.would_do:
        tasks, changed = applied(remedy, heldout, keys)
        again = judged(tasks, **changed)
        assert again.armed, f"{remedy}: {again.words()}"


def applied(remedy: str, heldout: int, keys: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The run after a remedy, read as a person would read it."""
    changed = dict(keys)
    tasks = int(match[1]) if (match := re.search(r"(\d+) held-out tasks", remedy)) else heldout
    if match := re.search(r"eval_tasks = (\d+)", remedy):
        tasks = changed["eval_tasks"] = int(match[1])
    if match := re.search(r"max_steps = (\d+)", remedy):
        changed["max_steps"] = int(match[1])
    if 'eval_steps = "auto"' in remedy:
        changed["eval_steps"] = "auto"
    assert (tasks, changed) != (heldout, keys), f"nothing to do in {remedy!r}"
    return tasks, changed


def test_one_step_less_would_not_do() -> None:
    (remedy,) = [words for words in judged(100).would_do if words.startswith("max_steps")]
    steps = int(remedy.split()[2])
    assert judged(100, max_steps=steps).armed
    assert not judged(100, max_steps=steps - 1).armed


# -- words ----------------------------------------------------------------------------------------


def test_the_plan_says_armed_with_the_rate_of_false_alarms() -> None:
    first, second = guard_lines(config(max_steps=50, tasks_per_step=8), heldout=Answered(40), metric="eval_accuracy")
    assert first == "guard     strict: a run that hurts the model stops with exit code 79, from evaluation 4 of 8 on"
    assert re.fullmatch(
        r" {10}armed: stops \d\d% of 1,000 simulated falls from 0\.25 \(assumed\) to 0, and \d\.\d % of healthy runs "
        r"\(expected false alarms\)",
        second,
    )


def test_the_plan_says_not_armed_once_with_what_would_do() -> None:
    lines = guard_lines(config(), heldout=Answered(100), metric="eval_accuracy")
    assert len(lines) == 1
    assert lines[0].startswith(
        "guard     strict, but not armed: 3 evaluations are planned, and it says nothing before number 4; would do: "
    )
    assert "eval_tasks = " in lines[0]
    assert "max_steps = " in lines[0]


@pytest.mark.config_key("guard.require")
def test_require_refuses_what_is_not_armed() -> None:
    strict = config(guard={"require": True})
    found = judge_arming(strict, heldout=Answered(100), metric="eval_accuracy")
    with pytest.raises(ConfigError, match="not armed: 3 evaluations") as caught:
        refuse_unarmed(strict, found)
    assert "would do: eval_tasks = " in caught.value.fix
    refuse_unarmed(config(), found)
    refuse_unarmed(strict, judged(60, max_steps=15, eval_steps=1))
    with pytest.raises(ConfigError, match="nothing is held out"):
        refuse_unarmed(strict, None)


# -- settings -------------------------------------------------------------------------------------


def test_rows_go_by_the_number_of_evaluations_and_a_written_number_stays() -> None:
    assert [row_for(n).min_evals for n in (1, 6, 7, 60, 61, 10_000)] == [4, 4, 4, 5, 10, 10]
    assert row_for(200)[1:] == (10, 3, 0.1, 4.2), "what a guard takes by itself"
    assert HeldOutGuard().limits == HeldOutGuard(**guard_settings(config(), 200, "eval_reward")).limits
    mixed = guard_settings(config(guard={"decline_patience": 7, "ema_alpha": 0.9}), 6, "eval_accuracy")
    assert (mixed["min_steps"], mixed["decline_patience"], mixed["ema_alpha"], mixed["margin_se"]) == (4, 7, 0.9, 2.6)
    margins = [guard_settings(config(), n, "eval_reward")["margin_se"] - row_for(n).margin_se for n in (13, 14, 60, 61)]
    assert margins == pytest.approx([0.0, 0.4, 0.4, 0.0])
    assert derived(config(guard={"min_evals": 5})) == ("decline_patience", "ema_alpha", "margin_se")
    assert [row.evaluations for row in ROWS] == sorted(row.evaluations for row in ROWS)


def test_long_runs_are_thinned_and_the_answer_stays_quick() -> None:
    question = asked(5001, 60, 0.25)
    short = thinned(question)
    assert len(short.where) == arming.MOST_FOLDS
    assert (short.where[0], short.where[-1]) == (0.0, 1.0)
    began = time.process_time()
    found = judged(200, max_steps=5000, eval_steps=1)
    assert found.armed
    assert found.evaluations == 5001
    assert 0.0 < found.false_alarms <= MOST_FALSE
    judged(60, max_steps=59, eval_steps=1)
    assert time.process_time() - began < 4.0, "a second or so where nothing else runs"


@pytest.mark.parametrize("most", [0, 1, 2, 3, 7, 8])
@pytest.mark.parametrize("last", range(10))
def test_the_largest_number_that_holds_is_found_wherever_it_lies(most: int, last: int) -> None:
    assert arming._largest(lambda n: n <= last, most) == min(last, most)
