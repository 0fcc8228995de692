"""What every server of this folder does the same way: its command line, and a hint when a name is misspelt."""

from __future__ import annotations

import argparse
import difflib
import json
import signal
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

DATA = Path(__file__).parent / "data"


def rows(file: str) -> list[dict[str, Any]]:
    """The objects of a JSON Lines file of the shipped data."""
    return [json.loads(line) for line in (DATA / file).read_text(encoding="utf-8").splitlines()]


def unknown(what: str, given: str, known: Iterable[str]) -> ToolError:
    """An error for a name that is not there, with those that are spelt like it."""
    names = {name.casefold(): name for name in known}
    near = difflib.get_close_matches(given[:40].casefold(), names, n=3, cutoff=0.5)
    hint = f"; did you mean {', '.join(names[name] for name in near)}?" if near else ""
    return ToolError(f"unknown {what} {given[:40]!r}{hint}")


def parser(about: str | None) -> argparse.ArgumentParser:
    """The options that every server has."""
    made = argparse.ArgumentParser(description=about)
    made.add_argument("--http", type=_port, metavar="PORT", help="serve over HTTP on this machine, not stdio")
    return made


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) > 65_535:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is no port; give a number from 0 (any free one) to 65535")
    return int(text)


def run(server: MCPServer, port: int | None) -> None:
    """Serve over stdio, or over HTTP on this machine alone, until the other side closes or Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # at once: the SDK's way would wait for the next line of input
    if port is None:
        server.run("stdio")
    else:
        _over_http(server, port)


def _over_http(server: MCPServer, port: int) -> None:
    """Port 0 is any free one. Says where it is as soon as it can be reached."""
    import uvicorn

    try:
        door = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise SystemExit(f"{server.name}: cannot serve on port {port}: {error}") from error
    with door:
        print(f"{server.name} is at http://127.0.0.1:{door.getsockname()[1]}/mcp", file=sys.stderr, flush=True)
        uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="warning")).run(sockets=[door])


def serve(server: MCPServer) -> None:
    """Read the command line and serve."""
    run(server, parser(server.instructions).parse_args().http)
