"""Duplicates, malformed rows, and files that change: named, counted, refused."""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from streaming_kit import FORMS, as_json, as_jsonl, ids, row, write

from surefoot.data.on_disk import build, dataset
from surefoot.data.on_disk import build as scan
from surefoot.data.on_disk.build import DiskSort
from surefoot.data.on_disk.dataset import StreamingDataset
from surefoot.data.on_disk.index import id_hash
from surefoot.errors import StateError, TaskError
from surefoot.records import Task


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "odd name ü.jsonl", [row(i) for i in range(60)])


# -- ids ----------------------------------------------------------------------------------------


def test_a_task_is_found_by_its_id_and_a_stranger_is_not(path: Path) -> None:
    data = StreamingDataset(path)
    assert all(data.get(f"t{i}") == data[i] for i in range(60))
    assert data.get("t60") is None
    assert data[3] in data
    assert Task(id="t3", prompt="other") not in data


@FORMS
def test_an_id_that_comes_twice_is_refused_with_both_places(make: Any, tmp_path: Path) -> None:
    made = make(tmp_path, [row(0), row(1), row(2), row(1)])
    with pytest.raises(ValueError, match="id 't1' was already used by") as caught:
        StreamingDataset(made)
    assert isinstance(caught.value, TaskError)
    places = ("t.jsonl:4", "t.jsonl:2") if make is as_jsonl else (f"{made.name}[3]", f"{made.name}[1]")
    assert all(place in str(caught.value) for place in places)


