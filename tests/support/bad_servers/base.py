"""A tool server in plain Python, without any SDK: what the bad servers beside it spoil.

python base.py         a healthy server with one tool, `echo`
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

ECHO = {
    "name": "echo",
    "description": "Says it again.",
    "inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}


def send(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def write(raw: bytes) -> None:
    """Bytes as they are, to standard output."""
    sys.stdout.flush()
    sys.stdout.buffer.write(raw)
    sys.stdout.buffer.flush()


def answer(number: Any, result: dict[str, Any]) -> None:
    send({"id": number, "result": result})


def text(said: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": said}]}


def echo(request: dict[str, Any]) -> None:
    answer(request["id"], text(request["params"]["arguments"]["text"]))


def serve(
    call: Callable[[dict[str, Any]], None] = echo,
    tools: list[dict[str, Any]] | None = None,
    version: str | None = None,
    after_list: Callable[[], None] = lambda: None,
) -> None:
    """Shake hands, list tools, hand calls to `call`, until the input ends."""
    for line in sys.stdin:
        request = json.loads(line)
        method, number = request.get("method"), request.get("id")
        if method == "initialize":
            spoken = version or request["params"]["protocolVersion"]
            info = {"name": "bad", "version": "0"}
            answer(number, {"protocolVersion": spoken, "capabilities": {"tools": {}}, "serverInfo": info})
        elif method == "tools/list":
            answer(number, {"tools": [ECHO] if tools is None else tools})
            after_list()
        elif method == "tools/call":
            call(request)
        elif number is not None:
            send({"id": number, "error": {"code": -32601, "message": "no such method"}})


if __name__ == "__main__":
    serve()
