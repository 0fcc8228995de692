"""HTTP/1 as far as a forwarding proxy needs it: one request taken apart, its body by its own count, an answer's head.

Owns       `HttpRequest`, `RequestRefused` and `Wire`, a socket that is read with bounds.
Promises   what two readers could understand differently is refused: two lengths, a length beside chunks, a line that
           goes on in the next one, a lone CR or LF, a blank before a colon. A request is written anew from what was
           understood; headers between two neighbours (`Connection` and what it names) stop here.
Never      decides who may be asked, or opens a connection: `proxy.py` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from surefoot.tools.mcp.hosts import split

LONGEST_HEAD = 32 * 1024
_LONGEST_ANSWER_HEAD = 64 * 1024
_LONGEST_CHUNK_LINE = 32
_MOST_FIELDS = 200
_PIECE = 64 * 1024
_LINE = re.compile(rb"([A-Z][A-Z-]{0,19}) ([\x21-\x7e]+) (HTTP/1\.[01])")
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})(?: [^\r\n\0]*)?")
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_LENGTH = re.compile(rb"[0-9]{1,15}")
_CHUNK = re.compile(rb"[0-9A-Fa-f]{1,8}")
_TEXT = bytes({*range(0x20, 0x7F), *range(0x80, 0x100), 0x09})
_BETWEEN_NEIGHBOURS = frozenset(
    b"connection keep-alive proxy-connection proxy-authorization proxy-authenticate te trailer upgrade".split()
)
MALFORMED = "(malformed)"

Field = tuple[bytes, bytes]


class RequestRefused(Exception):
    """A request that is not carried: what its client is told, and whom it asked for.

    Args:
        denied: whether it counts as an attempt to reach what is not granted.
    """

    def __init__(self, status: int, why: str, asked: str = MALFORMED, *, denied: bool = True) -> None:
        super().__init__(status, why, asked)
        self.status, self.why, self.asked, self.denied = status, why, asked, denied


class HeadTooLongError(ValueError):
    """What should have ended by now goes on."""


def unmoved() -> None:
    """Nobody wants to know that bytes have moved."""


class Wire:
    """One socket, which must not block; whoever made it closes it."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.alive: Callable[[], None] = unmoved
        """Called whenever bytes have moved."""
        self.told = False
        """Whether anything was sent over it."""
        self._kept = bytearray()

    async def some(self, most: int) -> bytes:
        """The next bytes; none at the end."""
        if not self._kept:
            return await self._receive(most)
        piece = bytes(self._kept[:most])
        del self._kept[:most]
        return piece

    async def until(self, mark: bytes, most: int) -> bytes:
        """All up to a mark, which is taken off and left out; a `HeadTooLongError` when it does not come.

        Raises:
            ConnectionError: the other side ended before.
        """
        looked = 0
        while (end := self._kept.find(mark, looked)) < 0:
            if len(self._kept) > most:
                raise HeadTooLongError(f"more than {most} bytes")
            looked = max(0, len(self._kept) - len(mark) + 1)
            piece = await self._receive(4096)
            if not piece:
                raise ConnectionResetError("ended early")
            self._kept += piece
        if end > most:
            raise HeadTooLongError(f"more than {most} bytes")
        found = bytes(self._kept[:end])
        del self._kept[: end + len(mark)]
        return found

    async def _receive(self, most: int) -> bytes:
        piece = await asyncio.get_running_loop().sock_recv(self.connection, most)
        self.alive()
        return piece

    async def send(self, data: bytes) -> None:
        """All of it."""
        self.told = True
        await asyncio.get_running_loop().sock_sendall(self.connection, data)
        self.alive()

    def end(self) -> None:
        """Say that nothing more comes; what the other side says is still read."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)


@dataclass(frozen=True)
class HttpRequest:
    """One request, understood."""

    method: bytes
    host: str
    """In its one spelling."""
    port: int
    tunnel: bool
    """CONNECT: bytes pass both ways from here on."""
    path: bytes = b"/"
    version: bytes = b"HTTP/1.1"
    fields: Sequence[Field] = ()
    length: int = 0
    """Bytes of its body."""
    chunked: bool = False
    """Its body comes in chunks instead."""

    @property
    def asked(self) -> str:
        """Host and port, for people."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def forwarded(self) -> bytes:
        """Its head as the host gets it: for the host that was looked at, and one request only."""
        host = self.asked if self.port != 80 else self.asked.removesuffix(":80")
        lines = [b"%s %s %s" % (self.method, self.path, self.version), b"Host: " + host.encode()]
        own = {b"host", b"content-length", b"transfer-encoding"}
        lines += [b"%s: %s" % field for field in _kept(self.fields) if field[0].lower() not in own]
        if self.chunked:
            lines.append(b"Transfer-Encoding: chunked")
        elif self.length or _values(self.fields, b"content-length"):
            lines.append(b"Content-Length: %d" % self.length)
        return b"\r\n".join([*lines, b"Connection: close", b"", b""])


async def read_request(client: Wire, patience_s: float) -> HttpRequest:
    """The request at the beginning of a connection; `RequestRefused` when it is none, too long or too slow."""
    try:
        async with asyncio.timeout(patience_s):
            head = await client.until(b"\r\n\r\n", LONGEST_HEAD)
    except HeadTooLongError as error:
        raise RequestRefused(431, f"the head of a request has {error}") from error
    except TimeoutError as error:
        raise RequestRefused(408, f"no whole request came within {patience_s:g} s", denied=False) from error
    return parse(head)


