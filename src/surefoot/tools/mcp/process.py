"""What of the host a contained tool server sees: the system, the installation that it runs in, what it was granted.

Owns       the list, worked out from the server's command and its grants.
Promises   of a home folder, a project or a run folder nothing is there but what the command names: the program with its
           installation, and files that are words of the command, each by itself. Folders have to be granted.
Never      mounts or starts anything: `process.py` has that done.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import surefoot
import surefoot_harness
from surefoot.errors import SecurityError, ToolError, ToolFailedError
from surefoot.sandbox import host
from surefoot.sandbox.process import SandboxReports
from surefoot.sandbox.walls import HOSTS, NETWORK, PLAIN, SCRATCH
from surefoot.system.frames import pack
from surefoot.system.process import Child
from surefoot.tools.mcp import supervisor
from surefoot.tools.mcp.hosts import HostGrants, in_words
from surefoot.tools.mcp.proxy import PORT, HostProxy, proxy_variables
from surefoot.tools.mcp.servers import Server

_PACKAGES = [os.path.dirname(os.path.abspath(each.__file__ or "")) for each in (surefoot, surefoot_harness)]
_CLOCK = ("/etc/localtime", "/etc/timezone")
_NAMES = (
    "/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/host.conf", "/etc/gai.conf", "/etc/services",
    "/etc/protocols",
)  # fmt: skip
"""How names are looked up: for servers with the whole network only."""
_TRUST = (
    "/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/ca-certificates", "/etc/pki/tls/certs", "/etc/pki/ca-trust",
    "/etc/crypto-policies",
)  # fmt: skip
"""Whom to believe: for servers with the network, or with hosts."""
_SHEBANG = re.compile(rb"#!\s*(\S+)")
_QUOTED_PATH = re.compile(r"['\"](/[^'\"\n]{1,500})['\"]")
_LONGEST_PTH = 1 << 16
_MOST_LINKS = 40
NOBODY = 65534


def program_of(server: Server) -> str:
    """The server's program as an absolute path; what it is called when there is none."""
    return shutil.which(server.command[0], path=server.environment("").get("PATH", os.defpath)) or server.command[0]


def words_of(server: Server) -> list[str]:
    """The command's words; `..` in the path of a file is resolved, for the folder before it is not shown."""
    words = [program_of(server), *server.command[1:]]
    return [
        os.path.join(os.path.realpath(os.path.dirname(word)), os.path.basename(word))
        if os.path.isabs(word) and ".." in Path(word).parts and os.path.isfile(word) else word
        for word in words
    ]  # fmt: skip


def views(server: Server) -> list[str]:
    """Paths that are shown read-only, outer ones first."""
    wanted = [*host.SYSTEM, *_CLOCK, *(_TRUST if server.network else ()), *(_NAMES if server.network is True else ())]
    wanted += [*_installation(program_of(server)), *_named(server)]
    granted = [*server.read, *([server.cwd] if server.cwd is not None else [])]
    wanted += [str(path) for path in granted if host.checked(path)]
    return host.outermost(each for path in wanted for each in _way_to(path))


def writable(server: Server) -> list[str]:
    """Folders in which it may make and change files."""
    return host.outermost(map(host.checked, server.write))


def refuse_bad_grants(server: Server) -> None:
    """A `ToolError` for a grant that could not be used; a `ConfigError` for a folder that nobody may show."""
    for path in (*server.read, *server.write):
        if not path.exists():
            raise _bad_grant(server, f"is granted {path}, which does not exist", "correct the path, or make the folder")
        host.checked(path)
    for path in server.write:
        if not path.is_dir():
            raise _bad_grant(server, f"may write {path}, which is no folder", "grant the folder that it lies in")
    if os.geteuid() == 0:
        named = [Path(word) for word in _named(server)] if server.contained else []
        for path, need in [*((path, 4) for path in (*server.read, *named)), *((path, 2) for path in server.write)]:
            if not _nobody_may(path, need):
                word = "write" if need == 2 else "read"
                raise _bad_grant(
                    server,
                    f"could not {word} {path}: started by root it is the user `nobody`, and has none of root's rights",
                    f"give that user the right (chown {NOBODY} or chmod o+{word[0]}x), or start surefoot as an "
                    "ordinary user",
                )


