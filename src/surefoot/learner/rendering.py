"""A chat template rendered in a process of its own, which can be ended whatever it is doing.

Owns       one child per process, started when it is first needed; it waits for the next template, and is ended when one
           takes too long.
Promises   the text is what the tokenizer's own rendering gives. The kernel ends the child when its processor time is
           used up; it never outlives us by more than that.
Never      hands the child a secret: its environment is a short list of names.

Read next: `render_child.py`, the other side; `rendering.py`, who decides what is rendered here.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from surefoot.errors import ModelError
from surefoot.system.frames import LinePipe
from surefoot.system.memory import data_bytes
from surefoot.system.process import Child

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from surefoot.learner.render_child import main; main()"
)  # fmt: skip
_ENVIRONMENT = (
    "HOME", "LANG", "LC_ALL", "LC_CTYPE", "LC_TIME", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "TMPDIR", "TZ",
    "VIRTUAL_ENV",
)  # fmt: skip
PATIENCE_S = 300.0
"""A child that uses no processor time and says nothing, on however busy a machine, is given up after this."""
_LINE_CAP = 1 << 30
"""Bytes of an answer: far above any text that is sent back, which the question limits."""


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


class _RenderChild:
    """One process that renders, one template at a time."""

    def __init__(self) -> None:
        kept = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        path = json.dumps([os.path.abspath(each) for each in sys.path])
        self._process = Child.start(
            [sys.executable, "-c", _BOOT, path], env={**kept, "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._pipe = LinePipe(self._process.stdout.fileno(), self._process.stdin.fileno(), _LINE_CAP)

    def ask(self, question: bytes) -> dict[str, Any]:
        """The child's answer; OSError when it is gone, or silent for too long."""
        found: dict[str, Any] = json.loads(self._pipe.exchange(question, PATIENCE_S))
        return found

    def end(self) -> int:
        """Ends it now; how it had ended, had it by itself."""
        self._process.end()
        return self._process.wait()


_lock = threading.Lock()
_children: list[_RenderChild] = []
_inherited: list[_RenderChild] = []


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
            _children.append(_RenderChild())
        child = _children[0]
        try:
            return child.ask(question)
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


# -- Whether a chat template is plain: of everything it says, no single step can take long --------
# A template that loops can be ended between two steps. One step can only be waited for: `9 ** (9 ** 9)` is one, and
# so is
# the comparison of two lists that hold each other sixty levels deep. What is not plain is rendered in a process that
# can
# be ended (`rendering.py`).
#
# Promises   every step of a plain template takes time by the size of what it handles, which the memory limit bounds.
# Never      says what a template means; one that is not plain may be harmless.


LONGEST = 100_000
"""A longer one is not plain: reading it takes time as well."""
_NODES = frozenset({
    "Add", "And", "Assign", "AssignBlock", "Break", "Call", "Compare", "Concat", "CondExpr", "Const", "Continue",
    "Dict", "Div", "ExprStmt", "Filter", "FloorDiv", "For", "Getattr", "Getitem", "If", "Keyword", "List", "Macro",
    "Mod", "NSRef", "Name", "Neg", "Not", "Operand", "Or", "Output", "Pair", "Pos", "Slice", "Sub", "Template",
    "TemplateData", "Test", "Tuple",
})  # fmt: skip
_FUNCTIONS = frozenset({"namespace", "raise_exception", "range", "strftime_now"})
_METHODS = frozenset({
    "capitalize", "count", "endswith", "find", "get", "isdigit", "items", "join", "keys", "lower", "lstrip",
    "removeprefix", "removesuffix", "replace", "rstrip", "split", "splitlines", "startswith", "strip", "upper",
    "values",
})  # fmt: skip
"""Each looks at every character once; `rfind`, `rsplit` and their like may look at some many times."""
_STRIPPING = frozenset({"lstrip", "rstrip", "strip", "trim"})
"""Every character is compared with every one that is stripped: these have to be written down."""
_FILTERS = frozenset({
    "abs", "capitalize", "count", "d", "default", "e", "escape", "first", "float", "indent", "int", "items", "join",
    "last", "length", "list", "lower", "map", "reject", "rejectattr", "replace", "reverse", "safe", "select",
    "selectattr", "string", "tojson", "trim", "upper",
})  # fmt: skip
_TESTS = frozenset({
    "boolean", "defined", "eq", "equalto", "even", "false", "float", "ge", "gt", "in", "integer", "iterable", "le",
    "lt", "mapping", "ne", "none", "number", "odd", "sequence", "string", "true", "undefined",
})  # fmt: skip
_BY_NAME = frozenset({"map", "reject", "rejectattr", "select", "selectattr"})
"""They take the name of another filter or test."""
_CONTAINERS = 6
"""Lists made of variables, outside of loops: each may at most double what a comparison has to look at."""
_LARGEST = 2**30


