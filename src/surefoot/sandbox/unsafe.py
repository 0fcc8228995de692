"""A program with limits but without walls: for hosts that have no sandbox, and users who said that they accept that.

Owns       the fallback behind `allow_unsafe`.
Promises   limits on CPU, memory and files; a scratch folder that is removed; its process group and descendants are
           killed. Deadline, output and total memory are watched as for contained programs.
Never      contains anything: the program has the network, the files and the rights of the user. Every outcome says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.sandbox.process import SandboxProcess
from surefoot.system.process import Child, family

_LAUNCH = """
import json, os, resource, sys
limits, streams = json.loads(sys.argv[1]), json.loads(sys.argv[2])
for place, descriptor in enumerate(streams):
    os.dup2(descriptor, place + 100)
for place in range(len(streams)):
    os.dup2(place + 100, place)
os.closerange(len(streams), 256)
for name, value in limits.items():
    which = getattr(resource, name)
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, hard))
os.execve(sys.argv[3], sys.argv[3:], os.environ)
"""
_MIB = 2**20


@dataclass(frozen=True)
class UncontainedProcess(SandboxProcess):
    """A program that nothing contains."""

    process: Child
    folder: tempfile.TemporaryDirectory[str]

    def members(self) -> list[int]:
        """The program and its descendants; one that left the family is not found."""
        return family(self.pid)

    def kill(self) -> None:
        """SIGKILL to what can be found of it."""
        self.process.kill()

    def last_word(self) -> dict[str, Any] | None:
        """The exit code, which nobody else reports here."""
        return {"exit": self.process.wait()}

    def close(self) -> None:
        """Wait for it, and remove its folder."""
        super().close()
        self.process.release()
        with contextlib.suppress(OSError):  # one that escaped may still write there
            self.folder.cleanup()


def spawn(request: Mapping[str, Any], contents: Mapping[str, bytes], streams: Sequence[int]) -> UncontainedProcess:
    """Start a program as a child of this process, in a temporary folder."""
    folder = tempfile.TemporaryDirectory(prefix="surefoot-unsafe-")
    for name, content in contents.items():
        path = Path(folder.name, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    limits = {
        "RLIMIT_CPU": request["cpu_s"], "RLIMIT_AS": request["memory_mb"] * _MIB, "RLIMIT_CORE": 1,
        "RLIMIT_NOFILE": request["files_open"], "RLIMIT_FSIZE": request["scratch_mb"] * _MIB,
    }  # fmt: skip
    words = ["-I", "-S", "-c", _LAUNCH, json.dumps(limits), json.dumps(list(streams)), *request["argv"]]
    ours, theirs = socket.socketpair()
    theirs.close()  # nobody reports on this link; closed, it reads as ended
    environment = {**request["env"], "HOME": folder.name, "TMPDIR": folder.name}
    try:
        process = Child.start([sys.executable, *words], cwd=folder.name, env=environment, pass_fds=streams)
    except OSError:
        ours.close()
        folder.cleanup()
        raise
    return UncontainedProcess(ours, process.pid, os.pidfd_open(process.pid), 0, process, folder)
