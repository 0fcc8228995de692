"""Servers that never stop a little: every call to one ends at its deadline, wherever it drips.

Each server here would be done after a few seconds, far beyond the deadline of the call: a call that comes back with an
answer has waited for it, one that raises has not. No time is measured.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from surefoot.engines.openai import KEY_VARIABLE, HttpClient, HttpLimits
from surefoot.errors import EngineError, ToolError, ToolFailedError
from surefoot.records import Task
from surefoot.system import connections

DEADLINE_S, PAUSE_S, DRIPS = 0.4, 0.05, 50
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"ok": "x" * DRIPS}).encode()
WHOLE = OK + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
Line = socket.socket
Server = Callable[[Line], None]


def drip(line: Line, parts: list[bytes]) -> None:
    for part in parts:
        line.sendall(part)
        time.sleep(PAUSE_S)


def heard(line: Line) -> None:
    """Read the whole request: a connection that is closed with something unread is reset, its answer lost."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += (piece := line.recv(65536))
        if not piece:
            return
    head, _, body = data.partition(b"\r\n\r\n")
    _, _, after = head.lower().partition(b"content-length:")
    missing = int(after.partition(b"\r\n")[0] or 0) - len(body)
    while missing > 0 and (piece := line.recv(65536)):
        missing -= len(piece)


def in_the_first_line(line: Line) -> None:
    heard(line)
    drip(line, [bytes([byte]) for byte in b"HTTP/1.1 200 " + b"O" * DRIPS])
    line.sendall(b"\r\n" + WHOLE.partition(b"\r\n")[2])


def in_the_headers(line: Line) -> None:
    heard(line)
    drip(line, [OK, *(b"X-%d: y\r\n" % n for n in range(DRIPS))])
    line.sendall(WHOLE.partition(b"\r\n")[2])


def in_a_promise_to_go_on(line: Line) -> None:
    heard(line)
    drip(line, [b"HTTP/1.1 100 Continue\r\n\r\n"] * DRIPS)
    line.sendall(WHOLE)


def in_the_body(line: Line) -> None:
    heard(line)
    line.sendall(WHOLE[: -len(BODY)])
    drip(line, [bytes([byte]) for byte in BODY])


def in_a_body_without_length(line: Line) -> None:
    heard(line)
    line.sendall(OK + b"\r\n")
    drip(line, [bytes([byte]) for byte in BODY])


def in_chunks(line: Line) -> None:
    heard(line)
    line.sendall(OK + b"Transfer-Encoding: chunked\r\n\r\n")
    drip(line, [b"1\r\n%c\r\n" % byte for byte in BODY])
    line.sendall(b"0\r\n\r\n")


def in_the_size_of_a_chunk(line: Line) -> None:
    heard(line)
    line.sendall(OK + b"Transfer-Encoding: chunked\r\n\r\n")
    drip(line, [b"0"] * DRIPS)
    line.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))


def in_what_follows_the_chunks(line: Line) -> None:
    heard(line)
    line.sendall(OK + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n" % (len(BODY), BODY))
    drip(line, [b"X: y\r\n"] * DRIPS)
    line.sendall(b"\r\n")


def in_a_refusal(line: Line) -> None:
    heard(line)
    line.sendall(b"HTTP/1.1 400 Bad\r\nContent-Length: %d\r\n\r\n" % len(BODY))
    drip(line, [bytes([byte]) for byte in BODY])


DRIPPING: list[Server] = [
    in_the_first_line, in_the_headers, in_a_promise_to_go_on, in_the_body, in_a_body_without_length, in_chunks,
    in_the_size_of_a_chunk, in_what_follows_the_chunks, in_a_refusal,
]  # fmt: skip


@contextlib.contextmanager
def served(server: Server) -> Iterator[int]:
    """A port where every connection is served like this."""
    door = socket.create_server(("127.0.0.1", 0))
    lines: list[Line] = []

    def serve(line: Line) -> None:
        with contextlib.suppress(OSError), line:  # whoever asked has gone: that is what is wanted
            server(line)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                line, _ = door.accept()
                lines.append(line)
                threading.Thread(target=serve, args=(line,), daemon=True).start()

    waiter = threading.Thread(target=accept, daemon=True)
    waiter.start()
    try:
        yield door.getsockname()[1]
    finally:
        with contextlib.suppress(OSError):
            door.shutdown(socket.SHUT_RDWR)
        door.close()
        for line in lines:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
        waiter.join(60)


def ask(port: int, deadline_s: float = DEADLINE_S, body: object = None) -> Any:
    client = HttpClient(f"http://127.0.0.1:{port}/v1", HttpLimits(deadline_s=deadline_s, tries=1))
    return client.post("/v1/x", body or {"a": 1})


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


@pytest.mark.parametrize("server", DRIPPING, ids=lambda server: server.__name__)
def test_a_call_ends_at_its_deadline_wherever_the_server_drips(server: Server) -> None:
    with served(server) as port, pytest.raises(EngineError, match="TimeoutError"):
        ask(port)


def test_a_server_that_reads_a_little_at_a_time_is_not_waited_for() -> None:
    def slow_reader(line: Line) -> None:
        for _ in range(DRIPS):
            line.recv(16)
            time.sleep(PAUSE_S)

    with served(slow_reader) as port, pytest.raises(EngineError, match="TimeoutError"):
        ask(port, body={"long": "x" * (32 << 20)})


def test_a_quick_server_is_heard_out_whichever_way_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "PAUSE_S", 0.0)
    for server in DRIPPING[:-1]:
        with served(server) as port:
            assert ask(port, deadline_s=60) == json.loads(BODY), server.__name__


