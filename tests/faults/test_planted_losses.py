"""Bugs on purpose: each makes a resumed run another run, or none at all, and the comparison has to say so.

Without them the same resume is accepted (the control), so it is the bug that is seen.
"""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from kill_runs import Bench, Case, Killed

FORGETFUL = ("forgetful_disk",)
LOSSY = Case("lossy", {"beta": 0.05, "tasks_per_step": 3, "max_steps": 8, "save_steps": 3}, rows=11)
"""Three epochs of few tasks, so that the position in them matters; a reference, moments and a guard to lose."""


@pytest.fixture(scope="session")
def killed(bench: Bench) -> Killed:
    """Died after step 4 was settled: a checkpoint of step 3, step 4 in the journal, the third epoch not planned."""
    return bench.killed(LOSSY, "loop.before_collect=kill@5")


@pytest.fixture
def place(killed: Killed) -> Path:
    return killed.fresh()


def test_without_a_bug_this_resume_is_accepted(bench: Bench, place: Path) -> None:
    bench.check(LOSSY, place, bench.resume(place))


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("bug", "seen"),
    [
        ("moments_not_restored", "files.training/optimiser.safetensors"),
        ("reference_not_restored", "files.training/reference.safetensors"),
        ("guard_not_restored", "state.extra"),
        ("between_not_restored", "state.extra"),
        ("metrics_not_cut", "exit 3"),
        ("lease_dropped", "trained"),
        ("rewind_skipped", "exit 3"),
        ("other_order", "trained"),
        ("other_groups", "rollouts"),
        ("checked_twice", "verdict.invariants_checked"),
    ],
)
def test_planted_bug_in_the_resume_is_seen(bench: Bench, place: Path, bug: str, seen: str) -> None:
    with pytest.raises(AssertionError) as caught:
        bench.check(LOSSY, place, bench.resume(place, before=[("plant", bug)]))
    assert seen in str(caught.value), caught.value


def edit_config(run: Path) -> None:
    config = run / "config.toml"
    config.write_text(config.read_text().replace("learning_rate = 0.01", "learning_rate = 0.5"))


def lose_numbers(run: Path) -> None:
    (run / "metrics.jsonl").unlink()


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("harm", "check", "seen"),
    [
        (edit_config, "config_not_confirmed", "files.model.safetensors"),
        (lose_numbers, "numbers_not_asked_for", "rows:"),
    ],
)
def test_planted_resume_that_does_not_ask_is_seen(
    bench: Bench, place: Path, harm: Callable[[Path], None], check: str, seen: str
) -> None:
    """With the question the resume is refused; without it, it ends in peace as another run."""
    harm(place / "run")
    assert bench.resume(place).code == 3
    ended = bench.resume(place, before=[("plant", check)])
    assert ended.code == 0, ended.said
    with pytest.raises(AssertionError, match=re.escape(seen)):
        bench.check(LOSSY, place, ended)


def test_planted_batch_that_is_not_journaled_is_seen(bench: Bench) -> None:
    """The ledger says that the step is done, and nobody can do it again."""
    folder = bench.folder(LOSSY)
    ended = bench.train(folder, failpoints="loop.before_collect=kill@5", before=[("plant", "batch_not_kept")])
    assert ended.code == -signal.SIGKILL
    with pytest.raises(AssertionError, match="journal no longer holds step 4"):
        bench.check(LOSSY, folder, bench.resume(folder))


def test_planted_trained_before_the_batch_is_on_the_disk_is_seen(bench: Bench) -> None:
    """Told first, done later: killed in between, the ledger speaks of a step that never was."""
    folder = bench.folder(LOSSY)
    ended = bench.train(folder, failpoints="batches.before_compose=kill@5", before=[("plant", "trained_too_early")])
    assert ended.code == -signal.SIGKILL
    with pytest.raises(AssertionError, match="journal no longer holds step 5"):
        bench.check(LOSSY, folder, bench.resume(folder))


def test_a_disk_that_forgets_what_was_not_synced_loses_nothing_of_a_run(bench: Bench) -> None:
    folder = bench.folder(LOSSY)
    ended = bench.train(folder, failpoints="learner.before_step=kill@5", before=[FORGETFUL])
    assert ended.code == -signal.SIGKILL
    bench.check(LOSSY, folder, bench.resume(folder))


def test_planted_journal_without_fsync_is_seen(bench: Bench) -> None:
    """A journal that forgot: the weights are ahead of it, and going on would train on the same items twice."""
    folder = bench.folder(LOSSY)
    ended = bench.train(folder, failpoints="learner.before_step=kill@5", before=[FORGETFUL, ("plant", "no_sync")])
    assert ended.code == -signal.SIGKILL
    with pytest.raises(AssertionError, match="exit 3"):
        bench.check(LOSSY, folder, bench.resume(folder))


def test_a_journal_brought_back_from_an_older_copy_is_refused(bench: Bench) -> None:
    """It is the right journal, and it does not know of what is in the weights already."""
    folder = bench.folder(LOSSY)
    assert bench.train(folder, failpoints="loop.before_collect=kill@3").code == -signal.SIGKILL
    shutil.copytree(folder / "run" / "journal", folder / "older copy")
    assert bench.resume(folder, failpoints="loop.before_collect=kill@2").code == -signal.SIGKILL
    assert (folder / "run" / "checkpoints" / "step_3").is_dir()
    shutil.rmtree(folder / "run" / "journal")
    (folder / "older copy").rename(folder / "run" / "journal")
    ended = bench.resume(folder)
    assert ended.code == 3, ended.said
    assert "the weights are of step 3, and the ledger knows of step 2" in ended.said
