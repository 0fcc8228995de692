"""The guard of a run as it is assembled: made from the keys, calibrated by a healthy run, armed or said not to be.

Owns       what `guard.calibrate_from` and `guard.require` do, and the judgement by the first real held-out value.
Promises   a calibration is made once and written to the journal: a resume takes those limits, whatever became of the
           healthy run since; a run that must be armed and is not trains nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.config import Config
from surefoot.config.choices import is_own
from surefoot.config.schedule import Answered, cadence_of
from surefoot.errors import RewardError, StateError
from surefoot.guards.arming import judge_arming, refuse_unarmed
from surefoot.guards.auto_settings import guard_settings
from surefoot.guards.collapse import HeldOutGuard
from surefoot.guards.own_rules import own_rules
from surefoot.loop_state import GuardInputs
from surefoot.storage.files import Journal
from surefoot.storage.run_folder import RunFolder
from surefoot.storage.run_journal import assert_same_run, recorded_facts
from surefoot.tracking.metrics import kind_of, read_metrics

if TYPE_CHECKING:
    from surefoot.loop import Metrics, Run

CALIBRATION = "guard_calibration"


def make_guard(
    config: Config, heldout: Answered, metric: str, tighter: dict[str, float] | None = None
) -> HeldOutGuard | None:  # fmt: skip
    """The guard that `[guard]` describes; None when it is off or has nothing to look at.

    Args:
        heldout: tasks that one evaluation asks.
        metric: the held-out curve that it watches.
        tighter: limits from a calibration.
    """
    if config.guard.mode == "off" or not heldout.watched:
        return None
    settings = guard_settings(config, cadence_of(config, heldout).count, metric)
    guard = HeldOutGuard(**settings, own=own_rules(config.guard.rules or ()))
    guard.tighten(tighter or {})
    return guard


def calibration(
    config: Config, base: Path, *, heldout: Answered, metric: str, journal: Journal | None = None
) -> dict[str, float]:  # fmt: skip
    """Limits that `guard.calibrate_from` tightens; empty when it is left out.

    Args:
        base: what the path is relative to.
        journal: where they are written down, or were by the first start of this run.
    """
    guard = make_guard(config, heldout, metric)
    if config.guard.calibrate_from is None or guard is None:
        return {}
    known = None if journal is None else recorded_facts(journal, CALIBRATION)
    if known is None:
        source = base / Path(config.guard.calibrate_from).expanduser()
        known = {"limits": guard.calibrate(healthy_rows(source, metric)), "run": str(config.guard.calibrate_from)}
        if journal is not None:
            assert_same_run(journal, CALIBRATION, known)
    return {str(name): float(value) for name, value in dict(known["limits"]).items()}


def calibration_lines(config: Config, tighter: dict[str, float]) -> list[str]:
    """What a calibration did, and which rules are the user's own, for the plan."""
    own = [Path(name).name for name in config.guard.rules or () if is_own(name)]
    lines = [f"          of your own: {', '.join(own)}; nobody has measured how often they are wrong"] if own else []
    if config.guard.calibrate_from is None:
        return lines
    source = Path(config.guard.calibrate_from).name
    changed = [f"{name} {getattr(config.guard, name):g} -> {value:.4g}" for name, value in sorted(tighter.items())]
    return [*lines, f"          calibrated by {source}: {', '.join(changed) or 'nothing became tighter'}"]


def healthy_rows(root: Path, metric: str) -> list[dict[str, float]]:
    """The evaluations of a finished run as its guard was told of them.

    Raises:
        StateError: it is not a run folder, it has not passed, or its guard fired.
        InputError: it never measured what the guard watches.
    """
    folder = RunFolder.open(root)
    verdict = _verdict(folder)
    fired = bool((verdict.get("guard") or {}).get("fired"))
    if verdict.get("status") != "PASS" or fired:
        how = "its guard fired" if fired else f"its verdict is {verdict.get('status')}"
        raise _unfit(root, how)
    inputs, rows = GuardInputs(), []
    for row in read_metrics(folder.metrics):
        step, numbers = int(row["step"]), {name: value for name, value in row.items() if name != "step"}
        if kind_of(numbers) == "train":
            inputs.step(numbers)
        else:
            rows += [arguments for _, arguments in _for_evaluation(inputs, step, numbers, metric, root)]
    return rows


def _for_evaluation(
    inputs: GuardInputs, step: int, numbers: Metrics, metric: str, root: Path
) -> list[tuple[int, dict[str, float]]]:
    try:
        return inputs.for_evaluation(step, numbers, metric)
    except RewardError as error:
        raise _unfit(root, f"it never measured {metric}") from error


def _verdict(folder: RunFolder) -> dict[str, Any]:
    found = folder.read_verdict()
    if not found:
        raise _unfit(folder.root, "it has no verdict")
    return found


def _unfit(root: Path, how: str) -> StateError:
    return StateError(
        f"guard.calibrate_from: {root} cannot calibrate a guard: {how}",
        "limits are taken from a run that is known to be healthy",
        "name the folder of a run that passed, or leave guard.calibrate_from out",
    )


def judge_first_value(run: Run) -> None:
    """From here on the first evaluation of the run says whether the guard is armed; the plan could only assume."""
    plain = run.hooks.evaluated
    guard = run.guard
    if guard is None:
        return
    keys: dict[str, Any] = {"heldout": run.answered, "metric": run.heldout_metric, "limits": guard.limits}

    def evaluated(step: int, metrics: Metrics) -> None:
        plain(step, metrics)
        seen = 0 if guard.last_status is None else guard.last_status.folds
        first = metrics.get(run.heldout_metric)
        if run.at_start is not None or seen > 1 or first is None:
            return
        planned, found = judge_arming(run.config, **keys), judge_arming(run.config, first=first, **keys)
        if step == 0:
            refuse_unarmed(run.config, found)
        if planned is not None and planned.armed and found is not None and not found.armed:
            run.hooks.warn(f"the guard is not armed: {found.why}", ", or ".join(found.would_do) or "nothing would do")

    run.hooks.evaluated = evaluated
