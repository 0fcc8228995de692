"""Plays one group per task: ask the engine, with tools or without, grade, and keep every fact on the record.

Owns       the way from a task to a scored group.
Promises   every rollout has its own seed, a function of (run seed, purpose, step, task, sibling);
           versions are the engine's own at the first token; what fails carries a reason and
           never a reward; a failure costs its own rollout and nobody else's; a group is told of as soon as it is
           graded, and graders work while groups with tools still play.
Never      compares siblings, filters, or trains.

Read next: `rollout.py`, for rollouts of many turns; `learner/samples.py`, which turns groups into samples.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import accumulate

from surefoot.errors import EngineError, TaskError, ToolError, ToolFailedError
from surefoot.guards.invariants import are_logprobs
from surefoot.protocols import Codec, Completion, Engine, Environment, Grade, GroupFinished, Request
from surefoot.records import LENGTH, Group, Message, Rollout, Task, Turn
from surefoot.runtime.requests import RolloutRequest, RolloutResult, Sampling, derive_seed
from surefoot.runtime.threads import BackgroundThread
from surefoot.system.heartbeat import tick
from surefoot.tools.session import DEADLINE, ToolEnvironment, ToolSession

# -- What an engine said, checked and put on record: completions become turns ---------------------


UNDECODABLE = "undecodable_token"
"""Failure reason: the policy chose an embedding row that no token has."""
NONFINITE_LOGPROB = "nonfinite_logprob"
"""Failure reason: the sampler gave a token a log-probability that is none, such as NaN or a number above 0."""


def check_completions(requests: Sequence[Request], completions: Sequence[Completion]) -> None:
    """Refuse answers that are too few, in another order, empty or too long."""
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


class TurnBuilder:
    """Turns completions into turns.

    Args:
        token_count: ids from here on exist in the model but not in the tokenizer.
    """

    def __init__(self, codec: Codec, token_count: int) -> None:
        self.codec, self.token_count = codec, token_count

    def hear(self, request: Request, completion: Completion) -> tuple[Turn | None, str | None]:
        """The turn, and why its rollout has failed if it has."""
        lengths_agree = len(completion.logprobs) == len(completion.token_ids)  # if not, `Turn` says so
        if lengths_agree and not are_logprobs(completion.logprobs):
            # Without its turn: what holds a NaN could be neither journaled nor compared, and nobody may train on it.
            return None, NONFINITE_LOGPROB
        turn = Turn(
            request.prompt_ids, completion.token_ids, completion.logprobs, completion.version,
            finish_reason=completion.finish_reason, text=self.codec.decode(completion.token_ids),
            version_end=completion.version_end,
        )  # fmt: skip
        return turn, UNDECODABLE if max(completion.token_ids) >= self.token_count else None


# -- Plays groups with tools: everybody speaks, tools answer, everybody who is not done speaks again
# Owns       the way of one rollout through its turns, and the threads in which tools are waited for.
# Promises   history only grows: a turn's tokens are those of the turn before, what was sampled, and what the tools
# said;
# a tool's failure ends its own rollout under one reason and no other; a rollout that has ended keeps its
# turns; a group whose last rollout has ended is handed on while others still play; tools are let go on every
# way out, an engine's failure included, which is nobody's words.
# Never      grades, or asks a tool twice for one call.


CONTEXT = "context"
NOT_FINITE = "own_reward_not_finite"
"""Failure reason: the rollout's own world gave a reward that is no number."""


Ended = Callable[[int, list[Rollout]], None]
"""(number of the order, its rollouts): this group will not speak again."""


