"""A tool server as a process of its own: what it says, line by line, as long as it behaves.

Owns       the process (`process.py` starts it, contained or not), its pipes and the last of its standard error.
Promises   no line, no total and no rate beyond the limits ever reaches memory; what is not strict JSON is a fault,
           not a message; a server that does not read is given up; after `end` the process, all its descendants, its
           descriptors and its folder are gone.
Never      imports the MCP package, or knows what a message means.

    server's stdout --> LineCutter --> strict JSON --> messages()
                            |
                            +-- too long, too much, too often --> WireFault(reason)

Read next: `session.py`, which speaks MCP over it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from surefoot.system.text import printable, redact, spelled_out
from surefoot.tools.mcp.lines import (
    CRASHED,
    FLOODED,
    PROTOCOL,
    TIMEOUT,
    UNAVAILABLE,
    Bucket,
    LineCutter,
    WireFault,
    message_of,
)
from surefoot.tools.mcp.process import ServerChild, ToldOfDenied, start_server
from surefoot.tools.mcp.sdk import SIZE, sdk, words, wrapped
from surefoot.tools.mcp.servers import Server, ServerLimits
from surefoot.tools.mcp.supervisor import PATIENCE_S

_PIECE = 64 * 1024
_TAIL_LINES = 12


class Pipe:
    """One end of a pipe for an event loop: no thread, no transport, nothing left open.

    The loop is asked to watch it once, not for every message: what has come is read when it comes, a piece ahead of
    whoever wants it; what does not fit is written when there is room, in the order in which it was handed in.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        self._waiters: set[asyncio.Future[None]] = set()
        self._got, self._watched, self._ended = bytearray(), False, False
        self._left = bytearray()
        """Handed in, and not yet written."""
        self._broken: OSError | None = None

    async def read(self) -> bytes:
        """Some bytes; none at the end, or when the pipe was closed here."""
        while self.descriptor >= 0:
            if self._got or self._ended:
                return self._taken()
            if not self._watched:
                self._watched = True
                self._loop.add_reader(self.descriptor, self._on_readable)
            await self._woken()
        return b""

    def read_now(self) -> bytes:
        """What is there, without waiting; none where there is nothing."""
        if self.descriptor >= 0 and not self._ended:
            self._on_readable()
        return self._taken()

    def _taken(self) -> bytes:
        piece = bytes(self._got)
        self._got.clear()
        return piece

    def _on_readable(self) -> None:
        try:
            piece = os.read(self.descriptor, _PIECE)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        self._got += piece
        self._ended = not piece
        if self._ended or len(self._got) >= _PIECE:  # enough ahead: the other side waits until somebody wants more
            self._unwatch()
        self._wake()

    def _unwatch(self) -> None:
        if self._watched:
            self._watched = False
            self._loop.remove_reader(self.descriptor)

    def send(self, data: bytes) -> bool:
        """Hand it in, without waiting; whether all of it is written. A BrokenPipeError when nobody reads any more."""
        if self.descriptor < 0 or self._broken is not None:
            raise self._broken or BrokenPipeError("closed")
        if not self._left:
            written = self._write_some(data)
            if written == len(data):
                return True
            self._loop.add_writer(self.descriptor, self._on_writable)
            data = data[written:]
        self._left += data
        return False

    async def sent(self) -> None:
        """Wait until all that was handed in is written; a BrokenPipeError when it never will be."""
        while self._left and self._broken is None and self.descriptor >= 0:
            await self._woken()
        if self._left or self._broken is not None:
            raise self._broken or BrokenPipeError("closed")

    async def write(self, data: bytes) -> None:
        """All of it; a BrokenPipeError when nobody reads any more."""
        if not self.send(data):
            await self.sent()

    def _write_some(self, data: bytes | bytearray) -> int:
        try:
            return os.write(self.descriptor, data)
        except BlockingIOError:
            return 0

    def _on_writable(self) -> None:
        try:
            del self._left[: self._write_some(self._left)]
        except OSError as error:
            self._broken = error
        if not self._left or self._broken is not None:
            self._loop.remove_writer(self.descriptor)
            self._wake()

    async def _woken(self) -> None:
        waiter = self._loop.create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def close(self) -> None:
        """Give the descriptor back; whoever waits on it finds it closed."""
        if self.descriptor >= 0:
            self._loop.remove_reader(self.descriptor)
            self._loop.remove_writer(self.descriptor)
            os.close(self.descriptor)
            self.descriptor, self._watched = -1, False
            self._wake()


