"""What a resume refuses, and in which words; and what it must not refuse. Unreadable state is never a fresh start."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kill_kit import MODEL, Ended
from kill_runs import PLAIN, SETS, Bench, Killed, facts

from surefoot.storage.files import MANIFEST, Journal, ManifestEntry, manifest_text, read_manifest

LEDGER = "run/journal/ledger.journal"


@pytest.fixture(scope="session")
def killed(bench: Bench) -> Killed:
    """A run that died in its fifth step: checkpoints of steps 2 and 4, a journal, no verdict."""
    return bench.killed(PLAIN, "loop.before_log=kill@5")


@pytest.fixture
def place(killed: Killed) -> Path:
    """It, to be damaged."""
    return killed.fresh()


def resume(bench: Bench, folder: Path, *words: str, run: str = "run") -> Ended:
    return bench.warm.run("train", "--resume", run, *words, cwd=folder)


def tree(folder: Path) -> dict[str, str]:
    """Every file with its contents; the lock is nobody's business."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "lock"]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def refused(bench: Bench, folder: Path, code: int, *words: str) -> str:
    """The resume says no with this code and these words, and leaves weights, numbers and verdict as they were."""
    before = tree(folder / "run")
    ended = resume(bench, folder)
    assert ended.code == code, ended.said
    for word in words:
        assert word in ended.said, ended.said
    after = tree(folder / "run")
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert {name.partition("/")[0] for name in changed} <= {"journal", "logs"}, f"a refused resume changed {changed}"
    assert not (folder / "run" / "verdict.json").exists()
    return ended.said


def rewrite(checkpoint: Path, name: str, data: bytes, **facts: Any) -> None:
    """Change a file of a checkpoint and its manifest with it, as somebody would who knows how."""
    found = read_manifest(checkpoint)
    (checkpoint / name).write_bytes(data)
    entries = dict(found.files) | {name: ManifestEntry(len(data), hashlib.sha256(data).hexdigest())}
    listed = {key: {"size": entry.size, "sha256": entry.sha256} for key, entry in entries.items()}
    (checkpoint / MANIFEST).write_text(manifest_text({**found.facts, **facts}, listed))


def damage(path: Path, at: int | None = None) -> int:
    """Flip one bit; in the middle unless told."""
    data = bytearray(path.read_bytes())
    at = len(data) // 2 if at is None else at
    data[at] ^= 1
    path.write_bytes(bytes(data))
    return at


# -- what the run is made of ------------------------------------------------------------------------


def test_one_edited_task_is_refused_and_going_back_is_accepted(bench: Bench, place: Path) -> None:
    tasks = place / "sums.jsonl"
    whole = tasks.read_text()
    tasks.write_text(whole.replace('"answer": "7"', '"answer": "8"', 1))
    refused(bench, place, 3, "the tasks changed since the run began", "tasks_sha256 was", "bring back")
    tasks.write_text(whole)
    bench.check(PLAIN, place, resume(bench, place))


@pytest.mark.parametrize(
    "otherwise", [{}, {"num_hidden_layers": 3}, {"hidden_size": 32}], ids=["weights", "layers", "width"]
)
def test_another_model_under_the_same_name_is_refused(bench: Bench, place: Path, otherwise: dict[str, int]) -> None:
    name = "other_" + "_".join(otherwise)
    if not (bench.warm.scratch / name).exists():
        bench.warm.ask(do="model", name=name, seed=1, otherwise=otherwise)
    shutil.rmtree(place / MODEL)
    shutil.copytree(bench.warm.scratch / name, place / MODEL)
    refused(bench, place, 3, "the model that the run began with changed", "weights_sha256 was")


def test_other_settings_with_resume_are_refused(bench: Bench, place: Path) -> None:
    for words in (["tasks_per_step=9"], ["run.toml"], ["--dry-run"], ["--tasks-per-step", "9"]):
        ended = resume(bench, place, *words)
        assert ended.code == 2, ended.said
        assert "--resume takes max_steps=N and nothing else" in ended.said
        assert words[-1] in ended.said