@lru_cache(maxsize=64)
def is_plain(template: str) -> bool:
    """Whether it may be rendered where only its steps can be interrupted.

    Example:
        >>> is_plain("{% for m in messages %}{{ m['content']|trim }}{% endfor %}"), is_plain("{{ 9 ** (9 ** 9) }}")
        (True, False)
    """
    from jinja2 import Environment, TemplateError, nodes

    if len(template) > LONGEST:
        return False
    try:
        tree = Environment(  # noqa: S701 - nothing is rendered with it
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        ).parse(template)
        macros = {each.name for each in tree.find_all(nodes.Macro)}
        return _Look(frozenset(macros)).passes(tree, looped=False)
    except (TemplateError, RecursionError):
        return False  # whoever renders it says what is wrong


class _Look:
    """One walk over a template's syntax."""

    def __init__(self, macros: frozenset[str]) -> None:
        self.macros, self.containers = macros, 0

    def passes(self, node: Any, *, looped: bool) -> bool:
        kind = type(node).__name__
        if kind not in _NODES or not self._allows(kind, node, looped=looped):
            return False
        again = looped or kind in ("For", "Macro")
        return all(self.passes(child, looped=again) for child in node.iter_child_nodes())

    def _allows(self, kind: str, node: Any, *, looped: bool) -> bool:
        if kind == "Const":
            return not isinstance(node.value, int) or abs(node.value) < _LARGEST
        if kind in ("Mod", "Div", "FloorDiv"):
            return type(node.right).__name__ == "Const" and isinstance(node.right.value, int)
        if kind in ("List", "Tuple", "Dict"):
            return self._may_hold(node, looped=looped)
        if kind == "Call":
            return self._may_call(node)
        if kind == "Filter":
            return node.name in _FILTERS and _constant_where_needed(node.name, node)
        if kind == "Test":
            return node.name in _TESTS
        if kind == "Name":
            taken = node.ctx != "load" and node.name in _FUNCTIONS | self.macros
            return not taken and node.name not in ("varargs", "kwargs")
        if kind == "NSRef":
            return node.attr not in _METHODS
        return not (kind == "For" and node.recursive)

    def _may_hold(self, node: Any, *, looped: bool) -> bool:
        """A list of lists of lists may be small and take for ever to compare; one that is written down is no longer."""
        if getattr(node, "ctx", "load") != "load":
            return True  # the left side of an assignment
        pairs = node.items if type(node).__name__ == "Dict" else ()
        if any(type(pair.key).__name__ != "Const" or pair.key.value in _METHODS for pair in pairs):
            return False
        if all(type(each).__name__ == "Const" for each in ([p.value for p in pairs] if pairs else node.items)):
            return True
        self.containers += 1
        return not looped and self.containers <= _CONTAINERS

    def _may_call(self, node: Any) -> bool:
        target, kind = node.node, type(node.node).__name__
        if node.dyn_args is not None or node.dyn_kwargs is not None or any(k.key in _METHODS for k in node.kwargs):
            return False
        if kind == "Name":
            return target.name in _FUNCTIONS | self.macros
        return kind == "Getattr" and target.attr in _METHODS and _constant_where_needed(target.attr, node)


