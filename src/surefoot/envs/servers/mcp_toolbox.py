"""The tools of one rollout: what it may call, and the connections that are its own.

Owns       a rollout's isolated connections, from its first call to its end.
Promises   what the model got wrong is told to it and never sent; a server that failed under a rollout is not replaced
           behind its back, because its state would be gone; `close` lets go of everything.

Read next: `mcp_client.py`, which makes the calls.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from surefoot.envs.servers.mcp_lines import CRASHED, UNAVAILABLE, WireFault
from surefoot.envs.servers.mcp_pool import Pool
from surefoot.envs.servers.mcp_servers import Limits
from surefoot.envs.servers.mcp_session import Connection
from surefoot.envs.servers.tool_schema import Check, names_of
from surefoot.envs.servers.tool_text import readable, refusal, shown
from surefoot.protocols import ToolAnswer, ToolSpec


@dataclass(frozen=True)
class Tool:
    """One tool of the run."""

    spec: ToolSpec
    server: str
    name: str
    """As its server calls it."""
    check: Check
    idempotent: bool


class Desk(Protocol):
    """Who knows the run's tools and makes the calls."""

    limits: Limits

    @property
    def names(self) -> list[str]:
        """Every tool's name."""

    def tool(self, name: str) -> Tool | None:
        """The tool of this name, if the run has one."""

    def ask(self, box: MCPToolbox, tool: Tool, arguments: Mapping[str, Any], deadline_s: float) -> ToolAnswer:
        """One call."""

    def release(self, connections: Sequence[Connection]) -> None:
        """Let go of a rollout's own connections."""


class MCPToolbox:
    """The tools of one rollout; its isolated servers are its own and end with it."""

    opening: str | None = None

    def __init__(self, toolkit: Desk, rollout: str) -> None:
        self.rollout, self._toolkit = rollout, toolkit
        self._own: dict[str, Connection] = {}
        self._opening: dict[str, asyncio.Lock] = {}
        self._closed = False

    def call(self, name: str, arguments: Mapping[str, Any], deadline_s: float) -> ToolAnswer:
        """Call and wait, from any thread; a failure that is not the model's is a `ToolFailedError` with its reason."""
        tool = self._toolkit.tool(name)
        if tool is None:
            known = self._toolkit.names
            return ToolAnswer(refusal("unknown_tool", name=shown(name)[:100], known=known[:50]), "refused")
        problems = tool.check(arguments)
        if problems:
            told = [shown(problem) for problem in problems]
            text = refusal("wrong_arguments", tool=name, problems=told, expected=names_of(tool.spec.parameters))
            return ToolAnswer(readable(text, self._toolkit.limits.max_result_chars), "refused")
        return self._toolkit.ask(self, tool, arguments, deadline_s)

    def reward(self) -> float | None:
        """None: servers answer calls, they do not judge."""
        return None

    def close(self) -> None:
        """Let go of the rollout's own servers. May be called twice."""
        self._closed = True
        mine, self._own = list(self._own.values()), {}
        self._toolkit.release(mine)

    # -- for the toolkit, inside its loop ------------------------------------------------------
    async def connect(self, pool: Pool, until: float) -> Connection:
        """This rollout's connection, or one of the shared ones; one that failed is not replaced behind its back."""
        name = pool.server.name
        async with self._opening.setdefault(name, asyncio.Lock()):
            connection = self._own.get(name)
            if connection is None:
                connection = await pool.take(until - time.monotonic())
                if pool.server.isolation == "isolated":
                    if self._closed:
                        pool.let_go(connection)
                        raise WireFault(UNAVAILABLE, "was let go with its rollout")
                    self._own[name] = connection
        try:
            if connection.fault is not None:
                raise connection.fault
            if connection.retired:
                raise WireFault(CRASHED, "failed earlier in this rollout, and its state with it")
            if connection.stale:
                await pool.check_list(connection, until - time.monotonic())
        except WireFault as fault:
            pool.give_back(connection)
            raise connection.with_last_words(fault) from fault
        except BaseException:
            pool.give_back(connection)
            raise
        return connection

    def has_no_state(self, tool: Tool, connection: Connection) -> bool:
        """Whether a fresh server could take over: it is shared, or nothing but repeatable calls were made."""
        server = connection.server
        return server.isolation == "shared" or connection.called <= set(server.idempotent)

    def forget(self, server: str) -> None:
        """The next call has a fresh connection."""
        self._own.pop(server, None)

    def connection(self, tool: Tool) -> Connection | None:
        """This rollout's own connection to the tool's server, if there is one."""
        return self._own.get(tool.server)
