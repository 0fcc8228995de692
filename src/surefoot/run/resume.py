"""An interrupted run goes on: the newest good checkpoint, then the journaled steps after it once more.

Owns       which state a resume begins from, and everything that has to be right before it does.
Promises   what cannot be read is refused or passed over by name, never taken for a fresh start; nothing on disk
           changes before the checkpoint is found, read and fitting; a resume that is killed can be resumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surefoot.config import Config
from surefoot.config.load import LoadedConfig, load_config
from surefoot.config.schedule import most_tasks
from surefoot.errors import ConfigError, StateError
from surefoot.learner.schedule import learning_rate_at
from surefoot.report.console import View
from surefoot.run.store import RunStore
from surefoot.storage.checkpoints import GoodCheckpoint, checkpoints_by_step, newest_good, set_aside
from surefoot.storage.files import Journal, atomic_write, failpoint
from surefoot.storage.run_folder import RunFolder, config_text
from surefoot.storage.run_journal import EXTENDED, LEDGER, extensions, read_accounting
from surefoot.system.files import sha256_of
from surefoot.tracking.metrics import read_metrics

if TYPE_CHECKING:
    from surefoot.loop import Run


# -- A run that is made longer, or shorter: `surefoot train --resume RUN max_steps=N` -------------
# Owns       which lengths are allowed, what else follows from a new one, and in which order it is written down.
# Promises   the extension is in the journal before config.toml changes, with the whole new text: killed in between, the
# next resume finishes it; nothing is written before everything else about the resume was found to fit;
# optimiser, task order and curriculum go on as they were; the schedule is that of the new length from the next
# step on, and the jump in the learning rate is told and recorded.
# Never      changes another key.


@dataclass(frozen=True)
class Extension:
    """What changes, before it is written down."""

    former: Config
    loaded: LoadedConfig
    """The run's config with its new length."""

    def rates(self, version: int) -> tuple[float | None, float]:
        """The learning rate of the last step that was applied, and that of the next one."""
        last = None if version == 0 else _rate(self.former, version)
        return last, _rate(self.loaded.config, version + 1)

    def told(self, step: int, version: int) -> str:
        """For a person: the new length, and what becomes of the learning rate."""
        last, following = self.rates(version)
        config = self.loaded.config
        line = f"max_steps is now {config.max_steps}, it was {self.former.max_steps}"
        if last is None or last == following:
            line += f"; the learning rate of step {step + 1} is {following:.6g}"
        else:
            line += f"; the learning rate of step {step} was {last:.6g}, of step {step + 1} it is {following:.6g}"
        line += f" ({config.lr_scheduler_type} over {config.max_steps} steps)"
        if config.curriculum != self.former.curriculum:
            line += f"; the curriculum keeps its length, curriculum.steps = {config.curriculum.steps}"
        return line


def plan_extension(folder: RunFolder, loaded: LoadedConfig, max_steps: int | None) -> Extension | None:
    """The run with `max_steps`; None when it has that length already. Refuses what cannot be, and writes nothing."""
    former = loaded.config
    if max_steps is not None and type(max_steps) is not int:
        raise ConfigError(f"max_steps = {max_steps!r}", "steps are counted in whole numbers", "give a whole number")
    if max_steps is None or max_steps == former.max_steps:
        return None
    done = read_accounting(folder.root).step if (folder.journal / LEDGER).exists() else 0
    if max_steps <= done:
        raise ConfigError(
            f"max_steps = {max_steps}, and {done} steps of {folder.root} are done",
            "what is in the weights stays there: a run can go on, and not back",
            f"use max_steps = {done + former.num_iterations} or more, or start a new run from an earlier checkpoint: "
            "model=RUN/checkpoints/step_N",
        )
    again = load_config(
        folder.config, [f"max_steps={max_steps}"], data=folder.read_config()
    )  # every rule is asked once more
    if former.curriculum.kind == "levels" and not former.curriculum.steps:
        # Its shares were those of the old length: tasks that are planned already would be counted otherwise.
        kept = again.config.curriculum.model_copy(update={"steps": former.max_steps})
        again = again.with_config(again.config.model_copy(update={"curriculum": kept}))
    if former.eval_tasks == "auto":  # the tasks that it was measured on before
        again = again.with_config(again.config.model_copy(update={"eval_tasks": most_tasks(former)}))
    return Extension(former, again)


