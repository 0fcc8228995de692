"""Tells which servers are available: `python examples/servers/check.py [NAME ...]`.

A server is available when it has answered the handshake, listed its tools, and answered one call as the table expects.
A file that exists is no server. Exits 0 when all of them are, 1 when one is not (with its last words), 2 or 4 when it
cannot tell: an unknown name, a table that cannot be read.

Read next: `servers.json`, the table that this goes through.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "src"))  # a checkout works without being installed

from surefoot.errors import ConfigError, SurefootError
from surefoot.tools.mcp.servers import read_servers
from surefoot.tools.mcp.toolkit import Server, ServerLimits, ServerStatus, check_servers

TABLE = Path(__file__).parent / "servers.json"


def line(status: ServerStatus) -> str:
    """What was found out about one server."""
    if status.available:
        return f"PASS  {status.name:<13} {', '.join(status.tools)}"
    return f"FAIL  {status.name:<13} " + status.problem.replace("\n", "\n      ")


def chosen(table: Path, names: list[str]) -> list[Server]:
    """The servers of the table, or those of them that were named."""
    servers = {server.name: server for server in read_servers(table)[0]}
    strangers = [name for name in names if name not in servers]
    if strangers:
        known = f"it has {', '.join(servers)}"
        raise ConfigError(f"{table.name} has no server called {strangers[0]!r}", "nothing was checked", known)
    return [servers[name] for name in names or servers]


def main() -> int:
    """Check the named servers, or all."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("names", nargs="*", metavar="NAME", help="only these servers")
    options.add_argument("--table", type=Path, default=TABLE, metavar="FILE", help="another table of servers")
    options.add_argument("--deadline", type=float, default=30.0, metavar="S", help="seconds that a server may take")
    given = options.parse_args()
    try:
        limits = ServerLimits(connect_timeout_s=given.deadline, call_timeout_s=given.deadline)
        found = check_servers(chosen(given.table, given.names), limits)
    except SurefootError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    for status in found:
        print(line(status), flush=True)
    return 0 if found and all(status.available for status in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
