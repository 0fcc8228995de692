"""What this host can contain, found by trying, and said in words.

Owns       the question to the kernel, asked once per process.
Promises   names each wall that is missing and the reason the kernel gave; a host is usable only if a sandbox with every
           needed wall was really built.
Never      guesses from version numbers.
"""

from __future__ import annotations

import functools
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.envs.rewards.frames import FrameError, pack, read_frame
from surefoot.envs.sandboxes import sandbox_link, sandbox_views
from surefoot.envs.sandboxes.sandbox_kernel import MACHINES
from surefoot.envs.sandboxes.sandbox_link import Born
from surefoot.errors import SurefootError

_TRIAL = {"argv": [], "env": {}, "cpu_s": 1, "memory_mb": 512, "processes": 1, "files_open": 8, "scratch_mb": 1}


@dataclass(frozen=True)
class Report:
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


def bear(streams: Sequence[int], *, network: bool = False) -> Born:
    """The one place where a sandbox is asked of the kernel."""
    return sandbox_link.bear(streams, network=network)


@functools.cache
def available() -> Report:
    """Build one sandbox, with nothing in it, and say what failed."""
    if sys.platform != "linux":
        return Report(False, (f"Linux: {sys.platform} has no namespaces",))
    if platform.machine() not in MACHINES:
        return Report(False, (f"a list of system calls for {platform.machine()} (there is one for {MACHINES})",))
    try:
        landlock, refusal = _try()
    except (OSError, FrameError, SurefootError) as error:
        return Report(False, (_words(error),))
    if refusal is not None:
        return Report(False, (refusal,))
    weaker = () if landlock else ("Landlock: this kernel has none, or it is switched off",)
    return Report(True, (), weaker)


def _try() -> tuple[int, str | None]:
    """Landlock's version, and what could not be built."""
    with open("/dev/null", "r+b") as nowhere:
        born = bear([nowhere.fileno()] * 3)
    try:
        request = {**_TRIAL, "files": [], "views": sandbox_views.views(()), "landlock": born.landlock}
        born.link.sendall(pack(json.dumps(request).encode() + b"\n"))
        frame = read_frame(born.link, 2**16)
    finally:
        born.close()
    if frame is None:
        return born.landlock, "a sandbox: its first process ended without a word"
    report = json.loads(frame)
    return born.landlock, report.get("failed")


def _words(error: Exception) -> str:
    if isinstance(error, SurefootError):
        return error.what
    return f"namespaces: {error.strerror or error}" if isinstance(error, OSError) else str(error)
