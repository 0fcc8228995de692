"""What a run is made of, told once and compared at every resume.

Owns       the records `run.*` of the ledger's journal.
Promises   a resume with other tasks, another model or another seed is refused by name, with both values; a config that
           was edited too, unless an extension of the run is recorded, whose config then counts.
Never      decides by a file's date or place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.errors import StateError
from surefoot.storage.files import Journal
from surefoot.storage.ledger import Balance, Dropped, Lease, Ledger, Pending, Status, Trained, Visit
from surefoot.storage.run_folder import RunFolder

FACTS_PREFIX = "run."
RESUMED = "run.resumed"
EXTENDED = "run.extended"
WORDS = {
    "tasks_sha256": "the tasks",
    "train_sha256": "which tasks are trained on",
    "heldout_sha256": "which tasks are held out",
    "eval_sets_sha256": "which tasks the evaluation sets answer",
    "weights_sha256": "the model that the run began with",
    "seed": "the seed",
    "config_sha256": "config.toml",
}
"""What a fact is called when it has changed."""


def assert_same_run(journal: Journal, name: str, facts: Mapping[str, Any]) -> bool:
    """Write the facts down, or compare them with those that are there; True when they were new.

    Args:
        name: which set of facts, such as "inputs": each is told once in the life of a run.
    """
    if is_same_run(journal, name, facts):
        return False
    journal.append({"event": FACTS_PREFIX + name, **facts})
    return True


def is_same_run(journal: Journal, name: str, facts: Mapping[str, Any]) -> bool:
    """Whether these facts are those that were told under this name; False when none were, a `StateError` for others."""
    event = FACTS_PREFIX + name
    known = [e.record for e in journal.records() if e.record.get("event") in (event, EXTENDED)]
    recorded_facts = next((record for record in known if record["event"] == event), None)
    if recorded_facts is not None:  # the config of an extension takes the place of the one before
        recorded_facts = recorded_facts | {key: record[key] for record in known for key in facts if key in record}
    if recorded_facts is None:
        return False
    for key, value in facts.items():
        if recorded_facts.get(key) != value:
            raise StateError(
                f"{WORDS.get(key, key)} changed since the run began: {key} was {_short(recorded_facts.get(key))}, "
                f"is {_short(value)}",
                "going on would train one run on two different things",
                "bring back what the run began with, or start a new run from one of its checkpoints (model=...)",
            )
    return True


def recorded_facts(journal: Journal, name: str) -> dict[str, Any] | None:
    """The facts that were written down under this name; None when there are none."""
    found = next((e.record for e in journal.records() if e.record.get("event") == FACTS_PREFIX + name), None)
    return None if found is None else {key: value for key, value in found.items() if key != "event"}


def resumes(journal: Journal) -> list[dict[str, Any]]:
    """Every resume so far: from which step, with how many steps in the journal to repeat."""
    return [
        {key: value for key, value in entry.record.items() if key != "event"}
        for entry in journal.records()
        if entry.record.get("event") == RESUMED
    ]


def extensions(journal: Journal, *, whole: bool = False) -> list[dict[str, Any]]:
    """Every change of the run's length so far: after which step, from what to what, and both learning rates.

    Args:
        whole: with the config's text and digests.
    """
    hidden = ("event",) if whole else ("event", "config", "config_sha256", "before_sha256")
    return [
        {key: value for key, value in entry.record.items() if key not in hidden}
        for entry in journal.records()
        if entry.record.get("event") == EXTENDED
    ]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 24 else text[:20] + "...'"


# -- The account of a run as its journal tells it, read without touching anything: for people, during a run or after


LEDGER = "ledger.journal"
KINDS: dict[str, type] = {"pending": Pending, "leased": Lease, "trained": Trained, "dropped": Dropped}


@dataclass(frozen=True)
class TaskAccounting:
    """What `surefoot ledger RUN` shows."""

    step: int
    balance: Balance
    resumes: list[dict[str, Any]]
    torn_bytes: int
    items: dict[Visit, Status]

    def lines(self) -> list[str]:
        """For a terminal."""
        balance = self.balance
        rows = [
            ("planned", balance.planned, ""), ("pending", balance.pending, "waits in the queue"),
            ("leased", balance.leased, f"being worked on; {balance.delivered} of them delivered"),
            ("trained", balance.trained, f"in the weights, by step {self.step}"),
            ("dropped", sum(balance.dropped.values()), _counts(balance.dropped)),
        ]  # fmt: skip
        lines = [f"{name:<9} {number:>9}  {note}".rstrip() for name, number, note in rows]
        told = [
            (name, _counts(counts)) for name, counts in (("returned", balance.requeued), ("fenced", balance.fenced))
        ]
        lines += [f"{name:<9} {text}" for name, text in told if text]
        lines += [
            f"resumed   after step {entry.get('step')}, {entry.get('repeated')} journaled batches repeated"
            for entry in self.resumes
        ]
        if self.torn_bytes:
            lines.append(f"torn      {self.torn_bytes} bytes at the journal's end; the next resume cuts them off")
        return [*lines, "every item is accounted for"]

    def named(self, kind: str) -> list[str]:
        """Items of one kind, in the order of planning, with what is known of them."""
        return [f"{item}  {_why(s)}".rstrip() for item, s in self.items.items() if isinstance(s, KINDS[kind])]

    def facts(self) -> dict[str, Any]:
        """As JSON data."""
        return {
            "step": self.step, **dataclasses.asdict(self.balance), "lost": self.balance.lost, "resumes": self.resumes,
            "torn_bytes": self.torn_bytes,
        }  # fmt: skip


def read_accounting(run: Path) -> TaskAccounting:
    """The account of a run folder; a run that has none, or one that does not add up, is refused."""
    path = RunFolder.open(run).journal / LEDGER
    if not path.exists():
        raise StateError(
            f"{run} has no ledger",
            "it was killed before its journal was begun, or an older version trained it",
            f"surefoot train --resume {run} begins one",
        )
    journal = Journal.open(path, readonly=True)
    try:
        ledger = Ledger.read(journal)
        ledger.check()
        return TaskAccounting(ledger.step, ledger.balance(), resumes(journal), journal.torn_bytes, dict(ledger.items()))
    finally:
        journal.close()


def _counts(counts: Any) -> str:
    return ", ".join(f"{reason} {n}" for reason, n in counts.items())


def _why(status: Status) -> str:
    if isinstance(status, Trained):
        return f"step {status.step}"
    if isinstance(status, Dropped):
        return status.reason
    if isinstance(status, Lease):
        return f"by {status.holder}" + (", delivered" if status.delivered else "")
    return ""
