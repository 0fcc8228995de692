"""Hosts that a contained server is granted: it reaches them as libraries do, and nothing else by any way.

Each way out is tried by the same server with the whole network, too, where it succeeds: without that its refusal would
prove nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import ipaddress
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox_host import AMPLE, AMPLE_S, needs_sandbox
from server_kinds import Belongings

from surefoot.errors import ToolError
from surefoot.records import Task
from surefoot.sandbox import host
from surefoot.sandbox import process as sandbox_link
from surefoot.tools.mcp import hosts, proxy
from surefoot.tools.mcp.hosts import Address, HostGrants
from surefoot.tools.mcp.toolkit import MCPToolkit, Server
from surefoot.tracking.process_logs import FILE, attempts_of, hosts_of

pytestmark = [
    pytest.mark.mcp,
    needs_sandbox,
]
FETCHING = Path(__file__).parents[1] / "support" / "fetching_server.py"
TASK = Task(id="t", prompt="fetch")


class Page(http.server.BaseHTTPRequestHandler):
    """Says who it is and what it was asked for."""

    def do_GET(self) -> None:
        body = f"page {self.path} of {self.server.server_address[1]}".encode()  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        self.server.visits.append(args)  # type: ignore[attr-defined]


class Site(http.server.ThreadingHTTPServer):
    """A host on loopback, and who came."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Page)
        self.visits: list[Any] = []
        self.port = int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left early is none of this test's business."""


@contextlib.contextmanager
def site(certificate: Path | None = None) -> Iterator[Site]:
    with Site() as made:
        if certificate is not None:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(certificate)
            made.socket = tls.wrap_socket(made.socket, server_side=True)
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield made
        finally:
            made.shutdown()
            thread.join()


@contextlib.contextmanager
def fetching(network: Any, log: Path | None = None, **keys: Any) -> Iterator[Any]:
    """`fetch(way, target)` of a real server with this grant, and its toolkit."""
    command = (sys.executable, str(FETCHING))
    kit = MCPToolkit([Server("f", command=command, isolation="shared", network=network, **keys)], AMPLE, log_dir=log)
    try:
        box = kit.open(TASK, "train/0/0", 0)

        def fetch(way: str, target: str) -> str:
            return box.call("f__fetch", {"way": way, "target": target}, AMPLE_S).text

        fetch.kit = kit  # type: ignore[attr-defined]
        yield fetch
        box.close()
    finally:
        kit.close()


def test_a_granted_host_is_reached_by_usual_libraries_and_another_port_by_no_way(tmp_path: Path) -> None:
    with site() as granted, site() as other:
        home, out = f"127.0.0.1:{granted.port}", f"127.0.0.1:{other.port}"
        ways = {
            "by_urllib": f"http://{out}/x", "by_httpx": f"http://{out}/x", "direct": out, "send": "9",
            "look_up": "example.com",
        }  # fmt: skip
        tricks = [
            f"CONNECT {out} HTTP/1.1\r\n\r\n", f"CONNECT {out} HTTP/1.1\r\nHost: {home}\r\n\r\n",
            f"GET http://{out}/ HTTP/1.1\r\nHost: {home}\r\n\r\n", f"GET / HTTP/1.1\r\nHost: {out}\r\n\r\n",
            f"GET http://{home}@{out}/ HTTP/1.1\r\n\r\n", f"GET http://{home}/\r\nHost: {out}\r\n HTTP/1.1\r\n\r\n",
            f"CONNECT localhost:{other.port} HTTP/1.1\r\n\r\n", f"CONNECT [::1]:{other.port} HTTP/1.1\r\n\r\n",
        ]  # fmt: skip
        with fetching((home,), tmp_path / "logs") as fetch:
            assert fetch("by_urllib", f"http://{home}/a") == f"GOT page /a of {granted.port}"
            assert fetch("by_httpx", f"http://{home}/b") == f"GOT page /b of {granted.port}"
            assert fetch("raw", f"GET http://{home}/c HTTP/1.1\r\nHost: {out}\r\n\r\n").startswith("GOT HTTP/1.0 200")
            said = {way: fetch(way, target) for way, target in ways.items()}
            said |= {trick: fetch("raw", trick) for trick in tricks}
            assert {way for way, text in said.items() if not text.startswith("REFUSED")} == set(), said
            assert "403" in said["by_urllib"], said
            kit = fetch.kit
        assert len(granted.visits) == 3
        assert other.visits == []
        through_proxy = 2 + len(tricks)
        assert through_proxy + 1 <= kit.denied["f"] <= through_proxy + 20, "and a datagram, and what a lookup tries"
        assert attempts_of(tmp_path / "logs") == kit.denied
        assert {out, "(malformed)", f"[::1]:{other.port}"} <= set(hosts_of(tmp_path / "logs")["f"])
        rows = [json.loads(line) for line in (tmp_path / "logs" / FILE).read_text().splitlines()]
        assert rows[-1]["hosts"][out] == 5, rows

        with fetching(True) as planted:
            assert planted("direct", out).startswith("GOT"), "with the whole network its own socket gets there"
            assert planted("by_urllib", f"http://{out}/x") == f"GOT page /x of {other.port}"
            assert planted("send", "9").startswith("GOT")


