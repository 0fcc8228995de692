"""An interrupted run goes on: the newest good checkpoint, then the journaled steps after it once more.

Owns       which state a resume begins from, and everything that has to be right before it does.
Promises   what cannot be read is refused or passed over by name, never taken for a fresh start; nothing on disk
           changes before the checkpoint is found, read and fitting; a resume that is killed can be resumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surefoot.assemble.extend import Extension, former_ends, write_extension
from surefoot.assemble.keeper import Keeper
from surefoot.store.failpoints import failpoint
from surefoot.store.retention import Found, checkpoints_by_step, newest_good, set_aside
from surefoot.store.run_folder import RunFolder
from surefoot.tracking.console import View
from surefoot.tracking.log import read_metrics

if TYPE_CHECKING:
    from surefoot.assemble.build import Parts
    from surefoot.loop import Run

SAME = ("torch", "machine", "threads", "device_name")
"""Facts of a machine on which the last bits of a result depend."""


def go_on(run: Run, parts: Parts, keeper: Keeper, view: View, extension: Extension | None = None) -> None:
    """Bring learner, loop, ledger and metrics to the newest good checkpoint, or to step 0 when there is none."""
    from surefoot.assemble.run_state import restore_run
    from surefoot.loop import logging_due

    found = newest_good(keeper.folder.root)
    failpoint("resume.found")
    if found.path is not None:
        restore_run(run, parts.checkpoints.load(found.path), keeper.journal.id)
    keeper.require(run.step, passes=run.config.num_iterations)
    run.ends = former_ends(keeper, extension)
    if extension is not None:
        write_extension(keeper, extension, run.learner.version)
    _set_damaged_aside(keeper.folder, found, run.step, view)
    logged = [step for step in range(1, run.step + 1) if logging_due(run.config, step, run.ends)]
    repeated = keeper.rewind(run.step, evaluated=run.last_eval_step, passes=run.config.num_iterations, logged=logged)
    what = "1 journaled batch is" if repeated == 1 else f"{repeated} journaled batches are"
    again = f"; {what} learned from again, not generated" if repeated else ""
    if graded := len(keeper.batches.delivered()):
        again += f"; {graded} graded group{'s' * (graded > 1)} of an unfinished batch came back, not played again"
    rows = read_metrics(keeper.folder.metrics) if keeper.folder.metrics.exists() else []
    if extension is not None:
        again += f"; {extension.told(run.step, run.learner.version)}"
    view.resumed(f"resumed after step {run.step} of {run.config.max_steps}{again}", rows)


def _set_damaged_aside(folder: RunFolder, found: Found, step: int, view: View) -> None:
    """Later checkpoints than the one in use are damaged: they lose their names before the ledger goes back."""
    for number, path in checkpoints_by_step(folder.root).items():
        if number > step:
            aside = set_aside(path)
            view.warn(
                f"checkpoint step_{number} was passed over: {found.refused.get(number, 'it cannot be trusted')}",
                f"the run goes on after step {step}; the damaged one is kept as {aside.name}",
            )


def compare_machines(folder: RunFolder, now: dict[str, Any], view: View) -> None:
    """Say so when the run goes on where its last bits may differ; the first record stays, but for what tools reach."""
    then = folder.read_environment()
    if not then:
        return  # killed before it was written: nothing was trained on that machine
    changed = [f"{name} was {then.get(name)!r}, is {now.get(name)!r}" for name in SAME if then.get(name) != now[name]]
    if changed:
        view.warn(
            f"this is not the machine that the run began on: {'; '.join(changed)}",
            "the run goes on, but its last bits may differ from those of an uninterrupted one",
        )
    _keep_reach(folder, then, now.get("tool_servers", {}))


def _keep_reach(folder: RunFolder, then: dict[str, Any], now: Mapping[str, str]) -> None:
    """A tool server that may reach something else since a resume: the record says both, and so does the report."""
    found = then.get("tool_servers")
    before = found if isinstance(found, dict) else {}
    changed = {
        name: f"{before[name]}; after a resume: {reach}" if name in before else reach
        for name, reach in now.items()
        if not str(before.get(name, "")).endswith(reach)
    }
    if changed:
        folder.write_environment(then | {"tool_servers": {**before, **changed}})
