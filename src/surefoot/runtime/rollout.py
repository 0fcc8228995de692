"""Plays one group per task: ask the engine, with tools or without, grade, and keep every fact on the record.

Owns       the way from a task to a scored group.
Promises   every rollout has its own seed, a function of (run seed, purpose, step, task, sibling);
           versions are the engine's own at the first token; what fails carries a reason and
           never a reward; a failure costs its own rollout and nobody else's.
Never      compares siblings, filters, or trains.

Read next: `tool_rounds.py`, for rollouts of many turns; `policy/samples.py`, which turns groups into samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from surefoot.envs.tools import ToolEnvironment
from surefoot.errors import TaskError
from surefoot.protocols import Codec, Engine, Environment, Grade
from surefoot.records import Group, Rollout, Task
from surefoot.runtime.answers import Listener, check_answers
from surefoot.runtime.orders import Order, Played, Sampling
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
        self, tasks: Sequence[Task], sampling: Sampling, *, purpose: str, step: int, first: int = 0
    ) -> list[Played]:
        """One scored group per task, in order; `first` is the position of the first one in its step."""
        return self.play_orders([self.order(task, sampling, purpose, step, i) for i, task in enumerate(tasks, first)])

    def order(self, task: Task, sampling: Sampling, purpose: str, step: int, position: int) -> Order:
        """What has to be known to play one group, here or elsewhere."""
        if task.id not in self.prompts:
            raise TaskError(f"task {task.id} was never encoded", "prompts become tokens once", "add it to the task set")
        return Order(task, self.prompts[task.id], sampling, purpose, step, position)

    def play_orders(self, orders: Sequence[Order]) -> list[Played]:
        """One scored group per order, in order."""
        rollouts = self._rollouts(orders)
        tasks = [order.task for order in orders for _ in range(order.sampling.num_generations)]
        grades = self.environment.grade(tasks, rollouts)
        graded = iter([(_with_grade(r, g), g.correct) for r, g in zip(rollouts, grades, strict=True)])
        played = []
        for order in orders:
            siblings = [next(graded) for _ in range(order.sampling.num_generations)]
            group = Group(order.task, order.group, tuple(rollout for rollout, _ in siblings))
            played.append(Played(group, tuple(correct for _, correct in siblings)))
        return played

    def _rollouts(self, orders: Sequence[Order]) -> list[Rollout]:
        listener = Listener(self.codec, self.token_count)
        if isinstance(self.environment, ToolEnvironment):
            rounds = ToolRounds(self.environment, self.codec, seed=self.seed, threads=self.tool_threads)
            return rounds.play(orders, self.engine, listener)
        asked = [(o, i, r) for o in orders for i, r in enumerate(o.requests(self.seed, self.codec.stop_ids))]
        requests = [request for _, _, request in asked]
        completions = self.engine.generate(requests)
        check_answers(requests, completions)
        rollouts = []
        for (order, index, request), completion in zip(asked, completions, strict=True):
            turn, failure = listener.hear(request, completion)
            rollouts.append(Rollout(order.task.id, order.group, index, (turn,) if turn else (), failure=failure))
        return rollouts


def _with_grade(rollout: Rollout, grade: Grade) -> Rollout:
    if rollout.failure is not None:  # failed before grading: nobody's verdict can change that
        return rollout
    return rollout.graded(grade.reward, grade.parts, grade.failure)
