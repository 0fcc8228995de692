"""Reward calls with deadlines: one verdict per completion, or the reason why there is none; and the sockets under them.

Owns       one fork server, one non-blocking socket per worker, and which worker runs which call.
Promises   never blocks on a worker: requests and answers move as the sockets allow; a failure is never a number.
Never      runs a reward function in this process, or weighs what they say.

Read next: `workers.py`, the other end.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from surefoot.errors import RewardError, StorageError
from surefoot.guards.reward_values import DIED, RAISED, TIMEOUT, RewardFunction, RewardValue
from surefoot.rewards.functions import COMPLETION_IDS, RESERVED, TRAINER_STATE, asks_for
from surefoot.rewards.workers import CONTROL_CAP, Forked, NotJson, RewardCall, run_fork_server, write_call
from surefoot.system.environment import check_named, missing_words
from surefoot.system.files import APPEND, plain_descriptor
from surefoot.system.frames import ANSWER_CAP, REQUEST_CAP, FrameError, pack, take_frame
from surefoot.system.process import Child
from surefoot.system.signals import tick

_PATIENCE_S = 10.0


class WorkerGoneError(Exception):
    """The worker closed its end, or sent what no worker of ours sends."""


@dataclass
class WorkerConnection:
    """One worker as the driver sees it."""

    sock: socket.socket
    outbox: memoryview = field(default_factory=lambda: memoryview(b""))
    inbox: bytearray = field(default_factory=bytearray)

    def is_quiet(self) -> bool:
        """Whether an idle worker is alive and has nothing to say, as it should be."""
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def post(self, payload: bytes) -> None:
        """Put one request into the outbox; `pump` moves it."""
        self.outbox = memoryview(pack(payload))

    def pump(self) -> dict[str, Any] | None:
        """Move what can be moved without waiting; the answer when it is complete."""
        try:
            if self.outbox:
                self.outbox = self.outbox[self.sock.send(self.outbox[: 2**20]) :]
            piece = self.sock.recv(2**16)
        except BlockingIOError:
            return None
        except OSError as error:
            raise WorkerGoneError(str(error)) from error
        if not piece:
            raise WorkerGoneError("end of file")
        self.inbox += piece
        try:
            frame = take_frame(self.inbox, ANSWER_CAP)
            answer = None if frame is None else json.loads(frame)
        except (FrameError, ValueError) as error:
            raise WorkerGoneError(str(error)) from error
        if answer is not None and not isinstance(answer, dict):
            raise WorkerGoneError("not an answer")
        return answer


@dataclass(frozen=True)
class WorkerExit:
    """How the previous worker of a slot ended, and the last lines it printed."""

    ended: str | None
    output: str


class ForkServerConnection:
    """Starts the fork server, asks it for workers, and ends it."""

    def __init__(
        self, functions: Mapping[str, RewardFunction], log_path: Path | None, memory_mb: int = 0,
        forked: Forked | None = None, pass_env: Sequence[str] = (),
    ) -> None:  # fmt: skip
        log = None if log_path is None else _open_log(log_path)
        self.control, theirs = socket.socketpair()
        self.control.settimeout(_PATIENCE_S)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()  # what is buffered now would be printed twice
        driver = os.getpid()

        def serve() -> NoReturn:
            self.control.close()
            run_fork_server(theirs, functions, log, driver, memory_mb, forked, pass_env)

        self._process = Child.fork(serve)
        self.pid = self._process.pid
        theirs.close()
        if log is not None:
            os.close(log)

    def spawn(self, slot: int, *, stacks: bool = False) -> tuple[WorkerConnection, WorkerExit]:
        """A fresh worker for a slot; whoever was there is ended first (`stacks`: after saying where it is stuck)."""
        try:
            self.control.sendall(pack(json.dumps({"slot": slot, "stacks": stacks}).encode()))
            reply, descriptors = self._reply()
        except (OSError, FrameError) as error:
            raise RewardError(
                f"the process that starts reward workers (pid {self.pid}) does not answer: {error}",
                "without it no reward can be computed, and no reward is not reward 0",
                "look for what ended it: a reward that kills its parent, or the system running out of memory",
            ) from error
        if "error" in reply:
            raise RewardError(
                f"a reward worker could not be started: {reply['error']}",
                "the system refused a new process",
                "lower reward_workers, or raise the limit on processes",
            )
        os.set_inheritable(descriptors[0], False)
        sock = socket.socket(fileno=descriptors[0])
        sock.setblocking(False)
        return WorkerConnection(sock), WorkerExit(reply["ended"], reply["output"])

    def _reply(self) -> tuple[dict[str, Any], list[int]]:
        inbox, descriptors = bytearray(), list[int]()
        while True:
            data, received, _, _ = socket.recv_fds(self.control, CONTROL_CAP, 1)
            if not data:
                raise FrameError("it is gone")
            inbox += data
            descriptors += received
            frame = take_frame(inbox, CONTROL_CAP)
            if frame is not None:
                return json.loads(frame), descriptors

    def close(self) -> None:
        """Let the fork server end its descendants and itself; insist if it does not."""
        self.control.close()
        self._process.end(_PATIENCE_S, ask=None)


def _open_log(path: Path) -> int:
    try:
        return plain_descriptor(path, APPEND)
    except OSError as error:
        raise StorageError(
            f"the reward log {path} cannot be opened: {error.strerror}",
            "what reward functions print is kept there",
            "create its folder, or give another log_path",
        ) from error


# -- Reward calls with deadlines: one verdict per completion, or the reason why there is none -----
# Owns       which worker runs which call, for how long, and what to do when it does not answer.
# Promises   one call per group of siblings; when that call fails, one call per completion, so that
# only the guilty completion loses its verdict; a worker past its deadline is ended with
# its descendants within a second and replaced; a failure is never a number.
# Never      runs a reward function in this process, or weighs what they say.
#
# score(jobs) --> group call --answered--> values
# |
# +-- raised, timeout, died --> one call per completion --> values


@dataclass(frozen=True, slots=True)
class RewardJob:
    """One group of siblings to be scored.

    Example:
        >>> RewardJob(prompts=["1+1="] * 2, completions=["2", "3"], columns={"answer": ["2", "2"]}).size
        2
    """

    prompts: Sequence[Any]
    """(G,) texts, or message lists."""
    completions: Sequence[Any]
    """(G,) texts, or `[{"role": "assistant", "content": ...}]`."""
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Name -> (G,) values."""
    functions: tuple[str, ...] | None = None
    """Who is asked; None for every function of the pool."""
    task: str = ""
    """Whose siblings these are: columns that workers have by fork are found by it."""
    completion_ids: Sequence[Sequence[int]] | None = None
    """(G,) tokens of each completion, for functions that ask for them; None where there are none."""
    progress: Mapping[str, int] | None = None
    """What `trainer_state` is made of, for functions that ask for it."""

    def __post_init__(self) -> None:
        sizes = {"completions": self.size} | {name: len(column) for name, column in self.columns.items()}
        sizes |= {} if self.completion_ids is None else {COMPLETION_IDS: len(self.completion_ids)}
        if wrong := {name: size for name, size in sizes.items() if size != len(self.prompts)}:
            raise RewardError(
                f"a reward job has {len(self.prompts)} prompts but {wrong}",
                "every column is handed over with one entry per completion",
                "give each list the same length",
            )
        if clash := sorted(set(RESERVED) & set(self.columns)):
            raise RewardError(
                f"a task has a column named {clash[0]!r}",
                "reward functions receive something of the run's own under that name",
                "rename the column",
            )

    @property
    def size(self) -> int:
        """How many siblings."""
        return len(self.completions)