@pytest.mark.parametrize(("was", "now"), [("seed = 0", "seed = 1"), ("learning_rate = 0.01", "learning_rate = 0.5")])
def test_an_edited_config_in_the_run_folder_is_refused(bench: Bench, place: Path, was: str, now: str) -> None:
    config = place / "run" / "config.toml"
    assert was in config.read_text()
    config.write_text(config.read_text().replace(was, now))
    refused(bench, place, 3, "config.toml changed since the run began: config_sha256 was")


# -- checkpoints ------------------------------------------------------------------------------------


def test_a_newer_schema_is_refused_by_name(bench: Bench, place: Path) -> None:
    checkpoint = place / "run" / "checkpoints" / "step_4"
    state = json.loads((checkpoint / "training" / "state.json").read_text())
    rewrite(checkpoint, "training/state.json", json.dumps(state | {"schema": 999}).encode(), schema=999)
    refused(bench, place, 3, "schema", "999")


def test_a_checkpoint_of_another_run_is_refused(bench: Bench, place: Path) -> None:
    other = bench.folder(PLAIN)
    assert bench.train(other).code == 0
    mine = place / "run" / "checkpoints" / "step_4"
    shutil.rmtree(mine)
    shutil.copytree(other / "run" / "checkpoints" / "step_4", mine)
    refused(bench, place, 3, "it belongs to journal", "this run has")


def test_a_damaged_newest_checkpoint_is_set_aside_by_name_and_the_result_is_the_same(bench: Bench, place: Path) -> None:
    damage(place / "run" / "checkpoints" / "step_4" / "model.safetensors")
    ended = resume(bench, place)
    assert "checkpoint step_4 was passed over" in ended.said, ended.said
    assert "goes on after step 2" in ended.said
    assert (place / "run" / "checkpoints" / "damaged_step_4").is_dir()
    bench.check(PLAIN, place, ended)


def test_when_no_checkpoint_can_be_trusted_the_resume_is_refused(bench: Bench, place: Path) -> None:
    for step in (2, 4):
        damage(place / "run" / "checkpoints" / f"step_{step}" / "training" / "optimiser.safetensors")
    refused(bench, place, 3, "none of the 2 checkpoints", "would look like a resume and be none")


def test_with_all_checkpoints_gone_and_early_batches_forgotten_the_resume_is_refused(bench: Bench, place: Path) -> None:
    shutil.rmtree(place / "run" / "checkpoints")
    refused(bench, place, 3, "the newest good checkpoint is of step 0", "journal no longer holds step 1")


# -- the journal ------------------------------------------------------------------------------------


def test_a_missing_journal_is_not_an_empty_one(bench: Bench, place: Path) -> None:
    (place / LEDGER).unlink()
    refused(bench, place, 3, "ledger.journal is missing, and the run has trained")
    assert not (place / LEDGER).exists(), "a new one was begun"


def test_a_missing_folder_of_journals_is_refused_too(bench: Bench, place: Path) -> None:
    shutil.rmtree(place / "run" / "journal")
    refused(bench, place, 3, "ledger.journal is missing, and the run has trained")


def test_a_journal_of_another_run_is_refused(bench: Bench, place: Path) -> None:
    """Of a run with the same settings, even at the same place."""
    (place / "run").rename(place / "mine")
    assert bench.train(place, failpoints="loop.before_log=kill@5").code == -signal.SIGKILL
    shutil.copy(place / LEDGER, place / "mine" / "journal" / "ledger.journal")
    shutil.rmtree(place / "run")
    (place / "mine").rename(place / "run")
    refused(bench, place, 3, "it belongs to journal", "this run has")


@pytest.mark.parametrize("name", ["ledger.journal", "batches_2.journal"])
def test_damage_in_the_middle_of_a_journal_is_refused_with_its_offset(bench: Bench, place: Path, name: str) -> None:
    path = place / "run" / "journal" / name
    with Journal.open(path, readonly=True) as journal:
        second = list(journal.records())[1]
    damage(path, at=second.offset + 40)
    refused(bench, place, 3, f"{name} is damaged at byte {second.offset}")


