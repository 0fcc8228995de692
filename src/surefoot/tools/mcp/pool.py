"""Connections to one server: started, pinned, shared or handed out once, replaced when they fail.

Owns       every connection to one server, those that are being closed included.
Promises   an isolated connection serves one rollout and is never used again; a shared one that failed is replaced, with
           growing pauses and so many times only; every new connection offers the tools the run began with, or the run
           is refused; when `close` returns nothing of the server is left.
Never      decides what a failure means for a rollout.

Read next: `toolkit.py`, which asks for connections.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Coroutine, Iterable
from typing import Any

from surefoot.errors import ToolError
from surefoot.system.text import printable
from surefoot.tools.mcp import process
from surefoot.tools.mcp.lines import OVERLOADED, UNAVAILABLE, WireFault
from surefoot.tools.mcp.pins import Listing, check_pin, check_unchanged
from surefoot.tools.mcp.sdk import Refused, http_connections
from surefoot.tools.mcp.servers import Server, ServerLimits
from surefoot.tools.mcp.session import Connection, NegotiatedProtocol
from surefoot.tools.text import shown


class Counts(Counter[str]):
    """What happened how often; counted from many threads."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def add(self, name: str, times: int = 1) -> None:
        """So many more."""
        with self._lock:
            self[name] += times


_MOST_ASKED, OTHERS = 50, "other hosts"
STARTS = 8
"""Processes that are being started at any time: more would only make each other late."""


