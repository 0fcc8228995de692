"""The callback, driven by the events of a trainer that is not there."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from surefoot.errors import CollapseStopError
from surefoot.guards import HeldOutGuard
from surefoot.trl_bridge import GuardCallback

Make = Callable[..., Any]
FALLING = [0.28 - 0.05 * t for t in range(12)]


class Run:
    """A trainer's side of the events, with `log -> evaluate -> save` in the order in which trainers call them."""

    def __init__(self, callback: GuardCallback, folder: Path, *, saves: bool = True, limit: int | None = 2) -> None:
        self.callback, self.saves = callback, saves
        self.args = SimpleNamespace(output_dir=str(folder), save_total_limit=limit)
        self.state = SimpleNamespace(global_step=0, log_history=[])
        self.control = SimpleNamespace(should_training_stop=False, should_save=False)
        self.model = torch.nn.Dropout(0.5)
        self.limits_at_save: list[Any] = []

    def event(self, name: str, **kwargs: Any) -> None:
        getattr(self.callback, name)(self.args, self.state, self.control, model=self.model, **kwargs)

    def step(self, **logs: Any) -> None:
        self.event("on_step_begin")
        self.state.global_step += 1
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.event("on_log", logs=logs)
        if self.saves and self.control.should_save:
            self.limits_at_save.append(self.args.save_total_limit)
            (Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}").mkdir(parents=True)
            self.control.should_save = False
            self.event("on_save")

    def climb(self, steps: range) -> None:
        for t in steps:
            self.step(reward=0.3 + 0.03 * t)


def test_a_strict_stop_waits_for_the_checkpoint_then_raises(quick: Make, series: Any, tmp_path: Path) -> None:
    run = Run(GuardCallback(quick(), series(*FALLING)), tmp_path)
    with pytest.raises(CollapseStopError, match="held-out"):
        run.climb(range(12))
    assert run.state.global_step == 4
    assert run.limits_at_save == [None], "no older checkpoint is deleted for this one"
    assert run.args.save_total_limit == 2
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert verdict["checkpoint"] == "checkpoint-4"
    assert (tmp_path / "checkpoint-4" / "heldout_guard.json").exists()
    assert run.state.log_history[-1]["killswitch/fire"] == 1.0


@pytest.mark.parametrize("last", ["on_step_begin", "on_train_end"])
def test_a_trainer_that_never_saves_is_stopped_all_the_same(
    quick: Make, series: Any, tmp_path: Path, last: str
) -> None:
    run = Run(GuardCallback(quick(), series(*FALLING)), tmp_path, saves=False)
    run.climb(range(4))
    assert run.control.should_training_stop
    with pytest.raises(CollapseStopError):
        run.event(last)
    assert json.loads((tmp_path / "verdict.json").read_text())["checkpoint"] is None