@dataclass(eq=False)
class Attempt:
    """One rollout under way."""

    order: RolloutRequest
    index: int
    prompt_ids: tuple[int, ...]
    session: ToolSession | None = None
    turns: list[Turn] = field(default_factory=list)
    ended: str = ""
    failure: str | None = None
    own_reward: float | None = None
    began: float = field(default_factory=time.monotonic)
    over: float | None = None
    """When it stopped speaking."""

    @property
    def name(self) -> str:
        """Unique in the run."""
        return f"{self.order.group}/{self.index}"

    @property
    def under_way(self) -> bool:
        """Whether it speaks again."""
        return not self.ended and self.failure is None

    def request(self, seed: int, stop_ids: frozenset[int]) -> Request | None:
        """What is asked of the engine next; None when the context is full."""
        sampling, turn = self.order.sampling, len(self.turns)
        room = min(sampling.max_completion_length, sampling.max_width - len(self.prompt_ids))
        if room < 1:
            return None
        later = (f"turn {turn}",) if turn else ()  # the first turn draws from the stream of a rollout without tools
        return Request(
            id=f"{self.name}/{turn}" if turn else self.name, prompt_ids=self.prompt_ids, max_new_tokens=room,
            temperature=sampling.temperature, stop_ids=stop_ids,
            seed=derive_seed(seed, self.order.purpose, self.order.step, self.order.task.id, self.index, *later),
        )  # fmt: skip

    def rollout(self) -> Rollout:
        """As far as it came."""
        return Rollout(
            self.order.task.id, self.order.group, self.index, tuple(self.turns), failure=self.failure,
            ended=self.ended, own_reward=None if self.failure else self.own_reward,
            seconds=(time.monotonic() if self.over is None else self.over) - self.began,
        )  # fmt: skip


