"""A trial's folder: recreated for every run, the former one kept beside it; what ran is written down before it runs."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from surefoot.errors import StateError
from surefoot.harness.files import read_json, write_json
from surefoot.harness.suites.plan import Trial, config_hash
from surefoot.harness.suites.snapshot import Code, ignore

PROVENANCE = "provenance.json"


def now() -> str:
    """The present moment in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def prepare_out(out: Path) -> None:
    """Make the output folder; git is told to ignore it, or its own results would make the tree dirty."""
    ignore(out)


def recreate(trial: Trial) -> None:
    """A fresh folder for a trial; the former one becomes NAME.previous. A folder that is not ours is refused."""
    folder = trial.folder
    if folder.exists():
        if not (folder / PROVENANCE).is_file() and any(folder.iterdir()):
            raise StateError(
                f"{folder} holds something else",
                f"it has no {PROVENANCE}, so it is not ours to replace",
                "choose another --out",
            )
        previous = folder.with_name(folder.name + ".previous")
        if previous.exists():
            shutil.rmtree(previous)
        folder.rename(previous)
    folder.mkdir(parents=True)
    trial.run.mkdir()


def write_provenance(trial: Trial, facts: Mapping[str, Any]) -> None:
    """Write down what is about to run."""
    write_json(trial.folder / PROVENANCE, dict(facts))


def read_provenance(trial: Trial) -> dict[str, Any] | None:
    """What ran in the folder; None when nobody wrote it down."""
    path = trial.folder / PROVENANCE
    if not path.is_file():
        return None
    record = read_json(path)
    return record if isinstance(record, dict) else None


def same_training(trial: Trial, code: Code, record: Mapping[str, Any] | None) -> bool:
    """Whether a record (provenance or verdict) is about this very code and these very settings."""
    if record is None:
        return False
    facts = (record.get("commit"), record.get("dirty"), record.get("config_hash"))
    return facts == (code.commit, code.dirty, config_hash(trial))


def recorded_exit(trial: Trial) -> int | None:
    """The latest run's exit status as its executor wrote it down; None when it did not."""
    for number in range(trial.recipe.num_runs, 0, -1):
        path = trial.exit_file(number)
        if path.is_file():
            text = path.read_text(encoding="ascii", errors="replace").strip()
            if not re.fullmatch(r"-?[0-9]{1,3}", text):
                raise StateError(
                    f"{path} holds {text[:40]!r}", "it should hold an exit status", "run again with --fresh"
                )
            return int(text)
    return None


@contextlib.contextmanager
def only_one(out: Path, suite: str) -> Iterator[None]:
    """One process at a time per suite and output folder; the next one is refused, not kept waiting."""
    path = out / suite / ".lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StateError(
                f"suite {suite} is running in {out}",
                "two of them would write into the same folders",
                "wait, or use --out",
            ) from error
        yield
