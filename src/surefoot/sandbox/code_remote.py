"""What a test sees in place of the code: a `Remote`, and the end of the pipe behind it.

Owns       what tests may ask of something that is the code's: its *standing*.

    NAME     a name that the tests use, and its attributes     called, read; compared as the plain data behind it
    OBJECT   given by a name that the tests use for objects    used like the thing itself; compared never
    PART     given by an object: what its methods return       the same, but plain data's own methods and `in`
    RESULT   given by any other name, and not plain            called again, or gone through once; nothing else

Promises   only plain data comes back (numbers, text, lists, dicts ...), rebuilt here from built-in types: nothing of
           the code's own classes, so no comparison of its own; an answer without the question's nonce is refused. What
           the code raises can end no loop of the tests. An argument stays as it was unless the tests look there. An
           assert that failed in a function which the tests lent fails the call, whatever the code made of it.
Never      lets the code choose a standing (the tests' text does, see `code_script.py`), or call anything of this
           process but functions that the tests wrote. Imports nothing of ours but its neighbours in the sandbox.
"""

from __future__ import annotations

import builtins
import operator
import os
import sys

from surefoot.sandbox.code_codec import NotPlainError, PlainCodec
from surefoot.sandbox.code_wire import CodeGoneError, CodeRaisedError, NoLengthError, NotLentError, receive, send

TYPE_CHECKING = False
if TYPE_CHECKING:  # an interpreter loads this file for every verdict: `typing` would cost it more than all the rest
    import socket
    from collections.abc import Callable, Collection, Iterator
    from typing import Any

NAME, OBJECT, PART, RESULT = range(4)
_FUNCTION: Any = type(lambda: None)
_METHOD: Any = type(PlainCodec(print, print).pack)
_BUILT_IN: Any = type(len)
_PLAIN = (bool, int, float, complex, str, bytes, bytearray, list, tuple, set, frozenset, dict, range)
_HARMLESS = (*_PLAIN, abs, divmod, len, max, min, pow, round, sorted, sum)
_POWERS = frozenset(("eval", "exec", "compile", "__import__"))
"""What a function of the tests must not do on behalf of the code that calls it."""


