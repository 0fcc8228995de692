"""The processes of a fleet as its supervisor sees them, whatever carries the messages.

Owns       the seam between supervision and transport, and how a lost process is spoken of.
Never      starts a process itself, or knows whether Ray exists.

Read next: `replicas.py`, which keeps one post manned; `runtime/ray/transport.py`, the real thing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

from surefoot.errors import EngineError, FleetError, LearnerLostError, StalledError, SurefootError
from surefoot.runtime.requests import RolloutRequest, RolloutResult
from surefoot.runtime.weights import Replica
from surefoot.system.signals import tick

LOG_LINES = 50
ReplicaKind = Literal["engine", "worker"]
ReplicaState = Literal["starting", "serving", "lost"]


class ReplicaLostError(Exception):
    """A process is gone, or does not answer any more; the text is the cause, as far as it is known."""


class EngineGoneError(Exception):
    """What a worker says when the engine that it was told to ask is gone."""


@dataclass(frozen=True)
class RolloutReport:
    """What a worker says after a play. `group` and `attempt` say which: an answer to another question is not taken."""

    group: str
    attempt: int
    played: RolloutResult
    complaint: str = ""
    """Why graders failed, when some did."""


class ReplicaProcess(Protocol):
    """One process. Every call raises `ReplicaLostError` when it is gone."""

    @property
    def name(self) -> str:
        """Such as `engine 0`."""

    async def ping(self) -> Mapping[str, Any]:
        """A sign of life; `in_flight` and `progress` (any number that changes when work gets ahead), `version`."""

    def kill(self) -> None:
        """End it now; never raises, and may be called twice."""


class EngineProcess(ReplicaProcess, Replica, Protocol):
    """An engine process."""


class WorkerProcess(ReplicaProcess, Protocol):
    """A rollout worker process."""

    async def run(self, request: RolloutRequest, engine: Any, attempt: int) -> RolloutReport:
        """Run and grade one group, with completions of this engine."""


class ReplicaTransport(Protocol):
    """Who starts processes. `life` counts from 1; a start that fails or is cancelled leaves nothing behind."""

    async def start_engine(self, index: int, life: int) -> EngineProcess:
        """An engine without weights."""

    async def start_worker(self, index: int, life: int) -> WorkerProcess:
        """A worker that is ready to play."""

    def last_lines(self, name: str) -> str:
        """The end of what the processes of this post printed, safe to show; one that never came up included."""


@dataclass(frozen=True)
class ReplicaLimits:
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


M = TypeVar("M", bound=ReplicaProcess)


@dataclass
class ReplicaSlot(Generic[M]):
    """A place in the fleet that is kept manned: one process after another."""

    kind: ReplicaKind
    index: int
    state: ReplicaState = "starting"
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


def restarts_exhausted(name: str, losses: int, cause: str, lines: str, seconds: float = 0.0) -> FleetError:
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


def rollout_too_slow(order: RolloutRequest, times: int, limits: ReplicaLimits) -> StalledError:
    """A group that nobody finished in time."""
    return StalledError(
        f"group {order.group} (task {order.task.id}) was not played in {limits.rollout_timeout_s:g} s, {times} times",
        "one wait has to end somewhere",
        "raise rollout_timeout_s, or leave the task out",
    )


def rollout_kills_replicas(order: RolloutRequest, losses: int) -> FleetError:
    """A group whose players were lost every time."""
    return FleetError(
        f"{losses} engines or workers were lost while they played group {order.group} (task {order.task.id})",
        "a task that takes its process with it would do so for ever",
        "look at the task, and at the logs of engines and workers in the run folder",
    )


def slot_rows(posts: Sequence[ReplicaSlot[Any]], loads: Sequence[int]) -> list[dict[str, Any]]:
    """Posts for `surefoot status`."""
    return [
        {"name": p.name, "state": p.state, "version": p.version, "load": load, "restarts": p.restarts}
        for p, load in zip(posts, loads, strict=True)
    ]


def _indented(lines: str) -> str:
    return "\n".join(f"    | {line}" for line in lines.strip("\n").splitlines()[-LOG_LINES:])


# -- Keeps one post of the fleet manned: start, admit, watch, replace -----------------------------
# Owns       the life of the process at one post, and the budget of its replacements.
# Promises   a process that dies, hangs or falls silent is noticed, ended and replaced; a crash loop backs off; when the
# budget is spent, in number or in time, the run ends with the post's name, the cause and its last lines; what
# a start refuses for a reason that another try cannot change (a bad model, a bad config) is raised as it is,
# at once.
# Never      hands out work.
#
# starting --start, admit--> serving --died, silent, stuck--> lost --back-off--> starting
# |                                                        |
# +----------------- refused, or too often ----------------+--> FleetError


@dataclass(frozen=True)
class ReplicaSupervisor(Generic[M]):
    """What it takes to keep one post manned."""

    post: ReplicaSlot[M]
    limits: ReplicaLimits
    start: Callable[[int, int], Awaitable[M]]
    """(index, life) -> a process."""
    admit: Callable[[M], Awaitable[None]]
    """Bring it to where the others are, before it serves; raises EngineError when it cannot be trusted."""
    opened: Callable[[ReplicaSlot[M]], None]
    closed: Callable[[ReplicaSlot[M]], None]
    last_lines: Callable[[str], str]
    """Name of a post -> the end of what was printed there."""

    async def run(self) -> None:
        """For ever; raises when the post cannot be kept."""
        post = self.post
        while True:
            cause = await self._one_life()
            post.in_a_row += 1
            too_many = post.in_a_row > self.limits.max_restarts
            if too_many or post.unmanned_s > max(self.limits.restart_timeout_s, 2 * post.start_s):
                lines = self.last_lines(post.name)
                raise restarts_exhausted(post.name, post.in_a_row, cause, lines, 0.0 if too_many else post.unmanned_s)
            await asyncio.sleep(self._pause())
            post.unmanned_s += self._pause()

    def _pause(self) -> float:
        """None for the first loss: most are accidents."""
        tries = self.post.in_a_row - 1
        return 0.0 if tries < 1 else min(self.limits.backoff_s * 2 ** (tries - 1), self.limits.longest_backoff_s)

    async def _one_life(self) -> str:
        """From the start of a process to its loss: the cause."""
        post = self.post
        post.begin()
        starting: list[M] = []
        try:
            began = asyncio.get_running_loop().time()
            cause = await self._bring_up(starting)
            seconds = asyncio.get_running_loop().time() - began
            post.unmanned_s += seconds if cause is not None or post.in_a_row else 0.0
            if cause is None:
                post.start_s = max(post.start_s, seconds)
                post.member, post.state = starting[0], "serving"
                self.opened(post)
                cause = await self._watch(starting[0])
        finally:
            post.lose("it was closed")
            post.state, post.member = "lost", None
            self.closed(post)
            for member in starting:
                member.kill()
        return cause

    async def _bring_up(self, starting: list[M]) -> str | None:
        """None when it is up; else why not."""
        patience = self.limits.start_timeout_s
        try:
            async with asyncio.timeout(patience):
                starting.append(await self.start(self.post.index, self.post.lives))
                tick(f"starting {self.post.name}")
                await self.admit(starting[0])
        except TimeoutError:
            return f"it was not ready within runtime.start_timeout_s = {patience:g} s"
        except ReplicaLostError as loss:
            return str(loss)
        except (EngineError, FleetError) as error:
            if not starting or isinstance(error, LearnerLostError):
                raise
            return f"it could not be brought to the current version: {error.what}"
        return None

    async def _watch(self, member: M) -> str:
        """The cause, once the process is lost."""
        post, limits, loop = self.post, self.limits, asyncio.get_running_loop()
        moved = loop.time()
        while True:
            began, ping = loop.time(), asyncio.ensure_future(member.ping())
            ping.add_done_callback(_on_ping_done)
            both: set[asyncio.Future[Any]] = {ping, post.gone}
            try:
                await asyncio.wait(both, timeout=limits.silence_s, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if post.gone.done() or not ping.done():
                    ping.cancel()
            if post.gone.done():
                return post.gone.result()
            if not ping.done():
                if loop.time() - began > 2 * limits.silence_s:
                    continue  # it was we who slept
                return f"no sign of life for {limits.silence_s:g} s: it hangs, or was stopped"
            try:
                moved = self._take(ping.result(), moved, loop.time())
            except ReplicaLostError as loss:
                return str(loss)
            if loop.time() - moved > limits.rollout_timeout_s:
                return f"it has work and got no further for {limits.rollout_timeout_s:g} s"
            await asyncio.wait({post.gone}, timeout=limits.heartbeat_s)

    def _take(self, state: Mapping[str, Any], moved: float, now: float) -> float:
        """Note a sign of life; when work last got ahead."""
        post, progress = self.post, state.get("progress")
        post.version = state.get("version")
        if progress != post.progress:
            post.progress = progress
            tick(f"waiting for groups, {post.name} works")
            return now
        return moved if state.get("in_flight") else now


def _on_ping_done(ping: asyncio.Future[Any]) -> None:
    """A fleet that is being closed no longer listens; the end of a process that it ends itself is no news."""
    if not ping.cancelled():
        ping.exception()


def unexpected_error(name: str, error: Exception) -> SurefootError:
    """An exception that nobody foresaw, with its real text."""
    return SurefootError(
        f"{name} raised {type(error).__name__}: {str(error)[:2000]}", "it should have been a typed error",
        "this is a bug of ours, or of what it calls; its log has the traceback",
    )  # fmt: skip
