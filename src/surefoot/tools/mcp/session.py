"""One connection to one MCP server, owned by one task.

Owns       a client of the SDK, over a process, an address or an object in this process; what went wrong with it.
Promises   the SDK's client is entered and left by the same task (it must be); every wait ends at its deadline; what a
           server says about the form of its answers is never compiled or run.
Never      retries, restarts, or decides who may use it: `pool.py` does.

Read next: `stdio.py`, what may pass; `pool.py`, who gets which connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from surefoot.errors import ToolError
from surefoot.system.text import printable
from surefoot.tools.mcp.lines import CRASHED, FLOODED, PROTOCOL, TIMEOUT, UNAVAILABLE, WireFault
from surefoot.tools.mcp.pins import Listing, Offer, listing_of
from surefoot.tools.mcp.process import ToldOfDenied
from surefoot.tools.mcp.sdk import (
    CLOSED,
    INTERNAL,
    INVALID_PARAMS,
    TIMED_OUT,
    McpResult,
    Refused,
    call_result,
    leaves,
    sdk,
    words,
)
from surefoot.tools.mcp.sdk import mcp_result as said
from surefoot.tools.mcp.servers import Server, ServerLimits
from surefoot.tools.mcp.stdio import Bridge, ServerProcess

MAX_PAGES = 20
"""A list of tools comes in pages; one without end is a fault."""
T = TypeVar("T")


@dataclass
class NegotiatedProtocol:
    """What the first connection found out about the server, so that the next ones need not ask."""

    mode: str = "auto"
    discovered: Any = None


class Connection:
    """One client of one server. `open` it, `call` it any number of times, `close` it; all inside one event loop."""

    def __init__(
        self, server: Server, limits: ServerLimits, era: NegotiatedProtocol, http: Any = None,
        denied: ToldOfDenied | None = None,
    ) -> None:  # fmt: skip
        self.server, self.limits, self.era, self._http, self._denied = server, limits, era, http, denied
        self.fault: WireFault | None = None
        self.listing: Listing | None = None
        self.stale = False
        """The server said that its list of tools changed; nobody looked yet."""
        self.retired = False
        """No new calls; what is under way may finish."""
        self.in_flight = self.place = 0
        self.called: set[str] = set()
        """Tools that were asked over this connection."""
        self.process: ServerProcess | None = None
        self._bridge: Bridge | None = None
        self._session: Any = None
        self._owner: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._gave_up = False
        self._strays: set[asyncio.Future[Any]] = set()

    @property
    def usable(self) -> bool:
        """Whether the next call may go here."""
        return self._session is not None and self.fault is None and not self.retired

    def tail(self) -> str:
        """The last lines of the server's standard error; empty when there are none."""
        return self.process.tail() if self.process is not None else ""

    def with_last_words(self, fault: WireFault) -> WireFault:
        """The same fault, with what the server wrote; of one that ended, only what came after its last answer."""
        if self.process is not None:
            self.process.keep_stderr()
        if self.process is None or fault.reason != CRASHED:
            return WireFault(fault.reason, fault.text, self.tail())
        tail = self.process.tail(since_it_spoke=True)
        said = "; after its last answer it wrote" if tail else "; after its last answer it wrote nothing to its stderr"
        return WireFault(fault.reason, f"{fault.text}{said}", tail, self.tail())

    # -- opening and closing ----------------------------------------------------------------
    async def open(self) -> Listing:
        """Handshake and list of tools; a `WireFault` when there is none in time, a `ToolError` when it is refused."""
        ready: asyncio.Future[Listing] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._own(ready), name=f"owner of {self.server.name}")
        try:
            await asyncio.wait({ready}, timeout=self.limits.connect_timeout_s)
            if not ready.done():
                self._blame(WireFault(UNAVAILABLE, f"did not answer within {self.limits.connect_timeout_s:g} s"))
                raise self._verdict()
            return ready.result()
        except BaseException:
            ready.cancel()
            await self.close()
            raise

    async def _own(self, ready: asyncio.Future[Listing]) -> None:
        """Enter, list, wait, leave: all in this task."""
        try:
            async with self._new_client() as client:
                self.listing = await self._list(client.session)
                self._session = client.session
                self._remember(client)
                if not ready.done():
                    ready.set_result(self.listing)
                await self._stop.wait()
                self._session = None
        except asyncio.CancelledError:
            self._settle(ready, self._verdict())
        except Exception as error:  # noqa: BLE001 - whatever a foreign server made of the SDK becomes a typed fault
            refused = next((each for each in leaves(error) if isinstance(each, ToolError | WireFault)), None)
            self._settle(ready, refused or self._verdict(error))
        finally:
            self._session = None

    def _settle(self, ready: asyncio.Future[Listing], problem: BaseException) -> None:
        if isinstance(problem, WireFault):
            self._blame(problem)
        if not ready.done():
            ready.set_exception(problem)
            ready.exception()  # seen: whoever waited may have gone

    def _verdict(self, error: BaseException | None = None) -> WireFault:
        return self.fault or WireFault(UNAVAILABLE, words(error) if error is not None else "was given up")

    def _blame(self, fault: WireFault) -> None:
        self.fault = self.fault or fault

    def retire(self) -> None:
        """No new calls from here on."""
        self.retired = True

    async def close(self) -> None:
        """Leave the client, insist after the limit; nothing of the server is left on return."""
        self.retire()
        self._stop.set()
        if self._owner is None:
            return
        if self.fault is not None or self._is_stuck():
            self._owner.cancel()
        patience = 2 * self.limits.shutdown_s + 0.5
        for _ in range(2):
            await asyncio.wait({self._owner}, timeout=patience)
            if self._owner.done():
                break
            self._owner.cancel()
        for stray in list(self._strays):
            stray.cancel()
        if self.process is not None:
            await self.process.end(0.0)

    def _is_stuck(self) -> bool:
        """Whether a call was given up or is under way: nobody waits for such a server to say goodbye."""
        return self.in_flight > 0 or self._gave_up

    def _remember(self, client: Any) -> None:
        if self.era.mode == "auto":
            self.era.discovered = client.session.discover_result
            self.era.mode = "legacy" if self.era.discovered is None else client.protocol_version

    # -- where the server is ------------------------------------------------------------------
    def _new_client(self) -> Any:
        return sdk().Client(
            self._transport(), mode=self.era.mode, prior_discover=self.era.discovered, cache=None,
            message_handler=self._notice, client_info=sdk().me,
        )  # fmt: skip

    def _transport(self) -> Any:
        if self.server.command:
            return self._over_process()
        return self._over_http() if self.server.url is not None else self.server.in_memory()

    @contextlib.asynccontextmanager
    async def _over_process(self) -> AsyncIterator[Any]:
        self.process = ServerProcess(self.server, self.limits, self._denied)
        bridge = self._bridge = Bridge(self.process, self.limits, self._blame, self._list_changed)
        async with bridge.streams(lambda: 0.0 if self.fault or self._is_stuck() else self.limits.shutdown_s) as streams:
            yield streams

    @contextlib.asynccontextmanager
    async def _over_http(self) -> AsyncIterator[Any]:
        """The SDK's HTTP transport on shared, capped connections; cookies and sessions are this client's own."""
        tools, limits = sdk(), self.limits
        token = os.environ.get(self.server.token_env or "")
        client = tools.httpx.AsyncClient(
            transport=tools.capped(self._http, limits.max_line_bytes, self._flooded),
            headers={"Authorization": f"Bearer {token}"} if token else None,
            timeout=tools.httpx.Timeout(limits.connect_timeout_s, read=None),
        )
        async with client:
            connected = tools.streamable_http_client(
                self.server.url, http_client=client, max_sse_event_size=limits.max_line_bytes
            )
            async with connected as streams:
                yield streams

    def _flooded(self, size: int) -> None:
        self._blame(WireFault(FLOODED, f"sent more than {size} bytes in one answer"))

    async def _notice(self, message: Any) -> None:
        if type(message).__name__ == "ToolListChangedNotification":
            self._list_changed()

    def _list_changed(self) -> None:
        self.stale = True

    # -- asking ---------------------------------------------------------------------------------
    async def _list(self, session: Any) -> Listing:
        """Every page of the server's tools, as far as the run wants them."""
        offers, cursor = list[Offer](), ""
        self.stale = False
        for _ in range(MAX_PAGES):
            params = sdk().types.PaginatedRequestParams(cursor=cursor) if cursor else None
            page = await session.list_tools(params=params)
            offers += [Offer(tool.name, tool.description or "", tool.input_schema) for tool in page.tools]
            cursor = page.next_cursor or ""
            if not cursor:
                return listing_of(self.server, offers)
        raise WireFault(PROTOCOL, f"lists tools on more than {MAX_PAGES} pages")

    async def list_again(self, timeout_s: float) -> Listing:
        """The list of tools as it is now; a `WireFault` when it cannot be had."""
        return await self._within(self._list(self._session), timeout_s, "its list of tools")

    async def call(self, tool: str, arguments: Mapping[str, Any], timeout_s: float) -> McpResult:
        """One answer. A `WireFault` when there is none; `Refused` when the server finds the arguments wrong."""
        if self._session is None or self.fault is not None:
            raise self.fault or WireFault(CRASHED, "is gone")
        self.called.add(tool)
        if self._bridge is not None:
            version = self._session.protocol_version
            answer = await self._within(self._bridge.ask(tool, arguments), timeout_s, tool)
            try:
                return said(call_result(answer, version))
            except WireFault:
                raise
            except Exception as error:
                raise self._translated(error) from error
        types = sdk().types
        request = types.CallToolRequest(params=types.CallToolRequestParams(name=tool, arguments=dict(arguments)))
        # Not `session.call_tool`: that compiles and runs the server's own output schema, patterns and all.
        asked = self._session.send_request(request, types.CallToolResult)
        return said(await self._within(asked, timeout_s, tool))

    async def _within(self, asked: Awaitable[T], timeout_s: float, what: str) -> T:
        """Wait for an answer, but never longer than this; a fault of the server is a `WireFault`."""
        task = asyncio.ensure_future(asked)
        self.in_flight += 1
        try:
            await asyncio.wait({task}, timeout=max(0.0, timeout_s))
            if not task.done():
                self.retire()
                raise WireFault(TIMEOUT, f"did not answer {printable(what)} within {timeout_s:.3g} s")
            return task.result()
        except (WireFault, ToolError):
            raise
        except Exception as error:  # whatever a foreign server made of the SDK becomes a typed fault
            raise self._translated(error) from error
        finally:
            self.in_flight -= 1
            if not task.done():
                self._gave_up = True
                self._strays.add(task)
                task.add_done_callback(self._forget)
                task.cancel()

    def _forget(self, task: asyncio.Future[Any]) -> None:
        self._strays.discard(task)
        if not task.cancelled():
            task.exception()

    def _translated(self, error: Exception) -> Exception:
        """What the SDK raised, as a fault with its reason, or as the tool's own word on its arguments."""
        code = getattr(error, "code", None)
        if self.fault is None and code == INVALID_PARAMS:
            return Refused(str(error))
        if self.fault is None and code == CLOSED:
            self._blame(WireFault(CRASHED, "closed the connection"))
        if self.fault is not None:
            return self.fault
        reason = {INTERNAL: CRASHED, TIMED_OUT: TIMEOUT}.get(code or 0, PROTOCOL)
        if reason != CRASHED:
            self.retire()  # an expired session, or something else that the next call would meet again
        return WireFault(reason, f"failed: {words(error)}")
