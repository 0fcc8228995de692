"""What a forked child does to itself before it becomes the command: counts failpoints, breaks a call, plants a bug."""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import errno
import io
import itertools
import json
import os
import shutil
import signal
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kill_bugs

from surefoot.runtime import threads
from surefoot.storage import files
from surefoot.system import journal


def trace(path: str) -> None:
    """Write the name of every failpoint that is passed to a file, at once; those that the environment armed stay so."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
    driver = os.getpid()

    def note(name: str) -> None:
        if os.getpid() == driver:
            os.write(descriptor, f"{name}\n".encode())

    for name, armed in files._POINTS.items():
        files._POINTS[name] = files.Armed(name, "trace", _both(note, name, armed))


def _both(note: Callable[[str], None], name: str, armed: files.Armed | None) -> Callable[[], None]:
    def act() -> None:
        note(name)
        if armed is not None:
            armed.hit()

    return act


def signal_at(name: str, hit: str, number: str, moment: str = "") -> None:
    """Send this process a signal when it passes a failpoint for the given time; say in a file when, if one is named."""

    def act() -> None:
        if moment:
            Path(moment).write_text(str(time.monotonic()))
        os.kill(os.getpid(), int(number))

    files._POINTS[name] = files.Armed(name, "signal", act, int(hit))


def engine_hangs_after(name: str, hit: str, moment: str) -> None:
    """From the given time at a failpoint on, the engine of this process draws no token and does not come back."""
    from surefoot.engines.embedded import EmbeddedEngine

    over, advance = threading.Event(), EmbeddedEngine.advance

    def hung(self: Any) -> Any:
        if over.is_set():
            Path(moment).write_text(str(time.monotonic()))
            threading.Event().wait()
        return advance(self)

    EmbeddedEngine.advance = hung  # type: ignore[method-assign]
    files._POINTS[name] = files.Armed(name, "hang", over.set, int(hit))


def requests(path: str) -> None:
    """Write down by name every completion that is asked of the engine, every rollout whose tools are opened or that is
    graded, and every call of a tool: of which rollout, the how manieth, and with what."""
    from surefoot.engines.serving import EngineLoop
    from surefoot.rewards.grading import SingleTurnEnvironment
    from surefoot.tools.session import ToolEnvironment

    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    submit, grade, opens = EngineLoop.submit, SingleTurnEnvironment.grade, ToolEnvironment.open

    def asked(self: Any, wanted: Any) -> Any:
        os.write(descriptor, "".join(f"asked {request.id}\n" for request in wanted).encode())
        return submit(self, wanted)

    def graded(self: Any, tasks: Any, rollouts: Any, *more: Any) -> Any:
        os.write(descriptor, "".join(f"graded {r.group}/{r.index}\n" for r in rollouts).encode())
        return grade(self, tasks, rollouts, *more)

    def opened(self: Any, task: Any, rollout: str, seed: int) -> Any:
        os.write(descriptor, f"opened {rollout}\n".encode())
        session = opens(self, task, rollout, seed)
        session.toolbox = Heard(
            session.toolbox, lambda line: os.write(descriptor, f"called {rollout} {line}\n".encode())
        )
        return session

    EngineLoop.submit, SingleTurnEnvironment.grade = asked, graded  # type: ignore[method-assign]
    ToolEnvironment.open = opened  # type: ignore[method-assign]


class Heard:
    """A toolbox whose calls are told, one line each, before they are made."""

    def __init__(self, toolbox: Any, tell: Callable[[str], object]) -> None:
        self._toolbox, self._tell, self._count = toolbox, tell, itertools.count(1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._toolbox, name)

    def call(self, name: str, arguments: Any, deadline_s: float) -> Any:
        """The real one."""
        self._tell(f"{next(self._count)} {name} {json.dumps(arguments)}")
        return self._toolbox.call(name, arguments, deadline_s)


def calls_by_every_word() -> None:
    """A model without a word of sense calls tools all the same: by the checksum of what it says, none, one or two.

    It rarely ends what it says by itself; here that is no reason not to ask.
    """
    from surefoot.runtime import rollout as tool_rounds
    from surefoot.tools import session as tools
    from surefoot.tools.parsing import ParsedCompletion, RequestedCall

    def parse_calls(text: str, form: str = "") -> ParsedCompletion:
        many = zlib.crc32(text.encode()) % 3
        return ParsedCompletion(tuple(RequestedCall("look", {"place": f"{text} {n}"}, text) for n in range(many)), text)

    tools.parse_calls, tool_rounds.LENGTH = parse_calls, "never"


def learner_lost(when: str) -> None:
    """The learner's process, which is none here, is gone before step 1: while it starts, or in the baseline."""
    from surefoot.errors import LearnerLostError, LearnerStartError
    from surefoot.run import build, session

    def lost(*_: Any, **__: Any) -> None:
        kind = LearnerStartError if when == "start" else LearnerLostError
        raise kind(f"the learner is gone ({when})", "a test says so", "resume the run, or whatever fits")

    if when == "start":
        build.build = lost  # type: ignore[assignment]
    else:
        session.look_at_baseline = lost