def parse(head: bytes) -> HttpRequest:
    """A request's head, without the empty line after it."""
    first, *lines = head.split(b"\r\n")
    match = _LINE.fullmatch(first)
    if match is None:
        raise RequestRefused(400, "the first line is no request")
    method, target, version = match.groups()
    fields = _fields(lines)
    if len(_values(fields, b"host")) > 1:
        raise RequestRefused(400, "two Host headers")
    length, chunked = _framing(fields, version)
    if method == b"CONNECT":
        host, port = _authority(target.decode("ascii"))
        if port is None or length or chunked:
            raise RequestRefused(400, "CONNECT asks for host:port and has no body")
        return HttpRequest(method, host, port, tunnel=True)
    scheme, slashes, rest = target.partition(b"://")
    if scheme.lower() != b"http" or not slashes or b"#" in rest:
        raise RequestRefused(
            400, "a proxy is asked with CONNECT host:port, or with a whole address that begins with http://"
        )
    cut = min((at for at in map(rest.find, (b"/", b"?")) if at >= 0), default=len(rest))
    host, port = _authority(rest[:cut].decode("ascii"))
    path = rest[cut:] if rest[cut:].startswith(b"/") else b"/" + rest[cut:]
    return HttpRequest(method, host, port or 80, False, path, version, fields, length, chunked)


def _authority(text: str) -> tuple[str, int | None]:
    if "@" in text:
        raise RequestRefused(400, "an address with a user name is not carried")
    try:
        return split(text)
    except ValueError as error:
        raise RequestRefused(400, f"no host and port: {error}", text) from error


def _fields(lines: Sequence[bytes]) -> list[Field]:
    if len(lines) > _MOST_FIELDS:
        raise RequestRefused(431, f"more than {_MOST_FIELDS} headers")
    fields = []
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not _TOKEN.fullmatch(name) or value.translate(None, _TEXT):
            raise RequestRefused(400, "a header that is none")
        fields.append((name, value.strip(b" \t")))
    return fields


def _values(fields: Sequence[Field], name: bytes) -> list[bytes]:
    return [value for each, value in fields if each.lower() == name]


def _framing(fields: Sequence[Field], version: bytes) -> tuple[int, bool]:
    """Bytes of the body, or whether it comes in chunks; `RequestRefused` where that could be read in two ways."""
    lengths, codings = _values(fields, b"content-length"), _values(fields, b"transfer-encoding")
    if codings:
        if lengths or len(codings) > 1 or version == b"HTTP/1.0":
            raise RequestRefused(400, "a body that is counted in two ways")
        if codings[0].lower() != b"chunked":
            raise RequestRefused(501, "of codings only chunks are carried")
        return 0, True
    if len(lengths) > 1 or (lengths and not _LENGTH.fullmatch(lengths[0])):
        raise RequestRefused(400, "a body that is counted in two ways, or with no number")
    return int(lengths[0]) if lengths else 0, False


def _kept(fields: Sequence[Field]) -> list[Field]:
    """Headers that are not for the neighbour alone."""
    named = {word.strip(b" \t").lower() for value in _values(fields, b"connection") for word in value.split(b",")}
    return [field for field in fields if field[0].lower() not in named | _BETWEEN_NEIGHBOURS]


async def body_pieces(request: HttpRequest, client: Wire) -> AsyncIterator[bytes]:
    """The body, framed as `HttpRequest.forwarded` announces it, and not a byte more."""
    if not request.chunked:
        async for piece in _exactly(request.length, client):
            yield piece
        return
    while size := await _chunk_size(client):
        yield b"%x\r\n" % size
        async for piece in _exactly(size, client):
            yield piece
        if await _chunk_line(client):
            raise RequestRefused(400, "a chunk that is longer than it says")
        yield b"\r\n"
    if await _chunk_line(client):
        raise RequestRefused(400, "headers after the body are not carried")
    yield b"0\r\n\r\n"


async def _exactly(size: int, client: Wire) -> AsyncIterator[bytes]:
    while size:
        piece = await client.some(min(size, _PIECE))
        if not piece:
            raise RequestRefused(400, "the body ended early", denied=False)
        size -= len(piece)
        yield piece


async def _chunk_size(client: Wire) -> int:
    line = await _chunk_line(client)
    if not _CHUNK.fullmatch(line):
        raise RequestRefused(400, "a chunk that does not begin with its size alone")
    return int(line, 16)


async def _chunk_line(client: Wire) -> bytes:
    try:
        return await client.until(b"\r\n", _LONGEST_CHUNK_LINE)
    except HeadTooLongError as error:
        raise RequestRefused(400, "a chunk that does not begin with its size alone") from error
    except ConnectionError as error:
        raise RequestRefused(400, "the body ended early", denied=False) from error


async def response_head(server: Wire) -> tuple[bytes, bool]:
    """An answer's head for the client, who is told that the connection closes; whether it is the last one.

    Raises:
        RequestRefused: what came is no answer.
    """
    try:
        first, *lines = (await server.until(b"\r\n\r\n", _LONGEST_ANSWER_HEAD)).split(b"\r\n")
        fields = _fields(lines)
    except (HeadTooLongError, ConnectionError, RequestRefused) as error:
        raise RequestRefused(502, "the host's answer has no head that can be read", denied=False) from error
    match = _STATUS.fullmatch(first)
    if match is None or match[1] == b"101":
        raise RequestRefused(502, "the host's answer is none", denied=False)
    kept = [b"%s: %s" % field for field in _kept(fields)]
    final = not match[1].startswith(b"1")
    return b"\r\n".join([first, *kept, *([b"Connection: close"] if final else []), b"", b""]), final
