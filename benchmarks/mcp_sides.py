"""Both sides of `mcp_calls.py`: the same calls through our toolkit and through the SDK's own client, and their servers.

python benchmarks/mcp_sides.py PORT      be the HTTP server that both sides call
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from method import Sample

from surefoot.records import Task
from surefoot.tools.mcp.toolkit import MCPToolkit, Server, ServerLimits

SCRIPT = Path(__file__).resolve().parent.parent / "tests" / "support" / "bad_servers" / "base.py"
TASK = Task(id="bench", prompt="call it")
WORKERS = 8
AMPLE_S = 120.0
LIMITS = ServerLimits(call_timeout_s=AMPLE_S, connect_timeout_s=AMPLE_S, concurrency=64, shutdown_s=1.0)


# -- servers ---------------------------------------------------------------------------------
def echo_server() -> Any:
    """One tool that says it again."""
    from mcp.server import MCPServer

    server = MCPServer("echo", log_level="ERROR")

    @server.tool(structured_output=False)
    async def echo(text: str) -> str:
        """Says it again."""
        return text

    return server


@contextmanager
def http_server() -> Iterator[str]:
    """The same in a process of its own; its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, __file__, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        give_up = time.monotonic() + 60
        while time.monotonic() < give_up:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.terminate()
        process.wait()


def serve(port: int) -> None:
    """What the server process runs; it keeps idle connections, or a client that waits its turn meets a closed one."""
    import uvicorn

    app = echo_server().streamable_http_app(stateless_http=True, host="127.0.0.1")
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", timeout_keep_alive=600)


def command() -> tuple[str, ...]:
    return sys.executable, "-S", "-E", str(SCRIPT)


@dataclass(frozen=True)
class Place:
    """One kind of transport, as both sides need it."""

    kind: str
    url: str = ""

    def ours(self) -> Server:
        if self.kind == "memory":
            return Server("s", in_memory=echo_server)
        return Server("s", url=self.url) if self.kind == "http" else Server("s", command=command())

    def theirs(self) -> Any:
        """What the SDK's client is given."""
        from mcp import StdioServerParameters

        if self.kind == "memory":
            return echo_server()
        return (
            self.url if self.kind == "http" else StdioServerParameters(command=command()[0], args=list(command()[1:]))
        )


# -- the work ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Plan:
    """So many sessions, each called so many times."""

    sessions: int
    rounds: int

    @property
    def calls(self) -> int:
        return self.sessions * self.rounds

    def texts(self) -> list[tuple[int, str]]:
        return [(i % self.sessions, f"call {i}") for i in range(self.calls)]


def plan_for(sessions: int, quick: bool) -> Plan:
    least = 32 if quick else 512
    return Plan(sessions, max(1, min(64, least // sessions)))


def proof(answers: Sequence[str]) -> dict[str, Any]:
    """The same work on both sides: as many calls, the same answers in the same order."""
    return {"calls": len(answers), "answers": hashlib.sha256("\n".join(answers).encode()).hexdigest()}


def spread(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    at = lambda share: ordered[min(len(ordered) - 1, int(share * len(ordered)))]  # noqa: E731 - two lines below
    return {"p50_ms": at(0.5) * 1000, "p99_ms": at(0.99) * 1000}


def run_ours(place: Place, plan: Plan) -> Sample:
    """Sessions through the toolkit, opened first; the clock runs for the calls."""
    kit = MCPToolkit([place.ours()], LIMITS)
    try:
        kit.start()
        boxes = [kit.open(TASK, f"bench/{i}", 0) for i in range(plan.sessions)]
        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(lambda box: box.call("s__echo", {"text": "hello"}, AMPLE_S), boxes))
            took: list[float] = []

            def one(item: tuple[int, str]) -> str:
                began = time.perf_counter()
                answer = boxes[item[0]].call("s__echo", {"text": item[1]}, AMPLE_S).text
                took.append(time.perf_counter() - began)
                return answer

            began = time.perf_counter()
            answers = list(pool.map(one, plan.texts()))
            seconds = time.perf_counter() - began
        for box in boxes:
            box.close()
    finally:
        kit.close()
    return Sample("ours", seconds, proof(answers), spread(took))


def run_client_per_call(place: Place, plan: Plan) -> Sample:
    """A new client for every call, so many at a time."""
    from mcp import Client

    where = place.theirs()  # one server in this process for all: only the clients are new

    async def one(item: tuple[int, str]) -> str:
        async with Client(where, cache=None) as client:
            return text_of(await client.call_tool("echo", {"text": item[1]}))

    seconds, answers, took = asyncio.run(in_turn(one, plan.texts()))
    return Sample("client per call", seconds, proof(answers), spread(took))


def run_session_per_rollout(place: Place, plan: Plan) -> Sample:
    """One client per session, opened first, called from one event loop."""

    async def story() -> tuple[float, list[str], list[float]]:
        async with clients(place, plan.sessions) as open_ones:

            async def one(item: tuple[int, str]) -> str:
                return text_of(await open_ones[item[0]].call_tool("echo", {"text": item[1]}))

            for client in open_ones:
                await client.call_tool("echo", {"text": "hello"})
            return await in_turn(one, plan.texts())

    seconds, answers, took = asyncio.run(story())
    return Sample("session per rollout", seconds, proof(answers), spread(took))


async def in_turn(
    one: Callable[[tuple[int, str]], Any], items: Sequence[tuple[int, str]]
) -> tuple[float, list[str], list[float]]:
    """The items, `WORKERS` at a time; seconds, answers in order, and the seconds of each."""
    slots, took = asyncio.Semaphore(WORKERS), list[float]()

    async def timed(item: tuple[int, str]) -> str:
        async with slots:
            began = time.perf_counter()
            answer: str = await one(item)
            took.append(time.perf_counter() - began)
            return answer

    began = time.perf_counter()
    answers = await asyncio.gather(*(timed(item) for item in items))
    return time.perf_counter() - began, list(answers), took


@asynccontextmanager
async def clients(place: Place, n: int) -> AsyncIterator[list[Any]]:
    """`n` clients of the SDK, each entered and left by a task of its own."""
    from mcp import Client

    ready: list[asyncio.Future[Any]] = [asyncio.get_running_loop().create_future() for _ in range(n)]
    stop, starts = asyncio.Event(), asyncio.Semaphore(8)

    async def own(future: asyncio.Future[Any]) -> None:
        async with contextlib.AsyncExitStack() as stack:
            async with starts:
                client = await stack.enter_async_context(Client(place.theirs(), cache=None))
            future.set_result(client)
            await stop.wait()

    owners = [asyncio.create_task(own(future)) for future in ready]
    try:
        yield list(await asyncio.gather(*ready))
    finally:
        stop.set()
        await asyncio.gather(*owners)


def text_of(result: Any) -> str:
    return str(result.content[0].text)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
