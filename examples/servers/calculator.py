"""MCP server `calculator`: one pure tool, `evaluate(expression)`, that starts in a blink.

Over stdio it speaks the protocol itself: importing the SDK takes a second and 60 MB, which is too much where every
rollout gets a calculator of its own. In memory (`build`) and over HTTP it is an ordinary server of the SDK with the
same tool and the same answers; a test holds the two side by side.
"""

from __future__ import annotations

import json
import signal
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from arithmetic import MAX_LENGTH, MathError, evaluate

if TYPE_CHECKING:
    from mcp.server import MCPServer

NAME, ABOUT, VERSION = "calculator", "Exact arithmetic.", "1.0"
DESCRIPTION = "Work out an arithmetic expression exactly. Knows + - * / // % ** and brackets."
ARGUMENT = "An expression such as (17 + 25) * 3"
SCHEMA = {
    "type": "object",
    "title": "evaluateArguments",
    "properties": {
        "expression": {"description": ARGUMENT, "maxLength": MAX_LENGTH, "title": "Expression", "type": "string"}
    },
    "required": ["expression"],
}
OLD, NEW = "2025-11-25", "2026-07-28"
"""The last protocol with a handshake, and the first without."""
VERSION_KEY, INFO_KEY = "io.modelcontextprotocol/protocolVersion", "io.modelcontextprotocol/serverInfo"
CAPABILITIES: dict[str, Any] = {"tools": {"listChanged": False}}
INFO = {"name": NAME, "version": VERSION}
CACHE: dict[str, Any] = {"ttlMs": 0, "cacheScope": "private"}


def build() -> MCPServer:
    """The same server through the SDK."""
    from typing import Annotated

    from mcp.server import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
    from pydantic import Field

    server = MCPServer(NAME, instructions=ABOUT, version=VERSION, log_level="WARNING")

    async def work_out(expression: str) -> str:
        try:
            return evaluate(expression)
        except MathError as error:
            raise ToolError(str(error)) from error

    work_out.__name__ = "evaluate"
    work_out.__annotations__["expression"] = Annotated[str, Field(description=ARGUMENT, max_length=MAX_LENGTH)]
    server.tool(name="evaluate", description=DESCRIPTION, structured_output=False)(work_out)
    return server


def call(name: Any, arguments: Any) -> dict[str, Any]:
    """The result of `tools/call`."""
    failed = True
    if name != "evaluate":
        text = f"Unknown tool: {str(name)[:60]}"
    elif not isinstance(arguments, dict) or not isinstance(arguments.get("expression"), str):
        text = "Error executing tool evaluate: `expression` should be a string"
    else:
        try:
            text, failed = evaluate(arguments["expression"]), False
        except MathError as error:
            text = f"Error executing tool evaluate: {error}"
    return {"content": [{"type": "text", "text": text}], "isError": failed}


def result(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    """What a request is answered with; None when this server does not know it."""
    if method == "initialize":
        return {"protocolVersion": OLD, "capabilities": CAPABILITIES, "serverInfo": INFO, "instructions": ABOUT}
    if method == "server/discover":
        return {"supportedVersions": [NEW], "capabilities": CAPABILITIES, "instructions": ABOUT, **CACHE}
    if method == "tools/list":
        tool = {"name": "evaluate", "description": DESCRIPTION, "inputSchema": SCHEMA}
        return {"tools": [tool]} | (CACHE if _modern(params) else {})
    if method == "tools/call":
        return call(params.get("name"), params.get("arguments"))
    return {} if method == "ping" else None


def _modern(params: dict[str, Any]) -> bool:
    meta = params.get("_meta")
    return isinstance(meta, dict) and VERSION_KEY in meta


def answer(text: bytes) -> dict[str, Any] | None:
    """One line in, one message out; None for what asks for no answer."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        return _error(None, -32700, "Parse error")
    if not isinstance(message, dict) or not isinstance(message.get("method"), str):
        return _error(None, -32600, "Invalid Request")
    if "id" not in message:
        return None
    params = message.get("params") or {}
    if not isinstance(params, dict):
        return _error(message["id"], -32602, "Invalid params")
    found = result(message["method"], params)
    if found is None:
        return _error(message["id"], -32601, "Method not found")
    if _modern(params):
        found |= {"resultType": "complete", "_meta": {INFO_KEY: INFO}}
    return {"jsonrpc": "2.0", "id": message["id"], "result": found}


def _error(id_: Any, code: int, message: str) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": id_, "error": {"code": code, "message": message}}


def main() -> None:
    """Serve over stdio until the other side closes; any option hands over to the SDK."""
    if len(sys.argv) > 1:
        from serving import serve

        serve(build())
        return
    with suppress(BrokenPipeError), open(sys.stdout.fileno(), "wb", buffering=0, closefd=False) as wire:
        for text in sys.stdin.buffer:
            if text.strip() and (message := answer(text)) is not None:
                wire.write(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
    main()