class ToolRollouts:
    """Plays many rollouts in step with each other.

    Args:
        threads: tools that are waited for at once.
    """

    def __init__(self, environment: ToolEnvironment, codec: Codec, *, seed: int, threads: int = 32) -> None:
        self.environment, self.codec, self.seed, self.threads = environment, codec, seed, threads

    def play(self, orders: Sequence[RolloutRequest], engine: Engine, listener: TurnBuilder, ended: Ended) -> None:
        """Every sibling of every order; failures carry their reason.

        Args:
            ended: called once for each order, by its number, with its rollouts in order.
        """
        groups = {n: [Attempt(o, i, o.prompt_ids) for i in range(o.sampling.num_generations)]
                  for n, o in enumerate(orders)}  # fmt: skip
        attempts = [attempt for siblings in groups.values() for attempt in siblings]
        pool = ThreadPoolExecutor(max(1, min(self.threads, len(attempts))), thread_name_prefix="surefoot-tools")
        try:
            self._each(pool, attempts, self._open)
            self._show_openings(attempts)
            while groups:
                waiting = [a for siblings in groups.values() for a in siblings if a.under_way]
                self._speak(waiting, engine, listener)
                self._each(pool, [a for a in waiting if a.under_way], self._answer)
                for attempt in waiting:
                    attempt.over = None if attempt.under_way else time.monotonic()
                over = {n: siblings for n, siblings in groups.items() if not any(a.under_way for a in siblings)}
                self._end(pool, [attempt for siblings in over.values() for attempt in siblings])
                for number in over:
                    ended(number, [attempt.rollout() for attempt in groups.pop(number)])
        finally:
            self._each(pool, [a for a in attempts if a.session is not None], _close_tools)
            pool.shutdown(wait=True)

    def _end(self, pool: ThreadPoolExecutor, attempts: Sequence[Attempt]) -> None:
        """Nobody of these speaks again: their worlds are asked for a reward, then let go."""
        if attempts:
            self._each(pool, [a for a in attempts if a.failure is None], self._ask_reward)
            self._each(pool, [a for a in attempts if a.session is not None], _close_tools)
            for attempt in attempts:
                attempt.session = None

    def _each(self, pool: ThreadPoolExecutor, attempts: Sequence[Attempt], act: Callable[[Attempt], None]) -> None:
        """In threads; what fails under one rollout stays there, everything else is raised when all are done."""
        done = [pool.submit(self._guarded, act, attempt) for attempt in attempts]
        errors = [error for future in done if (error := future.exception()) is not None]
        tick("tools")
        if errors:
            raise errors[0]

    def _guarded(self, act: Callable[[Attempt], None], attempt: Attempt) -> None:
        try:
            act(attempt)
        except ToolFailedError as error:
            attempt.failure = error.reason
            self.environment.failed(error)

    def _open(self, attempt: Attempt) -> None:
        order = attempt.order
        seed = derive_seed(self.seed, "tools", order.purpose, order.step, order.task.id)
        attempt.session = self.environment.open(order.task, attempt.name, seed)

    def _show_openings(self, attempts: Sequence[Attempt]) -> None:
        """What the world shows goes into the prompt, once per group: siblings answer the same question."""
        shown: dict[str, str | None] = {}
        encoded: dict[str, tuple[int, ...]] = {}
        for attempt in attempts:
            if attempt.session is None:
                continue
            group, opening = attempt.order.group, attempt.session.opening
            if shown.setdefault(group, opening) != opening:
                raise ToolError(
                    f"siblings of {attempt.order.task.id} were shown different openings: {shown[group]!r}, {opening!r}",
                    "an advantage compares answers to the same question",
                    "let reset depend on its arguments and the seed alone",
                )
            if opening:
                if group not in encoded:
                    shown_tools = self.environment.shown(attempt.order.task)
                    encoded[group] = self.codec.encode_prompt(
                        _with_initial_observation(attempt.order, opening), shown_tools
                    )
                attempt.prompt_ids = encoded[group]

    def _speak(self, attempts: Sequence[Attempt], engine: Engine, listener: TurnBuilder) -> None:
        asked: list[tuple[Attempt, Request]] = []
        for attempt in attempts:
            if attempt.session is not None and attempt.session.expired:
                attempt.failure = DEADLINE  # those who are done, or have time, go on without it
                continue
            request = attempt.request(self.seed, self.codec.stop_ids)
            if request is None:
                attempt.ended = CONTEXT
                attempt.failure = None if attempt.turns else "no_room"
            else:
                asked.append((attempt, request))
        completions = engine.generate([request for _, request in asked]) if asked else []
        check_completions([request for _, request in asked], completions)
        for (attempt, request), completion in zip(asked, completions, strict=True):
            turn, attempt.failure = listener.hear(request, completion)
            if turn is not None:
                attempt.turns.append(turn)
                attempt.ended = LENGTH if turn.finish_reason == LENGTH else ""

    def _answer(self, attempt: Attempt) -> None:
        assert attempt.session is not None, "an attempt without tools has failed before it spoke"
        turn = attempt.turns[-1]
        reply = attempt.session.answer(turn.text)
        if reply.calls:
            attempt.turns[-1] = replace(turn, calls=reply.calls)
        if reply.ended is not None:
            attempt.ended = reply.ended
            return
        said = self.codec.encode_replies([call.answer for call in reply.calls])
        attempt.prompt_ids = (*turn.prompt_ids, *turn.completion_ids, *said)

    def _ask_reward(self, attempt: Attempt) -> None:
        assert attempt.session is not None, "an attempt without tools has failed before it spoke"
        attempt.own_reward = attempt.session.reward()
        if attempt.own_reward is not None and not math.isfinite(attempt.own_reward):
            attempt.failure = NOT_FINITE


def _with_initial_observation(order: RolloutRequest, opening: str) -> list[Message]:
    """The task's messages, the world's words behind the last of them."""
    *others, last = order.task.messages()
    return [*others, {**last, "content": f"{last['content']}{opening}"}]


def _close_tools(attempt: Attempt) -> None:
    assert attempt.session is not None, "only those that were opened are closed"
    attempt.session.close()


