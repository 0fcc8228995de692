"""Reward workers: what is said to them, the loop in which a user's functions run, the small process that forks them.

Owns       the workers' lives, and everything they print.
Promises   single-threaded and forked before the model loads, so forking is safe for the whole run; when the driver
           goes (close, exit, SIGKILL) every descendant goes too; printed output is capped on disk and its last lines
           are kept; a worker that takes more memory than it may, its descendants counted, is ended; of the driver's
           environment only what `child_environment` lists, and what the config names, is left here and in every worker.
Never      in the fork server: runs a reward function, or reads what travels between driver and worker.

    driver --spawn(slot)--> fork server --fork--> worker
    driver <==== the worker's socket, handed over (SCM_RIGHTS) ====

Read next: `pool.py`, the driver's end.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import faulthandler
import gc
import inspect
import json
import math
import os
import resource
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta, timezone
from datetime import time as time_of_day
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PosixPath
from typing import Any, NamedTuple, NoReturn
from uuid import UUID

from surefoot.guards.reward_values import RewardFunction, parse_reward
from surefoot.rewards.functions import TRAINER_STATE, TrainerState, parameters_of
from surefoot.system.environment import missed, missing_words, narrow
from surefoot.system.frames import REQUEST_CAP, pack, read_frame
from surefoot.system.memory import OwnMemory, excess_mb, resident_bytes, return_freed_memory
from surefoot.system.process import (
    Child,
    adopt_orphans,
    die_with_parent,
    end_all_children,
    family,
    kill_tree,
    open_descriptors,
    reap_orphans,
)
from surefoot.system.text import redact
from surefoot.tracking.process_logs import PrintedLines, safe_tail

# -- One reward call as JSON, and back: texts and columns travel as data, never as objects that run code --
# Owns       the form of a call on its way to a worker.
# Promises   what comes out is equal to what went in, of the same types, and fresh for every call; a value that several
#            rows share is sent once, and shared again on the other side; what has no JSON form (an image, an object of
#            the user's own class) reaches workers by fork, with the tasks that were known when they were forked, and
#            is copied for every call where it can be copied; anything else is refused by name.
# Never      pickles, or makes an object that is not in the list below.
#
#     plain          None, bool, int, float, str, list, dict with text keys
#     tagged         tuple, set, frozenset, bytes, other dicts, dates and times, Decimal, Fraction, complex, UUID,
#                    paths, numbers and arrays of numpy


TAG = "$"
_INT = 1 << 63
"""Beyond this, whole numbers are sent in hexadecimal digits: long decimal ones are refused by Python itself."""

Forked = Mapping[str, Mapping[str, Any]]
"""Task id -> column (or `prompts`) -> what has no JSON form. Known before workers are forked, the same on both ends."""


class NotJson(TypeError):  # noqa: N818 - the name says what a value is
    """A value that has no form as data."""


class RewardCall(NamedTuple):
    """One call of a reward function."""

    function: str
    prompts: list[Any]
    completions: list[Any]
    columns: dict[str, list[Any]]
    progress: dict[str, int] | None = None
    """What `trainer_state` is made of; None when the function is not handed one."""


def write_call(call: RewardCall, task: str = "", forked: Forked | None = None) -> bytes:
    """The call as bytes; a column that cannot be sent raises `NotJson` with its name.

    Args:
        task: whose columns these are, for those that workers have by fork.

    Example:
        >>> call = Call("f", ["1+1="], ["2"], {"answer": [("2", b"x")]})
        >>> read_call(write_call(call)) == call
        True
    """
    values: list[Any] = []
    places: dict[int, int] = {}
    known = (forked or {}).get(task, {})

    def place(name: str, value: Any) -> int:
        if id(value) not in places:
            places[id(value)] = len(values)
            if name in known:
                values.append({TAG: "forked", "v": [task, name]})
            else:
                values.append(_pack_named(name, value))
        return places[id(value)]

    body = {
        "function": call.function,
        "prompts": [place("prompts", value) for value in call.prompts],
        "completions": [place("completions", value) for value in call.completions],
        "columns": {name: [place(name, value) for value in column] for name, column in call.columns.items()},
        "values": values,
        "progress": call.progress,
    }
    return json.dumps(body, allow_nan=False, separators=(",", ":")).encode("ascii")


def read_call(frame: bytes, forked: Forked | None = None) -> RewardCall:
    """Back from bytes; what is not of this form is a `ValueError`."""
    body = json.loads(frame)
    if type(body) is not dict or body.keys() != {"function", "prompts", "completions", "columns", "values", "progress"}:
        raise ValueError("not a reward call")
    progress = body["progress"]
    if progress is not None and not (type(progress) is dict and all(type(n) is int for n in progress.values())):
        raise ValueError("not the progress of a run")
    values = [_unpack(value, forked or {}) for value in body["values"]]

    def rows(indices: Any) -> list[Any]:
        return [values[index] for index in indices]

    columns = {str(name): rows(column) for name, column in body["columns"].items()}
    return RewardCall(str(body["function"]), rows(body["prompts"]), rows(body["completions"]), columns, progress)


def by_fork(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Those of these columns that have no form as data."""
    found = {}
    for name, value in columns.items():
        try:
            _pack(value)
        except (NotJson, RecursionError):
            found[name] = value
    return found


