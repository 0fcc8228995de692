"""What we use of the MCP package, in one place: the only file that imports it.

Owns       the names we take from the SDK, its HTTP stack with a cap on answers, and the way from its results to text.
Promises   imported on first use, not before; without the mcp extra a typed error says what to install.

Read next: `session.py`, which uses it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from surefoot.errors import ToolError
from surefoot.system.text import printable
from surefoot.tools.mcp.lines import PROTOCOL, Bucket, WireFault
from surefoot.tools.mcp.servers import ServerLimits

INVALID_PARAMS, INTERNAL, CLOSED, TIMED_OUT = -32602, -32603, -32000, -32001
"""Codes of JSON-RPC errors that we tell apart."""
KEEP_IDLE_S = 2.0
"""How long an idle HTTP connection is used again. Common servers close theirs after 5 s; a call that is sent in that
moment is lost, and may have been done."""
SIZE = "surefoot/size"
"""Where the wire notes the full size of a message that it had to cut."""


class Refused(Exception):  # noqa: N818 - an answer, not an error of ours
    """The server itself found the arguments wrong: that is the model's to know."""


@dataclass(frozen=True)
class McpResult:
    """A tool's answer as the server gave it."""

    text: str
    is_error: bool = False
    size: str = ""
    """How big the whole was, when the text is only its beginning."""


@lru_cache(maxsize=1)
def sdk() -> Any:
    """The names we use; a `ToolError` when the package is not there."""
    try:
        import anyio
        import httpx2
        import mcp_types as types
        from mcp import Client, MCPError
        from mcp.client.streamable_http import streamable_http_client
        from mcp.shared.message import SessionMessage
        from mcp_types import methods
        from mcp_types.version import MODERN_PROTOCOL_VERSIONS
    except ImportError as error:
        raise ToolError(
            f"tools over MCP are not installed: {error}", "servers are reached with the mcp package",
            "pip install 'surefoot[mcp]'",
        ) from error  # fmt: skip
    return SimpleNamespace(
        Client=Client, MCPError=MCPError, methods=methods, modern=MODERN_PROTOCOL_VERSIONS,
        SessionMessage=SessionMessage, types=types, httpx=httpx2,
        streams=anyio.create_memory_object_stream, streamable_http_client=streamable_http_client,
        capped=_capped(httpx2), me=types.Implementation(name="surefoot", version="1"),
        closed=(anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream),
    )  # fmt: skip


def wrapped(message: Mapping[str, Any]) -> Any:
    """One message off the wire as the SDK wants it; a ValueError when it is none."""
    tools = sdk()
    return tools.SessionMessage(tools.types.jsonrpc_message_adapter.validate_python(message, by_name=False))


def call_result(message: Any, version: str) -> Any:
    """The result of a call in a message that was checked, held to what this version of the protocol lets a server say.

    As a session of the SDK does it with the answers to its own requests; an error that the server gave is raised.
    """
    tools = sdk()
    if (error := getattr(message, "error", None)) is not None:
        raise tools.MCPError(code=error.code, message=error.message, data=error.data)
    found = message.result
    with contextlib.suppress(KeyError):  # a version of which nobody has the forms
        tools.methods.validate_server_result("tools/call", version, found)
    if "resultType" in found and version not in tools.modern:
        found = {name: value for name, value in found.items() if name != "resultType"}  # of a later one: says nothing
    return tools.types.CallToolResult.model_validate(found, by_name=False)


def mcp_result(result: Any) -> McpResult:
    """Text of an answer; what is not text is named, not shown."""
    if getattr(result, "result_type", None) not in (None, "complete"):
        raise WireFault(PROTOCOL, f"answered with {result.result_type!r}; questions to the user are off")
    parts = [_part(content) for content in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False)]
    size = (result.meta or {}).get(SIZE)
    return McpResult("\n".join(parts), bool(result.is_error), f"about {size} bytes" if size else "")


def _part(content: Any) -> str:
    if content.type == "text":
        return str(content.text)
    inside: Any = getattr(content, "resource", None)
    text = getattr(inside, "text", None)
    if text is not None:
        return str(text)
    if content.type == "resource_link":
        return f"[link to {content.uri}]"
    kind = getattr(content, "mime_type", None) or getattr(inside, "mime_type", None) or "of no stated kind"
    return f"[{content.type} {kind}: not shown]"


# -- errors ---------------------------------------------------------------------------------
def leaves(error: BaseException) -> list[BaseException]:
    """The errors inside an error of many."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for each in error.exceptions for leaf in leaves(each)]
    return [error]


def words(error: BaseException) -> str:
    """One line about an error, safe to print."""
    first = leaves(error)[0]
    text = " ".join(str(first)[:2000].split())
    return printable(f"{type(first).__name__}: {text}" if text else type(first).__name__)[:300]


# -- HTTP -----------------------------------------------------------------------------------
def http_connections(limits: ServerLimits) -> Any:
    """Connections that all clients of one server share; none of them carries state of a rollout."""
    httpx = sdk().httpx
    kept = httpx.Limits(
        max_connections=None, max_keepalive_connections=limits.concurrency, keepalive_expiry=KEEP_IDLE_S
    )
    return httpx.AsyncHTTPTransport(limits=kept)


def _capped(httpx: Any) -> Callable[[Any, int, Callable[[int], None]], Any]:
    """A transport over shared connections that stops an answer at so many bytes, and leaves the connections open."""

    class Body(httpx.AsyncByteStream):  # type: ignore[misc]
        def __init__(self, inner: Any, most: int, tell: Callable[[int], None], endless: bool) -> None:
            self.inner, self.most, self.tell = inner, most, tell
            self.fits = Bucket(most, clock=time.monotonic if endless else lambda: 0.0).take

        async def __aiter__(self) -> AsyncIterator[bytes]:
            async for piece in self.inner:
                if not self.fits(len(piece)):
                    self.tell(self.most)
                    raise httpx.ReadError(f"an answer of more than {self.most} bytes")
                yield piece

        async def aclose(self) -> None:
            await self.inner.aclose()

    class Transport(httpx.AsyncBaseTransport):  # type: ignore[misc]
        def __init__(self, inner: Any, most: int, tell: Callable[[int], None]) -> None:
            self.inner, self.most, self.tell = inner, most, tell

        async def handle_async_request(self, request: Any) -> Any:
            response = await self.inner.handle_async_request(request)
            endless = request.method == "GET"  # the server's own stream: so much a second, not so much in all
            response.stream = Body(response.stream, self.most, self.tell, endless)
            return response

        async def aclose(self) -> None:
            """The shared connections stay."""

    return Transport
