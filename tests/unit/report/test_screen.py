"""Whoever looks on may leave, or stop reading: what is shown is lost, the run is not."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.report.console import RichView, open_view
from surefoot.report.view import Screen


def test_a_reader_who_is_gone_is_not_missed() -> None:
    reading, writing = os.pipe()
    with contextlib.suppress(BrokenPipeError), os.fdopen(writing, "w") as stream:  # its own last flush complains
        screen = Screen(stream)
        screen.write("seen\n")
        assert os.read(reading, 100) == b"seen\n"
        os.close(reading)
        written = [screen.write("unseen\n") for _ in range(3)]
    assert written == [7, 7, 7]


def test_a_reader_who_stops_reading_costs_lines_and_is_told_how_many() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        screen = Screen(stream, patience_s=0.01)
        for number in range(20000):
            screen.write(f"line {number}\n")
        os.set_blocking(reading, False)
        first = os.read(reading, 2**20).decode()
        assert first.startswith("line 0\nline 1\n")
        shown = first.count("\n")
        assert 0 < shown < 20000
        screen.write("back\n")
        assert os.read(reading, 2**20).decode() == f"[{20000 - shown} lines were left out: nobody read them]\nback\n"
    os.close(reading)


def test_planted_without_the_look_for_room_a_full_pipe_blocks_for_ever(tmp_path: Path) -> None:
    """Teeth: lines that nobody reads, with the look taken away, never end."""
    program = (
        "import sys\nfrom surefoot.report.view import Screen\n"
        "if sys.argv[1]: Screen._has_room = lambda self, stream: True\n"
        "screen = Screen(sys.stdout, patience_s=0.01)\n"
        "for n in range(50000): screen.write('line\\n')\n"
        "open(sys.argv[2], 'w').write('through')\n"
    )
    for planted, ends in (("", True), ("planted", False)):
        marker = tmp_path / (planted or "whole")
        with subprocess.Popen([sys.executable, "-c", program, planted, str(marker)], stdout=subprocess.PIPE) as running:
            try:
                running.wait(timeout=30 if ends else 1.5)
            except subprocess.TimeoutExpired:
                running.kill()
        assert marker.exists() is ends


def test_a_terminal_that_is_closed_is_not_missed_by_the_live_view(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    ours, theirs = pty.openpty()
    monkeypatch.setenv("TERM", "xterm")
    with contextlib.suppress(OSError), os.fdopen(theirs, "w") as stream:  # its own last flush complains
        monkeypatch.setattr("sys.stdout", stream)
        monkeypatch.setattr("surefoot.report.view.silence_stdout", lambda: None)
        view = open_view(3)
        assert isinstance(view, RichView)
        view.start(["the plan"])
        assert b"the plan" in os.read(ours, 4096)
        os.close(ours)
        view.step(1, {"reward": 0.5})
        view.warn("it is late", "go home")
        view.close()
        done.append("closed")
        monkeypatch.undo()
    assert done == ["closed"]


def test_a_stream_that_is_closed_or_was_never_there_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    stream.close()
    Screen(stream).write("x")
    Screen(None).write("x")
    assert not Screen(None).isatty()
    monkeypatch.setattr("sys.stdout", None)
    open_view(3).start(["the plan"])
    monkeypatch.undo()


def test_long_text_and_odd_characters_arrive_whole() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert Screen(stream).write("ü" * 2500) == 2500
    stream.seek(0)
    assert stream.read() == "\\xfc" * 2500
