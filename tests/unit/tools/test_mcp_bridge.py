"""Between the SDK and a process: who is heard, what goes round the SDK, and who is not left waiting."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from surefoot.records import Task
from surefoot.tools.mcp import stdio
from surefoot.tools.mcp.lines import CRASHED, PROTOCOL, WireFault
from surefoot.tools.mcp.servers import Server, ServerLimits
from surefoot.tools.mcp.stdio import Bridge, Pipe, line_of
from surefoot.tools.mcp.toolkit import LoopThread, MCPToolkit

pytest.importorskip("mcp", reason="needs the mcp extra")
pytestmark = pytest.mark.mcp


class Gone:
    """A process that ended, whose keeper needs a moment to say so."""

    def __init__(self) -> None:
        self.killed = asyncio.Event()

    async def messages(self) -> AsyncIterator[Any]:
        await self.killed.wait()
        for nothing in ():
            yield nothing

    def send(self, data: bytes) -> bool:
        raise WireFault(CRASHED, "closed its input")

    async def write(self, data: bytes) -> None:
        self.send(data)

    async def drain_stderr(self) -> None: ...

    async def exit_status(self, patience_s: float) -> int | None:
        await asyncio.sleep(0.05)
        return 9

    async def end(self, grace_s: float) -> None:
        self.kill()

    def kill(self) -> None:
        self.killed.set()


async def second_call() -> tuple[list[str], str]:
    """What is blamed, and what becomes of a call that waits behind the one that found the pipe closed."""
    from mcp.shared.message import SessionMessage

    blamed: list[WireFault] = []
    bridge = Bridge(Gone(), ServerLimits(), blamed.append, lambda: None)  # type: ignore[arg-type]
    message: Any = SessionMessage(SimpleNamespace(method="x", id=1, model_dump_json=lambda **_: "{}"))  # type: ignore[arg-type]
    async with bridge.streams(lambda: 0.0) as (_, theirs):
        await theirs.send(message)
        try:
            async with asyncio.timeout(2.0):
                await theirs.send(message)
            how = "sent"
        except TimeoutError:
            how = "left to its deadline"
        except Exception as error:
            how = type(error).__name__
    return [fault.text for fault in blamed], how


def test_a_call_behind_one_that_found_the_server_gone_ends_too_and_the_status_is_told() -> None:
    blamed, how = asyncio.run(second_call())
    assert blamed[0] == "ended with status 9"
    assert how in ("BrokenResourceError", "ClosedResourceError")


def test_a_call_round_the_sdk_of_a_server_that_is_gone_ends_at_once_with_its_status() -> None:
    async def story() -> WireFault:
        bridge = Bridge(Gone(), ServerLimits(), lambda fault: None, lambda: None)  # type: ignore[arg-type]
        async with bridge.streams(lambda: 0.0):
            with pytest.raises(WireFault) as caught:
                async with asyncio.timeout(2.0):
                    await bridge.ask("echo", {})
        return caught.value

    fault = asyncio.run(story())
    assert (fault.reason, fault.text) == (CRASHED, "ended with status 9")


# -- calls that go round the SDK --------------------------------------------------------------------


class Talking:
    """A process that is told what to say, and remembers what it was told."""

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []
        self.says: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def messages(self) -> AsyncIterator[Any]:
        while True:
            message = await self.says.get()
            yield message, len(json.dumps(message))

    def send(self, data: bytes) -> bool:
        self.heard.append(json.loads(data))
        return True

    async def write(self, data: bytes) -> None:
        self.send(data)

    async def sent(self) -> None: ...

    async def drain_stderr(self) -> None: ...

    def count_unasked(self, size: int) -> None: ...

    async def end(self, grace_s: float) -> None: ...

    def kill(self) -> None: ...


def told(story: Callable[[Bridge, Talking, Any, Any], Any]) -> tuple[Any, list[WireFault]]:
    """What a story comes to, and who was blamed."""
    blamed: list[WireFault] = []

    async def run() -> Any:
        process = Talking()
        bridge = Bridge(process, ServerLimits(), blamed.append, lambda: None)  # type: ignore[arg-type]
        async with bridge.streams(lambda: 0.0) as (ours, theirs):
            async with asyncio.timeout(5.0):
                return await story(bridge, process, ours, theirs)

    return asyncio.run(run()), blamed


def result_of(number: Any, text: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "result": {"content": [{"type": "text", "text": text}]}}


def test_a_call_says_what_the_session_says_in_every_request_and_nothing_of_one() -> None:
    from mcp.shared.message import SessionMessage
    from mcp_types import JSONRPCRequest

    meta = {"io.modelcontextprotocol/protocolVersion": "2026-07-28", "traceparent": "00-1", "progressToken": 3}

    async def story(bridge: Bridge, process: Talking, ours: Any, theirs: Any) -> Any:
        asked = JSONRPCRequest(jsonrpc="2.0", id=1, method="tools/list", params={"_meta": meta})
        await theirs.send(SessionMessage(asked))
        answers = [bridge.ask("echo", {"text": f"{n}\ud800é", "none": None}) for n in range(2)]
        first, second = (message["id"] for message in process.heard[1:])
        await process.says.put(result_of(second, "two"))
        await process.says.put(result_of(first, "one"))
        return process.heard, [(await answer).result["content"][0]["text"] for answer in answers]

    (heard, texts), blamed = told(story)
    assert (texts, blamed) == (["one", "two"], [])
    assert heard[1]["params"] == {
        "name": "echo", "arguments": {"text": "0\ud800é", "none": None},
        "_meta": {"io.modelcontextprotocol/protocolVersion": "2026-07-28"},
    }  # fmt: skip
    assert heard[1]["id"] != heard[2]["id"]
    assert min(heard[1]["id"], heard[2]["id"]) >= 1 << 30, "the SDK counts its own from 1"


def test_a_call_that_is_given_up_is_called_off_and_its_late_answer_harms_nobody() -> None:
    async def story(bridge: Bridge, process: Talking, ours: Any, theirs: Any) -> Any:
        late, kept = bridge.ask("slow", {}), bridge.ask("echo", {})
        late.cancel()
        await asyncio.sleep(0)
        numbers = [message.get("id") for message in process.heard]
        await process.says.put(result_of(numbers[0], "too late"))
        await process.says.put(result_of(numbers[1], "in time"))
        return numbers, process.heard, (await kept).result["content"][0]["text"]

    (numbers, heard, text), blamed = told(story)
    assert (text, blamed) == ("in time", [])
    assert heard[2]["method"] == "notifications/cancelled"
    assert heard[2]["params"]["requestId"] == numbers[0]


@pytest.mark.parametrize("planted", ["twice", "never asked", "as text"])
def test_planted_answer_to_a_call_that_was_not_asked_is_a_fault(planted: str) -> None:
    async def story(bridge: Bridge, process: Talking, ours: Any, theirs: Any) -> Any:
        answer = bridge.ask("echo", {})
        number = process.heard[0]["id"]
        if planted == "twice":
            await process.says.put(result_of(number, "once"))
            await answer
        wrong = {"never asked": number + 1, "as text": str(number)}.get(planted, number)
        last = bridge.ask("echo", {}) if planted == "twice" else answer
        await process.says.put(result_of(wrong, "no"))
        with pytest.raises(WireFault) as caught:
            await last
        return caught.value.reason

    reason, blamed = told(story)
    assert (reason, blamed[0].reason) == (PROTOCOL, PROTOCOL)


def test_planted_ping_under_the_number_of_a_call_is_no_answer_to_it() -> None:
    async def story(bridge: Bridge, process: Talking, ours: Any, theirs: Any) -> Any:
        answer = bridge.ask("echo", {})
        number = process.heard[0]["id"]
        await process.says.put({"jsonrpc": "2.0", "id": number, "method": "ping"})
        ping = await ours.receive()
        assert not answer.done()
        await process.says.put(result_of(number, "mine"))
        return ping.message.method, (await answer).result["content"][0]["text"]

    assert told(story) == (("ping", "mine"), [])


def test_planted_answer_that_is_no_message_is_a_fault_and_not_left_to_the_deadline() -> None:
    async def story(bridge: Bridge, process: Talking, ours: Any, theirs: Any) -> Any:
        answer = bridge.ask("echo", {})
        await process.says.put({"jsonrpc": "1.0", "id": process.heard[0]["id"], "result": 7})
        with pytest.raises(WireFault) as caught:
            await answer
        return caught.value.reason

    assert told(story)[0] == PROTOCOL


def test_a_line_is_utf_8_and_half_a_character_stays_escaped() -> None:
    assert line_of({"a": "é"}) == '{"a":"é"}\n'.encode()
    assert line_of({"a": "\ud800é"}) == b'{"a":"\\ud800\\u00e9"}\n'
    with pytest.raises(ValueError):
        line_of({"a": float("nan")})


def test_a_run_calls_a_process_round_the_sdks_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wire, with a real server: the session is asked for the list of tools, and for no call."""
    from mcp.client.session import ClientSession

    asked: list[str] = []
    real = ClientSession.send_request
    monkeypatch.setattr(
        ClientSession, "send_request",
        lambda self, request, *given, **named: (asked.append(request.method), real(self, request, *given, **named))[1],
    )  # fmt: skip
    base = Path(__file__).parents[2] / "support" / "bad_servers" / "base.py"
    server = Server("s", command=(sys.executable, "-S", "-E", str(base)), sandbox=False, isolation="shared")
    kit = MCPToolkit([server], ServerLimits(call_timeout_s=60.0, connect_timeout_s=60.0))
    try:
        kit.start()
        box = kit.open(Task(id="t", prompt="p"), "t/0/0", 0)
        with ThreadPoolExecutor(4) as pool:
            said = list(pool.map(lambda n: box.call("s__echo", {"text": f"é{n}"}, 60.0).text, range(24)))
    finally:
        kit.close()
    assert said == [f"é{n}" for n in range(24)]
    assert "tools/list" in asked
    assert "tools/call" not in asked


