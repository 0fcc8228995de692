"""The class that the guarded trainer extends: TRL's, or a stand-in where TRL is not installed.

Promises   only an absent TRL is replaced. One that is installed and broken fails with its own error.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from surefoot.errors import ConfigError


def _missing() -> ConfigError:
    return ConfigError(
        "TRL is not installed",
        "GuardedGRPOTrainer is TRL's GRPOTrainer with a guard inside; there is nothing to put it into",
        "pip install 'surefoot[trl]', or use `surefoot train`, whose guard needs no TRL",
    )


class MissingGRPOTrainer:
    """Has the methods that the guarded trainer calls on its parent, and refuses every one of them."""

    state: Any
    args: Any
    control: Any
    _metrics: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise _missing()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Refused."""
        raise _missing()

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        raise _missing()

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        raise _missing()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        raise _missing()

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        raise _missing()


if TYPE_CHECKING or importlib.util.find_spec("trl") is None:
    GRPOParent = MissingGRPOTrainer
else:
    from trl import GRPOTrainer as GRPOParent

__all__ = ["GRPOParent", "MissingGRPOTrainer"]