class ServerProcess:
    """One running server. Make it inside an event loop; `end` it, whatever happens."""

    def __init__(self, server: Server, limits: ServerLimits, denied: ToldOfDenied | None = None) -> None:
        self.server, self.limits = server, limits
        self._stderr, self.stderr_bytes = bytearray(), 0
        self._said_at = 0
        """Bytes of its standard error that were there when it last said something on its output."""
        self.denied = 0
        """Attempts to reach the network that its sandbox, or the proxy of its granted hosts, refused."""
        self._tell_denied = denied
        self._unasked = Bucket(limits.messages_per_s)
        self._unasked_bytes = Bucket(4.0 * limits.max_line_bytes)
        self._bytes = Bucket(limits.bytes_per_s)
        try:
            self.child: ServerChild = start_server(server, self._keep, self._deny)
        except OSError as error:
            raise WireFault(UNAVAILABLE, f"cannot be started: {error}") from error
        self._in, self._out, self._err = (Pipe(descriptor) for descriptor in self.child.streams)

    def _deny(self, attempts: int, host: str = "") -> None:
        self.denied += attempts
        if self._tell_denied is not None:
            self._tell_denied(attempts, host)

    # -- talking ---------------------------------------------------------------------------
    async def messages(self) -> AsyncIterator[tuple[dict[str, Any], int]]:
        """Each message and its size in bytes, until the server ends; a `WireFault` when it breaks a rule."""
        cutter = LineCutter(self.limits.max_line_bytes, self.limits.max_result_bytes)
        while piece := await self._out.read():
            if not self._bytes.take(len(piece)):
                raise WireFault(FLOODED, f"said more than {self.limits.bytes_per_s:g} bytes in a second")
            for line, size in cutter.feed(piece):
                self.keep_stderr()
                self._said_at = self.stderr_bytes
                if line.strip():
                    yield message_of(line, size), size
                elif not self._unasked.take(1):
                    raise WireFault(FLOODED, "sends empty lines without end")

    def count_unasked(self, size: int) -> None:
        """Note a message that answers nothing; a `WireFault` when there are too many, or too big ones."""
        if not self._unasked.take(1) or not self._unasked_bytes.take(size):
            raise WireFault(
                FLOODED, f"sent more than {self.limits.messages_per_s:g} messages or too much a second unasked"
            )

    def send(self, data: bytes) -> bool:
        """Hand in one line; whether all of it is written: else somebody has to wait for `sent`."""
        try:
            return self._in.send(data)
        except OSError as error:
            raise WireFault(CRASHED, "closed its input") from error

    async def write(self, data: bytes) -> None:
        """One line to the server; a `WireFault` when it does not read, or is gone."""
        if not self.send(data):
            await self.sent()

    async def sent(self) -> None:
        """Wait until the server has read so far; a `WireFault` when it does not, or is gone."""
        try:
            async with asyncio.timeout(self.limits.write_timeout_s):
                await self._in.sent()
        except TimeoutError as error:
            raise WireFault(TIMEOUT, f"did not read its input for {self.limits.write_timeout_s:g} s") from error
        except OSError as error:
            raise WireFault(CRASHED, "closed its input") from error

    async def drain_stderr(self) -> None:
        """Keep the last of it, until the server ends; a server that floods it is not held up, and fills nothing."""
        while piece := await self._err.read():
            self._keep(piece)
            if len(piece) >= _PIECE:
                await asyncio.sleep(0.001)  # others have something to say, too

    def _keep(self, piece: bytes) -> None:
        self.stderr_bytes += len(piece)
        self._stderr += piece
        del self._stderr[: -self.limits.stderr_bytes]

    def tail(self, *, since_it_spoke: bool = False) -> str:
        """The last lines of its standard error, safe to print; empty when it wrote none.

        Args:
            since_it_spoke: only what came after its last message: what was written before belongs to earlier calls.
        """
        kept = min(self.stderr_bytes - self._said_at, 4096) if since_it_spoke else 4096
        text = bytes(self._stderr[-kept:] if kept else b"").decode("utf-8", errors="replace").strip()
        lines = text.replace("\r\n", "\n").split("\n")[-_TAIL_LINES:]  # what else ends a line somewhere is spelled out
        return spelled_out(redact("\n".join(lines), {**os.environ, **self.server.env}))

    # -- ending ----------------------------------------------------------------------------
    async def exit_status(self, patience_s: float) -> int | None:
        """As a shell would say it; None when it has not ended in time."""
        give_up = time.monotonic() + patience_s
        while (status := self.child.poll()) is None:
            if time.monotonic() >= give_up:
                return None
            await asyncio.sleep(0.003)
        return status

    async def end(self, grace_s: float) -> None:
        """Close its input, wait so long for it to go by itself, then end it and everything it started."""
        self._in.close()
        try:
            if grace_s > 0:
                await self.exit_status(grace_s)
        finally:
            self.kill()
            if await self.exit_status(PATIENCE_S + 1.0) is None:
                self.child.destroy()

    def kill(self) -> None:
        """End everything, at once, and close our ends. May be called twice."""
        self.keep_stderr()
        self.child.stop()
        for pipe in (self._in, self._out, self._err):
            pipe.close()

    def keep_stderr(self) -> None:
        """What it wrote to its standard error and nobody read yet, without waiting; only inside the event loop."""
        for _ in range(4):
            if not (piece := self._err.read_now()):
                return
            self._keep(piece)