# -- pipes and threads ------------------------------------------------------------------------------


def test_what_does_not_fit_into_a_pipe_is_written_in_order_behind_what_came_before() -> None:
    """Whoever handed it in may have gone: no line is cut in two by another."""

    async def story() -> bytes:
        read, write = os.pipe()
        there, here = Pipe(read), Pipe(write)
        lines = [bytes([65 + n]) * 200_000 + b"\n" for n in range(5)]
        waiting = [asyncio.create_task(here.write(line)) for line in lines]
        await asyncio.sleep(0)
        waiting[1].cancel()
        got = b""
        while got.count(b"\n") < 5:
            got += await there.read()
        await asyncio.gather(*waiting, return_exceptions=True)
        for end in (there, here):
            end.close()
        assert got == b"".join(lines)
        return got

    assert len(asyncio.run(story())) == 1_000_005


def test_a_pipe_is_watched_once_and_reads_no_further_ahead_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> tuple[int, int]:
        loop, watched = asyncio.get_running_loop(), []
        real = loop.add_reader
        monkeypatch.setattr(loop, "add_reader", lambda *given: (watched.append(given), real(*given))[1])
        read, write = os.pipe()
        there = Pipe(read)
        for n in range(20):
            os.write(write, b"%d" % n)
            assert await there.read() == b"%d" % n
        most = 0
        for _ in range(8):  # nobody takes anything
            os.set_blocking(write, False)
            for _ in range(4):
                try:
                    os.write(write, b"x" * 60_000)
                except BlockingIOError:
                    break
            await asyncio.sleep(0.01)
            most = max(most, len(there._got))
        there.close()
        os.close(write)
        return len(watched), most

    watched, most = asyncio.run(story())
    assert watched == 1
    assert stdio._PIECE <= most < 2 * stdio._PIECE