class Caller:
    """The tests' end: asks, waits, and lets the code call back the functions that a test handed to it."""

    def __init__(
        self,
        link: socket.socket,
        on_value: Callable[[], None] = lambda: None,
        objects: Collection[str] = (),
        plain: Collection[str] = (),
    ) -> None:
        self.link, self.on_value, self.objects, self.plain = link, on_value, objects, plain
        self.lent: list[Callable[..., Any]] = []
        self.lived: dict[int, Any] = {}
        """Arguments that the code may change, by their identity; held, so that it stays theirs."""
        self.shown: set[str] = set()
        """Methods that plain data has too, and that the tests called on an object."""
        self.standing, self.root = RESULT, ""
        """Of what the next answer holds, and the name from which it comes."""
        self.codec = PlainCodec(self._lend, self._find, tuple(_KINDS.values()))

    def _find(self, body: Any) -> Remote:
        number, kind = body
        return _KINDS[kind](self, {"kept": int(number)}, standing=self.standing, root=self.root)

    def _lend(self, value: Any) -> Any:
        if isinstance(value, Remote):
            return object.__getattribute__(value, "_target")
        if not _callable(value):
            raise NotPlainError(f"a test cannot hand a {type(value).__name__} to the code")
        place = _place_of(value)
        if place is not None:
            return {"own": place}  # the code has one of its own
        if not _is_of_tests(value):
            raise NotLentError(f"the code may not call {value!r} of the tests")
        self.lent.append(value)
        return {"lent": len(self.lent) - 1}

    def live(self, value: Any) -> Any:
        """Mark an argument as one that the code may change; for `*words` each of them."""
        for each in (value, *(value if type(value) in (list, tuple) else ())):
            self.lived[id(each)] = each
        return value

    def ask(self, what: str, remote: Remote, *args: Any, **kwargs: Any) -> Any:
        """One question; the answer as plain data, or a Remote. Code that breaks the rules is not asked again."""
        try:
            return self._ask(what, remote, args, kwargs)
        except CodeGoneError:
            self.link.close()
            raise

    def _ask(self, what: str, remote: Remote, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonce = os.urandom(8).hex()
        packed = [self.codec.pack(list(args)), self.codec.pack(kwargs)]
        self._send({"nonce": nonce, "ask": what, "target": remote._target, "args": packed})
        refused: Exception | None = None
        while True:
            answer = receive(self.link)
            self.on_value()
            if answer.get("nonce") != nonce:
                raise CodeGoneError("an answer came without the nonce of its question")
            if refused is not None and "lent" not in answer:
                raise refused
            try:
                if "lent" not in answer:
                    self.standing, self.root = self._standing(what, remote), remote._root
                    return self._answer(what, answer, args)
                self.standing = PART if self.objects else RESULT
                refused = self._call_back(nonce, answer) or refused
            except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
                if isinstance(getattr(error, "from_code", None), bool):
                    raise
                raise CodeGoneError(f"an answer that is none: {error}") from error

    def _standing(self, what: str, remote: Remote) -> int:
        """Of what comes back when `what` is asked of a remote. The code has no say in it."""
        if remote._standing == NAME:
            if what == "attr":
                return NAME
            return OBJECT if remote._root in self.objects else RESULT
        return RESULT if remote._standing == RESULT else PART

    def _answer(self, what: str, answer: dict[str, Any], args: tuple[Any, ...]) -> Any:
        if "raised" in answer:
            raise _as_builtin(str(answer["raised"]), str(answer["text"]), what)
        value, changed = self.codec.unpack(answer["value"]), self.codec.unpack(answer["changed"])
        for mine, theirs in zip(args, changed, strict=True):
            if id(mine) in self.lived:
                _write_back(mine, theirs)
        return value

    def _call_back(self, nonce: str, answer: dict[str, Any]) -> Exception | None:
        """The code calls a function of the tests; what that refuses, the code hears too, and cannot keep to itself."""
        function, refused = self.lent[int(answer["lent"])], None
        try:
            reply = {"value": self.codec.pack(function(*self.codec.unpack(answer["args"])))}
        except Exception as error:  # noqa: BLE001 - the test's own function failed; the code hears it
            reply, refused = {"raised": type(error).__name__, "text": str(error)}, _refusal(error)
        self._send({"nonce": nonce, **reply})
        return refused

    def _send(self, message: dict[str, Any]) -> None:
        try:
            send(self.link, message)
        except OSError as error:
            raise CodeGoneError("the code under test ended") from error


class Judging:
    """Around each assert in a function of the tests: what ends it says so, whoever raised it."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            error.of_an_assert = True  # type: ignore[attr-defined]


def _refusal(error: Exception) -> Exception | None:
    """A verdict of the tests in what their function raised: an assert that did not hold, or that could not be made.

    Anything else is data for the code, which may have to catch it (`retry`), and so is what the code itself raised.
    """
    if isinstance(error, NotPlainError):
        return NotPlainError(str(error))
    is_own = isinstance(error, AssertionError) and not hasattr(error, "from_code")
    return AssertionError(str(error)) if is_own or hasattr(error, "of_an_assert") else None


def _write_back(mine: Any, theirs: Any) -> None:
    """What the code did to a list, dict or set that it was given."""
    if isinstance(mine, list) and isinstance(theirs, list):
        mine[:] = theirs
    elif isinstance(mine, dict | set) and type(mine) is type(theirs):
        mine.clear()
        mine.update(theirs)


def _as_builtin(name: str, text: str, what: str) -> Exception:
    """What the code raised. The end of an iteration only where a test asked for the next item: elsewhere it would end
    the tests' own `map` or `zip`, and with it the test."""
    kind = getattr(builtins, name, None)
    known = isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, _NOT_BY_NAME)
    known = known or (name == "StopIteration" and what == "next")
    error: Exception = kind(text) if known else CodeRaisedError(f"{name}: {text}")  # type: ignore[misc]
    error.from_code = True  # type: ignore[attr-defined]
    return error


_NOT_BY_NAME = (UnicodeError, ImportError, StopIteration, StopAsyncIteration, BaseExceptionGroup)


