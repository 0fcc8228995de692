"""Many callers on one engine: one thread decodes, everybody else leaves a note.

Owns       the thread that owns the engine, and who waits for which rollout.
Promises   requests enter rows as these come free, from any thread, at any time; what a rollout says depends on its
           prompt, seed and weights alone, bit for bit what `EmbeddedEngine.generate` says: the thread has as many torch
           threads as the one that made it; weights change between two tokens; an exception reaches exactly those whose
           rollouts it ended; a cancelled future frees its rows; after `close` there is no thread and nobody waits.
Never      lets two threads touch the engine, or hands it weights that somebody else is changing.

    submit --> note --> [ the thread: notes, advance, notes, advance ... ] --> future
    pause, resume, load_weights, close: notes too, read between two tokens

Read next: `embedded.py`, which this drives with `enter`, `advance` and `leave`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from surefoot.errors import ConfigError, EngineError
from surefoot.maths.checksums import checksums
from surefoot.protocols import Completion, InFlightPolicy, Request, Weights

T = TypeVar("T")


class ServedVersion:
    """The version in force of an engine that begins without weights."""

    _version: int | None = None

    @property
    def version(self) -> int:
        """Version of the weights in force."""
        if self._version is None:
            raise EngineError("the engine has no weights yet", "it never loads a model", "call load_weights first")
        return self._version


class AskedElsewhere(ABC):
    """An engine whose answers are made elsewhere: it counts what it asked for."""

    _asked = 0

    @abstractmethod
    def submit(self, requests: Sequence[Request]) -> Future[list[Completion]]:
        """Ask from any thread."""

    @property
    def in_flight(self) -> int:
        """Completions that were asked for and are not finished."""
        return self._asked

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer every request, in order."""
        return self.submit(requests).result()


class SteppingEngine(Protocol):
    """What the thread drives: `EmbeddedEngine` is one. Called from that thread alone."""

    @property
    def version(self) -> int:
        """Version of the weights in force."""

    @property
    def pack_seconds(self) -> float:
        """What laying out the weights in force for decoding has cost."""

    def enter(self, requests: Sequence[Request]) -> list[int]:
        """Take these in; one ticket each, or an exception and none of them is in."""

    def advance(self) -> dict[int, Completion]:
        """One token for everybody; those who finished, by ticket."""

    def leave(self, tickets: Collection[int] | None = None) -> None:
        """Forget these rollouts, or all."""

    def load_weights(self, weights: Weights, version: int) -> None:
        """Serve these weights from the next token on."""

    def close(self) -> None:
        """Free everything."""


@dataclass(eq=False)
class _Submission:
    """One `submit`: what was asked, and what has come of it so far."""

    requests: tuple[Request, ...]
    future: Future[list[Completion]]
    slots: dict[int, int] = field(default_factory=dict)
    """Which request has which ticket; empty while it is not in the engine."""
    done: dict[int, Completion] = field(default_factory=dict)
    """By position among the requests."""

    @property
    def left(self) -> int:
        return len(self.requests) - len(self.done)


