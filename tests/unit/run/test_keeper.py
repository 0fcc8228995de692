"""A run folder is opened, rewound and pruned without ever taking unreadable state for a fresh start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import StateError
from surefoot.records import Group, Rollout, Task, Turn, Verdict
from surefoot.run.store import RunStore
from surefoot.runtime.task_queue import DurableTaskQueue
from surefoot.storage.files import commit_folder
from surefoot.storage.lock import RunLock
from surefoot.storage.run_folder import RunFolder
from surefoot.tracking.metrics import MetricsLog, read_metrics

TASKS = [Task(id=f"t{i}", prompt="?") for i in range(4)]


def begin(tmp_path: Path) -> RunFolder:
    folder = RunFolder.create(tmp_path / "run", "run", tmp_path)
    folder.config.write_text("model = 'm'\n")
    return folder


def keep(folder: RunFolder) -> RunStore:
    return RunStore(folder, RunLock(folder.root))


def train(keeper: RunStore, first: int, last: int) -> None:
    """Steps without a model: batches, ledger and metrics as a run leaves them."""
    queue = DurableTaskQueue(keeper.ledger, keeper.batches, TASKS, seed=0)
    with MetricsLog(keeper.folder.metrics) as log:
        for step in range(first, last + 1):
            batch = queue.next_batch(step, 1)
            turn = Turn((1,), (2,), (-0.1,), step - 1)
            name = f"train/{step}/0"
            group = Group(batch.tasks[0], name, (Rollout(batch.tasks[0].id, name, 0, (turn,), 1.0),))
            queue.record_rollouts(batch, [group])
            queue.close_batch(batch, step, [None])
            log.log(step, {"loss": float(step)})
            if step % 2 == 0:
                log.log(step, {"eval_n": 1.0})


def checkpoint(folder: RunFolder, step: int) -> None:
    temporary = folder.checkpoint(step).with_name(f".step_{step}.partial")
    temporary.mkdir()
    (temporary / "weights").write_bytes(bytes([step]))
    commit_folder(temporary, folder.checkpoint(step), {"step": step})


def test_a_folder_with_a_config_alone_begins_at_step_0(tmp_path: Path) -> None:
    folder = begin(tmp_path)
    (folder.journal).rmdir()
    keeper = keep(folder)
    assert (keeper.ledger.step, keeper.batches.steps(), keeper.notes()) == (0, [], [])
    keeper.close()
    assert not (folder.root / "lock").exists()


@pytest.mark.parametrize("left", ["batches", "checkpoint"])
def test_a_run_that_trained_and_lost_its_journal_is_refused(tmp_path: Path, left: str) -> None:
    folder = begin(tmp_path)
    keeper = keep(folder)
    train(keeper, 1, 1)
    keeper.close()
    (folder.journal / "ledger.journal").unlink()
    if left == "checkpoint":
        checkpoint(folder, 1)
        for path in folder.journal.glob("batches_*"):
            path.unlink()
    lock = RunLock(folder.root)
    with pytest.raises(StateError, match=r"ledger.journal is missing, and the run has trained"):
        RunStore(folder, lock)
    lock.close()


def test_a_rewind_cuts_numbers_and_ledger_to_the_same_step(tmp_path: Path) -> None:
    folder = begin(tmp_path)
    keeper = keep(folder)
    train(keeper, 1, 5)
    folder.write_verdict(Verdict.INCOMPLETE, ["stopped"])
    keeper.close()
    with folder.metrics.open("ab") as file:
        file.write(b'{"step": 6, "lo')
    keeper = keep(folder)
    assert keeper.rewind(2, evaluated=2, passes=1) == 3
    assert [row["step"] for row in read_metrics(folder.metrics)] == [1, 2, 2]
    assert (keeper.ledger.step, keeper.ledger.balance().trained) == (2, 2)
    assert not folder.verdict.exists(), "the run is not over"
    assert keeper.rewind(2, evaluated=2, passes=1) == 3, "a resume that was killed is done again"
    train(keeper, 3, 6)
    assert keeper.ledger.balance().lost == 0


def test_the_evaluation_of_a_step_whose_state_does_not_know_it_is_cut_too(tmp_path: Path) -> None:
    folder = begin(tmp_path)
    keeper = keep(folder)
    train(keeper, 1, 2)
    keeper.rewind(2, evaluated=-1, passes=1)
    assert [sorted(row) for row in read_metrics(folder.metrics)] == [["loss", "step"]] * 2


@pytest.mark.parametrize(("passes", "missing"), [(1, 3), (2, 3)])
def test_steps_that_cannot_be_repeated_are_refused(tmp_path: Path, passes: int, missing: int) -> None:
    folder = begin(tmp_path)
    keeper = keep(folder)
    train(keeper, 1, 4)
    keeper.batches._kept.pop(missing)
    with pytest.raises(StateError, match=f"no longer holds step {missing}"):
        keeper.rewind(1 if passes == 1 else 3, evaluated=-1, passes=passes)
    assert keeper.ledger.step == 4, "nothing was changed"


def test_batches_go_when_two_good_checkpoints_lie_behind_them(tmp_path: Path) -> None:
    folder = begin(tmp_path)
    keeper = keep(folder)
    said: list[Any] = []
    for step in range(1, 5):
        train(keeper, step, step)
        checkpoint(folder, step)
        keeper.batches.roll(step)
        keeper.prune(0, 1, lambda *words: said.append(words))
    assert [p.name for p in folder.checkpoints()] == ["step_1", "step_3", "step_4"], "the best and the newest two"
    assert keeper.batches.steps() == [4]
    assert said == []
    (folder.checkpoint(4) / "weights").write_bytes(b"x")
    train(keeper, 5, 5)
    checkpoint(folder, 5)
    keeper.prune(0, 1, lambda *words: said.append(words))
    assert "step_4 is not as it was saved" in said[0][0]
    assert [p.name for p in folder.checkpoints()] == ["step_1", "step_3", "step_4", "step_5"], "3 is needed now"


def test_batches_behind_a_checkpoint_that_is_damaged_stay_even_when_nothing_is_pruned(tmp_path: Path) -> None:
    folder = begin(tmp_path)
    keeper = keep(folder)
    for step in range(1, 4):
        train(keeper, step, step)
        checkpoint(folder, step)
        if step == 2:
            (folder.checkpoint(2) / "weights").write_bytes(b"x")
        keeper.batches.roll(step)
        keeper.prune(1, None, lambda *words: None)
    assert [p.name for p in folder.checkpoints()] == ["step_1", "step_2", "step_3"], "all on the cadence"
    assert keeper.batches.steps() == [1, 2, 3], "step 2 cannot be trusted, so step 1 may be needed"


def test_what_an_interrupted_write_left_is_swept(tmp_path: Path) -> None:
    folder = begin(tmp_path)
    for name in (".verdict.json.123.tmp", ".status.json.0a1b2c3d.123.tmp"):  # of the first edition, and of this one
        (folder.root / name).write_text("{")
    (folder.root / "checkpoints/.step_3.partial").mkdir()
    (folder.root / "mine.tmp").write_text("stays")
    keeper = keep(folder)
    assert sorted(keeper.swept) == [".status.json.0a1b2c3d.123.tmp", ".step_3.partial", ".verdict.json.123.tmp"]
    assert (folder.root / "mine.tmp").exists()


def test_a_second_driver_is_refused(tmp_path: Path) -> None:
    folder = begin(tmp_path)
    keeper = keep(folder)
    with pytest.raises(StateError, match="is in use by process"):
        keep(folder)
    keeper.close()
    keep(folder).close()


def test_the_verdict_is_json_and_hides_nothing_that_is_there(tmp_path: Path) -> None:
    folder = begin(tmp_path)
    folder.write_verdict(Verdict.PASS, ["fine"], {"ledger": {"lost": 0}})
    assert json.loads(folder.verdict.read_text()) == {"status": "PASS", "reasons": ["fine"], "ledger": {"lost": 0}}
