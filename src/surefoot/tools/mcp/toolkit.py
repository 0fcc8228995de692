"""One private event loop in one thread, for everything that is asynchronous about tools.

Promises   work handed in from any thread is waited for with a hard limit, even if the loop itself is held up; after
           `close` neither the thread nor a task is left.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from surefoot.errors import ToolError, ToolFailedError
from surefoot.protocols import ToolAnswer, ToolSpec
from surefoot.records import Task
from surefoot.system.files import APPEND, plain_descriptor
from surefoot.tools.mcp.lines import CRASHED, OVERLOADED, TIMEOUT, UNAVAILABLE, WireFault
from surefoot.tools.mcp.pins import Listing, specs_of
from surefoot.tools.mcp.pool import Counts, Pool, begin, indented
from surefoot.tools.mcp.process import refuse_bad_grants, refuse_without_walls
from surefoot.tools.mcp.sdk import McpResult, Refused, sdk
from surefoot.tools.mcp.servers import Server, ServerLimits, ServerStatus
from surefoot.tools.mcp.session import Connection
from surefoot.tools.schema import Check, checker, names_of
from surefoot.tools.text import readable, refusal, shown
from surefoot.tracking.process_logs import EgressLog

T = TypeVar("T")


class _Errand:
    """One piece of work that a thread waits for."""

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self.work, self._done = work, threading.Lock()
        self._done.acquire()
        self.task: asyncio.Task[Any] | None = None
        self.given_up = False

    def begin(self) -> None:
        """In the loop."""
        if self.given_up:
            self.work.close()
            return
        self.task = asyncio.get_running_loop().create_task(self.work)
        self.task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            task.exception()  # seen: whoever waited may have gone
        self.end()

    def end(self) -> None:
        """Let go of whoever waits."""
        if self._done.locked():
            self._done.release()

    def wait(self, patience_s: float) -> bool:
        """Whether it is over in time."""
        return self._done.acquire(timeout=min(max(0.0, patience_s), threading.TIMEOUT_MAX))

    def give_up(self) -> None:
        """In the loop: nobody waits any more."""
        self.given_up = True
        if self.task is not None:
            self.task.cancel()


class LoopThread:
    """Start it, `run` coroutines in it from any thread, `close` it.

    Work that is handed in while the loop is about to look is taken with what lies there: it is woken once for all.
    """

    def __init__(self, name: str) -> None:
        self._started: Future[asyncio.AbstractEventLoop] = Future()
        self._stop: asyncio.Event | None = None
        self._handed_in: deque[_Errand] = deque()
        self._is_woken = self._is_over = False
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)
        self._thread.start()
        self.loop = self._started.result()

    def _live(self) -> None:
        try:
            asyncio.run(self._until_stopped())
        finally:
            self._is_over = True  # first: whoever hands in behind the last look below sees it
            while self._handed_in:
                errand = self._handed_in.popleft()
                errand.work.close()
                errand.end()

    async def _until_stopped(self) -> None:
        self._stop = asyncio.Event()
        self._started.set_result(asyncio.get_running_loop())
        await self._stop.wait()

    @property
    def alive(self) -> bool:
        """Whether it takes work."""
        return self._thread.is_alive() and not self.loop.is_closed()

    def run(self, work: Coroutine[Any, Any, T], patience_s: float) -> T:
        """The result; a TimeoutError when it is not there in time, and then the work is cancelled."""
        errand = self._hand_in(work)
        if not errand.wait(patience_s):
            try:
                self.loop.call_soon_threadsafe(errand.give_up)
            except RuntimeError:
                raise RuntimeError("the loop was closed") from None
            raise TimeoutError(f"not done after {patience_s:g} s")
        if errand.task is None or errand.task.cancelled():
            raise RuntimeError("the loop was closed")
        found: T = errand.task.result()
        return found

    def post(self, work: Coroutine[Any, Any, Any]) -> bool:
        """Have it done some time soon, without waiting; whether the loop still takes work."""
        try:
            self._hand_in(work)
        except RuntimeError:
            return False
        return True

    def _hand_in(self, work: Coroutine[Any, Any, Any]) -> _Errand:
        """A RuntimeError when the loop takes no more work."""
        errand = _Errand(work)
        self._handed_in.append(errand)
        try:
            if self._is_over:
                raise RuntimeError("the loop was closed")
            if not self._is_woken:
                self._is_woken = True  # set before the call: what is appended from here on is found by it
                self.loop.call_soon_threadsafe(self._take_in)
        except RuntimeError:
            work.close()
            raise
        return errand

    def _take_in(self) -> None:
        self._is_woken = False  # first: whoever appends after the last look below wakes us again
        while self._handed_in:
            self._handed_in.popleft().begin()

    def close(self, patience_s: float = 30.0) -> bool:
        """Cancel what is left, end the thread; False when something in it does not end."""
        if self._thread.is_alive() and self._stop is not None:
            self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(patience_s)
        return not self._thread.is_alive()


# -- The tools of one rollout: what it may call, and the connections that are its own -------------
# Owns       a rollout's isolated connections, from its first call to its end.
# Promises   what the model got wrong is told to it and never sent; a server that failed under a rollout is not replaced
# behind its back, because its state would be gone; `close` lets go of everything.


@dataclass(frozen=True)
class Tool:
    """One tool of the run."""

    spec: ToolSpec
    server: str
    name: str
    """As its server calls it."""
    check: Check
    idempotent: bool


class ToolDispatcher(Protocol):
    """Who knows the run's tools and makes the calls."""

    limits: ServerLimits

    @property
    def names(self) -> list[str]:
        """Every tool's name."""

    def tool(self, name: str) -> Tool | None:
        """The tool of this name, if the run has one."""

    def ask(self, box: MCPToolbox, tool: Tool, arguments: Mapping[str, Any], deadline_s: float) -> ToolAnswer:
        """One call."""

    def release(self, connections: Sequence[Connection]) -> None:
        """Let go of a rollout's own connections."""


