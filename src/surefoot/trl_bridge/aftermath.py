"""What a stop leaves behind: the verdict beside the checkpoints, and an exit code of its own.

Promises   verdict.json is whole or not there; it names the checkpoint of the stop and the last one from before the
           decline; a script that does not catch `CollapseStopError` exits with 79.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Any

from surefoot.errors import CollapseStopError
from surefoot.records import Verdict
from surefoot.store.durable import write_json

VERDICT_FILE = "verdict.json"
GUARD_FILE = "heldout_guard.json"
"""The guard's state inside a checkpoint."""


def checkpoints_in(folder: Path) -> dict[int, str]:
    """`checkpoint-N` folders by step."""
    found = (re.fullmatch(r"checkpoint-(\d+)", path.name) for path in folder.glob("checkpoint-*") if path.is_dir())
    return {int(match[1]): match[0] for match in found if match}


def steps_until(checkpoint: Path) -> set[int]:
    """The steps of a checkpoint and of those beside it from before: the history of a run that is resumed from it."""
    match = re.fullmatch(r"checkpoint-(\d+)", checkpoint.name)
    return {step for step in checkpoints_in(checkpoint.parent) if match and step <= int(match[1])}


def write_verdict(folder: Path, status: Any, *, strict: bool, own: Collection[int], curves: str = "") -> Path:
    """Write verdict.json into the trainer's output folder.

    Args:
        own: steps at which this run saved a checkpoint; what else lies in the folder is another run's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    saved = {step: name for step, name in checkpoints_in(folder).items() if step in own}
    good = [step for step in saved if step <= getattr(status, "best_step", -1)]
    facts = {
        "status": str(Verdict.FAIL),
        "reasons": [getattr(status, "reason", "") or "the guard fired"],
        "exit_code": CollapseStopError.exit_code if strict else None,
        "checkpoint": saved.get(getattr(status, "step", -1)),
        "checkpoint_before_decline": saved[max(good)] if good else None,
        "guard": plain(status),
    }
    if curves:
        facts["curves"] = curves.splitlines()
    write_json(folder / VERDICT_FILE, facts)
    return folder / VERDICT_FILE


def plain(status: Any) -> dict[str, Any]:
    """The status as JSON; a number that is not finite is left out."""
    values = dataclasses.asdict(status) if dataclasses.is_dataclass(type(status)) else {"fire": bool(status.fire)}
    return {k: v for k, v in values.items() if not isinstance(v, float) or math.isfinite(v)}


def exit_with_own_code() -> None:
    """Let an uncaught `CollapseStopError` end the process with its own code instead of Python's 1."""
    earlier = sys.excepthook
    if getattr(earlier, "knows_collapse", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        earlier(kind, error, trace)
        if isinstance(error, CollapseStopError):
            sys.stderr.flush()
            raise SystemExit(error.exit_code)

    hook.knows_collapse = True  # type: ignore[attr-defined]
    sys.excepthook = hook
