"""One fold: what it is fed, what it writes, and when it does not happen."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from surefoot.errors import CollapseStopError, InputError
from surefoot.guards import HeldOutGuard
from surefoot.trl_bridge import HeldOutEvalError
from surefoot.trl_bridge.guard import BLIND_FOLDS

Make = Callable[..., Any]


def collapse(trainer: Any, steps: int = 12) -> None:
    """The reward rises by 0.03 per step; what held-out does is the trainer's evaluation."""
    for t in range(steps):
        trainer.state.global_step = t
        trainer._metrics["train"]["reward"].append(0.30 + 0.03 * t)
        trainer._maybe_update_killswitch()


# -- one fold -----------------------------------------------------------------------


def test_without_a_guard_nothing_is_touched_for_fifty_steps(trainer_class: Any, series: Any) -> None:
    trainer = trainer_class.__new__(trainer_class)
    trainer.heldout_guard, trainer.heldout_eval_fn = None, series(0.5)
    for _ in range(50):
        trainer._maybe_update_killswitch()
    assert trainer.heldout_eval_fn.calls == 0
    assert set(vars(trainer)) == {"heldout_guard", "heldout_eval_fn"}


@pytest.mark.filterwarnings("ignore:step")
@pytest.mark.parametrize("store", [{}, {"reward": None}, {"reward": []}, {"reward": [0.5, math.nan]}], ids=str)
def test_no_usable_reward_means_no_evaluation_and_no_fold(
    stub: Make, quick: Make, series: Any, store: dict[str, Any]
) -> None:
    trainer = stub(quick(), series(0.5))
    trainer._metrics["train"] = store
    trainer._maybe_update_killswitch()
    assert trainer.heldout_eval_fn.calls == 0
    assert trainer.heldout_guard.last_status is None
    assert "killswitch/fire" not in store, "nothing is invented"


def test_skipping_says_so_once_and_a_guard_that_stays_blind_is_an_error(stub: Make, quick: Make, series: Any) -> None:
    trainer = stub(quick(), series(0.5))
    trainer._metrics["train"]["reward"].append(math.nan)
    with pytest.warns(UserWarning, match="the reward is nan"):
        trainer._maybe_update_killswitch()
    for _ in range(BLIND_FOLDS - 2):
        trainer._maybe_update_killswitch()  # a second warning would be an error
    with pytest.raises(InputError, match=f"for {BLIND_FOLDS} folds in a row"):
        trainer._maybe_update_killswitch()


@pytest.mark.filterwarnings("ignore:step")
def test_a_reward_in_between_starts_the_count_of_blind_folds_again(stub: Make, quick: Make, series: Any) -> None:
    trainer = stub(quick(), series(0.5))
    for t in range(3 * BLIND_FOLDS):
        trainer.state.global_step = t
        trainer._metrics["train"]["reward"].append(0.5 if t % 5 == 0 else math.nan)
        trainer._maybe_update_killswitch()
    assert trainer.heldout_guard.last_status.folds == 3 * BLIND_FOLDS // 5


def test_the_fold_takes_the_tails_and_leaves_them_there(stub: Make, quick: Make, series: Any) -> None:
    trainer = stub(quick(), series(0.25))
    trainer.state.global_step = 7
    trainer._metrics["train"] |= {"reward": [0.1, 0.9], "kl": [9.0, 0.04]}
    trainer._maybe_update_killswitch()
    status = trainer.heldout_guard.last_status
    assert (status.step, status.reward, status.heldout, status.kl_ema) == (7, 0.9, 0.25, 0.04)
    assert trainer.heldout_eval_fn.calls == 1
    assert trainer._metrics["train"]["reward"] == [0.1, 0.9]
    keys = {name for name in trainer._metrics["train"] if name.startswith("killswitch/")}
    wanted = "fire heldout heldout_ema reward_ema proxy_real_gap kl_ema streak".split()
    assert keys >= {f"killswitch/{name}" for name in wanted}
    assert trainer._metrics["train"]["killswitch/fire"] == [0.0]
    assert trainer.logged == [], "TRL's log would clear the step's other metrics"


def test_an_absent_kl_stays_none_and_is_warned_about_by_a_deadline(stub: Make, quick: Make, series: Any) -> None:
    trainer = stub(quick(kl_hard_stop=0.2, decline_patience=100), series(0.5))
    with pytest.warns(UserWarning, match="'kl' is on.*beta is 0") as found:
        collapse(trainer, steps=6)
    assert len(found) == 1
    assert trainer.heldout_guard.last_status.kl_ema is None
    assert "killswitch/kl_ema" not in trainer._metrics["train"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_kl_that_is_not_finite_is_a_breach(stub: Make, quick: Make, series: Any, value: float) -> None:
    trainer = stub(quick(kl_hard_stop=0.2, decline_patience=100), series(0.5))
    trainer._metrics["train"]["kl"].append(value)
    with pytest.raises(CollapseStopError, match="kl_to_init"):
        collapse(trainer)


def test_a_kl_jump_stops_a_run_whose_curves_are_flat(stub: Make, quick: Make, series: Any) -> None:
    trainer = stub(quick(kl_hard_stop=0.1, decline_patience=100), series(0.3))
    for t in range(20):
        trainer.state.global_step = t
        trainer._metrics["train"] = {"reward": [0.5], "kl": [0.04 if t < 4 else 0.30]}
        try:
            trainer._maybe_update_killswitch()
        except CollapseStopError as error:
            caught = SimpleNamespace(value=error)
            break
    assert "kl_to_init" in str(caught.value)
    assert caught.value.status.kl_ema > 0.1
    assert caught.value.status.step >= 4


def test_other_rules_are_fed_from_the_metric_store(stub: Make, series: Any) -> None:
    guard = HeldOutGuard(rules=["entropy_collapse", "length_explosion", "reward_saturated"], min_steps=2)
    trainer = stub(guard, series(0.5))
    trainer._metrics["train"] |= {"entropy": [1.0], "completions/mean_length": [20.0], "reward_std": [0.1]}
    collapse(trainer, steps=3)  # an unfed rule would warn, and warnings are errors
    assert trainer.heldout_guard.last_status.unfed == ()


# -- evaluation ---------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, None, "0.5", True, b"1", [0.5, 0.6]], ids=repr)
def test_a_value_that_is_no_number_is_a_value_error_that_names_it(
    stub: Make, quick: Make, series: Any, value: Any
) -> None:
    trainer = stub(quick(), series(value))
    trainer.state.global_step = 30
    trainer._metrics["train"]["reward"].append(0.5)
    with pytest.raises(ValueError, match="step 30") as caught:
        trainer._maybe_update_killswitch()
    assert repr(value) in str(caught.value)
    assert trainer.heldout_guard.last_status is None


def test_a_raising_evaluation_is_wrapped_with_the_step(stub: Make, quick: Make, series: Any) -> None:
    trainer = stub(quick(), series(KeyError("accuracy")))
    trainer.state.global_step = 20
    trainer._metrics["train"]["reward"].append(0.5)
    with pytest.raises(HeldOutEvalError, match=r"step 20.*KeyError.*accuracy") as caught:
        trainer._maybe_update_killswitch()
    assert isinstance(caught.value.__cause__, KeyError)