@pytest.mark.parametrize("server", [in_the_headers, in_chunks], ids=lambda server: server.__name__)
def test_planted_bug_with_a_timeout_for_each_wait_the_server_is_waited_for(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As sockets do it by themselves: the time begins anew with every byte."""
    monkeypatch.setattr(connections, "_hurry", lambda line: line.settimeout(60))
    with served(server) as port:
        assert ask(port) == json.loads(BODY), "the answer came long after the deadline"


# -- under TLS ------------------------------------------------------------------------------------


def nameless() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Both sides of TLS without a certificate: who it is does not matter here."""
    made = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers("aNULL:@SECLEVEL=0")
        made.append(context)
    return made[0], made[1]


def ask_securely(port: int, monkeypatch: pytest.MonkeyPatch, client: ssl.SSLContext, body: object = None) -> Any:
    monkeypatch.setattr(ssl, "create_default_context", lambda: client)
    there = HttpClient(f"https://127.0.0.1:{port}/v1", HttpLimits(deadline_s=DEADLINE_S, tries=1))
    return there.post("/v1/x", body or {"a": 1})


def under(server: Server, context: ssl.SSLContext) -> Server:
    def secure(line: Line) -> None:
        with contextlib.suppress(ssl.SSLError), context.wrap_socket(line, server_side=True) as wrapped:
            server(wrapped)

    return secure


def never_shaking_hands(line: Line) -> None:
    time.sleep(PAUSE_S * DRIPS)


def dripping_a_handshake(line: Line) -> None:
    heard(line)
    drip(line, [b"\x16", b"\x03", b"\x03", b"\x3f", b"\xff", *[b"\x02"] * DRIPS])


@pytest.mark.parametrize("server", [never_shaking_hands, dripping_a_handshake], ids=lambda server: server.__name__)
def test_a_handshake_of_tls_without_end_ends_at_the_deadline(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(server) as port, pytest.raises(EngineError, match="TimeoutError"):
        ask_securely(port, monkeypatch, nameless()[1])


@pytest.mark.parametrize("server", [in_the_headers, in_the_body, in_chunks], ids=lambda server: server.__name__)
def test_dripping_under_tls_ends_at_the_deadline(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    there, here = nameless()
    with served(under(server, there)) as port, pytest.raises(EngineError, match="TimeoutError"):
        ask_securely(port, monkeypatch, here)


def test_planted_bug_under_tls_the_server_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    there, here = nameless()
    monkeypatch.setattr(connections, "_hurry", lambda line: line.settimeout(60))
    with served(under(in_the_headers, there)) as port:
        assert ask_securely(port, monkeypatch, here) == json.loads(BODY)


# -- other clients of ours --------------------------------------------------------------------------


def test_the_numbers_of_a_ray_node_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from surefoot.harness.tracker import memory

    def node(line: Line) -> None:
        heard(line)
        drip(line, [OK, *(b"X-%d: y\r\n" % n for n in range(DRIPS))])
        line.sendall(b'\r\nray_node_gram_used{GpuIndex="0"} 5\n')

    with served(node) as port:
        where = {"NodeManagerAddress": "127.0.0.1", "MetricsExportPort": port}
        monkeypatch.setattr(memory, "SCRAPE_S", DEADLINE_S)
        assert memory._scrape(where) is None
        monkeypatch.setattr(connections, "_hurry", lambda line: line.settimeout(60))
        assert memory.ray_gauges(memory._scrape(where) or "") == {"gpu0": 5.0}, "planted: waited for"


@pytest.mark.mcp
@pytest.mark.parametrize(
    "server", [in_the_headers, in_the_body, in_chunks, never_shaking_hands], ids=lambda server: server.__name__
)
def test_a_tool_server_that_drips_is_given_up_when_it_is_opened(server: Server) -> None:
    pytest.importorskip("mcp", reason="needs the mcp extra")
    from surefoot.tools.mcp.toolkit import MCPToolkit
    from surefoot.tools.mcp.toolkit import Server as ToolServer
    from surefoot.tools.mcp.toolkit import ServerLimits as ToolLimits

    limits = ToolLimits(connect_timeout_s=DEADLINE_S, shutdown_s=0.2, restarts=0)
    with served(server) as port:
        kit = MCPToolkit([ToolServer("h", url=f"http://127.0.0.1:{port}/mcp")], limits)
        try:
            with pytest.raises((ToolError, ToolFailedError), match="did not answer within"):
                kit.open(Task(id="t", prompt="p"), "train/0", 0)
        finally:
            kit.close()