def exit_words(status: int) -> str:
    """An exit status for people; one that a shell gives after a signal names it.

    Example:
        >>> exit_words(9), exit_words(137)
        ('status 9', 'status 137, as after SIGKILL')
    """
    try:
        return f"status {status}" + (f", as after {signal.Signals(status - 128).name}" if status > 128 else "")
    except ValueError:  # a number that no signal has
        return f"status {status}"


# -- Between the SDK's streams and a server's process: what may pass, and what is a fault ---------
# Owns       the three tasks that move messages, and the ids that were asked and not yet answered.
# Promises   only answers to what was asked, once each, and pings reach the SDK; sampling, roots and elicitation are
# off;
# a server that answers nobody, or twice, is cut off. A call of a tool goes round the SDK's streams, with the words
# that its session says in every request, and its answer is held to the same forms: see `ask`.
# Never      waits for a call, or decides what a fault means for a rollout.


LIST_CHANGED = "notifications/tools/list_changed"
_OWN_IDS = 1 << 30
"""Where the ids of calls begin that go round the SDK; its own are counted from 1."""
_OF_ONE_REQUEST = frozenset({"progressToken", "traceparent", "tracestate", "baggage"})
"""What a session says in one request and not in every one."""
_LAST_LOOK_S = 2.0
"""A server that closed a pipe has usually ended; on a busy machine its supervisor needs a moment to say how."""


