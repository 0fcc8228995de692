"""Runs one foreign environment in a Python of its own, and answers questions line by line.

    python foreign_host.py FILE.py NAME trl|gym

Owns       standard input and output of this process: one JSON object per line, a question and its answer.
Promises   what the environment prints goes to standard error and never between the answers; the process ends, with
           everything it started, when the other side goes away.
Never      imports anything but the standard library and its two neighbours, which do not either: the interpreter is
           somebody else's (Python 3.10 or newer), and so are its packages.

Read next: `foreign.py`, the other side.
"""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import signal
import sys
import threading
import types
from typing import Any, BinaryIO

LINE_CAP = 8 << 20
"""Bytes of one line, in either direction."""


def main(arguments: list[str]) -> int:
    """Answer until nobody asks any more."""
    file, name, form = arguments
    questions, answers = _channels()
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(questions, inbox), daemon=True).start()
    host = EnvHost(file, name, form)
    while True:
        line = inbox.get()
        reply = host.answer(json.loads(line))
        text = json.dumps(reply)
        if len(text) >= LINE_CAP:
            text = json.dumps({"id": reply["id"], "failed": ["tool_flooded", f"an answer of {len(text)} bytes"]})
        answers.write(text.encode("ascii") + b"\n")
        answers.flush()


def _channels() -> tuple[BinaryIO, BinaryIO]:
    """Our two pipes under numbers of their own; the well-known ones lead to nothing and to standard error."""
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # what it says last is worth most
    return questions, answers


def _listen(questions: BinaryIO, inbox: queue.SimpleQueue[bytes]) -> None:
    """In a thread, so that the end of the other side is seen while the environment is busy."""
    while (line := questions.readline(LINE_CAP)).endswith(b"\n"):
        inbox.put(line)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)  # what the environment started goes with it
    os._exit(0)


class EnvHost:
    """One world, made by the first question."""

    def __init__(self, file: str, name: str, form: str) -> None:
        self._file, self._name, self._form = file, name, form
        self._instance: Any = None

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """The value, or why there is none."""
        reply: dict[str, Any] = {"id": question["id"]}
        try:
            reply["value"] = self._value(question["ask"], question["deadline_s"], question["words"])
            json.dumps(reply, allow_nan=False)
        except BaseException as error:  # noqa: BLE001 - it goes over to the other side, which raises it
            reply.pop("value", None)
            reply["failed"] = _failure(question["ask"], error)
        return reply

    def _value(self, ask: str, deadline_s: float, words: dict[str, Any]) -> Any:
        if ask == "make":
            self._instance = _make(self._file, self._name, self._form)
            return list(self._instance.specs)
        if ask == "reset":
            return self._instance.reset(words["row"], words["extras"], deadline_s)
        if ask == "reward":
            return _number(self._instance.reward(deadline_s))
        if ask == "close":
            return self._instance.close()
        return list(self._instance.call(words["name"], words["arguments"], deadline_s))


def _failure(ask: str, error: BaseException) -> list[str]:
    reasons = {"make": "tool_unavailable", "reset": "reset_failed", "reward": "reward_failed"}
    reason = reasons.get(ask, "tool_crashed")
    names = [kind.__name__ for kind in type(error).__mro__]
    if "OverrunError" in names:
        reason = "tool_timeout"
    elif "ToolFailedError" in names:
        reason = str(getattr(error, "reason", "tool_failed"))
    elif "MemoryError" in names or "Exception" not in names:
        reason = "tool_crashed"
    return [reason, f"{type(error).__name__}: {error}"[:4000]]


def _number(value: Any) -> Any:
    """A reward as a plain number where it is one; an array's number says so itself."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value


def _make(file: str, name: str, form: str) -> Any:
    with _Neighbours():
        from surefoot.tools.python.instances import GymInstance, TrlInstance
    factory = getattr(_load(file), name)
    return TrlInstance(factory()) if form == "trl" else GymInstance(factory())


def _load(file: str) -> types.ModuleType:
    """The user's file as a module; what lies beside it can be imported, after what is installed."""
    spec = importlib.util.spec_from_file_location("foreign_environment", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules["foreign_environment"] = module
    sys.path.append(os.path.dirname(os.path.abspath(file)))
    spec.loader.exec_module(module)
    return module


class _Neighbours:
    """Makes `surefoot.tools.python` mean the folder of this file, and nothing else of ours, for a moment."""

    def __enter__(self) -> None:
        self._before = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "surefoot"}
        self._forget()
        for name in ("surefoot", "surefoot.tools", "surefoot.tools.python"):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = [os.path.dirname(os.path.abspath(__file__))]

    def __exit__(self, *error: object) -> None:
        self._forget()
        sys.modules.update(self._before)

    @staticmethod
    def _forget() -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "surefoot"]:
            del sys.modules[name]


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [each for each in sys.path if os.path.abspath(each or ".") != here]  # our files shadow nobody's
    sys.exit(main(sys.argv[1:]))
