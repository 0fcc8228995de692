"""How far a run has got, as plain data: what a checkpoint holds beside the learner's own state.

Owns       the list of what the loop remembers from step to step.
Promises   every field of `loop.Run` is either here or made anew from the config; a field in neither set is refused at
           the first save, so that no resume loses it in silence.
Never      changes a run before everything in the data was found to fit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from surefoot.errors import StateError, SurefootError
from surefoot.guards.auto_settings import derived
from surefoot.loop import Run
from surefoot.loop_notes import Between, ToolAlarms

PLAIN = (
    "step", "last_eval", "last_eval_step", "last_metrics", "checked", "refused_in_a_row", "census_logged", "lost",
    "landmarks", "at_start", "eval_seconds", "refused_steps", "scores_at_start", "scores", "differing",
)  # fmt: skip
CAPTURED = frozenset({*PLAIN, "diversity", "guard", "between", "best", "seconds_before", "successes", "tool_alarms"})
DERIVED = frozenset(
    {"config", "runtime", "learner", "codec", "books", "heldout", "hooks", "heldout_metric", "began", "keep_seconds",
     "ends", "eval_sets", "datasets"}
)  # fmt: skip
KEYS = CAPTURED | {"journal"}


def run_state(run: Run, journal: str) -> dict[str, Any]:
    """Everything the loop needs to go on after this step.

    Args:
        journal: the id of the journal that this state belongs to.
    """
    if lost := {f.name for f in dataclasses.fields(run)} - CAPTURED - DERIVED:
        raise StateError(
            f"a run has {', '.join(sorted(lost))}, which no checkpoint holds", "a resumed run would go on without it",
            "add it to surefoot.assemble.run_state: CAPTURED with its form, or DERIVED",
        )  # fmt: skip
    state = {name: getattr(run, name) for name in PLAIN}
    if run.successes is not None:
        state["successes"] = run.successes.state_dict()
    return state | {
        "diversity": run.diversity.state_dict(),
        "guard": None if run.guard is None else run.guard.state_dict(),
        "between": dataclasses.asdict(run.between),
        "tool_alarms": dataclasses.asdict(run.tool_alarms),
        "best": None if run.best is None else list(run.best),
        "seconds_before": run.seconds,
        "journal": journal,
    }


def restore_run(run: Run, state: Mapping[str, Any], journal: str) -> None:
    """Go on where `run_state` was taken; a state of another run, or of another form, is a `StateError`."""
    expected = KEYS if run.successes is not None else KEYS - {"successes"}
    if state.keys() != expected:
        raise _misfit(f"keys {sorted(state.keys() ^ expected)[:5]} are missing or unknown")
    if state["journal"] != journal:
        raise _misfit(f"it belongs to journal {state['journal']!r}, this run has {journal!r}")
    if (state["guard"] is None) != (run.guard is None):
        raise _misfit("it was saved with a guard, or without one, and this run is not")
    try:
        fresh, alarms = Between(**state["between"]), ToolAlarms(**state["tool_alarms"])
        best = None if state["best"] is None else (int(state["best"][0]), float(state["best"][1]))
        if run.guard is not None:
            run.guard.load_state_dict(state["guard"], adopt=derived(run.config))
        if run.successes is not None:
            run.successes.load_state_dict(state["successes"])
        run.diversity.load_state_dict(state["diversity"])
    except (TypeError, ValueError, KeyError, AttributeError, SurefootError) as error:
        raise _misfit(str(error)) from error
    for name in PLAIN:
        setattr(run, name, state[name])
    run.tool_alarms = alarms
    run.between, run.best, run.seconds_before = fresh, best, float(state["seconds_before"])


def _misfit(reason: str) -> StateError:
    return StateError(
        f"the saved state of the run does not fit: {reason}"[:600],
        "going on from it would not be the run that was saved",
        "resume the run folder as it was saved, or start a new run",
    )
