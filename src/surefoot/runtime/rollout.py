"""Runs one group of rollouts per task: ask the engine, with tools or without, grade, and keep every fact on the record.

Owns       the way from a task to a scored group.
Promises   every rollout has its own seed, a function of (run seed, purpose, step, task, sibling);
           versions are the engine's own at the first token; what fails carries a reason and
           never a reward; a failure costs its own rollout and nobody else's; a slow tool holds its own rollout alone; a
           group is told of as soon as it is graded, and graders work while rollouts of other groups go on.
Never      compares siblings, filters, or trains.

Read next: `learner/samples.py`, which turns groups into samples.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate
from queue import Empty, SimpleQueue
from typing import Any

from surefoot.errors import EngineError, ToolError, ToolFailedError
from surefoot.guards.invariants import are_logprobs
from surefoot.protocols import Codec, Completion, Environment, Grade, GroupFinished, Request
from surefoot.records import LENGTH, Group, Message, Rollout, Task, Turn
from surefoot.runtime.requests import (
    CompletionSource,
    RolloutRequest,
    RolloutResult,
    Sampling,
    derive_seed,
    request_for,
)
from surefoot.runtime.threads import BackgroundThread
from surefoot.system.signals import tick
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

    def completion_to_turn(self, request: Request, completion: Completion) -> tuple[Turn | None, str | None]:
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


# -- Rollouts with tools, each at its own pace ----------------------------------------------------
# Owns       the way of one rollout through its turns, and the threads in which tools are waited for.
# Promises   rollouts wait for nothing but their own engine and their own tools: a slow call holds one rollout; history
# only grows: a turn's tokens are those of the turn before, what was sampled, and what the tools said; a tool's failure
# ends its own rollout under one reason and no other; a rollout that has ended keeps its turns and lets go of its tools;
# a group whose last rollout has ended is handed on at once; tools are let go on every way out, an engine's failure
# included.
# Never      grades, or asks a tool twice for one call.
#
#     open --> completion (engine) --> tool calls (thread) --> completion --> ... --> reward, close (thread) --> group
#
# One thread, the caller's, moves every rollout on; completions and tool threads report to it through one queue.


CONTEXT = "context"
NOT_FINITE = "own_reward_not_finite"
"""Failure reason: the rollout's own world gave a reward that is no number."""
_LOOK_S = 0.2
"""Longest wait in one piece: a signal handler of the main thread gets to run between two of them."""


GroupEnded = Callable[[int, list[Rollout]], None]
"""(number of the request, its rollouts): no rollout of this group goes on."""


@dataclass(eq=False)
class Attempt:
    """One rollout under way."""

    group_request: RolloutRequest
    number: int
    """Which request of the call it belongs to."""
    index: int
    prompt_ids: tuple[int, ...]
    session: ToolSession | None = None
    turns: list[Turn] = field(default_factory=list)
    ended: str = ""
    failure: str | None = None
    own_reward: float | None = None
    asked: Future[list[Completion]] | None = None
    """The completion that it waits for."""
    began: float = field(default_factory=time.monotonic)
    over: float | None = None
    """When its last turn was over."""

    @property
    def name(self) -> str:
        """Unique in the run."""
        return f"{self.group_request.group}/{self.index}"

    @property
    def under_way(self) -> bool:
        """Whether it has a further turn."""
        return not self.ended and self.failure is None

    def request(self, seed: int, stop_ids: frozenset[int]) -> Request | None:
        """What is asked of the engine next; None when the context is full."""
        asked, turn = self.group_request, len(self.turns)
        sampling = asked.sampling
        room = min(sampling.max_completion_length, sampling.max_width - len(self.prompt_ids))
        if room < 1:
            return None
        later = (f"turn {turn}",) if turn else ()  # the first turn draws from the stream of a rollout without tools
        return Request(
            id=f"{self.name}/{turn}" if turn else self.name, prompt_ids=self.prompt_ids, max_new_tokens=room,
            temperature=sampling.temperature, stop_ids=stop_ids,
            seed=derive_seed(seed, asked.purpose, asked.step, asked.task.id, self.index, *later),
        )  # fmt: skip

    def rollout(self) -> Rollout:
        """As far as it came."""
        return Rollout(
            self.group_request.task.id, self.group_request.group, self.index, tuple(self.turns), failure=self.failure,
            ended=self.ended, own_reward=None if self.failure else self.own_reward,
            seconds=(time.monotonic() if self.over is None else self.over) - self.began,
        )  # fmt: skip