def test_planted_a_proxy_that_keeps_no_grants_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with site() as granted, site() as other:
        monkeypatch.setattr(HostGrants, "cover", lambda *_: True)
        with fetching((f"127.0.0.1:{granted.port}",)) as fetch:
            assert fetch("by_urllib", f"http://127.0.0.1:{other.port}/x") == f"GOT page /x of {other.port}"
            assert fetch.kit.denied == {}
        assert len(other.visits) == 1


def test_without_landlock_the_empty_network_refuses_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    spawn = host.spawn

    def without(streams: Any, *, network: bool = False) -> Any:
        return dataclasses.replace(spawn(streams, network=network), landlock=0)

    monkeypatch.setattr(host, "spawn", without)
    with site() as granted, site() as other, fetching((f"127.0.0.1:{granted.port}",)) as fetch:
        assert fetch("by_urllib", f"http://127.0.0.1:{granted.port}/a").startswith("GOT")
        assert "Connection refused" in fetch("direct", f"127.0.0.1:{other.port}")
        assert "unreachable" in fetch("direct", "1.1.1.1:443")
        assert other.visits == []


def test_a_name_that_leads_to_this_machine_is_refused_by_where_it_leads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def lookup(host: str, port: int) -> list[Address]:
        return [ipaddress.ip_address("127.0.0.1")]

    monkeypatch.setattr(proxy, "lookup", lookup)
    with site() as inner:
        address, name = f"127.0.0.1:{inner.port}", f"rebound.example:{inner.port}"
        with fetching((name,), tmp_path / "logs") as fetch:
            assert "REFUSED HTTPError: HTTP Error 403" in fetch("by_urllib", f"http://{name}/x")
            assert inner.visits == []
        assert hosts_of(tmp_path / "logs") == {"f": (f"{name} at 127.0.0.1",)}
        with fetching((name, address)) as fetch:
            assert fetch("by_urllib", f"http://{name}/x") == f"GOT page /x of {inner.port}", "granted itself"
        monkeypatch.setattr(hosts, "is_public", lambda address: True)
        with fetching((name,)) as planted:
            assert planted("by_urllib", f"http://{name}/x").startswith("GOT"), "planted: nobody looks where it leads"


def test_tls_goes_through_to_the_host_itself(tmp_path: Path) -> None:
    certificate = tmp_path / "site.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=site".split()
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(certificate), "-out", str(tmp_path / "cert.pem")]
    made = shutil.which("openssl")
    if made is None:
        pytest.skip("openssl is not here to make a certificate")
    subprocess.run([made, *words, *names], check=True, capture_output=True)
    shown = tmp_path / "shown"
    shown.mkdir()
    shutil.copy(tmp_path / "cert.pem", shown / "cert.pem")
    for folder in (tmp_path, shown):
        folder.chmod(0o755)
    with open(certificate, "a", encoding="ascii") as file:
        file.write((tmp_path / "cert.pem").read_text())
    with site(certificate) as secure:
        address = f"https://127.0.0.1:{secure.port}/t"
        with fetching((f"127.0.0.1:{secure.port}",), read=(shown,)) as fetch:
            assert fetch("by_tls", f"{address} {shown / 'cert.pem'}") == f"GOT page /t of {secure.port}"
            assert "CERTIFICATE_VERIFY_FAILED" in fetch("by_urllib", address), "nobody stands in between"
            assert fetch.kit.denied == {}