def hint(server: Server, tail: str, denied: int, asked: Iterable[str] = ()) -> str:
    """What a contained server that failed may have missed, in words; empty for others.

    Args:
        asked: hosts that it was refused, if it asked for any by name.
    """
    if not server.contained:
        return ""
    unseen = next(_unseen(server, tail), None)
    found = []
    if unseen is not None:
        found.append(f'it cannot see {unseen}, which exists: "read" or "write" in the servers file grants a folder')
    if denied:
        named = ", ".join(list(asked)[:3])
        found.append(
            f"it tried to reach {named or 'the network'} {denied} times, which "
            + ('"network": ["HOST:PORT"] grants' if named else '"network": true grants')
        )
    reach = in_words(server.hosts) if server.hosts else "has the network" if server.network else "has no network"
    known = f"it runs contained: it sees the system, its own installation and what it is granted, and {reach}"
    return f"; {known}; " + ("; ".join(found) or '"read", "write" and "network" in the servers file grant more')


def _unseen(server: Server, tail: str) -> Iterator[str]:
    """Paths of the host that it was given or speaks of, and that are not there for it."""
    shown = [*views(server), *writable(server)]
    beside = [_sibling(server, name) for name in re.findall(r"No module named '(\w{1,80})", tail)]
    for path in (*server.command[1:], *filter(None, beside), *_QUOTED_PATH.findall(tail)):
        if os.path.isabs(path) and os.path.exists(path):
            real = os.path.realpath(path)
            if not any(host.is_inside(real, each) for each in shown):
                yield path


def _sibling(server: Server, module: str) -> str | None:
    """A module that lies beside the server's own file."""
    for word in server.command[1:]:
        for path in (Path(word).with_name(f"{module}.py"), Path(word).with_name(module)) if os.path.isabs(word) else ():
            if path.exists():
                return str(path)
    return None


def _named(server: Server) -> Iterator[str]:
    """Files that are words of the command."""
    return (word for word in words_of(server)[1:] if os.path.isabs(word) and os.path.isfile(word))


def _installation(program: str) -> Iterator[str]:
    """A program, and what it was installed with; for a script, its interpreter as well."""
    if not os.path.isabs(program) or not os.path.isfile(program):
        return
    yield from _around(program)
    with open(program, "rb") as file:
        interpreter = _SHEBANG.match(file.read(256))
    if interpreter is not None:
        yield from _around(os.fsdecode(interpreter[1]))


def _around(program: str) -> Iterator[str]:
    """A program, by its name and where its links lead, with its virtual environment or its libraries."""
    yield program
    real = os.path.realpath(program)
    for path in {program, real}:
        folder, home = os.path.dirname(path), os.path.dirname(os.path.dirname(path))
        if os.path.isfile(os.path.join(home, "pyvenv.cfg")):
            yield home
            yield from _base(os.path.join(home, "pyvenv.cfg"))
        elif os.path.basename(folder) == "bin":
            yield from _libraries(home)
    home = os.path.dirname(os.path.dirname(program))
    yield from _added(home)
    if real == host.python() and os.path.realpath(home) in map(os.path.realpath, (sys.prefix, sys.base_prefix)):
        yield from _PACKAGES


def _libraries(home: str) -> Iterator[str]:
    return (os.path.join(home, name) for name in ("lib", "lib64"))


def _base(config: str) -> Iterator[str]:
    """The libraries of the Python that a virtual environment says it is based on."""
    with open(config, encoding="utf-8", errors="replace") as file:
        for line in file:
            key, _, value = line.partition("=")
            if key.strip() == "home" and os.path.isabs(value.strip()):
                yield from _libraries(os.path.dirname(value.strip()))


def _added(home: str) -> Iterator[str]:
    """What `.pth` files of an installation add: other installations whole, of sources only what can be imported."""
    for site in Path(home, "lib").glob("python*/site-packages"):
        for pth in sorted(site.glob("*.pth")):
            with open(pth, encoding="utf-8", errors="replace") as file:
                lines = file.read(_LONGEST_PTH).splitlines()
            for line in lines:
                folder = Path(line.strip())
                if not folder.is_absolute() or not folder.is_dir():
                    continue
                if folder.name in ("site-packages", "dist-packages"):
                    yield str(folder)
                else:
                    yield from (str(each) for each in folder.iterdir() if _is_module(each))


def _is_module(path: Path) -> bool:
    return (path.suffix == ".py" and path.is_file()) or (path / "__init__.py").is_file()


def _way_to(path: str) -> list[str]:
    """A path with its links: each of them, so that it is found by its own name, and what the last one leads to."""
    found, at, rest = list[str](), "/", list(Path(os.getcwd(), path).parts[1:])
    while rest:
        step = rest.pop(0)
        at = os.path.dirname(at) if step == ".." else os.path.join(at, step)
        if os.path.islink(at) and len(found) < _MOST_LINKS:
            found.append(at)
            at, rest = "/", [*Path(os.path.dirname(at), os.readlink(at)).parts[1:], *rest]
    return [*found, at]