def slow_config() -> None:
    """Reading the config takes its time, so that a test can come first."""
    from surefoot.cli import commands

    real = commands._load

    def load(words: Any) -> Any:
        time.sleep(30)
        return real(words)

    commands._load = load


def small_pieces() -> None:
    """A journal hands the system few bytes at a time, so that tiny records are written in several pieces too."""
    journal.PIECE = 512


def one_by_one() -> None:
    """Groups that wait for the disk are written one at a time, so that a run passes each failpoint equally often."""
    threads.MOST = 1


# -- calls that fail ------------------------------------------------------------------------------


class Breaker:
    """Numbers every call that changes the disk between two failpoints; at one of them, something happens.

    Raw writes of Python's own files are among them. What a library writes by itself (the tokenizer's file) is not:
    strace sees that too. Nor is the status, which a thread writes by the clock: its calls would give the others another
    number from run to run, and a run goes on without it.
    """

    def __init__(self, log: str, nth: int, kind: str) -> None:
        self.log, self.nth, self.kind = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC), nth, kind
        self.on, self.count, self.write, self.driver = False, 0, os.write, os.getpid()

    def call(self, name: str) -> None:
        """Before the call itself: the kill, or the disk's answer."""
        if not self.on or os.getpid() != self.driver or threading.current_thread().name == "status":
            return
        self.count += 1
        self.write(self.log, f"{name}\n".encode())
        if self.count == self.nth:
            if self.kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            code = getattr(errno, self.kind)
            raise OSError(code, os.strerror(code))


def break_save(log: str, save: str, nth: str, kind: str) -> None:
    """Break the `nth` call of a run's save number `save`; with 0, only write all of them down."""
    breaker = Breaker(log, int(nth), kind)

    def begin() -> None:
        breaker.on = True

    def end() -> None:
        breaker.on = False

    files._POINTS["session.before_save"] = files.Armed("session.before_save", "break", begin, int(save))
    files._POINTS["loop.before_collect"] = files.Armed("loop.before_collect", "break", end)
    for name in ("fsync", "rename", "replace", "mkdir", "pwrite", "ftruncate", "unlink", "rmdir"):
        setattr(os, name, _broken(breaker, name, getattr(os, name)))
    _break_files(breaker)


