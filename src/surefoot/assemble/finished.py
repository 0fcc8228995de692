"""A run that is over is asked for once more: its verdict is shown again, and not one byte of its folder changes.

Promises   only a run whose last process ended in order is taken for finished: its verdict is final, of the length that
           its config has, and nobody's lock is left. Everything else goes on as usual.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surefoot.assemble.ending import Outcome
from surefoot.assemble.given import recorded, way_to_evaluate
from surefoot.config import Config
from surefoot.errors import CollapseStopError, StateError
from surefoot.guards.verdict import way_out
from surefoot.records import Verdict
from surefoot.store.lock import LOCK
from surefoot.store.run_folder import RunFolder
from surefoot.tracking.console import View
from surefoot.tracking.log import read_metrics
from surefoot.tracking.text import python_call, shown_path


def final_verdict(folder: RunFolder, config: Config) -> dict[str, Any] | None:
    """What verdict.json says of a run that is over; None when it is not."""
    verdict = folder.read_verdict()
    if type(verdict.get("exit_code")) is not int or not _is_ours(verdict):
        return None  # stopped, failed on the way, of a version that did not say, or changed by somebody
    whole = verdict["planned_steps"] == verdict["executed_steps"] or stopped_by_guard(verdict)
    if not whole or verdict["planned_steps"] != config.max_steps or (folder.root / LOCK).exists():
        return None
    return verdict


def _is_ours(verdict: dict[str, Any]) -> bool:
    """Whether everything that is shown of it has the form in which a run writes it."""
    best, guard = verdict.get("best"), verdict.get("guard")
    reasons, numbers = verdict.get("reasons"), verdict.get("metrics")
    return (
        verdict["exit_code"] in (0, 1, CollapseStopError.exit_code)
        and verdict.get("status") in [str(each) for each in Verdict]
        and all(type(verdict.get(name)) is int for name in ("planned_steps", "executed_steps"))
        and isinstance(reasons, list)
        and all(isinstance(reason, str) for reason in reasons)
        and isinstance(numbers, dict)
        and all(map(_is_number, [*numbers.values(), verdict.get("seconds")]))
        and (best is None or (isinstance(best, dict) and isinstance(best.get("checkpoint", None), str | None)))
        and (best is None or {"step", "checkpoint"} <= best.keys())
        and (
            guard is None
            or (isinstance(guard, dict) and (not guard.get("fired") or {"step", "reason"} <= guard.keys()))
        )
        and (verdict["exit_code"] != CollapseStopError.exit_code or stopped_by_guard(verdict))
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def stopped_by_guard(verdict: dict[str, Any]) -> bool:
    """Whether the guard ended the run."""
    guard = verdict.get("guard")
    return isinstance(guard, dict) and guard.get("fired") is True


def show_again(folder: RunFolder, config: Config, verdict: dict[str, Any], view: View) -> Outcome:
    """Print the last block once more; a run that a strict guard stopped ends as it did then."""
    rows = read_metrics(folder.metrics) if folder.metrics.exists() else []
    wanted = recorded(folder, config)
    outcome = Outcome(
        Verdict(verdict["status"]), tuple(verdict["reasons"]), folder.root, verdict["exit_code"], verdict["metrics"],
        way_to_evaluate(Path(shown_path(folder.root)), wanted, judged=_judged(verdict)),
        verdict["seconds"],
    )  # fmt: skip
    longer = f"{python_call('resume', folder.root, [*wanted, 'max_steps=N'])} in Python" if wanted else "max_steps=N"
    how = "the guard stopped it" if stopped_by_guard(verdict) else f"make it longer with {longer}"
    view.resumed(f"{folder.root} is finished, and nothing in it was changed; {how}", rows)
    view.finish(outcome)
    if outcome.exit_code == CollapseStopError.exit_code:
        raise CollapseStopError(
            f"step {verdict['guard']['step']}: {verdict['guard']['reason']}",
            "the guard stopped this run, and a run that it stopped does not go on",
            way_out(verdict["best"], config.model, folder.root),
        )
    return outcome


def _judged(verdict: dict[str, Any]) -> bool:
    """Whether a metric judged the held-out tasks, and not the reward alone."""
    return any(name == "eval_accuracy" or name.endswith("/accuracy") for name in verdict["metrics"])


def refuse_longer(folder: RunFolder, verdict: dict[str, Any] | None) -> None:
    """A run that the guard stopped is not made longer: the guard would stop it again at once."""
    if verdict is not None and stopped_by_guard(verdict):
        raise StateError(
            f"the guard stopped {folder.root} after step {verdict['executed_steps']}: {verdict['guard']['reason']}",
            "a run that the guard stopped does not go on, whatever its length",
            "start a new run from a checkpoint before the fall: model=RUN/checkpoints/step_N",
        )