class EngineLoop:
    """`protocols.ServingEngine` on an engine that one thread drives, such as `EmbeddedEngine`.

    Args:
        copy_weights: take a copy of weights before they are served; needed whenever their owner trains on meanwhile.

    Example:
        >>> from surefoot.protocols import Request
        >>> loop = EngineLoop(engine)  # doctest: +SKIP
        >>> loop.submit([Request("a", (1, 2), 8, 1.0, frozenset({0}), seed=1)]).result()  # doctest: +SKIP
    """

    def __init__(self, engine: SteppingEngine, *, copy_weights: bool = True, name: str = "engine") -> None:
        self.engine, self.copy_weights = engine, copy_weights
        self._changed = threading.Condition()
        self._notes: deque[Callable[[], None]] = deque()
        self._waiting: deque[_Submission] = deque()
        self._inside: dict[int, _Submission] = {}
        """By ticket, everybody who has a place in the engine."""
        self._paused, self._closing = False, False
        self._emptied: list[Future[None]] = []
        """Those who wait until nothing is in flight."""
        self._end: BaseException | None = None
        self._prepared: tuple[Weights, int] | None = None
        self._torch_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name=f"surefoot-{name}", daemon=True)
        self._thread.start()

    # -- asked from any thread ----------------------------------------------------------

    @property
    def version(self) -> int:
        """Version of the weights in force."""
        version: int = self.between_tokens(lambda engine: engine.version)
        return version

    @property
    def pack_seconds(self) -> float:
        """What laying out the weights in force for decoding has cost; 0 until the first token needed it."""
        return self.between_tokens(lambda engine: float(engine.pack_seconds))

    @property
    def in_flight(self) -> int:
        """Completions that were asked for and are not finished."""
        if self._closing:
            return 0
        return self.between_tokens(lambda _: sum(asked.left for asked in self._submissions()))

    def submit(self, requests: Sequence[Request]) -> Future[list[Completion]]:
        """Ask; the answers come in the requests' order. Cancelling the future frees its rows."""
        asked = _Submission(tuple(requests), Future())
        if not requests:
            asked.future.set_result([])
            return asked.future
        asked.future.add_done_callback(lambda future: self._withdraw_if_cancelled(asked, future))
        self._note(lambda: self._take_in(asked))
        return asked.future

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer every request, in order; the engine goes on with everybody else's meanwhile."""
        asked = self.submit(requests)
        try:
            return asked.result()
        except CancelledError as error:
            raise self._closed("the engine was closed while it answered") from error
        except BaseException:
            asked.cancel()  # the caller was interrupted: nobody waits for it any more
            raise

    def prepare(self, weights: Weights, version: int) -> Mapping[str, int]:
        """Keep hold of these weights, or of a copy; what is served does not change.

        Returns:
            Checksum per tensor of what it holds.
        """
        self._prepared = None
        held = self._own(weights)
        self._prepared = held, version
        return checksums(held)

    def commit(self, version: int) -> Mapping[str, int]:
        """Serve what was prepared from the next token on.

        Returns:
            Nothing: weights that are laid out for decoding cannot be read back.
        """
        prepared, self._prepared = self._prepared, None  # nothing but the engine holds on to the memory from here on
        if prepared is None or prepared[1] != version:
            raise EngineError(
                f"told to serve version {version}, prepared was {'nothing' if prepared is None else prepared[1]}",
                "weights that nobody checked would be served under a name",
                "call prepare first",
            )
        self.between_tokens(lambda engine: engine.load_weights(prepared[0], version))
        return {}

    def load_weights(self, weights: Weights, version: int) -> None:
        """Serve these weights from the next token on."""
        held = self._own(weights)
        self.between_tokens(lambda engine: engine.load_weights(held, version))

    def _own(self, weights: Weights) -> Weights:
        return {name: value.detach().clone() for name, value in weights.items()} if self.copy_weights else weights

    def pause(self, in_flight: InFlightPolicy = "keep") -> None:
        """No token is drawn after this returns, and new requests wait. No run calls this: weights load between tokens.

        Args:
            in_flight: `keep` leaves rollouts in their rows; `wait` returns when they have finished; `abort` takes them
                out, and they begin again with the same seed after `resume`.
        """
        if in_flight not in ("keep", "wait", "abort"):
            raise ConfigError(
                f"pause({in_flight!r})", "nobody knows what is to become of the rollouts in flight", "keep, wait, abort"
            )
        emptied: Future[None] = Future()
        self.between_tokens(lambda _: self._pause(in_flight, emptied))
        emptied.result()

    def resume(self) -> None:
        """Go on; what was aborted is asked again, unseen by whoever asked. No run calls this."""
        self.between_tokens(lambda _: self._resume())

    def between_tokens(self, act: Callable[[Any], T]) -> T:
        """Run `act(engine)` in the engine's own thread between two tokens; its result, or its exception."""
        if threading.current_thread() is self._thread:
            return act(self.engine)
        result: Future[T] = Future()

        def note() -> None:
            try:
                value = act(self.engine)
            except BaseException as error:  # noqa: BLE001 - it goes to whoever asked, who raises it
                result.set_exception(error)
            else:
                result.set_result(value)

        self._note(note)
        return result.result()

    def close(self) -> None:
        """End the thread, then the engine; whoever still waits hears that it was closed. May be called twice."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.engine.close()

    def _note(self, note: Callable[[], None]) -> None:
        with self._changed:
            if self._closing or self._end is not None:
                raise self._closed("the engine is closed") from self._end
            self._notes.append(note)
            self._changed.notify_all()

    def _withdraw_if_cancelled(self, asked: _Submission, future: Future[list[Completion]]) -> None:
        with self._changed:
            if future.cancelled() and not self._closing and self._end is None:
                self._notes.append(lambda: self._withdraw(asked))
                self._changed.notify_all()

    def _closed(self, what: str) -> EngineError:
        cause = "" if self._end is None else f": {type(self._end).__name__}: {self._end}"
        return EngineError(f"{what}{cause}", "nobody decodes any more", "ask before close, or make a new one")

    # -- the thread ---------------------------------------------------------------------

    def _run(self) -> None:
        # A new thread's matrix products use every core until the number is set in it: other sums, other last bits.
        torch.set_num_threads(self._torch_threads)
        try:
            while self._read_notes():
                if self._draws:
                    self._advance()
        except BaseException as error:  # noqa: BLE001 - the thread ends here; everybody who asks hears of it
            self._end = error
        finally:
            with self._changed:
                self._closing = True
                notes, self._notes = list(self._notes), deque()
            for note in notes:  # so that nobody waits for ever for an answer to it
                note()
            self._fail(list(self._submissions()), self._closed("the engine was closed while it answered"))
            self._tell_emptied()

    @property
    def _draws(self) -> bool:
        """Whether a token may be drawn now: while somebody waits for the rest to finish, it may."""
        return bool(self._inside) and (not self._paused or bool(self._emptied))

    def _read_notes(self) -> bool:
        """Do what was asked for; sleep while there is nothing to do. False when it is time to end."""
        with self._changed:
            while not self._notes and not self._draws and not self._closing:
                self._changed.wait()
            notes, self._notes = list(self._notes), deque()
        for note in notes:
            note()
        return not self._closing

    def _advance(self) -> None:
        try:
            done = self.engine.advance()
        except Exception as error:  # noqa: BLE001 - it goes to everybody whose rollout it has ended
            self.engine.leave()
            self._fail(list(dict.fromkeys(self._inside.values())), error)
            self._tell_emptied()
            return
        for ticket, completion in done.items():
            asked = self._inside.pop(ticket)
            asked.done[asked.slots.pop(ticket)] = completion
            if not asked.left and asked.future.set_running_or_notify_cancel():
                asked.future.set_result([asked.done[i] for i in range(len(asked.requests))])
        self._tell_emptied()

    def _take_in(self, asked: _Submission) -> None:
        if self._closing:
            self._fail([asked], self._closed("the engine is closed"))
        elif self._paused:
            self._waiting.append(asked)
        elif not asked.future.cancelled():
            self._enter(asked)

    def _enter(self, asked: _Submission) -> None:
        missing = [i for i in range(len(asked.requests)) if i not in asked.done]  # not all, when some were aborted
        try:
            tickets = self.engine.enter([asked.requests[i] for i in missing])
        except Exception as error:  # noqa: BLE001 - it is the asker's own, and goes to the asker
            self._fail([asked], error)
            return
        asked.slots = dict(zip(tickets, missing, strict=True))
        self._inside.update(dict.fromkeys(tickets, asked))

    def _withdraw(self, asked: _Submission) -> None:
        if asked in self._waiting:
            self._waiting.remove(asked)
        self.engine.leave(asked.slots)
        self._forget(asked)
        self._tell_emptied()

    def _pause(self, in_flight: InFlightPolicy, emptied: Future[None]) -> None:
        self._paused = True
        if in_flight == "wait" and self._inside:
            self._emptied.append(emptied)
            return
        if in_flight == "abort":
            self.engine.leave()
            aborted = list(dict.fromkeys(self._inside.values()))
            for asked in aborted:
                self._forget(asked)
            self._waiting.extendleft(reversed(aborted))
        emptied.set_result(None)

    def _resume(self) -> None:
        self._paused = False
        waiting, self._waiting = self._waiting, deque()
        for asked in waiting:
            self._take_in(asked)

    def _tell_emptied(self) -> None:
        if not self._inside or self._closing:
            told, self._emptied = self._emptied, []
            for future in told:
                future.set_result(None)

    def _submissions(self) -> list[_Submission]:
        return list(dict.fromkeys([*self._inside.values(), *self._waiting]))

    def _forget(self, asked: _Submission) -> None:
        """It has no place in the engine any more."""
        for ticket in asked.slots:
            self._inside.pop(ticket, None)
        asked.slots = {}

    def _fail(self, these: Sequence[_Submission], error: BaseException) -> None:
        for asked in these:
            self._forget(asked)
            if asked in self._waiting:
                self._waiting.remove(asked)
            if asked.future.set_running_or_notify_cancel():
                asked.future.set_exception(error)