def test_work_of_many_threads_is_done_each_once_and_wakes_the_loop_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = LoopThread("test")
    woken: list[Any] = []
    real = thread.loop.call_soon_threadsafe
    monkeypatch.setattr(thread.loop, "call_soon_threadsafe", lambda *given: (woken.append(given), real(*given))[1])

    async def twice(n: int) -> int:
        await asyncio.sleep(0)
        return 2 * n

    hold = threading.Event()
    busy = threading.Thread(target=lambda: thread.run(_held(hold), 30.0))
    busy.start()
    while not hold.is_set():
        time.sleep(0.001)
    with ThreadPoolExecutor(8) as pool:  # all of it is handed in while the loop is busy
        found = list(pool.map(lambda n: thread.run(twice(n), 30.0), range(8)))
    busy.join()
    assert found == [2 * n for n in range(8)]
    assert len(woken) < 1 + 8, "once for all that lies there"
    assert thread.close()


async def _held(begun: threading.Event) -> None:
    begun.set()
    time.sleep(0.3)


def test_work_that_is_late_is_cancelled_and_work_for_a_closed_loop_is_refused() -> None:
    thread = LoopThread("test")
    ended = threading.Event()

    async def endless() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    async def broken() -> None:
        raise TimeoutError("of its own")

    with pytest.raises(TimeoutError, match=r"not done after 0\.05 s"):
        thread.run(endless(), 0.05)
    assert ended.wait(5.0)
    with pytest.raises(TimeoutError, match="of its own"):
        thread.run(broken(), 5.0)
    waiting = threading.Thread(target=lambda: outcome.append(_outcome(thread, endless())))
    outcome: list[str] = []
    waiting.start()
    time.sleep(0.05)
    assert thread.close()
    waiting.join(5.0)
    assert outcome == ["the loop was closed"], "who waits at the end is not left to his patience"
    assert _outcome(thread, endless()) in ("the loop was closed", "Event loop is closed")
    assert not thread.post(endless())
    assert not thread.alive


def _outcome(thread: LoopThread, work: Any) -> str:
    try:
        thread.run(work, 60.0)
    except RuntimeError as error:
        return str(error)
    return "done"
