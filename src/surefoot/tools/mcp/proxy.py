"""An HTTP proxy outside a contained server's network, which connects it to the hosts that it was granted and no others.

    server --> 127.0.0.1:3128, all that its own network has --> proxy, in this process --> a granted host
                                                                   |
                                                                   +-- 403, counted, with the host asked for

Owns       the listening socket (made inside the server's network, handed out to us), and every connection over it.
Promises   a connection goes to a granted host and port, at the very address that was looked at; a name that leads to
           this machine or its networks is refused unless that address is granted; a name that is not granted is not
           looked up. CONNECT passes bytes on; a plain request is taken apart, read with bounds, and sent as one request
           of its own. Everything has a deadline; so many connections at a time, the others wait in the kernel. After
           `close` nothing is left but lookups that the system has not given up yet.
Never      filters what a granted host is told or answers, or looks into TLS.

Read next: `hosts.py`, what a grant covers; `http1.py`, what a request is.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import resource
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from surefoot.system.text import printable
from surefoot.tools.mcp.hosts import Address, HostGrants, address_of
from surefoot.tools.mcp.http1 import (
    HttpRequest,
    RequestRefused,
    Wire,
    body_pieces,
    read_request,
    response_head,
    unmoved,
)

PORT = 3128
"""Inside the server's own network, where nobody else has one."""
CONNECTIONS = 16
"""Of one server at a time."""
_ALL_CONNECTIONS = threading.BoundedSemaphore(max(64, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
"""Of all servers of this process. Each takes two descriptors: half of those that it may have are left for the run."""
_LOOKUPS = threading.BoundedSemaphore(16)
_PIECE = 64 * 1024
_LONGEST_ASKED, _LONGEST_READ = 120, 2000
"""Characters of what was asked for that are kept, and that are looked through for secrets before."""
_MOST_ADDRESSES = 4
_REASONS = {
    200: "Connection established", 400: "Bad Request", 403: "Forbidden", 408: "Request Timeout",
    431: "Request Header Fields Too Large", 501: "Not Implemented", 502: "Bad Gateway", 503: "Service Unavailable",
    504: "Gateway Timeout",
}  # fmt: skip


@dataclass(frozen=True)
class ProxyPatience:
    """Seconds that a proxy waits."""

    head_s: float = 10.0
    """For a whole request line with its headers."""
    lookup_s: float = 10.0
    connect_s: float = 10.0
    idle_s: float = 300.0
    """For the next bytes of either side; the call that needs them has its own, shorter deadline."""
    goodbye_s: float = 1.0
    """For a refused client to stop sending and read why."""


def proxy_variables() -> dict[str, str]:
    """What tells a program of the proxy."""
    address = f"http://127.0.0.1:{PORT}"
    upper = {"HTTP_PROXY": address, "HTTPS_PROXY": address, "ALL_PROXY": address, "NO_PROXY": ""}
    return upper | {name.lower(): value for name, value in upper.items()}


async def lookup(host: str, port: int) -> list[Address]:
    """Addresses of a name, in the system's order; an OSError when there is none.

    A thread of its own, for the system's own lookup cannot be called off; nobody waits for it at the end.
    """
    if not _LOOKUPS.acquire(blocking=False):
        raise OSError("too many names are being looked up")
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[Address]] = loop.create_future()

    def tell(found: list[Address], problem: Exception | None) -> None:
        if not answer.done():
            answer.set_result(found) if problem is None else answer.set_exception(problem)

    def ask() -> None:
        found, problem = list[Address](), None
        try:
            rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            found = [ipaddress.ip_address(row[4][0]) for row in rows]
        except (OSError, ValueError) as error:  # UnicodeError, a ValueError, for a label that is too long
            problem = OSError(str(error))
        finally:
            _LOOKUPS.release()
        with contextlib.suppress(RuntimeError):  # the loop has gone meanwhile
            loop.call_soon_threadsafe(tell, found, problem)

    try:
        threading.Thread(target=ask, name="surefoot-lookup", daemon=True).start()
    except RuntimeError as error:
        _LOOKUPS.release()
        raise OSError(str(error)) from error
    return await answer


class HostProxy:
    """Serves one server from the moment it is made, inside an event loop, until `close`.

    Args:
        listener: where the server's connections arrive; the proxy owns it.
        denied: told of each request that was refused, with whom it asked for.
        resolve: who looks names up.
    """

    def __init__(
        self, listener: socket.socket, grants: HostGrants, denied: Callable[[str], None],
        resolve: Callable[[str, int], Awaitable[list[Address]]] | None = None, patience: ProxyPatience | None = None,
    ) -> None:  # fmt: skip
        self._listener, self._grants, self._denied = listener, grants, denied
        self._resolve, self._patience = resolve or lookup, patience or ProxyPatience()
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        """Take no more connections and drop those there are. May be called twice."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._listener)
            self._listener.close()
        for task in self._tasks:
            task.cancel()

    def _listen(self) -> None:
        if not self._closed and len(self._tasks) < CONNECTIONS:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """One connection; when there are enough of them the others wait in the kernel."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor left, or a client that went before it was met
            self._loop.remove_reader(self._listener)
            self._loop.call_later(0.05, self._listen)
            return
        connection.setblocking(False)
        task = self._loop.create_task(self._serve(connection), name="surefoot-proxy")
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._served, connection))
        if len(self._tasks) >= CONNECTIONS:
            self._loop.remove_reader(self._listener)

    def _served(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        connection.close()  # here, for a task that was called off before it began closes nothing
        self._tasks.discard(task)
        self._listen()

    # -- one connection ------------------------------------------------------------------------
    async def _serve(self, connection: socket.socket) -> None:
        """One request, whatever becomes of it."""
        client = Wire(connection)
        if not _ALL_CONNECTIONS.acquire(blocking=False):
            await self._answer(client, RequestRefused(503, "too many connections of this run", denied=False))
            return
        try:
            await self._carry(client)
        except RequestRefused as refused:
            await self._answer(client, refused)
        except TimeoutError:
            await self._answer(client, RequestRefused(504, "nobody said anything for too long", denied=False))
        except OSError:  # one side has gone; the other learns it by the end
            return
        finally:
            _ALL_CONNECTIONS.release()

    async def _carry(self, client: Wire) -> None:
        request = await read_request(client, self._patience.head_s)
        if not self._grants.cover(request.host, request.port):
            raise RequestRefused(403, f"{request.asked} is not granted to this server", request.asked)
        with await self._connected(request) as upstream:
            server = Wire(upstream)
            async with _while_bytes_move(self._patience.idle_s, client, server):
                if request.tunnel:
                    await client.send(f"HTTP/1.1 200 {_REASONS[200]}\r\n\r\n".encode())
                    await _tunnel(client, server)
                else:
                    await server.send(request.forwarded())
                    await _exchange(request, client, server)

    async def _connected(self, request: HttpRequest) -> socket.socket:
        """A connection to the first address that takes one, of those that were looked at."""
        problem = "no address"
        for address in await self._addresses(request):
            family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
            upstream = socket.socket(family, socket.SOCK_STREAM)
            try:
                upstream.setblocking(False)
                async with asyncio.timeout(self._patience.connect_s):
                    await asyncio.get_running_loop().sock_connect(upstream, (str(address), request.port))
                return upstream
            except OSError as error:  # a TimeoutError is one
                upstream.close()
                problem = error.strerror or "no answer in time"
            except BaseException:
                upstream.close()
                raise
        raise RequestRefused(502, f"{request.asked} cannot be reached: {problem}", denied=False)

    async def _addresses(self, request: HttpRequest) -> list[Address]:
        literal = address_of(request.host)
        if literal is not None:
            return [literal]
        try:
            async with asyncio.timeout(self._patience.lookup_s):
                found = await self._resolve(request.host, request.port)
        except TimeoutError as error:
            raise RequestRefused(504, f"{request.asked} was not found in time", denied=False) from error
        except OSError as error:
            raise RequestRefused(502, f"{request.asked} is not known here", denied=False) from error
        allowed = [address for address in found if self._grants.allow(address, request.port)]
        if not found:
            raise RequestRefused(502, f"{request.asked} is not known here", denied=False)
        if not allowed:
            where = ", ".join(map(str, found[:_MOST_ADDRESSES]))
            raise RequestRefused(
                403, f"{request.asked} leads to an address that is not public, and not granted itself",
                f"{request.asked} at {where}",
            )  # fmt: skip
        return allowed[:_MOST_ADDRESSES]

    async def _answer(self, client: Wire, refused: RequestRefused) -> None:
        """Count it; tell the client why, and let it read that before the connection goes."""
        if refused.denied:
            self._denied(printable(refused.asked[:_LONGEST_READ])[:_LONGEST_ASKED])
        if client.told:  # in the middle of an answer there is no room for another
            return
        text = f"surefoot: {printable(refused.why[:_LONGEST_READ])[:400]}\n".encode()
        head = (
            f"HTTP/1.1 {refused.status} {_REASONS[refused.status]}\r\nContent-Type: text/plain; charset=utf-8\r\n"
            f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n"
        )
        with contextlib.suppress(OSError):  # a client that does not want to know
            async with asyncio.timeout(self._patience.goodbye_s):
                await client.send(head.encode() + text)
                client.end()
                while await client.some(_PIECE):
                    pass  # closing over what was not read would take the answer back


# -- what passes through -----------------------------------------------------------------------------
@contextlib.asynccontextmanager
async def _while_bytes_move(idle_s: float, *wires: Wire) -> AsyncIterator[None]:
    """A TimeoutError when none of the wires has moved a byte for so long."""
    clock = asyncio.get_running_loop().time
    async with asyncio.timeout(idle_s) as deadline:

        def alive() -> None:
            if not deadline.expired():
                deadline.reschedule(clock() + idle_s)

        for wire in wires:
            wire.alive = alive
        try:
            yield
        finally:
            for wire in wires:
                wire.alive = unmoved


async def _tunnel(client: Wire, server: Wire) -> None:
    """Bytes both ways, until both sides have ended, or one has gone."""
    tasks = [asyncio.create_task(_pass_on(client, server)), asyncio.create_task(_pass_on(server, client))]
    try:
        await asyncio.gather(*tasks)
    finally:
        await _call_off(tasks)


async def _pass_on(source: Wire, target: Wire) -> None:
    """Bytes as they come, until the source ends; then the target hears an end, too."""
    while piece := await source.some(_PIECE):
        await target.send(piece)
    target.end()


async def _exchange(request: HttpRequest, client: Wire, server: Wire) -> None:
    """The body one way and the answer the other; over when the answer is, which may come before the body has gone."""
    tasks = [
        asyncio.create_task(_send_body(request, client, server)),
        asyncio.create_task(_answer_from(server, client)),
    ]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[1].done():
            await tasks[0]
        await tasks[1]
    finally:
        await _call_off(tasks)


async def _send_body(request: HttpRequest, client: Wire, server: Wire) -> None:
    """The body that the request announced: what else the client says is not read."""
    async for piece in body_pieces(request, client):
        try:
            await server.send(piece)
        except OSError:  # it has heard enough, and may say so in its answer
            return


async def _answer_from(server: Wire, client: Wire) -> None:
    """The answer's head, after which the connection closes, and the rest as it comes."""
    final = False
    while not final:
        head, final = await response_head(server)
        await client.send(head)
    while piece := await server.some(_PIECE):
        await client.send(piece)


async def _call_off(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
