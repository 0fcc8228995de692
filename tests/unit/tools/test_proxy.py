"""The proxy of granted hosts, without a sandbox around it: what it carries, what it refuses, and that all of it ends."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import random
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from surefoot.tools.mcp import hosts, http1, proxy
from surefoot.tools.mcp.hosts import Address, HostGrants
from surefoot.tools.mcp.http1 import HttpRequest, RequestRefused, parse
from surefoot.tools.mcp.proxy import CONNECTIONS, HostProxy, ProxyPatience

AMPLE_S = 60.0
SHORT = ProxyPatience(head_s=0.3, goodbye_s=0.3)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nKeep-Alive: 9\r\nX-From: host\r\n\r\nhello"


@dataclass
class Host:
    """A host on this machine that answers every connection once, and keeps what it was told."""

    port: int = 0
    heard: list[bytes] = field(default_factory=list)
    answer: bytes = OK

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._reply(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the proxy gave the request up
        finally:
            await shut(writer)

    async def _reply(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heard.append(head)
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        if lengths:
            self.heard.append(await reader.readexactly(int(lengths[0].partition(b":")[2])))
        elif b"transfer-encoding: chunked" in head.lower():
            self.heard.append(await reader.readuntil(b"0\r\n\r\n"))
        writer.write(self.answer)
        await writer.drain()


async def shut(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


@dataclass
class Stage:
    """A proxy, a host that it may reach, one that it may not, and whom it refused."""

    port: int
    host: Host
    other: Host
    denied: list[str]
    proxy: HostProxy
    asked: list[str]

    async def say(self, *pieces: bytes, end: bool = False) -> bytes:
        """All that the proxy answers to these bytes."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            with contextlib.suppress(ConnectionError):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                if end:
                    writer.write_eof()
            async with asyncio.timeout(AMPLE_S):
                return await reader.read()
        finally:
            await shut(writer)

    def get(self, port: int | None = None, path: str = "/x?y=1") -> bytes:
        return f"GET http://127.0.0.1:{port or self.host.port}{path} HTTP/1.1\r\nHost: any\r\n\r\n".encode()


@contextlib.asynccontextmanager
async def stage(
    *granted: str, resolve: dict[str, list[str]] | None = None, patience: ProxyPatience | None = None
) -> AsyncIterator[Stage]:
    host, other, asked, denied = Host(), Host(), list[str](), list[str]()

    async def lookup(name: str, port: int) -> list[Address]:
        asked.append(name)
        return [ipaddress.ip_address(text) for text in (resolve or {})[name]]

    async with contextlib.AsyncExitStack() as stack:
        for each in (host, other):
            server = await asyncio.start_server(each.serve, "127.0.0.1", 0)
            each.port = server.sockets[0].getsockname()[1]
            await stack.enter_async_context(server)
        listener = socket.create_server(("127.0.0.1", 0))
        texts = [text.format(port=host.port) for text in granted or ("127.0.0.1:{port}",)]
        made = HostProxy(listener, HostGrants(texts), denied.append, lookup, patience)
        try:
            yield Stage(listener.getsockname()[1], host, other, denied, made, asked)
        finally:
            made.close()


def play(story: Callable[[Stage], Awaitable[None]], *granted: str, **keys: Any) -> None:
    async def whole() -> None:
        async with stage(*granted, **keys) as on:
            await story(on)

    asyncio.run(whole())


# -- what is carried ---------------------------------------------------------------------------------
def test_a_plain_request_reaches_a_granted_host_without_what_is_between_neighbours() -> None:
    async def story(on: Stage) -> None:
        head = (
            f"GET HTTP://127.0.0.1:{on.host.port}/x?y=1 HTTP/1.1\r\nHost: 10.0.0.1\r\nAccept: */*\r\nX-Mine: 1\r\n"
            "Proxy-Authorization: Basic eA==\r\nProxy-Connection: keep-alive\r\nConnection: X-Mine, keep-alive\r\n\r\n"
        )
        answer = await on.say(head.encode())
        assert answer == b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-From: host\r\nConnection: close\r\n\r\nhello"
        [heard] = on.host.heard
        assert heard.decode() == (
            f"GET /x?y=1 HTTP/1.1\r\nHost: 127.0.0.1:{on.host.port}\r\nAccept: */*\r\nConnection: close\r\n\r\n"
        )
        assert on.denied == []

    play(story)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_is_carried_by_its_own_count_and_not_a_byte_more(chunked: bool) -> None:
    async def story(on: Stage) -> None:
        framing = "Transfer-Encoding: Chunked" if chunked else "Content-Length: 5"
        body = b"2\r\nab\r\n3\r\ncde\r\n0\r\n\r\n" if chunked else b"abcde"
        smuggled = on.get(on.other.port) + b"GET /second HTTP/1.1\r\nHost: x\r\n\r\n"
        head = f"POST http://127.0.0.1:{on.host.port}/ HTTP/1.1\r\n{framing}\r\n\r\n".encode()
        assert (await on.say(head, body + smuggled)).endswith(b"\r\n\r\nhello")
        assert on.host.heard[1] == body
        assert len(on.host.heard) == 2, "one head and one body: what follows is no second request"
        assert on.other.heard == []

    play(story)