class MCPToolbox:
    """The tools of one rollout; its isolated servers are its own and end with it."""

    opening: str | None = None

    def __init__(self, toolkit: ToolDispatcher, rollout: str) -> None:
        self.rollout, self._toolkit = rollout, toolkit
        self._own: dict[str, Connection] = {}
        self._opening: dict[str, asyncio.Lock] = {}
        self._closed = False

    def call(self, name: str, arguments: Mapping[str, Any], deadline_s: float) -> ToolAnswer:
        """Call and wait, from any thread; a failure that is not the model's is a `ToolFailedError` with its reason."""
        tool = self._toolkit.tool(name)
        if tool is None:
            known = self._toolkit.names
            return ToolAnswer(refusal("unknown_tool", name=shown(name)[:100], known=known[:50]), "refused")
        problems = tool.check(arguments)
        if problems:
            told = [shown(problem) for problem in problems]
            text = refusal("wrong_arguments", tool=name, problems=told, expected=names_of(tool.spec.parameters))
            return ToolAnswer(readable(text, self._toolkit.limits.max_result_chars), "refused")
        return self._toolkit.ask(self, tool, arguments, deadline_s)

    def reward(self) -> float | None:
        """None: servers answer calls, they do not judge."""
        return None

    def close(self) -> None:
        """Let go of the rollout's own servers. May be called twice."""
        self._closed = True
        mine, self._own = list(self._own.values()), {}
        self._toolkit.release(mine)

    # -- for the toolkit, inside its loop ------------------------------------------------------
    async def connect(self, pool: Pool, until: float) -> Connection:
        """This rollout's connection, or one of the shared ones; one that failed is not replaced behind its back."""
        name = pool.server.name
        ready = self._own.get(name)
        if ready is not None and ready.usable and not ready.stale:
            return ready
        async with self._opening.setdefault(name, asyncio.Lock()):
            connection = self._own.get(name)
            if connection is None:
                connection = await pool.take(until - time.monotonic())
                if pool.server.isolation == "isolated":
                    if self._closed:
                        pool.let_go(connection)
                        raise WireFault(UNAVAILABLE, "was let go with its rollout")
                    self._own[name] = connection
        try:
            if connection.fault is not None:
                raise connection.fault
            if connection.retired:
                raise WireFault(CRASHED, "failed earlier in this rollout, and its state with it")
            if connection.stale:
                await pool.check_list(connection, until - time.monotonic())
        except WireFault as fault:
            pool.give_back(connection)
            raise connection.with_last_words(fault) from fault
        except BaseException:
            pool.give_back(connection)
            raise
        return connection

    def has_no_state(self, tool: Tool, connection: Connection) -> bool:
        """Whether a fresh server could take over: it is shared, or nothing but repeatable calls were made."""
        server = connection.server
        return server.isolation == "shared" or connection.called <= set(server.idempotent)

    def forget(self, server: str) -> None:
        """The next call has a fresh connection."""
        self._own.pop(server, None)

    def connection(self, tool: Tool) -> Connection | None:
        """This rollout's own connection to the tool's server, if there is one."""
        return self._own.get(tool.server)