# -- Plays one group per task: ask the engine, with tools or without, grade, and keep every fact on the record


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
    ) -> list[RolloutResult]:  # fmt: skip
        """One scored group per task, in order; `positions` in the step, from 0 on when left out."""
        places = range(len(tasks)) if positions is None else positions
        orders = [self.order(task, sampling, purpose, step, p) for p, task in zip(places, tasks, strict=True)]
        return self.run_rollouts(orders, finished)

    def order(self, task: Task, sampling: Sampling, purpose: str, step: int, position: int) -> RolloutRequest:
        """What has to be known to play one group, here or elsewhere."""
        if task.id not in self.prompts:
            raise TaskError(f"task {task.id} was never encoded", "prompts become tokens once", "add it to the task set")
        return RolloutRequest(task, self.prompts[task.id], sampling, purpose, step, position)

    def run_rollouts(
        self, orders: Sequence[RolloutRequest], finished: GroupFinished | None = None
    ) -> list[RolloutResult]:
        """One scored group per order, in order."""
        if isinstance(self.environment, ToolEnvironment):
            return self._play_with_tools(self.environment, orders, finished)
        rollouts = iter(self._rollouts(orders))
        return self._grade([(o, [next(rollouts) for _ in range(o.sampling.num_generations)]) for o in orders], finished)

    def _play_with_tools(
        self, environment: ToolEnvironment, orders: Sequence[RolloutRequest], finished: GroupFinished | None
    ) -> list[RolloutResult]:
        """Groups end at different times: they are graded beside the others' turns, those that wait together."""
        played: dict[int, RolloutResult] = {}

        def grade(over: Sequence[tuple[int, list[Rollout]]]) -> None:
            found = self._grade([(orders[number], rollouts) for number, rollouts in over], finished)
            played.update({number: one for (number, _), one in zip(over, found, strict=True)})

        grading = BackgroundThread(grade, "surefoot-grading")
        rounds = ToolRollouts(environment, self.codec, seed=self.seed, threads=self.tool_threads)
        try:
            rounds.play(
                orders, self.engine, TurnBuilder(self.codec, self.token_count), lambda n, r: grading.put((n, r))
            )
            grading.close()
        except BaseException:
            grading.abandon()
            raise
        return [played[number] for number in range(len(orders))]

    def _grade(
        self, groups: Sequence[tuple[RolloutRequest, list[Rollout]]], finished: GroupFinished | None
    ) -> list[RolloutResult]:
        rollouts = [rollout for _, siblings in groups for rollout in siblings]
        owners = [order for order, siblings in groups for _ in siblings]
        tasks = [order.task for order in owners]
        if finished is None:
            grades = self.environment.grade(tasks, rollouts)
        else:
            tell = finished

            def each(places: Sequence[int], graded: Sequence[Grade]) -> None:
                order = owners[places[0]]
                tell(order.position, _result(order, [rollouts[place] for place in places], graded).group)

            grades = self.environment.grade(tasks, rollouts, each)
        graded = [grade for _, grade in zip(rollouts, grades, strict=True)]
        ends = list(accumulate(len(siblings) for _, siblings in groups))
        return [_result(order, s, graded[end - len(s) : end]) for (order, s), end in zip(groups, ends, strict=True)]

    def _rollouts(self, orders: Sequence[RolloutRequest]) -> list[Rollout]:
        listener = TurnBuilder(self.codec, self.token_count)
        asked = [(o, i, r) for o in orders for i, r in enumerate(o.requests(self.seed, self.codec.stop_ids))]
        requests = [request for _, _, request in asked]
        started = time.monotonic()
        completions = self.engine.generate(requests)
        seconds = time.monotonic() - started
        check_completions(requests, completions)
        rollouts = []
        for (order, index, request), completion in zip(asked, completions, strict=True):
            turn, failure = listener.hear(request, completion)
            turns = (turn,) if turn else ()
            rollouts.append(Rollout(order.task.id, order.group, index, turns, failure=failure, seconds=seconds))
        return rollouts


def _result(order: RolloutRequest, siblings: Sequence[Rollout], grades: Sequence[Grade]) -> RolloutResult:
    graded = tuple(_with_grade(rollout, grade) for rollout, grade in zip(siblings, grades, strict=True))
    return RolloutResult(Group(order.task, order.group, graded), tuple(grade.correct for grade in grades))


def _with_grade(rollout: Rollout, grade: Grade) -> Rollout:
    if rollout.failure is not None:  # failed before grading: nobody's verdict can change that
        return rollout
    return rollout.graded(grade.reward, grade.parts, grade.failure, grade.seconds)
