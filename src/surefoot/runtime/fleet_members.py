"""The processes of a fleet as its supervisor sees them, whatever carries the messages.

Owns       the seam between supervision and transport, and how a lost process is spoken of.
Never      starts a process itself, or knows whether Ray exists.

Read next: `fleet_keeper.py`, which keeps one post manned; `ray_transport.py`, the real thing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

from surefoot.errors import FleetError, StalledError
from surefoot.runtime.orders import Order, Played
from surefoot.runtime.weights import Replica

LOG_LINES = 50
Kind = Literal["engine", "worker"]
State = Literal["starting", "serving", "lost"]


class MemberLostError(Exception):
    """A process is gone, or does not answer any more; the text is the cause, as far as it is known."""


class EngineGoneError(Exception):
    """What a worker says when the engine that it was told to ask is gone."""


@dataclass(frozen=True)
class Report:
    """What a worker says after a play. `group` and `attempt` say which: an answer to another question is not taken."""

    group: str
    attempt: int
    played: Played
    complaint: str = ""
    """Why graders failed, when some did."""


class Member(Protocol):
    """One process. Every call raises `MemberLostError` when it is gone."""

    @property
    def name(self) -> str:
        """Such as `engine 0`."""

    async def ping(self) -> Mapping[str, Any]:
        """A sign of life; `in_flight` and `progress` (any number that changes when work gets ahead), `version`."""

    def kill(self) -> None:
        """End it now; never raises, and may be called twice."""


class EngineMember(Member, Replica, Protocol):
    """An engine process."""


class WorkerMember(Member, Protocol):
    """A rollout worker process."""

    async def play(self, order: Order, engine: Any, attempt: int) -> Report:
        """Play and grade one group, with completions of this engine."""


class Transport(Protocol):
    """Who starts processes. `life` counts from 1; a start that fails or is cancelled leaves nothing behind."""

    async def start_engine(self, index: int, life: int) -> EngineMember:
        """An engine without weights."""

    async def start_worker(self, index: int, life: int) -> WorkerMember:
        """A worker that is ready to play."""

    def last_lines(self, name: str) -> str:
        """The end of what the processes of this post printed, safe to show; one that never came up included."""


@dataclass(frozen=True)
class Limits:
    """How long a fleet waits, and how often it tries."""

    start_timeout_s: float = 120.0
    max_restarts: int = 5
    restart_timeout_s: float = 30.0
    """How long a post may be unmanned in all before a replacement finishes something; at least two whole starts."""
    rollout_timeout_s: float = 600.0
    heartbeat_s: float = 0.5
    silence_s: float = 15.0
    """Without a sign of life for so long a process counts as hung and is ended."""
    backoff_s: float = 0.25
    longest_backoff_s: float = 4.0
    max_timeouts: int = 3
    """How often one group may run out of time."""


M = TypeVar("M", bound=Member)


@dataclass
class Post(Generic[M]):
    """A place in the fleet that is kept manned: one process after another."""

    kind: Kind
    index: int
    state: State = "starting"
    member: M | None = None
    lives: int = 0
    in_a_row: int = 0
    """Processes lost here since the last one that finished something."""
    unmanned_s: float = 0.0
    """Seconds that their successors took to start, or to fail to; the time that they served is not in it."""
    start_s: float = 0.0
    """The longest that a process took here from its start until it served."""
    abandoned: int = 0
    """Plays that nobody waits for any more and that have not ended."""
    finished: int = 0
    version: int | None = None
    progress: object = None
    gone: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done, with the cause, when the present process is lost."""

    @property
    def name(self) -> str:
        """Such as `engine 0`."""
        return f"{self.kind} {self.index}"

    @property
    def restarts(self) -> int:
        """How often it was replaced."""
        return max(0, self.lives - 1)

    def begin(self) -> None:
        """A new life."""
        self.state, self.member, self.abandoned = "starting", None, 0
        self.version = self.progress = None
        self.lives += 1
        self.gone = asyncio.get_running_loop().create_future()

    def lose(self, cause: str, life: asyncio.Future[str] | None = None) -> None:
        """The process is not to be used any more; the first cause counts.

        Args:
            life: `gone` of the life that is meant. News of an earlier one say nothing of its successor.
        """
        life = self.gone if life is None else life
        if not life.done():
            life.set_result(cause)

    def succeed(self) -> None:
        """It finished something: the count of losses begins anew."""
        self.finished += 1
        self.in_a_row, self.unmanned_s = 0, 0.0


def exhausted(name: str, losses: int, cause: str, lines: str, seconds: float = 0.0) -> FleetError:
    """The end of the run: who, why, and what it said last; `seconds` where their time is over, not their number."""
    said = f"\n  its last lines:\n{_indented(lines)}" if lines.strip() else "\n  it printed nothing"
    times = "once" if losses == 1 else f"{losses} times in a row"
    times += f", {seconds:.0f} s of starting," if seconds else ""
    key = "runtime.restart_timeout_s" if seconds else "runtime.max_restarts"
    return FleetError(
        f"{name} was lost {times} without finishing anything: {cause}{said}",
        f"replacing it did not help ({key}), and without it the run cannot go on",
        "mend what its last lines say; the run can be resumed",
    )


def too_slow(order: Order, times: int, limits: Limits) -> StalledError:
    """A group that nobody finished in time."""
    return StalledError(
        f"group {order.group} (task {order.task.id}) was not played in {limits.rollout_timeout_s:g} s, {times} times",
        "one wait has to end somewhere",
        "raise rollout_timeout_s, or leave the task out",
    )


def too_deadly(order: Order, losses: int) -> FleetError:
    """A group whose players were lost every time."""
    return FleetError(
        f"{losses} engines or workers were lost while they played group {order.group} (task {order.task.id})",
        "a task that takes its process with it would do so for ever",
        "look at the task, and at the logs of engines and workers in the run folder",
    )


def described(posts: Sequence[Post[Any]], loads: Sequence[int]) -> list[dict[str, Any]]:
    """Posts for `surefoot status`."""
    return [
        {"name": p.name, "state": p.state, "version": p.version, "load": load, "restarts": p.restarts}
        for p, load in zip(posts, loads, strict=True)
    ]


def _indented(lines: str) -> str:
    return "\n".join(f"    | {line}" for line in lines.strip("\n").splitlines()[-LOG_LINES:])
