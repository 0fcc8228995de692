"""New weights for a fleet whose engines may die at any moment.

Owns       the one lock of a fleet: weights change on all engines at once, or on one that joins, never both.
Promises   an engine that dies during a sync does not fail it; one that lies does; whoever joins while all get new
           weights waits, and then gets those.

Read next: `weights.py`, what a sync consists of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from surefoot.errors import SurefootError
from surefoot.runtime.fleet_members import EngineMember, MemberLostError, Post

T = TypeVar("T")
Spread = Callable[[Sequence[EngineMember]], Awaitable[T]]
Admit = Callable[[EngineMember], Awaitable[object]]


class WeightSync:
    """Who is brought to which version, one sync at a time.

    Args:
        silence_s: without an answer for so long an engine counts as gone.
    """

    def __init__(self, silence_s: float) -> None:
        self.silence_s = silence_s
        self._one_at_a_time = asyncio.Lock()
        self._admit: Admit | None = None

    async def join(self, member: EngineMember) -> None:
        """Bring one engine to the version of the others; nothing before the first sync."""
        async with self._one_at_a_time:
            if self._admit is not None:
                await self._admit(member)

    async def try_once(self, engines: Sequence[Post[EngineMember]], spread: Spread[T], admit: Admit) -> T | None:
        """One sync of those that serve; None when one of them died of it, or nobody serves any more."""
        async with self._one_at_a_time:
            posts = [post for post in engines if post.state == "serving" and not post.gone.done()]
            members = [post.member for post in posts if post.member is not None]
            if not members:
                await asyncio.sleep(0)
                return None
            try:
                found = await spread(members)
            except (SurefootError, MemberLostError) as error:
                if await self._someone_is_gone(posts, error):
                    return None
                raise
            self._admit = admit
            return found

    async def _someone_is_gone(self, posts: Sequence[Post[EngineMember]], error: Exception) -> bool:
        """Whether a sync failed because an engine died, and not because one lied."""
        for post in posts:
            if post.member is not None and not post.gone.done():
                life = post.gone
                try:
                    await asyncio.wait_for(post.member.ping(), self.silence_s)
                except (MemberLostError, TimeoutError) as loss:
                    post.lose(str(loss) or f"no sign of life after a sync that failed: {error}", life)
        return any(post.gone.done() or post.state != "serving" for post in posts)
