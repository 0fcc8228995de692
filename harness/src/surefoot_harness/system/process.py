"""One supervisor for every process that we start: begin it, watch it, end it and everything it started.

Owns       process groups and sessions, death signals, adoption of orphans (Linux), and who a process is.
Promises   a `Child` that has ended is reaped last: until then its number, and that of its group, are its own, so no
           stranger is ever signalled. After `kill_tree` the process, its group, its session and its descendants have
           been sent SIGKILL; after `end_all_children` this process has no child left, not even a zombie.
Never      decides when; knows what parent and child say to each other.

The process table is psutil's. Two things are still read from /proc here: children by the kernel's own list, for whoever
looks twenty times a second (24 us where psutil reads the whole table in 1,750), and the start of a process in the
kernel's ticks, which a clock that is set does not change.

Scripts that run without our packages (`guardian.py`, `supervisor.py`, `reaper.py`, `foreign_host.py`, the server of the
sandboxes) cannot import this file and keep what little they need.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn, overload

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_LOOKS = 5
"""How often `kill_tree` looks for what was forked while it was killing; each look finds less."""
_PAUSE_S = 0.01
"""Between two looks at a child where the kernel cannot wake us."""


class Child:
    """One process of ours, in a session of its own, from its start until nothing of it is left.

    As a context it is ended, with everything it started, when the block is left.

    Example:
        >>> with Child.start([sys.executable, "-c", "print('hello')"], stdout=subprocess.PIPE) as child:
        ...     child.stdout.read(), child.wait()
        (b'hello\\n', 0)
    """

    def __init__(self, pid: int, process: subprocess.Popen[bytes] | None = None, kept_stderr: int = 0) -> None:
        self.pid, self._process = pid, process
        self.code: int | None = None
        """How it ended, as `subprocess` says it: negative for a signal. None while it runs."""
        self._reaped = False
        self._tail = None if not kept_stderr else _Tail(self.stderr, kept_stderr)

    @classmethod
    def start(cls, argv: Sequence[str], *, session: bool = True, keep_stderr: int = 0, **options: Any) -> Child:
        """Start a program; an OSError when that fails.

        Args:
            session: in a session of its own, so that no signal of the terminal reaches it.
            keep_stderr: of what it writes to standard error, the last bytes that `printed` returns; a thread reads
                them, so that the process never waits for us.
            options: `cwd`, `env`, `stdin`, `stdout`, `stderr` and `pass_fds` of `subprocess.Popen`. Pipes are raw.
        """
        if keep_stderr:
            options["stderr"] = subprocess.PIPE
        process = subprocess.Popen(list(argv), bufsize=0, start_new_session=session, **options)
        return cls(process.pid, process, keep_stderr)

    @classmethod
    def fork(cls, body: Callable[[], NoReturn]) -> Child:
        """A copy of this process that does `body` and nothing else; an OSError when the system refuses one."""
        with warnings.catch_warnings():
            # Python 3.12 warns when threads are running. Whoever forks here puts a deadline on every answer, so a child
            # that inherits a locked lock is a named failure, not a hang.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            try:
                body()
            finally:
                os._exit(70)  # only when the body did not end by itself, which it promised
        return cls(pid)

    @property
    def stdin(self) -> IO[bytes]:
        """Our end of its standard input."""
        return self._pipe("stdin")

    @property
    def stdout(self) -> IO[bytes]:
        """Our end of its standard output."""
        return self._pipe("stdout")

    @property
    def stderr(self) -> IO[bytes]:
        """Our end of its standard error."""
        return self._pipe("stderr")

    def _pipe(self, name: str) -> IO[bytes]:
        pipe: IO[bytes] | None = getattr(self._process, name, None)
        assert pipe is not None, f"{name} was not asked for as a pipe"
        return pipe

    # -- looking ----------------------------------------------------------------------
    @property
    def alive(self) -> bool:
        """Whether the process itself runs; what it started may live on either way."""
        return self.poll() is None

    def poll(self) -> int | None:
        """Its exit code, None while it runs. Looks without reaping where the system can (not on older macOS)."""
        if self.code is None:
            self.code = self._look()
        return self.code

    def _look(self) -> int | None:
        try:
            if hasattr(os, "waitid"):
                ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if ended is None:
                    return None
                return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:  # another thread has just reaped it, or somebody who knows nothing of this object
            self._reaped = True
            return 0 if self.code is None else self.code
        self._reaped = pid != 0
        return os.waitstatus_to_exitcode(status) if pid else None

    @overload
    def wait(self) -> int: ...

    @overload
    def wait(self, timeout_s: float | None) -> int | None: ...

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Its exit code; None when it still runs after `timeout_s`. It stays to be reaped by `end` or `release`."""
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with _awaited(self.pid) as pause:
            while (code := self.poll()) is None and (left := until - time.monotonic()) > 0:
                pause(left)
        return code

    def printed(self) -> bytes:
        """The last that it wrote to standard error, where that is kept."""
        return b"" if self._tail is None else self._tail.kept

    # -- ending -----------------------------------------------------------------------
    def send(self, number: int, *, group: bool = True) -> None:
        """Send a signal to its whole group, or to it alone; nothing once it is reaped. Safe in a signal handler."""
        if not self._reaped:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # leads no group, or only zombies are left
                (os.killpg if group else os.kill)(self.pid, number)

    def kill(self) -> None:
        """SIGKILL to it and everything it started, without waiting."""
        if not self._reaped:
            kill_tree(self.pid)

    def end(
        self, patience_s: float = 0.0, *, ask: int | None = signal.SIGTERM, give_up_s: float | None = None
    ) -> int | None:
        """Ask it to end, wait, then kill it with everything it started, and reap it. May be called twice.

        Args:
            patience_s: how long it may take after it was asked; 0 asks nobody.
            ask: the signal that asks its group; None when it was asked in another way, as by a closed pipe.
            give_up_s: how long the kernel may take to end what was killed; a process that is stuck in a system call is
                left to it, and the answer is None.
        """
        try:
            if patience_s > 0 and self.poll() is None:
                if ask is not None:
                    self.send(ask)
                self.wait(patience_s)
        finally:  # whoever interrupts the wait does not keep it alive
            self.kill()
            self.release(give_up_s)
        return self.code

    def release(self, timeout_s: float | None = None) -> int | None:
        """Wait for it, reap it and close our pipes, and leave alone what it started; its code, None when it runs on."""
        if self.wait(timeout_s) is not None:
            self._reap()
        if self._tail is not None:
            self._tail.join()
        for name in ("stdin", "stdout", "stderr"):
            if (pipe := getattr(self._process, name, None)) is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        return self.code

    def _reap(self) -> None:
        if not self._reaped:
            self._reaped = True
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)
        if self._process is not None:
            self._process.returncode = self.code

    def disown(self) -> None:
        """In a fork of ours: it is our parent's child, never ours to signal or to wait for."""
        self.code, self._reaped = 0, True
        if self._process is not None:
            self._process.returncode = 0

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


