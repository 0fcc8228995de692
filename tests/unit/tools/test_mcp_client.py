"""Calls over a connection in this process: answers, refusals, errors, deadlines, retries, isolation."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import ToolError, ToolFailedError
from surefoot.records import Task
from surefoot.tools.mcp import toolkit as mcp_client
from surefoot.tools.mcp.toolkit import MCPToolkit, Server, ServerLimits

pytest.importorskip("mcp", reason="needs the mcp extra")
pytestmark = pytest.mark.mcp
TASK = Task(id="t", prompt="p")
AMPLE = 60.0


def counter(log: list[str] | None = None) -> Callable[[], Any]:
    """A factory of servers that count what they were asked."""

    def make() -> Any:
        from mcp.server import MCPServer

        server, seen = MCPServer("counter"), list[str]()

        @server.tool()
        async def note(text: str) -> str:
            """Keeps a text and says all it has."""
            seen.append(text)
            if log is not None:
                log.append(text)
            return " ".join(seen)

        @server.tool()
        async def fail() -> str:
            """Always an error."""
            from mcp.server.mcpserver.exceptions import ToolError as Said

            raise Said("file not found")

        @server.tool()
        async def hang() -> str:
            """Never answers."""
            await asyncio.Event().wait()
            return ""

        @server.tool()
        def blocking(text: str) -> str:
            """Runs on a thread."""
            return text.upper()

        @server.tool(structured_output=False)
        async def picture() -> list[Any]:
            """Not text."""
            from mcp.server.mcpserver import Image

            return ["a text", Image(data=b"123", format="png")]

        return server

    return make


@contextmanager
def kit_of(*servers: Server, **settings: Any) -> Iterator[MCPToolkit]:
    kit = MCPToolkit(servers, **settings)
    try:
        yield kit
    finally:
        kit.close()


def test_a_call_is_answered_and_an_error_of_the_tool_is_an_answer() -> None:
    with kit_of(Server("c", in_memory=counter())) as kit:
        box = kit.open(TASK, "train/0", 0)
        assert box.call("c__note", {"text": "a"}, AMPLE).text == "a"
        failed = box.call("c__fail", {}, AMPLE)
        assert (failed.outcome, "file not found" in failed.text) == ("error", True)
        assert box.call("c__blocking", {"text": "a"}, AMPLE).text == "A"
        assert "[image image/png: not shown]" in box.call("c__picture", {}, AMPLE).text
        assert box.reward() is None
        assert box.opening is None


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("c__missing", {}, "unknown_tool"),
        ("note", {"text": "x"}, "unknown_tool"),
        ("c__note", {}, "required property"),
        ("c__note", {"text": 1}, "not of type"),
        ("x\u202e", {}, "x\\\\u202e"),
    ],
)
def test_what_the_model_got_wrong_is_told_and_not_sent(name: str, arguments: dict[str, Any], says: str) -> None:
    log: list[str] = []
    with kit_of(Server("c", in_memory=counter(log))) as kit:
        answer = kit.open(TASK, "train/0", 0).call(name, arguments, AMPLE)
    assert answer.outcome == "refused"
    assert says in answer.text
    assert log == []


def test_a_call_that_hangs_is_over_at_its_deadline_and_others_go_on() -> None:
    with kit_of(Server("c", in_memory=counter()), Server("d", in_memory=counter())) as kit:
        box = kit.open(TASK, "train/0", 0)
        box.call("c__note", {"text": "connects"}, AMPLE)
        with pytest.raises(ToolFailedError, match="did not answer") as caught:
            box.call("c__hang", {}, 0.2)
        assert caught.value.reason == "tool_timeout"
        assert box.call("d__note", {"text": "still here"}, AMPLE).text == "still here"
        assert kit.open(TASK, "train/1", 0).call("c__note", {"text": "fresh"}, AMPLE).text == "fresh"
        assert kit.counts["tool_timeout"] == 1


def test_the_limit_of_the_toolkit_holds_even_when_more_time_is_given() -> None:
    with kit_of(Server("c", in_memory=counter()), limits=ServerLimits(call_timeout_s=0.05)) as kit:
        with pytest.raises(ToolFailedError):
            kit.open(TASK, "train/0", 0).call("c__hang", {}, AMPLE)


def test_state_of_one_rollout_is_never_seen_by_another() -> None:
    with kit_of(Server("c", in_memory=counter(), warm=2)) as kit:
        boxes = [kit.open(TASK, f"train/{i}", 0) for i in range(5)]
        for i, box in enumerate(boxes):
            assert box.call("c__note", {"text": f"canary{i}"}, AMPLE).text == f"canary{i}"
        for i, box in enumerate(boxes):
            assert box.call("c__note", {"text": "more"}, AMPLE).text == f"canary{i} more"
            box.close()
            box.close()


def test_planted_bug_a_connection_used_twice_shows_the_canary(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    take = mcp_client.Pool.take

    async def reuse(pool: Any, timeout_s: float) -> Any:
        if not kept:
            kept.append(await take(pool, timeout_s))
        return kept[0]

    monkeypatch.setattr(mcp_client.Pool, "take", reuse)
    with kit_of(Server("c", in_memory=counter())) as kit:
        kit.open(TASK, "train/0", 0).call("c__note", {"text": "canary"}, AMPLE)
        assert "canary" in kit.open(TASK, "train/1", 0).call("c__note", {"text": "x"}, AMPLE).text


def test_a_shared_server_has_as_many_connections_as_declared_and_the_least_busy_is_used() -> None:
    made: list[Any] = []

    def make() -> Any:
        made.append(counter()())
        return made[-1]

    with kit_of(Server("c", in_memory=make, isolation="shared", connections=3)) as kit:
        threads = [threading.Thread(target=_hang, args=(kit,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(made) == 3


def _hang(kit: MCPToolkit) -> None:
    with pytest.raises(ToolFailedError):
        kit.open(TASK, "train/0", 0).call("c__hang", {}, 0.5)


def test_more_calls_than_the_limit_wait_and_are_overloaded_at_their_deadline() -> None:
    with kit_of(Server("c", in_memory=counter(), isolation="shared"), limits=ServerLimits(concurrency=1)) as kit:
        kit.start()
        begun = threading.Event()
        holder = threading.Thread(target=lambda: (begun.set(), _hang(kit)))
        holder.start()
        begun.wait()
        reasons = set()
        while holder.is_alive():
            try:
                kit.open(TASK, "train/1", 0).call("c__note", {"text": "x"}, 0.02)
            except ToolFailedError as error:
                reasons.add(error.reason)
        holder.join()
    assert reasons == {"tool_overloaded"}


def test_names_pins_and_specs_are_fixed_when_the_run_begins() -> None:
    with kit_of(Server("c", in_memory=counter(), tools=("note",))) as kit:
        assert not kit.started
        [spec] = kit.specs
        assert (spec.name, spec.description) == ("c__note", "Keeps a text and says all it has.")
        pins = kit.pins
    with kit_of(Server("c", in_memory=counter(), tools=("note",)), pins=pins) as kit:
        kit.start()
    with kit_of(Server("c", in_memory=counter(), tools=("fail",)), pins=pins) as kit:
        with pytest.raises(ToolError, match="is pinned to"):
            kit.start()


def test_a_server_that_comes_back_with_other_tools_stops_the_run() -> None:
    made: list[Any] = []

    def make() -> Any:
        server = counter()()
        made.append(server)
        if len(made) > 1:
            server.remove_tool("fail")
        return server

    with kit_of(Server("c", in_memory=make)) as kit:
        kit.start()
        box = kit.open(TASK, "train/0", 0)
        with pytest.raises(ToolError, match="'fail' is missing now") as caught:
            box.call("c__note", {"text": "x"}, AMPLE)
        assert not isinstance(caught.value, ToolFailedError)
        with pytest.raises(ToolError, match="'fail' is missing now"):
            kit.open(TASK, "train/1", 0)


@pytest.mark.parametrize(
    ("servers", "pins", "says"),
    [
        ([], {}, "at least one"),
        ([Server("a", command=("x",)), Server("a", command=("y",))], {}, "name of its own"),
        ([Server("a", command=("x",))], {"b": "0"}, "'b', which is pinned"),
    ],
)
def test_servers_and_pins_that_do_not_fit_are_refused(servers: list[Server], pins: dict[str, str], says: str) -> None:
    with pytest.raises(ToolError, match=says):
        MCPToolkit(servers, pins=pins)


def test_after_close_a_call_fails_by_name_and_nothing_starts_again() -> None:
    with kit_of(Server("c", in_memory=counter())) as kit:
        box = kit.open(TASK, "train/0", 0)
        box.call("c__note", {"text": "x"}, AMPLE)
        names = {thread.name for thread in threading.enumerate()}
        assert "surefoot-mcp" in names
    assert "surefoot-mcp" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(ToolFailedError) as caught:
        box.call("c__note", {"text": "x"}, AMPLE)
    assert caught.value.reason == "tool_unavailable"
    box.close()
    with pytest.raises(ToolError, match="was closed"):
        kit.open(TASK, "train/1", 0)


def test_a_server_s_last_words_are_not_written_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, logs = tmp_path / "somebody's", tmp_path / "logs"
    logs.mkdir()
    target.write_text("theirs\n")
    (logs / "clock.log").symlink_to(target)
    toolkit = MCPToolkit([Server("clock", command=("true",))], log_dir=logs)
    toolkit._log("clock", "last words\n")
    assert target.read_text() == "theirs\n"
    assert toolkit.counts["log_not_written"] == 1
    monkeypatch.setattr(mcp_client, "plain_descriptor", lambda path, flags: os.open(path, flags & ~os.O_NOFOLLOW))
    toolkit._log("clock", "last words\n")
    assert target.read_text() == "theirs\nlast words\n", "planted: without the defence it is"
