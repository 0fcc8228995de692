"""Our guard inside TRL, and inside any Hugging Face `Trainer`.

`GuardedGRPOTrainer` takes the place of TRL's `GRPOTrainer`; `GuardCallback` is added to a trainer that stays as it is.
Everything loads on first use, and this package can be imported where TRL is not installed.

Read next: `trainer.py`; docs/guards_trl.md for users.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surefoot.trl_bridge.auxiliary import HintRow, score_pairs, sibling_hints
    from surefoot.trl_bridge.callback import GuardCallback
    from surefoot.trl_bridge.errors import ChannelDeadError, HeldOutEvalError
    from surefoot.trl_bridge.trainer import GuardedGRPOTrainer

_HOMES = {
    "GuardedGRPOTrainer": "trainer",
    "GuardCallback": "callback",
    "HeldOutEvalError": "errors",
    "ChannelDeadError": "errors",
    "HintRow": "auxiliary",
    "sibling_hints": "auxiliary",
    "score_pairs": "auxiliary",
}

__all__ = [
    "ChannelDeadError",
    "GuardCallback",
    "GuardedGRPOTrainer",
    "HeldOutEvalError",
    "HintRow",
    "score_pairs",
    "sibling_hints",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"surefoot.trl_bridge.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'surefoot.trl_bridge' has no attribute {name!r}")