def test_a_disk_that_refuses_does_not_hide_the_stop(quick: Make, series: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    run = Run(GuardCallback(quick(), series(*FALLING)), tmp_path / "file", saves=False)
    run.climb(range(4))
    with pytest.raises(CollapseStopError) as caught:
        run.event("on_train_end")
    assert any("not saved" in note for note in caught.value.__notes__)
    run = Run(GuardCallback(quick(), series(*FALLING), strict_killswitch=False), tmp_path / "file", saves=False)
    run.climb(range(4))
    with pytest.warns(UserWarning, match="not saved"):
        run.event("on_train_end")


def test_a_soft_stop_is_asked_for_again_at_every_event(quick: Make, series: Any, tmp_path: Path) -> None:
    run = Run(GuardCallback(quick(), series(*FALLING), strict_killswitch=False), tmp_path)
    run.climb(range(4))
    for event in ("on_step_begin", "on_train_end"):
        run.control.should_training_stop = False
        run.event(event)
        assert run.control.should_training_stop
    calls = run.callback.heldout_eval_fn.calls
    run.step(reward=1.0)
    assert run.callback.heldout_eval_fn.calls == calls


def test_logs_without_a_reward_and_a_second_log_of_a_step_are_no_folds(
    quick: Make, series: Any, tmp_path: Path
) -> None:
    run = Run(GuardCallback(quick(), series(0.5)), tmp_path)
    run.step(reward=0.5)
    run.event("on_log", logs={"reward": 0.5})
    run.event("on_log", logs={"eval_reward": 0.5})
    run.event("on_log", logs={"train_runtime": 3.0})
    run.event("on_log", logs=None)
    assert run.callback.heldout_eval_fn.calls == 1


@pytest.mark.filterwarnings("ignore:step")
def test_a_reward_of_none_or_nan_is_skipped_and_a_kl_of_none_is_a_breach(
    quick: Make, series: Any, tmp_path: Path
) -> None:
    run = Run(GuardCallback(quick(kl_hard_stop=0.5, min_steps=1), series(0.5)), tmp_path)
    run.step(reward=None, kl=0.1)
    run.step(reward=math.nan, kl=0.1)
    assert run.callback.heldout_eval_fn.calls == 0
    with pytest.raises(CollapseStopError, match="kl_to_init"):
        run.step(reward=0.5, kl=None)


def test_other_names_can_be_given_for_reward_and_kl(quick: Make, series: Any, tmp_path: Path) -> None:
    callback = GuardCallback(quick(), series(0.5), reward_key="objective/scores", kl_key="objective/kl")
    run = Run(callback, tmp_path)
    run.step(**{"objective/scores": 0.7, "objective/kl": 0.2, "reward": 9.0})
    status = callback.heldout_guard.last_status
    assert (status.reward, status.kl_ema) == (0.7, 0.2)


def test_the_model_is_in_eval_mode_meanwhile(quick: Make, tmp_path: Path) -> None:
    modes: list[bool] = []
    run = Run(GuardCallback(quick(), lambda: float(modes.append(run.model.training) or 0.5)), tmp_path)
    run.step(reward=0.5)
    assert modes == [False]
    assert run.model.training


def test_a_resumed_run_takes_up_the_guard_of_its_checkpoint(quick: Make, series: Any, tmp_path: Path) -> None:
    run = Run(GuardCallback(quick(), series(*FALLING)), tmp_path)
    for t in range(2):
        run.control.should_save = True
        run.step(reward=0.3 + 0.03 * t)
    again = Run(GuardCallback(quick(), series(*FALLING[2:])), tmp_path)
    again.state.global_step = 2
    again.event("on_train_begin")
    assert again.callback.heldout_guard.last_status.folds == 2
    with pytest.raises(CollapseStopError):
        again.climb(range(2, 12))
    assert again.state.global_step == 4, "as if the run had never been cut"
    third = Run(GuardCallback(quick(), series(0.5)), tmp_path)
    third.state.global_step = 4
    with pytest.raises(CollapseStopError):
        third.event("on_train_begin")


def test_a_checkpoint_without_a_guard_is_warned_about(quick: Make, series: Any, tmp_path: Path) -> None:
    run = Run(GuardCallback(quick(), series(0.5)), tmp_path)
    run.state.global_step = 3
    with pytest.warns(UserWarning, match="checkpoint-3 was saved without a guard"):
        run.event("on_train_begin")


def test_a_torn_guard_file_is_refused(quick: Make, series: Any, tmp_path: Path) -> None:
    from surefoot.errors import StateError

    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "heldout_guard.json").write_text('{"format": 1, "curv')
    run = Run(GuardCallback(quick(), series(0.5)), tmp_path)
    run.state.global_step = 3
    with pytest.raises(StateError, match="cannot be read"):
        run.event("on_train_begin")


def test_guard_and_evaluation_are_both_needed() -> None:
    for arguments in ((None, float), (HeldOutGuard(), None), (HeldOutGuard(), 0.5)):
        with pytest.raises(ValueError, match="heldout_eval_fn"):
            GuardCallback(*arguments)
