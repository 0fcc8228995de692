"""A stop: said, saved and lasting, on instances that have only what the contract names."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from trl_kit import FALLING, Make, collapse

from surefoot.errors import CollapseStopError


def test_a_strict_stop_logs_before_it_raises_and_carries_the_status(stub: Make, quick: Make, series: Any) -> None:
    trainer = stub(quick(), series(*FALLING))
    with pytest.raises(CollapseStopError) as caught:
        collapse(trainer)
    status = caught.value.status
    assert status.fire
    assert status.step == 3
    assert "held-out" in status.reason
    assert status.proxy_real_gap == pytest.approx(0.17, abs=0.01)
    assert status.kl_ema is None
    assert "step 3" in str(caught.value)
    (record,) = trainer.logged
    assert record["killswitch/fire"] == 1.0
    assert caught.value.exit_code == 79


def test_the_verdict_is_written_before_the_raise(stub: Make, quick: Make, series: Any, tmp_path: Path) -> None:
    trainer = stub(quick(), series(*FALLING))
    trainer.args.output_dir = str(tmp_path / "my run, über")
    for step in (0, 1):
        (tmp_path / "my run, über" / f"checkpoint-{step}").mkdir(parents=True)
    trainer._killswitch.saved.add(0)
    with pytest.raises(CollapseStopError):
        collapse(trainer)
    verdict = json.loads((tmp_path / "my run, über" / "verdict.json").read_text())
    assert verdict["status"] == "FAIL"
    assert "held-out" in verdict["reasons"][0]
    assert verdict["guard"]["step"] == 3
    assert verdict["checkpoint_before_decline"] == "checkpoint-0"


def test_a_disk_that_refuses_does_not_keep_the_run_going(stub: Make, quick: Make, series: Any, tmp_path: Path) -> None:
    trainer = stub(quick(), series(*FALLING))
    (tmp_path / "file").write_text("in the way")
    trainer.args.output_dir = str(tmp_path / "file" / "folder")
    with pytest.raises(CollapseStopError) as caught:
        collapse(trainer)
    assert any("not saved" in note for note in caught.value.__notes__)


def test_whoever_catches_the_error_and_goes_on_meets_it_again(stub: Make, quick: Make, series: Any) -> None:
    trainer = stub(quick(), series(*FALLING))
    with pytest.raises(CollapseStopError):
        collapse(trainer)
    calls = trainer.heldout_eval_fn.calls
    for step in (4, 5):
        trainer.state.global_step = step
        with pytest.raises(CollapseStopError, match="step 3"):
            trainer._maybe_update_killswitch()
        with pytest.raises(CollapseStopError, match="step 3"):
            trainer._compute_loss(None, {})
    assert trainer.heldout_eval_fn.calls == calls
    assert len(trainer.logged) == 1, "reported once"


def soft_stop_holds(trainer: Any) -> None:
    collapse(trainer, steps=5)
    assert trainer.control.should_training_stop
    trainer.control.should_training_stop = False  # as some frameworks do at every step
    trainer.state.global_step = 5
    trainer._maybe_update_killswitch()
    assert trainer.control.should_training_stop, "asserted again by the next fold"
    trainer.control.should_training_stop = False
    trainer.state.global_step = 6
    trainer.args.logging_steps = 100
    trainer._compute_loss(None, {})
    assert trainer.control.should_training_stop, "and by the next step, fold or not"


def test_a_soft_stop_raises_nothing_and_stays(stub: Make, quick: Make, series: Any) -> None:
    trainer = stub(quick(), series(*FALLING), strict=False)
    soft_stop_holds(trainer)
    assert sum("killswitch/fire" in record for record in trainer.logged) == 1


def test_planted_guard_that_never_latches_is_seen(
    stub: Make, quick: Make, series: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping = importlib.import_module("surefoot.trl_bridge.guard")
    real = stopping.insist
    asked: list[int] = []

    def once(trainer: Any, status: Any, trouble: Any = None) -> None:
        asked.append(1)
        if len(asked) == 1:
            real(trainer, status, trouble)

    monkeypatch.setattr(stopping, "insist", once)
    with pytest.raises(AssertionError):
        soft_stop_holds(stub(quick(), series(*FALLING), strict=False))


def test_a_healthy_run_of_39_folds_is_left_alone(stub: Make, quick: Make, series: Any) -> None:
    trainer = stub(quick(), series(*[0.28 + 0.01 * t for t in range(39)]))
    for t in range(39):
        trainer.state.global_step = t
        trainer._metrics["train"]["reward"].append(0.30 + 0.01 * t)
        trainer._metrics["train"]["kl"].append(0.03)
        trainer._maybe_update_killswitch()
    assert not trainer.heldout_guard.should_halt()
    assert trainer.logged == []
    assert not trainer.control.should_training_stop


def test_the_fire_record_does_not_cost_the_step_its_own_metrics(stub: Make, quick: Make, series: Any) -> None:
    trainer = stub(quick(), series(*FALLING), strict=False)
    store, sent = trainer._metrics["train"], []

    def like_trl(logs: dict[str, float]) -> None:
        sent.append(logs | {name: sum(v) / len(v) for name, v in store.items()})
        store.clear()

    trainer.log = like_trl
    store["entropy"].append(1.5)
    collapse(trainer, steps=4)
    assert sent[0]["killswitch/fire"] == 1.0, "not averaged with the zeros of earlier folds"
    assert sent[0]["entropy"] == 1.5
    assert store["entropy"] == [1.5]
    assert store["reward"][-1] == pytest.approx(0.39)
