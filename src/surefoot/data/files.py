"""Task files: JSONL, JSON and Parquet rows become tasks, or the file is refused.

Owns       the row format: `prompt` (text or messages), optional `id`, every other column kept; and that of tool tasks.
Promises   each row becomes exactly one task; what is wrong is told with file and line, up to
           ten problems at once; an id that was left out depends on the row's contents alone.
Never      skips, repairs or cuts a row, or guesses a value.

    {"prompt": "47+85=", "answer": "132"}
    {"id": "q1", "prompt": [{"role": "user", "content": "47+85="}], "answer": "132"}
    {"data_source": "d", "prompt": [...], "reward_model": {"ground_truth": "132"}, "extra_info": {...}}

Read next: `sources.py`, which decides that a name is a file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.data.tasks import canonical
from surefoot.errors import TaskError
from surefoot.records import Message, Task
from surefoot.system.files import sha256_of
from surefoot.system.json import ConstantError, RepeatedKeyError, parse

# -- The format of tool tasks: what a row must have, and one clear reason for each thing that is wrong --
# Owns       the fields of a tool task, and where complexity and category are looked for.
# Promises   every missing or mistyped field has its own reason, and all reasons of a row are told at once.
#
#     {"task_metadata": {"task_id": "q1"}, "prompt": [{"role": "user", "content": "..."}],
#      "reward_spec": {"ground_truth": "42"}, "complexity": "easy", "category": "sums", "extra_info": {}}


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


# -- Every row -------------------------------------------------------------------------------------


MAX_LINE_BYTES = 10_000_000
MAX_WHOLE_BYTES = 2**30
"""What a .json file may hold, and a Parquet file may unfold to: they are read whole, a .jsonl file line by line."""
MAX_PROBLEMS = 10
RESERVED = ("prompts", "completions", "completion_ids", "trainer_state")
"""Argument names of every reward function; a column of that name could not be handed over."""

_PARQUET_ROWS = 256
"""Unfolded at a time: one long value repeated a million times takes hardly any room in the file."""

Row = tuple[str, object]
"""(place, parsed value); the place is `file:line`, or `file[index]` where there are no lines."""


class RowProblem(Exception):  # noqa: N818 - no error by itself: a reason on its way into one
    """What is wrong with one row; collected, never shown alone."""


@dataclass
class _Problems:
    """Problems of one file, reported together."""

    path: Path
    lines: list[str] = field(default_factory=list)

    def add(self, place: str, what: str) -> None:
        """Remember one; the tenth ends the reading."""
        self.lines.append(f"{place}: {what}")
        if len(self.lines) >= MAX_PROBLEMS:
            self.refuse()

    def refuse(self) -> None:
        """Raise if there was any problem."""
        if not self.lines:
            return
        shown = (
            f"the first {MAX_PROBLEMS} problems" if len(self.lines) >= MAX_PROBLEMS else f"{len(self.lines)} problem(s)"
        )
        raise TaskError(
            f"{self.path.name}: {shown}\n    " + "\n    ".join(self.lines),
            "a row that is skipped or guessed changes what is trained on, and nobody would see it",
            'give every row a "prompt" (text or a list of {"role", "content"} messages) and the same columns',
        )


def read_task_file(path: Path) -> tuple[Task, ...]:
    """Every row of the file as a task, in order."""
    problems = _Problems(path)
    return _tasks(_READERS[path.suffix.lower()](path, problems), path.name, path.stem, problems)


def tasks_from_rows(rows: Iterable[object], name: str = "rows") -> tuple[Task, ...]:
    """Rows given from Python, under the same rules as those of a file."""
    numbered = ((f"row {i}", row) for i, row in enumerate(rows, start=1))
    return _tasks(numbered, name, name, _Problems(Path(name)))


def _tasks(rows: Iterable[Row], name: str, stem: str, problems: _Problems) -> tuple[Task, ...]:
    tasks: list[Task] = []
    places: dict[str, str] = {}
    columns: tuple[str, set[str]] | None = None
    copies: Counter[str] = Counter()
    for place, value in rows:
        try:
            task = row_task(value, stem, copies)
            columns = columns or (place, set(task.columns))
            check_columns(task, *columns)
            if task.id in places:
                raise RowProblem(f"id {task.id!r} was already used by {places[task.id]}")
        except RowProblem as problem:
            problems.add(place, str(problem))
            continue
        places[task.id] = place
        tasks.append(task)
    problems.refuse()
    if not tasks:
        raise TaskError(f"{name} has no tasks", "there is nothing to train on", "write one task per row")
    return tuple(tasks)


# -- one row ------------------------------------------------------------------


def row_task(value: object, stem: str, copies: Counter[str]) -> Task:
    """One row as a task; `copies` counts the rows that left their id out, by contents."""
    if not isinstance(value, dict):
        raise RowProblem(f"is {kind(value)}, not an object with a prompt")
    row = dict(value)
    content = _content_hash(row)
    if is_tool_task(row):
        _refuse_malformed_tool_task(row)
        row["id"] = tool_task_id(row)
    prompt = _prompt(row)
    task_id = _given_id(row)
    if task_id is None:
        copies[content] += 1
        again = "" if copies[content] == 1 else f"#{copies[content]}"
        task_id = f"{stem}/{content}{again}"
    columns = {name: item for name, item in row.items() if name not in ("id", "prompt")}
    _add_verl_answer(columns)
    _add_tool_answer(columns)
    clash = [name for name in RESERVED if name in columns]
    if clash:
        raise RowProblem(f"column {clash[0]!r} has the name of an argument that reward functions already take")
    named = [name for name in (columns.get("dataset"), columns.get("data_source")) if isinstance(name, str)]
    return Task(id=task_id, prompt=prompt, columns=columns, dataset=named[0] if named else stem)


def _content_hash(row: Mapping[str, object]) -> str:
    try:
        content = canonical(row).encode("utf-8")
        if len(content) > MAX_LINE_BYTES:
            raise RowProblem(f"holds {len(content):,} bytes; a task has at most {MAX_LINE_BYTES:,}")
        return sha256_of(content)[:16]
    except UnicodeEncodeError as error:
        raise RowProblem("holds half of a surrogate pair, which is not text") from error


def _given_id(row: Mapping[str, object]) -> str | None:
    value = row.get("id")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise RowProblem(f"id is {kind(value)}; use a non-empty text, a whole number, or leave it out")
    return str(value)


def _prompt(row: Mapping[str, object]) -> str | tuple[Message, ...]:
    if "prompt" not in row:
        raise RowProblem(f"has no prompt; its columns are {', '.join(row) or 'none'}")
    value = row["prompt"]
    if isinstance(value, str):
        if not value.strip():
            raise RowProblem("prompt is empty")
        return value
    if not isinstance(value, list):
        raise RowProblem(f"prompt is {kind(value)}; use text or a list of messages")
    if not value:
        raise RowProblem("prompt is an empty list")
    messages = tuple(_message(item, index) for index, item in enumerate(value))
    if not any((message["content"] or "").strip() for message in messages):
        raise RowProblem("prompt is empty: no message has content")
    return messages


def _message(value: object, index: int) -> dict[str, Any]:
    where = f"prompt[{index}]"
    if not isinstance(value, dict):
        raise RowProblem(f"{where} is {kind(value)}, not a message")
    role, content = value.get("role"), value.get("content")
    if not isinstance(role, str) or not role:
        raise RowProblem(f"{where} has no role" if role is None else f"{where}: role is {kind(role)}")
    calls_tools = content is None and bool(value.get("tool_calls"))
    if not isinstance(content, str) and not calls_tools:
        raise RowProblem(f"{where} has no content" if content is None else f"{where}: content is {kind(content)}")
    return dict(value)


def _add_verl_answer(columns: dict[str, Any]) -> None:
    """verl keeps the answer in reward_model.ground_truth; reward functions expect it as `answer`."""
    if not {"data_source", "reward_model"} <= columns.keys():
        return
    model = columns["reward_model"]
    if not isinstance(model, dict) or model.get("ground_truth") is None:
        raise RowProblem("has data_source and reward_model, but reward_model has no ground_truth")
    if columns.setdefault("answer", model["ground_truth"]) != model["ground_truth"]:
        raise RowProblem(
            f"answer {columns['answer']!r} contradicts reward_model.ground_truth {model['ground_truth']!r}"
        )


def _refuse_malformed_tool_task(row: Mapping[str, Any]) -> None:
    problems = tool_problems(row)
    if problems:
        raise RowProblem("; ".join(problems))


def _add_tool_answer(columns: dict[str, Any]) -> None:
    """A tool task keeps the answer in reward_spec.ground_truth; metrics and reward functions expect it as `answer`."""
    spec = columns.get("reward_spec")
    if not isinstance(spec, dict) or "ground_truth" not in spec:
        return
    truth = spec["ground_truth"]
    if columns.setdefault("answer", truth) != truth:
        raise RowProblem(f"answer {columns['answer']!r} contradicts reward_spec.ground_truth {truth!r}")


def check_columns(task: Task, first_place: str, expected: set[str]) -> None:
    """A reward function gets one list per column, so every row has the same ones."""
    missing, extra = expected - task.columns.keys(), task.columns.keys() - expected
    if missing:
        raise RowProblem(f"has no column {min(missing)!r}, which {first_place} has (write null for no value)")
    if extra:
        raise RowProblem(f"has a column {min(extra)!r}, which {first_place} has not (write null for no value)")


# -- three formats ------------------------------------------------------------


def _read_jsonl(path: Path, problems: _Problems) -> Iterator[Row]:
    blank: list[int] = []
    with path.open("rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            place = f"{path.name}:{number}"
            if len(line) > MAX_LINE_BYTES:
                problems.add(place, f"is longer than {MAX_LINE_BYTES:,} bytes; the rest of the file was not read")
                return
            if not line.strip():
                blank.append(number)
                continue
            for earlier in blank:  # at the end of a file empty lines mean nothing; before a task something is missing
                problems.add(f"{path.name}:{earlier}", "is an empty line between tasks")
            blank.clear()
            try:
                value = parse_row(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
            except RowProblem as problem:
                problems.add(place, str(problem))
                continue
            yield place, value


def _read_json(path: Path, problems: _Problems) -> Iterator[Row]:
    try:
        if (size := path.stat().st_size) > MAX_WHOLE_BYTES:
            raise RowProblem(f"has {size:,} bytes, at most {MAX_WHOLE_BYTES:,} are read; one task per line is .jsonl")
        value = parse_row(path.read_bytes().removeprefix(b"\xef\xbb\xbf"))
        if not isinstance(value, list):
            raise RowProblem(f"is {kind(value)}, not a list of tasks (one task per line is .jsonl)")
    except RowProblem as problem:
        problems.add(path.name, str(problem))
        problems.refuse()
        return
    for index, row in enumerate(value):
        yield f"{path.name}[{index}]", row


def parse_row(data: bytes) -> object:
    """Strict JSON: UTF-8, no NaN, no key twice."""
    try:
        return parse(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RowProblem(f"is not UTF-8 (byte {data[error.start]:#04x} at position {error.start})") from error
    except json.JSONDecodeError as error:
        raise RowProblem(f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error
    except RepeatedKeyError as error:
        raise RowProblem(f"has the key {error.key!r} twice") from error
    except ConstantError as error:
        raise RowProblem(f"holds {error.word}, which is not JSON") from error
    except ValueError as error:  # numbers of thousands of digits, nesting without end
        raise RowProblem(f"cannot be read as JSON: {error}") from error


def _read_parquet(path: Path, problems: _Problems) -> Iterator[Row]:
    try:
        yield from parquet_rows(path, MAX_WHOLE_BYTES)
    except RowProblem as problem:
        problems.add(path.name, str(problem))
        problems.refuse()


def parquet_rows(path: Path, max_bytes: int) -> Iterator[Row]:
    """Rows in order, a few hundred in memory at a time; a file that unfolds to more than `max_bytes` is refused."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise TaskError(
            f"{path.name} is a Parquet file and pyarrow is not installed",
            "only Parquet needs it, so it is not among the core dependencies",
            "pip install surefoot[tasks], or convert the file to .jsonl",
        ) from error
    index = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            groups = range(file.metadata.num_row_groups)
            size = sum(file.metadata.row_group(group).total_byte_size for group in groups)
            if size > max_bytes:  # a few kilobytes can say this of themselves; nothing was unfolded yet
                raise OSError(f"it unfolds to {size:,} bytes, at most {max_bytes:,} are read")
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                for row in batch.to_pylist():
                    yield f"{path.name}[{index}]", row
                    index += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise RowProblem(f"cannot be read as Parquet: {error}") from error


_READERS = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}
SUFFIXES = tuple(_READERS)


def of_known_kind(path: Path, name: str) -> Path:
    """The path, if its ending says how to read it."""
    if path.suffix.lower() not in SUFFIXES:
        raise TaskError(
            f"{name} ends in {path.suffix!r}",
            f"the ending says how to read the rows; known are {', '.join(SUFFIXES)}",
            "convert the file, or rename it if it already is one of these",
        )
    return path