# -- Tools behind MCP servers, for rollouts: `MCPToolkit` -----------------------------------------
# Owns       the servers of a run, one event-loop thread, and what the run began with: the pinned lists of tools.
# Promises   a call ends within a second of its deadline, whatever the server does; what the model got wrong, or what
# the
# tool itself reports, is an answer; what a server got wrong is a `ToolFailedError` with its reason, never an
# answer; a changed list of tools stops the run; state of one rollout is never seen by another, unless the
# server is declared shared.
# Never      parses what a model wrote, keeps budgets of a rollout, or scores: `tools/session.py` does.
#
# toolbox.call --> known tool? arguments fit? --no--> refused, not sent
# |yes
# v
# event loop: slot --> connection (own or shared) --> call --> text, cut and spelled out


_SLACK_S = 0.8
"""How long after its deadline a call may take to be given up: then the loop itself is held up."""
_LOG_BYTES = 1 << 20


class MCPToolkit:
    """The tools of a run's MCP servers. `start` it (or let the first use do it), `close` it.

    Args:
        servers: at least one; their names are unique.
        pins: server name -> SHA-256 of its tools, as `pins` gave it in an earlier run; others are not checked.
        log_dir: what servers wrote to their standard error before they failed goes into `<server>.log` there.

    Example:
        >>> MCPToolkit([Server("clock", command=("my-clock-server",))]).started
        False
    """

    def __init__(
        self, servers: Sequence[Server], limits: ServerLimits | None = None, pins: Mapping[str, str] | None = None,
        log_dir: Path | None = None,
    ) -> None:  # fmt: skip
        self.servers, self.limits = {server.name: server for server in servers}, limits or ServerLimits()
        self.counts = Counts()
        """calls, retries, restarts, connections, and failures by reason."""
        self.retries: deque[str] = deque(maxlen=1000)
        """The last calls that were asked again, and why."""
        self.log_dir = log_dir
        self._given_pins = dict(pins or {})
        self._check_names(servers)
        self._lock = threading.Lock()
        self._thread: LoopThread | None = None
        self._pools: dict[str, Pool] = {}
        self._tools: dict[str, Tool] = {}
        self._listings: list[Listing] = []
        self._slots: asyncio.Semaphore | None = None
        self._refused: ToolError | None = None
        self._closed = False
        self._egress = EgressLog(log_dir)

    def _check_names(self, servers: Sequence[Server]) -> None:
        strangers = sorted(set(self._given_pins) - set(self.servers))
        if not servers or len(self.servers) < len(servers) or strangers:
            names = [server.name for server in servers]
            raise ToolError(
                f"tool servers {names}" + (f" do not include {strangers[0]!r}, which is pinned" if strangers else ""),
                "every server has a name of its own, there is at least one, and pins are for servers that exist",
                "correct the names",
            )

    # -- beginning and end ------------------------------------------------------------------
    @property
    def started(self) -> bool:
        """Whether every server answered and its tools are pinned."""
        return bool(self._tools)

    def start(self) -> None:
        """Every server shakes hands, lists its tools, answers its probe; a `ToolError` names one that does not."""
        with self._lock:
            if self._tools:
                return
            if self._closed:
                raise _closed()
            for server in self.servers.values():
                refuse_without_walls(server)
                refuse_bad_grants(server)
            sdk()  # imported here: in the loop it would hold up everybody for a second
            self._thread = LoopThread("surefoot-mcp")
            try:
                wait = (self.limits.connect_timeout_s + self.limits.call_timeout_s + 5.0) * 2
                self._listings = self._thread.run(self._begin(), wait)
                self._tools = self._table()
            except TimeoutError as error:
                self._shut_down()
                raise ToolError(
                    "tool servers did not start in time", "nobody answers", "look at the servers"
                ) from error
            except BaseException:
                self._shut_down()
                raise

    async def _begin(self) -> list[Listing]:
        self._slots = asyncio.Semaphore(self.limits.concurrency)
        self._pools = {name: Pool(server, self.limits, self.counts) for name, server in self.servers.items()}
        found = await asyncio.gather(
            *(
                begin(pool, self._given_pins.get(name), self.limits.call_timeout_s)
                for name, pool in self._pools.items()
            ),
            return_exceptions=True,
        )
        self._note_egress()
        for each in found:
            if isinstance(each, BaseException):
                raise each
        for pool in self._pools.values():
            pool.prepare()
        return [each for each in found if isinstance(each, Listing)]

    def _table(self) -> dict[str, Tool]:
        return {
            name: Tool(
                spec, listing.server, offer.name, checker(name, offer.schema),
                offer.name in self.servers[listing.server].idempotent,
            )
            for name, (listing, offer, spec) in specs_of(self._listings).items()
        }  # fmt: skip

    def close(self) -> None:
        """End every server, process and thread. May be called twice."""
        with self._lock:
            self._closed = True
            self._shut_down()

    def _shut_down(self) -> None:
        if self._thread is None:
            return
        try:
            self._thread.run(self._end_pools(), 6 * self.limits.shutdown_s + 30.0)
        except (TimeoutError, RuntimeError):
            self.counts.add("not_closed_in_time")
        self._thread.close()
        self._thread = None

    async def _end_pools(self) -> None:
        await asyncio.gather(*(pool.close() for pool in self._pools.values()), return_exceptions=True)
        self._note_egress(last=True)

    def _note_egress(self, *, last: bool = False) -> None:
        """Write down how often contained servers tried to reach the network; a full disk does not fail a rollout."""
        for name, pool in self._pools.items():
            try:
                self._egress.note(name, pool.denied, last=last, hosts=pool.asked)
            except OSError:
                self.counts.add("log_not_written")

    # -- what a run asks ------------------------------------------------------------------------
    @property
    def specs(self) -> Sequence[ToolSpec]:
        """Every tool, fixed for the whole run."""
        self.start()
        return [tool.spec for tool in self._tools.values()]

    @property
    def routes(self) -> Mapping[str, Sequence[str]]:
        """All tasks have all tools."""
        return {}

    @property
    def pins(self) -> dict[str, str]:
        """Server name -> SHA-256 over its tools: write it down, and give it to the next run."""
        self.start()
        return {listing.server: listing.pin for listing in self._listings}

    def open(self, task: Task, rollout: str, seed: int) -> MCPToolbox:
        """Tools for one rollout; its servers are started when it first calls them."""
        self.start()
        if self._refused is not None:
            raise self._refused
        if self._closed:
            raise _closed()
        return MCPToolbox(self, rollout)

    @property
    def denied(self) -> dict[str, int]:
        """Server name -> attempts to reach the network that its sandbox refused, for those that tried."""
        return {name: pool.denied for name, pool in self._pools.items() if pool.denied}

    @property
    def asked(self) -> dict[str, tuple[str, ...]]:
        """Server name -> hosts that it asked for and was refused, for those that have hosts granted."""
        return {name: tuple(pool.asked) for name, pool in self._pools.items() if pool.asked}

    def tool(self, name: str) -> Tool | None:
        """The tool of this name, if the run has one."""
        return self._tools.get(name)

    @property
    def names(self) -> list[str]:
        """Every tool's name."""
        return list(self._tools)

    # -- calls ------------------------------------------------------------------------------------
    def ask(self, box: MCPToolbox, tool: Tool, arguments: Mapping[str, Any], deadline_s: float) -> ToolAnswer:
        """One call, from any thread, over before the deadline and one second more."""
        if self._refused is not None:
            raise self._refused
        first = box.connection(tool) is None  # its server may have to be started first
        longest = self.limits.call_timeout_s + (self.limits.connect_timeout_s if first else 0.0)
        budget = max(0.0, min(deadline_s, longest))
        self.counts.add("calls")
        thread = self._thread
        try:
            if thread is None:
                raise WireFault(UNAVAILABLE, "was closed")
            said = thread.run(self._serve(box, tool, arguments, budget), budget + _SLACK_S)
        except (TimeoutError, RuntimeError) as error:
            begun = TIMEOUT if box.connection(tool) is not None else OVERLOADED
            reason = begun if isinstance(error, TimeoutError) else UNAVAILABLE
            raise self._failed(tool, WireFault(reason, f"did not answer: {error}"), box.connection(tool)) from error
        except WireFault as fault:
            raise self._failed(tool, fault, box.connection(tool)) from fault
        except Refused as refused:
            return ToolAnswer(readable(str(refused), self.limits.max_result_chars), "error")
        except ToolFailedError:
            raise
        except ToolError as error:
            self._refused = error  # a changed list of tools: nobody goes on with it
            raise
        text = readable(said.text, self.limits.max_result_chars, size=said.size)
        return ToolAnswer(text, "error" if said.is_error else "ok")

    async def _serve(self, box: MCPToolbox, tool: Tool, arguments: Mapping[str, Any], budget_s: float) -> McpResult:
        """Wait for a slot and a connection, call, and ask again if that is allowed; all within the budget."""
        until = time.monotonic() + budget_s
        if self._slots is None:
            raise WireFault(UNAVAILABLE, "was not started")
        if self._slots.locked():
            try:
                async with asyncio.timeout(budget_s):
                    await self._slots.acquire()
            except TimeoutError:
                raise WireFault(OVERLOADED, f"had to wait: {self.limits.concurrency} calls are under way") from None
        else:
            await self._slots.acquire()  # at once
        try:
            return await self._try(box, tool, arguments, until, self.limits.restarts if tool.idempotent else 0)
        finally:
            self._slots.release()
            self._note_egress()

    async def _try(
        self, box: MCPToolbox, tool: Tool, arguments: Mapping[str, Any], until: float, retries: int
    ) -> McpResult:  # fmt: skip
        pool = self._pools[tool.server]
        while True:
            connection: Connection | None = None
            try:
                connection = await box.connect(pool, until)
                patience = min(self.limits.call_timeout_s, until - time.monotonic())
                said = await connection.call(tool.name, arguments, patience)
                if connection.stale:  # its tools changed before it answered: this may be another tool's answer
                    await pool.check_list(connection, until - time.monotonic())
                return said
            except WireFault as fault:
                if connection is not None:
                    self._put_away(connection, box)
                repeatable = connection is not None and box.has_no_state(tool, connection)
                if retries <= 0 or fault.reason == OVERLOADED or time.monotonic() >= until or not repeatable:
                    raise _with_last_words(fault, connection or box.connection(tool), pool) from fault
                retries -= 1
                self.counts.add("retries")
                self.retries.append(f"{box.rollout}: {tool.spec.name} asked again: {fault.text}")
                box.forget(tool.server)
            finally:
                if connection is not None:
                    pool.give_back(connection)

    def _put_away(self, connection: Connection, box: MCPToolbox) -> None:
        """A connection that failed serves nobody any more; a shared one finishes what is under way first."""
        pool = self._pools[connection.server.name]
        pool.last_words = connection.tail()
        if connection.server.isolation == "isolated" and (connection.fault is not None or connection.retired):
            pool.let_go(connection)

    def _failed(self, tool: Tool, fault: WireFault, connection: Connection | None) -> ToolFailedError:
        self.counts.add(fault.reason)
        if fault.tail is None and connection is not None:
            fault = WireFault(fault.reason, fault.text, connection.tail())
        self._log(tool.server, f"{tool.spec.name}: {fault.reason}: {fault.text}\n{fault.whole}\n")
        return ToolFailedError(
            f"tool server {tool.server} {fault.text}" + indented(fault.tail or ""),
            f"it failed under a call of {tool.spec.name}; that says nothing about the rollout, which has no verdict",
            _FIXES.get(fault.reason, "look at the server"),
            fault.reason,
        )

    def _log(self, server: str, text: str) -> None:
        """Keep a server's last words, a megabyte at most; a full disk does not fail a rollout."""
        if self.log_dir is None:
            return
        try:
            self.log_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            path = self.log_dir / f"{server}.log"
            if not path.exists() or path.stat().st_size < _LOG_BYTES:
                with open(plain_descriptor(path, APPEND), "a", encoding="utf-8") as file:
                    file.write(text)
        except OSError:
            self.counts.add("log_not_written")

    def release(self, connections: Sequence[Connection]) -> None:
        """Let go of a rollout's own connections, without waiting."""
        thread = self._thread
        if thread is not None and connections:
            thread.post(self._release(connections))

    async def _release(self, connections: Sequence[Connection]) -> None:
        for connection in connections:
            pool = self._pools.get(connection.server.name)
            if pool is not None:
                pool.let_go(connection)


