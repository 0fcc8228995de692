"""Model-written code, contained: namespaces, an empty root, limits, and a deadline that ends all of it.

Owns       what a caller asks of the sandbox, and what it hears back.
Promises   new user, mount, pid, net, ipc, uts and cgroup namespaces; read-only runtime and a private scratch folder; no
           network; no privileges; Landlock and a call filter; limits on time, memory, processes, files and output;
           when `run` returns, every process of the program is gone. May be shared by any number of threads.
Never      runs anything without walls, unless the caller spelled out `allow_unsafe`; the outcome then says so.

    python -m surefoot.sandbox         what this host can contain

Read next: `server.py`, which starts sandboxes; `code_tests.py`, which grades code with them.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from surefoot.errors import ConfigError, SecurityError, ToolFailedError
from surefoot.sandbox import host
from surefoot.sandbox import unsafe as sandbox_unsafe
from surefoot.sandbox.host import HostReport, available
from surefoot.sandbox.process import SandboxProcess, Watched, attend, exit_code
from surefoot.system.frames import pack

__all__ = ["HostReport", "ProgramOutcome", "Sandbox", "SandboxLimits", "available", "run_code"]


@dataclass(frozen=True)
class SandboxLimits:
    """What one program, with all that it starts, may use.

    Example:
        >>> Limits(wall_s=2.0).memory_mb
        512
    """

    wall_s: float = 10.0
    """Seconds until everything is killed."""
    cpu_s: int = 10
    """Seconds of processor time, for each process."""
    memory_mb: int = 512
    """Address space of each process, and real memory of all together."""
    processes: int = 32
    """Processes and threads at one time."""
    files: int = 64
    """Open descriptors of each process."""
    output_bytes: int = 65536
    """Kept of stdout, and of stderr; who prints more is killed."""
    scratch_mb: int = 32
    """Size of the scratch folder, which is memory."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                raise _bad_limit(each.name, value, "a number above 0")
            if each.name != "wall_s" and not isinstance(value, int):
                raise _bad_limit(each.name, value, "a whole number")


@dataclass(frozen=True)
class ProgramOutcome:
    """How one program ended."""

    exit_code: int | None
    """As `subprocess` has it: negative for a signal; None when it was we who ended it."""
    stdout: str
    stderr: str
    timed_out: bool
    killed: str | None
    """`deadline`, `output`, `memory` or `cpu`; None when it ended by itself."""
    output_cut: bool
    unsafe: bool
    """True when nothing contained it: the run that used it has to say so."""


