"""The far end of a sink, in this process: a full disk, a driver that does not listen, a stranger's row."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest

from surefoot.harness.sources import read_events
from surefoot.tracking.sink_process import Reports, TensorBoardSink, _LogStream, _Whole


class SmallDisk(io.FileIO):
    """Takes half of what does not fit, as a real one does."""

    room = 100

    def write(self, data: bytes) -> int:  # type: ignore[override]
        left = max(0, self.room - self.tell())
        return super().write(data[:left])


def test_a_record_that_does_not_fit_is_taken_back_and_the_next_one_starts_at_its_place(tmp_path: Path) -> None:
    disk = SmallDisk(tmp_path / "file", "w")
    whole = _Whole(disk)
    whole.write(b"a" * 60)
    with pytest.raises(OSError, match="No space left"):
        whole.write(b"b" * 60)
    disk.room = 1000
    whole.write(b"c" * 60)
    disk.close()
    assert (tmp_path / "file").read_bytes() == b"a" * 60 + b"c" * 60


def test_an_event_file_stays_readable_after_a_full_disk(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path, "r", {})
    (file,) = (tmp_path / "tensorboard").iterdir()
    disk = SmallDisk(file, "a")
    sink._records._writer._file = disk
    disk.room = 400
    failed = 0
    for step in range(30):
        try:
            sink.write(step, {"loss": step / 2})
        except OSError:
            failed += 1
    disk.close()
    sink.close()
    metrics = read_events(tmp_path).metrics()
    assert failed > 0
    assert metrics["loss"].steps == tuple(range(30 - failed))
    assert metrics.notes == []


def test_a_driver_that_does_not_listen_blocks_nobody_and_hears_the_newest_counts_later() -> None:
    listening, speaking = os.pipe()
    reports = Reports(speaking)
    for _ in range(5000):  # far more than a pipe holds
        reports.attempt(lambda: None)
    os.set_blocking(listening, False)
    heard = os.read(listening, 2**20)
    assert all(json.loads(line) for line in heard.splitlines()), "every line is whole"
    reports.attempt(lambda: None)
    assert json.loads(os.read(listening, 2**20).splitlines()[-1])["written"] == 5001
    os.close(listening)
    reports.attempt(lambda: None)  # nobody is there any more
    os.close(speaking)


def test_the_longest_error_still_fits_into_one_piece() -> None:
    listening, speaking = os.pipe()
    reports = Reports(speaking)

    def fail() -> None:
        raise RuntimeError('\\"😀' * 2000)

    assert not reports.attempt(fail)
    line = os.read(listening, 2**20)
    assert len(line) <= 4096
    assert json.loads(line)["errors"] == 1
    os.close(listening)
    os.close(speaking)


@pytest.mark.parametrize("ending", [SystemExit(0), KeyboardInterrupt(), RecursionError(), MemoryError()])
def test_whatever_is_raised_is_an_error_of_one_row(ending: BaseException) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    reports = Reports(nowhere)

    def fail() -> None:
        raise ending

    reports.attempt(fail)
    reports.attempt(lambda: None)
    assert (reports.errors, reports.written) == (1, 1)
    assert reports.first_error is not None
    assert reports.first_error.startswith(type(ending).__name__)
    os.close(nowhere)


def test_a_log_on_a_full_disk_ends_and_the_sink_goes_on(tmp_path: Path) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    stream = _LogStream(tmp_path / "log", full)
    print("one line", file=stream)
    print("another", file=stream)
    assert stream.left == 0
    stream.end()
    os.close(full)
