"""The small process that forks reward workers and cleans up after them.

Owns       the workers' lives, and everything they print.
Promises   single-threaded and forked before the model loads, so forking from it is safe for the
           whole run; when the driver goes (close, exit, SIGKILL) every descendant goes too;
           printed output is capped on disk and its last lines are kept; a worker that takes more
           memory than it may, its descendants counted, is ended; of the driver's environment only what
           `child_environment` lists, and what the config names, is left here and in every worker.
Never      runs a reward function, or reads what travels between driver and worker.

    driver --spawn(slot)--> fork server --fork--> worker
    driver <==== the worker's socket, handed over (SCM_RIGHTS) ====

Read next: `pool.py`, the driver's end.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import socket
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from surefoot.guards.reward_values import RewardFunction
from surefoot.rewards.messages import Forked
from surefoot.rewards.worker import STACKS, work
from surefoot.system.environment import narrow
from surefoot.system.frames import pack, read_frame
from surefoot.system.memory import excess_mb, resident_bytes, return_freed_memory
from surefoot.system.process import Child, adopt_orphans, end_all_children, family, kill_tree, reap_orphans
from surefoot.tracking.process_logs import PrintedLines, safe_tail

CONTROL_CAP = 2**16
_LOG_CAP = 2**20
_TAIL = 16_000
_LOOK_UP_S = 1.0
_STACKS_S = 0.3
_WEIGH_S = 0.05
"""How often memory is looked at where there is a cap: about a third of a gigabyte can be filled in between."""


class CappedLog:
    """A file that takes the first `cap` bytes and then one line saying that the rest was discarded."""

    def __init__(self, descriptor: int | None, cap: int = _LOG_CAP) -> None:
        self.descriptor, self.left = descriptor, cap

    def write(self, data: bytes) -> None:
        """Keep what fits. A full disk ends the log, not the rewards."""
        if self.descriptor is None:
            return
        note = b"\n[more output was discarded]\n" if len(data) > self.left else b""
        try:
            os.write(self.descriptor, data[: self.left] + note)
        except OSError:
            note = b"closed"
        self.left -= len(data)
        if note:
            os.close(self.descriptor)
            self.descriptor = None


@dataclass
class _Worker:
    process: Child
    output: int
    """Read end of its stdout and stderr."""
    started_with: int = 0
    """Bytes that it shared with us at its birth."""
    tail: bytes = b""
    printed: PrintedLines = field(default_factory=PrintedLines)
    """Its way into the log: whole lines, without secrets."""
    violation: str | None = None
    """Why we ended it, when it was we who did."""


def run_fork_server(
    control: socket.socket, functions: Mapping[str, RewardFunction], log: int | None, driver: int, memory_mb: int = 0,
    forked: Forked | None = None, pass_env: Sequence[str] = (),
) -> NoReturn:  # fmt: skip
    """Serve the driver until it goes. Runs in a fresh fork of the driver."""
    printed = CappedLog(log)
    try:
        narrow(pass_env)
        os.setsid()
        _leave_the_terminal()
        # Garbage of the driver is the driver's: its finalisers (temporary folders!) must not run here.
        gc.freeze()
        # Before any worker starts: what one gives back later would hide what it takes.
        return_freed_memory()
        adopt_orphans()
        ForkServer(control, functions, printed, driver, memory_mb, forked).serve()
    except BaseException:
        printed.write(b"\nthe fork server of the reward workers failed:\n" + traceback.format_exc().encode())
        raise
    finally:
        os._exit(0)


def _leave_the_terminal() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the driver decides when to stop, and closes us
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for target in (0, 1, 2):
        os.dup2(nowhere, target)
    if nowhere > 2:
        os.close(nowhere)


class ForkServer:
    """Forks workers on request and listens to what they print."""

    def __init__(
        self, control: socket.socket, functions: Mapping[str, RewardFunction], log: CappedLog, driver: int,
        memory_mb: int, forked: Forked | None = None,
    ) -> None:  # fmt: skip
        self.control, self.functions, self.log, self.driver = control, functions, log, driver
        self.forked = forked
        self.memory_mb, self.weighed_at = memory_mb, 0.0
        self.workers: dict[int, _Worker] = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(control, selectors.EVENT_READ)

    def serve(self) -> None:
        """Loop until the driver closes its end or is no longer our parent."""
        try:
            while os.getppid() == self.driver:
                for key, _ in self.selector.select(_WEIGH_S if self.memory_mb else _LOOK_UP_S):
                    if key.fileobj is not self.control:
                        self._listen_if_alive(key.data)
                    elif not self._handle_request():
                        return
                reap_orphans({worker.process.pid for worker in self.workers.values()})
                self._weigh()
        finally:
            for worker in self.workers.values():
                worker.process.kill()
            end_all_children()

    def _handle_request(self) -> bool:
        """One request of the driver; False when it has closed."""
        frame = read_frame(self.control, CONTROL_CAP)
        if frame is None:
            return False
        request = json.loads(frame)
        ended, tail = self._end(request["slot"], request["stacks"])
        try:
            pid, sock = self._fork(request["slot"])
        except OSError as error:
            self.control.sendall(pack(json.dumps({"error": str(error)}).encode()))
            return True
        reply = {"pid": pid, "ended": ended, "output": safe_tail(tail, _TAIL)}
        with sock:
            socket.send_fds(self.control, [pack(json.dumps(reply).encode())], [sock.fileno()])
        return True

    def _fork(self, slot: int) -> tuple[int, socket.socket]:
        ours, theirs = socket.socketpair()
        listening, printing = os.pipe()
        fork_server = os.getpid()

        def serve() -> NoReturn:
            self._let_go_of(ours, listening)
            work(theirs, printing, fork_server, self.functions, self.memory_mb, self.forked)

        process = Child.fork(serve)
        theirs.close()
        os.close(printing)
        os.set_blocking(listening, False)
        self.workers[slot] = _Worker(process, listening, resident_bytes(fork_server))
        self.selector.register(listening, selectors.EVENT_READ, self.workers[slot])
        return process.pid, ours

    def _let_go_of(self, ours: socket.socket, listening: int) -> None:
        """In the new worker: close what belongs to the fork server, or its end would never be noticed."""
        self.selector.close()
        self.control.close()
        ours.close()
        for descriptor in [listening, *(worker.output for worker in self.workers.values())]:
            os.close(descriptor)
        if self.log.descriptor is not None:
            os.close(self.log.descriptor)

    def _weigh(self) -> None:
        """End what took more memory than it may: a worker with its descendants, or what workers left behind."""
        if not self.memory_mb or time.monotonic() < self.weighed_at + _WEIGH_S:
            return
        self.weighed_at = time.monotonic()
        lost = set(family(os.getpid())) - {os.getpid()}
        for worker in self.workers.values():
            members = family(worker.process.pid)
            lost -= set(members)
            taken = None if worker.violation else excess_mb(members, self.memory_mb, worker.started_with)
            if taken is not None:
                self._collect_stacks(worker)
                worker.violation = f"it took {taken} MiB, reward_memory_mb allows {self.memory_mb}"
                worker.process.kill()
        if lost and excess_mb(lost, self.memory_mb, 0) is not None:
            for pid in lost:
                kill_tree(pid)

    def _listen_if_alive(self, worker: _Worker) -> None:
        # A request that was ready at the same moment may have ended it; its descriptor may be somebody else's by now.
        if any(each is worker for each in self.workers.values()):
            self._listen(worker)

    def _listen(self, worker: _Worker) -> bool:
        """Take what a worker printed; False when there was nothing."""
        try:
            data = os.read(worker.output, 2**16)
        except BlockingIOError:
            return False
        if data:
            if self.log.descriptor is not None:
                self.log.write(worker.printed.feed(data))
            worker.tail = (worker.tail + data)[-2 * _TAIL :]  # what is shown begins at a line
        elif worker.output in self.selector.get_map():
            self.selector.unregister(worker.output)
        return bool(data)

    def _end(self, slot: int, stacks: bool) -> tuple[str | None, bytes]:
        """End the worker of a slot, if there is one: how it ended, and the last it printed."""
        worker = self.workers.pop(slot, None)
        if worker is None:
            return None, b""
        if stacks:
            self._collect_stacks(worker)
        worker.process.end()
        give_up = time.monotonic() + _STACKS_S
        while self._listen(worker) and time.monotonic() < give_up:
            pass
        if worker.output in self.selector.get_map():
            self.selector.unregister(worker.output)
        os.close(worker.output)
        self.log.write(worker.printed.rest())
        return worker.violation or _how(worker.process.wait()), worker.tail

    def _collect_stacks(self, worker: _Worker) -> None:
        worker.process.send(STACKS, group=False)
        give_up = time.monotonic() + _STACKS_S
        while time.monotonic() < give_up and b"most recent call first" not in worker.tail:
            if not self._listen(worker):
                time.sleep(0.01)
        time.sleep(0.02)  # the dump is written line by line; `_end` collects the rest


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
