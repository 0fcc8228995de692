"""Environments whose packages conflict with ours, in a process and a Python of their own.

Owns       the processes of `foreign_host.py`: how they are started, asked and ended.
Promises   explicit argv, no shell; of our environment only listed variables, and none that leads to our packages;
           lines, bytes and seconds are bounded; a process that overruns, floods or talks nonsense is ended with
           everything it started, and only its own rollout is lost; what it printed last stands in the error.
Never      runs foreign code in this process.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from surefoot.errors import ToolError, ToolFailedError
from surefoot.system.environment import inherited
from surefoot.system.frames import LinePipe, PipeEndedError, PipeFloodedError
from surefoot.system.json import loads
from surefoot.system.process import Child
from surefoot.tools.python import foreign_host
from surefoot.tools.python.foreign_host import LINE_CAP
from surefoot.tools.python.pool import CRASHED, TIMEOUT, UNAVAILABLE, EnvLimits, EnvToolkit
from surefoot.tools.text import readable

FLOODED, PROTOCOL = "tool_flooded", "tool_protocol"
GRACE_S = 0.3
"""Beyond the deadline: what can be cancelled over there is cancelled in this time; then the process is ended."""
_TAIL = 4096
_OURS = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV")
"""Variables that would lead the other Python to our packages."""


class ForeignToolkit(EnvToolkit):
    """One process per rollout under way, used again after `reset`.

    Args:
        python: the other interpreter and its options, as an argv: `["/opt/arena/bin/python"]`.
        file: a Python file of yours that wraps the foreign environment.
        name: the class or function in it that makes one.
        form: whether that is an environment class in TRL's form, or has Gymnasium's `reset` and `step`.
        env: variables for the process besides those that every child of ours has (`child_environment`), less what
            leads to our packages.
    """

    def __init__(
        self, python: Sequence[str], file: Path, name: str, form: Literal["trl", "gym"] = "trl", *,
        env: Mapping[str, str] | None = None, limits: EnvLimits | None = None,
    ) -> None:  # fmt: skip
        if isinstance(python, str) or not python or form not in ("trl", "gym"):
            raise ToolError(
                f"python is {python!r} and form is {form!r}",
                "a foreign environment is started by an explicit argv, and spoken to in one of two forms",
                'give python = ["/path/to/python"] and form = "trl" or "gym"',
            )
        if not file.is_file():
            raise ToolError(f"{file} does not exist", "it wraps the foreign environment", "check the path")
        argv = [*python, str(Path(foreign_host.__file__).resolve()), str(file.resolve()), name, form]
        super().__init__(
            {"foreign": lambda: ProcessRunner(argv, _environment(env or {}))}, limits or EnvLimits(), routed=False
        )


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in inherited().items() if name not in _OURS} | dict(extra)


class ProcessRunner:
    """An environment in a process of its own: `pool.Runner` over two pipes."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        try:
            self._process = Child.start(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(env), keep_stderr=_TAIL
            )
        except (OSError, ValueError) as error:
            raise ToolError(
                f"{argv[0]} cannot be started: {error}", "it is the Python of a foreign environment", "check the argv"
            ) from error
        self._pipe = LinePipe(self._process.stdout.fileno(), self._process.stdin.fileno(), LINE_CAP)
        self._lock = threading.Lock()
        self._asked = 0
        self._dead = False

    @property
    def alive(self) -> bool:
        """Whether it runs, and was not given up."""
        return not self._dead and self._process.alive

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def ask(self, question: str, deadline_s: float, **words: Any) -> Any:
        """Send a line and wait for the line that answers it; whatever else comes is the end of the process."""
        with self._lock:
            self._asked += 1
            line = _line({"id": self._asked, "ask": question, "deadline_s": deadline_s, "words": words})
            try:
                reply = _read(self._pipe.exchange(line, deadline_s + GRACE_S), self._asked)
            except TimeoutError:
                raise self._given_up(question, f"no answer after {deadline_s:g} s", TIMEOUT) from None
            except PipeFloodedError as error:
                raise self._given_up(question, str(error), FLOODED) from error
            except PipeEndedError as error:
                reason = UNAVAILABLE if question == "make" else CRASHED
                raise self._given_up(question, str(error), reason) from error
            except ValueError as error:
                raise self._given_up(question, f"it answered with something else: {error}", PROTOCOL) from error
            if "failed" in reply:
                reason, what = reply["failed"]
                raise self._given_up(question, readable(str(what), 2000), str(reason))
            return reply["value"]

    def end(self) -> None:
        """Ask the environment to close, shortly, then end the process and everything it started."""
        with self._lock:
            if self.alive and self._asked:
                self._farewell()
            self._end()

    def _farewell(self) -> None:
        line = _line({"id": 0, "ask": "close", "deadline_s": 1.0, "words": {}})
        try:
            self._pipe.exchange(line, 1.0)
        except (TimeoutError, PipeEndedError, PipeFloodedError):
            return  # it is ended anyway

    def _given_up(self, question: str, what: str, reason: str) -> ToolFailedError:
        self._end()
        printed = readable(self._process.printed().decode("utf-8", errors="replace").strip()[-1000:], 1000)
        story = f"; it ended with {self._process.code}" + (f" after printing: {printed}" if printed else "")
        return ToolFailedError(
            f"a foreign environment failed ({question}): {what}{story}",
            "the attempt was not the model's to lose, so it gets no verdict",
            "repair the environment, or the packages of its Python",
            reason,
        )

    def _end(self) -> None:
        if not self._dead:
            self._dead = True
            self._process.end()


def _line(question: Mapping[str, Any]) -> bytes:
    try:
        data = json.dumps(question, allow_nan=False).encode("ascii") + b"\n"
    except (TypeError, ValueError) as error:
        raise ToolError(
            f"a task cannot be handed to a foreign process: {error}",
            "what goes there is JSON: texts, numbers, lists and objects",
            "change the columns of the task",
        ) from error
    if len(data) > LINE_CAP:
        raise ToolError(
            f"a task has {len(data)} bytes as JSON", f"at most {LINE_CAP} go over at once", "make it smaller"
        )
    return data


def _read(line: bytes, asked: int) -> Mapping[str, Any]:
    """The reply, checked: ours is the only number we wait for."""
    reply = loads(line.decode("ascii"), max_chars=LINE_CAP)
    if not isinstance(reply, dict) or reply.get("id") != asked or not {"value", "failed"} & set(reply):
        raise ValueError(f"not an answer to question {asked}")
    return reply
