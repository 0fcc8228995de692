"""The trainer's construction, cadence and composition, on instances that have only what the contract names."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from trl_kit import FALLING, Make, collapse

from surefoot.errors import CollapseStopError, ConfigError, NumericsError
from surefoot.guards import HeldOutGuard
from surefoot.trl_bridge import ChannelDeadError
from surefoot.trl_bridge.guard import FoldState

# -- construction -------------------------------------------------------------------


def test_importing_without_trl_works_and_the_base_is_a_class_that_explains_itself(without_trl: ModuleType) -> None:
    base = without_trl.GuardedGRPOTrainer.__bases__[0]
    assert base is not object
    assert base.__name__ == "MissingGRPOTrainer"
    with pytest.raises(ConfigError, match="TRL is not installed"):
        without_trl.GuardedGRPOTrainer(model="x")


def test_importing_the_package_imports_neither_trl_nor_torch() -> None:
    code = "import surefoot.trl_bridge, sys; print([m for m in ('trl', 'torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_installed_but_broken_trl_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "trl.py").write_text("raise RuntimeError('half an installation')\n")
    code = "import sys; sys.path.insert(0, sys.argv[1]); import surefoot.trl_bridge.trainer"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "half an installation" in done.stderr


def test_defaults_are_stored_and_everything_else_goes_to_the_parent(
    trainer_class: Any, monkeypatch: pytest.MonkeyPatch, quick: Make
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(trainer_class.__bases__[0], "__init__", lambda self, *a, **k: seen.append((a, k)))
    trainer = trainer_class()
    assert (trainer.heldout_guard, trainer.heldout_eval_fn, trainer.strict_killswitch) == (None, None, True)
    assert (trainer.alpha_sdpo, trainer.beta_replay) == (0.0, 0.0)
    trainer._maybe_update_killswitch()
    guard, evaluate = quick(), lambda: 1.0
    trainer = trainer_class("m", heldout_guard=guard, heldout_eval_fn=evaluate, strict_killswitch=False, callbacks=[1])
    assert (trainer.heldout_guard, trainer.heldout_eval_fn, trainer.strict_killswitch) == (guard, evaluate, False)
    assert seen == [((), {}), (("m",), {"callbacks": [1]})]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"heldout_guard": HeldOutGuard()}, "heldout_eval_fn"),
        ({"heldout_guard": HeldOutGuard(), "heldout_eval_fn": 0.5}, "heldout_eval_fn"),
        ({"heldout_guard": HeldOutGuard(), "heldout_eval_fn": float, "heldout_eval_timeout": 0}, "timeout"),
        (
            {"heldout_guard": HeldOutGuard(), "heldout_eval_fn": float, "args": SimpleNamespace(logging_steps=0)},
            "logging_steps",
        ),
        ({"alpha_sdpo": -0.1, "sdpo_hints": "hint"}, "alpha_sdpo"),
        ({"alpha_sdpo": math.nan, "sdpo_hints": "hint"}, "alpha_sdpo"),
        ({"alpha_sdpo": True, "sdpo_hints": "hint"}, "alpha_sdpo"),
        ({"alpha_sdpo": 0.1}, "sdpo_hints"),
        ({"alpha_sdpo": 0.1, "sdpo_hints": ""}, "sdpo_hints"),
        ({"alpha_sdpo": 0.1, "sdpo_hints": "hint", "sdpo_mixing": 2}, "sdpo_mixing"),
        ({"alpha_sdpo": 0.1, "sdpo_hints": "hint", "channel_dead_steps": 0}, "channel_dead_steps"),
        ({"beta_replay": -1}, "beta_replay"),
        ({"beta_replay": 0.1}, "replay_pairs"),
        ({"beta_replay": 0.1, "replay_pairs": []}, "no pair"),
        ({"beta_replay": 0.1, "replay_pairs": [], "replay_per_batch": 0}, "replay_per_batch"),
    ],
)
def test_a_refused_argument_is_a_value_error_before_the_parent_is_reached(
    trainer_class: Any, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], text: str
) -> None:
    reached: list[int] = []
    monkeypatch.setattr(trainer_class.__bases__[0], "__init__", lambda self, *a, **k: reached.append(1))
    with pytest.raises(ValueError, match=text):
        trainer_class(**arguments)
    assert reached == []


def test_an_evaluation_without_a_guard_is_inert_and_warned_about_once(
    trainer_class: Any, monkeypatch: pytest.MonkeyPatch, series: Any
) -> None:
    monkeypatch.setattr(trainer_class.__bases__[0], "__init__", lambda self, *a, **k: None)
    evaluate = series(0.5)
    with pytest.warns(UserWarning, match="never called") as found:
        trainer = trainer_class(heldout_eval_fn=evaluate)
    trainer._maybe_update_killswitch()
    assert len(found) == 1
    assert evaluate.calls == 0


# -- cadence ------------------------------------------------------------------------


def folds_of_35_steps(trainer: Any, repeats: int) -> list[int]:
    steps = []
    for step in range(35):
        trainer.state.global_step = step
        trainer._metrics["train"]["reward"].append(0.5)
        for _ in range(repeats):
            before = trainer.heldout_eval_fn.calls
            assert trainer._compute_loss(None, {}) == 1.0
            steps += [step] * (trainer.heldout_eval_fn.calls - before)
    return steps


@pytest.mark.parametrize("repeats", [1, 4])
def test_35_steps_at_10_fold_four_times_however_often_the_loss_is_computed(
    stub: Make, quick: Make, series: Any, repeats: int
) -> None:
    trainer = stub(quick(min_steps=50), series(0.5), logging_steps=10)
    assert folds_of_35_steps(trainer, repeats) == [0, 10, 20, 30]
    assert trainer.heldout_guard.last_status.folds == 4


def test_planted_fold_at_every_microbatch_is_seen(
    stub: Make, quick: Make, series: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FoldState, "is_new", lambda self, step: True)
    assert len(folds_of_35_steps(stub(quick(min_steps=50), series(0.5), logging_steps=10), 4)) == 16


def test_a_share_of_the_run_is_counted_once_its_length_is_known(stub: Make, quick: Make, series: Any) -> None:
    trainer = stub(quick(min_steps=50), series(0.5), logging_steps=0.3)
    with pytest.raises(ValueError, match="logging_steps"):
        trainer._compute_loss(None, {})
    trainer.state.max_steps = 35
    assert folds_of_35_steps(trainer, 2) == [0, 11, 22, 33]


def test_somebodys_own_guard_works_too(stub: Make, series: Any) -> None:
    class Own:
        last_status: Any = None

        def should_halt(self) -> bool:
            return self.last_status is not None and self.last_status.fire

        def update(self, step: int, reward: float, heldout: float, kl: float | None) -> None:
            self.last_status = SimpleNamespace(
                fire=heldout < 0.2, reason="low", step=step, proxy_real_gap=1.0, kl_ema=kl
            )

    trainer = stub(Own(), series(*FALLING))
    with pytest.raises(CollapseStopError, match="step 2: low"):
        collapse(trainer)
    assert trainer.logged[0]["killswitch/proxy_real_gap"] == 1.0


def test_the_gate_asks_for_a_fold_even_where_the_fold_is_replaced(stub: Make) -> None:
    trainer = stub(None, None, logging_steps=10)
    folds = []
    trainer._maybe_update_killswitch = lambda: folds.append(trainer.state.global_step)
    for step in range(35):
        trainer.state.global_step = step
        trainer._compute_loss(None, {})
    assert folds == [0, 10, 20, 30]


def test_no_fold_while_the_model_is_being_evaluated(stub: Make, quick: Make, series: Any) -> None:
    trainer = stub(quick(), series(0.5))
    trainer.model = torch.nn.Linear(1, 1).eval()
    trainer._metrics["train"]["reward"].append(0.5)
    trainer._compute_loss(None, {})
    assert trainer.heldout_eval_fn.calls == 0
    trainer.model.train()
    trainer._compute_loss(None, {})
    assert trainer.heldout_eval_fn.calls == 1


# -- composition --------------------------------------------------------------------


def test_the_total_is_the_parents_loss_when_both_weights_are_zero(stub: Make) -> None:
    trainer = stub()
    called: list[str] = []
    trainer._compute_sdpo_loss = lambda *a: called.append("sdpo")
    trainer._compute_trace_replay_loss = lambda *a: called.append("replay")
    assert trainer._compute_loss(None, {}) == pytest.approx(1.0)
    assert called == [], "no extra forward pass"


def test_an_instance_with_nothing_but_the_losses_adds_them_up(trainer_class: Any, stub: Make) -> None:
    trainer = trainer_class.__new__(trainer_class)
    trainer.heldout_guard, trainer.alpha_sdpo, trainer.beta_replay = None, 0.5, 0.25
    trainer._compute_sdpo_loss = lambda model, inputs: torch.tensor(2.0)
    trainer._compute_trace_replay_loss = lambda model, inputs: torch.tensor(4.0)
    assert float(trainer._compute_loss(None, {})) == pytest.approx(1.0 + 0.5 * 2.0 + 0.25 * 4.0)


@pytest.mark.parametrize("name", ["sdpo", "replay"])
def test_a_component_that_is_not_finite_is_named(stub: Make, name: str) -> None:
    trainer = stub()
    trainer.alpha_sdpo, trainer.beta_replay = (1.0, 0.0) if name == "sdpo" else (0.0, 1.0)
    trainer._compute_sdpo_loss = trainer._compute_trace_replay_loss = lambda *a: torch.tensor(math.nan)
    trainer.state.global_step = 4
    with pytest.raises(NumericsError, match=f"step 4: the {name} loss is nan"):
        trainer._compute_loss(None, {})


def test_a_dead_channel_is_not_confused_with_other_errors() -> None:
    assert ChannelDeadError.exit_code == 1
