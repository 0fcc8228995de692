"""A file or folder is there whole or not at all, whoever writes it, and whatever goes wrong meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from surefoot.system import files
from surefoot.system.files import atomic_file, atomic_folder, atomic_write


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_text_and_bytes_replace_the_whole_file_and_are_private(tmp_path: Path) -> None:
    path = tmp_path / "a"
    atomic_write(path, "a long old text, ü")
    assert path.read_text(encoding="utf-8") == "a long old text, ü"
    atomic_write(path, b"new", durable=False)
    assert path.read_bytes() == b"new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert names(tmp_path) == ["a"]


def test_a_block_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a"
    atomic_write(path, "old")

    def fail(fault: type[BaseException]) -> None:
        with atomic_file(path) as file:
            file.write(b"half")
            raise fault

    for fault in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(fault):
            fail(fault)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
def test_what_the_disk_refuses_is_its_own_error_and_leaves_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "a"
    atomic_write(path, "old")

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(OSError, match="No space left"):
            atomic_write(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["a"]


def watched(monkeypatch: pytest.MonkeyPatch, write: Callable[[], None]) -> list[str]:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd))[1])
        patch.setattr(os, "replace", lambda a, b: (calls.append("rename"), replace(a, b))[1])
        write()
    return calls


def test_a_durable_write_syncs_bytes_then_name_and_another_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages: list[str] = []
    durable = watched(monkeypatch, lambda: atomic_write(tmp_path / "a", "x", passed=stages.append))
    assert durable == ["fsync", "rename", "fsync"]
    assert stages == ["written", "synced", "renamed"]
    assert watched(monkeypatch, lambda: atomic_write(tmp_path / "a", "x", durable=False)) == ["rename"]


def test_planted_write_without_a_sync_of_the_folder_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: the name is not on the disk, and the order of the calls tells it."""
    monkeypatch.setattr(files, "sync_folder", lambda folder: None)
    assert watched(monkeypatch, lambda: atomic_write(tmp_path / "a", "x")) != ["fsync", "rename", "fsync"]


def test_a_link_is_replaced_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("precious")
    (tmp_path / "a").symlink_to(tmp_path / "target")
    atomic_write(tmp_path / "a", "new")
    assert (tmp_path / "target").read_text() == "precious"
    assert not (tmp_path / "a").is_symlink()


def test_a_file_that_may_not_be_replaced_is_not(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with atomic_file(path, overwrite=False) as file:
        file.write(b"first")
    with pytest.raises(FileExistsError), atomic_file(path, overwrite=False) as file:
        file.write(b"second")
    assert path.read_bytes() == b"first"
    assert names(tmp_path) == ["a"]


def test_rights_are_those_asked_for_less_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        with atomic_file(tmp_path / "a", mode=0o666) as file:
            file.write(b"x")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644


def test_two_writers_of_one_file_do_not_take_each_others_bytes(tmp_path: Path) -> None:
    """Both are half way through at the same time; the last to end wins, whole."""
    path, both = tmp_path / "a", threading.Barrier(2)

    def write(letter: bytes) -> None:
        with atomic_file(path) as file:
            file.write(letter * 1000)
            both.wait(timeout=30)
            file.write(letter * 1000)

    threads = [threading.Thread(target=write, args=(letter,)) for letter in (b"x", b"y")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert path.read_bytes() in (b"x" * 2000, b"y" * 2000)
    assert names(tmp_path) == ["a"]


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "made") as folder:
        (folder / "a").write_text("1")
        assert not (tmp_path / "made").exists()
    assert names(tmp_path / "made") == ["a"]

    def fail() -> None:
        with atomic_folder(tmp_path / "other", prefix=".mine.") as folder:
            assert folder.name.startswith(".mine.")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    with pytest.raises(OSError, match="not empty"), atomic_folder(tmp_path / "made") as folder:
        (folder / "b").write_text("2")
    assert names(tmp_path) == ["made"]
    assert names(tmp_path / "made") == ["a"]
