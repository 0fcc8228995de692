"""Old checkpoints go, good ones never run out, and the way back never leads through a damaged one."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.errors import StateError, StorageError
from surefoot.storage import checkpoints
from surefoot.storage.checkpoints import Pruned, checkpoints_by_step, may_go, newest_good, prune, remove, sweep
from surefoot.storage.files import commit_folder, verify_folder


def make(root: Path, *steps: int) -> Path:
    for step in steps:
        temporary = root / "checkpoints" / f".step_{step}.partial"
        temporary.mkdir(parents=True)
        (temporary / "model.safetensors").write_bytes(b"w" * (step + 1))
        commit_folder(temporary, root / "checkpoints" / f"step_{step}", {"step": step})
    return root


def steps_of(root: Path) -> list[int]:
    return list(checkpoints_by_step(root))


def damage(root: Path, step: int) -> None:
    (root / "checkpoints" / f"step_{step}" / "model.safetensors").write_bytes(b"x" * (step + 1))


# -- the rule ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "save_steps", "best", "gone"),
    [
        ([], 0, None, []),
        ([1], 0, None, []),
        ([1, 2], 0, None, []),
        ([1, 2, 3], 0, None, [1]),
        ([1, 2, 3], 0, 1, []),
        ([5, 9, 10, 11, 20, 22, 25], 10, 9, [5, 11]),
        ([0, 7, 8, 9], 5, None, [0, 7]),  # step 0 is on every cadence by arithmetic, on none by meaning
        ([30, 3, 20, 10], 0, 99, [3, 10]),
    ],
)
def test_the_two_newest_the_best_and_the_cadence_stay(
    steps: list[int], save_steps: int, best: int | None, gone: list[int]
) -> None:
    assert may_go(steps, save_steps=save_steps, best=best) == gone


def test_pruning_takes_the_rest_and_only_the_rest(tmp_path: Path) -> None:
    make(tmp_path, 3, 5, 9, 10, 12, 14)
    assert prune(tmp_path, save_steps=5, best=3) == Pruned((9,), {})
    assert steps_of(tmp_path) == [3, 5, 10, 12, 14]
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {f"step_{n}" for n in (3, 5, 10, 12, 14)}
    assert prune(tmp_path, save_steps=5, best=3) == Pruned()


# -- what is damaged --------------------------------------------------------------------------


def test_a_damaged_newer_one_does_not_count_as_one_of_the_two(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3, 4, 5)
    damage(tmp_path, 4)
    done = prune(tmp_path, save_steps=0, best=None)
    assert done.removed == (1, 2)
    assert list(done.damaged) == [4]
    assert "SHA-256" in done.damaged[4]
    assert steps_of(tmp_path) == [3, 4, 5], "the damaged one stays as it is"


def test_with_fewer_than_two_good_ones_nothing_goes(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3, 4)
    for step in (2, 3, 4):
        damage(tmp_path, step)
    assert prune(tmp_path, save_steps=0, best=None).removed == ()
    assert steps_of(tmp_path) == [1, 2, 3, 4]
    assert newest_good(tmp_path).path == tmp_path / "checkpoints" / "step_1"


@pytest.mark.parametrize("bad", [set(c) for n in range(5) for c in itertools.combinations([1, 2, 3, 4], n)])
def test_whatever_is_damaged_as_many_good_ones_are_left_as_the_rule_asks(tmp_path: Path, bad: set[int]) -> None:
    make(tmp_path, 1, 2, 3, 4)
    for step in bad:
        damage(tmp_path, step)
    before = [step for step in steps_of(tmp_path) if step not in bad]
    prune(tmp_path, save_steps=0, best=None)
    after = [step for step in steps_of(tmp_path) if step not in bad]
    assert after[-2:] == before[-2:]


def test_planted_pruning_without_a_look_leaves_no_good_checkpoint(tmp_path: Path) -> None:
    """Teeth: the same round without verification trusts two damaged ones and takes the good one away."""
    make(tmp_path, 1, 2, 3)
    damage(tmp_path, 2)
    damage(tmp_path, 3)
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "checkpoints", copy / "checkpoints")
    prune(copy, save_steps=0, best=None, verify=lambda path: None)
    with pytest.raises(StateError, match="none of the 2 checkpoints"):
        newest_good(copy)
    prune(tmp_path, save_steps=0, best=None)
    assert newest_good(tmp_path).path == tmp_path / "checkpoints" / "step_1"


def test_nothing_is_read_when_nothing_could_go(tmp_path: Path) -> None:
    make(tmp_path, 10, 20, 30)
    looked: list[Path] = []
    prune(tmp_path, save_steps=10, best=None, verify=looked.append)
    assert looked == []


# -- the way back -----------------------------------------------------------------------------


def test_a_damaged_newest_is_passed_over_and_said_so(tmp_path: Path) -> None:
    make(tmp_path, 1, 2, 3)
    damage(tmp_path, 3)
    found = newest_good(tmp_path)
    assert found.path == tmp_path / "checkpoints" / "step_2"
    (note,) = found.notes()
    assert "step_3 was passed over" in note
    assert "SHA-256" in note


def test_no_checkpoint_is_not_the_same_as_no_good_one(tmp_path: Path) -> None:
    assert newest_good(tmp_path).path is None
    make(tmp_path, 1)
    damage(tmp_path, 1)
    with pytest.raises(StateError, match="none of the 1 checkpoints"):
        newest_good(tmp_path)


@pytest.mark.parametrize("name", ["step_", "step_07", "step_x", "step_1.bak", "step_٣", ".step_1.partial", "Step_1"])
def test_other_names_are_nobodys_checkpoints(tmp_path: Path, name: str) -> None:
    (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert steps_of(tmp_path) == []
    assert newest_good(tmp_path).path is None


# -- how they go ------------------------------------------------------------------------------


def crashing(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> None:
    def crash(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, crash)


@pytest.mark.parametrize("where", [(checkpoints, "sync_folder"), (shutil, "rmtree")], ids=["after rename", "in rmtree"])
def test_a_crash_while_removing_leaves_no_half_checkpoint_under_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[object, str]
) -> None:
    make(tmp_path, 1, 2, 3)
    with monkeypatch.context() as patch:
        if where[1] == "rmtree":  # the first call tidies up before; the second one is the removal
            real: Callable[..., None] = shutil.rmtree
            calls = iter([real])
            patch.setattr(shutil, "rmtree", lambda *a, **k: next(calls, _interrupted)(*a, **k))
        else:
            crashing(patch, *where)
        with pytest.raises(KeyboardInterrupt):
            prune(tmp_path, save_steps=0, best=None)
    assert steps_of(tmp_path) == [2, 3]
    assert sweep(tmp_path) == [".step_1.removed"]
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())] == ["step_2", "step_3"]


def _interrupted(*args: object, **kwargs: object) -> None:
    raise KeyboardInterrupt


def test_the_name_is_off_the_disk_before_the_first_file_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, 1)
    order: list[str] = []
    fsync, rmtree = os.fsync, shutil.rmtree
    monkeypatch.setattr(os, "fsync", lambda fd: (order.append("sync"), fsync(fd))[1])
    monkeypatch.setattr(
        shutil, "rmtree", lambda path, **k: (order.append(f"delete {path.exists()}"), rmtree(path, **k))[1]
    )
    remove(tmp_path / "checkpoints" / "step_1")
    assert order == ["delete False", "sync", "delete True"]


def test_a_disk_that_says_no_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="step_4"):
        remove(tmp_path / "checkpoints" / "step_4")


def test_a_sweep_takes_leftovers_and_follows_no_link(tmp_path: Path) -> None:
    make(tmp_path, 1)
    folder = tmp_path / "checkpoints"
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "a").write_text("a")
    (folder / ".step_2.partial").mkdir()
    (folder / ".step_2.partial" / "half").write_bytes(b"half")
    (folder / ".step_3.removed").symlink_to(precious)
    (folder / ".step_x.partial").mkdir()
    assert sweep(tmp_path) == [".step_2.partial", ".step_3.removed"]
    assert (precious / "a").read_text() == "a"
    assert {p.name for p in folder.iterdir()} == {"step_1", ".step_x.partial"}
    verify_folder(folder / "step_1")
    assert sweep(tmp_path / "nowhere") == []