def write_extension(keeper: RunStore, extension: Extension, version: int) -> None:
    """First in the journal, then in config.toml: whoever finds only the first does the second."""
    text = config_text(extension.loaded.resolved)
    record: dict[str, Any] = {
        "event": EXTENDED, "step": keeper.ledger.step, "from": extension.former.max_steps,
        "to": extension.loaded.config.max_steps, "learning_rate": list(extension.rates(version)),
        "before_sha256": sha256_of(keeper.folder.read_config()), "config_sha256": sha256_of(text),
        "config": text,
    }  # fmt: skip
    keeper.journal.append(record)
    failpoint("extend.journaled")
    atomic_write(keeper.folder.config, text)
    failpoint("extend.written")


def finish_extension(folder: RunFolder) -> None:
    """An extension that was journaled when its driver died is finished; call it with the lock held."""
    path = folder.journal / LEDGER
    if not path.exists():
        return
    with Journal.open(path, readonly=True) as journal:
        told = extensions(journal, whole=True)
    if told and sha256_of(folder.read_config()) == told[-1].get("before_sha256"):
        text = str(told[-1].get("config"))
        if sha256_of(text) != told[-1].get("config_sha256"):
            raise StateError(
                f"{path}: the extension to {told[-1].get('to')} steps is not whole",
                "nobody knows what the run is to be",
                "bring it back from a copy",
            )  # fmt: skip
        atomic_write(folder.config, text)


def former_ends(keeper: RunStore, extension: Extension | None) -> frozenset[int]:
    """Steps that were the last one when they were done: they were logged and looked at as such."""
    told = [(e.get("step"), e.get("from")) for e in extensions(keeper.journal)]
    if extension is not None:
        told.append((keeper.ledger.step, extension.former.max_steps))
    return frozenset(last for done, last in told if done == last and type(last) is int)


def _rate(config: Config, step: int) -> float:
    return learning_rate_at(
        step, peak=config.learning_rate, kind=config.lr_scheduler_type, warmup_steps=config.warmup_steps,
        max_steps=config.max_steps,
    )  # fmt: skip


# -- An interrupted run goes on: the newest good checkpoint, then the journaled steps after it once more


SAME = ("torch", "machine", "threads", "device_name")
"""Facts of a machine on which the last bits of a result depend."""


def go_on(run: Run, keeper: RunStore, view: View, extension: Extension | None = None) -> None:
    """Bring learner, loop, ledger and metrics to the newest good checkpoint, or to step 0 when there is none."""
    from surefoot.loop_state import logging_due, restore_run

    found = newest_good(keeper.folder.root)
    failpoint("resume.found")
    if found.path is not None:
        restore_run(run, run.learner.load(found.path), keeper.journal.id)
    keeper.require(run.step, passes=run.config.num_iterations)
    run.ends = former_ends(keeper, extension)
    if extension is not None:
        write_extension(keeper, extension, run.learner.facts.version)
    _set_damaged_aside(keeper.folder, found, run.step, view)
    logged = [step for step in range(1, run.step + 1) if logging_due(run.config, step, run.ends)]
    repeated = keeper.rewind(run.step, evaluated=run.last_eval_step, passes=run.config.num_iterations, logged=logged)
    what = "1 journaled batch is" if repeated == 1 else f"{repeated} journaled batches are"
    again = f"; {what} learned from again, not generated" if repeated else ""
    if graded := len(keeper.batches.delivered()):
        again += f"; {graded} graded group{'s' * (graded > 1)} of an unfinished batch came back, not played again"
    rows = read_metrics(keeper.folder.metrics) if keeper.folder.metrics.exists() else []
    if extension is not None:
        again += f"; {extension.told(run.step, run.learner.facts.version)}"
    view.resumed(f"resumed after step {run.step} of {run.config.max_steps}{again}", rows)


def _set_damaged_aside(folder: RunFolder, found: GoodCheckpoint, step: int, view: View) -> None:
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
