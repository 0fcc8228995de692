"""The format of tool tasks: what a row must have, and one clear reason for each thing that is wrong.

Owns       the fields of a tool task, and where complexity and category are looked for.
Promises   every missing or mistyped field has its own reason, and all reasons of a row are told at once.
Never      repairs a row, or guesses a value.

    {"task_metadata": {"task_id": "q1"}, "prompt": [{"role": "user", "content": "..."}],
     "reward_spec": {"ground_truth": "42"}, "complexity": "easy", "category": "sums", "extra_info": {}}

Read next: `files.py`, the rules for every row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

METADATA, SPEC = "task_metadata", "reward_spec"


def is_tool_task(row: Mapping[str, Any]) -> bool:
    """Whether the row means to be a tool task: it has one of the two columns that only they have."""
    return METADATA in row or SPEC in row


def tool_problems(row: object) -> list[str]:
    """What keeps the row from being a tool task; empty when nothing does.

    Example:
        >>> tool_problems({"task_metadata": {}, "prompt": "Hi", "reward_spec": {}})
        ['task_metadata has no task_id', 'prompt is text; a tool task has a list of messages']
    """
    if not isinstance(row, dict):
        return [f"is {kind(row)}, not an object"]
    return [*_metadata_problems(row), *_prompt_problems(row), *_spec_problems(row), *_optional_problems(row)]


def tool_task_id(row: Mapping[str, Any]) -> str:
    """The id of a row without problems."""
    return str(row[METADATA]["task_id"])


def complexity_of(columns: Mapping[str, Any]) -> str | None:
    """Easy, medium, hard or whatever the file calls it; None where it says nothing."""
    return _label(columns, "complexity")


def category_of(columns: Mapping[str, Any]) -> str | None:
    """The task's category; None where the file says nothing."""
    return _label(columns, "category")


def expected_tools(columns: Mapping[str, Any]) -> list[str] | None:
    """Tools that the task says it needs (`extra_info.tools`); None where it says nothing."""
    extra = columns.get("extra_info")
    tools = extra.get("tools") if isinstance(extra, Mapping) else None
    return [str(name) for name in tools] if isinstance(tools, list | tuple) else None


def kind(value: object) -> str:
    """A value named the way the file's author would."""
    if value is None:
        return "null"
    if value == "":
        return "empty text"
    names = {str: "text", bool: "true/false", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def _label(columns: Mapping[str, Any], name: str) -> str | None:
    """From the column, else from the metadata; whole numbers are labels too."""
    value = columns.get(name)
    metadata = columns.get(METADATA)
    if value is None and isinstance(metadata, Mapping):
        value = metadata.get(name)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        return None
    return str(value)


def _metadata_problems(row: Mapping[str, Any]) -> Iterator[str]:
    if METADATA not in row:
        yield f"has no {METADATA}"
        return
    metadata = row[METADATA]
    if not isinstance(metadata, dict):
        yield f"{METADATA} is {kind(metadata)}, not an object"
        return
    task_id = metadata.get("task_id")
    if task_id is None:
        yield f"{METADATA} has no task_id"
    elif isinstance(task_id, bool) or not isinstance(task_id, str | int) or not str(task_id).strip():
        yield f"{METADATA}.task_id is {kind(task_id)}; use a non-empty text or a whole number"
    elif row.get("id") is not None and str(row["id"]) != str(task_id):
        yield f"id {row['id']!r} contradicts {METADATA}.task_id {task_id!r}"


def _prompt_problems(row: Mapping[str, Any]) -> Iterator[str]:
    if "prompt" not in row:
        yield "has no prompt"
        return
    prompt = row["prompt"]
    if not isinstance(prompt, list):
        yield f"prompt is {kind(prompt)}; a tool task has a list of messages"
        return
    if not prompt:
        yield "prompt is an empty list"
    for index, message in enumerate(prompt):
        if not isinstance(message, dict):
            yield f"prompt[{index}] is {kind(message)}, not a message"
            continue
        for name in ("role", "content"):
            value = message.get(name)
            if name == "content" and value is None and message.get("tool_calls"):
                continue  # an assistant's message that only calls tools
            if not isinstance(value, str) or (name == "role" and not value):
                missing = value is None and name not in message
                yield f"prompt[{index}] has no {name}" if missing else f"prompt[{index}].{name} is {kind(value)}"


def _spec_problems(row: Mapping[str, Any]) -> Iterator[str]:
    if SPEC not in row:
        yield f"has no {SPEC}"
    elif not isinstance(row[SPEC], dict):
        yield f"{SPEC} is {kind(row[SPEC])}, not an object"


def _optional_problems(row: Mapping[str, Any]) -> Iterator[str]:
    metadata = row.get(METADATA)
    inner = metadata if isinstance(metadata, dict) else {}
    for name in ("complexity", "category"):
        for where, value in ((name, row.get(name)), (f"{METADATA}.{name}", inner.get(name))):
            if value is not None and (not isinstance(value, str) or not value):
                yield f"{where} is {kind(value)}; use a non-empty text, or null"
        if None not in (row.get(name), inner.get(name)) and row[name] != inner[name]:
            yield f"{name} {row[name]!r} contradicts {METADATA}.{name} {inner[name]!r}"
    extra = row.get("extra_info")
    if extra is not None and not isinstance(extra, dict):
        yield f"extra_info is {kind(extra)}, not an object"
