"""What of the host a contained tool server sees: the system, the installation that it runs in, what it was granted.

Owns       the list, worked out from the server's command and its grants.
Promises   of a home folder, a project or a run folder nothing is there but what the command names: the program with its
           installation, and files that are words of the command, each by itself. Folders have to be granted.
Never      mounts or starts anything: `server_child.py` has that done.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from surefoot.envs.sandboxes import sandbox_views
from surefoot.envs.servers.mcp_servers import Server
from surefoot.errors import ToolError

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_CLOCK = ("/etc/localtime", "/etc/timezone")
_NETWORK = (
    "/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/host.conf", "/etc/gai.conf", "/etc/services",
    "/etc/protocols", "/etc/ssl/certs", "/etc/ssl/openssl.cnf", "/etc/ca-certificates", "/etc/pki/tls/certs",
    "/etc/pki/ca-trust", "/etc/crypto-policies",
)  # fmt: skip
"""How names are looked up and whom to believe: for servers with the network only."""
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
    wanted = [*sandbox_views.SYSTEM, *_CLOCK, *(_NETWORK if server.network else ())]
    wanted += [*_installation(program_of(server)), *_named(server)]
    granted = [*server.read, *([server.cwd] if server.cwd is not None else [])]
    wanted += [str(path) for path in granted if sandbox_views.checked(path)]
    return sandbox_views.outermost(each for path in wanted for each in _way_to(path))


def writable(server: Server) -> list[str]:
    """Folders in which it may make and change files."""
    return sandbox_views.outermost(map(sandbox_views.checked, server.write))


def refuse_bad_grants(server: Server) -> None:
    """A `ToolError` for a grant that could not be used; a `ConfigError` for a folder that nobody may show."""
    for path in (*server.read, *server.write):
        if not path.exists():
            raise _bad_grant(server, f"is granted {path}, which does not exist", "correct the path, or make the folder")
        sandbox_views.checked(path)
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


def hint(server: Server, tail: str, denied: int) -> str:
    """What a contained server that failed may have missed, in words; empty for others."""
    if not server.contained:
        return ""
    unseen = next(_unseen(server, tail), None)
    found = []
    if unseen is not None:
        found.append(f'it cannot see {unseen}, which exists: "read" or "write" in the servers file grants a folder')
    if denied:
        found.append(f'it tried to reach the network {denied} times, which "network": true grants')
    known = "it runs contained: it sees the system, its own installation and what it is granted, and has no network"
    return f"; {known}; " + ("; ".join(found) or '"read", "write" and "network" in the servers file grant more')


def _unseen(server: Server, tail: str) -> Iterator[str]:
    """Paths of the host that it was given or speaks of, and that are not there for it."""
    shown = [*views(server), *writable(server)]
    beside = [_sibling(server, name) for name in re.findall(r"No module named '(\w{1,80})", tail)]
    for path in (*server.command[1:], *filter(None, beside), *_QUOTED_PATH.findall(tail)):
        if os.path.isabs(path) and os.path.exists(path):
            real = os.path.realpath(path)
            if not any(sandbox_views.is_inside(real, each) for each in shown):
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
    if real == sandbox_views.python() and os.path.realpath(home) in map(
        os.path.realpath, (sys.prefix, sys.base_prefix)
    ):
        yield _PACKAGE


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
