"""Plays one group per task: ask the engine, grade, and keep every fact on the record.

Owns       the way from a task to a scored group.
Promises   every rollout has its own seed, a function of (run seed, purpose, step, task, sibling);
           versions are the engine's own at the first token; what fails carries a reason and
           never a reward; a logprob that is none costs its own rollout and nobody else's.
Never      compares siblings, filters, or trains.

Read next: `policy/samples.py`, which turns groups into samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from surefoot.errors import EngineError, TaskError
from surefoot.guards.invariants import are_logprobs
from surefoot.protocols import Codec, Completion, Engine, Environment, Grade, Request
from surefoot.records import Group, Rollout, Task, Turn
from surefoot.runtime.orders import Order, Played, Sampling

UNDECODABLE = "undecodable_token"
"""Failure reason: the policy chose an embedding row that no token has."""
NONFINITE_LOGPROB = "nonfinite_logprob"
"""Failure reason: the sampler gave a token a log-probability that is none, such as NaN or a number above 0."""


class RolloutCollector:
    """Asks, listens and grades.

    Args:
        prompts: token ids of every task's prompt, by task id; encoded once, before the run.
        token_count: ids from here on exist in the model but not in the tokenizer.
    """

    def __init__(
        self, engine: Engine, environment: Environment, codec: Codec, prompts: Mapping[str, tuple[int, ...]],
        *, seed: int, token_count: int,
    ) -> None:  # fmt: skip
        self.engine, self.environment, self.codec = engine, environment, codec
        self.prompts, self.seed, self.token_count = prompts, seed, token_count

    def play(self, tasks: Sequence[Task], sampling: Sampling, *, purpose: str, step: int) -> list[Played]:
        """One scored group per task, in order."""
        return self.play_orders([self.order(task, sampling, purpose, step, i) for i, task in enumerate(tasks)])

    def order(self, task: Task, sampling: Sampling, purpose: str, step: int, position: int) -> Order:
        """What has to be known to play one group, here or elsewhere."""
        if task.id not in self.prompts:
            raise TaskError(f"task {task.id} was never encoded", "prompts become tokens once", "add it to the task set")
        return Order(task, self.prompts[task.id], sampling, purpose, step, position)

    def play_orders(self, orders: Sequence[Order]) -> list[Played]:
        """One scored group per order, in order."""
        asked = [(o, i, r) for o in orders for i, r in enumerate(o.requests(self.seed, self.codec.stop_ids))]
        requests = [request for _, _, request in asked]
        completions = self.engine.generate(requests)
        self._check_answers(requests, completions)
        rollouts = [self._rollout(o.task, o.group, i, r, c) for (o, i, r), c in zip(asked, completions, strict=True)]
        grades = self.environment.grade([order.task for order, _, _ in asked], rollouts)
        graded = iter([(_with_grade(r, g), g.correct) for r, g in zip(rollouts, grades, strict=True)])
        played = []
        for order in orders:
            siblings = [next(graded) for _ in range(order.sampling.num_generations)]
            group = Group(order.task, order.group, tuple(rollout for rollout, _ in siblings))
            played.append(Played(group, tuple(correct for _, correct in siblings)))
        return played

    def _check_answers(self, requests: Sequence[Request], completions: Sequence[Completion]) -> None:
        asked, answered = [r.id for r in requests], [c.request_id for c in completions]
        if asked != answered:
            raise EngineError(
                f"asked {len(asked)} completions, got {len(answered)}, or in another order",
                "an answer given to the wrong question is graded without complaint",
                "return one completion per request, in order",
            )
        for request, completion in zip(requests, completions, strict=True):
            if not 1 <= len(completion.token_ids) <= request.max_new_tokens:
                raise EngineError(
                    f"request {request.id}: {len(completion.token_ids)} tokens, limit {request.max_new_tokens}",
                    "an empty or overlong answer breaks the batch arithmetic",
                    "respect max_new_tokens in the engine",
                )

    def _rollout(self, task: Task, group: str, index: int, request: Request, completion: Completion) -> Rollout:
        lengths_agree = len(completion.logprobs) == len(completion.token_ids)  # if not, `Turn` says so
        if lengths_agree and not are_logprobs(completion.logprobs):
            # Without its turn: what holds a NaN could be neither journaled nor compared, and nobody may train on it.
            return Rollout(task.id, group, index, (), failure=NONFINITE_LOGPROB)
        turn = Turn(
            request.prompt_ids, completion.token_ids, completion.logprobs, completion.version,
            finish_reason=completion.finish_reason, text=self.codec.decode(completion.token_ids),
            version_end=completion.version_end,
        )  # fmt: skip
        failure = UNDECODABLE if max(completion.token_ids) >= self.token_count else None
        return Rollout(task.id, group, index, (turn,), failure=failure)


def _with_grade(rollout: Rollout, grade: Grade) -> Rollout:
    if rollout.failure is not None:  # failed before grading: nobody's verdict can change that
        return rollout
    return rollout.graded(grade.reward, grade.parts, grade.failure)
