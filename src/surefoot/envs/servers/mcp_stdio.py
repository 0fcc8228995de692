"""A tool server as a process of its own: what it says, line by line, as long as it behaves.

Owns       the process (`server_child.py` starts it, contained or not), its pipes and the last of its standard error.
Promises   no line, no total and no rate beyond the limits ever reaches memory; what is not strict JSON is a fault,
           not a message; a server that does not read is given up; after `end` the process, all its descendants, its
           descriptors and its folder are gone.
Never      imports the MCP package, or knows what a message means.

    server's stdout --> LineCutter --> strict JSON --> messages()
                            |
                            +-- too long, too much, too often --> WireFault(reason)

Read next: `mcp_session.py`, which speaks MCP over it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from surefoot.envs.servers.mcp_lines import (
    CRASHED,
    FLOODED,
    TIMEOUT,
    UNAVAILABLE,
    Bucket,
    LineCutter,
    WireFault,
    message_of,
)
from surefoot.envs.servers.mcp_servers import Limits, Server
from surefoot.envs.servers.server_child import Child, started
from surefoot.envs.servers.server_keeper import PATIENCE_S
from surefoot.safe_text import redact, spelled_out

_PIECE = 64 * 1024
_TAIL_LINES = 12


class Pipe:
    """One end of a pipe for an event loop: no thread, no transport, nothing left open."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        self._waiters: set[asyncio.Future[None]] = set()

    async def read(self) -> bytes:
        """Some bytes; none at the end, or when the pipe was closed here."""
        while self.descriptor >= 0:
            try:
                return os.read(self.descriptor, _PIECE)
            except BlockingIOError:
                await self._ready(self._loop.add_reader, self._loop.remove_reader)
            except OSError:
                return b""
        return b""

    async def write(self, data: bytes) -> None:
        """All of it; a BrokenPipeError when nobody reads any more."""
        view = memoryview(data)
        while view:
            if self.descriptor < 0:
                raise BrokenPipeError("closed")
            try:
                view = view[os.write(self.descriptor, view) :]
            except BlockingIOError:
                await self._ready(self._loop.add_writer, self._loop.remove_writer)

    async def _ready(self, add: Callable[..., Any], remove: Callable[[int], Any]) -> None:
        waiter, descriptor = self._loop.create_future(), self.descriptor

        def wake() -> None:
            if not waiter.done():
                waiter.set_result(None)

        add(descriptor, wake)
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)
            if self.descriptor == descriptor:  # else it was closed, and the number may be somebody else's by now
                remove(descriptor)

    def close(self) -> None:
        """Give the descriptor back; whoever waits on it finds it closed."""
        if self.descriptor >= 0:
            self._loop.remove_reader(self.descriptor)
            self._loop.remove_writer(self.descriptor)
            os.close(self.descriptor)
            self.descriptor = -1
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)


class ServerProcess:
    """One running server. Make it inside an event loop; `end` it, whatever happens."""

    def __init__(self, server: Server, limits: Limits, denied: Callable[[int], None] | None = None) -> None:
        self.server, self.limits = server, limits
        self._stderr, self.stderr_bytes = bytearray(), 0
        self._said_at = 0
        """Bytes of its standard error that were there when it last said something on its output."""
        self.denied = 0
        """Attempts to reach the network that its sandbox refused."""
        self._tell_denied = denied
        self._unasked = Bucket(limits.messages_per_s)
        self._unasked_bytes = Bucket(4.0 * limits.max_line_bytes)
        self._bytes = Bucket(limits.bytes_per_s)
        try:
            self.child: Child = started(server, self._keep, self._deny)
        except OSError as error:
            raise WireFault(UNAVAILABLE, f"cannot be started: {error}") from error
        self._in, self._out, self._err = (Pipe(descriptor) for descriptor in self.child.streams)

    def _deny(self, attempts: int) -> None:
        self.denied += attempts
        if self._tell_denied is not None:
            self._tell_denied(attempts)

    # -- talking ---------------------------------------------------------------------------
    async def messages(self) -> AsyncIterator[tuple[dict[str, Any], int]]:
        """Each message and its size in bytes, until the server ends; a `WireFault` when it breaks a rule."""
        cutter = LineCutter(self.limits.max_line_bytes, self.limits.max_result_bytes)
        while piece := await self._out.read():
            if not self._bytes.take(len(piece)):
                raise WireFault(FLOODED, f"said more than {self.limits.bytes_per_s:g} bytes in a second")
            for line, size in cutter.feed(piece):
                self.hear()
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

    async def write(self, data: bytes) -> None:
        """One line to the server; a `WireFault` when it does not read, or is gone."""
        try:
            async with asyncio.timeout(self.limits.write_timeout_s):
                await self._in.write(data)
        except TimeoutError as error:
            raise WireFault(TIMEOUT, f"did not read its input for {self.limits.write_timeout_s:g} s") from error
        except OSError as error:
            raise WireFault(CRASHED, "closed its input") from error

    async def drain_stderr(self) -> None:
        """Keep the last of it, until the server ends; a server that floods it is not held up, and fills nothing."""
        while piece := await self._err.read():
            self._keep(piece)
            if len(piece) == _PIECE:
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
        self.hear()
        self.child.stop()
        for pipe in (self._in, self._out, self._err):
            pipe.close()

    def hear(self) -> None:
        """What it wrote to its standard error and nobody read yet, without waiting; only inside the event loop."""
        for _ in range(4):
            try:
                piece = os.read(self._err.descriptor, _PIECE) if self._err.descriptor >= 0 else b""
            except OSError:
                return  # nothing there right now
            if not piece:
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