class ToolRollouts:
    """Runs the siblings of many requests, each at its own pace. Used once.

    Args:
        threads: tools that are waited for at once.
        ended: called once for each request, by its number, with its rollouts in order.
    """

    def __init__(
        self, requests: Sequence[RolloutRequest], environment: ToolEnvironment, codec: Codec, engine: CompletionSource,
        turns: TurnBuilder, ended: GroupEnded, *, seed: int, threads: int = 32,
    ) -> None:  # fmt: skip
        self.environment, self.codec, self.engine, self.turns = environment, codec, engine, turns
        self.ended, self.seed = ended, seed
        self.groups = {
            n: [Attempt(r, n, i, r.prompt_ids) for i in range(r.sampling.num_generations)]
            for n, r in enumerate(requests)
        }
        """By number of the request, those of which a rollout is under way."""
        self._attempts = [attempt for siblings in self.groups.values() for attempt in siblings]
        self._left = {n: len(siblings) for n, siblings in self.groups.items()}
        self._shown: dict[int, tuple[str | None, tuple[int, ...]]] = {}
        """By group: what its world showed before the first turn, and the prompt with it."""
        self._reports: SimpleQueue[tuple[Attempt, Future[Any], Callable[[Attempt, Any], None]]] = SimpleQueue()
        self._threads = max(1, min(threads, len(self._attempts)))
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="surefoot-tools")

    def run(self) -> None:
        """Every sibling of every request; failures carry their reason."""
        try:
            for attempt in self._attempts:
                self._in_thread(attempt, self._open, self._on_opened)
            while self.groups:
                for attempt, done, go_on in self._next_reports():
                    go_on(attempt, done.result())
        except Exception:
            self._abort(wait=True)
            raise
        except BaseException:  # asked to stop: whoever closes a world may cut short a call that runs
            self._abort(wait=False)
            raise
        self._pool.shutdown(wait=True)

    # -- what happened, in the caller's thread ------------------------------------------------

    def _next_reports(self) -> list[tuple[Attempt, Future[Any], Callable[[Attempt, Any], None]]]:
        """At least one; siblings side by side, so that an engine which computes a prompt once finds them together."""
        while True:
            with suppress(Empty):
                reports = [self._reports.get(timeout=_LOOK_S)]
                break
        with suppress(Empty):
            while True:
                reports.append(self._reports.get_nowait())
        return sorted(reports, key=lambda report: (report[0].number, report[0].index))

    def _on_opened(self, attempt: Attempt, _: None) -> None:
        tick("tools")
        if attempt.under_way:
            self._show_opening(attempt)
        self._go_on(attempt)

    def _on_answered(self, attempt: Attempt, _: None) -> None:
        tick("tools")
        self._go_on(attempt)

    def _on_finished(self, attempt: Attempt, _: None) -> None:
        tick("tools")
        self._count_out(attempt)

    def _go_on(self, attempt: Attempt) -> None:
        """Ask for the next completion, or end the rollout."""
        if attempt.under_way and attempt.session is not None and attempt.session.expired:
            attempt.failure = DEADLINE  # those who have time go on without it
        request = attempt.request(self.seed, self.codec.stop_ids) if attempt.under_way else None
        if request is not None:
            self._ask_engine(attempt, request)
            return
        if attempt.under_way:
            attempt.ended = CONTEXT
            attempt.failure = None if attempt.turns else "no_room"
        self._end(attempt)

    def _ask_engine(self, attempt: Attempt, request: Request) -> None:
        def on_completion(attempt: Attempt, completions: list[Completion]) -> None:
            attempt.asked = None
            check_completions([request], completions)
            turn, attempt.failure = self.turns.completion_to_turn(request, completions[0])
            if turn is not None:
                attempt.turns.append(turn)
                attempt.ended = LENGTH if turn.finish_reason == LENGTH else ""
            if attempt.under_way:
                self._in_thread(attempt, self._answer, self._on_answered)
            else:
                self._end(attempt)

        attempt.asked = self.engine.submit([request])
        attempt.asked.add_done_callback(lambda done: self._reports.put((attempt, done, on_completion)))

    def _end(self, attempt: Attempt) -> None:
        """It has no further turn: its world is asked for a reward, then let go."""
        attempt.over = time.monotonic()
        if attempt.session is None:
            self._count_out(attempt)
        else:
            self._in_thread(attempt, self._finish, self._on_finished)

    def _count_out(self, attempt: Attempt) -> None:
        """The last of its group hands the group on."""
        self._left[attempt.number] -= 1
        if not self._left[attempt.number]:
            self.ended(attempt.number, [sibling.rollout() for sibling in self.groups.pop(attempt.number)])

    def _show_opening(self, attempt: Attempt) -> None:
        """What the world shows goes into the prompt, encoded once per group: siblings answer the same question."""
        assert attempt.session is not None, "an attempt without tools has failed before it spoke"
        group_request, opening = attempt.group_request, attempt.session.opening
        if attempt.number not in self._shown:
            messages = _with_initial_observation(group_request, opening) if opening else None
            shown_tools = self.environment.shown(group_request.task)
            prompt = self.codec.encode_prompt(messages, shown_tools) if messages else attempt.prompt_ids
            self._shown[attempt.number] = opening, prompt
        first, attempt.prompt_ids = self._shown[attempt.number]
        if first != opening:
            raise ToolError(
                f"siblings of {group_request.task.id} were shown different openings: {first!r}, {opening!r}",
                "an advantage compares answers to the same question",
                "let reset depend on its arguments and the seed alone",
            )

    # -- what waits for tools, in a thread of the pool ----------------------------------------

    def _in_thread(
        self, attempt: Attempt, act: Callable[[Attempt], None], then: Callable[[Attempt, Any], None]
    ) -> None:
        job = self._pool.submit(self._guarded, act, attempt)
        job.add_done_callback(lambda done: self._reports.put((attempt, done, then)))

    def _guarded(self, act: Callable[[Attempt], None], attempt: Attempt) -> None:
        try:
            act(attempt)
        except ToolFailedError as error:
            attempt.failure = error.reason
            self.environment.failed(error)

    def _open(self, attempt: Attempt) -> None:
        group_request = attempt.group_request
        seed = derive_seed(self.seed, "tools", group_request.purpose, group_request.step, group_request.task.id)
        attempt.session = self.environment.open(group_request.task, attempt.name, seed)

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

    def _finish(self, attempt: Attempt) -> None:
        assert attempt.session is not None, "an attempt without tools has nothing to let go of"
        try:
            if attempt.failure is None:
                attempt.own_reward = attempt.session.reward()
                if attempt.own_reward is not None and not math.isfinite(attempt.own_reward):
                    attempt.failure = NOT_FINITE
        finally:
            _close_tools(attempt)

    # -- the ways out that are not the regular one --------------------------------------------

    def _abort(self, *, wait: bool) -> None:
        """Withdraw what was asked of the engine, begin no further call, let go of all tools.

        Args:
            wait: let calls that run come to their end before their tools are closed.
        """
        for attempt in self._attempts:
            if attempt.asked is not None:
                attempt.asked.cancel()
        self._pool.shutdown(wait=wait, cancel_futures=True)
        self._close_all()
        self._pool.shutdown(wait=True)
        self._close_all()  # of worlds that were about to open

    def _close_all(self) -> None:
        held = [attempt for attempt in self._attempts if attempt.session is not None]
        with ThreadPoolExecutor(self._threads, thread_name_prefix="surefoot-tools") as pool:
            list(pool.map(_close_tools, held))


