"""The same tools over HTTP on loopback: fresh sessions, tokens, floods, a server that is gone."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from surefoot.errors import ToolError, ToolFailedError
from surefoot.records import Task
from surefoot.tools.mcp import sdk
from surefoot.tools.mcp.toolkit import MCPToolkit, Server, ServerLimits

pytest.importorskip("mcp", reason="needs the mcp extra")
pytestmark = pytest.mark.mcp
TASK = Task(id="t", prompt="p")
AMPLE = 60.0
TOOL = {
    "name": "say",
    "description": "Says.",
    "inputSchema": {"type": "object", "properties": {"how": {"type": "string"}}},
}


class Handler(BaseHTTPRequestHandler):
    """MCP over HTTP in the old form, by hand."""

    protocol_version = "HTTP/1.1"
    sessions = 0
    doors: set[Any] = set()
    seen_tokens: set[str | None] = set()

    def log_message(self, *args: Any) -> None: ...

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        type(self).doors.add(self.client_address)
        type(self).seen_tokens.add(self.headers.get("authorization"))
        method, number = request.get("method"), request.get("id")
        if method == "initialize":
            type(self).sessions += 1
            spoken, info = request["params"]["protocolVersion"], {"name": "h", "version": "0"}
            self.answer(number, {"protocolVersion": spoken, "capabilities": {"tools": {}}, "serverInfo": info})
        elif method == "tools/list":
            self.answer(number, {"tools": [TOOL]})
        elif method == "tools/call":
            self.call(number, request["params"]["arguments"].get("how"))
        elif number is None:
            self.reply(202, b"")
        else:
            body = {"jsonrpc": "2.0", "id": number, "error": {"code": -32601, "message": "no"}}
            self.reply(200, json.dumps(body).encode())

    def call(self, number: int, how: str | None) -> None:
        if how == "flood":
            self.answer(number, {"content": [{"type": "text", "text": "x" * 3_000_000}]})
        elif how == "not json":
            self.reply(200, b"<html>it works</html>")
        elif how == "gone":
            self.close_connection = True
            self.connection.close()
        elif how == "500":
            self.reply(500, b"oops")
        elif how == "hang":
            self.server.stopping.wait()  # type: ignore[attr-defined]
        else:
            self.answer(number, {"content": [{"type": "text", "text": "hello"}]})

    def answer(self, number: int, result: dict[str, Any]) -> None:
        self.reply(200, json.dumps({"jsonrpc": "2.0", "id": number, "result": result}).encode())

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def served() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.stopping = threading.Event()  # type: ignore[attr-defined]
    server.handle_error = lambda *a: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/mcp"
    finally:
        server.stopping.set()  # type: ignore[attr-defined]
        server.shutdown()
        thread.join()
        server.server_close()


def test_over_http_answers_come_floods_and_failures_are_typed_and_the_token_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_TOOL_TOKEN", "s3cr3t-token")
    with served() as url:
        begun = Handler.sessions
        kit = MCPToolkit([Server("h", url=url, token_env="MY_TOOL_TOKEN")], ServerLimits(shutdown_s=0.5))
        try:
            assert kit.open(TASK, "train/0", 0).call("h__say", {}, AMPLE).text == "hello"
            assert kit.open(TASK, "train/1", 0).call("h__say", {}, AMPLE).text == "hello"
            assert Handler.sessions == begun + 3  # one at the start, one for each rollout
            assert Handler.seen_tokens == {"Bearer s3cr3t-token"}
            reasons = {}
            for how in ("flood", "not json", "gone", "500"):
                with pytest.raises(ToolFailedError) as caught:
                    kit.open(TASK, f"train/{how}", 0).call("h__say", {"how": how}, AMPLE)
                reasons[how] = caught.value.reason
                assert "s3cr3t-token" not in str(caught.value)
            with pytest.raises(ToolFailedError) as caught:
                kit.open(TASK, "train/hang", 0).call("h__say", {"how": "hang"}, 0.3)
            assert caught.value.reason == "tool_timeout"
        finally:
            kit.close()
    assert reasons["flood"] == "tool_flooded"
    assert set(reasons.values()) <= {"tool_flooded", "tool_crashed", "tool_protocol"}


@pytest.mark.parametrize(("idle_s", "kept"), [(0.2, False), (60.0, True)], ids=["idle too long", "planted: kept"])
def test_a_connection_that_was_idle_for_long_is_not_used_again(
    monkeypatch: pytest.MonkeyPatch, idle_s: float, kept: bool
) -> None:
    assert sdk.KEEP_IDLE_S < 5.0, "common servers close theirs after five seconds"
    monkeypatch.setattr(sdk, "KEEP_IDLE_S", idle_s)
    with served() as url:
        kit = MCPToolkit([Server("h", url=url)], ServerLimits(shutdown_s=0.5))
        try:
            box = kit.open(TASK, "train/0", 0)
            box.call("h__say", {}, AMPLE)
            known = set(Handler.doors)
            time.sleep(0.5)
            Handler.doors.clear()
            box.call("h__say", {}, AMPLE)
            used = set(Handler.doors)
        finally:
            kit.close()
    assert len(used) == 1
    assert (used <= known) == kept


def test_a_server_that_is_not_there_is_refused_at_the_start() -> None:
    kit = MCPToolkit([Server("h", url="http://127.0.0.1:9/mcp")], ServerLimits(connect_timeout_s=20))
    with pytest.raises(ToolError, match="tool server h"):
        kit.start()
    kit.close()
