"""Groups played by a fleet, for callers that wait for all of them: one step's batch, an evaluation, the preflight.

Promises   the groups come in the order of their tasks, whoever played them and however often; the first error ends the
           wait and cancels the rest; an interrupted wait leaves nothing under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from surefoot.errors import TaskError
from surefoot.protocols import Environment, Grade, Graded, GroupFinished
from surefoot.records import Rollout, Task
from surefoot.runtime.fleet import Fleet
from surefoot.runtime.fleet_thread import FleetThread
from surefoot.runtime.orders import Order, Played, Sampling


class FleetEnvironment:
    """Graders of the driver for a second look, with the complaints of the fleet's own."""

    def __init__(self, own: Environment, fleet: Fleet) -> None:
        self.own, self.fleet = own, fleet

    def grade(self, tasks: Sequence[Task], rollouts: Sequence[Rollout], each: Graded | None = None) -> list[Grade]:
        """In this process."""
        return self.own.grade(tasks, rollouts, each)

    def explain_failures(self) -> str:
        """What the workers' graders complained of; each complaint counts its own failures."""
        newest = list(self.fleet.complaints)[-3:]
        return "".join(newest) or self.own.explain_failures()

    def close(self) -> None:
        """End the driver's own."""
        self.own.close()


class FleetPlayers:
    """`judging.Players` over a fleet.

    Args:
        prompts: token ids of every task's prompt, by task id.
    """

    def __init__(
        self, fleet: Fleet, thread: FleetThread, environment: Environment, prompts: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.fleet, self.thread, self.prompts = fleet, thread, prompts
        self.environment: Environment = FleetEnvironment(environment, fleet)

    def play(
        self, tasks: Sequence[Task], sampling: Sampling, *, purpose: str, step: int,
        positions: Sequence[int] | None = None, finished: GroupFinished | None = None,
    ) -> list[Played]:  # fmt: skip
        """One scored group per task, in order; `positions` in the step, from 0 on when left out."""
        places = range(len(tasks)) if positions is None else positions
        orders = [self.order(task, sampling, purpose, step, p) for p, task in zip(places, tasks, strict=True)]
        return self.thread.wait(self._play(orders, finished))

    def order(self, task: Task, sampling: Sampling, purpose: str, step: int, position: int) -> Order:
        """What has to be known to play one group anywhere."""
        if task.id not in self.prompts:
            raise TaskError(f"task {task.id} was never encoded", "prompts become tokens once", "add it to the task set")
        return Order(task, self.prompts[task.id], sampling, purpose, step, position)

    async def _play(self, orders: Sequence[Order], finished: GroupFinished | None) -> list[Played]:
        plays = [asyncio.create_task(self._play_one(order, finished)) for order in orders]
        try:
            return list(await asyncio.gather(*plays))
        finally:
            for play in plays:
                play.cancel()
            await asyncio.gather(*plays, return_exceptions=True)

    async def _play_one(self, order: Order, finished: GroupFinished | None) -> Played:
        """A worker plays and grades the whole group."""
        played = await self.fleet.play(order)
        if finished is not None:
            finished(order.position, played.group)
        return played
