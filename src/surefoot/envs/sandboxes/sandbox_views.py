"""What of the host a sandbox shows, read-only, and the environment that a program finds there.

Owns       the list: the system's programs and libraries, the Python that is running, and what the caller names.
Promises   no home folder, no working folder, no environment variable of this process.
Never      mounts; `sandbox_root.py` does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from surefoot.envs.sandboxes.sandbox_root import SCRATCH
from surefoot.errors import ConfigError

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
