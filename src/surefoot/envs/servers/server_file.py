"""Reads the file that `tools.servers` names: MCP servers in the form that clients share, and what we ask beyond it.

    {"mcpServers": {
      "clock": {"command": "python", "args": ["-m", "mcp_server_time"], "isolation": "shared",
                "probe": {"tool": "get_current_time", "arguments": {"timezone": "UTC"}}},
      "search": {"url": "http://127.0.0.1:8931/mcp", "token_env": "SEARCH_TOKEN"}}}

Promises   every problem of the file at once, with the nearest key; `{here}` in an argument is the file's own folder and
           `python` as a command is the Python that runs us; of the environment only named variables are passed on.
Never      starts anything.

Read next: `mcp_servers.py`, what each server may be told.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from surefoot.envs.servers.mcp_servers import Server
from surefoot.envs.strict_json import loads
from surefoot.errors import ToolError

_KINDS: Mapping[str, type] = {
    "command": str, "args": list, "url": str, "isolation": str, "connections": int, "env": dict, "pass_env": list,
    "tools": list, "idempotent": list, "probe": dict, "token_env": str, "warm": int, "sha256": str,
    "sandbox": bool, "read": list, "write": list, "network": bool,
}  # fmt: skip
_LARGEST = 1 << 20


def read_servers(path: Path) -> tuple[tuple[Server, ...], dict[str, str]]:
    """The servers, and the pins of those that have one."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise _refused(path, [f"cannot be read: {error}"]) from error
    try:
        table = loads(text, max_chars=_LARGEST)
    except ValueError as error:
        raise _refused(path, [str(error)]) from error
    problems = list(_misfits(table))
    if problems:
        raise _refused(path, problems)
    given: dict[str, dict[str, Any]] = table["mcpServers"]
    pins = {name: server["sha256"] for name, server in given.items() if "sha256" in server}
    return tuple(_server(name, server, path.parent.absolute()) for name, server in given.items()), pins


def _misfits(table: Any) -> Iterator[str]:
    if not isinstance(table, dict) or set(table) != {"mcpServers"} or not isinstance(table["mcpServers"], dict):
        yield 'it is not of the form {"mcpServers": {"name": {...}}}'
        return
    if not table["mcpServers"]:
        yield "it names no server"
    for name, server in table["mcpServers"].items():
        if not isinstance(server, dict):
            yield f"{name}: not an object"
            continue
        for key, value in server.items():
            if key not in _KINDS:
                near = difflib.get_close_matches(key, _KINDS, n=1, cutoff=0.4)
                yield f"{name}: unknown key {key}" + (f"; did you mean {near[0]}?" if near else "")
            elif type(value) is not _KINDS[key]:
                yield f"{name}: {key} is a {type(value).__name__}, it must be a {_KINDS[key].__name__}"
        yield from _entries(name, server)


def _entries(name: str, server: Mapping[str, Any]) -> Iterator[str]:
    """What lists and tables hold."""
    for key in ("args", "pass_env", "tools", "idempotent", "read", "write"):
        value = server.get(key)
        if isinstance(value, list) and any(not isinstance(each, str) for each in value):
            yield f"{name}: {key} holds something that is not text"
    if "sandbox" in server and "command" not in server:
        yield f"{name}: sandbox is for a command that is started here; a server at an address is not ours to contain"
    env, probe = server.get("env"), server.get("probe")
    if isinstance(env, dict) and any(not isinstance(value, str) for value in env.values()):
        yield f"{name}: env holds something that is not text"
    if isinstance(probe, dict) and not (
        set(probe) | {"expect"} == {"tool", "arguments", "expect"} and isinstance(probe["tool"], str)
        and isinstance(probe["arguments"], dict) and isinstance(probe.get("expect", ""), str)
    ):  # fmt: skip
        yield f'{name}: probe is {{"tool": "...", "arguments": {{...}}}}, and may have "expect": "the whole answer"'
    missing = [each for each in server.get("pass_env") or () if isinstance(each, str) and each not in os.environ]
    if missing:
        yield f"{name}: pass_env names {missing[0]}, which is not set"


def _server(name: str, given: Mapping[str, Any], here: Path) -> Server:
    words = [given["command"], *given.get("args", [])] if "command" in given else []
    command = tuple(word.replace("{here}", str(here)) for word in words)
    if command[:1] in (("python",), ("python3",)):
        command = (sys.executable, *command[1:])
    probe = given.get("probe")
    return Server(
        name, command=command, url=given.get("url"), isolation=given.get("isolation", "isolated"),
        connections=given.get("connections", 1),
        env={each: os.environ[each] for each in given.get("pass_env", ())} | given.get("env", {}),
        tools=tuple(given["tools"]) if "tools" in given else None, idempotent=tuple(given.get("idempotent", ())),
        probe=None if probe is None else (probe["tool"], probe["arguments"]), token_env=given.get("token_env"),
        probe_answer=None if probe is None else probe.get("expect"), warm=given.get("warm", 0),
        sandbox=given.get("sandbox", True), network=given.get("network", False),
        read=_paths(given.get("read", ()), here), write=_paths(given.get("write", ()), here),
    )  # fmt: skip


def _paths(words: Iterable[str], here: Path) -> tuple[Path, ...]:
    """Granted folders; a relative one is found from the file's own folder."""
    return tuple(here / os.path.expanduser(word.replace("{here}", str(here))) for word in words)


def _refused(path: Path, problems: list[str]) -> ToolError:
    lines = "".join(f"\n    - {problem}" for problem in problems)
    return ToolError(
        f"{path.name} has {len(problems)} problem(s):{lines}",
        "a server that is not declared clearly is not started",
        "correct the lines above; docs/agents.md shows the form",
    )