def test_a_crowd_of_connections_is_bounded_and_nothing_is_left_after_the_end() -> None:
    with site() as granted:
        grant = f"127.0.0.1:{granted.port}"
        with fetching((grant,)) as fetch:
            fetch("by_urllib", f"http://{grant}/warm")  # what is opened once is open
        before = Belongings.now()
        with fetching((grant,)) as fetch:
            during = len(os.listdir("/proc/self/fd"))
            assert fetch("crowd", f"http://{grant}/x") == f"GOT page /x of {granted.port}"
            assert len(os.listdir("/proc/self/fd")) < during + 2 * proxy.CONNECTIONS + 20
            assert fetch("hold", f"CONNECT {grant} HTTP/1.1\r\n\r\n") == "GOT 8"
            assert fetch("hold", "GET") == "GOT 16"
        assert Belongings.now().more_than(before) == []


# -- a door that does not open ------------------------------------------------------------------------
@pytest.fixture
def planted_keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The process that sandboxes are born by, from a changed copy of our sources."""

    def plant(old: str, new: str) -> None:
        source = Path(sandbox_link.__file__).parents[2]
        shutil.copytree(source, tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "assets"))
        path = tmp_path / "src" / "surefoot" / "sandbox" / "walls.py"
        text = path.read_text()
        assert text.count(old) == 1, "the planted place is there"
        path.write_text(text.replace(old, new))
        sandbox_link.close_server()
        rest = sandbox_link._SOURCE.replace(str(source), str(tmp_path / "src"))
        monkeypatch.setattr(sandbox_link, "_SOURCE", rest)

    yield plant
    sandbox_link.close_server()


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("_SET_FLAGS, _UP = 0x8913, 0x8914", "_SET_FLAGS, _UP = 0x8913, 0x89FF", "switch on the loopback device"),
        ('listener.bind(("127.0.0.1", port))', 'listener.bind(("10.1.2.3", port))', "listen on 127.0.0.1:3128 inside"),
    ],
)
def test_where_the_door_cannot_be_made_the_start_is_refused_by_name(
    planted_keeper: Any, old: str, new: str, said: str
) -> None:
    planted_keeper(old, new)
    with pytest.raises(ToolError, match=said), fetching(("127.0.0.1:9",)):
        pass


def test_where_the_door_cannot_be_handed_over_the_start_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    received = socket.recv_fds

    def without(link: socket.socket, size: int, most: int, flags: int = 0) -> Any:
        data, descriptors, *rest = received(link, size, most, flags)
        if b"listening" in data:
            for descriptor in descriptors:
                os.close(descriptor)
            descriptors = []
        return data, descriptors, *rest

    monkeypatch.setattr(socket, "recv_fds", without)
    with pytest.raises(ToolError, match="no descriptor left to reach the granted hosts by"), fetching(("127.0.0.1:9",)):
        pass


def test_a_server_that_needs_another_host_at_its_start_is_told_which(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text("import urllib.request\nurllib.request.urlopen('http://127.0.0.1:9/')\n")
    server = Server("mine", command=(sys.executable, "-S", "-E", str(script)), network=("api.example.com",))
    kit = MCPToolkit([server], AMPLE)
    with pytest.raises(ToolError, match="HTTP Error 403") as caught:
        kit.start()
    assert 'it tried to reach 127.0.0.1:9 1 times, which "network": ["HOST:PORT"] grants' in caught.value.fix
    assert "reaches api.example.com (443, 80) and no other host" in caught.value.fix
