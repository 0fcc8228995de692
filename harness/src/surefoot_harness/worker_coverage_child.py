"""Coverage inside one process of a `surefoot cover run`: starts with the interpreter, saves however it ends.

Owns       the record of one process (`ID.jsonl`: hello, touched, end) and its line data (`ID.cov`).
Promises   the record says hello before any user code runs; a data file is there whole or not at all; a process that
           forks, execs, calls `os._exit` or gets SIGTERM saves first; one that is killed is missing its `end` line.
Never      imports the rest of surefoot: the interpreter that is measured may not have it.

Loaded by file name from the `sitecustomize.py` that `worker_coverage.py` writes.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import sqlite3
import sys
import threading
import time
import types
import uuid
from pathlib import Path
from typing import Any, NoReturn

FOLDER = "SUREFOOT_COVER"
"""Variable that names the folder of the run: settings in, records out."""

_PYTHON = re.compile(r"(python|pypy)[\d.]*$")
_DEAF = re.compile(r"-[a-zA-Z]*[IES]")
"""Interpreter options under which `sitecustomize` or PYTHONPATH is ignored."""

_WARNINGS = ["no-data-collected", "trace-changed", "module-not-measured", "module-not-imported", "couldnt-parse"]
_RAY_WORKER = "default_worker.py"


class Process:
    """One measured process, from hello to end."""

    def __init__(self, folder: Path, settings: dict[str, Any], touched: bool = False) -> None:
        self.folder, self.settings, self.touched = folder, settings, touched
        self.name = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self.saved = b""
        self.late = 0  # a signal that came during the last save
        self.ending = self.ended = False
        self.lock = threading.Lock()
        self.known: dict[str, bool] = {}
        words = [word[:120] for word in sys.orig_argv[:3]]
        self.note("hello", pid=os.getpid(), parent=os.getppid(), argv=words, inherited=touched)
        self.coverage = self._started()
        self.tracer = sys.gettrace()

    def note(self, event: str, **facts: Any) -> None:
        """Append one line to the record; it has left this process on return."""
        line = json.dumps({"event": event, "time": time.time(), **facts}).encode() + b"\n"
        file = os.open(self.folder / f"{self.name}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, line)
        finally:
            os.close(file)

    def _started(self) -> Any:
        try:
            import coverage
        except ImportError as error:
            self.note("blind", why=f"{sys.executable}: {error}")
            return None
        try:
            return self._measuring(coverage)
        except (coverage.CoverageException, OSError, TypeError) as error:  # TypeError: a coverage too old for us
            self.note("blind", why=f"coverage could not start: {error}")
            return None

    def _measuring(self, coverage: Any) -> Any:
        cover = coverage.Coverage(
            data_file=None,  # in memory: a kill in the middle of a save must not leave half a database
            config_file=False,
            branch=self.settings["branch"],
            include=self.settings["include"],
            omit=self.settings["omit"],
            check_preimported=False,
            messages=False,
        )
        cover.set_option("run:disable_warnings", _WARNINGS)
        cover.start()
        return cover

    def save(self) -> None:
        """Write the lines seen so far; nothing happens when there are no new ones."""
        with self.lock:
            if self.coverage is None:
                return
            data = self.coverage.get_data().dumps()
            if data == self.saved:
                return
            half = self.folder / f"{self.name}.half"
            half.write_bytes(data)  # by hand: `surefoot_harness.system` may not be there
            os.replace(half, self.folder / f"{self.name}.cov")
            self.saved = data

    def end(self, how: str) -> None:
        """Save for the last time and say so; a failure leaves the record without its end, which is what it means."""
        if self.ending or self.ended:
            return  # a signal during the last save must not wait for that save
        self.ending = True
        try:
            if self.tracer is not None and threading.current_thread() is threading.main_thread():
                now = sys.gettrace()
                if now is not self.tracer:
                    self.note("blind", why=f"another tracer took over: {type(now).__module__}.{type(now).__name__}")
            self.save()
            self.note("end", how=how)
            self.ended = True
        except (OSError, sqlite3.Error, RuntimeError) as error:
            print(f"surefoot cover: process {os.getpid()} could not save: {error}", file=sys.stderr)
        self.ending = False

    def saw_code(self, name: str) -> None:
        """Note the first code of a measured file: only a process that ran some can lose some."""
        if not self.touched and self._is_measured(name):
            self.touched = True
            self.note("touched", file=name)

    def _is_measured(self, name: str) -> bool:
        if name.startswith("<"):
            return False  # typed, frozen or made on the way: no file
        folder = os.path.dirname(name)
        if folder not in self.known:
            real = os.path.realpath(folder) + os.sep
            self.known[folder] = (
                any(real.startswith(root.rstrip(os.sep) + os.sep) for root in self.settings["roots"])
                and not real.startswith(self.settings["data"] + os.sep)
                and f"{os.sep}site-packages{os.sep}" not in real
            )
        return self.known[folder]

    def saw_start(self, program: Any, words: Any, environ: Any) -> None:
        """Note a Python that is being started in a way that keeps this file from being loaded there."""
        texts = [os.fsdecode(word) for word in (words or []) if isinstance(word, str | bytes | os.PathLike)]
        name = os.fsdecode(program) if isinstance(program, str | bytes | os.PathLike) else (texts or [""])[0]
        if not _PYTHON.match(os.path.basename(name)):
            return
        deaf = next((word for word in options_of(texts[1:]) if _DEAF.fullmatch(word)), None)
        if deaf:
            self.note("unseen", why=f"{os.path.basename(name)} was started with {deaf}")
        elif environ is not None and FOLDER not in {os.fsdecode(key) for key in environ}:
            self.note("unseen", why=f"{os.path.basename(name)} was started with an environment of its own")


def options_of(words: list[str]) -> list[str]:
    """The interpreter's own options in a command line: those before the script, `-c` or `-m`."""
    found = []
    takes_value = False
    for word in words:
        if takes_value:
            takes_value = False
        elif not word.startswith("-") or word[:2] in ("-c", "-m") or word == "-":
            break
        elif word in ("-W", "-X", "--check-hash-based-pycs"):
            takes_value = True
        else:
            found.append(word)
    return found