def _nobody_may(path: Path, need: int) -> bool:
    """Whether the user that a contained server is may read (4) or write (2) this, as far as modes tell."""
    state = path.stat()
    need |= 1 if path.is_dir() else 0
    shift = 6 if state.st_uid == NOBODY else 3 if state.st_gid == NOBODY else 0
    return (state.st_mode >> shift) & need == need


def _bad_grant(server: Server, what: str, fix: str) -> ToolError:
    return ToolError(f"tool server {server.name} {what}", "a server without what it needs fails in the run", fix)


# -- One server's process, contained or kept: how it is started, whether it is over, and its certain end
# Owns       the process with all that it starts, and the three pipes until somebody takes them.
# Promises   after `stop`, and when this process goes in any way, everything that the server started goes; `poll` says
# how
# it ended, as a shell would, once nothing of it is left.
# Never      reads a byte of what the server says.
#
# Boxed: sandbox server (one for all) --> first process of a sandbox --> server
# Kept:  supervisor (one each) --> server, with the rights and the files of whoever started us


_LIMITS = {"cpu_s": None, "memory_mb": 0, "processes": 256, "files_open": 1024, "scratch_mb": 64}
"""A server lives as long as its rollout or the run, and its calls have deadlines: neither time nor memory is capped."""


class ServerChild(Protocol):
    """A server's process."""

    pid: int
    """Of whoever stands between us and the server."""
    folder: str
    """The server's private folder, as the server calls it."""
    streams: tuple[int, int, int]
    """Our ends of its standard streams; the caller closes them."""

    def poll(self) -> int | None:
        """Its exit status, as a shell would say it; None while anything of it is there."""

    def stop(self) -> None:
        """End everything, at once, without waiting. May be called twice."""

    def destroy(self) -> None:
        """The same by force, and wait: for somebody who does not react."""


class ToldOfDenied(Protocol):
    """Who is told of attempts to reach the network that were refused."""

    def __call__(self, attempts: int, host: str = "") -> None:
        """So many since the last call, 0 when nobody can count; whom they asked for, where that is known."""


def start_server(server: Server, wrote: Callable[[bytes], None], denied: ToldOfDenied) -> ServerChild:
    """Start a server; an OSError when that fails.

    Args:
        wrote: told what there is to say about a start that failed, like standard error.
        denied: told of attempts to reach the network that were refused.
    """
    return SandboxedServer(server, wrote, denied) if server.contained else SupervisedServer(server)


def refuse_without_walls(server: Server) -> None:
    """A `SecurityError` when a server is to be contained and this host cannot."""
    if not server.contained:
        return
    report = host.available()
    if not report.usable:
        raise SecurityError(
            f"tool server {server.name} cannot be contained on this host: {'; '.join(report.missing)}",
            "it would run with your rights, your files and your network, and nobody said that it may",
            "use a host where unprivileged user namespaces work (docs/sandbox.md says what is needed), or write "
            '"sandbox": false for this server, which plan and report will show',
        )


class SandboxedServer:
    """A server in a sandbox of its own."""

    def __init__(self, server: Server, wrote: Callable[[bytes], None], denied: ToldOfDenied) -> None:
        self.folder = SCRATCH
        self._wrote, self._denied = wrote, denied
        self._grants = HostGrants(server.hosts)
        self._proxy: HostProxy | None = None
        self._reports, self._report = SandboxReports(), dict[str, Any]()
        self._loop = asyncio.get_running_loop()
        request = _request(server)
        theirs, ours = _pipes()
        try:
            self._sandboxed = host.spawn(theirs, network=server.network is True)
        except BaseException as error:
            for descriptor in ours:
                os.close(descriptor)
            if isinstance(error, ToolFailedError):
                raise OSError(error.what) from error
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        self.pid = self._sandboxed.pid
        self.streams = (ours[0], ours[1], ours[2])
        self._status: int | None = None
        with contextlib.suppress(OSError):  # its first process has ended; its report, or the lack of one, says why
            head = json.dumps({**request, "landlock": self._sandboxed.landlock}).encode()
            self._sandboxed.link.sendall(pack(head + b"\n"))
        self._sandboxed.link.setblocking(False)
        self._loop.add_reader(self._sandboxed.link, self._read_reports)

    def _read_reports(self) -> None:
        """What the sandbox's first process says: attempts to reach the network, and the ending."""
        for said in self._reports.read(self._sandboxed.link):
            self._take(said)
        if self._reports.ended:
            self._loop.remove_reader(self._sandboxed.link)

    def _take(self, said: dict[str, Any]) -> None:
        if "listening" in said:
            self._open_proxy()
        if said.get("egress"):
            self._denied(int(said["egress"]))
        if said.get("counted") is False:
            self._denied(0)
        if "failed" in said:
            self._wrote(f"{said['failed']} (inside the sandbox)\n".encode())
        if {"exit", "failed"} & set(said) and not self._report:
            self._report = said

    def _open_proxy(self) -> None:
        """Serve the socket that was made inside; a server whose only way out did not arrive is not left to run."""
        if self._proxy is None and self._reports.descriptors:
            listener = socket.socket(fileno=self._reports.descriptors.pop())
            self._proxy = HostProxy(listener, self._grants, lambda host: self._denied(1, host))
            return
        self._take({"failed": "no descriptor left to reach the granted hosts by"})
        self._sandboxed.kill()

    def _close_proxy(self) -> None:
        if self._proxy is not None:
            self._proxy.close()
        self._reports.close()

    def poll(self) -> int | None:
        """Its exit status once its first process, and with it everything, is gone."""
        if self._status is None and _readable(self._sandboxed.pidfd, 0.0):
            self._read_reports()
            code = int(self._report.get("exit", -signal.SIGKILL))
            code = supervisor.NOT_STARTED if "failed" in self._report else code
            self._status = code if code >= 0 else 128 - code
            self._loop.remove_reader(self._sandboxed.link)
            self._sandboxed.close()
            self._close_proxy()
        return self._status

    def stop(self) -> None:
        """SIGKILL to the first process; the kernel ends everything else with it."""
        if self._status is None:
            self._sandboxed.kill()
        self._close_proxy()

    def destroy(self) -> None:
        """Nothing survives SIGKILL: wait until the kernel has cleared up."""
        self.stop()
        while self.poll() is None:
            _readable(self._sandboxed.pidfd, 1.0)


