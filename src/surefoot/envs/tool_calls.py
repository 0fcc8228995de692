"""What a model wrote, read as tool calls, reasoning and the rest.

Owns       the form `<tool_call>{"name": "server__tool", "arguments": {...}}</tool_call>`.
Promises   every opening mark becomes a call or a problem that names what is wrong, in the order in which they stand; a
           call inside a reasoning block is a thought, not a call; hostile text costs linear time.
Never      calls anything, or guesses what was meant.

Read next: `tools.py`, which acts on it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.envs.strict_json import loads

OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_CALL_CHARS = 64 * 1024
_REASONING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Call:
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
class Parsed:
    """One completion, taken apart.

    Example:
        >>> parsed = parse_calls('Let me see. <tool_call>{"name": "clock", "arguments": {}}</tool_call>')
        >>> parsed.calls[0].name, parsed.rest
        ('clock', 'Let me see.')
    """

    items: tuple[Call | BadCall, ...]
    rest: str
    """What is left for a person to read: neither calls nor reasoning."""
    reasoning: str = ""

    @property
    def calls(self) -> list[Call]:
        """Those that can be asked of a tool."""
        return [item for item in self.items if isinstance(item, Call)]

    @property
    def problems(self) -> list[str]:
        """What is wrong with the others."""
        return [item.problem for item in self.items if isinstance(item, BadCall)]


def parse_calls(text: str) -> Parsed:
    """Calls in the order in which they stand."""
    reasoning = "".join(_REASONING.findall(text))
    spoken = _REASONING.sub("", text) if reasoning else text
    items: list[Call | BadCall] = []
    rest: list[str] = []
    place = 0
    while (start := spoken.find(OPEN, place)) >= 0:
        rest.append(spoken[place:start])
        inside = start + len(OPEN)
        end = spoken.find(CLOSE, inside)
        again = spoken.find(OPEN, inside)
        if end < 0 or 0 <= again < end:
            place = again if again >= 0 else len(spoken)
            items.append(BadCall(f"a tool call is not closed with {CLOSE}", spoken[inside:place]))
            continue
        items.append(_read(spoken[inside:end].strip()))
        place = end + len(CLOSE)
    rest.append(spoken[place:])
    return Parsed(tuple(items), "".join(rest).strip(), reasoning)


def _read(raw: str) -> Call | BadCall:
    try:
        value = loads(raw, max_chars=MAX_CALL_CHARS)
    except ValueError as error:
        return BadCall(f"a tool call cannot be read: {error}", raw)
    problem = _misfit(value)
    return BadCall(f"a tool call cannot be read: {problem}", raw) if problem else Call(
        value["name"], value["arguments"], raw
    )  # fmt: skip


def _misfit(value: object) -> str | None:
    if not isinstance(value, dict):
        return f"it is a {type(value).__name__}, not an object with name and arguments"
    if set(value) != {"name", "arguments"}:
        return f"it has the keys {sorted(value)[:6]}, not name and arguments"
    if not isinstance(value["name"], str) or not value["name"]:
        return "its name is not a text"
    if not isinstance(value["arguments"], dict):
        return f"its arguments are a {type(value['arguments']).__name__}, not an object"
    return None
