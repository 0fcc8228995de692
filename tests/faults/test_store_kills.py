"""kill -9 of a real writer at every crash point of the store: the next process finds everything that was promised."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import surefoot
from surefoot.errors import StateError
from surefoot.storage.files import NAMES, VARIABLE, Journal, verify_folder
from surefoot.storage.ledger import Lease, Ledger
from surefoot.storage.lock import RunLock

WRITER = """
import json, pathlib, sys
from surefoot.storage.files import atomic_write, commit_folder
from surefoot.storage.files import Journal
from surefoot.storage.ledger import Visit, Ledger
from surefoot.storage.lock import RunLock

root = pathlib.Path(sys.argv[1])
ROUNDS = 3

def promise(word):
    print(word, flush=True)  # what the outside world is told, and may rely on

def save(step):
    draft = root / f".step_{step}"
    draft.mkdir()
    (draft / "weights").write_bytes(bytes([step]) * 5000)
    (draft / "state.json").write_text(json.dumps(step))
    commit_folder(draft, root / f"step_{step}", {"step": step})
    promise(f"saved {step}")

with RunLock(root):
    path = root / "run.journal"
    with Journal.open(path) if path.exists() else Journal.create(path) as journal:
        ledger = Ledger.open(journal)
        for _ in range(ROUNDS):
            step = ledger.step + 1
            ledger.plan(item for item in (Visit("a", step), Visit("b", step)) if ledger.status(item) is None)
            for lease in ledger.lease(2, holder="w"):
                journal.append({"event": "group", "item": list(lease.item), "text": "x" * 3_000_000 * (step == 2)}, durable=False)
                ledger.complete([lease])
                promise(f"delivered {lease.item}")
            ledger.trained(step, [lease.item for lease in ledger.delivered()])
            promise(f"trained {step}")
            atomic_write(root / "state.json", json.dumps({"step": step}))
            promise(f"state {step}")
            for old in root.glob(".step_*"):
                __import__("shutil").rmtree(old)
            if not (root / f"step_{step}").exists():
                save(step)
"""


def start(folder: Path, failpoints: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(surefoot.__file__).parents[1]), VARIABLE: failpoints}
    command = [sys.executable, "-c", WRITER, str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def write(folder: Path, failpoints: str = "") -> tuple[int, list[str]]:
    """Exit code of one writer, and what it promised."""
    done = start(folder, failpoints)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, done.stdout.splitlines()


def second(name: str, action: str) -> str:
    """At the second hit, where there is one: the first is often a beginning, where there is nothing to lose."""
    once = name.startswith("lock") or name in (
        "journal.created",
        "journal.before_seal",
        "journal.between_pieces",
        "ledger.opened",
    )
    return f"{name}={action}" if once else f"{name}={action}@2"


def look(folder: Path, promised: list[str]) -> dict[str, Any]:
    """What is there, held against what was promised."""
    if not (folder / "run.journal").exists():
        assert promised == [], "everything is gone"
        return {"torn": 0}
    with Journal.open(folder / "run.journal", readonly=True) as journal:
        torn, ledger = journal.torn_bytes, Ledger.read(journal)
    ledger.check()
    steps = [int(word.split()[1]) for word in promised if word.startswith("trained")]
    assert ledger.step >= max(steps, default=0), "a trained step is forgotten"
    done = {str(item) for item, status in ledger.items().items() if not isinstance(status, Lease) or status.delivered}
    assert {word.split()[1] for word in promised if word.startswith("delivered")} <= done, "a finished result is lost"
    states = [int(word.split()[1]) for word in promised if word.startswith("state")]
    if states:
        assert json.loads((folder / "state.json").read_text())["step"] >= states[-1]
    for path in folder.glob("step_*"):
        assert verify_folder(path).facts["step"] == int(path.name.removeprefix("step_"))
    saved = {word.split()[1] for word in promised if word.startswith("saved")}
    assert saved <= {path.name.removeprefix("step_") for path in folder.glob("step_*")}, "a saved step is gone"
    return {"torn": torn, "step": ledger.step}


CUTS = ("journal.before_cut", "journal.after_cut")  # where only a torn file leads; the writer passes all the others
OURS = [name for name in NAMES if name.split(".")[0] in ("durable", "folder", "journal", "ledger", "lock")]


@pytest.mark.parametrize("name", [name for name in OURS if name not in CUTS])
def test_kill_9_at_this_point_loses_nothing_promised_and_the_next_writer_goes_on(tmp_path: Path, name: str) -> None:
    code, promised = write(tmp_path, second(name, "kill"))
    assert code == -signal.SIGKILL, f"{name} was never reached"
    found = look(tmp_path, promised)
    assert (found["torn"] > 0) == (name == "journal.between_pieces")
    code, more = write(tmp_path)
    assert code == 0
    after = look(tmp_path, promised + more)
    assert after["torn"] == 0
    assert after["step"] >= 3
    assert [path.name for path in tmp_path.glob(".*")] == [] or name.startswith("durable"), "rubbish is left"
    RunLock(tmp_path).close()


@pytest.mark.parametrize("name", CUTS)
def test_kill_9_while_a_torn_tail_is_cut_is_harmless_however_often(tmp_path: Path, name: str) -> None:
    code, promised = write(tmp_path, "journal.between_pieces=kill")
    assert look(tmp_path, promised)["torn"] > 0
    code, more = write(tmp_path, f"{name}=kill")
    assert (code, more) == (-signal.SIGKILL, [])
    look(tmp_path, promised)
    code, more = write(tmp_path)
    assert code == 0
    assert look(tmp_path, promised + more)["torn"] == 0


@pytest.mark.parametrize("fault", ["errno:ENOSPC", "errno:EIO", "raise:KeyboardInterrupt"])
@pytest.mark.parametrize(
    "name", ["durable.after_write", "folder.before_manifest", "journal.after_write", "journal.between_pieces"]
)
def test_a_refused_write_leaves_everything_promised_and_no_half_file(tmp_path: Path, name: str, fault: str) -> None:
    done = start(tmp_path, second(name, fault))
    assert done.returncode in (1, 130, -signal.SIGINT), done.stderr
    assert ("StorageError" in done.stderr) == fault.startswith("errno"), done.stderr
    promised = done.stdout.splitlines()
    assert look(tmp_path, promised)["torn"] == 0, "the append was not taken back"
    code, more = write(tmp_path)
    assert code == 0
    look(tmp_path, promised + more)


def test_planted_promise_before_the_write_is_caught(tmp_path: Path) -> None:
    """Teeth: a writer that tells the world first, and is killed before it wrote."""
    code, promised = write(tmp_path, "ledger.before_event=kill@4")
    assert code == -signal.SIGKILL
    with pytest.raises(AssertionError, match="a finished result is lost"):
        look(tmp_path, [*promised, "delivered b#1"])
    with pytest.raises((AssertionError, StateError)):
        look(tmp_path, [*promised, "trained 1"])
