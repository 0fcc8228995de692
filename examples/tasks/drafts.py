"""What a tool task is made of, and how it becomes a line of the task file.

Owns       `Draft` (a question, its truth, and the calls that lead there) and the written form.
Promises   a draft whose truth already stands in its question cannot be written: it would need no tool.

In the written solution `<<0>>` stands for what was read from the first call's answer, `<<0:int>>` for the same as a
whole number. The solution is for tests and for people; no prompt shows it.

Read next: `make_tool_tasks.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

NUMBER = "Give the number alone between <answer> and </answer>."
NAME = "Answer with the name alone and nothing else."
SYMBOL = "Answer with its ticker symbol alone and nothing else."
DAY = "Answer with the date alone, as YYYY-MM-DD, and nothing else."
WORDS = "Answer with the words alone, as they are written there, and nothing else."


@dataclass(frozen=True)
class Call:
    """One tool call of a solution, and the pattern that reads what is needed from its answer."""

    tool: str
    arguments: dict[str, Any]
    read: str = r"(?s)(.*)"

    def written(self) -> dict[str, Any]:
        """As it stands in the file."""
        return {"tool": self.tool, "arguments": self.arguments, "read": self.read}


@dataclass(frozen=True)
class Draft:
    """One task before it has an id."""

    question: str
    truth: str
    form: str
    """How the answer is to be given; numbers are compared as numbers, anything else letter by letter."""
    calls: Sequence[Call]
    complexity: str

    @property
    def given_away(self) -> bool:
        """Whether the truth stands in the question, so that no tool is needed."""
        return bool(re.search(rf"(?<![\w.]){re.escape(self.truth)}(?![\w.]|\.\d)", self.question))

    def written(self, category: str, number: int) -> dict[str, Any]:
        """The line of the file, as an object."""
        if self.given_away:
            raise ValueError(f"{category} {number}: the question gives its own answer away: {self.question}")
        tools = list(dict.fromkeys(call.tool for call in self.calls))
        return {
            "task_metadata": {"task_id": f"{category}-{number:04d}"},
            "prompt": [{"role": "user", "content": f"{self.question} {self.form}"}],
            "reward_spec": {
                "ground_truth": self.truth,
                "verifier_type": "math" if self.form == NUMBER else "exact",
            },
            "complexity": self.complexity,
            "category": category,
            "extra_info": {"tools": tools, "solution": [call.written() for call in self.calls]},
        }


def distinct(drafts: Iterable[Draft], wanted: int) -> list[Draft]:
    """The first `wanted` drafts that need a tool and are not alike: no two ask the same, of whomever, with one truth.

    Two companies of one sector would give two tasks that differ in a symbol alone; of a pair like that, one could not
    be held out from training on the other.
    """
    kept: dict[tuple[str, str], Draft] = {}
    for draft in islice(drafts, 100 * wanted):
        if not draft.given_away:
            kept.setdefault((re.sub(r"\b[A-Z]\w*", "", draft.question), draft.truth), draft)
        if len(kept) == wanted:
            return list(kept.values())
    raise ValueError(f"only {len(kept)} of {wanted} different questions could be made")
