"""The code's end of the pipe: imports what the model wrote, and does with it what the tests ask.

Owns       nothing worth stealing: no test, no expected value, no verdict is ever in this process.
Promises   answers each question with plain data, or with the name of an object that stays here.
Never      decides anything. Whatever the code does to this process, all it can send is data that others compare.

It runs inside a sandbox, beside copies of `code_wire.py` and `code_codec.py`.
"""

from __future__ import annotations

import socket

from surefoot.sandbox.code_codec import PlainCodec
from surefoot.sandbox.code_wire import LINK, CodeGoneError, receive, send

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class Worker:
    """Holds the code's module and the objects that tests refer to."""

    def __init__(self, link: socket.socket) -> None:
        self.link, self.nonce = link, ""
        self.kept: list[Any] = []
        self.module: Any = None
        self.broken: BaseException | None = None
        self.codec = PlainCodec(self._keep, self._find)

    def serve(self) -> None:
        """Answer until the tests have gone."""
        self.module, self.broken = _load()
        while True:
            try:
                question = receive(self.link)
            except CodeGoneError:
                return
            self._serve(question)

    def _serve(self, question: dict[str, Any]) -> None:
        self.nonce = question["nonce"]
        try:
            if self.broken is not None:
                raise self.broken
            answer = self._answer(self.module, question)
            send(self.link, {"nonce": question["nonce"], **answer})
        except BaseException as error:  # noqa: BLE001 - SystemExit too: whatever it raised is its answer
            raised = {"raised": type(error).__name__, "text": _text(error)}
            send(self.link, {"nonce": question["nonce"], **raised})

    def _answer(self, module: Any, question: dict[str, Any]) -> dict[str, Any]:
        args, kwargs = map(self.codec.unpack, question["args"])
        target = self._target(module, question["target"])
        value = _DO[question["ask"]](target, *args, **kwargs)
        changed = [each if isinstance(each, list | dict | set) else None for each in args]
        return {"value": self.codec.pack(value), "changed": self.codec.pack(changed)}

    def _target(self, module: Any, target: dict[str, Any]) -> Any:
        if "kept" in target:
            return self.kept[target["kept"]]
        try:
            return getattr(module, target["name"])
        except AttributeError:
            raise NameError(f"name {target['name']!r} is not defined") from None

    def _keep(self, value: Any) -> list[Any]:
        self.kept.append(value)
        is_iterator = type(value).__module__ in ("builtins", "itertools") and hasattr(type(value), "__iter__")
        kind = "iterator" if is_iterator else "callable" if callable(value) else "object"
        return [len(self.kept) - 1, kind]

    def _find(self, body: dict[str, Any]) -> Any:
        if "own" in body:
            return _own(*body["own"])
        if "lent" not in body:
            return self._target(self.module, body)
        number = body["lent"]

        def lent(*args: Any) -> Any:
            nonce = self.nonce  # of the question that is being answered, not of the one that lent it
            send(self.link, {"nonce": nonce, "lent": number, "args": self.codec.pack(list(args))})
            while "ask" in (reply := receive(self.link)):
                self._serve(reply)  # the function looks at what it was given
            self.nonce = nonce
            if "raised" in reply:
                raise _as_builtin(reply["raised"], reply["text"])
            return self.codec.unpack(reply["value"])

        return lent


_DO: dict[str, Callable[..., Any]] = {
    "call": lambda target, *args, **kwargs: target(*args, **kwargs),
    "value": lambda target: target,
    "attr": getattr,
    "callable": callable,
    "list": list,
    "len": len,
    "item": lambda target, key: target[key],
    "contains": lambda target, key: key in target,
    "next": next,
    "str": str,
    "repr": repr,
    "bool": bool,
}


def _own(module: str, name: str) -> Any:
    """What the tests have from the standard library, as this process has it."""
    import importlib  # few tests hand such a thing over

    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _as_builtin(name: str, text: str) -> Exception:
    """What a function of the tests raised: the code may have to catch it by its class."""
    import builtins

    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, UnicodeError | ExceptionGroup):
        return kind(text)
    return RuntimeError(f"{name}: {text}")


def _load() -> tuple[Any, BaseException | None]:
    """The code as a module named `solution`, or what it raised while it was loaded."""
    try:
        import solution  # type: ignore[import-not-found]
    except BaseException as error:  # noqa: BLE001 - every question will be answered with it
        return None, error
    return solution, None


def _text(error: BaseException) -> str:
    try:
        return str(error)[:2000]
    except BaseException as second:  # noqa: BLE001 - a stranger's __str__
        return f"(its text could not be made: {type(second).__name__})"


if __name__ == "__main__":
    Worker(socket.socket(fileno=LINK)).serve()
