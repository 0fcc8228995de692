"""Task files at their worst: larger than memory, a line of a gigabyte, mutated bytes, kills, full disks, two at once."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
from command import ROOT
from hypothesis import example, given, settings
from hypothesis import strategies as st
from streaming_kit import as_jsonl, ids, row, write

from surefoot.data.files import read_task_file
from surefoot.data.on_disk import build
from surefoot.data.on_disk.dataset import StreamingDataset
from surefoot.data.on_disk.stream import LargeTaskStream
from surefoot.errors import TaskError

CAPPED = """
import os, resource, sys
from surefoot.data.files import read_task_file
from surefoot.data.on_disk.stream import LargeTaskStream
from surefoot.data.on_disk.dataset import StreamingDataset
from surefoot.errors import SurefootError
from pathlib import Path
path = Path(sys.argv[1])
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + {megabytes} * 2**20,) * 2)
resource.setrlimit(resource.RLIMIT_CPU, ({seconds}, {seconds}))
"""


def python(code: str, *arguments: object, megabytes: int = 64, seconds: int = 60, **environment: str) -> Any:
    """Run `code` in a fresh interpreter under a memory cap and a cap of CPU time."""
    whole = CAPPED.format(megabytes=megabytes, seconds=seconds) + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", whole, *map(str, arguments)], capture_output=True, text=True, check=False,
        env=dict(os.environ, PYTHONPATH=str(ROOT / "src"), **environment),
    )  # fmt: skip


# -- larger than memory -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """100,000 rows."""
    path = tmp_path_factory.mktemp("many") / "many.jsonl"
    with path.open("w") as file:
        for i in range(100_000):
            file.write(f'{{"id": "t{i}", "prompt": "{i} plus {i}?", "answer": "{2 * i}", "complexity": "l{i % 3}"}}\n')
    return path


def test_a_hundred_thousand_lines_are_indexed_and_drawn_under_a_cap_of_memory_and_time(many: Path) -> None:
    done = python(
        """
        data = StreamingDataset(path)
        stream = LargeTaskStream(data, seed=0)
        drawn = {task.id for _ in range(100) for task in stream.take(10)}
        shards = [data.shard(i, 4) for i in range(4)]
        print(len(data), len(drawn), sum(map(len, shards)), data.get("t99999").columns["answer"])
        """,
        many,
    )
    assert done.stdout.split() == ["100000", "1000", "100000", "199998"], done.stderr


def test_planted_bug_a_list_in_memory_does_not_fit_under_the_same_cap(many: Path) -> None:
    done = python("read_task_file(path)", many)
    assert "MemoryError" in done.stderr


@pytest.mark.parametrize(("size", "end"), [(2**30, "middle"), (2**27, "torn")])
def test_a_line_of_a_gigabyte_is_refused_without_being_held(size: int, end: str, tmp_path: Path) -> None:
    """The line is a hole in the file: it takes no room on the disk, and none in memory."""
    path = write(tmp_path / "long.jsonl", [row(0)])
    with path.open("r+b") as file:
        file.seek(size, os.SEEK_END)
        file.write(b"x" if end == "torn" else b"\n" + json.dumps(row(1)).encode())
    done = python(
        """
        try:
            StreamingDataset(path)
        except SurefootError as error:
            print(error.exit_code, error)
        print(len(StreamingDataset(path, max_bad_rows=1)))
        """,
        path,
    )
    assert "4 long.jsonl: 1 bad row(s)" in done.stdout, done.stderr
    assert "long.jsonl:2" in done.stdout
    assert f"is {size + 1:,} bytes long" in done.stdout
    assert done.stdout.split()[-1] == ("1" if end == "torn" else "2")


def test_a_generator_without_an_end_stops_at_a_limit_and_not_at_a_full_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "MAX_SPOOL_BYTES", 100_000)
    with pytest.raises(TaskError, match="gave more than 100,000 bytes"):
        StreamingDataset((row(i) for i in itertools.count()), cache_dir=tmp_path / "c")
    assert not list((tmp_path / "c").iterdir())


def test_a_parquet_file_that_unfolds_to_too_much_is_refused_before_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"prompt": ["x" * 1000] * 5000}), tmp_path / "bomb.parquet")
    monkeypatch.setattr(build, "MAX_SPOOL_BYTES", 100)
    with pytest.raises(TaskError, match="unfolds to"):
        StreamingDataset(tmp_path / "bomb.parquet")


# -- mutations ------------------------------------------------------------------------------------


def outcome(read: Any, path: Path) -> Any:
    """The tasks, or None where they are refused with a typed error."""
    try:
        return list(read(path))
    except TaskError:
        return None


@settings(max_examples=150, deadline=None)
@example(seed=2540, kind="flip")  # the last line ends in a vertical tab
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(["flip", "cut", "insert", "double", "swap"]))
def test_mutated_files_are_read_or_refused_exactly_as_when_read_whole(
    seed: int, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("mutated")
    path, stream = as_jsonl(folder, [row(i) for i in range(4)]), random.Random(seed)
    data = bytearray(path.read_bytes())
    at = stream.randrange(len(data))
    if kind == "flip":
        data[at] ^= 1 << stream.randrange(8)
    elif kind == "cut":
        del data[at : at + stream.randrange(1, 200)]
    elif kind == "insert":
        data[at:at] = bytes(stream.choices(b'{}[]",:\\\n\x00\xff 0aN', k=stream.randrange(1, 9)))
    else:
        lines = bytes(data).splitlines(keepends=True)
        one, other = stream.choices(range(4), k=2)
        lines[one], lines[other] = (lines[other], lines[one]) if kind == "swap" else (lines[one], lines[one])
        data = bytearray(b"".join(lines))
    path.write_bytes(bytes(data))
    whole = outcome(read_task_file, path)
    assert outcome(StreamingDataset, path) == whole
    if whole is not None:
        path.rename(path.with_suffix(".json"))
        path.with_suffix(".json").write_bytes(b"[" + b",".join(bytes(data).strip().splitlines()) + b"]")
        rest = outcome(StreamingDataset, path.with_suffix(".json"))
        assert rest is None or [(task.id, task.prompt) for task in rest] == [(task.id, task.prompt) for task in whole]


# -- kills, full disks, company ---------------------------------------------------------------------


def test_a_build_that_is_killed_leaves_nothing_that_anybody_uses(tmp_path: Path) -> None:
    path = as_jsonl(tmp_path, [row(i) for i in range(3000)])
    done = python(
        """
        import signal
        from surefoot.data.on_disk import build as index_build
        index_build.tick = lambda stage: os.kill(os.getpid(), signal.SIGKILL)
        StreamingDataset(path)
        """,
        path,
    )
    assert done.returncode == -signal.SIGKILL
    left = {p.suffix for p in (tmp_path / ".surefoot").iterdir() if p.name != ".gitignore"}
    assert left == {".tmp"}, "half an index, under a name that nobody opens"
    assert len(StreamingDataset(path)) == 3000
    assert {p.suffix for p in (tmp_path / ".surefoot").iterdir() if p.name != ".gitignore"} == {".index"}


def test_a_full_disk_is_a_storage_error_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = as_jsonl(tmp_path, [row(i) for i in range(3000)])
    done = python(
        """
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        try:
            StreamingDataset(path)
        except SurefootError as error:
            print(error.exit_code, error)
        """,
        path,
    )
    assert done.stdout.startswith("74 "), done.stderr
    assert [p.name for p in (tmp_path / ".surefoot").iterdir()] == [".gitignore"]


def test_processes_that_build_at_the_same_time_do_not_disturb_one_another(tmp_path: Path) -> None:
    path = as_jsonl(tmp_path, [row(i) for i in range(1500)])
    code = CAPPED.format(megabytes=64, seconds=60) + "print(StreamingDataset(path).fingerprint)"
    environment = dict(os.environ, PYTHONPATH=str(ROOT / "src"))
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]
    said = {process.communicate()[0] for process in running}
    assert [process.returncode for process in running] == [0, 0, 0]
    assert said == {StreamingDataset(path).fingerprint + "\n"}


def test_threads_that_build_at_the_same_time_do_not_disturb_one_another(tmp_path: Path) -> None:
    path = as_jsonl(tmp_path, [row(i) for i in range(400)])
    said: list[str] = []
    threads = [threading.Thread(target=lambda: said.append(StreamingDataset(path).fingerprint)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said == [StreamingDataset(path).fingerprint] * 4


def test_a_disk_that_fails_while_reading_is_told_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = as_jsonl(tmp_path, [row(i) for i in range(20)])
    data = StreamingDataset(path)

    def broken(*_: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, *rest: (broken if fd == data.table._fd else real)(fd, *rest))
    with pytest.raises(TaskError, match=r"t\.jsonl cannot be read: Input/output error"):
        data[3]
    monkeypatch.undo()
    monkeypatch.setattr("surefoot.data.on_disk.build.scan_jsonl", lambda *_, **__: map(broken, [1]))
    with pytest.raises(TaskError, match=r"t\.jsonl cannot be read"):
        StreamingDataset(path, cache_dir=tmp_path / "other")


def test_the_order_goes_on_in_another_process_whatever_its_hash_seed(tmp_path: Path) -> None:
    path = as_jsonl(tmp_path, [row(i) for i in range(1500)])
    stream = LargeTaskStream(StreamingDataset(path), seed=3)
    stream.take(1000)
    (tmp_path / "state.json").write_text(json.dumps(stream.state_dict()))
    code = """
        import json
        stream = LargeTaskStream(StreamingDataset(path), seed=3)
        stream.load_state_dict(json.loads(Path(sys.argv[2]).read_text()))
        print(*[task.id for task in stream.take(700)])
        """
    said = {python(code, path, tmp_path / "state.json", PYTHONHASHSEED=seed).stdout for seed in ("1", "2")}
    assert said == {" ".join(ids(stream.take(700))) + "\n"}


def test_many_threads_read_the_right_tasks(tmp_path: Path) -> None:
    data = StreamingDataset(as_jsonl(tmp_path, [row(i) for i in range(300)]), cache_size=7)
    wrong: list[str] = []

    def work(seed: int) -> None:
        stream = random.Random(seed)
        for _ in range(300):
            i = stream.randrange(300)
            if data[i].id != f"t{i}" or data.get(f"t{i}") != data[i]:
                wrong.append(f"t{i}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(data.table.cache) <= 7


def test_opening_and_dropping_data_sets_leaks_no_descriptors(tmp_path: Path) -> None:
    path = as_jsonl(tmp_path, [row(i) for i in range(30)])
    StreamingDataset(path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        data = StreamingDataset(path)
        data.filter(category="c0").shard(0, 2)
        StreamingDataset([row(1)])
    del data
    assert len(os.listdir("/proc/self/fd")) == before