def _readable(descriptor: int, timeout_s: float) -> bool:
    watch = select.poll()
    watch.register(descriptor, select.POLLIN)
    return bool(watch.poll(timeout_s * 1000))


def _pipes() -> tuple[list[int], list[int]]:
    """Their ends and ours of three pipes: one to the server, two from it."""
    made: list[tuple[int, int]] = []
    try:
        for _ in range(3):
            made.append(os.pipe())
    except OSError:
        for descriptor in (each for pair in made for each in pair):
            os.close(descriptor)
        raise
    (into, feed), (out, print_to), (errors, complain_to) = made
    return [into, print_to, complain_to], [feed, out, errors]


def _request(server: Server) -> dict[str, Any]:
    environment = server.environment(SCRATCH) | (proxy_variables() if server.hosts else {})
    which = HOSTS if server.hosts else NETWORK if server.network else PLAIN
    return {
        **_LIMITS, "argv": words_of(server), "env": environment, "files": [],
        "views": views(server), "writable": writable(server),
        "filter": which, "count_egress": which != NETWORK, "listen": PORT if server.hosts else None,
        "cwd": None if server.cwd is None else str(server.cwd),
    }  # fmt: skip


class SupervisedServer:
    """A server that nothing contains: with our files, our network and our rights, and no longer life than ours."""

    def __init__(self, server: Server) -> None:
        self.folder = tempfile.mkdtemp(prefix="surefoot-tool-")
        try:
            self._start(server)
        except OSError:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def _start(self, server: Server) -> None:
        """The supervisor, which starts the server; three pipes to the server and one to the supervisor."""
        control_theirs, control_ours = os.pipe()
        words = [supervisor.__file__, str(os.getpid()), str(control_theirs), self.folder]
        try:
            self.process = Child.start(
                [sys.executable, "-I", "-S", *words, *server.command],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=(control_theirs,),
                env=server.environment(self.folder), cwd=server.cwd or self.folder,
            )  # fmt: skip
        except OSError:
            os.close(control_ours)
            raise
        finally:
            os.close(control_theirs)
        self.control: int | None = control_ours
        self.pid = self.process.pid
        streams = (self.process.stdin, self.process.stdout, self.process.stderr)
        # Copies under numbers of our own, so that nobody but their reader ever closes them.
        into, out, errors = [os.dup(stream.fileno()) for stream in streams]
        self.streams = (into, out, errors)
        for stream in streams:
            stream.close()

    def poll(self) -> int | None:
        """The supervisor ends with the server's status, when nothing of the server is left."""
        code = self.process.poll()
        if code is not None:
            self.process.release()
        return code

    def stop(self) -> None:
        """Have the supervisor end everything; forget the folder."""
        if self.control is not None:
            with contextlib.suppress(BrokenPipeError):  # a supervisor that is gone has done its work
                os.write(self.control, b"!")  # closing is not enough: a fork of ours may hold the pipe open
            os.close(self.control)
            self.control = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def destroy(self) -> None:
        """Somebody stopped the supervisor; the server dies with it."""
        self.process.end()
