"""A plain file, or an error at once: nothing behind a link, nothing that waits, nothing without end."""

from __future__ import annotations

import io
import os
import socket
from pathlib import Path

import pytest

from surefoot.system.files import (
    APPEND,
    TooLongError,
    bounded_lines,
    descriptor_to_replace,
    linked,
    open_plain,
    plain_descriptor,
    read_plain,
)


def make(kind: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "link":
        (path.parent / "target").write_text("theirs")
        path.symlink_to(path.parent / "target")
    elif kind == "dangling":
        path.symlink_to(path.parent / "nowhere")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        monkeypatch.chdir(path.parent)
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(path.name)


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "folder", "socket"])
def test_what_is_no_plain_file_is_refused_for_reading_and_for_writing(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x"
    make(kind, path, monkeypatch)
    for attempt in (open_plain, lambda p: plain_descriptor(p, APPEND), descriptor_to_replace):
        with pytest.raises(OSError):
            attempt(path)
    assert not (tmp_path / "nowhere").exists()
    assert kind != "link" or (tmp_path / "target").read_text() == "theirs"


def test_a_plain_file_is_read_appended_to_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for text in (b"one\n", b"two\n"):
        with os.fdopen(plain_descriptor(path, APPEND), "wb") as file:
            file.write(text)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_plain(path, 8) == b"one\ntwo\n"
    with pytest.raises(TooLongError):
        read_plain(path, 7)
    with os.fdopen(descriptor_to_replace(path), "wb") as file:
        file.write(b"new")
    assert path.read_bytes() == b"new"
    with pytest.raises(FileNotFoundError):
        open_plain(tmp_path / "none")


def test_lines_are_whole_or_refused() -> None:
    assert list(bounded_lines(io.BytesIO(b"abc\nde\nf"), 4)) == [b"abc\n", b"de\n", b"f"]
    with pytest.raises(TooLongError):
        list(bounded_lines(io.BytesIO(b"abc\nabcd\n"), 4))


def test_links_in_a_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert linked(tmp_path, "a", "none") is None
    assert linked(tmp_path, "a", "b") == "b"
