"""Tool servers as a run declares them: where they are, what they may do, and how much of our time and memory.

Owns       `Server`, `Limits` and `ServerStatus`: plain values, checked when they are made.
Never      starts, connects or imports the MCP package.

Read next: `mcp_client.py`, which makes tools of them.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from surefoot.addresses import holds_credentials, keeps_a_key
from surefoot.errors import ToolError

MIB = 1 << 20
PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ")
"""Of our own environment a server sees these; everything else has to be named in `Server.env`."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")


@dataclass(frozen=True)
class Limits:
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
    network: bool = False
    """Whether a contained server has the network: all of it, this machine's own ports included."""

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
        return ", ".join(["contained", *grants, "has the network" if self.network else "no network"])

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
        if self.token_env is not None and not os.environ.get(self.token_env):
            return f"its token should be in the variable {self.token_env}, which is not set"
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