def _place_of(value: Any) -> list[str] | None:
    """Module and name of something that every Python has: the code is told the name, and lent nothing."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if module is None and isinstance(getattr(value, "__objclass__", None), type):
        module = value.__objclass__.__module__  # a method of a built-in type, such as `str.upper`
    if not isinstance(module, str) or not isinstance(name, str) or module == "__main__":
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return [module, name] if found is value else None


def _is_of_tests(value: Any) -> bool:
    """Whether a function may be called by the code: the tests wrote it, or it only changes plain data of theirs."""
    if isinstance(value, _FUNCTION):
        return value.__module__ == "__main__" and not _words_of(value.__code__) & _POWERS
    if isinstance(value, _METHOD):
        return _is_of_tests(value.__func__)
    if isinstance(value, _BUILT_IN):
        return type(value.__self__) in _PLAIN
    kind = value if isinstance(value, type) else type(value)
    if kind.__module__ == "functools":  # a partial, a cache
        inner = getattr(value, "func", None) or getattr(value, "__wrapped__", None)
        if isinstance(inner, Remote):
            return True
        return inner in _HARMLESS or (_place_of(inner) or [""])[0] in ("math", "_operator") or _is_of_tests(inner)
    return kind.__module__ in ("__main__", "unittest.mock") or kind is operator.itemgetter


def _words_of(code: Any) -> set[str]:
    return {*code.co_names}.union(*(_words_of(each) for each in code.co_consts if isinstance(each, type(code))))


def _class_of(self: Remote) -> type:
    """What `isinstance` looks at: our own methods would make anything an `Iterable`."""
    if self._standing == RESULT:
        raise NotPlainError("the class of something that is not plain was asked")
    return type(self)


class Remote:
    """Something of the code's, seen from the tests."""

    __slots__ = ("_caller", "_items", "_root", "_standing", "_target")  # and no `__dict__` for `vars` to show
    __hash__ = None  # type: ignore[assignment]
    __class__ = property(_class_of)

    def __init__(self, caller: Caller, target: dict[str, Any], *, standing: int = NAME, root: str = "") -> None:
        self._caller, self._target, self._standing = caller, target, standing
        self._root: str = root or target.get("name", "")
        self._items: list[Any] | None = None

    def _ask(self, what: str, *args: Any, **kwargs: Any) -> Any:
        return self._caller.ask(what, self, *args, **kwargs)

    def _plain(self) -> Any:
        """The plain data behind a name. What the code gave would have been plain already."""
        value = self._ask("value") if self._standing == NAME else self
        if isinstance(value, Remote):
            raise NotPlainError("an object of the code's own class was compared: it could say yes to everything")
        return value

    def _is_object(self) -> bool:
        """Whether the tests use it as an object."""
        return self._standing in (OBJECT, PART) or (self._standing == NAME and self._root in self._caller.objects)

    def _do(self, what: str, here: Callable[..., Any], *args: Any) -> Any:
        """An operation: by the code where the tests use it as an object, else here, on the plain data behind it."""
        return self._ask(what, *args) if self._is_object() else here(self._plain(), *args)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__name__":
            raise AttributeError(name)
        return self._read(name)

    def _read(self, name: str) -> Any:
        if self._standing == RESULT:
            raise NotPlainError(f"{name!r} was asked of an object of the code's own class: it could say anything")
        if name in self._caller.plain and not self._is_object():
            return getattr(self._plain(), name)
        found = self._ask("attr", name)
        if name in self._caller.plain and isinstance(found, Remote):
            if self._standing == PART and name not in self._caller.shown:
                raise NotPlainError(f"{name!r} is a method of plain data, and this is none")
            self._caller.shown.add(name)
        return found

    def __iter__(self) -> Iterator[Any]:
        if self._standing == RESULT:  # once: it is data, and cannot become other data
            self._items = self._ask("list") if self._items is None else self._items
            return iter(self._items)
        return iter(self._do("list", list))

    def __len__(self) -> int:
        if self._standing == RESULT:
            raise NoLengthError("an object of the code's own class was measured")
        return int(self._do("len", len))

    def __getitem__(self, key: Any) -> Any:
        return self._do("item", operator.getitem, key)

    def __contains__(self, key: Any) -> bool:
        if self._standing == PART and "__contains__" not in self._caller.shown:
            raise NotPlainError("an object of the code's own class was searched: it could hold everything")
        if self._standing == OBJECT:
            self._caller.shown.add("__contains__")
        return bool(self._do("contains", operator.contains, key))

    def __next__(self) -> Any:
        return self._ask("next")

    def __str__(self) -> str:
        return str(self._do("str", str))

    def __repr__(self) -> str:
        return str(self._do("repr", repr))

    def __bool__(self) -> bool:
        if self._standing == NAME and is_callable(self):
            return True
        return self._do("bool", bool) is True


class RemoteFunction(Remote):
    """Something of the code's that can be called, or a name: whether it can shows when it is."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Have the code call it."""
        return self._ask("call", *args, **kwargs)


class RemoteIterator(Remote):
    """A generator or another iterator of Python's own: its items come one after the other, and once."""

    __slots__ = ()

    def __iter__(self) -> Iterator[Any]:
        found: list[Any] = self._ask("list")
        return iter(found)

    def __contains__(self, key: Any) -> bool:
        return key in list(self)

    def __len__(self) -> int:
        raise NoLengthError("an iterator has no length")


_KINDS = {"callable": RemoteFunction, "iterator": RemoteIterator, "object": Remote}


def is_callable(value: Any) -> bool:
    """The tests' `callable`: a name that nobody defined is not."""
    if isinstance(value, Remote) and value._standing == NAME:
        return value._ask("callable") is True
    return _callable(value)


_callable = callable
is_callable.__name__ = is_callable.__qualname__ = "callable"
is_callable.__module__ = "builtins"


def _on_plain(operation: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Any]:
    """An operation on the plain data behind a Remote, done here by the built-in types."""

    def operate(self: Remote, *others: Any) -> Any:
        values = [self._plain(), *(each._plain() if isinstance(each, Remote) else each for each in others)]
        return operation(*(reversed(values) if swapped else values))

    return operate


for _name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "abs"):
    setattr(Remote, f"__{_name}__", _on_plain(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor"):
    setattr(Remote, f"__{_name.strip('_')}__", _on_plain(getattr(operator, _name)))
    setattr(Remote, f"__r{_name.strip('_')}__", _on_plain(getattr(operator, _name), swapped=True))
for _kind in (Remote, RemoteFunction, RemoteIterator):  # ours would answer for the code's
    _kind.__doc__ = property(lambda self: self._read("__doc__"))  # type: ignore[assignment]
for _type in (int, float, round):
    setattr(Remote, f"__{_type.__name__}__", _on_plain(_type))
