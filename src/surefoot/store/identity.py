"""What a run is made of, told once and compared at every resume.

Owns       the records `run.*` of the ledger's journal.
Promises   a resume with other tasks, another model or another seed is refused by name, with both values; a config that
           was edited too, unless an extension of the run is recorded, whose config then counts.
Never      decides by a file's date or place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.errors import StateError
from surefoot.store.journal import Journal

PREFIX = "run."
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


def confirm(journal: Journal, name: str, facts: Mapping[str, Any]) -> bool:
    """Write the facts down, or compare them with those that are there; True when they were new.

    Args:
        name: which set of facts, such as "inputs": each is told once in the life of a run.
    """
    if compare(journal, name, facts):
        return False
    journal.append({"event": PREFIX + name, **facts})
    return True


def compare(journal: Journal, name: str, facts: Mapping[str, Any]) -> bool:
    """Whether these facts are those that were told under this name; False when none were, a `StateError` for others."""
    event = PREFIX + name
    known = [e.record for e in journal.records() if e.record.get("event") in (event, EXTENDED)]
    told = next((record for record in known if record["event"] == event), None)
    if told is not None:  # the config of an extension takes the place of the one before
        told = told | {key: record[key] for record in known for key in facts if key in record}
    if told is None:
        return False
    for key, value in facts.items():
        if told.get(key) != value:
            raise StateError(
                f"{WORDS.get(key, key)} changed since the run began: {key} was {_short(told.get(key))}, "
                f"is {_short(value)}",
                "going on would train one run on two different things",
                "bring back what the run began with, or start a new run from one of its checkpoints (model=...)",
            )
    return True


def told(journal: Journal, name: str) -> dict[str, Any] | None:
    """The facts that were written down under this name; None when there are none."""
    found = next((e.record for e in journal.records() if e.record.get("event") == PREFIX + name), None)
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
