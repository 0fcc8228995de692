"""What of the host a sandbox shows, read-only, and the environment that a program finds there.

Owns       the list: the system's programs and libraries, the Python that is running, and what the caller names.
Promises   no home folder, no working folder, no environment variable of this process.
Never      mounts; `walls.py` does.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from surefoot.errors import ConfigError, SurefootError
from surefoot.sandbox import process
from surefoot.sandbox.process import SandboxProcess
from surefoot.sandbox.walls import MACHINES, SCRATCH
from surefoot.system.frames import FrameError, pack, read_frame

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store", "/etc/ld.so.cache", "/etc/alternatives")
_TAKEN = (SCRATCH, "/dev", "/proc", "/sys", "/.host")


def python() -> str:
    """The interpreter itself, not the link that a virtual environment has to it."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def views(read_only: Iterable[Path]) -> list[str]:
    """Absolute paths to show, outer ones first, none inside another."""
    asked = [checked(path) for path in read_only]
    return outermost([*SYSTEM, os.path.realpath(sys.base_prefix), os.path.dirname(python()), *asked])


def outermost(paths: Iterable[str]) -> list[str]:
    """Those that exist, outer ones first, none inside another."""
    chosen: list[str] = []
    for path in sorted(paths, key=len):
        if os.path.lexists(path) and not any(is_inside(path, other) for other in chosen):
            chosen.append(path)
    return chosen


def environment(read_only: Iterable[Path]) -> dict[str, str]:
    """All that a contained program is told. The same on every run, so that it behaves the same."""
    library = os.path.join(os.path.realpath(sys.base_prefix), "lib")
    known = {
        "PATH": f"{os.path.dirname(python())}:/usr/bin:/bin", "HOME": SCRATCH, "TMPDIR": SCRATCH, "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2",
    }  # fmt: skip
    if library in os.environ.get("LD_LIBRARY_PATH", "").split(":"):  # a Python that does not find its own library
        known["LD_LIBRARY_PATH"] = library
    folders = [str(path) for path in map(checked, read_only) if os.path.isdir(path)]
    return known | ({"PYTHONPATH": ":".join(folders)} if folders else {})


def checked_name(name: str) -> str:
    """A file name that stays inside the scratch folder."""
    path = PurePosixPath(name)
    if not name or "\0" in name or path.is_absolute() or ".." in path.parts or str(path) in (".", ""):
        raise ConfigError(
            f"{name!r} is no name for a file in the scratch folder",
            "a name that leads out of it would be written where nobody expects it",
            "give a relative name without `..`",
        )
    return str(path)


def checked(path: Path) -> str:
    """A path of the host that may be shown, with its links followed; a `ConfigError` for one that may not."""
    real = os.path.realpath(path)
    if real == "/" or any(is_inside(real, taken) for taken in _TAKEN):
        raise ConfigError(
            f"the sandbox cannot show {real}",
            "the whole host, devices and kernel files are what it keeps out",
            "name the one folder that the program has to read",
        )
    if not os.path.exists(real):
        raise ConfigError(f"{real} does not exist", "the sandbox was asked to show it", "check `read_only`")
    return real


def is_inside(path: str, folder: str) -> bool:
    """Whether a path is this folder, or lies below it."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


# -- What this host can contain, found by trying, and said in words -------------------------------
# Owns       the question to the kernel, asked once per process.
# Promises   names each wall that is missing and the reason the kernel gave; a host is usable only if a sandbox with
# every
# needed wall was really built.
# Never      guesses from version numbers.


_TRIAL = {"argv": [], "env": {}, "cpu_s": 1, "memory_mb": 512, "processes": 1, "files_open": 8, "scratch_mb": 1}


@dataclass(frozen=True)
class HostReport:
    """Which walls stand on this host."""

    usable: bool
    missing: tuple[str, ...]
    """Walls that are needed and absent: with one of these no code is run."""
    weaker: tuple[str, ...] = ()
    """Walls behind others, which are absent."""

    def __str__(self) -> str:
        head = "sandbox: usable" if self.usable else "sandbox: NOT usable, model-written code is refused"
        lines = [f"  missing: {line}" for line in self.missing] + [f"  weaker: {line}" for line in self.weaker]
        return "\n".join([head, *lines])


def spawn(streams: Sequence[int], *, network: bool = False) -> SandboxProcess:
    """The one place where a sandbox is asked of the kernel."""
    return process.spawn(streams, network=network)


@functools.cache
def available() -> HostReport:
    """Build one sandbox, with nothing in it, and say what failed."""
    if sys.platform != "linux":
        return HostReport(False, (f"Linux: {sys.platform} has no namespaces",))
    if platform.machine() not in MACHINES:
        return HostReport(False, (f"a list of system calls for {platform.machine()} (there is one for {MACHINES})",))
    try:
        landlock, refusal = _try()
    except (OSError, FrameError, SurefootError) as error:
        return HostReport(False, (_words(error),))
    if refusal is not None:
        return HostReport(False, (refusal,))
    weaker = () if landlock else ("Landlock: this kernel has none, or it is switched off",)
    return HostReport(True, (), weaker)


def _try() -> tuple[int, str | None]:
    """Landlock's version, and what could not be built."""
    with open("/dev/null", "r+b") as nowhere:
        sandboxed = spawn([nowhere.fileno()] * 3)
    try:
        request = {**_TRIAL, "files": [], "views": views(()), "landlock": sandboxed.landlock}
        sandboxed.link.sendall(pack(json.dumps(request).encode() + b"\n"))
        frame = read_frame(sandboxed.link, 2**16)
    finally:
        sandboxed.close()
    if frame is None:
        return sandboxed.landlock, "a sandbox: its first process ended without a word"
    report = json.loads(frame)
    return sandboxed.landlock, report.get("failed")


def _words(error: Exception) -> str:
    if isinstance(error, SurefootError):
        return error.what
    return f"namespaces: {error.strerror or error}" if isinstance(error, OSError) else str(error)
