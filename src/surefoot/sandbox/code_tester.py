"""What the generated script of a test process uses: one guarded block per test, one line per verdict.

Owns       the verdict lines, with a nonce that no test and no code has seen.
Promises   whatever a test raises fails that test alone; the first word of the code in a test is noted, so that whoever
           reads the lines knows whether the code had a part in what happened next.
Never      believes an object of the code's own class. Imports nothing of ours but its neighbours in the sandbox.
"""

from __future__ import annotations

import builtins
import json
import os
import socket

from surefoot.sandbox.code_codec import NotPlainError
from surefoot.sandbox.code_remote import Caller, Judging, Remote, RemoteFunction, is_callable
from surefoot.sandbox.code_wire import LINK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Any


class Tests:
    """Each test is one `with` block.

    Args:
        objects: names that the tests use for objects of the code's own classes.
        plain: words of the tests that are attributes of plain data.
    """

    def __init__(self, objects: Sequence[str] = (), plain: Sequence[str] = ()) -> None:
        nonce = os.read(0, 64).decode().strip()
        self._results = os.fdopen(os.dup(1), "w", buffering=1)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):  # what a test prints is nobody's verdict
            os.dup2(nowhere, stream)
        self._nonce, self._number, self._has_value = nonce, -1, False
        self._caller = Caller(socket.socket(fileno=LINK), self._mark_value, frozenset(objects), frozenset(plain))
        self._prepared: list[Any] = []
        self.judging = Judging()
        builtins.callable = is_callable  # type: ignore[assignment]

    def remote(self, name: str) -> RemoteFunction:
        """A name of the code's."""
        return RemoteFunction(self._caller, {"name": name})

    def live(self, value: Any) -> Any:
        """An argument that the code may change: the tests will look there."""
        return self._caller.live(value)

    def case(self, kind: Any, name: str) -> None:
        """One test of a `unittest` class; what it raises is raised."""
        if kind not in self._prepared:
            kind.setUpClass()
            self._prepared.append(kind)
        kind(name).debug()

    def test(self, number: int) -> Tests:
        """The next block; a negative number is preparation, which must work as well."""
        self._number, self._has_value = number, False
        self._say("start")
        return self

    def check_call(self, text: str) -> None:
        """Call a function with JSON arguments and compare with a JSON value."""
        test = json.loads(text)
        found = self.remote(test["call"])(*test.get("args", []), **test.get("kwargs", {}))
        if not _same(_listed(found), test["expect"], test.get("tolerance", 0.0)):
            raise AssertionError("another value was expected")

    def end(self) -> None:
        """All blocks have run."""
        self._number = -1
        self._say("end")

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._say("pass" if kind is None else f"fail {kind.__name__}")
        return True

    def _mark_value(self) -> None:
        if not self._has_value:
            self._has_value = True
            self._say("value")

    def _say(self, what: str) -> None:
        self._results.write(f"{self._nonce} {self._number} {what}\n")


def _listed(value: Any) -> Any:
    """JSON has no tuples: they count as lists."""
    if isinstance(value, list | tuple):
        return [_listed(each) for each in value]
    return {key: _listed(each) for key, each in value.items()} if isinstance(value, dict) else value


def _same(found: Any, expected: Any, tolerance: float) -> bool:
    if isinstance(found, Remote):
        raise NotPlainError("an object of the code's own class is no answer")
    if isinstance(found, list) and isinstance(expected, list):
        pairs = zip(found, expected, strict=False)
        return len(found) == len(expected) and all(_same(*pair, tolerance) for pair in pairs)
    if isinstance(expected, float) and isinstance(found, int | float) and tolerance:
        return abs(found - expected) <= tolerance
    return bool(found == expected) and isinstance(found, bool) == isinstance(expected, bool)
