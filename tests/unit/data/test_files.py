"""Task files: every row becomes a task or a named problem; nothing is skipped."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from surefoot.data.files import MAX_LINE_BYTES, read_task_file
from surefoot.errors import TaskError
from surefoot.records import Task

FIXTURES = Path(__file__).parents[2] / "fixtures" / "tasks"


def read(tmp_path: Path, *lines: str | dict[str, Any], name: str = "t.jsonl") -> tuple[Task, ...]:
    path = tmp_path / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return read_task_file(path)


# -- good rows ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["good.jsonl", "good.json"])
def test_text_and_message_prompts_become_tasks_with_their_columns(name: str) -> None:
    one, two, three = read_task_file(FIXTURES / name)
    assert (one.id, one.prompt, one.columns) == ("one", "1+1=", {"answer": "2"})
    assert two.id == "2"
    assert [message["role"] for message in two.messages()] == ["system", "user"]
    assert three.id.startswith("good/")


def test_all_other_columns_are_kept_whatever_they_are_called(tmp_path: Path) -> None:
    extra = {"answer": None, "solution": [1, {"x": 2.5}], "data_source": "d", "ünï": True}
    (task,) = read(tmp_path, {"prompt": "p", **extra})
    assert task.columns == extra
    assert task.dataset == "d"


def test_the_column_dataset_names_the_data_set_before_data_source_and_the_file(tmp_path: Path) -> None:
    for columns, name in (({}, "t"), ({"data_source": "d"}, "d"), ({"dataset": "s", "data_source": "d"}, "s")):
        (tmp_path / "t.jsonl").write_text(json.dumps({"prompt": "1+1=", **columns}) + "\n")
        (task,) = read_task_file(tmp_path / "t.jsonl")
        assert (task.dataset, dict(task.columns)) == (name, columns)


def test_verl_rows_get_their_ground_truth_as_answer() -> None:
    one, two = read_task_file(FIXTURES / "verl.jsonl")
    assert (one.columns["answer"], two.columns["answer"]) == ("2", "4")
    assert one.dataset == "school/sums"
    assert one.columns["extra_info"] == {"split": "train", "index": 0}


def test_verl_parquet_reads_like_the_same_rows_in_jsonl(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet is an extra")
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet is an extra")
    rows = [json.loads(line) for line in (FIXTURES / "verl.jsonl").read_text().splitlines()]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "verl.parquet")
    assert read_task_file(tmp_path / "verl.parquet") == read_task_file(FIXTURES / "verl.jsonl")


def test_a_derived_id_survives_reordering_and_additions(tmp_path: Path) -> None:
    a, b, c = ({"prompt": p, "answer": p} for p in "abc")
    first = {task.prompt: task.id for task in read(tmp_path, a, b)}
    second = {task.prompt: task.id for task in read(tmp_path, c, b, a)}
    assert first.items() <= second.items()


def test_identical_rows_without_id_are_both_kept_under_different_ids(tmp_path: Path) -> None:
    one, two = read(tmp_path, {"prompt": "p"}, {"prompt": "p"})
    assert two.id == f"{one.id}#2"


def test_a_byte_order_mark_and_empty_lines_at_the_end_mean_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "p"}\r\n\n  \n')
    assert len(read_task_file(path)) == 1


def test_a_prompt_may_end_in_a_tool_call_without_content(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    (task,) = read(tmp_path, {"prompt": [{"role": "user", "content": "p"}, call]})
    assert task.messages()[1] == call


# -- bad rows -------------------------------------------------------------------

GOOD = {"prompt": "p", "answer": "1"}

BAD_ROWS = {
    "not json": ('{"prompt": "p"', "is not JSON"),
    "not an object": ("[1]", "is a list, not an object"),
    "null": ("null", "is null, not an object"),
    "no prompt": ({"question": "p", "answer": "1"}, "has no prompt; its columns are question, answer"),
    "empty prompt": ({"prompt": "", "answer": "1"}, "prompt is empty"),
    "blank prompt": ({"prompt": " \n", "answer": "1"}, "prompt is empty"),
    "number as prompt": ({"prompt": 3, "answer": "1"}, "prompt is a number"),
    "null prompt": ({"prompt": None, "answer": "1"}, "prompt is null"),
    "no messages": ({"prompt": [], "answer": "1"}, "prompt is an empty list"),
    "text among messages": ({"prompt": ["hi"], "answer": "1"}, r"prompt\[0\] is text, not a message"),
    "no role": ({"prompt": [{"content": "p"}], "answer": "1"}, r"prompt\[0\] has no role"),
    "odd role": ({"prompt": [{"role": 1, "content": "p"}], "answer": "1"}, "role is a number"),
    "no content": ({"prompt": [{"role": "user"}], "answer": "1"}, r"prompt\[0\] has no content"),
    "odd content": ({"prompt": [{"role": "user", "content": [1]}], "answer": "1"}, "content is a list"),
    "empty messages": ({"prompt": [{"role": "user", "content": " "}], "answer": "1"}, "no message has content"),
    "empty id": ({"id": "", "prompt": "p", "answer": "1"}, "id is empty text"),
    "odd id": ({"id": [1], "prompt": "p", "answer": "1"}, "id is a list"),
    "true as id": ({"id": True, "prompt": "p", "answer": "1"}, "id is true/false"),
    "missing column": ({"prompt": "q"}, "has no column 'answer', which t.jsonl:1 has"),
    "extra column": ({"prompt": "q", "answer": "1", "hint": 2}, "has a column 'hint', which t.jsonl:1 has not"),
    "reserved column": ({"prompt": "q", "answer": "1", "completions": 2}, "name of an argument"),
    "NaN": ('{"prompt": "q", "answer": NaN}', "holds NaN"),
    "key twice": ('{"prompt": "q", "answer": "1", "answer": "2"}', "has the key 'answer' twice"),
    "half a surrogate": ('{"prompt": "\\ud800", "answer": "1"}', "surrogate"),
    "nesting without end": ('{"prompt": "q", "answer": ' + "[" * 200_000, "cannot be read as JSON"),
    "endless number": ('{"prompt": "q", "answer": ' + "1" * 5000 + "}", "cannot be read as JSON"),
    "verl without truth": (
        {"prompt": "q", "answer": "1", "data_source": "d", "reward_model": {}},
        "reward_model has no ground_truth",
    ),
    "two truths": (
        {"prompt": "q", "answer": "1", "data_source": "d", "reward_model": {"ground_truth": "2"}},
        "contradicts",
    ),
}


@pytest.mark.parametrize(("row", "message"), BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_a_bad_row_is_refused_with_file_line_and_reason(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(TaskError, match=f"t.jsonl:2: .*{message}") as caught:
        read(tmp_path, GOOD, row, {"prompt": "after", "answer": "1"})
    assert caught.value.exit_code == 4


def test_a_row_in_a_json_list_is_named_by_its_index(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"t.json\[1\]: prompt is empty"):
        read(tmp_path, json.dumps([GOOD, {"prompt": "", "answer": "1"}]), name="t.json")


def test_all_problems_of_a_file_are_told_at_once() -> None:
    with pytest.raises(TaskError, match=r"8 problem\(s\)") as caught:
        read_task_file(FIXTURES / "many_problems.jsonl")
    for line in range(2, 10):
        assert f"many_problems.jsonl:{line}: " in caught.value.what


def test_more_than_ten_problems_are_cut_at_ten_and_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="the first 10 problems") as caught:
        read(tmp_path, *(["{"] * 50))
    assert caught.value.what.count("is not JSON") == 10


def test_ids_used_twice_are_refused_with_both_places(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"t\.jsonl:3: id '1' was already used by t\.jsonl:1"):
        read(tmp_path, {"id": 1, "prompt": "a"}, {"id": 2, "prompt": "b"}, {"id": "1", "prompt": "c"})


def test_an_empty_line_between_tasks_is_a_problem(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"t\.jsonl:2: is an empty line between tasks") as caught:
        read(tmp_path, GOOD, "", GOOD, GOOD)
    assert caught.value.what.count("empty line") == 1


@pytest.mark.parametrize(("name", "text"), [("t.jsonl", ""), ("t.jsonl", "\n\n"), ("t.json", "[]")])
def test_a_file_without_tasks_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(TaskError, match=f"{name} has no tasks"):
        read_task_file(tmp_path / name)


@pytest.mark.parametrize(("text", "message"), [("", "is not JSON"), ('{"prompt": "p"}', "is an object, not a list")])
def test_a_json_file_that_is_no_list_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        read(tmp_path, text, name="t.json")


def test_bytes_that_are_not_text_are_refused_with_their_position() -> None:
    with pytest.raises(TaskError, match=r"invalid_utf8\.jsonl:1: is not UTF-8 .byte 0xff at position 0"):
        read_task_file(FIXTURES / "invalid_utf8.jsonl")


def test_a_line_over_the_limit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"t\.jsonl:2: is longer than 10,000,000 bytes"):
        read(tmp_path, GOOD, '{"prompt": "' + "x" * MAX_LINE_BYTES + '", "answer": ""}')


def test_a_file_that_only_claims_to_be_parquet_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="Parquet is an extra")
    (tmp_path / "t.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(TaskError, match="cannot be read as Parquet"):
        read_task_file(tmp_path / "t.parquet")


def test_parquet_without_pyarrow_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "t.parquet").write_bytes(b"")
    with pytest.raises(TaskError, match=r"pip install surefoot\[tasks\]"):
        read_task_file(tmp_path / "t.parquet")
