"""Which of the collected tests run: those affected, those that the user named, and a few for the audit."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.harness.affected.select import Judge


@dataclass
class Choice:
    """The collected tests, sorted out; `to_run` keeps their order."""

    affected: list[Any] = field(default_factory=list)
    audited: list[Any] = field(default_factory=list)
    left_out: list[Any] = field(default_factory=list)
    to_run: list[Any] = field(default_factory=list)


def choose(items: list[Any], judge: Judge, config: Any, audit: int, dice: random.Random) -> Choice:
    """Sort `items` out. `-k` and node ids win: what they match runs, affected or not."""
    named = [word for word in config.args if "::" in word]
    by_name = bool(config.getoption("keyword"))
    choice = Choice()
    spare: list[Any] = []
    for item in items:
        wanted = by_name or any(_means(word, item, config.invocation_params.dir) for word in named)
        (choice.affected if wanted or judge.is_affected(item.nodeid) else spare).append(item)
    choice.audited = dice.sample(spare, min(max(audit, 0), len(spare)))
    runs = {id(item) for item in [*choice.affected, *choice.audited]}
    choice.to_run = [item for item in items if id(item) in runs]
    choice.left_out = [item for item in items if id(item) not in runs]
    return choice


def _means(word: str, item: Any, folder: Path) -> bool:
    """Whether the argument `word`, a node id, selects `item`."""
    path, _, names = word.partition("::")
    mine: str = item.nodeid.partition("::")[2]
    if (folder / path).resolve() != item.path.resolve():
        return False
    return mine == names or mine.startswith((f"{names}::", f"{names}["))
