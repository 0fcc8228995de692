"""The normalised view: what only looks different is the same, what only looks the same is different."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from surefoot.data.tasks import Content, normal_text, task_content
from surefoot.errors import TaskError
from surefoot.records import Task

SAME = [
    ("What is  1 + 1?\n", "what is 1 + 1?"),
    ("Straße", "STRASSE"),
    ("café", "cafe\u0301"),
    ("ﬁne ＡＢＣ", "fine abc"),
    ("non\u00a0breaking", "non breaking"),
    ("zero\u200bwidth\ufeff", "zerowidth"),
    ("soft\u00adhyphen", "softhyphen"),
    ("x²", "x^2"),
    ("ϓ", "Υ\u0301"),
]
DIFFERENT = [("2²", "22"), ("x₁", "x1"), ("1+1", "1-1"), ("1 1", "11"), ("is it?", "is it"), ("a b", "b a")]


def content_hash(task: Task) -> tuple[str, str]:
    """What is written down of a task and compared: its prompt and its targets."""
    content = task_content(task)
    assert content is not None
    return content.prompt_hash, content.targets_hash


@pytest.mark.parametrize(("one", "other"), SAME)
def test_what_only_looks_different_is_the_same(one: str, other: str) -> None:
    assert normal_text(one) == normal_text(other)
    assert content_hash(Task(id="a", prompt=one)) == content_hash(Task(id="b", prompt=other))


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_what_only_looks_the_same_is_different(one: str, other: str) -> None:
    assert normal_text(one) != normal_text(other)


@pytest.mark.parametrize("text", [text for pair in SAME + DIFFERENT for text in pair])
def test_normalising_twice_changes_nothing(text: str) -> None:
    assert normal_text(normal_text(text)) == normal_text(text)


def test_the_hash_is_frozen() -> None:
    """A changed rule would let old held-out tasks in under the hashes that were written down."""
    task = Task(id="a", prompt="What is  2+2?", columns={"targets": ["B", "a"], "difficulty": 3})
    assert content_hash(task) == (
        "d9016e7f7003fe2dc14f429cc033f715302f1e484bbb97f90c8225ed5e42a4a9",
        "deedf2289a6b11c2a839bafb40554fa8119d763abc961b1d151048e0dfd421a4",
    )


def hash_of(**columns: Any) -> tuple[str, str]:
    return content_hash(Task(id="a", prompt="p", columns=columns))


def test_targets_count_by_value_whatever_their_type_order_or_column() -> None:
    assert hash_of(answer="42") == hash_of(answer=42) == hash_of(answer=42.0) == hash_of(answer=["42"])
    assert hash_of(answer="42") == hash_of(target="42") == hash_of(answer="42", hint="other", solution=None)
    assert hash_of(targets=["b", "A"]) == hash_of(targets=("a", "B")) == hash_of(targets={"a", "b"})
    assert hash_of(answer={"x": 1, "y": "B"}) == hash_of(answer={"y": "b", "x": 1.0})


def test_other_targets_are_other_tasks() -> None:
    distinct = [{}, {"answer": "4"}, {"answer": "5"}, {"targets": ["4", "5"]}, {"targets": ["4", "4", "5"]},
                {"answer": True}, {"answer": [[1, 2], [3, 4]]}, {"answer": [[2, 1], [3, 4]]}, {"answer": math.nan}]  # fmt: skip
    assert len({hash_of(**columns) for columns in distinct}) == len(distinct)


def test_roles_and_tool_calls_are_part_of_the_prompt() -> None:
    def of(*messages: dict[str, Any]) -> tuple[str, str]:
        return content_hash(Task(id="a", prompt=messages))

    user = {"role": "user", "content": "p"}
    calls = {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}]}
    others = [of({"role": "system", "content": "p"}), of(user, user), of(user, calls),
              of(user, calls | {"tool_calls": [{"name": "listen"}]}), of({"role": "user", "content": [{"text": "p"}]})]  # fmt: skip
    assert of(user) == content_hash(Task(id="b", prompt="P"))
    assert len({of(user), *others}) == 1 + len(others)


def test_rows_and_objects_give_the_view_of_the_task_and_bare_ids_none() -> None:
    task = Task(id="a", prompt="p", columns={"answer": "4"})
    assert task_content({"prompt": "p", "answer": 4}) == task_content(task)
    assert task_content(SimpleNamespace(prompt="p", answer="4")) == task_content(task)
    assert task_content("a") is task_content(7) is task_content({"id": 1}) is None


@pytest.mark.parametrize("prompt", [7, {"a": 1}, ["text"], b"x"], ids=repr)
def test_a_prompt_that_is_no_text_is_refused(prompt: Any) -> None:
    with pytest.raises(TaskError, match="a prompt is"):
        Content.of(prompt)
