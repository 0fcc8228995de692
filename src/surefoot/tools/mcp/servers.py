"""Tool servers as a run declares them: where they are, what they may do, and how much of our time and memory.

Owns       `Server`, `Limits` and `ServerStatus`: plain values, checked when they are made.
Never      starts, connects or imports the MCP package.

Read next: `toolkit.py`, which makes tools of them.
"""

from __future__ import annotations

import difflib
import importlib.util
import math
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from surefoot.errors import ToolError
from surefoot.system.connections import holds_credentials, keeps_a_key
from surefoot.system.json import loads
from surefoot.tools.mcp.hosts import HostGrant, in_words

MIB = 1 << 20
PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ")
"""Of our own environment a server sees these; everything else has to be named in `Server.env`."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")


@dataclass(frozen=True)
class ServerLimits:
    """How much a server may take before it is cut off.

    Example:
        >>> Limits(call_timeout_s=5).max_result_chars
        4000
    """

    call_timeout_s: float = 30.0
    """Longest wait for one answer, whatever progress is reported meanwhile."""
    connect_timeout_s: float = 20.0
    """From starting a server to having its list of tools."""
    max_line_bytes: int = MIB
    """Longest message that is kept; of a longer one the beginning is."""
    max_result_bytes: int = 64 * MIB
    """A message that goes on beyond this is a flood: the server is ended."""
    max_result_chars: int = 4000
    """What the model sees of one answer; the rest is cut, and the cut is shown."""
    messages_per_s: float = 500.0
    """Messages nobody asked for: more is a flood."""
    bytes_per_s: float = 64.0 * MIB
    """All that a server says."""
    restarts: int = 3
    """How often a server that ended is started again before its calls fail."""
    backoff_s: float = 0.1
    """Pause before the first restart; it doubles from one to the next."""
    concurrency: int = 64
    """Calls under way at any time, over all servers."""
    stderr_bytes: int = 64 * 1024
    """The last of what a server writes to its standard error is kept, for error messages."""
    shutdown_s: float = 2.0
    """Patience with a server that was asked to end."""
    write_timeout_s: float = 5.0
    """A server that does not read what we write is given up after this."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            least = 0 if each.name in ("restarts", "backoff_s") else 1e-9
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
                raise ToolError(
                    f"{each.name} = {value!r} is no limit",
                    "a server without limits can hold up or fill up the whole run",
                    "give a finite number above 0",
                )


