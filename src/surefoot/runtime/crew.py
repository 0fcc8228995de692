"""The seam between those who decide what is played next and those who play it."""

from __future__ import annotations

from typing import Protocol

from surefoot.runtime.orders import Order, Played


class Crew(Protocol):
    """Whoever plays groups, many at a time: a thread in this process, or a fleet of processes."""

    @property
    def capacity(self) -> int:
        """Groups that can be in flight at once and still be worked on."""

    async def play(self, order: Order) -> Played:
        """Play one group and grade it.

        May be cancelled at any moment, and then holds nothing. What cannot be mended by asking again is raised as a
        typed error; a lost engine or worker is mended inside, by asking another.
        """