class Bridge:
    """Moves messages for one process until it ends, breaks a rule, or is left."""

    def __init__(
        self,
        process: ServerProcess,
        limits: ServerLimits,
        blame: Callable[[WireFault], None],
        changed: Callable[[], None],
    ) -> None:
        self.process, self.limits, self._tell, self._changed = process, limits, blame, changed
        self._fault: WireFault | None = None
        self._asked: set[Any] = set()
        self._abandoned: set[Any] = set()
        self._leaving = self._is_over = False
        self._own: dict[int, asyncio.Future[Any]] = {}
        """Calls that went round the SDK, by id."""
        self._numbers = itertools.count(_OWN_IDS)
        self._meta: dict[str, Any] = {}
        self._chores: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def streams(self, grace_s: Callable[[], float]) -> AsyncIterator[Any]:
        """The two streams that the SDK's client wants; on leaving, nothing of the process is left."""
        to_us, ours = sdk().streams(0)
        theirs, to_them = sdk().streams(0)
        tasks = [
            asyncio.create_task(self._read(to_us)),
            asyncio.create_task(self._write(to_them)),
            asyncio.create_task(self.process.drain_stderr()),
        ]
        try:
            yield ours, theirs
        finally:
            self._leaving = True
            for stream in (to_us, ours, theirs, to_them):
                stream.close()
            try:
                await self.process.end(grace_s())
            finally:
                self.process.kill()
                tasks += self._chores
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def ask(self, tool: str, arguments: Mapping[str, Any]) -> asyncio.Future[Any]:
        """Call a tool: its answer, as the message that the SDK would have seen. Cancelled, it is called off.

        A session of the SDK hands a request through two streams and four tasks on its way out, and as many on its way
        back: most of what a call cost. It says the same words: `_meta` is what it said when it asked for the tools.
        """
        if self._is_over:
            raise self._fault or WireFault(CRASHED, "is gone")
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        params: dict[str, Any] = {"name": tool, "arguments": dict(arguments)}
        if self._meta:
            params["_meta"] = self._meta
        line = line_of({"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params})
        self._asked.add(number)
        self._own[number] = answer
        answer.add_done_callback(lambda done: self._answered(number, done))
        self._say(line)
        return answer

    def _answered(self, number: int, answer: asyncio.Future[Any]) -> None:
        self._own.pop(number, None)
        if answer.cancelled() and number in self._asked and not self._leaving:
            self._call_off(number)
            params = {"requestId": number, "reason": "caller cancelled"}
            self._say(line_of({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}))

    def _say(self, line: bytes) -> None:
        """Hand in a line; what goes wrong with it, now or later, is for whoever waits for an answer."""
        try:
            if self.process.send(line):
                return
            work = self._watch_writing()
        except WireFault as fault:
            work = self._give_up_writing(fault)
        task = asyncio.create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    async def _watch_writing(self) -> None:
        try:
            await self.process.sent()
        except WireFault as fault:
            await self._give_up_writing(fault)

    def _fail_own(self) -> None:
        """Nobody answers any more."""
        self._is_over = True
        for waiting in list(self._own.values()):
            if not waiting.done():
                waiting.set_exception(self._fault or WireFault(CRASHED, "closed the connection"))

    async def _read(self, to_us: Any) -> None:
        try:
            async for message, size in self.process.messages():
                if self._may_pass(message, size):
                    checked = wrapped(_sized(message, size, self.limits.max_line_bytes))
                    own = None if "method" in message else self._own.get(message["id"])
                    if own is None:
                        await to_us.send(checked)
                    elif not own.done():
                        own.set_result(checked.message)
            ended = await self._how_it_ended("closed its output")
            if self._leaving:
                return  # it ended because we left
            self._blame(ended)
        except WireFault as fault:
            self._give_up(fault)
        except ValueError as error:
            self._give_up(WireFault(PROTOCOL, f"said something that is no message: {words(error)}"))
        except sdk().closed:
            pass  # the session is being left
        except Exception as error:
            self._give_up(WireFault(PROTOCOL, f"could not be read: {words(error)}"))
            raise
        finally:
            to_us.close()
            self._fail_own()

    async def _how_it_ended(self, otherwise: str) -> WireFault:
        """Its exit status, if it has one within a moment: that says more than a closed pipe."""
        status = await self.process.exit_status(_LAST_LOOK_S)
        return WireFault(CRASHED, otherwise if status is None else f"ended with {exit_words(status)}")

    def _blame(self, fault: WireFault) -> None:
        self._fault = self._fault or fault
        self._tell(fault)

    def _give_up(self, fault: WireFault) -> None:
        self._blame(fault)
        self.process.kill()

    def _may_pass(self, message: Mapping[str, Any], size: int) -> bool:
        """Whether the SDK should see it; a `WireFault` when nobody should have sent it."""
        if "method" in message:
            self.process.count_unasked(size)
            if "id" in message and message["method"] != "ping":
                raise WireFault(PROTOCOL, f"asked us for {printable(str(message['method']))[:80]!r}, which is off")
            if message["method"] == LIST_CHANGED:
                self._changed()
            return "id" in message
        answered = message.get("id")
        if isinstance(answered, bool) or not isinstance(answered, int | str):
            raise WireFault(PROTOCOL, f"answered {printable(repr(answered))[:80]}, which is no id")
        if answered in self._abandoned:
            self._abandoned.discard(answered)
            return False  # too late, and not its fault: we stopped waiting
        if answered not in self._asked:
            raise WireFault(PROTOCOL, f"answered {printable(repr(answered))[:80]}, which nobody asked, or asked once")
        self._asked.discard(answered)
        return True

    async def _write(self, to_them: Any) -> None:
        try:
            async for item in to_them:
                self._note(item.message)
                await self.process.write(
                    item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
                )
        except WireFault as fault:
            await self._give_up_writing(fault)
        except sdk().closed:
            pass
        finally:
            to_them.close()  # nobody writes any more: a call that waits for its turn is not left to its deadline

    async def _give_up_writing(self, fault: WireFault) -> None:
        if fault.reason == CRASHED and not self._leaving:
            fault = await self._how_it_ended(fault.text)
        self._give_up(fault)
        self._fail_own()

    def _note(self, message: Any) -> None:
        """What is asked may be answered once; what was called off may still be."""
        method, number = getattr(message, "method", None), getattr(message, "id", None)
        if method is not None and number is not None:
            self._asked.add(number)
            if method == "tools/list":
                said = (message.params or {}).get("_meta") or {}
                self._meta = {name: value for name, value in said.items() if name not in _OF_ONE_REQUEST}
        elif method == "notifications/cancelled":
            self._call_off((message.params or {}).get("requestId"))

    def _call_off(self, number: Any) -> None:
        if number in self._asked:
            self._asked.discard(number)
            self._abandoned.add(number)


def line_of(message: Mapping[str, Any]) -> bytes:
    """A message as a line of UTF-8; half a character, which UTF-8 cannot hold, stays escaped."""
    try:
        return json.dumps(message, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    except UnicodeEncodeError:
        return json.dumps(message, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _sized(message: dict[str, Any], size: int, kept: int) -> dict[str, Any]:
    """The same message, with its full size where it was cut; a server cannot claim a size itself."""
    result = message.get("result")
    if not isinstance(result, dict):
        return message
    meta = result.get("_meta")
    if isinstance(meta, dict):
        meta.pop(SIZE, None)
    if size > kept:
        result["_meta"] = {**(meta if isinstance(meta, dict) else {}), SIZE: size}
    return message
