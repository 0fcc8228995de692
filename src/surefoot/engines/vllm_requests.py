"""Rollouts inside vLLM, token by token: who asked, what was drawn under which weights, what was no answer.

Owns       the requests inside one core, and the version in force.
Promises   every completion is stamped with the weights of its first and last token, and is checked before it leaves;
           an empty answer is asked for again, a fixed number of times, then raised; a core that died stays dead, and
           says why to everybody.
Never      samples, or knows about threads.

    enter --> core --advance, advance, ...--> finished, by ticket
                ^          |
                +-- empty -+

Read next: `serving.py`, who drives this for many callers; `vllm_engine.py`, who draws.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from surefoot.engines.serving import ServedVersion
from surefoot.engines.vllm_worker import EMBEDDING, TIED_HEAD
from surefoot.errors import EngineError, NumericsError, SurefootError
from surefoot.maths.checksums import checksum
from surefoot.protocols import Completion, Request, Weights
from surefoot.records import LENGTH, STOP
from surefoot.system.signals import tick

MAX_TRIES = 3
"""How often one request is asked before an answer that is none becomes an error."""


@dataclass(frozen=True, slots=True)
class VllmOutput:
    """What one step gave one request.

    Example:
        Drawn("17", (4, 2), (-0.3, -0.1), "stop")
    """

    key: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finished: str | None
    """The core's own reason, when this was the last of it."""


class Core(Protocol):
    """The vLLM underneath; `vllm_engine.VllmCore`, or a stand-in."""

    def add(self, key: str, request: Request) -> None:
        """Queue one request."""

    def abort(self, keys: Sequence[str]) -> None:
        """Forget requests."""

    def step(self) -> list[VllmOutput]:
        """Advance everything that runs by one step."""

    def check(self, weights: Weights) -> None:
        """Refuse weights that do not fill the model; changes nothing."""

    def load(self, weights: Weights) -> None:
        """Put weights in force and drop every cache of the old ones."""

    def read_back(self) -> Mapping[str, Tensor]:
        """What is in force, by Hugging Face name."""

    def log_tail(self, lines: int = 50) -> str:
        """The newest lines of the core's log."""

    def close(self) -> None:
        """Free everything."""


