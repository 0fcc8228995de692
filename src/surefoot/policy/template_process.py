"""A chat template rendered in a process of its own, which can be ended whatever it is doing.

Owns       one child per process, started when it is first needed; it waits for the next template, and is ended when one
           takes too long.
Promises   the text is what the tokenizer's own rendering gives. The kernel ends the child when its processor time is
           used up; it never outlives us by more than that.
Never      hands the child a secret: its environment is a short list of names.

Read next: `template_child.py`, the other side; `template_limits.py`, who decides what is rendered here.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from surefoot.policy.template_child import main; main()"
)  # fmt: skip
_ENVIRONMENT = (
    "HOME", "LANG", "LC_ALL", "LC_CTYPE", "LC_TIME", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "TMPDIR", "TZ",
    "VIRTUAL_ENV",
)  # fmt: skip
PATIENCE_S = 300.0
"""A child that uses no processor time and says nothing, on however busy a machine, is given up after this."""
_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Rendering:
    """All that a template is given."""

    template: str
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    generation_prompt: bool
    special: Mapping[str, Any]
    """The tokenizer's own tokens, by the names that templates know."""


class OutOfTimeError(Exception):
    """The template used up its processor time."""


class RenderError(Exception):
    """The template failed, in the child's words."""


class _Child:
    """One process that renders, one template at a time."""

    def __init__(self) -> None:
        kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        path = json.dumps([os.path.abspath(each) for each in sys.path])
        self._process = subprocess.Popen(
            [sys.executable, "-c", _BOOT, path],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
            env={**kept, "HF_HUB_OFFLINE": "1"}, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin is not None, "it was asked for"
        assert self._process.stdout is not None, "it was asked for"
        self._to, self._from = self._process.stdin, self._process.stdout
        os.set_blocking(self._to.fileno(), False)

    def ask(self, question: bytes, ends: float) -> dict[str, Any]:
        """The child's answer; OSError when it is gone, or silent for too long."""
        answer = bytearray()
        rest = memoryview(question)
        while not answer.endswith(b"\n"):
            left = ends - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"nothing was heard of it for {PATIENCE_S:g} s")
            readable, writable, _ = select.select([self._from], [self._to] if rest else [], [], left)
            if writable:
                rest = rest[os.write(self._to.fileno(), rest[:_AT_ONCE]) :]
            if readable:
                piece = os.read(self._from.fileno(), _AT_ONCE)
                if not piece:
                    raise BrokenPipeError("it ended")
                answer += piece
        found: dict[str, Any] = json.loads(answer)
        return found

    def end(self) -> int:
        """Ends it now; how it had ended, had it by itself."""
        with contextlib.suppress(OSError):
            self._process.kill()
        code = self._process.wait()
        for pipe in (self._to, self._from):
            with contextlib.suppress(OSError):
                pipe.close()
        return code


_lock = threading.Lock()
_children: list[_Child] = []
_inherited: list[_Child] = []


def render_elsewhere(asked: Rendering, *, cpu_s: float, memory_bytes: int, most: int) -> str:
    """The text; OutOfTimeError, MemoryError or RenderError when there is none.

    Args:
        most: longest text that is sent back; of a longer one only its length, as an error.
    """
    limits = {"cpu_s": cpu_s, "memory_bytes": memory_bytes, "most": most}
    question = json.dumps({**asdict(asked), **limits}, default=str).encode() + b"\n"
    with _lock:
        answer = _answer(question)
    if "text" in answer:
        return str(answer["text"])
    if answer.get("kind") == "time":
        raise OutOfTimeError
    if answer.get("kind") == "memory":
        raise MemoryError
    raise RenderError(str(answer.get("error")))


def _answer(question: bytes) -> dict[str, Any]:
    for last in (False, True):
        if not _children:
            _children.append(_Child())
        child = _children[0]
        try:
            return child.ask(question, time.monotonic() + PATIENCE_S)
        except BaseException as error:
            _children.clear()  # it may still be busy with this question: the next one must not hear the answer
            code = child.end()
            if not isinstance(error, OSError | ValueError):
                raise
            if isinstance(error, TimeoutError) or code == -signal.SIGXCPU:
                return {"kind": "time"}
            if last:  # the first may have been ended by somebody while it waited
                return {"error": f"the process that renders it ended ({code}): {error}"}
    raise AssertionError("the second time returns or raises")


def _end_all() -> None:
    while _children:
        _children.pop().end()


def _after_a_fork() -> None:
    """The child and the lock are our parent's; what we inherited of them is kept, so that nothing is closed twice."""
    global _lock
    _lock = threading.Lock()
    _inherited.extend(_children)
    _children.clear()


atexit.register(_end_all)
os.register_at_fork(after_in_child=_after_a_fork)
