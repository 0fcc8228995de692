"""How a check can go wrong: it cannot be read (usage), what it reads does not hold (a FAIL), or nobody measured it."""

from __future__ import annotations

from surefoot.errors import ConfigError

_WINDOW = 100


class CheckFailedError(Exception):
    """The evidence does not allow PASS; the text becomes the row's message."""


class UnavailableError(CheckFailedError):
    """A number that the check asks for was never measured: no evidence, for PASS or for FAIL."""


class CheckSyntaxError(ConfigError):
    """The expression is refused before or while it is evaluated: exit 2."""


def refuse(expression: str, at: int, problem: str, allowed: str) -> CheckSyntaxError:
    """The error for a place in an expression, with a caret under it.

    Example:
        >>> print(refuse("mean(x", 5, "unknown name x", "data").what)
        unknown name x, at character 6 of this check:
            mean(x
                 ^
    """
    start = max(0, min(at, len(expression)) - _WINDOW // 2)
    window = "".join(c if c.isprintable() else "�" for c in expression[start : start + _WINDOW])
    head, tail = "..." if start else "", "..." if start + _WINDOW < len(expression) else ""
    caret = " " * (len(head) + at - start) + "^"
    return CheckSyntaxError(
        f"{problem}, at character {at + 1} of this check:\n    {head}{window}{tail}\n    {caret}",
        "a check that cannot be read judges nothing, and that must not look like a FAIL of the run",
        f"{allowed}; the grammar is in docs/checks.md",
    )
