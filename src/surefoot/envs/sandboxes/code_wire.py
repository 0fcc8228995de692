"""Both ends of the pipe between a task's tests and the code that they test, each in a sandbox of its own.

    tests (know what is right) --name, arguments, nonce--> code (knows nothing)
    tests (compare)            <------- plain data ------- code

Owns       how questions travel, and what a test sees in place of the code: a `Remote`.
Promises   only plain data comes back (numbers, text, lists, dicts ...), rebuilt here from built-in types: nothing of
           the code's own classes, so no comparison of its own; an answer without the question's nonce is refused.
Never      imports anything of ours: this file is copied into the sandboxes and runs there.
"""

from __future__ import annotations

import builtins
import json
import operator
import os
import socket
import struct

from surefoot.envs.sandboxes.code_codec import Codec, NotPlainError

TYPE_CHECKING = False
if TYPE_CHECKING:  # two interpreters load this file for every verdict: `typing` would cost them more than all the rest
    from collections.abc import Callable, Iterator
    from types import TracebackType
    from typing import Any

LINK = 3
CAP = 4 * 2**20


class CodeGoneError(BaseException):
    """The code under test ended, or broke the rules of the pipe. No test can catch it by accident."""


class CodeRaisedError(Exception):
    """The code raised something that is no built-in exception."""


def send(link: socket.socket, message: dict[str, Any]) -> None:
    """One message, whole."""
    data = json.dumps(message).encode()
    if len(data) > CAP:
        raise NotPlainError(f"{len(data)} bytes are more than the {CAP} that one message may have")
    link.sendall(struct.pack("!I", len(data)) + data)


def receive(link: socket.socket) -> dict[str, Any]:
    """One message; CodeGoneError when the other side has ended or sends nonsense."""
    try:
        (size,) = struct.unpack("!I", _exactly(link, 4))
        if size > CAP:
            raise CodeGoneError(f"a message of {size} bytes was announced")
        message = json.loads(_exactly(link, size))
    except (OSError, ValueError, RecursionError) as error:
        raise CodeGoneError(f"the pipe broke: {error}") from error
    if not isinstance(message, dict):
        raise CodeGoneError("a message is an object")
    return message


