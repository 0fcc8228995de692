"""The loop in which the user's reward functions run.

Owns       one process: reads a call, runs the function, judges what came back, answers.
Promises   whatever the function raises (SystemExit and KeyboardInterrupt too) becomes an answer;
           a copy of this process that the function forks cannot answer in its place.
Never      writes to the terminal, outlives its parent, or sends anything but JSON.

Read next: `fork_server.py`, which forks this.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import inspect
import json
import os
import resource
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from typing import Any, NoReturn

from surefoot.guards.reward_values import RewardFunction, parse_reward
from surefoot.rewards.functions import TRAINER_STATE, TrainerState, parameters_of
from surefoot.rewards.messages import Forked, RewardCall, read_call
from surefoot.system.environment import missed, missing_words
from surefoot.system.frames import REQUEST_CAP, pack, read_frame
from surefoot.system.memory import OwnMemory
from surefoot.system.process import die_with_parent, open_descriptors
from surefoot.system.text import redact

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
