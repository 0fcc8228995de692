"""What a model wrote, read as tool calls, reasoning and the rest.

Owns       the forms in which calls are written: `tool_call`, `<tool_call>{"name": "server__tool", "arguments":
           {...}}</tool_call>`, and `llama_json`, a turn that is nothing but `{"name": ..., "parameters": {...}}`.
Promises   every opening mark becomes a call or a problem that names what is wrong, in the order in which they stand; a
           call inside a reasoning block is a thought, not a call; hostile text costs linear time.
Never      calls anything, or guesses what was meant.

Read next: `session.py`, which acts on it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.system.json import loads

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_CALL_CHARS = 64 * 1024
TOOL_CALL, LLAMA_JSON = "tool_call", "llama_json"
FORMS = {TOOL_CALL: "arguments", LLAMA_JSON: "parameters"}
"""Form -> the key under which a call has its arguments."""
_LLAMA_CALL = re.compile(r'\{\s*"name"\s*:')
_BETWEEN = re.compile(r"[;\s]*")
_REASONING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class RequestedCall:
    """One call as the model asked for it."""

    name: str
    arguments: Mapping[str, Any]
    raw: str
    """What stood between the marks."""


@dataclass(frozen=True, slots=True)
class BadCall:
    """Marks without a call that can be read."""

    problem: str
    raw: str


@dataclass(frozen=True, slots=True)
class ParsedCompletion:
    """One completion, taken apart.

    Example:
        >>> parsed = parse_calls('Let me see. <tool_call>{"name": "clock", "arguments": {}}</tool_call>')
        >>> parsed.calls[0].name, parsed.rest
        ('clock', 'Let me see.')
    """

    items: tuple[RequestedCall | BadCall, ...]
    rest: str
    """What is left for a person to read: neither calls nor reasoning."""
    reasoning: str = ""

    @property
    def calls(self) -> list[RequestedCall]:
        """Those that can be asked of a tool."""
        return [item for item in self.items if isinstance(item, RequestedCall)]

    @property
    def problems(self) -> list[str]:
        """What is wrong with the others."""
        return [item.problem for item in self.items if isinstance(item, BadCall)]


def parse_calls(text: str, form: str = TOOL_CALL) -> ParsedCompletion:
    """Calls in the order in which they stand.

    Args:
        form: how they are written: `tool_call` or `llama_json`.

    Example:
        >>> parse_calls('{"name": "clock", "parameters": {"zone": "UTC"}}', "llama_json").calls[0].arguments
        {'zone': 'UTC'}
    """
    reasoning = "".join(_REASONING.findall(text))
    spoken = _REASONING.sub("", text) if reasoning else text
    if form == LLAMA_JSON:
        return _bare(spoken.strip(), reasoning)
    items: list[RequestedCall | BadCall] = []
    rest: list[str] = []
    place = end = 0
    while (start := spoken.find(OPEN, place)) >= 0:
        rest.append(spoken[place:start])
        inside = start + len(OPEN)
        if 0 <= end < inside:  # looked for once, not again for every call that stands before it
            end = spoken.find(CLOSE, inside)
        again = spoken.find(OPEN, inside)
        if end < 0 or 0 <= again < end:
            place = again if again >= 0 else len(spoken)
            items.append(BadCall(f"a tool call is not closed with {CLOSE}", spoken[inside:place]))
            continue
        items.append(_read(spoken[inside:end].strip()))
        place = end + len(CLOSE)
    rest.append(spoken[place:])
    return ParsedCompletion(tuple(items), "".join(rest).strip(), reasoning)


def _bare(spoken: str, reasoning: str) -> ParsedCompletion:
    """A turn that is nothing but calls, one after the other; every other turn is an answer, braces or not."""
    if not _LLAMA_CALL.match(spoken):
        return ParsedCompletion((), spoken, reasoning)
    items: list[RequestedCall | BadCall] = []
    place = 0
    while place < len(spoken):
        end = _object_end(spoken, place)
        if spoken[place] != "{" or end is None:
            items.append(BadCall("a tool call is not one whole JSON object, or text stands beside it", spoken[place:]))
            break
        items.append(_read(spoken[place:end], LLAMA_JSON))
        after = _BETWEEN.match(spoken, end)
        place = after.end() if after else end
    return ParsedCompletion(tuple(items), "", reasoning)


def _object_end(text: str, start: int) -> int | None:
    """Where the object that begins here ends; None when it never does."""
    depth, in_string, place = 0, False, start
    while place < len(text):
        character = text[place]
        if in_string:
            place += character == "\\"
            in_string = character != '"'
        elif character == '"':
            in_string = True
        else:
            depth += (character == "{") - (character == "}")
            if depth == 0:
                return place + 1
        place += 1
    return None


def _read(raw: str, form: str = TOOL_CALL) -> RequestedCall | BadCall:
    try:
        value = loads(raw, max_chars=MAX_CALL_CHARS)
    except ValueError as error:
        return BadCall(f"a tool call cannot be read: {error}", raw)
    problem = _misfit(value, FORMS[form])
    return BadCall(f"a tool call cannot be read: {problem}", raw) if problem else RequestedCall(
        value["name"], value[FORMS[form]], raw
    )  # fmt: skip


def _misfit(value: object, given: str) -> str | None:
    if not isinstance(value, dict):
        return f"it is a {type(value).__name__}, not an object with name and {given}"
    if set(value) != {"name", given}:
        return f"it has the keys {sorted(value)[:6]}, not name and {given}"
    if not isinstance(value["name"], str) or not value["name"]:
        return "its name is not a text"
    if not isinstance(value[given], dict):
        return f"its {given} are a {type(value[given]).__name__}, not an object"
    return None
