"""Tasks on the disk: the same tasks as when read whole, from every kind of source, each one seek away."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from streaming_kit import FORMS, as_jsonl, ids, row, rows_of, write

from surefoot.data.files import read_task_file
from surefoot.data.heldout import split_heldout
from surefoot.data.on_disk import dataset
from surefoot.data.on_disk.dataset import StreamingDataset
from surefoot.data.tasks import fingerprint
from surefoot.errors import TaskError
from surefoot.records import Task


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "odd name ü.jsonl", [row(i) for i in range(60)])


# -- the same tasks as when the file is read whole ---------------------------------------------


@FORMS
def test_every_format_gives_the_tasks_and_the_fingerprint_of_a_file_read_whole(make: Any, tmp_path: Path) -> None:
    made = make(tmp_path, [row(i) for i in range(30)])
    whole = read_task_file(made)
    with StreamingDataset(made) as data:
        assert list(data) == list(whole)
        assert data[7] == whole[7]
        assert data[-1] == whole[-1]
        assert data[3:5] == list(whole[3:5])
        assert data.fingerprint == fingerprint(whole)
        assert ids(data.split_heldout(0.3)[1]) == ids(split_heldout(whole, 0.3)[1])


def test_rows_without_an_id_get_the_same_one_as_in_a_file_read_whole(tmp_path: Path) -> None:
    made = as_jsonl(tmp_path, [{"prompt": f"p{i}", "answer": i} for i in range(5)])
    assert ids(StreamingDataset(made)) == ids(read_task_file(made))


def test_a_byte_order_mark_windows_line_ends_and_a_missing_last_one_change_nothing(tmp_path: Path) -> None:
    lines = [json.dumps(row(i)) for i in range(3)]
    made = tmp_path / "t.jsonl"
    made.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    assert list(StreamingDataset(made)) == list(read_task_file(made))


@pytest.mark.parametrize(
    "source", [lambda: rows_of(9), rows_of(9), [row(i) for i in range(9)]], ids="function generator list".split()
)
def test_functions_generators_and_lists_are_sources_too(source: Any) -> None:
    data = StreamingDataset(source, name="made")
    assert ids(data) == [f"t{i}" for i in range(9)]
    assert data[0].dataset == "made"
    assert data.get("t5") == data[5]


def test_a_private_folder_goes_with_its_data_set() -> None:
    data = StreamingDataset(rows_of(3))
    folder = data.table.folder
    assert folder.is_dir()
    del data
    assert not folder.exists()


def test_a_hugging_face_data_set_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    hugging = datasets.Dataset.from_list([row(i) for i in range(9)])
    first = StreamingDataset(hugging, cache_dir=tmp_path, name="hf")
    assert list(first) == [Task(t.id, t.prompt, t.columns, "hf") for t in first]
    assert ids(first) == [f"t{i}" for i in range(9)]
    monkeypatch.setattr(dataset, "spool_rows", lambda *_: pytest.fail("written again"))
    assert list(StreamingDataset(hugging, cache_dir=tmp_path, name="hf")) == list(first)
    with pytest.raises(pytest.fail.Exception):
        StreamingDataset(hugging.select([1, 2]), cache_dir=tmp_path, name="hf")


def test_a_key_stands_for_the_contents_of_a_generator(tmp_path: Path) -> None:
    assert len(StreamingDataset(rows_of(4), cache_dir=tmp_path, key="v1")) == 4
    assert len(StreamingDataset(rows_of(5), cache_dir=tmp_path, key="v1")) == 4
    assert len(StreamingDataset(rows_of(5), cache_dir=tmp_path, key="v2")) == 5
    assert len(StreamingDataset(rows_of(6), cache_dir=tmp_path)) == 6


def test_a_generator_that_fails_half_way_is_an_error_and_not_a_short_data_set() -> None:
    def failing() -> Iterator[dict[str, Any]]:
        yield row(0)
        raise RuntimeError("the server is gone")

    with pytest.raises(TaskError, match="failed after 1 rows: RuntimeError: the server is gone"):
        StreamingDataset(failing, name="web")


@pytest.mark.parametrize("value", [b"\x80", {1, 2}, float("nan"), object()], ids=["bytes", "set", "nan", "object"])
def test_a_value_that_is_no_plain_data_is_a_bad_row_with_its_column(value: Any) -> None:
    rows = [row(0), row(1, answer=value)]
    with pytest.raises(TaskError, match=r"made\[1\].*column 'answer'"):
        StreamingDataset(rows, name="made")
    assert StreamingDataset(rows, name="made", max_bad_rows=1).statistics().bad_rows == 1


@pytest.mark.parametrize(
    "source", [42, {"prompt": "x"}, b"rows", lambda: "text"], ids=["number", "mapping", "bytes", "function"]
)
def test_what_is_no_source_is_refused(source: Any) -> None:
    with pytest.raises(TaskError, match="rows come from"):
        StreamingDataset(source)


# -- one seek, bounded memory ------------------------------------------------------------------


def test_a_task_is_one_read_of_its_own_bytes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = StreamingDataset(path)
    reads: list[int] = []
    plain = os.pread

    def counted(fd: int, size: int, offset: int) -> bytes:
        reads.append(size)
        return plain(fd, size, offset)

    monkeypatch.setattr(os, "pread", counted)
    assert data[41].id == "t41"
    assert len(reads) == 2, "one index row, one row"
    assert sum(reads) < 250
    assert data[41].id == "t41"
    assert len(reads) == 2, "the second time it comes from the cache"


def test_parsed_tasks_are_kept_up_to_the_size_of_the_cache(path: Path) -> None:
    data = StreamingDataset(path, cache_size=5)
    for task in data:
        assert task.id
    assert len(data.table.cache) == 5
    with pytest.raises(ValueError, match="capacity"):
        StreamingDataset(path, cache_size=0)


def test_a_long_row_is_not_cached(tmp_path: Path) -> None:
    data = StreamingDataset(write(tmp_path / "t.jsonl", [row(0, answer="x" * 100_000), row(1)]))
    assert ids([data[0], data[1]]) == ["t0", "t1"]
    assert len(data.table.cache) == 1


def test_an_index_is_built_once_and_again_when_the_file_changed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    StreamingDataset(path).close()
    built: list[Path] = []
    plain = dataset.build_index
    monkeypatch.setattr(dataset, "build_index", lambda source, *a, **k: built.append(source) or plain(source, *a, **k))  # type: ignore[func-returns-value]
    StreamingDataset(path)
    assert not built
    write(path, [row(i) for i in range(61)])
    assert len(StreamingDataset(path)) == 61
    assert len(built) == 1


def test_with_a_full_hash_an_edit_in_the_middle_that_keeps_size_and_date_is_seen(tmp_path: Path) -> None:
    made = write(tmp_path / "t.jsonl", [row(i, answer="x" * 200) for i in range(2000)])
    StreamingDataset(made, full_hash=True)
    facts = made.stat()
    data = bytearray(made.read_bytes())
    data[len(data) // 2 :] = data[len(data) // 2 :].replace(b"xxx", b"yyy", 1)
    made.write_bytes(bytes(data))
    os.utime(made, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    assert sum("y" in task.columns["answer"] for task in StreamingDataset(made, full_hash=True)) == 1


def test_the_index_lies_beside_the_file_out_of_the_way_of_git(path: Path, tmp_path: Path) -> None:
    StreamingDataset(path)
    hidden = path.parent / ".surefoot"
    assert (hidden / ".gitignore").read_text() == "*\n"
    assert len(list(hidden.glob("*.index"))) == 1
    StreamingDataset(path, cache_dir=tmp_path / "else where")
    assert len(list((tmp_path / "else where").glob("*.index"))) == 1


@pytest.mark.parametrize("damage", ["cut", "empty", "other magic", "footer", "version"])
def test_a_damaged_index_is_never_used(path: Path, damage: str) -> None:
    place = StreamingDataset(path).table.index.path
    data = place.read_bytes()
    place.write_bytes({
        "cut": data[:-100], "empty": b"", "other magic": b"X" * 8 + data[8:],
        "footer": data[:-60] + b"?" + data[-59:], "version": data.replace(b'"version": 1', b'"version": 7'),
    }[damage])  # fmt: skip
    assert ids(StreamingDataset(path)) == [f"t{i}" for i in range(60)]
    assert place.read_bytes() == data, "built anew, to the same bytes"


def test_another_working_folder_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    data = StreamingDataset(path.name, cache_dir="cache")
    made = StreamingDataset(rows_of(3), cache_dir="cache")
    monkeypatch.chdir("/")
    assert data[5].id == "t5"
    assert len(data.filter(category="c0")) == 30
    assert made[2].id == "t2"


def test_sending_a_data_set_to_another_process_says_what_to_do_instead(path: Path) -> None:
    with pytest.raises(ValueError, match="open the file there"):
        pickle.dumps(StreamingDataset(path))


def test_a_fork_that_ends_leaves_the_private_folder_to_its_parent() -> None:
    data = StreamingDataset(rows_of(3))
    child = os.fork()
    if child == 0:
        try:
            dataset._remove(str(data.table.folder), os.getppid())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert data[1].id == "t1"
    assert data.table.folder.is_dir()