def _exactly(link: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = link.recv(min(size - len(data), 2**16))
        if not piece:
            raise CodeGoneError("the code under test ended")
        data += piece
    return bytes(data)


class Caller:
    """The tests' end: asks, waits, and lets the code call back the functions that a test handed to it."""

    def __init__(self, link: socket.socket, on_value: Callable[[], None] = lambda: None) -> None:
        self.link, self.on_value = link, on_value
        self.lent: list[Callable[..., Any]] = []
        self.codec = Codec(self._lend, lambda body: Remote(self, {"kept": int(body)}))

    def _lend(self, value: Any) -> Any:
        if isinstance(value, Remote):
            return object.__getattribute__(value, "_target")
        if not callable(value):
            raise NotPlainError(f"a test cannot hand a {type(value).__name__} to the code")
        self.lent.append(value)
        return {"lent": len(self.lent) - 1}

    def ask(self, what: str, target: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """One question; the answer as plain data, or a Remote where it is none."""
        nonce = os.urandom(8).hex()
        packed = [self.codec.pack(list(args)), self.codec.pack(kwargs)]
        self._send({"nonce": nonce, "ask": what, "target": target, "args": packed})
        while True:
            answer = receive(self.link)
            self.on_value()
            if answer.get("nonce") != nonce:
                raise CodeGoneError("an answer came without the nonce of its question")
            try:
                if "lent" not in answer:
                    return self._answer(answer, args)
                self._call_back(nonce, answer)
            except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
                if isinstance(getattr(error, "from_code", None), bool):
                    raise
                raise CodeGoneError(f"an answer that is none: {error}") from error

    def _answer(self, answer: dict[str, Any], args: tuple[Any, ...]) -> Any:
        if "raised" in answer:
            raise _as_builtin(str(answer["raised"]), str(answer["text"]))
        value, changed = self.codec.unpack(answer["value"]), self.codec.unpack(answer["changed"])
        for mine, theirs in zip(args, changed, strict=True):
            _write_back(mine, theirs)
        return value

    def _call_back(self, nonce: str, answer: dict[str, Any]) -> None:
        function = self.lent[int(answer["lent"])]
        try:
            reply = {"value": self.codec.pack(function(*self.codec.unpack(answer["args"])))}
        except Exception as error:  # noqa: BLE001 - the test's own function failed; the code hears it
            reply = {"raised": type(error).__name__, "text": str(error)}
        self._send({"nonce": nonce, **reply})

    def _send(self, message: dict[str, Any]) -> None:
        try:
            send(self.link, message)
        except OSError as error:
            raise CodeGoneError("the code under test ended") from error


def _write_back(mine: Any, theirs: Any) -> None:
    """What the code did to a list, dict or set that it was given."""
    if isinstance(mine, list) and isinstance(theirs, list):
        mine[:] = theirs
    elif isinstance(mine, dict | set) and type(mine) is type(theirs):
        mine.clear()
        mine.update(theirs)


def _as_builtin(name: str, text: str) -> Exception:
    kind = getattr(builtins, name, None)
    known = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError | ImportError)
    error: Exception = kind(text) if known else CodeRaisedError(f"{name}: {text}")  # type: ignore[misc]
    error.from_code = True  # type: ignore[attr-defined]
    return error


class Remote:
    """Something of the code's, seen from the tests. Used like the thing itself; compared only as plain data."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, caller: Caller, target: dict[str, Any]) -> None:
        self._caller, self._target = caller, target

    def _ask(self, what: str, *args: Any, **kwargs: Any) -> Any:
        return self._caller.ask(what, self._target, *args, **kwargs)

    def _plain(self) -> Any:
        value = self._ask("value")
        if isinstance(value, Remote):
            raise NotPlainError("an object of the code's own class was compared: it could say yes to everything")
        return value

    def __getattr__(self, name: str) -> Remote:
        if name.startswith("__"):
            raise AttributeError(name)
        return Remote(self._caller, {"of": self._target, "name": name})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Have the code call it."""
        return self._ask("call", *args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        found: list[Any] = self._ask("list")
        return iter(found)

    def __len__(self) -> int:
        return int(self._ask("len"))

    def __getitem__(self, key: Any) -> Any:
        return self._ask("item", key)

    def __contains__(self, key: Any) -> bool:
        return bool(self._ask("contains", key))

    def __next__(self) -> Any:
        return self._ask("next")

    def __str__(self) -> str:
        return str(self._ask("str"))

    def __repr__(self) -> str:
        return str(self._ask("repr"))

    def __bool__(self) -> bool:
        return self._ask("bool") is True


def _on_plain(operation: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Any]:
    """An operation on the plain data behind a Remote, done here by the built-in types."""

    def operate(self: Remote, *others: Any) -> Any:
        values = [self._plain(), *(each._plain() if isinstance(each, Remote) else each for each in others)]
        return operation(*(reversed(values) if swapped else values))

    return operate


for _name in ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "truediv", "floordiv", "mod", "neg", "abs"):
    setattr(Remote, f"__{_name}__", _on_plain(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod"):
    setattr(Remote, f"__r{_name}__", _on_plain(getattr(operator, _name), swapped=True))
for _type in (int, float, round):
    setattr(Remote, f"__{_type.__name__}__", _on_plain(_type))


class Tests:
    """What the generated script of a test process uses. Each test is one `with` block."""

    def __init__(self) -> None:
        nonce = os.read(0, 64).decode().strip()
        self._results = os.fdopen(os.dup(1), "w", buffering=1)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):  # what a test prints is nobody's verdict
            os.dup2(nowhere, stream)
        self._nonce, self._number, self._has_value = nonce, -1, False
        self._caller = Caller(socket.socket(fileno=LINK), self._mark_value)

    def remote(self, name: str) -> Remote:
        """A name of the code's."""
        return Remote(self._caller, {"name": name})

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