OnScored = Callable[[int, Sequence[Mapping[str, RewardValue]]], None]
"""(number of the job, one dict per completion): this job has all its values."""


@dataclass(slots=True)
class _PendingReward:
    """One call of one function: it waits, then a worker has it, until a moment of the monotonic clock."""

    function: str
    job: int
    rows: tuple[int, ...]
    spent: float = 0.0
    """Seconds that it took so far, the group's call that failed before this one included."""
    began: float = 0.0
    deadline: float = 0.0


class RewardPool:
    """Runs reward functions in worker processes.

    Start it before the model is loaded. Functions may be closures: workers are forked, not imported.
    `memory_mb` is what one worker may take beyond what it started with, its own children counted; 0 is no cap.
    `forked` holds columns that have no form as data, by task: workers have them by fork.
    `pass_env` names variables that functions may see beside those every child of ours has (`child_environment`);
    `warn` is told once of each that they ask for in vain.

    Example:
        >>> with RewardPool({"short": lambda completions, **_: [-len(c) for c in completions]}) as pool:
        ...     pool.score([RewardJob(["hi", "hi"], ["a", "abc"])])
        [{'short': Mark(value=-1.0, reason=None)}, {'short': Mark(value=-3.0, reason=None)}]
    """

    def __init__(
        self,
        functions: Mapping[str, RewardFunction],
        *,
        workers: int = 2,
        timeout_s: float = 10.0,
        memory_mb: int = 0,
        log_path: Path | None = None,
        forked: Forked | None = None,
        pass_env: Sequence[str] = (),
        warn: Callable[[str, str], object] | None = None,
    ) -> None:
        _check(functions, workers, timeout_s, memory_mb)
        self.functions, self.forked = dict(functions), dict(forked or {})
        self._asks = {
            (name, argument): asks_for(function, argument)
            for name, function in functions.items()
            for argument in (COMPLETION_IDS, TRAINER_STATE)
        }
        self.timeout_s, self.memory_mb = timeout_s, memory_mb
        self.pass_env = tuple(pass_env)
        check_named(self.pass_env)
        self._warn, self._missed = warn, set[str]()
        self._log_path = log_path
        self._slots = workers
        self._fork_server: ForkServerConnection | None = None
        self._workers: dict[int, WorkerConnection] = {}
        self._busy: dict[int, _PendingReward] = {}
        self._waiting: deque[_PendingReward] = deque()
        self._jobs: Sequence[RewardJob] = ()
        self._values: list[list[dict[str, RewardValue]]] = []
        self._left: list[int] = []
        """Marks that each job still lacks."""
        self._tell: OnScored | None = None
        self._failures: dict[str, tuple[int, str]] = {}
        self._one_at_a_time = threading.Lock()

    # -- life ---------------------------------------------------------------------
    def start(self) -> RewardPool:
        """Fork the fork server and its first workers. Call this before torch is imported."""
        if self._fork_server is None:
            self._fork_server = ForkServerConnection(
                self.functions, self._log_path, self.memory_mb, self.forked, self.pass_env
            )
            for slot in range(self._slots):
                self._replace(slot)
        return self

    def close(self) -> None:
        """End every worker and whatever the reward functions left running. May be called twice."""
        for worker in self._workers.values():
            worker.sock.close()
        self._workers.clear()
        if self._fork_server is not None:
            self._fork_server.close()
            self._fork_server = None

    def __enter__(self) -> RewardPool:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # -- scoring ------------------------------------------------------------------
    def score(self, jobs: Sequence[RewardJob], tell: OnScored | None = None) -> list[dict[str, RewardValue]]:
        """Every function, or those that a job names, on every completion.

        Returns one dict (function -> Mark) per completion, job after job.

        Args:
            tell: called with each job's number and values as soon as it has all of them.
        """
        with self._one_at_a_time:
            self._jobs, self._tell = jobs, tell
            self._left = [job.size * len(self._asked(job)) for job in jobs]
            self._values = [[{} for _ in range(job.size)] for job in jobs]
            self._waiting = deque(
                _PendingReward(name, number, tuple(range(job.size)))
                for number, job in enumerate(jobs)
                for name in self._asked(job)
                if job.size
            )
            try:
                while self._waiting or self._busy:
                    self._hand_out()
                    self._await_something()
            finally:
                for slot in list(self._busy):  # only when something was raised: their answers are not wanted
                    self._replace(slot)
            return [values for group in self._values for values in group]

    def _asked(self, job: RewardJob) -> Collection[str]:
        """The functions that judge this job."""
        return self.functions if job.functions is None else job.functions

    def describe_failures(self) -> dict[str, tuple[int, str]]:
        """Reason -> how many completions lost a verdict to it so far, and the first one's traceback or story."""
        return dict(self._failures)

    def _hand_out(self) -> None:
        for slot in range(self._slots):
            if self._waiting and slot not in self._busy:
                payload = self._payload(self._waiting[0])
                if slot not in self._workers or not self._workers[slot].is_quiet():
                    self._replace(slot)  # it ended between calls: no completion is to blame
                self._workers[slot].post(payload)
                call = self._busy[slot] = self._waiting.popleft()
                call.began = time.monotonic()
                call.deadline = call.began + self.timeout_s

    def _payload(self, call: _PendingReward) -> bytes:
        job = self._jobs[call.job]
        prompts, completions = [job.prompts[i] for i in call.rows], [job.completions[i] for i in call.rows]
        columns = {name: [column[i] for i in call.rows] for name, column in job.columns.items()}
        if job.completion_ids is not None and self._asks[call.function, COMPLETION_IDS]:
            columns[COMPLETION_IDS] = [list(job.completion_ids[i]) for i in call.rows]
        progress = None if job.progress is None or not self._asks[call.function, TRAINER_STATE] else dict(job.progress)
        try:
            payload = write_call(
                RewardCall(call.function, prompts, completions, columns, progress), job.task, self.forked
            )
        except NotJson as error:
            raise RewardError(
                f"a task's columns cannot be sent to reward function {call.function}: {error}",
                "reward functions run in their own process and receive copies, as data",
                "keep plain values in the task columns; let the function's file hold the rest",
            ) from error
        if len(payload) > REQUEST_CAP:
            raise RewardError(
                f"one call of reward function {call.function} carries {len(payload)} bytes; the cap is {REQUEST_CAP}",
                "a group's texts and columns travel to the worker in one message",
                "keep large data in files and put their names into the columns",
            )
        return payload

    def _await_something(self) -> None:
        """Wait for a socket or the next deadline, then deal with all that happened."""
        with selectors.DefaultSelector() as selector:
            for slot in self._busy:
                worker = self._workers[slot]
                wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.outbox else 0)
                selector.register(worker.sock, wanted, slot)
            patience = min(call.deadline for call in self._busy.values()) - time.monotonic()
            ready = [key.data for key, _ in selector.select(max(0.0, patience))]
        tick("waiting for reward functions")  # each call has a deadline of its own, so this wait ends
        for slot in ready:
            self._attend(slot)
        for slot in [slot for slot, call in self._busy.items() if time.monotonic() >= call.deadline]:
            self._fail(slot, TIMEOUT)

    def _attend(self, slot: int) -> None:
        try:
            answer = self._workers[slot].pump()
        except WorkerGoneError:
            self._fail(slot, DIED)
            return
        if answer is None:
            return
        self._tell_missed([str(name) for name in answer.get("missed", ())])
        call = self._busy.pop(slot)
        call.spent += time.monotonic() - call.began
        if answer.get("weary"):
            self._replace(slot)
        if "raised" in answer:
            self._retry_or_record(call, RAISED, str(answer["raised"]))
        elif "values" in answer:
            self._record(call, answer["values"])
        else:
            raise _malformed(call, str(answer.get("malformed")))

    def _tell_missed(self, names: Sequence[str]) -> None:
        new = [name for name in names if name not in self._missed]
        self._missed.update(new)
        if new and self._warn is not None:
            self._warn(*missing_words(new))

    # -- failures -----------------------------------------------------------------
    def _fail(self, slot: int, reason: str) -> None:
        """The worker of this slot gave no answer: end it, put another in its place, move its call on."""
        call = self._busy[slot]
        call.spent += time.monotonic() - call.began
        # Listening to a stuck worker takes time that the other deadlines need: once, for the story that is kept.
        listen = reason == TIMEOUT and len(call.rows) == 1 and TIMEOUT not in self._failures
        ended, output = self._replace(slot, stacks=listen)
        story = f"no answer within {self.timeout_s:g} s" if reason == TIMEOUT else f"its process ended: {ended}"
        self._retry_or_record(call, reason, f"{story}\nlast output:\n{output}" if output else story)

    def _retry_or_record(self, call: _PendingReward, reason: str, story: str) -> None:
        if len(call.rows) > 1:
            self._waiting.extend(_PendingReward(call.function, call.job, (row,), call.spent) for row in call.rows)
        else:
            self._record(call, [(None, reason, story)])

    def _record(self, call: _PendingReward, judged: Sequence[tuple[float | None, str | None, str]]) -> None:
        for row, (value, reason, story) in zip(call.rows, judged, strict=True):
            self._values[call.job][row][call.function] = RewardValue(value, reason, call.spent)
            if reason is not None:
                count, first = self._failures.get(reason, (0, f"{call.function}, completion {row}: {story}"))
                self._failures[reason] = (count + 1, first)
        self._left[call.job] -= len(call.rows)
        if self._tell is not None and not self._left[call.job]:
            self._tell(call.job, self._values[call.job])

    def _replace(self, slot: int, *, stacks: bool = False) -> tuple[str | None, str]:
        """A fresh worker in this slot: how the old one ended, and what it printed last."""
        self._busy.pop(slot, None)
        if (old := self._workers.pop(slot, None)) is not None:
            old.sock.close()
        if self._fork_server is None:
            raise RewardError(
                f"the reward pool of {', '.join(self.functions)} is not running",
                "rewards are computed by worker processes",
                "call start() first, or use `with RewardPool(...) as pool:`",
            )
        self._workers[slot], obituary = self._fork_server.spawn(slot, stacks=stacks)
        return obituary.ended, obituary.output


def _malformed(call: _PendingReward, got: str) -> RewardError:
    return RewardError(
        f"reward function {call.function} returned {got} for {len(call.rows)} completions",
        "a list that is cut or stretched gives completions each other's rewards",
        f"return a list of {len(call.rows)}: one number, or None for no verdict, per completion",
    )


def _check(functions: Mapping[str, object], workers: int, timeout_s: float, memory_mb: int) -> None:
    if not hasattr(os, "fork"):
        raise RewardError("this system cannot fork", "reward functions run in forked workers", "use Linux or macOS")
    wrong = [name for name, function in functions.items() if not callable(function)]
    if not functions or wrong:
        raise RewardError(
            f"reward functions that cannot be called: {wrong}" if functions else "there is no reward function",
            "nothing could be scored",
            "give a mapping of name to function",
        )
    if workers < 1 or timeout_s <= 0 or memory_mb < 0:
        raise RewardError(
            f"the reward pool has {workers} workers, a timeout of {timeout_s} s and {memory_mb} MiB of memory",
            "no call could ever be answered",
            "use at least one worker, a positive timeout, and 0 MiB for no cap",
        )