@dataclass(frozen=True)
class Server:
    """One tool server: an argv, an address, or an object in this process; exactly one of the three.

    Example:
        >>> Server("time", command=("python", "-m", "mcp_server_time")).isolation
        'isolated'
    """

    name: str
    command: tuple[str, ...] = ()
    """Program and arguments, no shell. It runs in a private temporary folder unless `cwd` says otherwise."""
    url: str | None = None
    in_memory: Any = None
    """A function that returns a server object: called once per connection."""
    isolation: Literal["isolated", "shared"] = "isolated"
    """`isolated`: every rollout has a server (or session) of its own. `shared`: all rollouts see the same state."""
    connections: int = 1
    """How many clients a shared server has."""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables for the server, beside PATH and the language; nothing else of our environment is passed on."""
    cwd: Path | None = None
    tools: tuple[str, ...] | None = None
    """Only these of its tools are offered; all of them when left out."""
    idempotent: tuple[str, ...] = ()
    """Tools that may be asked again after a failure: twice does no more than once."""
    probe: tuple[str, Mapping[str, Any]] | None = None
    """One call, tool and arguments, that has to succeed before the server counts as available."""
    probe_answer: str | None = None
    """What the probe has to be answered with, spaces around it left out; any answer but an error when left out."""
    token_env: str | None = None
    """Name of the variable that holds the bearer token for `url`, which is then https or on this machine."""
    warm: int = 0
    """Servers started ahead, each for one rollout to come."""
    sandbox: bool = True
    """Whether a command runs contained. False is the explicit word for one with all our rights; the run shows it."""
    read: tuple[Path, ...] = ()
    """Folders and files that a contained server may read, beside the system and its own installation."""
    write: tuple[Path, ...] = ()
    """Folders in which a contained server may make and change files."""
    network: bool | tuple[str, ...] = False
    """What a contained server reaches: nothing; with true all of it, this machine's own ports included; or these hosts,
    written `host` (ports 443 and 80), `host:port` or `*.domain`, through a proxy that keeps to them."""

    def __post_init__(self) -> None:
        problem = self._problem()
        if problem:
            raise ToolError(
                f"tool server {self.name!r}: {problem}",
                "a server that is not declared clearly is not started",
                "correct its declaration",
            )

    @property
    def contained(self) -> bool:
        """Whether it runs in a sandbox."""
        return bool(self.command) and self.sandbox

    @property
    def containment(self) -> str:
        """What it may reach, in words, for plans and reports."""
        if not self.command:
            return "over HTTP: runs elsewhere" if self.url is not None else "in this process"
        if not self.sandbox:
            return 'NOT contained ("sandbox": false): your files, your network, your rights'
        grants = [f"reads {path}" for path in self.read] + [f"writes {path}" for path in self.write]
        whole = "has the network" if self.network else "no network"
        return ", ".join(["contained", *grants, in_words(self.hosts) if self.hosts else whole])

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that it is granted one by one; empty when it has no network, or all of it."""
        return () if isinstance(self.network, bool) else tuple(self.network)

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        return " ".join(self.command) if self.command else self.url or "in this process"

    def environment(self, private: str) -> dict[str, str]:
        """What the server's process sees; its home and temporary folder are private."""
        ours = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        return {**ours, "HOME": private, "TMPDIR": private, "PYTHONUNBUFFERED": "1", **self.env}

    def _problem(self) -> str | None:
        if not _NAME.fullmatch(str(self.name)):
            return "a name has 1 to 32 letters, digits, - or _, and begins with a letter or digit"
        if sum(map(bool, (self.command, self.url, self.in_memory is not None))) != 1:
            return "give exactly one of command, url and in_memory"
        words: Any = self.command  # whoever calls us may not check types
        if not isinstance(words, tuple | list) or any(not isinstance(word, str) or "\0" in word for word in words):
            return f"command is a list of texts, not {self.command!r}"
        if self.url is not None and (problem := self._address_problem(self.url)):
            return problem
        if self.in_memory is not None and not callable(self.in_memory):
            return "in_memory is a function that makes a server; one object would be the same for every rollout"
        if self.isolation not in ("isolated", "shared"):
            return f"isolation is 'isolated' or 'shared', not {self.isolation!r}"
        if self.connections < 1 or self.warm < 0:
            return f"connections = {self.connections} and warm = {self.warm}: at least 1 and 0"
        if self.probe_answer is not None and self.probe is None:
            return "an answer is expected of a probe that it does not have"
        if (self.read or self.write or self.network) and not self.contained:
            return "read, write and network are grants to a contained server; this one " + (
                "has all of it with sandbox = false" if self.command else "is no command that we start"
            )
        if problem := self._network_problem():
            return problem
        if self.token_env is not None and not os.environ.get(self.token_env):
            return f"its token should be in the variable {self.token_env}, which is not set"
        return None

    def _network_problem(self) -> str | None:
        """Why `network` is no grant."""
        given: Any = self.network  # whoever calls us may not check types
        if isinstance(given, bool):
            return None
        if not isinstance(given, tuple | list) or not given or any(not isinstance(each, str) for each in given):
            return f"network is true, false or a list of hosts with at least one, not {given!r}"
        for each in given:
            try:
                HostGrant.read(each)
            except ValueError as error:
                shown = each.rpartition("@")[2][:200]  # a password is not repeated
                return f"network grants {shown!r}, which is no host or host:port: {error}"
        taken = sorted({"http_proxy", "https_proxy", "all_proxy", "no_proxy"} & {name.lower() for name in self.env})
        if taken:
            return f"its variables set {taken[0]}, and granted hosts are reached through a proxy of ours, named there"
        return None

    def _address_problem(self, url: str) -> str | None:
        """The rule of `engine.url`: nothing secret in an address, and no key where others can read it."""
        if not url.isprintable() or set(url) & set(" \\"):
            return "its address holds a blank, a backslash or a character that cannot be seen"
        try:
            if holds_credentials(url):
                return (
                    "its address holds a user name or password, and addresses are logged; name a variable in token_env"
                )
            if not url.startswith(("http://", "https://")) or not urlsplit(url).hostname:
                return f"{url!r} is no address; it begins with http:// or https://"
        except ValueError as error:
            return f"its address cannot be read: {error}"
        if self.token_env is not None and not keeps_a_key(url):
            return (
                f"the token in {self.token_env} would go to {url} in clear text, where anybody on the way can read it; "
                "use https, or a server on this machine"
            )
        return None


