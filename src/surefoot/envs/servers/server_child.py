"""One server's process, contained or kept: how it is started, whether it is over, and its certain end.

Owns       the process with all that it starts, and the three pipes until somebody takes them.
Promises   after `stop`, and when this process goes in any way, everything that the server started goes; `poll` says how
           it ended, as a shell would, once nothing of it is left.
Never      reads a byte of what the server says.

    Boxed: sandbox keeper (one for all) --> first process of a sandbox --> server
    Kept:  server keeper (one each) --> server, with the rights and the files of whoever started us

Read next: `server_views.py`, what a contained server sees; `mcp_stdio.py`, which talks to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any, Protocol

from surefoot.envs.rewards.frames import pack
from surefoot.envs.sandboxes import sandbox_report
from surefoot.envs.sandboxes.sandbox_link import Reports
from surefoot.envs.sandboxes.sandbox_root import SCRATCH
from surefoot.envs.sandboxes.sandbox_seccomp import NETWORK, PLAIN
from surefoot.envs.servers import server_keeper, server_views
from surefoot.envs.servers.mcp_servers import Server
from surefoot.errors import SecurityError, ToolFailedError

_LIMITS = {"cpu_s": None, "memory_mb": 0, "processes": 256, "files_open": 1024, "scratch_mb": 64}
"""A server lives as long as its rollout or the run, and its calls have deadlines: neither time nor memory is capped."""


class Child(Protocol):
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


def started(server: Server, wrote: Callable[[bytes], None], denied: Callable[[int], None]) -> Child:
    """Start a server; an OSError when that fails.

    Args:
        wrote: told what there is to say about a start that failed, like standard error.
        denied: told how many attempts to reach the network were refused since it was last called.
    """
    return Boxed(server, wrote, denied) if server.contained else Kept(server)


def refuse_without_walls(server: Server) -> None:
    """A `SecurityError` when a server is to be contained and this host cannot."""
    if not server.contained:
        return
    report = sandbox_report.available()
    if not report.usable:
        raise SecurityError(
            f"tool server {server.name} cannot be contained on this host: {'; '.join(report.missing)}",
            "it would run with your rights, your files and your network, and nobody said that it may",
            "use a host where unprivileged user namespaces work (docs/sandbox.md says what is needed), or write "
            '"sandbox": false for this server, which plan and report will show',
        )


class Boxed:
    """A server in a sandbox of its own."""

    def __init__(self, server: Server, wrote: Callable[[bytes], None], denied: Callable[[int], None]) -> None:
        self.folder = SCRATCH
        self._wrote, self._denied = wrote, denied
        self._reports, self._report = Reports(), dict[str, Any]()
        self._loop = asyncio.get_running_loop()
        request = _request(server)
        theirs, ours = _pipes()
        try:
            self._born = sandbox_report.bear(theirs, network=server.network)
        except BaseException as error:
            for descriptor in ours:
                os.close(descriptor)
            if isinstance(error, ToolFailedError):
                raise OSError(error.what) from error
            raise
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        self.pid = self._born.pid
        self.streams = (ours[0], ours[1], ours[2])
        self._status: int | None = None
        with contextlib.suppress(OSError):  # its first process has ended; its report, or the lack of one, says why
            head = json.dumps({**request, "landlock": self._born.landlock}).encode()
            self._born.link.sendall(pack(head + b"\n"))
        self._born.link.setblocking(False)
        self._loop.add_reader(self._born.link, self._hear)

    def _hear(self) -> None:
        """What the sandbox's first process says: attempts to reach the network, and the ending."""
        for said in self._reports.read(self._born.link):
            self._take(said)
        if self._reports.ended:
            self._loop.remove_reader(self._born.link)

    def _take(self, said: dict[str, Any]) -> None:
        if said.get("egress"):
            self._denied(int(said["egress"]))
        if said.get("counted") is False:
            self._denied(0)
        if "failed" in said:
            self._wrote(f"{said['failed']} (inside the sandbox)\n".encode())
        if {"exit", "failed"} & set(said) and not self._report:
            self._report = said

    def poll(self) -> int | None:
        """Its exit status once its first process, and with it everything, is gone."""
        if self._status is None and _readable(self._born.pidfd, 0.0):
            self._hear()
            code = int(self._report.get("exit", -signal.SIGKILL))
            code = server_keeper.NOT_STARTED if "failed" in self._report else code
            self._status = code if code >= 0 else 128 - code
            self._loop.remove_reader(self._born.link)
            self._born.close()
        return self._status

    def stop(self) -> None:
        """SIGKILL to the first process; the kernel ends everything else with it."""
        if self._status is None:
            self._born.kill()

    def destroy(self) -> None:
        """Nothing survives SIGKILL: wait until the kernel has cleared up."""
        self.stop()
        while self.poll() is None:
            _readable(self._born.pidfd, 1.0)


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
    environment = server.environment(SCRATCH)
    return {
        **_LIMITS, "argv": server_views.words_of(server), "env": environment, "files": [],
        "views": server_views.views(server), "writable": server_views.writable(server),
        "filter": NETWORK if server.network else PLAIN, "count_egress": not server.network,
        "cwd": None if server.cwd is None else str(server.cwd),
    }  # fmt: skip


class Kept:
    """A server that nothing contains: with our files, our network and our rights, and no longer life than ours."""

    def __init__(self, server: Server) -> None:
        self.folder = tempfile.mkdtemp(prefix="surefoot-tool-")
        try:
            self._start(server)
        except OSError:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise

    def _start(self, server: Server) -> None:
        """The keeper, which starts the server; three pipes to the server and one to the keeper."""
        control_theirs, control_ours = os.pipe()
        words = [server_keeper.__file__, str(os.getpid()), str(control_theirs), self.folder]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-S", *words, *server.command],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
                env=server.environment(self.folder), cwd=server.cwd or self.folder,
                start_new_session=True, pass_fds=(control_theirs,),
            )  # fmt: skip
        except OSError:
            os.close(control_ours)
            raise
        finally:
            os.close(control_theirs)
        self.control: int | None = control_ours
        self.pid = self.process.pid
        streams = [each for each in (self.process.stdin, self.process.stdout, self.process.stderr) if each is not None]
        # Copies under numbers of our own, so that nobody but their reader ever closes them.
        into, out, errors = [os.dup(stream.fileno()) for stream in streams]
        self.streams = (into, out, errors)
        for stream in streams:
            stream.close()

    def poll(self) -> int | None:
        """The keeper ends with the server's status, when nothing of the server is left."""
        return self.process.poll()

    def stop(self) -> None:
        """Have the keeper end everything; forget the folder."""
        if self.control is not None:
            with contextlib.suppress(BrokenPipeError):  # a keeper that is gone has done its work
                os.write(self.control, b"!")  # closing is not enough: a fork of ours may hold the pipe open
            os.close(self.control)
            self.control = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def destroy(self) -> None:
        """Somebody stopped the keeper; the server dies with it."""
        self.process.kill()
        self.process.wait()
