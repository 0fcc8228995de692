"""Writes the tool tasks: `python examples/tasks/make_tool_tasks.py [FILE]`.

Every task can be solved with the servers of `examples/servers`, and none without: the numbers are too large for one's
head, and the country, the exchange and the mailbox are invented. The truths are worked out from the data, not by the
servers; a test plays every solution through the real servers and compares.

Read next: `drafts.py`, the form of a task.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SERVERS = HERE.parent / "servers"
sys.path.append(str(SERVERS))

import mail_tasks  # noqa: E402 - it and the others read the servers' data makers
import market_tasks  # noqa: E402
import number_tasks  # noqa: E402
import search_tasks  # noqa: E402
from drafts import Draft, distinct  # noqa: E402
from make_data import DATA, SEED  # noqa: E402
from world import World  # noqa: E402

COUNTS = {
    "calculator": {"easy": 60, "medium": 60, "hard": 40},
    "python": {"easy": 60, "medium": 60, "hard": 60},
    "quotes": {"easy": 80, "medium": 70, "hard": 50},
    "fundamentals": {"easy": 80, "medium": 70, "hard": 50},
    "search": {"easy": 100, "medium": 90, "hard": 50},
    "messages": {"easy": 60, "medium": 40, "hard": 40},
    "mixed": {"medium": 50, "hard": 50},
}
"""How many tasks of which kind."""

Maker = Callable[[random.Random, str], Iterator[Draft]]


def tasks(seed: int = SEED) -> Iterator[dict[str, Any]]:
    """All tasks, category by category."""
    makers = _makers()
    for order, (category, levels) in enumerate(COUNTS.items()):
        number = 0
        for level, (complexity, wanted) in enumerate(levels.items()):
            rng = random.Random(seed * 100 + order * 10 + level)
            for draft in distinct(makers[category](rng, complexity), wanted):
                number += 1
                yield draft.written(category, number)


def _makers() -> dict[str, Maker]:
    world, letters, contacts = World(SEED), _rows("mail.jsonl"), _rows("contacts.jsonl")
    market = market_tasks.Market(DATA, _rows("companies.jsonl"))
    return {
        "calculator": number_tasks.calculator,
        "python": number_tasks.python,
        "quotes": lambda rng, level: market_tasks.quotes(rng, market, level),
        "fundamentals": lambda rng, level: market_tasks.fundamentals(rng, market, level),
        "search": lambda rng, level: search_tasks.search(rng, world, level),
        "messages": lambda rng, level: mail_tasks.messages(rng, contacts, letters, level),
        "mixed": lambda rng, level: market_tasks.mixed(rng, market, world, letters, level),
    }


def _rows(file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / file).read_text(encoding="utf-8").splitlines()]


def main() -> None:
    """Write the file."""
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "tool_tasks.jsonl"
    lines = [json.dumps(task, ensure_ascii=False) + "\n" for task in tasks()]
    file.write_text("".join(lines), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