@dataclass(slots=True)
class _RequestState:
    """One request on its way."""

    request: Request
    ticket: int
    tries: int = 1
    version: int = -1
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class VllmRequests(ServedVersion):
    """What `serving.EngineLoop` drives: enter, advance, leave.

    Args:
        core: the vLLM underneath.
        check: refuses a request that vLLM would not answer as asked.
    """

    def __init__(self, core: Core, check: Callable[[Request], None]) -> None:
        self.core, self._check = core, check
        self._rows: dict[str, _RequestState] = {}
        self._tickets = itertools.count()
        self._keys = itertools.count()
        self._dead: EngineError | None = None

    @property
    def pack_seconds(self) -> float:
        """vLLM lays its weights out while it loads them."""
        return 0.0

    @property
    def busy(self) -> bool:
        """Whether anybody waits or runs."""
        return bool(self._rows)

    def enter(self, requests: Sequence[Request]) -> list[int]:
        """Take these in; one ticket each. If one of them is refused, none enters."""
        self._refuse_the_dead()
        self.version  # noqa: B018  an answer from made-up weights would look like any other
        for request in requests:
            self._check(request)
        rows = [_RequestState(request, next(self._tickets)) for request in requests]
        for row in rows:
            self._add(row)
        return [row.ticket for row in rows]

    def advance(self) -> dict[int, Completion]:
        """One step for everybody; those who finished, by ticket."""
        self._refuse_the_dead()
        version = self.version
        try:
            drawn = self.core.step()
        except Exception as error:
            raise self._die(error) from error
        done: dict[int, Completion] = {}
        for piece in drawn:
            row = self._rows.get(piece.key)
            if row is not None:  # None: it has left
                self._take(row, piece, version, done)
        tick("generating")
        return done

    def leave(self, tickets: Collection[int] | None = None) -> None:
        """Forget these rollouts, or all; nothing of them is said any more."""
        gone = [key for key, row in self._rows.items() if tickets is None or row.ticket in tickets]
        for key in gone:
            del self._rows[key]
        if self._dead is None:
            self.core.abort(gone)

    def load_weights(self, weights: Weights, version: int) -> None:
        """Serve these weights from the next token on."""
        self.put_in_force(weights, self.staged(weights), version)

    def staged(self, weights: Weights) -> dict[str, int]:
        """Checksums of weights that fit this model; what does not fit is refused. Changes nothing."""
        self._refuse_the_dead()
        self.core.check(weights)
        return {name: checksum(value.detach()) for name, value in weights.items()}

    def put_in_force(self, weights: Weights, sums: Mapping[str, int], version: int) -> dict[str, int]:
        """Load, read back, compare; the version counts only if all is there."""
        self._refuse_the_dead()
        self._version = None  # a load that fails half-way leaves no version to claim
        try:
            self.core.load(weights)
        except SurefootError:
            raise
        except Exception as error:
            raise self._die(error) from error
        found = self.read_back()
        wanted = dict(sums)
        if TIED_HEAD in found and EMBEDDING in sums:
            wanted.setdefault(TIED_HEAD, sums[EMBEDDING])  # a tied head is the embedding, also where the head looks
        wrong = sorted(name for name, value in wanted.items() if found.get(name) != value)
        if wrong:
            raise EngineError(
                f"{len(wrong)} of {len(wanted)} tensors of version {version} are not in vLLM's memory, first "
                f"{wrong[0]}",
                "it would answer with other weights than it was handed",
                "use the vLLM version that constraints-vllm.txt names",
            )
        self._version = version
        return {name: found[name] for name in sums}

    def read_back(self) -> dict[str, int]:
        """Checksums of what is in force, by Hugging Face name."""
        return {name: checksum(value) for name, value in self.core.read_back().items()}

    def lose_weights(self) -> None:
        """Say that there are none any more."""
        self._version = None

    def close(self) -> None:
        """Free everything."""
        self._rows.clear()
        self._version = None
        if self._dead is None:
            self._dead = EngineError("the engine is closed", "nobody answers there any more", "create another one")
            self.core.close()

    # -- one request ----------------------------------------------------------------------

    def _add(self, row: _RequestState) -> None:
        key = str(next(self._keys))
        self._rows[key] = row
        try:
            self.core.add(key, row.request)
        except Exception as error:
            raise self._die(error) from error

    def _take(self, row: _RequestState, piece: VllmOutput, version: int, done: dict[int, Completion]) -> None:
        """What a step gave one request, checked."""
        if not row.tokens:
            row.version = version
        row.tokens.extend(piece.token_ids)
        row.logprobs.extend(piece.logprobs)
        _check_piece(row, piece, version)
        if piece.finished is None:
            return
        del self._rows[piece.key]
        reason = _finish_reason(row)
        if reason is None:
            self._ask_again(row, piece)
            return
        done[row.ticket] = Completion(
            row.request.id, tuple(row.tokens), tuple(row.logprobs), reason, row.version, version
        )

    def _ask_again(self, row: _RequestState, piece: VllmOutput) -> None:
        """vLLM gave up on a request that nobody took back."""
        if row.tries >= MAX_TRIES:
            raise EngineError(
                f"request {row.request.id}: vLLM ended it {row.tries} times with {len(row.tokens)} tokens and "
                f"{piece.finished!r}",
                f"its last words:\n{self.core.log_tail(20)}",
                "see its log above; a smaller engine.rows leaves more room for each",
            )
        row.tries += 1
        row.tokens.clear()
        row.logprobs.clear()
        self._add(row)

    # -- the end --------------------------------------------------------------------------

    def _refuse_the_dead(self) -> None:
        if self._dead is not None:
            raise EngineError(*self._dead.args)

    def _die(self, error: Exception) -> EngineError:
        """An exception out of vLLM leaves it in a state nobody knows; it is not asked again."""
        self._dead = EngineError(
            f"vLLM died: {type(error).__name__}: {' '.join(str(error).split())[:300]}",
            f"its last words:\n{self.core.log_tail()}",
            "the engine has to be created again",
        )
        self._version = None
        self._rows.clear()
        self.core.close()
        return self._dead


def _check_piece(row: _RequestState, piece: VllmOutput, version: int) -> None:
    request = row.request
    if len(piece.logprobs) != len(piece.token_ids):
        raise EngineError(
            f"request {request.id}: {len(piece.token_ids)} tokens came with {len(piece.logprobs)} logprobs",
            "a token whose probability is unknown cannot be trained on",
            "use the vLLM version that constraints-vllm.txt names",
        )
    if not all(map(math.isfinite, piece.logprobs)):
        raise NumericsError(
            f"request {request.id}: the model's logits are not finite at version {version}",
            "a token drawn from them means nothing",
            "lower learning_rate; evaluate the last checkpoint that worked",
        )
    if len(row.tokens) > request.max_new_tokens or any(token in request.stop_ids for token in row.tokens[:-1]):
        raise EngineError(
            f"request {request.id}: vLLM went on after the end ({len(row.tokens)} of {request.max_new_tokens} tokens)",
            "what follows an end token is nobody's answer",
            "use the vLLM version that constraints-vllm.txt names",
        )


def _finish_reason(row: _RequestState) -> str | None:
    """Ours, from the tokens themselves; None when they are no whole answer."""
    if row.tokens and row.tokens[-1] in row.request.stop_ids:
        return STOP
    return LENGTH if len(row.tokens) == row.request.max_new_tokens else None
