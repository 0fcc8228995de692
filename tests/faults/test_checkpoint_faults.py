"""Whatever happens to a save or to what it left: a good checkpoint remains, and no other is ever taken for one.

The long forms: `checkpoint_mutants.py --count 10000`, and `checkpoint_breaker.py inject FOLDER` with every kind of
fault at every place (here each place gets every other one).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import checkpoint_mutants
import pytest
from checkpoint_kit import ROOT, Session, fingerprint, make_learner
from checkpoint_mutants import judge

from surefoot.learner import checkpoint
from surefoot.learner.checkpoint import capture
from surefoot.storage import files

HERE = Path(__file__).parents[1] / "support"


def program(name: str, *words: str, under: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*under, sys.executable, str(HERE / name), *words],
        env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


# -- a process that never saw the run ---------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fresh_process_goes_on_bit_for_bit_between_two_passes(
    dtype: str, one_thread: None, bfloat16_products: None, tmp_path: Path
) -> None:
    whole = Session(make_learner(dtype=dtype)).train(6)
    folder = Session(make_learner(dtype=dtype)).train(3).save(tmp_path / "a run" / "step_3")
    assert (folder / "training/masters.safetensors").exists() == (dtype == "bfloat16")
    done = program("checkpoint_kit.py", "go-on", str(folder), "3", "llama", "0.1", dtype)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["metrics"] == whole.metrics[3:]
    assert said["state"] == fingerprint(capture(whole.learner))
    assert said["step"] == 6


# -- changed by somebody ----------------------------------------------------------------------


def test_changed_checkpoints_are_refused_or_restore_what_was_saved(one_thread: None, tmp_path: Path) -> None:
    report = judge(300, seed=0, scratch=tmp_path)
    assert report["bad"] == []
    kinds = {kind.__name__ for kind in checkpoint_mutants.KINDS}
    assert {name.partition(":")[0] for name in report["fates"]} == kinds, "some kind of damage was never tried"
    refused = sum(number for name, number in report["fates"].items() if name.endswith(": refused"))
    assert refused > 250


def test_changed_checkpoints_with_masters_are_refused_or_restore_what_was_saved(
    one_thread: None, bfloat16_products: None, tmp_path: Path
) -> None:
    report = judge(100, seed=1, scratch=tmp_path, dtype="bfloat16")
    assert report["bad"] == []
    assert sum(number for name, number in report["fates"].items() if name.endswith(": refused")) > 80


@pytest.mark.parametrize(
    ("where", "plant"),
    [
        ("surefoot.learner.checkpoint.verify_folder", checkpoint.read_manifest),
        ("surefoot.learner.checkpoint.check_state", lambda learner, state: None),
    ],
    ids=["digests", "numbers"],
)
def test_planted_reader_without_a_check_is_caught_by_the_mutants(
    where: str, plant: Any, one_thread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, plant)
    monkeypatch.setattr(checkpoint_mutants, "KINDS", (checkpoint_mutants.flip, checkpoint_mutants.payload))
    assert any("ACCEPTED" in line for line in judge(40, seed=0, scratch=tmp_path)["bad"])


# -- broken while it is written ---------------------------------------------------------------


def needs(words: list[str], reason: str) -> None:
    """Skip where this machine cannot do it; CI machines often cannot."""
    if shutil.which(words[0]) is None or subprocess.run(words, capture_output=True, check=False).returncode != 0:
        pytest.skip(reason)


STRACE = (["strace", "-o", "/dev/null", "true"], "needs strace with the right to trace")


@pytest.mark.nightly  # seconds of a whole run; its neighbours show the same every day
def test_a_fault_at_every_write_sync_and_rename_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    needs(*STRACE)
    done = program("checkpoint_breaker.py", "inject", str(tmp_path / "run"), "--every", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["bad"] == []
    assert report["tried"] > report["places"] > 40
    assert report["calls"]["fsync"] >= 12
    assert report["calls"]["write"] >= 8
    assert report["calls"]["rename"] >= 2
    assert len(report["planted"]) == 3, "a save that is deaf to fsync was not seen"
    assert all("exit 0, not 74" in line for line in report["planted"])


@pytest.mark.nightly  # seconds of a whole run; its neighbours show the same every day
def test_a_disk_too_small_by_any_amount_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    needs(["unshare", "-Urm", "true"], "needs user and mount namespaces")
    done = program("checkpoint_breaker.py", "full-disk", str(tmp_path / "disk"), under=("unshare", "-Urm"))
    assert done.returncode == 0, done.stdout + done.stderr
    ends = json.loads(done.stdout)["ends"]
    assert ends["refused, step 1 good"] > 15
    assert ends["refused, step 1 good (inodes)"] > 8
    assert ends["saved"] >= 1


# -- on the disk before it is visible ---------------------------------------------------------


def save_and_watch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[set[int], set[int]]:
    """Save; returns the inodes that were synced before the folder got its name, and those after."""
    before: set[int] = set()
    after: set[int] = set()
    seen = before
    fsync, rename = os.fsync, os.rename

    def watched_fsync(descriptor: int) -> None:
        fsync(descriptor)
        seen.add(os.fstat(descriptor).st_ino)

    def watched_rename(source: Any, target: Any) -> None:
        nonlocal seen
        rename(source, target)
        seen = after if Path(target) == folder else seen

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", watched_fsync)
        patch.setattr(os, "rename", watched_rename)
        Session(make_learner()).train(1).save(folder)
    return before, after


def unsynced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    before, after = save_and_watch(folder, monkeypatch)
    late = {str(p.relative_to(folder)) for p in [folder, *folder.rglob("*")] if p.stat().st_ino not in before}
    return late | (set() if folder.parent.stat().st_ino in after else {"the folder's own name"})


def test_every_byte_and_every_name_is_synced_before_the_folder_is_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert unsynced(tmp_path / "step_1", monkeypatch) == set()


@pytest.mark.parametrize("skipped", ["_seal", "sync_folder"])
def test_planted_save_that_skips_one_sync_is_seen(
    skipped: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = getattr(files, skipped)

    def without_sync(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", lambda descriptor: None)
            return real(*args)

    monkeypatch.setattr(files, skipped, without_sync)
    assert unsynced(tmp_path / "step_1", monkeypatch) != set()