@pytest.mark.parametrize("name", ["ledger.journal", "batches_4.journal"])
def test_a_torn_tail_is_cut_counted_and_told(bench: Bench, place: Path, name: str) -> None:
    with (place / "run" / "journal" / name).open("ab") as file:
        file.write(b"x" * 37)
    ended = resume(bench, place)
    assert "37 bytes of an unfinished journal record were cut off" in ended.said
    bench.check(PLAIN, place, ended)


def test_a_torn_line_of_metrics_is_cut_and_the_numbers_are_the_same(bench: Bench, place: Path) -> None:
    with (place / "run" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "loss": 0.1')
    bench.check(PLAIN, place, resume(bench, place))


@pytest.mark.parametrize(
    ("change", "lost"),
    [(lambda rows: [], 1), (lambda rows: rows[:2], 2), (lambda rows: rows[:2] + rows[3:], 2)],
    ids=["gone", "older copy", "a hole"],
)
def test_numbers_that_are_missing_are_refused(
    bench: Bench, place: Path, change: Callable[[list[str]], list[str]], lost: int
) -> None:
    path = place / "run" / "metrics.jsonl"
    rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join(change(rows)))
    refused(bench, place, 3, f"metrics.jsonl is not what the run wrote: step {lost} is missing")


# -- the folder -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["run", "no such folder"])
def test_a_folder_without_a_config_is_no_run(bench: Bench, place: Path, name: str) -> None:
    (place / "run" / "config.toml").unlink()
    ended = resume(bench, place, run=name)
    assert ended.code == 3, ended.said
    assert "is not a run folder" in ended.said
    assert ("it has no config.toml" in ended.said) == (name == "run")


def test_a_run_folder_that_was_moved_goes_on_where_it_is(bench: Bench, place: Path) -> None:
    elsewhere = place / "somewhere else" / "mein Läuf 走"
    elsewhere.parent.mkdir()
    (place / "run").rename(elsewhere)
    ended = resume(bench, place, run=str(elsewhere.relative_to(place)))
    assert ended.code == 0, ended.said
    elsewhere.rename(place / "run")
    bench.check(PLAIN, place, ended)


def test_a_finished_run_gives_its_verdict_again_and_trains_nothing(bench: Bench, place: Path) -> None:
    assert resume(bench, place).code == 0
    before = facts(place / "run")
    with Journal.open(place / LEDGER, readonly=True) as journal:
        number = journal.last_number
    ended = resume(bench, place)
    assert ended.code == 0, ended.said
    assert "PASS" in ended.said
    assert facts(place / "run") == before
    with Journal.open(place / LEDGER, readonly=True) as journal:
        told = [entry.record["event"] for entry in journal.records(after=number)]
    assert not {"ledger.train", "ledger.lease", "ledger.plan", "ledger.drop"} & set(told)


def test_a_read_only_run_folder_is_an_error_of_the_disk_and_stays_as_it_is(bench: Bench, place: Path) -> None:
    before = tree(place / "run")
    ended = bench.warm.run("train", "--resume", "run", cwd=place, before=[("read_only", place / "run")])
    if "cannot mount here" in ended.said:
        pytest.skip("needs the right to mount, or user namespaces")
    assert ended.code == 74, ended.said
    assert "Read-only file system" in ended.said
    assert tree(place / "run") == before
    bench.check(PLAIN, place, resume(bench, place))


def test_a_stop_before_the_first_step_can_be_resumed(bench: Bench) -> None:
    """Only the config is there: the run begins at step 0."""
    folder = bench.folder(PLAIN)
    assert bench.train(folder, failpoints="session.config_written=kill").code == -signal.SIGKILL
    assert sorted(os.listdir(folder / "run" / "journal")) == []
    bench.check(PLAIN, folder, resume(bench, folder))


def test_an_evaluation_set_that_changed_is_refused_by_name(bench: Bench) -> None:
    folder = bench.killed(SETS, "loop.before_log=kill@3").folder
    rows = (folder / "own.jsonl").read_text().splitlines()
    (folder / "own.jsonl").write_text("\n".join([rows[0].replace('"1"', '"2"'), *rows[1:]]) + "\n")
    refused(bench, folder, 3, "eval_sets.own changed since the run began")
    (folder / "own.jsonl").write_text("\n".join(rows) + "\n")
    bench.check(SETS, folder, resume(bench, folder))