class Pool:
    """The connections of one server. Everything here runs in one event loop."""

    def __init__(self, server: Server, limits: ServerLimits, counts: Counts) -> None:
        self.server, self.limits, self.counts = server, limits, counts
        self.pinned: Listing | None = None
        self.last_words = ""
        """Standard error of the last connection that failed."""
        self.denied = 0
        """Attempts of its processes to reach the network, all refused."""
        self.asked: Counter[str] = Counter()
        """Whom its processes asked for in those, where that is known; the most of them are kept apart."""
        self._era = NegotiatedProtocol()
        self._http: Any = None
        self._starts = asyncio.Semaphore(STARTS)
        self._shared: list[Connection | None] = [None] * server.connections
        self._reconnecting = [asyncio.Lock() for _ in range(server.connections)]
        self._users = [0] * server.connections
        self._warm: deque[asyncio.Task[Connection]] = deque()
        self._alive: set[Connection] = set()
        self._chores: set[asyncio.Task[Any]] = set()
        self._closed = False

    # -- starting ---------------------------------------------------------------------------
    async def connect(self) -> Connection:
        """A fresh connection with the pinned tools; one attempt."""
        if self._closed:
            raise WireFault(UNAVAILABLE, "is being closed")
        if self.server.url is not None and self._http is None:
            self._http = http_connections(self.limits)
        connection = Connection(self.server, self.limits, self._era, self._http, self._denied)
        self._alive.add(connection)
        try:
            async with self._starts:
                listing = await connection.open()
            if self.pinned is None:
                self.pinned = listing
            check_unchanged(self.pinned, listing)
        except BaseException:
            self.last_words = connection.tail()
            self.let_go(connection)
            raise
        self.counts.add("connections")
        return connection

    def _denied(self, attempts: int, host: str = "") -> None:
        """A contained server tried to reach the network so often; 0 says that nobody can count here."""
        self.denied += attempts
        if host:
            self.asked[host if host in self.asked or len(self.asked) < _MOST_ASKED else OTHERS] += attempts
        self.counts.add("egress_denied" if attempts else "egress_not_counted", attempts or 1)

    async def _connect_patiently(self) -> Connection:
        """As many attempts as the limits allow, with growing pauses."""
        pause = self.limits.backoff_s
        for attempt in range(self.limits.restarts + 1):
            try:
                return await self.connect()
            except WireFault as fault:
                if attempt == self.limits.restarts or self._closed:
                    said = f"{fault.text} ({attempt + 1} attempts)" if attempt else fault.text
                    raise WireFault(UNAVAILABLE, said) from fault
                self.counts.add("restarts")
                await asyncio.sleep(pause)
                pause *= 2
        raise AssertionError("the last attempt returns or raises")

    # -- handing out --------------------------------------------------------------------------
    async def take(self, timeout_s: float) -> Connection:
        """A connection for a rollout (isolated) or for a call (shared); a `WireFault` when there is none in time."""
        if (ready := self._ready_shared()) is not None:
            return ready
        chore: asyncio.Task[Connection] = self._chore(
            self._take_shared() if self.server.isolation == "shared" else self._take_fresh()
        )
        await asyncio.wait({chore}, timeout=max(0.0, timeout_s))
        if chore.done():
            return chore.result()
        chore.add_done_callback(self._close_unwanted)
        if self.server.isolation == "isolated":
            chore.cancel()
        raise WireFault(OVERLOADED, f"had no connection to give within {timeout_s:.3g} s")

    def _close_unwanted(self, chore: asyncio.Task[Connection]) -> None:
        if chore.cancelled() or chore.exception() is not None:
            return
        if self.server.isolation == "shared":
            self.give_back(chore.result())
        else:
            self.let_go(chore.result())

    async def _take_fresh(self) -> Connection:
        while self._warm:
            early = self._warm.popleft()
            self.prepare()
            try:
                connection = await early
            except WireFault:
                continue  # it failed before anybody needed it; the next one may not
            if connection.usable:
                return connection
            self.let_go(connection)
        return await self._connect_patiently()

    def prepare(self) -> None:
        """Start connections ahead, as many as the server is declared to have."""
        while not self._closed and self.server.isolation == "isolated" and len(self._warm) < self.server.warm:
            self._warm.append(self._chore(self.connect()))

    def _ready_shared(self) -> Connection | None:
        """The least busy of the connections, where nothing has to be waited for; `give_back` it."""
        if self.server.isolation != "shared":
            return None
        place = self._least_busy()
        connection = self._shared[place]
        if connection is None or not connection.usable or self._reconnecting[place].locked():
            return None
        self._users[place] += 1
        connection.place = place
        return connection

    def _least_busy(self) -> int:
        return min(range(len(self._users)), key=lambda i: self._users[i])

    async def _take_shared(self) -> Connection:
        """The least busy of the connections, repaired first if it is broken; `give_back` it."""
        place = self._least_busy()
        self._users[place] += 1
        try:
            async with self._reconnecting[place]:
                connection = self._shared[place]
                if connection is None or not connection.usable:
                    connection = await self._reconnect(place, connection)
        except BaseException:
            self._users[place] -= 1
            raise
        connection.place = place
        return connection

    async def _reconnect(self, place: int, broken: Connection | None) -> Connection:
        self._shared[place] = None
        if broken is not None:
            self.counts.add("restarts")
            self._chore(self._close_when_idle(broken))
        fresh = self._shared[place] = await self._connect_patiently()
        return fresh

    def give_back(self, connection: Connection) -> None:
        """A call over a shared connection is over, however it ended."""
        if self.server.isolation == "shared":
            self._users[connection.place] -= 1

    def adopt(self, connection: Connection) -> None:
        """Keep the connection that the run began with: the first of the shared ones, or let go of it."""
        if self.server.isolation == "shared":
            self._shared[0] = connection
        else:
            self.let_go(connection)

    async def check_list(self, connection: Connection, timeout_s: float) -> None:
        """The server said that its list changed: look, and refuse the run if it did."""
        listing = await connection.list_again(timeout_s)
        if self.pinned is not None:
            check_unchanged(self.pinned, listing)

    # -- letting go -----------------------------------------------------------------------------
    def let_go(self, connection: Connection) -> None:
        """Close it, without waiting here."""
        connection.retire()
        self._chore(self._close(connection))

    async def _close_when_idle(self, connection: Connection) -> None:
        """One call hung; the others on this connection may still be answered, until their own deadlines."""
        give_up = time.monotonic() + self.limits.call_timeout_s
        while connection.in_flight and connection.fault is None and not self._closed and time.monotonic() < give_up:
            await asyncio.sleep(0.02)
        await self._close(connection)

    async def _close(self, connection: Connection) -> None:
        try:
            await connection.close()
        finally:
            self._alive.discard(connection)

    def _chore(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task that somebody holds on to; its failure is for whoever waits for it."""
        task = asyncio.create_task(work)
        self._chores.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._chores.discard(task)
        if not task.cancelled() and isinstance(task.exception(), ToolError):
            self.counts.add("refused")

    async def close(self) -> None:
        """End every connection, those being started too."""
        self._closed = True
        for task in self._warm:
            task.cancel()
        await asyncio.gather(*self._warm, return_exceptions=True)
        self._warm.clear()
        for connection in list(self._alive):
            self.let_go(connection)
        while self._chores:
            await asyncio.wait(set(self._chores))
        if self._http is not None:
            await self._http.aclose()


# -- The first connection to a server: a handshake, a list of tools, a pin and one call that succeeds
# Promises   "available" means that all four went well; what did not is told with the server's last words.


async def begin(pool: Pool, pin: str | None, timeout_s: float) -> Listing:
    """Handshake, list, pin and probe of one server; its first connection is kept if it is shared.

    Args:
        pin: the SHA-256 that its tools must have; None when nobody wrote one down.
    """
    connection: Connection | None = None
    try:
        connection = await pool.connect()
        listing = connection.listing
        if listing is None:
            raise WireFault(UNAVAILABLE, "gave no list of tools")
        if pin is not None:
            check_pin(listing, pin)
        await _probe(connection, pool.server, timeout_s)
    except WireFault as fault:
        tail = connection.tail() if connection is not None else pool.last_words
        raise unavailable(pool.server, fault, tail, pool.denied, pool.asked) from fault
    pool.adopt(connection)
    return listing


def unavailable(
    server: Server, fault: WireFault, tail: str, denied: int = 0, asked: Iterable[str] = ()
) -> ToolError:  # fmt: skip
    """A server that the run cannot begin with.

    Args:
        denied: how often it tried to reach the network and was refused.
        asked: hosts that it asked for.
    """
    hint = ""
    loose = [word for word in server.command[1:] if not os.path.isabs(word) and os.path.isfile(word)]
    if loose and server.cwd is None:
        hint = f"; it runs in a private folder, so give the full path of {loose[0]}"
    return ToolError(
        f"tool server {server.name} ({printable(server.place)[:200]}) {fault.text}" + indented(tail),
        "a server is available when it shakes hands, lists its tools and answers its probe as it should",
        f"run its command by hand and look at what it says{hint}{process.hint(server, tail, denied, asked)}",
    )


def indented(tail: str) -> str:
    """Last words below an error's first line."""
    return "".join(f"\n    | {line}" for line in tail.splitlines())


async def _probe(connection: Connection, server: Server, timeout_s: float) -> None:
    """One call that has to succeed."""
    if server.probe is None:
        return
    tool, arguments = server.probe
    try:
        said = await connection.call(tool, arguments, timeout_s)
    except Refused as refused:
        raise WireFault(UNAVAILABLE, f"refused its probe: {shown(str(refused))[:200]}") from refused
    if said.is_error:
        raise WireFault(UNAVAILABLE, f"answered its probe with an error: {shown(said.text)[:200]}")
    if server.probe_answer is not None and said.text.strip() != server.probe_answer.strip():
        raise WireFault(
            UNAVAILABLE,
            f"answered its probe {_short(tool)} {_short(json.dumps(dict(arguments), ensure_ascii=False))} with "
            f"{_short(said.text)!r}, and {_short(server.probe_answer)!r} is expected",
        )


def _short(text: str) -> str:
    return printable(text.strip())[:200]
