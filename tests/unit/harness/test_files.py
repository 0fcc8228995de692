"""Whole files or none, and no default for a file that cannot be read."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from surefoot.errors import StateError
from surefoot.harness import files
from surefoot.harness.files import read_json, write_atomic, write_json


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "ünï.json"
    write_json(path, {"a": [1, 2.5, None, "ü"]})
    assert read_json(path) == {"a": [1, 2.5, None, "ü"]}
    assert "ü" in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_json_does_not_have_is_refused_and_the_old_file_stays(tmp_path: Path, value: float) -> None:
    path = tmp_path / "a.json"
    write_json(path, 1)
    with pytest.raises(ValueError):
        write_json(path, {"x": value})
    assert read_json(path) == 1


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_crash_at_any_step_leaves_the_old_file_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "a.json"
    write_atomic(path, "old")

    def fail(*words: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_planted_write_in_place_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: a writer that opens the target itself has destroyed it by the time the disk says no."""
    path = tmp_path / "a.json"
    path.write_text("old")

    def in_place(target: Path, data: str) -> None:
        target.write_text(data[:1])
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        in_place(path, "new")
    assert path.read_text() != "old"


@pytest.mark.parametrize(
    "text", ["", "{", '{"a": NaN}', '{"a": Infinity}', "[" * 100_000, b"\xff\xfe", '{"a": 1}{"b"'], ids=range(7)
)
def test_torn_or_odd_text_is_an_error_with_the_files_name(tmp_path: Path, text: str | bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(StateError, match=r"a\.json is not JSON"):
        read_json(path)


def test_a_missing_file_and_a_folder_are_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "gone.json", tmp_path):
        with pytest.raises(StateError, match="cannot be read"):
            read_json(path)


def test_a_new_folder_of_ours_is_not_seen_by_git_and_an_old_one_stays_as_it_is(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)

    def seen() -> str:
        command = ["git", "-C", str(tmp_path), "status", "--porcelain", "--untracked-files=all"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    write_json(files.make_unseen(tmp_path / ".surefoot") / "affected.json", {})
    assert seen() == ""
    (tmp_path / "mine").mkdir()
    write_json(files.make_unseen(tmp_path / "mine") / "kept.json", {})
    assert seen() == "?? mine/kept.json\n", "whoever made a folder decides about it"
