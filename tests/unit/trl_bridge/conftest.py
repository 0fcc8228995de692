"""The trainer as it is where TRL is not installed: nothing here waits for TRL, or needs it."""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import surefoot.trl_bridge as package
from surefoot.guards import HeldOutGuard

FRESH = ("surefoot.trl_bridge.trainer", "surefoot.trl_bridge.trainer")
"""The modules that look for TRL when they are imported."""


@pytest.fixture(scope="session")
def without_trl() -> Iterator[ModuleType]:
    """`surefoot.trl_bridge.trainer`, imported where `import trl` fails."""
    kept = {name: sys.modules.pop(name, None) for name in FRESH}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "trl", None)
        module = importlib.import_module(FRESH[1])
    yield module
    for name, earlier in kept.items():
        sys.modules.pop(name, None)
        if earlier is not None:
            sys.modules[name] = earlier
        vars(package).pop(name.rpartition(".")[2], None)


@pytest.fixture
def trainer_class(without_trl: ModuleType) -> Any:
    return without_trl.GuardedGRPOTrainer


@pytest.fixture(autouse=True)
def _same_excepthook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # a strict stop changes it


class Series:
    """A function that walks along a list, and counts."""

    def __init__(self, *values: Any) -> None:
        self.values, self.calls = values, 0

    def __call__(self) -> Any:
        self.calls += 1
        value = self.values[min(self.calls, len(self.values)) - 1]
        if isinstance(value, Exception):
            raise value
        return value


@pytest.fixture
def series() -> type[Series]:
    return Series


@pytest.fixture
def quick() -> Callable[..., HeldOutGuard]:
    return lambda **changes: HeldOutGuard(**({"min_steps": 3, "decline_patience": 3, "ema_alpha": 0.5} | changes))


@pytest.fixture
def stub(trainer_class: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """An instance that was never constructed, with the attributes that the contract names and no others."""
    monkeypatch.setattr(trainer_class.__bases__[0], "_compute_loss", lambda self, model, inputs: 1.0)

    def make(guard: Any = None, evaluate: Any = None, *, strict: bool = True, logging_steps: Any = 1) -> Any:
        trainer = trainer_class.__new__(trainer_class)
        trainer.heldout_guard, trainer.heldout_eval_fn, trainer.strict_killswitch = guard, evaluate, strict
        trainer.state = SimpleNamespace(global_step=0)
        trainer.args = SimpleNamespace(logging_steps=logging_steps)
        trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        trainer.control = SimpleNamespace(should_training_stop=False)
        trainer.logged = []
        trainer.log = trainer.logged.append
        return trainer

    return make
