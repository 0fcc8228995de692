"""What a task asks, normalised: the same content gives the same hash, whatever its id.

Owns       the normalised view of a task, and its hash.
Promises   the same view in every process; what only looks different (case, white space, Unicode form, the
           order of a target list) is the same, and what only looks the same (2² and 22) is different.
Never      decides what happens to a task that repeats another.

The view: text after Unicode NFKC (superscripts become ^n and subscripts _n first), case fold, removal of
invisible characters, and every run of white space as one space. Targets are the columns in
`TARGET_COLUMNS`, normalised in the same way; their names and their order do not matter.

Read next: `near_duplicates.py`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from surefoot.data.tasks import canonical
from surefoot.errors import TaskError
from surefoot.records import Task
from surefoot.system.files import sha256_of

TARGET_COLUMNS = ("answer", "answers", "ground_truth", "label", "labels", "solution", "target", "targets", "tests")

_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")
_RAISED = {ord(mark): f"^{digit}" for digit, mark in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")}
_LOWERED = {ord(mark): f"_{digit}" for digit, mark in enumerate("₀₁₂₃₄₅₆₇₈₉")}


@dataclass(frozen=True, slots=True)
class Content:
    """What a task asks and what counts as right, normalised.

    Example:
        >>> Content.of("What is  1+1?", ["2"]) == Content.of("WHAT IS 1+1?", 2)
        True
    """

    prompt: tuple[tuple[str, str], ...]
    """(role, text) of every message."""
    targets: tuple[str, ...]
    """Sorted; empty when the task names none."""

    @classmethod
    def of(cls, prompt: object, *targets: object) -> Content:
        """From a text or a list of messages, and any number of targets or lists of targets."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if not isinstance(messages, list | tuple) or not all(isinstance(one, Mapping) for one in messages):
            raise TaskError(
                f"a prompt is {type(prompt).__name__}",
                "tasks are compared by the text that they ask",
                "use text or a list of messages, or pass content=None to compare ids alone",
            )
        return cls(tuple(map(_message, messages)), tuple(sorted(chain.from_iterable(map(_targets, targets)))))

    @property
    def prompt_hash(self) -> str:
        """SHA-256 of the prompt alone."""
        return _sha256(self.prompt)

    @property
    def targets_hash(self) -> str:
        """SHA-256 of the targets; empty where there are none."""
        return _sha256(self.targets) if self.targets else ""


def task_content(item: object) -> Content | None:
    """The view of a `Task`, a row (a mapping), or an object with a `prompt`; None for a bare id."""
    if isinstance(item, Task):
        return Content.of(item.messages(), *(item.columns.get(name) for name in TARGET_COLUMNS))
    prompt = field_of(item, "prompt")
    return None if prompt is None else Content.of(prompt, *(field_of(item, name) for name in TARGET_COLUMNS))


def field_of(item: object, name: str) -> Any:
    """A row's column or an object's attribute; None where there is none."""
    return item.get(name) if isinstance(item, Mapping) else getattr(item, name, None)


def normal_text(text: str) -> str:
    """One text under the rule at the top of this file."""
    if not text.isascii():
        marked = text.translate(_RAISED | _LOWERED)
        folded = unicodedata.normalize("NFKC", marked).casefold()
        text = _INVISIBLE.sub("", unicodedata.normalize("NFKC", folded))
    return " ".join(text.casefold().split())


def _message(message: Mapping[str, Any]) -> tuple[str, str]:
    content, calls = message.get("content"), message.get("tool_calls")
    text = normal_text(content) if isinstance(content, str) else "" if content is None else canonical(_normal(content))
    return str(message.get("role", "")), text + (canonical(_normal(calls)) if calls else "")


def _targets(value: object) -> list[str]:
    if value is None:
        return []
    members = list(value) if isinstance(value, list | tuple | set | frozenset) else [value]
    return [canonical(_normal(member)) for member in members]


def _normal(value: object) -> object:
    """Plain data in which 42, 42.0 and "42" are the same."""
    if isinstance(value, str):
        return normal_text(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
    if isinstance(value, Mapping):
        return {str(key): _normal(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_normal(member) for member in value]
    return value


def _sha256(value: object) -> str:
    return sha256_of(canonical(value), errors="surrogatepass")
