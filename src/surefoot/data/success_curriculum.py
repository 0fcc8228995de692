"""Prefer tasks that the policy solves about half of the time: there siblings differ, and only differences teach.

Owns       the success rate of each task that was played, and the weight that follows from it.
Promises   a task that always or never succeeds keeps a small weight, so that it can come back; a task nobody has
           played counts as one in the middle; an attempt without a verdict changes nothing but its count; the choice
           is a function of the seed, the number of choices and the reports, in any process.
Never      remembers more than `remember` tasks.

    weight = max(explore, 4 p (1 - p)),   p = (successes + 1) / (attempts + 2), older attempts fading

Read next: `loader.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.data.curriculum import is_number
from surefoot.data.large.lru import MISS, LRUCache
from surefoot.data.large.order import CountedRandom
from surefoot.data.tasks import foreign_state
from surefoot.errors import ConfigError, TaskError
from surefoot.records import Task


class SuccessCurriculum:
    """Chooses tasks by their success rate.

    Args:
        explore: the smallest weight, in (0, 1].
        fade: how much an earlier attempt counts beside the newest one, in (0, 1]: the policy changes.
        remember: how many tasks are remembered, those reported last.

    Example:
        >>> curriculum = SuccessCurriculum(seed=0)
        >>> for outcome in (1.0, 0.0): curriculum.report("even", outcome); curriculum.report("easy", 1.0)
        >>> curriculum.weight("even") > curriculum.weight("easy")
        True
    """

    def __init__(self, seed: int = 0, *, explore: float = 0.05, fade: float = 0.9, remember: int = 100_000) -> None:
        for name, value in (("explore", explore), ("fade", fade)):
            if not is_number(value) or not 0 < value <= 1:
                raise ConfigError(f"{name} = {value!r}", "it is a share above 0", f"use for example {name} = 0.1")
        self.seed, self.explore, self.fade = seed, explore, fade
        self.unjudged = 0
        """Reports without a verdict."""
        self._rates: LRUCache[str, tuple[float, float]] = LRUCache(remember)
        """Task id -> (faded successes, faded attempts)."""
        self._random = CountedRandom(seed, "success")

    def report(self, task_id: str, outcome: float | None) -> None:
        """One attempt: how much of a success it was, from 0 to 1; None when nobody could judge it."""
        if outcome is None:
            self.unjudged += 1
            return
        outcome = float(outcome) if isinstance(outcome, bool) else outcome
        if not is_number(outcome) or not 0 <= outcome <= 1:
            raise TaskError(
                f"task {task_id!r} was reported with {outcome!r}", "a success rate is made of numbers from 0 to 1",
                "report a task metric (in a run: make one of reward_funcs the eval_metric); None for no verdict",
            )  # fmt: skip
        successes, attempts = self._known(task_id)
        self._rates.put(task_id, (self.fade * successes + outcome, self.fade * attempts + 1))

    def rate(self, task_id: str) -> float | None:
        """Its success rate so far; None for a task nobody has played."""
        successes, attempts = self._known(task_id)
        return successes / attempts if attempts else None

    def weight(self, task_id: str) -> float:
        """How likely it is to be chosen, from `explore` to 1."""
        successes, attempts = self._known(task_id)
        middle = (successes + 1) / (attempts + 2)
        return max(self.explore, 4 * middle * (1 - middle))

    def choose(self, candidates: Sequence[Task], n: int, random: CountedRandom | None = None) -> list[Task]:
        """(n,) different ones of the candidates, drawn by weight without replacement, in the order drawn.

        Args:
            random: drawn from in place of the curriculum's own stream.
        """
        if n < 0 or n > len(candidates):
            raise TaskError(
                f"{n} of {len(candidates)} candidates were asked for", "none comes twice", "offer more candidates"
            )
        source = self._random if random is None else random
        keyed = [(_waiting_time(source, self.weight(task.id)), at) for at, task in enumerate(candidates)]
        return [candidates[at] for _, at in sorted(keyed)[:n]]

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly here, as plain JSON data."""
        rates = [[task_id, *rate] for task_id, rate in self._rates.items()]
        return {"settings": self._settings(), "asked": self._random.asked, "unjudged": self.unjudged, "rates": rates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; a state of other settings is refused."""
        if set(state) != set(self.state_dict()) or state["settings"] != self._settings():
            raise foreign_state(f"a success curriculum {state.get('settings')!r} instead of {self._settings()!r}")
        rates = state["rates"]
        counts = all(type(state[name]) is int and state[name] >= 0 for name in ("asked", "unjudged"))
        if not counts or not isinstance(rates, list) or not all(_is_rate(entry) for entry in rates):
            raise foreign_state("its counts or rates are not numbers")
        self._random.asked, self.unjudged = state["asked"], state["unjudged"]
        self._rates.clear()
        for task_id, successes, attempts in rates:
            self._rates.put(task_id, (successes, attempts))

    def _settings(self) -> dict[str, Any]:
        return {"seed": self.seed, "explore": self.explore, "fade": self.fade, "remember": self._rates.capacity}

    def _known(self, task_id: str) -> tuple[float, float]:
        known = self._rates.get(task_id) if task_id in self._rates else MISS
        return (0.0, 0.0) if known is MISS else known


def _waiting_time(random: CountedRandom, weight: float) -> float:
    """Exponential: who has the larger weight tends to come first, in exact proportion."""
    return -math.log(1.0 - random.uniform()) / weight


def _is_rate(entry: object) -> bool:
    if not isinstance(entry, list | tuple) or len(entry) != 3 or not isinstance(entry[0], str):
        return False
    return all(isinstance(value, int | float) and math.isfinite(value) and value >= 0 for value in entry[1:])
