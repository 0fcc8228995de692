"""Which level of difficulty next: shares that move from easy to hard, drawn by the sampler's own random stream.

Owns       the shares of an epoch, the draw of a level, and which tasks were seen.
Promises   shares sum to 1 and move linearly; two samplers never disturb one another, nor anybody's global generator;
           a seen task comes again only when its level is exhausted, and a log line says so; a restored sampler goes
           on exactly where it stopped.
Never      trains a level whose share is 0.

    easy 0.3 -> 0.1, medium 0.5 -> 0.4, hard 0.2 -> 0.5, over 10 epochs

Read next: `loader.py`, which deals batches.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

from surefoot.data.lru import MISS, LRUCache
from surefoot.data.order import CountedRandom
from surefoot.data.tasks import foreign_state
from surefoot.errors import ConfigError, TaskError
from surefoot.records import Task

Shares = Mapping[str, float]
L = TypeVar("L", bound=Hashable)

START: Shares = MappingProxyType({"easy": 0.3, "medium": 0.5, "hard": 0.2})
END: Shares = MappingProxyType({"easy": 0.1, "medium": 0.4, "hard": 0.5})
TOLERANCE = 1e-6
_log = logging.getLogger(__name__)


class CurriculumSampler:
    """Draws levels by the shares of the epoch, and tasks of a level that were not seen yet.

    Example:
        >>> sampler = CurriculumSampler(seed=1)
        >>> {level: round(share, 2) for level, share in sampler.shares(5).items()}
        {'easy': 0.2, 'medium': 0.45, 'hard': 0.35}
    """

    def __init__(self, start: Shares = START, end: Shares = END, transition_epochs: float = 10, seed: int = 0) -> None:
        check_shares("start", start)
        check_shares("end", end)
        if set(start) != set(end):
            raise ConfigError(
                f"start has the levels {sorted(start)}, end has {sorted(end)}",
                "a level in one of them alone would appear or vanish without a share",
                "name the same levels in both; a share may be 0",
            )
        if not is_number(transition_epochs) or transition_epochs <= 0:
            raise ConfigError(
                f"transition_epochs = {transition_epochs!r}", "the way from start to end takes some time",
                "use a number above 0; give start and end the same shares for no transition",
            )  # fmt: skip
        self.start, self.end, self.transition_epochs, self.seed = dict(start), dict(end), transition_epochs, seed
        self._random = CountedRandom(seed, "curriculum")
        self._seen: set[str] = set()
        self.resets = 0
        """How often a level was exhausted and began anew."""

    @property
    def levels(self) -> list[str]:
        """Every level, in the order of `start`."""
        return list(self.start)

    def shares(self, epoch: float, total_epochs: float | None = None) -> dict[str, float]:
        """The share of each level in this epoch.

        Args:
            total_epochs: length of the transition in place of `transition_epochs`; 0 or less means that it is over.
        """
        if not is_number(epoch) or epoch < 0:
            raise ConfigError(f"epoch = {epoch!r}", "epochs are counted from 0", "use a number from 0 on")
        length = self.transition_epochs if total_epochs is None else total_epochs
        way = 1.0 if length <= 0 else min(1.0, epoch / length)
        mixed = {level: (1 - way) * self.start[level] + way * self.end[level] for level in self.start}
        total = math.fsum(mixed.values())
        return {level: share / total for level, share in mixed.items()}

    def draw(self, epoch: float) -> str:
        """One level, by its share."""
        return _pick(self.shares(epoch), self._random.uniform())

    def level_at(self, epoch: float, drawn: float) -> str:
        """The level that a number in [0, 1) stands for in this epoch: `draw` with somebody else's random stream."""
        return _pick(self.shares(epoch), drawn)

    def counts(self, n: int, epoch: float) -> dict[str, int]:
        """How many of `n` tasks each level gets: largest remainder, so a share of 0 gets none."""
        return largest_remainder(self.shares(epoch), n)

    # -- seen tasks ---------------------------------------------------------------------------

    def mark(self, task_id: str) -> None:
        """This task was seen."""
        self._seen.add(task_id)

    def seen(self, task_id: str) -> bool:
        """Whether it was, since its level last began anew."""
        return task_id in self._seen

    def reset(self) -> None:
        """Nothing was seen."""
        self._seen.clear()

    def sample(self, pools: Mapping[str, Sequence[Task]], n: int, epoch: float) -> list[Task]:
        """(n,) different tasks, their levels drawn one by one, none that was seen unless its level is exhausted.

        Args:
            pools: every task by level; for pools that do not fit into memory see `loader.TaskDataLoader`.
        """
        shares = self.shares(epoch)
        empty = [level for level, share in shares.items() if share > 0 and not pools.get(level)]
        if empty:
            raise no_tasks_of(empty[0], shares[empty[0]])
        taken: dict[str, Task] = {}
        for _ in range(n):
            level = _pick(shares, self._random.uniform())
            task = self._unseen(level, pools[level], taken)
            taken[task.id] = task
            self.mark(task.id)
        return list(taken.values())

    def _unseen(self, level: str, pool: Sequence[Task], taken: Mapping[str, Task]) -> Task:
        fresh = [task for task in pool if task.id not in self._seen and task.id not in taken]
        if not fresh:
            self._seen -= {task.id for task in pool}
            self.resets += 1
            _log.info("all %d %s tasks were seen; they begin anew", len(pool), level)
            fresh = [task for task in pool if task.id not in taken]
        if not fresh:
            raise TaskError(
                f"one batch needs more than the {len(pool)} {level} tasks there are",
                "it would hold a task twice", "ask for fewer tasks, or bring more of that level",
            )  # fmt: skip
        return fresh[int(self._random.uniform() * len(fresh))]

    # -- resume -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly here, as plain JSON data."""
        return {"settings": self._settings(), "asked": self._random.asked, "seen": sorted(self._seen),
                "resets": self.resets}  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; a state of another curriculum is refused."""
        if set(state) != set(self.state_dict()) or state["settings"] != self._settings():
            raise foreign_state(f"a curriculum {state.get('settings')!r} instead of {self._settings()!r}")
        asked, seen, resets = state["asked"], state["seen"], state["resets"]
        whole = all(type(value) is int and value >= 0 for value in (asked, resets))
        if not whole or not isinstance(seen, list) or not all(isinstance(one, str) for one in seen):
            raise foreign_state(f"asked {asked!r}, resets {resets!r}")
        self._random.asked, self._seen, self.resets = asked, set(seen), resets

    def _settings(self) -> dict[str, Any]:
        return {"start": self.start, "end": self.end, "epochs": self.transition_epochs, "seed": self.seed}


def check_shares(name: str, shares: Shares) -> None:
    """Raise a ValueError unless the shares are numbers from 0 on that sum to 1."""
    bad = {level: share for level, share in shares.items() if not is_number(share) or share < 0}
    if bad or not shares:
        raise ConfigError(f"{name} has the shares {bad}", "a share is a number from 0 to 1", "correct it")
    total = math.fsum(shares.values())
    if abs(total - 1) > TOLERANCE:
        raise ConfigError(
            f"the shares of {name} sum to {total:.9g}: {dict(shares)}", "they divide one batch", "make them sum to 1"
        )


def largest_remainder(shares: Mapping[L, float], n: int) -> dict[L, int]:
    """Whole numbers that sum to n, each within 1 of its share; a share of 0 gets 0; ties go to the first.

    Example:
        >>> largest_remainder({"easy": 0.3, "medium": 0.5, "hard": 0.2}, 4)
        {'easy': 1, 'medium': 2, 'hard': 1}
    """
    total = math.fsum(shares.values())
    exact = {level: share * n / total for level, share in shares.items()}
    counts = {level: math.floor(value + TOLERANCE) for level, value in exact.items()}
    order = sorted((level for level in shares if shares[level] > 0), key=lambda level: counts[level] - exact[level])
    for level in order[: n - sum(counts.values())]:
        counts[level] += 1
    return counts


def no_tasks_of(level: str, share: float) -> TaskError:
    """The curriculum wants what is not there."""
    return TaskError(
        f"the curriculum asks for {share:.0%} {level} tasks and there are none",
        "another level would take its place without a trace",
        f"bring {level} tasks, or give the level a share of 0",
    )


def _pick(shares: Shares, drawn: float) -> str:
    """The level in whose part of [0, 1) the number lies; never one whose share is 0."""
    possible = [level for level, share in shares.items() if share > 0]
    reached = 0.0
    for level in possible:
        reached += shares[level]
        if drawn < reached:
            return level
    return possible[-1]


def is_number(value: object) -> bool:
    """Finite, and not True or False."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# -- Prefer tasks that the policy solves about half of the time: there siblings differ, and only differences teach
# Owns       the success rate of each task that was played, and the weight that follows from it.
# Promises   a task that always or never succeeds keeps a small weight, so that it can come back; a task nobody has
# played counts as one in the middle; an attempt without a verdict changes nothing but its count; the choice
# is a function of the seed, the number of choices and the reports, in any process.
# Never      remembers more than `remember` tasks.
#
# weight = max(explore, 4 p (1 - p)),   p = (successes + 1) / (attempts + 2), older attempts fading


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
