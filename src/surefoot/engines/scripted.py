"""The public test double: an engine that says what it is told.

Use it to test environments, rewards and loops without a model:

    >>> from surefoot.engines.scripted import ScriptedEngine
    >>> from surefoot.protocols import Request
    >>> engine = ScriptedEngine(lambda request: [7, 8, 2])
    >>> ask = Request("a", (1, 5), max_new_tokens=4, temperature=1.0, stop_ids=frozenset({2}), seed=0)
    >>> engine.generate([ask])[0].finish_reason
    'stop'
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from surefoot.errors import EngineError
from surefoot.protocols import Completion, Request, Weights
from surefoot.records import LENGTH, STOP

Script = Callable[[Request], Sequence[int]]
"""What to say: completion token ids for a request."""


class ScriptedEngine:
    """Deterministic, without weights; records every request and every weight load.

    Args:
        script: called once per request.
        logprob: what every token claims to have been sampled with.
        on_generate: called before each `generate`, for tests that change the version mid-way.
    """

    def __init__(
        self, script: Script, *, logprob: float = -1.0, on_generate: Callable[[ScriptedEngine], None] | None = None
    ) -> None:
        self.script, self.logprob, self.on_generate = script, logprob, on_generate
        self.requests: list[Request] = []
        self.loaded_versions: list[int] = []
        self.current_version = 0
        self.pack_seconds = 0.0

    @property
    def version(self) -> int:
        """The last version it was handed."""
        return self.current_version

    def load_weights(self, weights: Weights, version: int) -> None:
        """Remember the version."""
        del weights
        self.loaded_versions.append(version)
        self.current_version = version

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Say what the script says; the version is read before anything is said."""
        started = self.version
        if self.on_generate is not None:
            self.on_generate(self)
        self.requests.extend(requests)
        return [self._complete(request, started) for request in requests]

    def submit(self, requests: Sequence[Request]) -> Future[list[Completion]]:
        """Answered when this returns, in the caller's own thread."""
        answers: Future[list[Completion]] = Future()
        try:
            answers.set_result(self.generate(requests))
        except Exception as error:  # noqa: BLE001 - it is raised where the answer is taken
            answers.set_exception(error)
        return answers

    def _complete(self, request: Request, started: int) -> Completion:
        tokens = tuple(self.script(request))
        if not tokens or len(tokens) > request.max_new_tokens:
            raise EngineError(
                f"the script said {len(tokens)} tokens for request {request.id}; the limit is {request.max_new_tokens}",
                "a real engine stops at the limit",
                "shorten the script",
            )
        reason = STOP if tokens[-1] in request.stop_ids else LENGTH
        return Completion(request.id, tokens, (self.logprob,) * len(tokens), reason, started, self.version)

    def close(self) -> None:
        """Nothing to free."""
