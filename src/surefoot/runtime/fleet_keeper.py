"""Keeps one post of the fleet manned: start, admit, watch, replace.

Owns       the life of the process at one post, and the budget of its replacements.
Promises   a process that dies, hangs or falls silent is noticed, ended and replaced; a crash loop backs off; when the
           budget is spent, in number or in time, the run ends with the post's name, the cause and its last lines; what
           a start refuses for a reason that another try cannot change (a bad model, a bad config) is raised as it is,
           at once.
Never      hands out work.

    starting --start, admit--> serving --died, silent, stuck--> lost --back-off--> starting
        |                                                        |
        +----------------- refused, or too often ----------------+--> FleetError

Read next: `fleet.py`, which hands out work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic

from surefoot.errors import EngineError, FleetError, LearnerLostError, SurefootError
from surefoot.pulse import beat
from surefoot.runtime.fleet_members import Limits, M, MemberLostError, Post, exhausted


@dataclass(frozen=True)
class Keeper(Generic[M]):
    """What it takes to keep one post manned."""

    post: Post[M]
    limits: Limits
    start: Callable[[int, int], Awaitable[M]]
    """(index, life) -> a process."""
    admit: Callable[[M], Awaitable[None]]
    """Bring it to where the others are, before it serves; raises EngineError when it cannot be trusted."""
    opened: Callable[[Post[M]], None]
    closed: Callable[[Post[M]], None]
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
                raise exhausted(post.name, post.in_a_row, cause, lines, 0.0 if too_many else post.unmanned_s)
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
                beat(f"starting {self.post.name}")
                await self.admit(starting[0])
        except TimeoutError:
            return f"it was not ready within runtime.start_timeout_s = {patience:g} s"
        except MemberLostError as loss:
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
            ping.add_done_callback(_heard)
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
            except MemberLostError as loss:
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
            beat(f"waiting for groups, {post.name} works")
            return now
        return moved if state.get("in_flight") else now


def _heard(ping: asyncio.Future[Any]) -> None:
    """A fleet that is being closed no longer listens; the end of a process that it ends itself is no news."""
    if not ping.cancelled():
        ping.exception()


def unexpected(name: str, error: Exception) -> SurefootError:
    """An exception that nobody foresaw, with its real text."""
    return SurefootError(
        f"{name} raised {type(error).__name__}: {str(error)[:2000]}", "it should have been a typed error",
        "this is a bug of ours, or of what it calls; its log has the traceback",
    )  # fmt: skip