def _broken(breaker: Breaker, name: str, real: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _idle(name, *args, **kwargs):
            breaker.call(name)
        return real(*args, **kwargs)

    return call


def _idle(name: str, path: Any, *_: Any, dir_fd: int | None = None, **__: Any) -> bool:
    """A folder that is there, a file that is not: such a call changes nothing, and its callers ask for no more."""
    if name not in ("mkdir", "unlink"):
        return False
    try:
        os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
    except OSError:
        return name == "unlink"
    return name == "mkdir"


def _break_files(breaker: Breaker) -> None:
    """Opening a new file, and every write of its bytes to the system."""
    real_open, real_fdopen, real_io = os.open, os.fdopen, io.open

    class Raw(io.FileIO):
        def write(self, data: Any) -> Any:
            breaker.call("write")
            return super().write(data)

    def os_open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT:
            breaker.call("open")
        return real_open(path, flags, *args, **kwargs)

    def fdopen(descriptor: int, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
        if "w" not in mode:
            return real_fdopen(descriptor, mode, buffering, *args, **kwargs)
        file = io.BufferedWriter(Raw(descriptor, "wb"), buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE)
        return file if "b" in mode else io.TextIOWrapper(file, *args, **kwargs)

    def io_open(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
        if "w" in mode and not isinstance(file, int):
            breaker.call("open")
            return fdopen(
                real_open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), mode, buffering, *args, **kwargs
            )
        return real_io(file, mode, buffering, *args, **kwargs)

    os.open, os.fdopen, io.open, builtins.open = os_open, fdopen, io_open, io_open  # type: ignore[assignment]


def watch_disk(log: str) -> None:
    """Write down, in order, what is synced and what is renamed to what."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def watched_fsync(number: int) -> None:
        fsync(number)
        os.write(descriptor, f"fsync {os.readlink(f'/proc/self/fd/{number}')}\n".encode())

    def watched(real: Any) -> Any:
        def call(source: Any, target: Any) -> None:
            real(source, target)
            os.write(descriptor, f"rename {os.path.abspath(target)}\n".encode())

        return call

    os.fsync, os.rename, os.replace = watched_fsync, watched(rename), watched(replace)  # type: ignore[assignment]


def stop_at_save(save: str) -> None:
    """Stop this process before a save, for a tracer to take hold of it; an odd mkdir marks the save's end."""
    pid = os.getpid()

    def mark() -> None:
        with contextlib.suppress(OSError):
            os.mkdir("/")

    before, after = "session.before_save", "loop.before_collect"
    files._POINTS[before] = files.Armed(before, "stop", lambda: os.kill(pid, signal.SIGSTOP), int(save))
    files._POINTS[after] = files.Armed(after, "mark", mark)


# -- file systems ---------------------------------------------------------------------------------

NEW_MOUNTS, NEW_USER = 0x20000, 0x10000000
READ_ONLY, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 32, 4096, 16384, 1 << 18


def read_only(path: str) -> None:
    """From here on this process sees `path` on a file system that takes no writes; root's rights do not help it."""
    own_mounts()
    mount(path, path, None, BIND)
    mount(path, path, None, BIND | REMOUNT | READ_ONLY)


def small_disk(path: str, size: str, keep: str) -> None:
    """The rest of this process works on a disk of `size` bytes at `path`; what it leaves there is copied to `keep`."""
    own_mounts()
    mount("tmpfs", path, "tmpfs", 0, f"size={size}")
    child = os.fork()
    if child == 0:
        return
    _, status = os.waitpid(child, 0)
    shutil.copytree(path, keep, symlinks=True)
    os._exit(os.waitstatus_to_exitcode(status))


def own_mounts() -> None:
    """Mounts that nobody else sees; as root, or in a user namespace of our own."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NEW_MOUNTS) and libc.unshare(NEW_USER | NEW_MOUNTS):
        raise PermissionError("cannot mount here: " + os.strerror(ctypes.get_errno()))
    mount("none", "/", None, RECURSIVE | PRIVATE)


def mount(source: str, target: str, kind: str | None, flags: int, data: str = "") -> None:
    """mount(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    words = [None if word is None else word.encode() for word in (source, target, kind)]
    if libc.mount(*words, ctypes.c_ulong(flags), data.encode()):
        raise PermissionError("cannot mount here: " + os.strerror(ctypes.get_errno()))


def passed(path: Path) -> list[str]:
    """The names that `trace` wrote, in order."""
    return path.read_text().splitlines()


def plant(bug: str) -> None:
    """Put one bug of `kill_bugs` into this process."""
    kill_bugs.BUGS[bug]()


def forgetful_disk() -> None:
    """Journals live on a disk that keeps only what was synced."""
    kill_bugs.forgetful_disk()


def elsewhere(module: str, name: str, *arguments: str) -> None:
    """Call a function of another module that lies here."""
    import importlib

    getattr(importlib.import_module(module), name)(*arguments)