def test_interim_answers_pass_and_a_large_answer_comes_whole() -> None:
    async def story(on: Stage) -> None:
        on.host.answer = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\n" + b"x" * 3_000_000
        answer = await on.say(on.get())
        assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nConnection: close\r\n\r\nxx")
        assert answer.endswith(b"x" * 3_000_000)

    play(story)


def test_a_tunnel_passes_bytes_both_ways_to_the_granted_host() -> None:
    async def story(on: Stage) -> None:
        connect = f"CONNECT 127.0.0.1:{on.host.port} HTTP/1.1\r\nHost: 127.0.0.1:{on.other.port}\r\n\r\n".encode()
        answer = await on.say(connect + b"any bytes\r\n\r\n")
        assert answer == b"HTTP/1.1 200 Connection established\r\n\r\n" + OK
        assert on.host.heard == [b"any bytes\r\n\r\n"]

    play(story)


def test_hosts_that_fail_are_told_apart_from_those_that_are_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]

    async def story(on: Stage) -> None:
        for answer in (b"SSH-2.0-nothing\r\n\r\n", b"HTTP/1.1 101 Switching\r\n\r\n", b"HTTP/1.1 200 OK\r\n"):
            on.host.answer = answer
            assert b" 502 Bad Gateway" in await on.say(on.get())
        assert b" 502 Bad Gateway" in await on.say(f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n".encode())
        assert b" 502 Bad Gateway" in await on.say(b"CONNECT nowhere.example:443 HTTP/1.1\r\n\r\n")
        assert on.denied == [], "none of it is an attempt to reach what is not granted"

    play(story, "127.0.0.1:{port}", f"127.0.0.1:{port}", "nowhere.example", resolve={"nowhere.example": []})


# -- what is refused ---------------------------------------------------------------------------------
def test_a_host_or_port_that_is_not_granted_is_refused_counted_and_never_connected_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(on: Stage) -> None:
        port = on.other.port
        ways = [
            on.get(port), f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\nHost: 127.0.0.1:{on.host.port}\r\n\r\n".encode(),
            f"GET http://127.0.0.1:{port}/ HTTP/1.1\r\nHost: 127.0.0.1:{on.host.port}\r\n\r\n".encode(),
            f"POST http://LOCALHOST:{on.host.port}/ HTTP/1.1\r\nContent-Length: 100000\r\n\r\n".encode() + b"x" * 100000,
            b"CONNECT secrets.example:443 HTTP/1.1\r\n\r\n", b"CONNECT [::1]:80 HTTP/1.1\r\n\r\n",
        ]  # fmt: skip
        for way in ways:
            answer = await on.say(way)
            assert answer.startswith(b"HTTP/1.1 403 Forbidden\r\n"), way
            assert b"is not granted to this server" in answer
        here = f"127.0.0.1:{port}"
        assert on.denied == [here, here, here, f"localhost:{on.host.port}", "secrets.example:443", "[::1]:80"]
        assert (on.host.heard, on.other.heard, on.asked) == ([], [], []), "and no name was looked up"
        monkeypatch.setattr(HostGrants, "cover", lambda *_: True)
        assert (await on.say(on.get(port))).endswith(b"hello"), "planted: nobody keeps the grants"

    play(story)


@pytest.mark.parametrize("bad", ["127.0.0.1", "10.1.2.3", "169.254.169.254", "::1", "::ffff:127.0.0.1", "224.0.0.1"])
def test_a_granted_name_that_leads_to_this_machine_or_its_networks_is_refused(bad: str) -> None:
    async def story(on: Stage) -> None:
        answer = await on.say(f"GET http://rebound.example:{on.host.port}/ HTTP/1.1\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 403 Forbidden")
        assert bad.encode() not in answer, "what a name leads to is none of its business"
        assert on.denied == [f"rebound.example:{on.host.port} at {ipaddress.ip_address(bad)}"]
        assert on.host.heard == []

    play(story, "rebound.example:{port}", resolve={"rebound.example": [bad]})


def test_a_name_leads_to_an_address_that_is_granted_itself_and_to_the_one_that_was_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(on: Stage) -> None:
        get = f"GET http://inner.example:{on.host.port}/ HTTP/1.1\r\n\r\n".encode()
        assert (await on.say(get)).endswith(b"hello")
        assert f"Host: inner.example:{on.host.port}\r\n".encode() in on.host.heard[0]
        assert on.asked == ["inner.example"], "looked up once: a second answer could be another one"

    known = {"inner.example": ["10.9.9.9", "127.0.0.1"]}
    play(story, "inner.example:{port}", "127.0.0.1:{port}", resolve=known)

    async def planted(on: Stage) -> None:
        get = f"GET http://inner.example:{on.host.port}/ HTTP/1.1\r\n\r\n".encode()
        assert (await on.say(get)).endswith(b"hello"), "planted: wherever a name leads is well"

    monkeypatch.setattr(hosts, "is_public", lambda address: True)
    play(planted, "inner.example:{port}", resolve={"inner.example": ["127.0.0.1"]})


GRANTED = "http://127.0.0.1:{port}/"
MALFORMED = {
    "two lengths": f"POST {GRANTED} HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcde",
    "the same length twice": f"POST {GRANTED} HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nabcde",
    "a list of lengths": f"POST {GRANTED} HTTP/1.1\r\nContent-Length: 5, 5\r\n\r\nabcde",
    "a signed length": f"POST {GRANTED} HTTP/1.1\r\nContent-Length: +5\r\n\r\nabcde",
    "chunks and a length": f"POST {GRANTED} HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks twice": f"POST {GRANTED} HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": f"POST {GRANTED} HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "another coding": f"POST {GRANTED} HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a blank before the colon": f"POST {GRANTED} HTTP/1.1\r\nContent-Length : 5\r\n\r\nabcde",
    "a line that goes on": f"GET {GRANTED} HTTP/1.1\r\nX: a\r\n b: c\r\n\r\n",
    "a lone LF in a header": f"GET {GRANTED} HTTP/1.1\r\nX: a\nHost: b\r\n\r\n",
    "a lone CR in a header": f"GET {GRANTED} HTTP/1.1\r\nX: a\rHost: b\r\n\r\n",
    "a NUL in a header": f"GET {GRANTED} HTTP/1.1\r\nX: a\0b\r\n\r\n",
    "CR LF in the target": "GET http://127.0.0.1:{port}/\r\nHost: x HTTP/1.1\r\n\r\n",
    "a blank in the target": "GET http://127.0.0.1:{port}/ x HTTP/1.1\r\n\r\n",
    "two hosts": f"GET {GRANTED} HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    "only a path": "GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n",
    "a user in the address": "GET http://127.0.0.1:{port}@127.0.0.1:{other}/ HTTP/1.1\r\n\r\n",
    "a backslash in the host": "GET http://127.0.0.1:{other}\\@127.0.0.1:{port}/ HTTP/1.1\r\n\r\n",
    "a fragment": "GET http://127.0.0.1:{port}/#@127.0.0.1:{other}/ HTTP/1.1\r\n\r\n",
    "another scheme": "GET https://127.0.0.1:{port}/ HTTP/1.1\r\n\r\n",
    "a number as a host": "GET http://2130706433:{port}/ HTTP/1.1\r\n\r\n",
    "a short address": "CONNECT 127.1:{port} HTTP/1.1\r\n\r\n",
    "a mapped address": "CONNECT [::ffff:127.0.0.1]:{port} HTTP/1.1\r\n\r\n",
    "CONNECT without a port": "CONNECT 127.0.0.1 HTTP/1.1\r\n\r\n",
    "CONNECT with a body": "CONNECT 127.0.0.1:{port} HTTP/1.1\r\nContent-Length: 5\r\n\r\nabcde",
    "HTTP/2": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no HTTP at all": "SSH-2.0-x\r\n\r\n",
    "a small letter": f"get {GRANTED} HTTP/1.1\r\n\r\n",
    "too long a head": f"GET {GRANTED} HTTP/1.1\r\nX: " + "a" * 70_000 + "\r\n\r\n",
    "a head without end": f"GET {GRANTED} HTTP/1.1\r\nX: " + "a" * 200_000,
    "too many headers": f"GET {GRANTED} HTTP/1.1\r\n" + "X: a\r\n" * 300 + "\r\n",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_two_readers_could_understand_differently_is_refused_counted_and_not_passed_on(name: str) -> None:
    async def story(on: Stage) -> None:
        text = MALFORMED[name].replace("{port}", str(on.host.port)).replace("{other}", str(on.other.port))
        answer = await on.say(text.encode())
        assert answer[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 431", b"HTTP/1.1 501"), answer
        assert len(on.denied) == 1
        assert len(on.denied[0]) <= 120
        assert (on.host.heard, on.other.heard) == ([], [])

    play(story)


CHUNKS = ["g\r\n", "2;ext=1\r\nab\r\n", "-1\r\n", "2\r\nabc\r\n", "fffffffff\r\n", "0\r\nX: y\r\n\r\n", "1" * 60]


@pytest.mark.parametrize("body", CHUNKS)
def test_a_chunk_that_does_not_say_its_size_ends_the_request(body: str) -> None:
    async def story(on: Stage) -> None:
        head = f"POST http://127.0.0.1:{on.host.port}/ HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert (await on.say((head + body).encode())).startswith(b"HTTP/1.1 400 ")
        assert len(on.denied) == 1

    play(story)


def test_planted_a_reader_that_takes_the_first_of_two_lengths_lets_a_second_request_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Teeth of the list above: without its rule the planted reader carries what it should refuse."""
    head = MALFORMED["two lengths"].replace("{port}", "80").partition("\r\n\r\n")[0].encode()
    with pytest.raises(RequestRefused):
        parse(head)
    monkeypatch.setattr(http1, "_framing", lambda fields, version: (5, False))
    assert isinstance(parse(head), HttpRequest)


SEEDS = [
    b"POST http://a.example:81/x?y HTTP/1.1\r\nHost: b\r\nContent-Length: 5\r\nConnection: X-Y\r\nX-Y: 1",
    b"POST http://a.example/ HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTE: trailers\r\nX: \tz ",
    b"CONNECT a.example:443 HTTP/1.1\r\nHost: a.example:443\r\nProxy-Authorization: x",
]
PIECES = [
    b"\r\n",
    b"\r",
    b"\n",
    b"\0",
    b" ",
    b":",
    b"@",
    b"#",
    b"/",
    b"//",
    b"\t",
    b"\xff",
    b"Content-Length: 5\r\n",
    b"chunked",
]


def test_whatever_a_head_is_it_is_refused_or_understood_in_one_way() -> None:
    """Heads with a few places changed: what is not refused goes on as one request, to one host, with one count."""
    chance, understood = random.Random(0), 0
    for _ in range(20_000):
        head = bytearray(chance.choice(SEEDS))
        for _ in range(chance.randint(1, 3)):
            at = chance.randrange(len(head) + 1)
            head[at : at + chance.randint(0, 3)] = chance.choice([*PIECES, bytes([chance.randrange(256)])])
        try:
            request = parse(bytes(head))
        except RequestRefused:
            continue
        understood += 1
        assert hosts.split(request.asked) == (request.host, request.port)
        if request.tunnel:
            continue
        sent = request.forwarded()
        first, *lines = sent.removesuffix(b"\r\n\r\n").split(b"\r\n")
        names = [line.partition(b":")[0].lower() for line in lines]
        assert sent.count(b"\r\n\r\n") == 1, head
        assert (sent.count(b"\n"), sent.count(b"\r")) == (len(lines) + 2, len(lines) + 2), head
        assert (first.count(b" "), names.count(b"host"), names.count(b"connection")) == (2, 1, 1), head
        assert names.count(b"content-length") + names.count(b"transfer-encoding") <= 1, head
        assert not {b"te", b"proxy-authorization", b"upgrade"} & set(names), head
    assert understood > 1000, "teeth: not everything is refused"


# -- everything ends ---------------------------------------------------------------------------------
def test_a_client_that_drips_or_says_nothing_is_let_go_at_the_deadline() -> None:
    async def story(on: Stage) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", on.port)
        silent, told = asyncio.create_task(on.say()), asyncio.create_task(reader.readline())
        async with asyncio.timeout(AMPLE_S):
            while not told.done():  # a byte now and then, so that no single wait is long
                writer.write(b"G")
                await asyncio.sleep(0.01)
            assert told.result().startswith(b"HTTP/1.1 408 ")
            assert (await silent).startswith(b"HTTP/1.1 408 ")
            await shut(writer)
            while on.proxy._tasks:
                await asyncio.sleep(0.01)
        assert on.denied == []

    play(story, patience=SHORT)


def test_a_host_that_says_nothing_and_a_tunnel_without_a_word_end_after_the_idle_time() -> None:
    async def story(on: Stage) -> None:
        release = asyncio.Event()

        async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await release.wait()
            await shut(writer)

        async with await asyncio.start_server(mute, "127.0.0.1", 0) as server:
            on.proxy._grants = HostGrants([f"127.0.0.1:{(port := server.sockets[0].getsockname()[1])}"])
            assert (await on.say(on.get(port))).startswith(b"HTTP/1.1 504 ")
            tunnel = await on.say(f"CONNECT 127.0.0.1:{port} HTTP/1.1\r\n\r\n".encode())
            assert tunnel == b"HTTP/1.1 200 Connection established\r\n\r\n"
            release.set()
            await asyncio.sleep(0.05)

    play(story, patience=ProxyPatience(idle_s=0.3))


def test_a_thousand_connections_are_taken_a_few_at_a_time_and_all_are_answered() -> None:
    most = 0

    async def story(on: Stage) -> None:
        async def one(number: int) -> bytes:
            nonlocal most
            answer = await on.say(on.get(on.other.port if number % 2 else None))
            most = max(most, len(on.proxy._tasks))
            return answer

        gate = asyncio.Semaphore(60)  # what the kernel lets wait

        async def waiting(number: int) -> bytes:
            async with gate:
                return await one(number)

        answers = await asyncio.gather(*map(waiting, range(1000)))
        assert sum(b" 200 OK" in each for each in answers) == sum(b" 403 " in each for each in answers) == 500
        assert len(on.denied) == 500

    play(story)
    assert 1 < most <= CONNECTIONS


def test_nothing_is_left_after_the_end_whatever_is_under_way() -> None:
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()

    async def story(on: Stage) -> None:
        tunnel = f"CONNECT 127.0.0.1:{on.host.port} HTTP/1.1\r\n\r\n".encode()
        open_ones = [await asyncio.open_connection("127.0.0.1", on.port) for _ in range(30)]
        for number, (_, writer) in enumerate(open_ones):
            writer.write((tunnel, b"GET", b"")[number % 3])
        assert await open_ones[0][0].readline() == b"HTTP/1.1 200 Connection established\r\n"
        on.proxy.close()
        on.proxy.close()
        for reader, writer in open_ones:
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(AMPLE_S):
                    await reader.read()
            await shut(writer)
        assert on.proxy._tasks == set()
        with pytest.raises(OSError, match="Connect call failed"):
            await asyncio.open_connection("127.0.0.1", on.port)

    play(story)
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (before, threads)


def test_when_the_whole_process_has_too_many_connections_the_next_one_is_told_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proxy, "_ALL_CONNECTIONS", threading.BoundedSemaphore(1))

    async def story(on: Stage) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", on.port)
        writer.write(f"CONNECT 127.0.0.1:{on.host.port} HTTP/1.1\r\n\r\n".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        assert (await on.say(on.get())).startswith(b"HTTP/1.1 503 ")
        await shut(writer)

    play(story)


# -- looking names up --------------------------------------------------------------------------------
def test_a_name_is_looked_up_by_the_system_in_a_thread_and_a_slow_one_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, asked = threading.Event(), list[str]()

    def slow(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        if host == "slow.example":
            gate.wait(AMPLE_S)
        if host == "none.example":
            raise socket.gaierror(-2, "Name or service not known")
        return [(2, 1, 6, "", ("127.0.0.1", port)), (10, 1, 6, "", ("fe80::1%lo", port, 0, 1))]

    monkeypatch.setattr(socket, "getaddrinfo", slow)

    async def story() -> None:
        assert await proxy.lookup("fast.example", 80) == [*map(ipaddress.ip_address, ("127.0.0.1", "fe80::1%lo"))]
        with pytest.raises(OSError, match="not known"):
            await proxy.lookup("none.example", 80)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await proxy.lookup("slow.example", 80)
        monkeypatch.setattr(proxy, "_LOOKUPS", threading.BoundedSemaphore(1))
        proxy._LOOKUPS.acquire()
        with pytest.raises(OSError, match="too many names"):
            await proxy.lookup("fast.example", 80)

    try:
        asyncio.run(story())
    finally:
        gate.set()
    assert asked == ["fast.example", "none.example", "slow.example"]
