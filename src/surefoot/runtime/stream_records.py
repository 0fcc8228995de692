"""What the stream remembers of groups in flight and of batches, its numbers, and its ways to end.

Read next: `stream.py`, which asks and delivers.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from surefoot.errors import EngineError, RewardError, StalledError
from surefoot.records import Group
from surefoot.store.ledger_records import Item, Lease

RETRIED: dict[type[Exception], str] = {
    TimeoutError: "timeout",
    StalledError: "timeout",
    EngineError: "engine_error",
    RewardError: "reward_error",
}
"""What one group may fail of without ending the run, and the word that the ledger keeps for it."""


@dataclass(eq=False)
class Flight:
    """One group that somebody plays."""

    lease: Lease
    version: int
    """Weights in force when it was asked for; its tokens cannot be older."""
    task: asyncio.Task[None] | None = None

    @property
    def item(self) -> Item:
        """Whom it is played for."""
        return self.lease.item


class Arrival(NamedTuple):
    """A group that was played, on its way to the disk."""

    flight: Flight
    group: Group
    kept: asyncio.Future[None]


def oldest_version(group: Group, default: int) -> int:
    """The oldest weights that drew a token of it; `default` when it has none."""
    return min((turn.version for rollout in group.rollouts for turn in rollout.turns), default=default)


@dataclass
class Figures:
    """Counts since this life of the run began, and the numbers of the batch that was drawn last."""

    began: float | None = None
    """When sampling began."""
    drawn: float | None = None
    """When the last batch was asked for."""
    groups: int = 0
    tokens: int = 0
    wasted: int = 0
    """Groups that became too old before anybody trained on them."""
    late: int = 0
    """Results that came after their lease had ended."""
    given_up: Counter[str] = field(default_factory=Counter)
    told: Counter[str] = field(default_factory=Counter)
    """Wasted and given up, as of the batch before."""
    last: dict[str, float] = field(default_factory=dict)

    def delivered(self, group: Group) -> None:
        """One more group is on the disk."""
        self.groups += 1
        self.tokens += sum(rollout.sampled_tokens for rollout in group.rollouts)

    def batch(self, groups: Sequence[Group], version: int, asked: float, now: float) -> None:
        """The batch that was asked for at `asked` is complete, for a learner at `version`."""
        ages = [version - oldest_version(group, version) for group in groups]
        turns = [turn for group in groups for rollout in group.rollouts for turn in rollout.turns]
        off = [version - turn.version for turn in turns] or [0]
        mixed = sum(turn.version_end != turn.version for turn in turns)
        since = asked if self.drawn is None else self.drawn
        self.last = {
            "async/staleness_mean": sum(ages) / len(ages),
            "async/staleness_max": float(max(ages)),
            "async/wasted": float(self.wasted - self.told["wasted"]),
            "async/given_up": float(self.given_up.total() - self.told["given_up"]),
            "async/wait_s": now - asked,
            "async/idle_share": (now - asked) / (now - since) if now > since else 0.0,
            "off_policy/mean": sum(off) / len(off),
            "off_policy/max": float(max(off)),
            "off_policy/mixed_share": mixed / len(turns) if turns else 0.0,
        }
        self.drawn, self.told = now, Counter(wasted=self.wasted, given_up=self.given_up.total())

    def rates(self, now: float) -> dict[str, Any]:
        """Throughput since sampling began."""
        seconds = 0.0 if self.began is None else now - self.began
        return {
            "groups": self.groups, "tokens": self.tokens, "wasted": self.wasted, "late": self.late,
            "given_up": dict(self.given_up), "seconds": seconds,
            "groups_per_second": self.groups / seconds if seconds > 0 else None,
            "tokens_per_second": self.tokens / seconds if seconds > 0 else None,
        }  # fmt: skip


def nothing_happened(seconds: float, n: int, status: Mapping[str, Any]) -> StalledError:
    """A wait has come to its end."""
    return StalledError(
        f"waited {seconds:g} s for {n} groups and nothing happened: {status['queue']} are here, {status['in_flight']} "
        f"in flight, {status['pending']} in the queue; the learner is at version {status['version']}, engines at "
        f"{status['published']}",
        "who plays them does not answer, not even to being cancelled",
        "look at the engines' and workers' logs; the run can be resumed",
    )


def all_too_old(wasted: int, n: int, max_staleness: int, status: Mapping[str, Any]) -> StalledError:
    """Engines speak with old weights, whatever they are told."""
    return StalledError(
        f"{wasted} groups came too old while {n} were waited for: the learner is at version {status['version']}, "
        f"engines were given {status['published']}, max_staleness is {max_staleness}",
        "they sample from other weights than those they were given, or for longer than these are of use",
        "look at the engines' logs, lower max_completion_length, or raise max_staleness",
    )


def all_too_slow(failed: int, timeout_s: float) -> StalledError:
    """Not one group in time."""
    return StalledError(
        f"{failed} groups in a row took longer than rollout_timeout_s = {timeout_s:g}",
        "nobody has answered in time since the last group that came",
        "raise rollout_timeout_s, or look at what engines, tools and graders wait for",
    )