class _Tail:
    """The last bytes of a stream, read by a thread."""

    def __init__(self, stream: IO[bytes], most: int) -> None:
        self.kept = b""
        self._stream, self._most = stream, most
        self._thread = threading.Thread(target=self._read, name="surefoot-child-output", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait a moment for the rest."""
        self._thread.join(1.0)

    def _read(self) -> None:
        try:
            while block := os.read(self._stream.fileno(), 1 << 16):
                self.kept = (self.kept + block)[-self._most :]
        except (OSError, ValueError):
            return  # closed under us


@contextlib.contextmanager
def _awaited(pid: int) -> Iterator[Callable[[float], object]]:
    """A pause that ends when the process does, where the kernel tells (Linux); else a short one."""
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):  # no such call, nobody of that number, no descriptor left
        yield lambda left: time.sleep(min(left, _PAUSE_S))
        return
    watch = select.poll()
    watch.register(descriptor, select.POLLIN)
    try:
        yield lambda left: watch.poll(None if left == math.inf else math.ceil(1000 * left))
    finally:
        os.close(descriptor)


# -- In the child ---------------------------------------------------------------------------------


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent goes; at once if it is already gone."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def adopt_orphans() -> None:
    """Become the parent of every orphaned descendant, so that none can slip away by double fork (Linux)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def open_descriptors() -> int:
    """How many descriptors this process has open."""
    return int(psutil.Process().num_fds())


# -- Ending ---------------------------------------------------------------------------------------


def kill_tree(pid: int) -> None:
    """SIGKILL to a child of ours that was not reaped yet, its group, its session and its descendants."""
    found = {pid, *family(pid), *descendants(pid), *_session(pid)}  # before anybody ends: orphans have another parent
    with contextlib.suppress(ProcessLookupError, PermissionError):  # leads no group yet, or only zombies are left
        os.killpg(pid, signal.SIGKILL)
    sent: set[int] = set()
    for _ in range(_LOOKS):
        for each in found:
            _kill(each)
        sent |= found
        found = {*_session(pid), *(child for each in sent for child in _children_of(each))} - sent
        if not found:
            return


def reap_orphans(except_for: set[int]) -> None:
    """Reap adopted children that have ended; leave the given ones for their owner to wait for."""
    if sys.platform != "linux":
        return
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in except_for:
            return
        os.waitpid(ended.si_pid, 0)


def end_all_children(patience_s: float = 5.0) -> None:
    """Kill and reap every child, and what they leave behind, until there is none."""
    give_up = time.monotonic() + patience_s
    while time.monotonic() < give_up:
        # The quick look: a thread that ends a stuck program may wait for the interpreter at every file that it opens.
        for pid in family(os.getpid())[1:]:
            _kill(pid)
        if not _reap_ended():
            return
        time.sleep(0.005)


def _reap_ended() -> bool:
    """Reap every child that has ended; whether one is left."""
    while True:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if ended == 0:
            return True


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # gone already
        os.kill(pid, signal.SIGKILL)


# -- Who is there ---------------------------------------------------------------------------------


def descendants(pid: int) -> list[int]:
    """Children, their children and so on, by one look at the whole process table."""
    try:
        return [each.pid for each in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
    except psutil.AccessDenied:  # a system that hides its other users' processes from us
        return _below(pid)


def family(pid: int) -> list[int]:
    """The process and its descendants; asks only them for their children, where the kernel answers that.

    Quicker than `descendants` by two orders of magnitude, and made for weighing: a child that ends during the look
     may hide its sisters.
    """
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():
        return [pid, *descendants(pid)]
    return [pid, *_below(pid)]


def _below(pid: int) -> list[int]:
    found, frontier = list[int](), [pid]
    while frontier:
        frontier = [child for parent in frontier for child in _children_of(parent)]
        found += frontier
    return found


def _children_of(pid: int) -> list[int]:
    """Children as the kernel lists them, thread by thread; none when the process has ended."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += map(int, file.read().split())
    except OSError:
        return found
    return found


def _session(leader: int) -> Iterator[int]:
    """Everybody in the session of this process: a daemon's orphans too, unless they made a session of their own."""
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            if os.getsid(pid) == leader:
                yield pid


def exists(pid: int) -> bool:
    """Whether there is a process of this number, be it only waiting to be reaped."""
    try:
        return bool(psutil.pid_exists(pid))
    except OverflowError:  # larger than any process number can be
        return False


def temporary_folder(prefix: str, within: str | None = None) -> Path:
    """A new folder that is ours alone; those of this prefix whose process is gone, killed before it could, are removed.

    Args:
        prefix: with the dash it ends in; our process's number follows it.
        within: where, if not where temporary things usually are.
    """
    place = tempfile.gettempdir() if within is None else within
    for old in Path(place).glob(f"{prefix}*"):
        owner = old.name.removeprefix(prefix).partition("-")[0]
        with contextlib.suppress(OSError):
            if owner.isdigit() and not exists(int(owner)) and old.stat().st_uid == os.getuid():
                shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=place))


def is_alive(pid: int) -> bool:
    """Whether there is a process of this number that has not ended."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def title(pid: int) -> str:
    """What a process calls itself (its first words), empty when it has ended or belongs to somebody else."""
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


def start_ticks(pid: int) -> int | None:
    """When a process began, in the kernel's ticks: with its number it names one process for ever.

    None if there is no such process, or nobody says. Not psutil's `create_time`, which is counted from the clock on the
    wall: set between two looks, it would make two processes of one.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])  # the name before it may hold spaces and brackets
    except (OSError, ValueError, IndexError):
        return None


def boot_id() -> str | None:
    """Which start of the machine this is; None where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
