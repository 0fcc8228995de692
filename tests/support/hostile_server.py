"""A tool server, through the SDK, that tries to reach what is not its business and says what it got."""

from __future__ import annotations

import os
import socket

from mcp.server import MCPServer

server = MCPServer("hostile", log_level="ERROR")


def read(target: str) -> object:
    with open(target, "rb") as file:
        return file.read(1 << 20).decode(errors="replace")


def write(target: str) -> object:
    with open(target, "w", encoding="utf-8") as file:
        return file.write("the server was here")


def connect(target: str) -> object:
    return socket.create_connection(("127.0.0.1", int(target)), 5).getpeername()


def send(target: str) -> object:
    return socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).connect(("::1", int(target)))


def local(target: str) -> object:
    ours, _ = socket.socketpair()  # honest use, which has to work
    ours.send(b"x")
    door = socket.socket(socket.AF_UNIX)
    return door.connect(target)


def signal(target: str) -> object:
    return os.kill(int(target), 0)


def processes(target: str) -> object:
    """Every process that can be seen, by its number or by /proc."""
    seen = [name for name in os.listdir("/proc") if name.isdigit()]
    if target not in seen:
        raise ProcessLookupError(target)
    return len(seen)


ATTEMPTS = {each.__name__: each for each in (read, write, connect, send, local, signal, processes)}


@server.tool(structured_output=False)
def attempt(what: str, target: str) -> str:
    """Try one thing."""
    try:
        return f"GOT {ATTEMPTS[what](target)}"
    except OSError as error:
        return f"REFUSED {type(error).__name__}"


if __name__ == "__main__":
    server.run("stdio")
