"""A tool server, through the SDK, that fetches over the network as libraries do it, and as somebody who wants out does."""

from __future__ import annotations

import socket
import ssl
import urllib.error
import urllib.request

import httpx2
from mcp.server import MCPServer

server = MCPServer("fetching", log_level="ERROR")
PROXY = ("127.0.0.1", 3128)


def by_urllib(target: str) -> object:
    with urllib.request.urlopen(target, timeout=30) as page:
        return page.read().decode()


def by_httpx(target: str) -> object:
    answer = httpx2.get(target, timeout=30)
    answer.raise_for_status()
    return answer.text


def by_tls(target: str) -> object:
    """`https://... CERTIFICATE`: with a client that trusts this certificate."""
    address, _, certificate = target.partition(" ")
    trusted = ssl.create_default_context(cafile=certificate)
    with urllib.request.urlopen(address, timeout=30, context=trusted) as page:
        return page.read().decode()


def direct(target: str) -> object:
    """A socket of its own, past the proxy."""
    host, _, port = target.rpartition(":")
    return socket.create_connection((host, int(port)), 10).getpeername()


def send(target: str) -> object:
    return socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(("127.0.0.1", int(target)))


def look_up(target: str) -> object:
    return socket.getaddrinfo(target, 80)


def raw(target: str) -> object:
    """These bytes to the proxy, and the first line of its answer; an OSError when that is no success."""
    with socket.create_connection(PROXY, 10) as link:
        link.sendall(target.encode())
        line = link.makefile("rb").readline().decode()
    if " 200 " not in line:
        raise PermissionError(line)
    return line


def crowd(target: str) -> object:
    """A thousand connections that say nothing, as many as there is room for; then a page all the same."""
    held = []
    for _ in range(1000):
        link = socket.socket()
        link.setblocking(False)
        link.connect_ex(PROXY)
        held.append(link)
    for link in held:
        link.close()
    return by_urllib(target)


def hold(target: str) -> object:
    """Connections that stay open when this call is over."""
    for _ in range(8):
        link = socket.create_connection(PROXY, 10)
        link.sendall(target.encode())
        _held.append(link)
    return len(_held)


_held: list[socket.socket] = []
WAYS = {each.__name__: each for each in (by_urllib, by_httpx, by_tls, direct, send, look_up, raw, crowd, hold)}


@server.tool(structured_output=False)
def fetch(way: str, target: str) -> str:
    """Try one way."""
    try:
        return f"GOT {WAYS[way](target)}"
    except (OSError, httpx2.HTTPError) as error:
        return f"REFUSED {type(error).__name__}: {error}"


if __name__ == "__main__":
    server.run("stdio")
