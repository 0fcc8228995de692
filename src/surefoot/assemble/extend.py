"""A run that is made longer, or shorter: `surefoot train --resume RUN max_steps=N`.

Owns       which lengths are allowed, what else follows from a new one, and in which order it is written down.
Promises   the extension is in the journal before config.toml changes, with the whole new text: killed in between, the
           next resume finishes it; nothing is written before everything else about the resume was found to fit;
           optimiser, task order and curriculum go on as they were; the schedule is that of the new length from the next
           step on, and the jump in the learning rate is told and recorded.
Never      changes another key.

Read next: `resume.py`, which calls this between "it fits" and "go back".
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from surefoot.assemble.keeper import Keeper
from surefoot.config import Config
from surefoot.config_load import LoadedConfig, load_config
from surefoot.errors import ConfigError, StateError
from surefoot.eval_cadence import most_tasks
from surefoot.policy.schedule import learning_rate_at
from surefoot.store.account import LEDGER, read_account
from surefoot.store.durable import atomic_write
from surefoot.store.environment import config_text
from surefoot.store.failpoints import failpoint
from surefoot.store.identity import EXTENDED, extensions
from surefoot.store.journal import Journal
from surefoot.store.run_folder import RunFolder


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
    done = read_account(folder.root).step if (folder.journal / LEDGER).exists() else 0
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


def write_extension(keeper: Keeper, extension: Extension, version: int) -> None:
    """First in the journal, then in config.toml: whoever finds only the first does the second."""
    text = config_text(extension.loaded.resolved)
    record: dict[str, Any] = {
        "event": EXTENDED, "step": keeper.ledger.step, "from": extension.former.max_steps,
        "to": extension.loaded.config.max_steps, "learning_rate": list(extension.rates(version)),
        "before_sha256": _sha256(keeper.folder.read_config()), "config_sha256": _sha256(text.encode()),
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
    if told and _sha256(folder.read_config()) == told[-1].get("before_sha256"):
        text = str(told[-1].get("config"))
        if _sha256(text.encode()) != told[-1].get("config_sha256"):
            raise StateError(
                f"{path}: the extension to {told[-1].get('to')} steps is not whole",
                "nobody knows what the run is to be",
                "bring it back from a copy",
            )  # fmt: skip
        atomic_write(folder.config, text)


def former_ends(keeper: Keeper, extension: Extension | None) -> frozenset[int]:
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


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
