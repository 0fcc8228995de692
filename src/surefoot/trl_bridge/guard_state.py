"""The guard's memory inside a checkpoint, so that a resumed run goes on with it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from surefoot.errors import StateError
from surefoot.store.durable import write_json
from surefoot.trl_bridge import ranks
from surefoot.trl_bridge.aftermath import GUARD_FILE


def save_guard(guard: Any, checkpoint: Path) -> None:
    """Write the guard's state into a checkpoint that the first rank has just made."""
    if guard is not None and hasattr(guard, "state_dict") and ranks.rank() == 0 and checkpoint.is_dir():
        write_json(checkpoint / GUARD_FILE, guard.state_dict())


def load_guard(guard: Any, checkpoint: Path) -> None:
    """Go on with the state that the first rank finds; a checkpoint without one gets a warning and a fresh guard."""
    if guard is None or not hasattr(guard, "load_state_dict"):
        return
    state = ranks.from_first(lambda: _read(checkpoint / GUARD_FILE))
    if state is None:
        warnings.warn(
            f"{checkpoint.name} was saved without a guard: this run's guard begins here, and its first fold is the "
            "new baseline",
            UserWarning,
            stacklevel=3,
        )
        return
    guard.load_state_dict(state)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StateError(
            f"{path} cannot be read: {error}",
            "a guard that goes on from half a state would judge a run that never was",
            f"resume from another checkpoint, or remove {path.name} to begin with a fresh guard",
        ) from error
    return found
