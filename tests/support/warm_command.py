"""The real command in forks of a process that has the libraries loaded: most of a short run's time is importing them.

    python tests/support/warm_command.py serve SOCKET [MODULE...]    until standard input closes; loads these too
    python tests/support/warm_command.py surefoot SOCKET WORDS...    what a shell calls `surefoot WORDS...`
    python tests/support/warm_command.py python SOCKET WORDS...      what a shell calls `python FILE WORDS...`

A fork gets the caller's own streams, folder and environment, a session and a dice of its own, and then is the command:
the same `surefoot.cli.main` that `python -m surefoot` calls, with the same ending. What it does not show is that the
command starts: that is for `command.surefoot(..., fresh=True)`, and at night for every page of the documentation.

Owns       one server for each process that asks, started by its first question and ended with that process.
Never      serves a caller who changes variables that are read once, at the start: those only a fresh interpreter reads.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ODD = 99
"""Exit code of a fork whose command ended in no way that it may."""
PATIENCE_S = 120.0
READ_ONCE = ("PYTHON", "LD_", "HF_", "TORCH", "CUDA", "OMP_", "GOMP_", "COVERAGE")
"""Variables that Python or a library reads once, when it is loaded."""


# -- the server -----------------------------------------------------------------------------------


def serve(address: str, modules: list[str]) -> None:
    """Fork a command for everybody who connects; end, with all of them, when standard input closes."""
    warm_up(modules)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.bind(address)
        door.listen(16)
        print("ready", flush=True)
        Server(door).run()


def warm_up(modules: list[str]) -> None:
    """Import what commands import, and load the built-in model once, so that nothing is left to import lazily."""
    import gc
    import importlib

    import torch

    torch.set_num_threads(1)  # a run sets its own number; a second thread here would make forks unsafe
    for name in (
        "surefoot.cli", "surefoot.run.session", "surefoot.run.build", "surefoot.loop_state",
        "surefoot.run.evaluate", "surefoot.loop", "surefoot.runtime.task_queue", "surefoot.learner.checkpoint",
        "surefoot.learner.checkpoint", "surefoot.report.view", "surefoot.harness.suites.run", *modules,
    ):  # fmt: skip
        importlib.import_module(name)
    from surefoot.learner.model import load_policy

    load_policy("pebble", base=Path.cwd(), device="cpu", dtype="float32")
    gc.collect()
    gc.freeze()  # a fork that does not touch the old objects does not copy them
    deadline = time.monotonic() + PATIENCE_S
    while len(os.listdir("/proc/self/task")) > 1:  # the loader's helpers have been told to end
        assert time.monotonic() < deadline, "a fork would not be safe: a thread is left"
        time.sleep(0.01)


class Server:
    """Waits for callers, for their signals, and for the forks that answer them."""

    def __init__(self, door: socket.socket) -> None:
        self.door, self.poll = door, select.poll()
        self.callers: dict[int, tuple[socket.socket, int, int]] = {}
        self.forks: dict[int, int] = {}

    def run(self) -> None:
        """Until standard input closes."""
        for descriptor in (0, self.door.fileno()):
            self.poll.register(descriptor, select.POLLIN)
        while True:
            for descriptor, _ in self.poll.poll():
                if descriptor == 0:
                    return self._end()
                if descriptor == self.door.fileno():
                    self._fork(self.door.accept()[0])
                elif descriptor in self.forks:
                    self._answer(self.forks[descriptor])
                elif descriptor in self.callers:
                    self._pass_on(descriptor)

    def _fork(self, caller: socket.socket) -> None:
        message, streams = _receive(caller)
        pid = os.fork()
        if pid == 0:
            self.door.close()
            for other, _, watch in self.callers.values():
                other.close()
                os.close(watch)
            caller.close()
            be_command(message, streams)
        for stream in streams:
            os.close(stream)
        watch = os.pidfd_open(pid)
        self.callers[caller.fileno()] = (caller, pid, watch)
        self.forks[watch] = caller.fileno()
        self.poll.register(watch, select.POLLIN)
        self.poll.register(caller, select.POLLIN)

    def _pass_on(self, number: int) -> None:
        """A signal for the fork; a caller that is gone takes its fork along, as a dead process takes its own work."""
        caller, pid, _ = self.callers[number]
        wanted = caller.recv(1)
        os.kill(pid, wanted[0] if wanted else signal.SIGKILL)
        if not wanted:
            self.poll.unregister(caller)

    def _answer(self, number: int) -> None:
        caller, pid, watch = self.callers.pop(number)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for descriptor in (watch, number):
            with contextlib.suppress(KeyError):  # the caller left before its fork did
                self.poll.unregister(descriptor)
        del self.forks[watch]
        os.close(watch)
        with caller:
            with contextlib.suppress(OSError):  # nobody waits for the answer any more
                caller.sendall(b"%d\n" % code)

    def _end(self) -> None:
        for _, pid, _ in self.callers.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _receive(caller: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """One line of JSON, and the three streams that came with its first bytes."""
    text, streams, _, _ = socket.recv_fds(caller, 65536, 3)
    while not text.endswith(b"\n"):
        more = caller.recv(65536)
        assert more, "a caller left in the middle of its question"
        text += more
    return json.loads(text), list(streams)


def be_command(message: dict[str, Any], streams: list[int]) -> None:
    """In the fork: become the process that a shell would have started, then be the command. Does not return."""
    code = ODD
    try:
        os.setsid()
        os.chdir(message["cwd"])
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.environ.clear()
        os.environ.update(message["env"])
        _forget_the_server()
        be = be_python if message["what"] == "python" else partial(be_surefoot, planted=message["planted"])
        code = exit_code(partial(be, message["words"]))
        _end_as_python_does()
    finally:
        os._exit(code)


def exit_code(program: Callable[[], None]) -> int:
    """The code with which Python would end after this program; what it would print then is printed."""
    try:
        program()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        return exit_code(partial(_complain, error))
    return 0


def _complain(error: BaseException) -> None:
    sys.excepthook(type(error), error, error.__traceback__)  # a program may have put its own there, and exit in it
    sys.exit(1)


def be_surefoot(words: list[str], planted: str | None) -> None:
    """`python -m surefoot WORDS`, with one of the bugs of `planted.py` in it where one is asked for."""
    import runpy

    if planted:
        from planted import PLANTS, plant_after_fork

        plant_after_fork(PLANTS[planted])
    sys.argv = ["surefoot", *words]
    runpy.run_module("surefoot", run_name="__main__", alter_sys=True)


def be_python(words: list[str]) -> None:
    """`python [-W KIND] FILE WORDS`."""
    import runpy
    import warnings

    if words[0] == "-W":
        warnings.simplefilter(words[1])  # type: ignore[arg-type]
        words = words[2:]
    sys.argv = words
    sys.path[0] = os.path.dirname(os.path.abspath(words[0]))
    runpy.run_path(words[0], run_name="__main__")


def _forget_the_server() -> None:
    """What a fresh interpreter has of its own: streams, a path, dice, a place for temporary files."""
    import random
    import tempfile

    import numpy
    import torch

    from surefoot.storage import files

    # torch makes its thread pool anew at the first use after a fork, and not safely: two threads that come first (a
    # model's loader) may find none and end with "Invalid thread pool". Here there is only one thread.
    torch.set_num_threads(torch.get_num_threads())
    through = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)), "utf-8")
    out, err = (io.BufferedWriter(io.FileIO(number, "w", closefd=False)) for number in (1, 2))
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(out, "utf-8", line_buffering=os.isatty(1), write_through=through)
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(
        err, "utf-8", "backslashreplace", line_buffering=True, write_through=through
    )
    sys.path[0] = os.getcwd()
    sys.path.append(str(Path(__file__).parent))  # `planted`, and last, so that it shadows nothing
    random.seed()
    numpy.random.seed()
    tempfile.tempdir = None
    files.read_environment()


def _end_as_python_does() -> None:
    """Threads are joined and exit functions called; only taking the libraries down, which costs much, is left out."""
    import threading

    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except (OSError, ValueError):
        pass  # a reader that has left


# -- the caller -----------------------------------------------------------------------------------


def ask(
    address: str, what: str, words: list[str], cwd: str, env: dict[str, str], streams: list[int],
    planted: str | None = None,
) -> socket.socket:  # fmt: skip
    """Have `surefoot WORDS` or `python WORDS` begin; the socket answers with its exit code, and takes signals on the way."""
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    caller.connect(address)
    message = json.dumps({"what": what, "words": words, "cwd": cwd, "env": env, "planted": planted}) + "\n"
    body = message.encode()
    sent = socket.send_fds(caller, [body[:65536]], streams)
    caller.sendall(body[sent:])
    return caller


def answer(caller: socket.socket) -> int:
    """The exit code, as `subprocess` has it: minus the signal's number where one ended it."""
    text = b""
    while not text.endswith(b"\n"):
        more = caller.recv(64)
        if not more:
            raise ConnectionError("the server of commands is gone")
        text += more
    return int(text)


