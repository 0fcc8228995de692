"""The account of a run as its journal tells it, read without touching anything: for people, during a run or after.

Read next: `ledger.py`, whose balance this is.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.errors import StateError
from surefoot.store.identity import resumes
from surefoot.store.journal import Journal
from surefoot.store.ledger import Balance, Ledger
from surefoot.store.ledger_records import Dropped, Item, Leased, Pending, Status, Trained
from surefoot.store.run_folder import RunFolder

LEDGER = "ledger.journal"
KINDS: dict[str, type] = {"pending": Pending, "leased": Leased, "trained": Trained, "dropped": Dropped}


@dataclass(frozen=True)
class Account:
    """What `surefoot ledger RUN` shows."""

    step: int
    balance: Balance
    resumes: list[dict[str, Any]]
    torn_bytes: int
    items: dict[Item, Status]

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


def read_account(run: Path) -> Account:
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
        return Account(ledger.step, ledger.balance(), resumes(journal), journal.torn_bytes, dict(ledger.items()))
    finally:
        journal.close()


def _counts(counts: Any) -> str:
    return ", ".join(f"{reason} {n}" for reason, n in counts.items())


def _why(status: Status) -> str:
    if isinstance(status, Trained):
        return f"step {status.step}"
    if isinstance(status, Dropped):
        return status.reason
    if isinstance(status, Leased):
        return f"by {status.lease.holder}" + (", delivered" if status.delivered else "")
    return ""