class Sandbox:
    """Runs programs that nobody trusts.

    Args:
        limits: what each program may use.
        allow_unsafe: run without walls where this host has none. Never chosen for you.
        read_only: further folders or files to show, under their own names; folders are on Python's path.

    Raises:
        SecurityError: this host cannot contain code, and `allow_unsafe` is not set.

    Example:
        >>> Sandbox().run_python("print(6 * 7)").stdout
        '42\\n'
    """

    def __init__(
        self, limits: SandboxLimits | None = None, allow_unsafe: bool = False, read_only: Sequence[Path] = ()
    ) -> None:
        self.limits = limits or SandboxLimits()
        self.read_only = tuple(Path(path) for path in read_only)
        self._views = host.views(self.read_only)
        self._env = host.environment(self.read_only)
        report = host.available()
        self.unsafe = not report.usable
        """Whether programs run without walls here."""
        if self.unsafe and not allow_unsafe:
            raise SecurityError(
                "this host cannot contain model-written code: " + "; ".join(report.missing),
                "code that a model wrote would run with your rights, your files and your network",
                "use a host where unprivileged user namespaces work (docs/sandbox.md says what is needed), "
                "or accept the risk with allow_unsafe=True, which every report of the run will show",
            )

    def run(self, argv: Sequence[str], stdin: bytes = b"", files: Mapping[str, bytes] | None = None) -> ProgramOutcome:
        """Run one program to its end.

        Args:
            argv: the program and its words, never a shell line; a bare name is looked up in /usr/bin and /bin.
            files: put into the scratch folder, where the program starts.

        Raises:
            ToolError: there is no such program inside.
            ToolFailedError: the sandbox itself failed; that says nothing about the program.
        """
        watched = self.start(argv, stdin, files or {})
        try:
            attend([watched])
            return outcome(watched, self.unsafe)
        finally:
            watched.close()

    def run_python(self, code: str, stdin: bytes = b"", files: Mapping[str, bytes] | None = None) -> ProgramOutcome:
        """Run a Python program to its end; `files` lie beside it and can be imported."""
        source = code.encode("utf-8", errors="surrogatepass")
        return self.run([host.python(), "main.py"], stdin, {**(files or {}), "main.py": source})

    def start(
        self, argv: Sequence[str], stdin: bytes, files: Mapping[str, bytes], *, link: socket.socket | None = None,
        silent: bool = False, limits: SandboxLimits | None = None,
    ) -> Watched:  # fmt: skip
        """Start one program for a caller who watches several.

        Args:
            link: becomes the program's descriptor 3.
            silent: drop what it prints.
            limits: for this program, instead of the sandbox's own.
        """
        limits = limits or self.limits
        head, contents = self._request(argv, files, limits)
        with _Streams(silent) as streams:
            theirs = [*streams.theirs, *([] if link is None else [link.fileno()])]
            sandboxed = self._spawn(head, contents, theirs)
            feed, outputs = streams.keep()
        deadline = time.monotonic() + limits.wall_s
        watched = Watched(sandboxed, memoryview(stdin), feed, outputs, deadline, limits.memory_mb, limits.output_bytes)
        if not self.unsafe:
            body = b"".join(contents.values())
            with contextlib.suppress(OSError):  # init has ended; its report, or the lack of one, says why
                sandboxed.link.sendall(
                    pack(json.dumps({**head, "landlock": sandboxed.landlock}).encode() + b"\n" + body)
                )
        return watched

    def _spawn(self, head: Mapping[str, Any], contents: Mapping[str, bytes], streams: Sequence[int]) -> SandboxProcess:
        try:
            return sandbox_unsafe.spawn(head, contents, streams) if self.unsafe else host.spawn(streams)
        except OSError as error:
            raise ToolFailedError(
                f"no sandbox could be started: {error.strerror or error}",
                "a program that is not contained is not run",
                "the kernel or this process ran out of something: fewer programs at one time may help",
                reason="sandbox_failed",
            ) from error

    def _request(
        self, argv: Sequence[str], files: Mapping[str, bytes], limits: SandboxLimits
    ) -> tuple[dict[str, Any], dict[str, bytes]]:
        if not argv or not all(type(word) is str and "\0" not in word for word in argv):
            raise ConfigError(f"{argv!r} is no program", "a program is a list of words", "give argv as a list of str")
        program = argv[0] if "/" in argv[0] else shutil.which(argv[0], path="/usr/bin:/bin") or f"/usr/bin/{argv[0]}"
        contents = {host.checked_name(name): content for name, content in files.items()}
        size = sum(map(len, contents.values()))
        if size > limits.scratch_mb * 2**20:
            raise ConfigError(
                f"{size} bytes of files do not fit into a scratch folder of {limits.scratch_mb} MiB",
                "the program would start with some of them missing",
                "raise `scratch_mb`, or show a folder with `read_only`",
            )
        head = {
            "argv": [program, *argv[1:]], "env": self._env, "views": self._views, "cpu_s": limits.cpu_s,
            "memory_mb": limits.memory_mb, "processes": limits.processes, "files_open": limits.files,
            "scratch_mb": limits.scratch_mb, "files": [[name, len(data)] for name, data in contents.items()],
        }  # fmt: skip
        return head, contents


class _Streams:
    """The three pipes of a program: theirs to hand over, ours to keep."""

    def __init__(self, silent: bool) -> None:
        self.theirs: list[int] = []
        self.ours: list[int] = []
        try:
            self._add(*os.pipe())
            for _ in ("stdout", "stderr"):
                if silent:
                    self.theirs.append(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC))
                else:
                    self._add(*reversed(os.pipe()))
        except OSError as error:
            self.__exit__()
            raise ToolFailedError(
                f"no pipe for a sandbox: {error.strerror}",
                "this process has no descriptor left",
                "raise the limit on open files (ulimit -n), or run fewer programs at one time",
                reason="sandbox_failed",
            ) from error

    def _add(self, theirs: int, ours: int) -> None:
        self.theirs.append(theirs)
        self.ours.append(ours)
        os.set_blocking(ours, False)

    def keep(self) -> tuple[int, dict[int, bytearray]]:
        """From here on our ends are the caller's to close."""
        feed, *outputs = self.ours
        self.ours = []
        return feed, {output: bytearray() for output in outputs}

    def __enter__(self) -> _Streams:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in (*self.theirs, *self.ours):
            os.close(descriptor)


def run_code(code: str, limits: SandboxLimits | None = None, stdin: bytes = b"") -> ProgramOutcome:
    """Run one Python program in a sandbox.

    Example:
        >>> run_code("import socket; socket.create_connection(('192.0.2.1', 80))").exit_code
        1
    """
    return Sandbox(limits).run_python(code, stdin)


def outcome(watched: Watched, unsafe: bool) -> ProgramOutcome:
    """What there is to say about a program that has ended."""
    code, killed = exit_code(watched), watched.killed
    if code == -signal.SIGXCPU:
        code, killed = None, "cpu"
    stdout, stderr = [bytes(each).decode("utf-8", "replace") for each in [*watched.printed, b"", b""][:2]]
    return ProgramOutcome(code, stdout, stderr, killed == "deadline", killed, watched.cut, unsafe)


def _bad_limit(name: str, value: object, wanted: str) -> ConfigError:
    return ConfigError(f"{name} is {value!r}", f"a limit is {wanted}", f"give {name} {wanted}")