class WarmCommand:
    """One server, and its address."""

    client = f"-I -S {shlex.quote(__file__)}"
    """What a script gives to Python, and after it the program's name and `address`, to be that program."""

    def __init__(self, folder: Path, *modules: str) -> None:
        self.address = str(folder / "door")
        self.programs = ("surefoot", "python") if modules else ("surefoot",)
        path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        self.env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0", "NO_COLOR": "1"}
        self.server = subprocess.Popen(
            [sys.executable, __file__, "serve", self.address, *modules], cwd=folder, env=self.env, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.server.stdout is not None, "it was started with a pipe"
        said = self.server.stdout.readline()
        assert said == "ready\n", f"the server of commands ended with {self.server.wait(PATIENCE_S)}"
        atexit.register(self.close)

    def run(
        self, words: list[str], cwd: Path, env: dict[str, str], *, what: str = "surefoot", planted: str | None = None,
        timeout_s: float = 600,
    ) -> tuple[int, str, str]:  # fmt: skip
        """`surefoot WORDS`, or `python WORDS`, to its end: the exit code and both streams."""
        import tempfile

        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, open(os.devnull, "rb") as nothing:
            streams = [nothing.fileno(), out.fileno(), err.fileno()]
            with ask(self.address, what, words, str(cwd), env, streams, planted) as caller:
                caller.settimeout(timeout_s)
                code = answer(caller)  # one that takes longer is killed as we leave
            out.seek(0)
            err.seek(0)
            return code, out.read().decode(), err.read().decode()

    def serves(self, env: dict[str, str], changed: Iterable[str]) -> bool:
        """Whether a fork of ours is what a fresh interpreter with this environment, changed there, would be."""
        ours, theirs = ({k: v for k, v in e.items() if k.startswith("PYTHON")} for e in (self.env, env))
        return ours == theirs and not any(name.startswith(READ_ONCE) for name in changed)

    def close(self) -> None:
        """End the server; it ends by itself when its input closes."""
        assert self.server.stdin is not None, "it was started with a pipe"
        assert self.server.stdout is not None, "and with another"
        if not self.server.stdin.closed:
            self.server.stdin.close()
            self.server.wait(PATIENCE_S)
            self.server.stdout.close()
            shutil.rmtree(Path(self.address).parent, ignore_errors=True)


_running: dict[tuple[str, ...], WarmCommand] = {}


def shared(*modules: str) -> WarmCommand:
    """This process's server; with `modules`, another one that has them loaded and serves scripts that import them."""
    if modules not in _running:
        import tempfile

        _running[modules] = WarmCommand(Path(tempfile.mkdtemp(prefix="warm-")), *modules)
    return _running[modules]


def be_client(what: str, address: str, words: list[str]) -> int:
    """The command as a shell sees it: its streams, its signals, its exit code."""
    with ask(address, what, words, os.getcwd(), dict(os.environ), [0, 1, 2]) as caller:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda got, _: caller.sendall(bytes([got])))
        code = answer(caller)
    if code < 0:  # die of the same signal
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(be_client(sys.argv[1], sys.argv[2], sys.argv[3:]))
