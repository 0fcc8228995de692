"""Plays groups with tools: everybody speaks, tools answer, everybody who is not done speaks again.

Owns       the way of one rollout through its turns, and the threads in which tools are waited for.
Promises   history only grows: a turn's tokens are those of the turn before, what was sampled, and what the tools said;
           a tool's failure ends its own rollout under one reason and no other; a rollout that has ended keeps its
           turns; a group whose last rollout has ended is handed on while others still play; tools are let go on every
           way out, an engine's failure included, which is nobody's words.
Never      grades, or asks a tool twice for one call.

Read next: `rollout.py`, which grades what comes out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from surefoot.envs.tools import DEADLINE, ToolEnvironment, ToolSession
from surefoot.errors import ToolError, ToolFailedError
from surefoot.protocols import Codec, Engine, Request
from surefoot.pulse import beat
from surefoot.records import LENGTH, Message, Rollout, Turn
from surefoot.runtime.answers import Listener, check_answers
from surefoot.runtime.orders import Order
from surefoot.runtime.seeds import derive_seed

CONTEXT = "context"
NOT_FINITE = "own_reward_not_finite"
"""Failure reason: the rollout's own world gave a reward that is no number."""


Ended = Callable[[int, list[Rollout]], None]
"""(number of the order, its rollouts): this group will not speak again."""


@dataclass(eq=False)
class Attempt:
    """One rollout under way."""

    order: Order
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


class ToolRounds:
    """Plays many rollouts in step with each other.

    Args:
        threads: tools that are waited for at once.
    """

    def __init__(self, environment: ToolEnvironment, codec: Codec, *, seed: int, threads: int = 32) -> None:
        self.environment, self.codec, self.seed, self.threads = environment, codec, seed, threads

    def play(self, orders: Sequence[Order], engine: Engine, listener: Listener, ended: Ended) -> None:
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
            self._each(pool, [a for a in attempts if a.session is not None], _let_go)
            pool.shutdown(wait=True)

    def _end(self, pool: ThreadPoolExecutor, attempts: Sequence[Attempt]) -> None:
        """Nobody of these speaks again: their worlds are asked for a reward, then let go."""
        if attempts:
            self._each(pool, [a for a in attempts if a.failure is None], self._ask_reward)
            self._each(pool, [a for a in attempts if a.session is not None], _let_go)
            for attempt in attempts:
                attempt.session = None

    def _each(self, pool: ThreadPoolExecutor, attempts: Sequence[Attempt], act: Callable[[Attempt], None]) -> None:
        """In threads; what fails under one rollout stays there, everything else is raised when all are done."""
        done = [pool.submit(self._guarded, act, attempt) for attempt in attempts]
        errors = [error for future in done if (error := future.exception()) is not None]
        beat("tools")
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
                    encoded[group] = self.codec.encode_prompt(_with_opening(attempt.order, opening), shown_tools)
                attempt.prompt_ids = encoded[group]

    def _speak(self, attempts: Sequence[Attempt], engine: Engine, listener: Listener) -> None:
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
        check_answers([request for _, request in asked], completions)
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


def _with_opening(order: Order, opening: str) -> list[Message]:
    """The task's messages, the world's words behind the last of them."""
    *others, last = order.task.messages()
    return [*others, {**last, "content": f"{last['content']}{opening}"}]


def _let_go(attempt: Attempt) -> None:
    assert attempt.session is not None, "only those that were opened are closed"
    attempt.session.close()