def _constant_where_needed(name: str, node: Any) -> bool:
    arguments = [*node.args, *(each.value for each in node.kwargs)]
    if node.dyn_args is not None or node.dyn_kwargs is not None:
        return False
    if name in _STRIPPING:
        return all(type(each).__name__ == "Const" for each in arguments)
    if name in _BY_NAME:
        named = [each.value if type(each).__name__ == "Const" else None for each in arguments]
        known = _FILTERS - _BY_NAME - _STRIPPING if name == "map" else _TESTS
        whose = named[1:] if name in ("selectattr", "rejectattr") else named
        by_attribute = name == "map" and all(each.key in ("attribute", "default") for each in node.kwargs)
        return (by_attribute and not node.args) or (bool(named) and None not in named[:2] and _first_is(whose, known))
    return True


def _first_is(named: list[Any], known: frozenset[str]) -> bool:
    return not named or named[0] in known


# -- How long and how large a chat template may get: it comes with a model folder, so it is a stranger's program
# Owns       the limits on one rendering: processor time, memory, and the text that comes out; and where it is rendered.
# Promises   a template that loops, swells or reaches for what it may not have ends as a `ModelError`, in every thread.
# Never      judges what a template says; `chat.py` does.
#
# transformers renders in jinja2's sandbox, which keeps files and Python's insides away. The sandbox counts
# neither time nor memory, so that is done here. Processor time and not the clock: a busy machine, or one that
# slept, is no fault of the template. A plain template on the main thread is rendered there, and a timer ends it between
# two of its steps. Signals reach the main thread only, and no signal ends a step that lasts: everything else is
# rendered
# in a process that can be ended. The memory limit needs Linux.


CPU_SECONDS = 5.0
MEMORY_BYTES = 512 * 2**20
EXTRA_CHARACTERS = 2**20
"""What a template may add to the messages it was given."""


def render_within_limits(render: Callable[[], str], given: int, asked: Callable[[], Rendering]) -> str:
    """The text of one rendering of `given` characters of messages; whatever goes wrong becomes a `ModelError`.

    Args:
        render: does it here.
        asked: what it takes to do the same elsewhere.
    """
    try:
        text = _rendered(render, given, asked())
    except Exception as error:
        raise ModelError(
            f"the chat template cannot be rendered: {_in_words(error)}",
            "what cannot be rendered cannot be asked",
            "repair chat_template.jinja, or use messages that it knows",
        ) from error
    if len(text) > given + EXTRA_CHARACTERS:
        raise ModelError(
            f"the chat template made {len(text):,} characters of {given:,}",
            f"a template adds headers, not more than {EXTRA_CHARACTERS:,} characters",
            "repair chat_template.jinja",
        )
    return text


def _rendered(render: Callable[[], str], given: int, asked: Rendering) -> str:
    if threading.current_thread() is threading.main_thread():
        with limited():
            if is_plain(asked.template):
                return render()
    most = given + EXTRA_CHARACTERS
    return render_elsewhere(asked, cpu_s=CPU_SECONDS, memory_bytes=MEMORY_BYTES, most=most)


@contextmanager
def limited() -> Iterator[None]:
    """Inside this, on the main thread, a loop ends when its time or its memory is used up."""
    with _limited_time(), _limited_memory():
        yield


def _in_words(error: Exception) -> str:
    if isinstance(error, RenderError):
        return str(error)
    if isinstance(error, OutOfTimeError):
        return f"it was not done after {CPU_SECONDS:g} s of processor time"
    if isinstance(error, MemoryError):
        return f"it took more than {MEMORY_BYTES // 2**20} MiB"
    return f"{type(error).__name__}: {error}"[:500]


@contextmanager
def _limited_time() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGVTALRM, stop)
    # Again every second, should a helper of the template swallow the first one.
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_SECONDS, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


@contextmanager
def _limited_memory() -> Iterator[None]:
    if sys.platform != "linux":
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [each for each in (soft, hard, data_bytes() + MEMORY_BYTES) if each != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