_FIXES = {
    TIMEOUT: "see whether the server hangs; or raise the limit on a call's seconds",
    CRASHED: "look at what it wrote last, if anything, and run its command by hand with this call",
    OVERLOADED: "lower the number of rollouts at a time, or raise concurrency or the server's connections",
}


def _with_last_words(fault: WireFault, connection: Connection | None, pool: Pool) -> WireFault:
    """The same fault, with what this server wrote; one that was only busy has nothing to do with what others wrote."""
    if fault.tail is not None:
        return fault
    if connection is not None:
        return connection.with_last_words(fault)
    return WireFault(fault.reason, fault.text, "" if fault.reason == OVERLOADED else pool.last_words)


def _closed() -> ToolError:
    return ToolError("the toolkit was closed", "its servers are gone", "make a new one")


def check_servers(servers: Sequence[Server], limits: ServerLimits | None = None) -> list[ServerStatus]:
    """Whether each server answers: one status each, in order; nothing is left running."""
    return [_status(server, limits) for server in servers]


def _status(server: Server, limits: ServerLimits | None) -> ServerStatus:
    toolkit = MCPToolkit([server], limits)
    try:
        toolkit.start()
        return ServerStatus(server.name, True, tuple(toolkit.names), toolkit.pins[server.name])
    except ToolError as error:
        return ServerStatus(server.name, False, problem=str(error))
    finally:
        toolkit.close()


__all__ = ["MCPToolbox", "MCPToolkit", "Server", "ServerLimits", "ServerStatus", "check_servers"]