def _pack_named(name: str, value: Any) -> Any:
    try:
        return _pack(value)
    except RecursionError as error:
        raise NotJson(f"{name} is nested too deeply") from error
    except NotJson as error:
        raise NotJson(f"{name} holds {error}") from error


def _pack(value: Any) -> Any:
    """JSON data; only exact types, so that what comes back is of the same."""
    kind = type(value)
    if value is None or kind in (str, bool):
        return value
    if kind is int:
        return value if -_INT < value < _INT else {TAG: "int", "v": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {TAG: "float", "v": repr(value)}
    if kind is list:
        return [_pack(item) for item in value]
    if kind is dict:
        if all(type(key) is str for key in value) and TAG not in value:
            return {key: _pack(item) for key, item in value.items()}
        return {TAG: "dict", "v": [[_pack(key), _pack(item)] for key, item in value.items()]}
    if kind in _PACKED:
        name, pack = _PACKED[kind]
        return {TAG: name, "v": pack(value)}
    if kind.__module__ == "numpy" and hasattr(value, "dtype") and not value.dtype.hasobject and not value.dtype.names:
        data = [value.dtype.str, list(value.shape), _text(value.tobytes())]
        return {TAG: "numpy", "v": data, "scalar": type(value).__name__ != "ndarray"}
    raise NotJson(f"a {kind.__module__}.{kind.__qualname__}")


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _items(value: Any) -> list[Any]:
    return [_pack(item) for item in value]


_PACKED: Mapping[type, tuple[str, Callable[[Any], Any]]] = {
    tuple: ("tuple", _items), set: ("set", _items), frozenset: ("frozenset", _items),
    bytes: ("bytes", _text), bytearray: ("bytearray", _text),
    complex: ("complex", lambda v: [repr(v.real), repr(v.imag)]),
    datetime: ("datetime", lambda v: _plain_time(v)), date: ("date", date.isoformat),
    time_of_day: ("time", lambda v: _plain_time(v)),
    timedelta: ("timedelta", lambda v: [v.days, v.seconds, v.microseconds]),
    Decimal: ("decimal", str), Fraction: ("fraction", str), UUID: ("uuid", str), PosixPath: ("path", str),
}  # fmt: skip


def _plain_time(value: datetime | time_of_day) -> list[Any]:
    """A zone with rules of its own is more than its text says."""
    if value.tzinfo is not None and type(value.tzinfo) is not timezone:
        raise NotJson(f"a time in the zone {value.tzinfo!r}")
    return [value.isoformat(), value.fold]


def _unpack(value: Any, forked: Forked) -> Any:
    if type(value) is list:
        return [_unpack(item, forked) for item in value]
    if type(value) is not dict:
        return value
    if TAG not in value:
        return {key: _unpack(item, forked) for key, item in value.items()}
    name, inner = value[TAG], value["v"]
    if name == "forked":
        return _copied(forked[inner[0]][inner[1]])
    if name == "dict":
        return {_unpack(key, forked): _unpack(item, forked) for key, item in inner}
    if name in ("tuple", "set", "frozenset"):
        return _COLLECTIONS[name](_unpack(item, forked) for item in inner)
    if name == "numpy":
        return _numpy(inner, scalar=value["scalar"])
    if name not in _UNPACKED:
        raise ValueError(f"a reward call with a value of kind {str(name)[:40]!r}")
    return _UNPACKED[name](inner)


_COLLECTIONS: Mapping[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_UNPACKED: Mapping[str, Callable[[Any], Any]] = {
    "int": lambda v: int(v, 16), "float": float, "bytes": base64.b64decode,
    "bytearray": lambda v: bytearray(base64.b64decode(v)), "complex": lambda v: complex(float(v[0]), float(v[1])),
    "datetime": lambda v: datetime.fromisoformat(v[0]).replace(fold=v[1]), "date": date.fromisoformat,
    "time": lambda v: time_of_day.fromisoformat(v[0]).replace(fold=v[1]),
    "timedelta": lambda v: timedelta(*v), "decimal": Decimal, "fraction": Fraction, "uuid": UUID, "path": Path,
}  # fmt: skip


def _numpy(inner: Sequence[Any], *, scalar: bool) -> Any:
    import numpy as np

    kind, shape, data = inner
    array = np.frombuffer(base64.b64decode(data), dtype=np.dtype(kind)).reshape(shape).copy()
    return array[()] if scalar else array


def _copied(value: Any) -> Any:
    """Fresh for this call, as everything else is; what cannot be copied is handed over itself."""
    try:
        return copy.deepcopy(value)
    except (TypeError, ValueError, RecursionError) as error:
        print(f"a column of type {type(value).__name__} is not copied: {error}", file=sys.stderr)
        return value


# -- The loop in which the user's reward functions run ---------------------------------------------
# Owns       one process: reads a call, runs the function, judges what came back, answers.
# Promises   whatever the function raises (SystemExit and KeyboardInterrupt too) becomes an answer; a copy of this
#            process that the function forks cannot answer in its place.
# Never      writes to the terminal, outlives its parent, or sends anything but JSON.


STACKS = signal.SIGUSR2
"""Asks a worker that is about to be killed to print where it is stuck."""
_TEXT_LIMIT = 8000
_MANY_THREADS, _MANY_DESCRIPTORS = 256, 512
_old_streams: list[Any] = []


def work(
    sock: socket.socket, output: int, parent: int, functions: Mapping[str, RewardFunction], memory_mb: int = 0,
    forked: Forked | None = None,
) -> NoReturn:  # fmt: skip
    """Answer calls until the driver closes its end. Runs in a fresh fork of the fork server."""
    try:
        os.setsid()  # a group of its own: Ctrl-C does not reach it, and it can be ended with its children
        die_with_parent(parent)
        _reset_signals()
        _redirect(output)
        os.register_at_fork(after_in_child=sock.close)
        memory, descriptors = OwnMemory(memory_mb), open_descriptors()
        while (frame := read_frame(sock, REQUEST_CAP)) is not None:
            answer = answer_call(frame, functions, memory, forked)
            _flush()
            _add_missed(answer)
            answer["weary"] = memory.is_heavy() or _leaks_too_much(descriptors)
            sock.sendall(pack(json.dumps(answer).encode()))
    finally:
        os._exit(0)


def answer_call(
    frame: bytes, functions: Mapping[str, RewardFunction], memory: OwnMemory, forked: Forked | None = None
) -> dict[str, Any]:
    """Run one call: {"values": [[value, reason, shown], ...]}, {"malformed": what} or {"raised": traceback}."""
    try:
        call = read_call(frame, forked)
        expected = len(call.completions)  # before the call: the function may empty the list it was given
        with memory:
            returned = _call(functions[call.function], call)
        problem = _malformed(returned, expected)
        if problem is not None:
            return {"malformed": problem}
        return {"values": [_judged(value) for value in returned]}
    except BaseException as error:  # noqa: BLE001 - sys.exit and KeyboardInterrupt in a reward are failures of the reward
        return {"raised": _shorten(redact(traceback.format_exc())) + _memory_note(error, memory)}


def _call(function: RewardFunction, call: RewardCall) -> Any:
    """Call in TRL's form, with the arguments the function names, or all if it takes `**columns`."""
    given: dict[str, Any] = {"prompts": call.prompts, "completions": call.completions, **call.columns}
    if call.progress is not None:
        given[TRAINER_STATE] = TrainerState(**call.progress)
    parameters = parameters_of(function)
    if parameters is not None and all(p.kind is not p.VAR_KEYWORD for p in parameters):
        given = {p.name: given[p.name] for p in parameters if p.name in given}
    returned = function(**given)
    if inspect.iscoroutine(returned):
        returned = asyncio.run(returned)
    is_array = getattr(returned, "ndim", None) == 1 and hasattr(returned, "tolist")
    return returned.tolist() if is_array else returned


def _malformed(returned: Any, expected: int) -> str | None:
    if not isinstance(returned, list | tuple):
        return f"a {type(returned).__name__} instead of a list"
    return None if len(returned) == expected else f"{len(returned)} values"


def _judged(value: Any) -> tuple[float | None, str | None, str]:
    mark = parse_reward(value)
    return mark.value, mark.reason, "" if mark.reason is None else _shown(value)


def _shown(value: Any) -> str:
    kind = type(value).__name__
    try:
        return redact(f"{value!r} ({kind})")[:200]
    except Exception:  # noqa: BLE001 - only a message: the value has already been judged
        return f"a {kind} that cannot be printed"


def _memory_note(error: BaseException, memory: OwnMemory) -> str:
    return f"reward_memory_mb allows {memory.cap_mb}\n" if isinstance(error, MemoryError) and memory.cap_mb else ""


def _add_missed(answer: dict[str, Any]) -> None:
    """Variables that the function asked for and does not have, for nobody named them; in a failure's words too."""
    answer["missed"] = missed()
    if answer["missed"] and "raised" in answer:
        what, fix = missing_words(answer["missed"])
        answer["raised"] += f"{what}\n{fix}\n"


def _shorten(text: str) -> str:
    if len(text) <= _TEXT_LIMIT:
        return text
    half = _TEXT_LIMIT // 2
    return f"{text[:half]}\n  ... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"


def _reset_signals() -> None:
    """Drop the driver's handlers: a reward must not run the driver's shutdown."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _redirect(output: int) -> None:
    """Everything printed, also by C code and by children, goes to the fork server."""
    for target in (1, 2):
        os.dup2(output, target)
    if output > 2:
        os.close(output)
    # The old objects stay referenced: collected, they would close descriptors that are now ours.
    _old_streams.extend([sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__])
    sys.stdout = open(1, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    faulthandler.enable(file=2)
    faulthandler.register(STACKS, file=2, all_threads=True)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # The function may have closed or replaced it; then there is nothing to keep.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _leaks_too_much(descriptors_at_start: int) -> bool:
    """Whether the function leaks so many threads or descriptors that a fresh process is better."""
    limit = min(_MANY_DESCRIPTORS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
    return threading.active_count() > _MANY_THREADS or open_descriptors() - descriptors_at_start > limit


# -- The small process that forks workers and cleans up after them ---------------------------------


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