_current: list[Process] = []  # the process this interpreter is; replaced in a forked child
_forking: list[bool] = []  # a fork that goes on in Python is under way


def start(folder: Path) -> None:
    """Begin to measure this interpreter, and every process that it forks."""
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    _current.append(Process(folder, settings))
    os.register_at_fork(after_in_parent=_forking.clear, after_in_child=_after_fork)
    sys.addaudithook(_audit)
    atexit.register(_end, "exit")
    _save_before_exit()
    _save_on_sigterm()
    # Ray ends its workers from C++ without a word to Python: there only what was saved on the way is left.
    every = settings["save_every"] or (0.2 if any(_RAY_WORKER in word for word in sys.orig_argv) else 0)
    if every:
        threading.Thread(target=_save_often, args=(every,), name="surefoot-cover", daemon=True).start()


def _end(how: str) -> None:
    _current[-1].end(how)
    if _current[-1].late:
        _die(_current[-1].late)


def _die(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _after_fork() -> None:
    if not _forking:
        return  # subprocess with a preexec_fn: another program is about to take this process over
    _forking.clear()
    parent = _current[-1]
    if parent.coverage is not None:
        parent.coverage.stop()  # its lines are saved by the parent
    _current[:] = [Process(parent.folder, parent.settings, touched=parent.touched)]


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "exec":
        if isinstance(arguments[0], types.CodeType):
            _current[-1].saw_code(arguments[0].co_filename)
    elif event == "code.__new__":  # functions that travelled as bytes, as Ray's do
        _current[-1].saw_code(str(arguments[1]))
    elif event == "subprocess.Popen":
        _current[-1].saw_start(arguments[0], arguments[1], arguments[3])
    elif event in ("os.fork", "os.forkpty"):
        _forking.append(True)
    elif event in ("os.posix_spawn", "os.exec"):
        _current[-1].saw_start(*arguments)
        if event == "os.exec":
            _end("exec")


def _save_before_exit() -> None:
    leave = os._exit

    def save_and_leave(status: int) -> NoReturn:
        _end("_exit")
        leave(status)

    os._exit = save_and_leave


def _save_on_sigterm() -> None:
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return

    def save_and_die(number: int, frame: object) -> None:
        if _current[-1].ending:
            _current[-1].late = number  # this process is at its end and saving: it dies of the signal just after
            return
        _end("SIGTERM")
        _die(number)

    signal.signal(signal.SIGTERM, save_and_die)


def _save_often(seconds: float) -> None:
    pause = seconds
    while not _current[-1].ended:
        time.sleep(pause)
        began = time.perf_counter()
        try:
            _current[-1].save()
        except (OSError, sqlite3.Error) as error:
            _current[-1].note("blind", why=f"a save failed: {error}")
            return
        pause = max(seconds, 20 * (time.perf_counter() - began))  # at most a twentieth of the time
