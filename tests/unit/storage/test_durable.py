"""A file or folder is there whole, or not at all."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import StateError, StorageError
from surefoot.storage.files import atomic_write, commit_folder, write_json


def fail(*args: Any, **kwargs: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_write_replaces_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    atomic_write(path, "long old text")
    atomic_write(path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("call", ["fsync", "replace", "open"])
def test_a_failed_write_leaves_the_old_file_and_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    path = tmp_path / "a.json"
    atomic_write(path, "old")
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StorageError, match=r"a\.json"):
        atomic_write(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_the_bytes_are_synced_before_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("rename"), replace(a, b))[1])
    atomic_write(tmp_path / "a", "x")
    assert calls == ["fsync", "rename", "fsync"]


def test_a_link_is_replaced_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("precious")
    (tmp_path / "a").symlink_to(tmp_path / "target")
    atomic_write(tmp_path / "a", "new")
    assert (tmp_path / "target").read_text() == "precious"


def test_json_with_a_number_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError):
        write_json(tmp_path / "a.json", {"x": float("inf")})
    assert list(tmp_path.iterdir()) == []


def make(folder: Path) -> Path:
    (folder / "sub").mkdir(parents=True)
    (folder / "weights").write_bytes(b"12345")
    (folder / "sub" / "b").write_bytes(b"")
    return folder


def test_a_committed_folder_has_a_manifest_of_every_file(tmp_path: Path) -> None:
    final = commit_folder(make(tmp_path / ".t"), tmp_path / "step_1", {"step": 1})
    manifest = json.loads((final / "manifest.json").read_text())
    assert manifest["step"] == 1
    assert manifest["files"]["weights"] == {"size": 5, "sha256": hashlib.sha256(b"12345").hexdigest()}
    assert set(manifest["files"]) == {"weights", "sub/b"}
    assert not (tmp_path / ".t").exists()
    assert (final / "weights").stat().st_mode & 0o777 == 0o600
    assert (final / "sub").stat().st_mode & 0o777 == 0o700


def test_a_folder_is_never_overwritten(tmp_path: Path) -> None:
    final = commit_folder(make(tmp_path / ".t"), tmp_path / "step_1", {"step": 1})
    with pytest.raises(StateError):
        commit_folder(make(tmp_path / ".t"), final, {"step": 2})
    assert json.loads((final / "manifest.json").read_text())["step"] == 1


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_failed_commit_shows_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    make(tmp_path / ".t")
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(StorageError):
        commit_folder(tmp_path / ".t", tmp_path / "step_1", {})
    assert not (tmp_path / "step_1").exists()