@dataclass(frozen=True)
class ServerStatus:
    """Whether a server answers: a handshake, a list of tools, and its probe call."""

    name: str
    available: bool
    tools: tuple[str, ...] = ()
    pin: str = ""
    """SHA-256 over its tools' names, descriptions and schemas."""
    problem: str = ""
    """Why it is not available, with the last lines of its standard error."""


# -- Whether a server's program is there at all: looked up, not started ---------------------------


def refuse_missing_program(server: Server) -> None:
    """A `ToolError` when the command, the script or the module that a server names does not exist."""
    if not server.command:
        return
    program, *words = server.command
    path = server.environment("").get("PATH", os.defpath)
    if shutil.which(program if "/" not in program else str(_from(server, program)), path=path) is None:
        raise _missing(server, f"there is no program {program!r}", _nearest(program, path))
    if not _is_python(program) or not words:
        return
    if words[0] == "-m" and len(words) > 1 and "PYTHONPATH" not in server.env and not _has_module(words[1]):
        raise _missing(server, f"Python has no module {words[1]!r}", f"pip install {words[1].replace('_', '-')}")
    if not words[0].startswith("-") and not _from(server, words[0]).exists():
        where = "" if Path(words[0]).is_absolute() else ": it starts in a private folder, so write {here}/FILE"
        raise _missing(server, f"there is no file {words[0]!r}", f"correct the path{where}")


def _from(server: Server, word: str) -> Path:
    """A file as the server's process finds it; nothing lies in a private folder."""
    return (server.cwd or Path("/nonexistent")) / word


def _is_python(program: str) -> bool:
    return Path(program) == Path(sys.executable)


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name.partition(".")[0]) is not None
    except ValueError:
        return True  # something is there; whether it works, its start tells


def _nearest(program: str, path: str) -> str:
    """A way on: the same program beside our own Python, or the nearest name."""
    beside = Path(sys.executable).parent
    if (beside / program).is_file():
        return f"it lies beside the Python that runs surefoot, which is not on PATH: write {beside / program}"
    names: set[str] = set()
    for folder in (*path.split(os.pathsep), str(beside)):
        try:
            names.update(os.listdir(folder or "."))
        except OSError:
            continue
    near = difflib.get_close_matches(program, sorted(names), n=1, cutoff=0.75)
    return f"did you mean {near[0]}?" if near else "install it, or give its full path"


def _missing(server: Server, what: str, fix: str) -> ToolError:
    return ToolError(f"tool server {server.name} cannot start: {what}", "nobody would answer its calls", fix)


# -- Reads the file that `tools.servers` names: MCP servers in the form that clients share, and what we ask beyond it
# {"mcpServers": {
# "clock": {"command": "python", "args": ["-m", "mcp_server_time"], "isolation": "shared",
# "probe": {"tool": "get_current_time", "arguments": {"timezone": "UTC"}}},
# "search": {"url": "http://127.0.0.1:8931/mcp", "token_env": "SEARCH_TOKEN"}}}
#
# Promises   every problem of the file at once, with the nearest key; `{here}` in an argument is the file's own folder
# and
# `python` as a command is the Python that runs us; of the environment only named variables are passed on.
# Never      starts anything.


_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "command": str, "args": list, "url": str, "isolation": str, "connections": int, "env": dict, "pass_env": list,
    "tools": list, "idempotent": list, "probe": dict, "token_env": str, "warm": int, "sha256": str,
    "sandbox": bool, "read": list, "write": list, "network": (bool, list),
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
            elif type(value) not in (kinds := _kinds(key)):
                wanted = " or a ".join(kind.__name__ for kind in kinds)
                yield f"{name}: {key} is a {type(value).__name__}, it must be a {wanted}"
        yield from _entries(name, server)


def _kinds(key: str) -> tuple[type, ...]:
    kinds = _KINDS[key]
    return kinds if isinstance(kinds, tuple) else (kinds,)


def _entries(name: str, server: Mapping[str, Any]) -> Iterator[str]:
    """What lists and tables hold."""
    for key in ("args", "pass_env", "tools", "idempotent", "read", "write", "network"):
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
        sandbox=given.get("sandbox", True), network=_network(given.get("network", False)),
        read=_paths(given.get("read", ()), here), write=_paths(given.get("write", ()), here),
    )  # fmt: skip


def _network(given: bool | list[str]) -> bool | tuple[str, ...]:
    return given if isinstance(given, bool) else tuple(given)


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