def test_two_ids_that_share_a_hash_are_both_kept_and_both_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 bits can collide: then the ids themselves decide."""
    for module in (build, dataset):
        monkeypatch.setattr(module, "id_hash", lambda task_id: id_hash(task_id) % 4)
    data = StreamingDataset(path)
    assert all(data.get(f"t{i}") == data[i] for i in range(60))
    assert data.get("t60") is None


def test_planted_bug_comparing_hashes_alone_refuses_different_ids(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "id_hash", lambda task_id: id_hash(task_id) % 4)
    monkeypatch.setattr(build._Build, "_repeated", lambda self, numbers: iter(["same hash"]))
    with pytest.raises(TaskError, match="same hash"):
        StreamingDataset(path)


def test_repeated_prompts_are_counted_and_never_cross_the_held_out_border(tmp_path: Path) -> None:
    made = as_jsonl(tmp_path, [row(i, prompt="Same?" if i in (0, 1, 2, 3, 4, 5) else f"p{i}") for i in range(40)])
    data = StreamingDataset(made)
    assert data.statistics().repeated_prompts == 5
    with pytest.raises(TaskError, match="held-out prompts are also training prompts"):
        data.split_heldout(0.5)


def test_planted_bug_without_the_search_for_repeated_prompts_they_cross(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = as_jsonl(tmp_path, [row(i, prompt="Same?" if i < 6 else f"p{i}") for i in range(40)])
    monkeypatch.setattr(StreamingDataset, "_refuse_twins", lambda self, train, heldout: None)
    train, heldout = StreamingDataset(made).split_heldout(0.5)
    assert {task.prompt for task in train} & {task.prompt for task in heldout}


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 99)), max_size=60), few=st.integers(0, 20))
def test_sorting_on_disk_is_sorting(
    pairs: list[tuple[int, int]], few: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.data.on_disk.build.IN_MEMORY", few)
    sort = DiskSort(tmp_path)
    for pair in pairs:
        sort.add(*pair)
    assert list(sort.sorted()) == sorted(pairs)
    sort.close()
    assert not list(tmp_path.iterdir())


# -- bad rows -------------------------------------------------------------------------------------

BAD_LINES = {
    "torn": '{"id": "x", "prompt": "p", "ans', "not json": "hello", "number": "42", "nan": '{"prompt": NaN}',
    "twice": '{"prompt": "a", "prompt": "b"}', "no prompt": '{"id": "x", "answer": "1"}', "deep": "[" * 100_000,
    "columns": '{"id": "x", "prompt": "p"}', "surrogate": '{"prompt": "\\ud800"}', "long number": "1" * 5000,
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD_LINES.values(), ids=BAD_LINES)
@pytest.mark.parametrize("last", [False, True], ids=["middle", "end"])
def test_a_malformed_line_is_named_counted_and_refused_unless_allowed(bad: str, last: bool, tmp_path: Path) -> None:
    lines = [json.dumps(row(i)) for i in range(4)]
    lines.insert(4 if last else 2, bad)
    made = write(tmp_path / "t.jsonl", [], text="\n".join(lines) + ("" if last else "\n"))
    place = f"t.jsonl:{5 if last else 3} (byte {sum(len(line.encode()) + 1 for line in lines[: 4 if last else 2])})"
    with pytest.raises(TaskError, match="1 bad row") as caught:
        StreamingDataset(made)
    assert place in str(caught.value)
    data = StreamingDataset(made, max_bad_rows=1)
    assert ids(data) == ["t0", "t1", "t2", "t3"]
    assert data.statistics().bad_rows == 1
    with pytest.raises(TaskError, match="1 bad row"):
        StreamingDataset(made, max_bad_rows=0)


def test_bytes_that_are_no_text_are_a_bad_row(tmp_path: Path) -> None:
    made = write(tmp_path / "t.jsonl", [row(0), row(1)])
    made.write_bytes(made.read_bytes() + b'{"prompt": "\xff"}\n')
    with pytest.raises(TaskError, match=r"t\.jsonl:3.*not UTF-8"):
        StreamingDataset(made)


def test_more_bad_rows_than_the_cap_are_refused_with_the_first_ten(tmp_path: Path) -> None:
    made = write(tmp_path / "t.jsonl", [], text="".join([json.dumps(row(0)) + "\n", *["bad\n"] * 50]))
    with pytest.raises(TaskError) as caught:
        StreamingDataset(made, max_bad_rows=30)
    assert "max_bad_rows is 30" in str(caught.value)
    assert str(caught.value).count("is not JSON") == 10
    assert len(StreamingDataset(made, max_bad_rows=50)) == 1


def test_an_empty_line_between_tasks_is_bad_and_at_the_end_it_is_not(tmp_path: Path) -> None:
    one, two = json.dumps(row(0)), json.dumps(row(1))
    assert len(StreamingDataset(write(tmp_path / "a.jsonl", [], text=f"{one}\n{two}\n\n\n"))) == 2
    with pytest.raises(TaskError, match=r"b.jsonl:2 .*begins 2 empty line"):
        StreamingDataset(write(tmp_path / "b.jsonl", [], text=f"{one}\n\n\n{two}\n"))


@pytest.mark.parametrize("make", [as_jsonl, as_json], ids=["jsonl", "json"])
def test_a_file_without_tasks_is_refused(make: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no tasks"):
        StreamingDataset(make(tmp_path, []))


@pytest.mark.parametrize("count", [-1, True, 1.5, None])
def test_a_cap_that_is_no_count_is_refused(count: Any, path: Path) -> None:
    with pytest.raises(ValueError, match="max_bad_rows"):
        StreamingDataset(path, max_bad_rows=count)


def test_planted_bug_bad_rows_that_are_only_logged_are_trained_around(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = write(tmp_path / "t.jsonl", [], text=json.dumps(row(0)) + "\nbad\n")
    monkeypatch.setattr(build._Build, "_refuse", lambda *_: None)
    monkeypatch.setattr(dataset, "bad_rows_error", lambda *_: pytest.fail("refused at the second look"))
    with pytest.raises(pytest.fail.Exception, match="second look"):
        StreamingDataset(made)


BAD_LISTS = {
    "an object": ('{"prompt": "x"}', "is not a list"), "empty": ("", "is not a list"), "torn": ('[{"prompt": "x"}', "torn"),
    "two lists": ("[1] [2]", "goes on after its list"), "no comma": ("[1 2]", "torn"),
    "not json": ("[{]", "is not JSON"), "deep": ("[" * 100_000, "nested without end"),
    "cut inside": ('[{"prompt": "x', "is not JSON"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "reason"), BAD_LISTS.values(), ids=BAD_LISTS)
def test_a_json_file_that_cannot_be_walked_is_refused_whatever_the_cap(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=reason):
        StreamingDataset(write(tmp_path / "t.json", [], text=text), max_bad_rows=1000)


@given(st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=200)), max_size=20), st.integers(1, 90))
@settings(max_examples=40, deadline=None)
def test_elements_of_a_json_list_are_found_wherever_the_chunks_end(rows: list[dict[str, str]], chunk: int) -> None:
    import io

    raw = json.dumps(rows, ensure_ascii=False, indent=chunk % 3).encode("utf-8", "surrogatepass")
    try:
        raw.decode()
    except UnicodeDecodeError:
        return
    before, scan.CHUNK = scan.CHUNK, chunk
    try:
        found = list(scan.scan_json(io.BytesIO(raw), "x"))
    finally:
        scan.CHUNK = before
    assert [json.loads(one.raw) for one in found] == rows
    assert all(raw[one.offset : one.offset + len(one.raw)] == one.raw for one in found)


# -- files that are not there, or change --------------------------------------------------------


def test_a_missing_file_is_a_file_not_found_error_and_a_typed_one(tmp_path: Path) -> None:
    for missing in (tmp_path / "no.jsonl", tmp_path):
        with pytest.raises(FileNotFoundError) as caught:
            StreamingDataset(missing)
        assert isinstance(caught.value, TaskError)
        assert caught.value.exit_code == 4
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(TaskError, match=r"ends in '\.csv'"):
        StreamingDataset(write(tmp_path / "t.csv", [row(0)]))


def change_in_place(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(20)
        file.write(b"X")


def replace(path: Path) -> None:
    other = write(path.with_suffix(".new"), [row(i) for i in range(70)])
    other.replace(path)


def cut(path: Path) -> None:
    os.truncate(path, 100)


def append(path: Path) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row(99)) + "\n")


@pytest.mark.parametrize("change", [change_in_place, replace, cut, append, Path.unlink], ids=lambda f: f.__name__)
def test_a_file_that_changes_during_a_run_is_refused_with_both_fingerprints(change: Any, path: Path) -> None:
    data = StreamingDataset(path)
    before = data[0]
    os.utime(path, ns=(0, 0))
    data = StreamingDataset(path)
    assert data[0] == before
    change(path)
    with pytest.raises(TaskError, match="changed while it was in use") as caught:
        data[1]
    text = str(caught.value)
    assert re.search("before: .*mtime 0,", text)
    assert "now:    " in text


def sneak(path: Path) -> None:
    """An edit that leaves size and date as they were."""
    facts = path.stat()
    path.write_bytes(path.read_bytes().replace("wie groß".encode(), "wie grOß".encode()))
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def test_a_row_that_changed_behind_the_same_size_and_date_is_noticed_when_it_is_read(path: Path) -> None:
    data = StreamingDataset(path)
    sneak(path)
    with pytest.raises(TaskError, match="row 5 differs"):
        data[5]


def test_planted_bug_without_the_checksum_the_other_row_is_dealt(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = StreamingDataset(path)
    sneak(path)
    monkeypatch.setattr(dataset.zlib, "crc32", lambda raw: data.table.index.row(5).crc)
    assert "grOß" in str(data[5].prompt)


def test_planted_bug_without_a_look_at_the_file_an_appended_row_goes_unnoticed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = StreamingDataset(path)
    append(path)
    monkeypatch.setattr(dataset.TaskTable, "_refuse_changed", lambda self: None)
    assert data[1].id == "t1"


def test_a_file_that_changes_while_it_is_indexed_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = build._Build.finish

    def disturbed(self: Any, before: str) -> None:
        append(path)
        plain(self, before)

    monkeypatch.setattr(build._Build, "finish", disturbed)
    with pytest.raises(TaskError, match="changed while it was in use"):
        StreamingDataset(path)
    assert not [p for p in (path.parent / ".surefoot").iterdir() if p.name != ".gitignore"], (
        "nothing half-built is left"
    )


def test_a_closed_data_set_says_so(path: Path) -> None:
    data = StreamingDataset(path)
    data.close()
    data.close()
    with pytest.raises((StateError, OSError)):
        data[0]


def test_a_place_that_cannot_be_written_asks_for_another(path: Path, tmp_path: Path) -> None:
    (path.parent / ".surefoot").write_text("a file where the folder should be")
    with pytest.raises(TaskError, match="cannot be made"):
        StreamingDataset(path)
    assert len(StreamingDataset(path, cache_dir=tmp_path / "c")) == 60
