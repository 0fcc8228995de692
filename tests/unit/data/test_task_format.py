"""The format of tool tasks: one fixture per missing or mistyped field, each with its own reason."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from surefoot.data import files
from surefoot.data.files import category_of, complexity_of, read_task_file, tool_problems
from surefoot.data.on_disk.dataset import StreamingDataset
from surefoot.errors import TaskError

GOOD: dict[str, Any] = {
    "task_metadata": {"task_id": "q1"},
    "prompt": [{"role": "user", "content": "What is 6 times 7?"}],
    "reward_spec": {"ground_truth": "42"},
    "complexity": "easy",
    "category": "sums",
    "extra_info": {"tools": ["calculator"]},
}
GONE = object()
BAD: list[tuple[str, Any, str]] = [
    ("task_metadata", GONE, "has no task_metadata"),
    ("task_metadata", None, "task_metadata is null, not an object"),
    ("task_metadata", "q1", "task_metadata is text, not an object"),
    ("task_metadata.task_id", GONE, "task_metadata has no task_id"),
    ("task_metadata.task_id", "", "task_metadata.task_id is empty text"),
    ("task_metadata.task_id", "  ", "task_metadata.task_id is text"),
    ("task_metadata.task_id", 1.5, "task_metadata.task_id is a number"),
    ("task_metadata.task_id", True, "task_metadata.task_id is true/false"),
    ("task_metadata.task_id", ["q1"], "task_metadata.task_id is a list"),
    ("task_metadata.complexity", "hard", "complexity 'easy' contradicts task_metadata.complexity 'hard'"),
    ("prompt", GONE, "has no prompt"),
    ("prompt", None, "prompt is null"),
    ("prompt", "What is 6 times 7?", "prompt is text; a tool task has a list of messages"),
    ("prompt", [], "prompt is an empty list"),
    ("prompt", ["hi"], "prompt[0] is text, not a message"),
    ("prompt", [{"content": "hi"}], "prompt[0] has no role"),
    ("prompt", [{"role": "", "content": "hi"}], "prompt[0].role is empty text"),
    ("prompt", [{"role": 3, "content": "hi"}], "prompt[0].role is a number"),
    ("prompt", [{"role": "user"}], "prompt[0] has no content"),
    ("prompt", [{"role": "user", "content": None}], "prompt[0].content is null"),
    ("prompt", [{"role": "user", "content": ["hi"]}], "prompt[0].content is a list"),
    ("reward_spec", GONE, "has no reward_spec"),
    ("reward_spec", None, "reward_spec is null, not an object"),
    ("reward_spec", "42", "reward_spec is text, not an object"),
    ("reward_spec", [], "reward_spec is a list, not an object"),
    ("complexity", 3, "complexity is a number"),
    ("complexity", "", "complexity is empty text"),
    ("category", ["sums"], "category is a list"),
    ("extra_info", "none", "extra_info is text, not an object"),
    ("id", "q2", "id 'q2' contradicts task_metadata.task_id 'q1'"),
]


def changed(where: str, value: Any) -> dict[str, Any]:
    row = copy.deepcopy(GOOD)
    inside, _, name = where.rpartition(".")
    target = row[inside] if inside else row
    if value is GONE:
        del target[name]
    else:
        target[name] = value
    return row


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(("where", "value", "reason"), BAD, ids=[f"{w}-{r[:40]}" for w, _, r in BAD])
def test_each_wrong_field_has_its_own_reason(where: str, value: Any, reason: str, tmp_path: Path) -> None:
    row = changed(where, value)
    found = tool_problems(row)
    assert len(found) == 1
    assert found[0].startswith(reason)
    path = write(tmp_path / "t.jsonl", row)
    with pytest.raises(TaskError) as caught:
        StreamingDataset(path, form="tool")
    assert found[0] in str(caught.value)
    assert "t.jsonl:1 (byte 0)" in str(caught.value)


def test_a_good_row_has_no_problem_and_all_problems_of_a_bad_one_come_at_once() -> None:
    assert tool_problems(GOOD) == []
    assert len(tool_problems({"prompt": "x"})) == 3
    assert tool_problems([GOOD]) == ["is a list, not an object"]


def test_optional_fields_may_be_null_or_left_out() -> None:
    assert tool_problems({name: GOOD[name] for name in ("task_metadata", "prompt", "reward_spec")}) == []
    assert tool_problems(GOOD | dict.fromkeys(("complexity", "category", "extra_info"))) == []


def test_a_message_that_only_calls_tools_needs_no_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert tool_problems(changed("prompt", [*GOOD["prompt"], call])) == []


def test_reading_a_file_whole_uses_the_same_rules_and_the_same_id(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", GOOD)
    (task,) = read_task_file(path)
    assert (task.id, task.columns["answer"]) == ("q1", "42")
    assert list(StreamingDataset(path)) == [task]
    with pytest.raises(TaskError, match="has no reward_spec"):
        read_task_file(write(path, changed("reward_spec", GONE)))


def test_an_answer_that_contradicts_the_ground_truth_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"answer '43' contradicts reward_spec\.ground_truth '42'"):
        read_task_file(write(tmp_path / "t.jsonl", GOOD | {"answer": "43"}))


def test_a_row_of_another_format_is_refused_where_tool_tasks_are_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", {"id": "q1", "prompt": "Hi", "answer": "x"})
    assert len(StreamingDataset(path)) == 1
    with pytest.raises(TaskError, match="has no task_metadata"):
        StreamingDataset(path, form="tool")


def test_planted_bug_a_validator_that_nobody_calls_lets_bad_rows_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "t.jsonl", changed("reward_spec", "42"))
    monkeypatch.setattr(files, "_refuse_malformed_tool_task", lambda row: None)
    assert len(StreamingDataset(path)) == 1, "without the call the row passes: the tests above see the difference"


def test_labels_come_from_the_column_or_the_metadata() -> None:
    assert complexity_of(GOOD) == "easy"
    assert complexity_of({"task_metadata": {"complexity": "hard"}}) == "hard"
    assert category_of({"category": 3}) == "3"
    assert [complexity_of({"complexity": odd}) for odd in (None, "", True, 1.5, [])] == [None] * 5
