"""An engine of the user's own, `engine.kind = "my_engine.py:MyEngine"`: made, and served to many callers.

Promises   every completion has the form that the run needs, or it is an `ExtensionError` with file and line; weights
           that change while they are served are copied; an engine that serves many callers itself is used as it is.
Never      checks whether the log-probabilities are true: every weight sync does, against the learner's own, as for all
           engines.

    submit --> one thread: [ gate, lock, generate, look at the answers ] --> future

Read next: docs/extending.md; `protocols.Engine`, what such a class has; `serving.py`, which decodes token by token.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from inspect import getattr_static
from typing import ClassVar

from surefoot.config.own_code import OwnCode, load_own
from surefoot.engines.serving import AskedElsewhere
from surefoot.errors import EngineError
from surefoot.maths.checksums import checksums
from surefoot.protocols import Completion, Engine, EngineInputs, InFlightPolicy, Request, ServingEngine, Weights
from surefoot.records import LENGTH, STOP

PLAIN = ("version", "generate", "load_weights", "close")
SERVING = ("submit", "pause", "resume", "in_flight", "pack_seconds", "prepare", "commit")
HIGHEST_LOGPROB = 1e-4
"""Above 0 by rounding alone."""


@dataclass(frozen=True)
class OwnEngineSpec:
    """What it takes to build it, in any process that sees the file."""

    inputs: EngineInputs
    shares_tensors: ClassVar[bool] = False
    """Nobody knows what it keeps: what it was handed is summed, and the probes ask what it serves."""

    @property
    def variables(self) -> tuple[str, ...]:
        """None but those that `pass_env` names."""
        return ()

    def build(self) -> ServingEngine:
        """In the process where it will run."""
        own = load_own("engine.kind", self.inputs.kind)
        own.expect_call("inputs")
        try:
            engine = own.thing(self.inputs)
        except Exception as error:
            raise own.raised(error, "when it was made") from error
        if missing := [name for name in PLAIN if not _has(engine, name)]:
            raise own.refused(
                f"it gave a {type(engine).__name__} without {', '.join(missing)}",
                "an engine is handed weights, says which version it serves, answers requests and is closed",
                f"write {missing[0]}; docs/extending.md has a whole engine",
            )
        if all(_has(engine, name) for name in SERVING):
            return engine  # type: ignore[no-any-return]
        return OneAtATime(engine, own, vocab=self.inputs.decoder.vocab, copy_weights=self.inputs.shares_weights)


def _has(engine: object, name: str) -> bool:
    """Without asking it: a property may refuse to answer before there are weights."""
    return getattr_static(engine, name, None) is not None


def spec(inputs: EngineInputs) -> OwnEngineSpec:
    """For `config.choices.OWN_ENGINE`."""
    return OwnEngineSpec(inputs)


class OneAtATime(AskedElsewhere):
    """`protocols.ServingEngine` on an engine that answers one list of requests after the other.

    Args:
        own: where its code stands.
        vocab: token ids lie below it.
        copy_weights: weights change while they are served.
    """

    pack_seconds = 0.0

    def __init__(self, engine: Engine, own: OwnCode, *, vocab: int, copy_weights: bool) -> None:
        self.engine, self.own, self.vocab, self.copy_weights = engine, own, vocab, copy_weights
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="surefoot-own-engine")
        self._lock, self._open, self._changed = threading.Lock(), threading.Event(), threading.Condition()
        self._open.set()
        self._asked = 0
        self._staged: tuple[Weights, int] | None = None

    @property
    def version(self) -> int:
        """Version of the weights in force, as the engine itself says."""
        return self.engine.version

    def submit(self, requests: Sequence[Request]) -> Future[list[Completion]]:
        """Ask from any thread; one list is answered after the other."""
        with self._changed:
            self._asked += len(requests)
        future = self._thread.submit(self._answer, tuple(requests))
        future.add_done_callback(lambda _: self._answered(len(requests)))
        return future

    def pause(self, in_flight: InFlightPolicy = "keep") -> None:
        """No token is drawn after this returns; what is being answered is finished, whatever the policy."""
        if in_flight == "wait":
            with self._changed:
                self._changed.wait_for(lambda: self._asked == 0)
        self._open.clear()
        with self._lock:
            pass

    def resume(self) -> None:
        """Go on."""
        self._open.set()

    def load_weights(self, weights: Weights, version: int) -> None:
        """Between two lists of requests."""
        served = {name: tensor.detach().clone() for name, tensor in weights.items()} if self.copy_weights else weights
        with self._lock:
            self._call(lambda: self.engine.load_weights(served, version), "when it was handed weights")

    def prepare(self, weights: Weights, version: int) -> Mapping[str, int]:
        """Keep a copy until `commit`; its checksums."""
        copied = {name: tensor.detach().clone() for name, tensor in weights.items()}
        self._staged = (copied, version)
        return checksums(copied)

    def commit(self, version: int) -> Mapping[str, int]:
        """Hand over what was staged; the engine cannot read its weights back."""
        if self._staged is None or self._staged[1] != version:
            raise EngineError(
                f"version {version} is to be served, and it was never staged", "nobody knows what would be served",
                "prepare it first",
            )  # fmt: skip
        with self._lock:
            self._call(lambda: self.engine.load_weights(*self._staged), "when it was handed weights")  # type: ignore[misc]
        self._staged = None
        return {}

    def close(self) -> None:
        """End the thread, then the engine."""
        self._open.set()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._call(self.engine.close, "when it was closed")

    def _answered(self, count: int) -> None:
        with self._changed:
            self._asked -= count
            self._changed.notify_all()

    def _answer(self, requests: tuple[Request, ...]) -> list[Completion]:
        while True:
            self._open.wait()
            with self._lock:
                if self._open.is_set():
                    given = self._call(lambda: self.engine.generate(requests), "when it was asked")
                    return self._looked_at(requests, given, self.engine.version)

    def _call(self, call: Callable[[], object], doing: str) -> object:
        try:
            return call()
        except Exception as error:
            raise self.own.raised(error, doing) from error

    def _looked_at(self, requests: Sequence[Request], given: object, version: int) -> list[Completion]:
        """The answers, if each has the form of one."""
        if not isinstance(given, list) or len(given) != len(requests):
            shown = f"{len(given)} answers" if isinstance(given, list) else f"a {type(given).__name__}"
            raise self.own.refused(
                f"generate gave {shown} for {len(requests)} requests", "answers belong to requests by their place",
                "return a list with one Completion for each request, in order",
            )  # fmt: skip
        for request, completion in zip(requests, given, strict=True):
            if wrong := self._wrong_with(request, completion, version):
                raise self.own.refused(
                    f"its answer to {request.id}: {wrong}", "it would be trained on as the policy's own words",
                    "see surefoot.protocols.Completion for what an answer holds",
                )  # fmt: skip
        return given

    def _wrong_with(self, request: Request, said: object, version: int) -> str:
        """What makes this no answer; empty when it is one."""
        if not isinstance(said, Completion):
            return f"a {type(said).__name__}, not a Completion"
        tokens: object = said.token_ids
        numbers: object = said.logprobs
        if not isinstance(tokens, tuple) or not isinstance(numbers, tuple):
            return "token_ids and logprobs are not tuples"
        stopped = said.finish_reason == STOP
        complaints = {
            f"it answers {said.request_id}": said.request_id != request.id,
            f"{len(tokens)} tokens, and 1 to {request.max_new_tokens} were asked for": not (
                1 <= len(tokens) <= request.max_new_tokens
            ),
            f"{len(tokens)} tokens with {len(numbers)} log-probabilities": len(tokens) != len(numbers),
            f"token ids outside 0..{self.vocab - 1}": not all(
                isinstance(token, int) and 0 <= token < self.vocab for token in tokens
            ),
            "a log-probability that is none": not all(
                isinstance(number, float) and math.isfinite(number) and number <= HIGHEST_LOGPROB for number in numbers
            ),
            f"finish_reason is {said.finish_reason!r}": said.finish_reason not in (STOP, LENGTH),
            "it goes on after a stop token": any(token in request.stop_ids for token in tokens[:-1]),
            "finish_reason and the last token disagree": bool(tokens) and stopped != (tokens[-1] in request.stop_ids),
            f"it bears version {said.version} to {said.version_end}, and {version} is served": (
                (said.version, said.version_end) != (version, version)
            ),
        }
        return next((words for words, is_so in complaints.items() if is_so), "")