def _with_initial_observation(group_request: RolloutRequest, opening: str) -> list[Message]:
    """The task's messages, the world's words behind the last of them."""
    *others, last = group_request.task.messages()
    return [*others, {**last, "content": f"{last['content']}{opening}"}]


def _close_tools(attempt: Attempt) -> None:
    session, attempt.session = attempt.session, None
    if session is not None:
        session.close()


# -- One group per task: ask the engine, with tools or without, grade, and keep every fact on the record


class RolloutCollector:
    """Asks engines for completions and grades rollouts.

    Args:
        environment: grades finished rollouts.
        tools: hands out the tools of rollouts, where they have any.
        prompts: token ids of every task's prompt, by task id; encoded once, before the run.
        token_count: ids from here on exist in the model but not in the tokenizer.
        tool_threads: tools that are waited for at once.
    """

    def __init__(
        self, engine: CompletionSource, environment: Environment, codec: Codec, prompts: Mapping[str, tuple[int, ...]],
        *, seed: int, token_count: int, tools: ToolEnvironment | None = None, tool_threads: int = 32,
    ) -> None:  # fmt: skip
        self.engine, self.environment, self.codec = engine, environment, codec
        self.prompts, self.seed, self.token_count = prompts, seed, token_count
        self.tools, self.tool_threads = tools, tool_threads

    def run_rollouts(
        self, tasks: Sequence[Task], sampling: Sampling, *, purpose: str, step: int,
        positions: Sequence[int] | None = None, finished: GroupFinished | None = None,
    ) -> list[RolloutResult]:  # fmt: skip
        """One scored group per task, in order; `positions` in the step, from 0 on when left out."""
        places = range(len(tasks)) if positions is None else positions
        group_requests = [
            request_for(task, self.prompts, sampling, purpose=purpose, step=step, position=place)
            for place, task in zip(places, tasks, strict=True)
        ]
        return self.run_requests(group_requests, finished)

    def run_requests(
        self, group_requests: Sequence[RolloutRequest], finished: GroupFinished | None = None
    ) -> list[RolloutResult]:
        """One scored group per request, in order."""
        if self.tools is not None:
            return self._run_with_tools(self.tools, group_requests, finished)
        rollouts = iter(self._rollouts(group_requests))
        return self._grade(
            [(o, [next(rollouts) for _ in range(o.sampling.num_generations)]) for o in group_requests], finished
        )

    def _run_with_tools(
        self, tools: ToolEnvironment, group_requests: Sequence[RolloutRequest], finished: GroupFinished | None
    ) -> list[RolloutResult]:
        """Groups end at different times: they are graded beside the others' turns, those that wait together."""
        played: dict[int, RolloutResult] = {}

        def grade(over: Sequence[tuple[int, list[Rollout]]]) -> None:
            found = self._grade([(group_requests[number], rollouts) for number, rollouts in over], finished)
            played.update({number: one for (number, _), one in zip(over, found, strict=True)})

        grading = BackgroundThread(grade, "surefoot-grading")
        try:
            ToolRollouts(
                group_requests, tools, self.codec, self.engine, TurnBuilder(self.codec, self.token_count),
                lambda number, rollouts: grading.put((number, rollouts)), seed=self.seed, threads=self.tool_threads,
            ).run()  # fmt: skip
            grading.close()
        except BaseException:
            grading.abandon()
            raise
        return [played[number] for number in range(len(group_requests))]

    def _grade(
        self, groups: Sequence[tuple[RolloutRequest, list[Rollout]]], finished: GroupFinished | None
    ) -> list[RolloutResult]:
        rollouts = [rollout for _, siblings in groups for rollout in siblings]
        owners = [group_request for group_request, siblings in groups for _ in siblings]
        tasks = [group_request.task for group_request in owners]
        if finished is None:
            grades = self.environment.grade(tasks, rollouts)
        else:
            tell = finished

            def each(places: Sequence[int], graded: Sequence[Grade]) -> None:
                group_request = owners[places[0]]
                tell(
                    group_request.position, _result(group_request, [rollouts[place] for place in places], graded).group
                )

            grades = self.environment.grade(tasks, rollouts, each)
        graded = [grade for _, grade in zip(rollouts, grades, strict=True)]
        ends = list(accumulate(len(siblings) for _, siblings in groups))
        return [
            _result(group_request, s, graded[end - len(s) : end])
            for (group_request, s), end in zip(groups, ends, strict=True)
        ]

    def _rollouts(self, group_requests: Sequence[RolloutRequest]) -> list[Rollout]:
        listener = TurnBuilder(self.codec, self.token_count)
        asked = [(o, i, r) for o in group_requests for i, r in enumerate(o.requests(self.seed, self.codec.stop_ids))]
        requests = [request for _, _, request in asked]
        started = time.monotonic()
        completions = self.engine.generate(requests)
        seconds = time.monotonic() - started
        check_completions(requests, completions)
        rollouts = []
        for (group_request, index, request), completion in zip(asked, completions, strict=True):
            turn, failure = listener.completion_to_turn(request, completion)
            turns = (turn,) if turn else ()
            rollouts.append(
                Rollout(group_request.task.id, group_request.group, index, turns, failure=failure, seconds=seconds)
            )
        return rollouts


def _result(group_request: RolloutRequest, siblings: Sequence[Rollout], grades: Sequence[Grade]) -> RolloutResult:
    graded = tuple(_with_grade(rollout, grade) for rollout, grade in zip(siblings, grades, strict=True))
    return RolloutResult(
        Group(group_request.task, group_request.group, graded), tuple(grade.correct for grade in grades)
    )


def _with_grade(rollout: Rollout, grade: Grade) -> Rollout:
    if rollout.failure is not None:  # failed before grading: nobody's verdict can change that
        return rollout
    return rollout.graded(grade.reward, grade.parts, grade.failure, grade.seconds)
