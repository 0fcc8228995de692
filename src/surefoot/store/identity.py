"""What a run is made of, told once and compared at every resume.

Owns       the records `run.*` of the ledger's journal.
Promises   a resume with other tasks, another model or another seed is refused by name, with both values.
Never      decides by a file's date or place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.errors import StateError
from surefoot.store.journal import Journal

PREFIX = "run."
RESUMED = "run.resumed"
WORDS = {
    "tasks_sha256": "the tasks",
    "train_sha256": "which tasks are trained on",
    "heldout_sha256": "which tasks are held out",
    "weights_sha256": "the model that the run began with",
    "seed": "the seed",
    "config_sha256": "config.toml",
}
"""What a fact is called when it has changed."""


def confirm(journal: Journal, name: str, facts: Mapping[str, Any]) -> bool:
    """Write the facts down, or compare them with those that are there; True when they were new.

    Args:
        name: which set of facts, such as "inputs": each is told once in the life of a run.
    """
    event = PREFIX + name
    told = next((e.record for e in journal.records() if e.record.get("event") == event), None)
    if told is None:
        journal.append({"event": event, **facts})
        return True
    for key, value in facts.items():
        if told.get(key) != value:
            raise StateError(
                f"{WORDS.get(key, key)} changed since the run began: {key} was {_short(told.get(key))}, "
                f"is {_short(value)}",
                "going on would train one run on two different things",
                "bring back what the run began with, or start a new run from one of its checkpoints (model=...)",
            )
    return False


def resumes(journal: Journal) -> list[dict[str, Any]]:
    """Every resume so far: from which step, with how many steps in the journal to repeat."""
    return [
        {key: value for key, value in entry.record.items() if key != "event"}
        for entry in journal.records()
        if entry.record.get("event") == RESUMED
    ]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 24 else text[:20] + "...'"
