"""The first connection to a server: a handshake, a list of tools, a pin and one call that succeeds.

Promises   "available" means that all four went well; what did not is told with the server's last words.

Read next: `mcp_client.py`.
"""

from __future__ import annotations

import json
import os

from surefoot.envs.servers import server_views
from surefoot.envs.servers.mcp_lines import UNAVAILABLE, WireFault
from surefoot.envs.servers.mcp_pins import Listing, check_pin
from surefoot.envs.servers.mcp_pool import Pool
from surefoot.envs.servers.mcp_sdk import Refused
from surefoot.envs.servers.mcp_servers import Server
from surefoot.envs.servers.mcp_session import Connection
from surefoot.envs.servers.tool_text import shown
from surefoot.errors import ToolError
from surefoot.safe_text import printable


async def begin(pool: Pool, pin: str | None, timeout_s: float) -> Listing:
    """Handshake, list, pin and probe of one server; its first connection is kept if it is shared.

    Args:
        pin: the SHA-256 that its tools must have; None when nobody wrote one down.
    """
    connection: Connection | None = None
    try:
        connection = await pool.connect()
        listing = connection.listing
        if listing is None:
            raise WireFault(UNAVAILABLE, "gave no list of tools")
        if pin is not None:
            check_pin(listing, pin)
        await _probe(connection, pool.server, timeout_s)
    except WireFault as fault:
        tail = connection.tail() if connection is not None else pool.last_words
        raise unavailable(pool.server, fault, tail, pool.denied) from fault
    pool.adopt(connection)
    return listing


def unavailable(server: Server, fault: WireFault, tail: str, denied: int = 0) -> ToolError:
    """A server that the run cannot begin with.

    Args:
        denied: how often it tried to reach the network and was refused.
    """
    hint = ""
    loose = [word for word in server.command[1:] if not os.path.isabs(word) and os.path.isfile(word)]
    if loose and server.cwd is None:
        hint = f"; it runs in a private folder, so give the full path of {loose[0]}"
    return ToolError(
        f"tool server {server.name} ({printable(server.place)[:200]}) {fault.text}" + indented(tail),
        "a server is available when it shakes hands, lists its tools and answers its probe as it should",
        f"run its command by hand and look at what it says{hint}{server_views.hint(server, tail, denied)}",
    )


def indented(tail: str) -> str:
    """Last words below an error's first line."""
    return "".join(f"\n    | {line}" for line in tail.splitlines())


async def _probe(connection: Connection, server: Server, timeout_s: float) -> None:
    """One call that has to succeed."""
    if server.probe is None:
        return
    tool, arguments = server.probe
    try:
        said = await connection.call(tool, arguments, timeout_s)
    except Refused as refused:
        raise WireFault(UNAVAILABLE, f"refused its probe: {shown(str(refused))[:200]}") from refused
    if said.is_error:
        raise WireFault(UNAVAILABLE, f"answered its probe with an error: {shown(said.text)[:200]}")
    if server.probe_answer is not None and said.text.strip() != server.probe_answer.strip():
        raise WireFault(
            UNAVAILABLE,
            f"answered its probe {_short(tool)} {_short(json.dumps(dict(arguments), ensure_ascii=False))} with "
            f"{_short(said.text)!r}, and {_short(server.probe_answer)!r} is expected",
        )


def _short(text: str) -> str:
    return printable(text.strip())[:200]
