"""Plays one group per task: ask the engine, with tools or without, grade, and keep every fact on the record.

Owns       the way from a task to a scored group.
Promises   every rollout has its own seed, a function of (run seed, purpose, step, task, sibling);
           versions are the engine's own at the first token; what fails carries a reason and
           never a reward; a failure costs its own rollout and nobody else's; a group is told of as soon as it is
           graded, and graders work while groups with tools still play.
Never      compares siblings, filters, or trains.

Read next: `tool_rounds.py`, for rollouts of many turns; `policy/samples.py`, which turns groups into samples.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import accumulate

from surefoot.envs.tools import ToolEnvironment
from surefoot.errors import TaskError
from surefoot.protocols import Codec, Engine, Environment, Grade, GroupFinished
from surefoot.records import Group, Rollout, Task
from surefoot.runtime.answers import Listener, check_answers
from surefoot.runtime.orders import Order, Played, Sampling
from surefoot.runtime.side_thread import SideThread
from surefoot.runtime.tool_rounds import ToolRounds


class RolloutCollector:
    """Asks, listens and grades.

    Args:
        environment: with tools when it is a `ToolEnvironment`.
        prompts: token ids of every task's prompt, by task id; encoded once, before the run.
        token_count: ids from here on exist in the model but not in the tokenizer.
        tool_threads: tools that are waited for at once.
    """

    def __init__(
        self, engine: Engine, environment: Environment, codec: Codec, prompts: Mapping[str, tuple[int, ...]],
        *, seed: int, token_count: int, tool_threads: int = 32,
    ) -> None:  # fmt: skip
        self.engine, self.environment, self.codec = engine, environment, codec
        self.prompts, self.seed, self.token_count = prompts, seed, token_count
        self.tool_threads = tool_threads

    def play(
        self, tasks: Sequence[Task], sampling: Sampling, *, purpose: str, step: int,
        positions: Sequence[int] | None = None, finished: GroupFinished | None = None,
    ) -> list[Played]:  # fmt: skip
        """One scored group per task, in order; `positions` in the step, from 0 on when left out."""
        places = range(len(tasks)) if positions is None else positions
        orders = [self.order(task, sampling, purpose, step, p) for p, task in zip(places, tasks, strict=True)]
        return self.play_orders(orders, finished)

    def order(self, task: Task, sampling: Sampling, purpose: str, step: int, position: int) -> Order:
        """What has to be known to play one group, here or elsewhere."""
        if task.id not in self.prompts:
            raise TaskError(f"task {task.id} was never encoded", "prompts become tokens once", "add it to the task set")
        return Order(task, self.prompts[task.id], sampling, purpose, step, position)

    def play_orders(self, orders: Sequence[Order], finished: GroupFinished | None = None) -> list[Played]:
        """One scored group per order, in order."""
        if isinstance(self.environment, ToolEnvironment):
            return self._play_with_tools(self.environment, orders, finished)
        rollouts = iter(self._rollouts(orders))
        return self._grade([(o, [next(rollouts) for _ in range(o.sampling.num_generations)]) for o in orders], finished)

    def _play_with_tools(
        self, environment: ToolEnvironment, orders: Sequence[Order], finished: GroupFinished | None
    ) -> list[Played]:
        """Groups end at different times: they are graded beside the others' turns, those that wait together."""
        played: dict[int, Played] = {}

        def grade(over: Sequence[tuple[int, list[Rollout]]]) -> None:
            found = self._grade([(orders[number], rollouts) for number, rollouts in over], finished)
            played.update({number: one for (number, _), one in zip(over, found, strict=True)})

        grading = SideThread(grade, "surefoot-grading")
        rounds = ToolRounds(environment, self.codec, seed=self.seed, threads=self.tool_threads)
        try:
            rounds.play(orders, self.engine, Listener(self.codec, self.token_count), lambda n, r: grading.put((n, r)))
            grading.close()
        except BaseException:
            grading.abandon()
            raise
        return [played[number] for number in range(len(orders))]

    def _grade(self, groups: Sequence[tuple[Order, list[Rollout]]], finished: GroupFinished | None) -> list[Played]:
        rollouts = [rollout for _, siblings in groups for rollout in siblings]
        owners = [order for order, siblings in groups for _ in siblings]
        tasks = [order.task for order in owners]
        if finished is None:
            grades = self.environment.grade(tasks, rollouts)
        else:
            tell = finished

            def each(places: Sequence[int], graded: Sequence[Grade]) -> None:
                order = owners[places[0]]
                tell(order.position, _played(order, [rollouts[place] for place in places], graded).group)

            grades = self.environment.grade(tasks, rollouts, each)
        graded = [grade for _, grade in zip(rollouts, grades, strict=True)]
        ends = list(accumulate(len(siblings) for _, siblings in groups))
        return [_played(order, s, graded[end - len(s) : end]) for (order, s), end in zip(groups, ends, strict=True)]

    def _rollouts(self, orders: Sequence[Order]) -> list[Rollout]:
        listener = Listener(self.codec, self.token_count)
        asked = [(o, i, r) for o in orders for i, r in enumerate(o.requests(self.seed, self.codec.stop_ids))]
        requests = [request for _, _, request in asked]
        started = time.monotonic()
        completions = self.engine.generate(requests)
        seconds = time.monotonic() - started
        check_answers(requests, completions)
        rollouts = []
        for (order, index, request), completion in zip(asked, completions, strict=True):
            turn, failure = listener.hear(request, completion)
            turns = (turn,) if turn else ()
            rollouts.append(Rollout(order.task.id, order.group, index, turns, failure=failure, seconds=seconds))
        return rollouts


def _played(order: Order, siblings: Sequence[Rollout], grades: Sequence[Grade]) -> Played:
    graded = tuple(_with_grade(rollout, grade) for rollout, grade in zip(siblings, grades, strict=True))
    return Played(Group(order.task, order.group, graded), tuple(grade.correct for grade in grades))


def _with_grade(rollout: Rollout, grade: Grade) -> Rollout:
    if rollout.failure is not None:  # failed before grading: nobody's verdict can change that
        return rollout
    return rollout.graded(grade.reward, grade.parts, grade.failure, grade.seconds)
