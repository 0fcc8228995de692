"""Exact arithmetic on a written expression: a small parser, fractions, and limits. No `eval` anywhere.

Grammar    sum: product (+ or - product)*    product: signed (* / // % signed)*
           signed: (+ or -) signed, or power    power: atom (** signed)?    atom: number, or ( sum )

Promises   every expression of at most 500 characters has an answer or a `MathError` that says why not, quickly.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

MAX_LENGTH, MAX_DEPTH, MAX_BITS, MAX_EXPONENT = 500, 50, 4000, 1000
_TOKEN = re.compile(r"\s*(?:(\d+\.?\d*|\.\d+)|(\*\*|//|[-+*/%()^×÷−]))")
_SAME = {"^": "**", "×": "*", "÷": "/", "−": "-"}


class MathError(ValueError):
    """What is wrong with an expression."""


def evaluate(expression: str) -> str:
    """The value, as a whole number or a decimal number of at most 12 places.

    Example:
        >>> evaluate("2 * (3 + 4) / 8")
        '1.75'
    """
    if len(expression) > MAX_LENGTH:
        raise MathError(f"the expression has {len(expression)} characters; at most {MAX_LENGTH} are read")
    return render(_Parser(_tokens(expression)).whole())


def render(value: Fraction) -> str:
    """A whole number as it is; anything else to 12 places, without trailing zeros."""
    if value.denominator == 1:
        return str(value.numerator)
    scaled = abs(value) * 10**12
    whole = (2 * scaled.numerator + scaled.denominator) // (2 * scaled.denominator)  # half goes up
    digits = f"{whole:013d}"
    text = f"{digits[:-12]}.{digits[-12:]}".rstrip("0").rstrip(".")
    return f"-{text}" if value < 0 and text != "0" else text


def _tokens(expression: str) -> list[str]:
    found, at = [], 0
    text = expression.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise MathError(f"cannot read {text[at : at + 10].strip()!r}; use numbers, + - * / // % ** and brackets")
        found.append(_SAME.get(match[0].strip(), match[0].strip()))
        at = match.end()
    if not found:
        raise MathError("the expression is empty")
    return found


class _Parser:
    """Reads a list of tokens from left to right."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens, self._at, self._depth = tokens, 0, 0

    def whole(self) -> Fraction:
        value = self._sum()
        if self._at < len(self._tokens):
            raise MathError(f"did not expect {self._tokens[self._at]!r} after a complete expression")
        return value

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _take(self, *wanted: str) -> str:
        token = self._peek()
        if token and token in wanted:
            self._at += 1
            return token
        return ""

    def _sum(self) -> Fraction:
        value = self._product()
        while sign := self._take("+", "-"):
            right = self._product()
            value = _bounded(value + right if sign == "+" else value - right)
        return value

    def _product(self) -> Fraction:
        value = self._signed()
        while operator := self._take("*", "/", "//", "%"):
            value = _bounded(_combine(operator, value, self._signed()))
        return value

    def _signed(self) -> Fraction:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise MathError(f"brackets, signs and powers are nested more than {MAX_DEPTH} deep")
        sign = self._take("+", "-")
        value = self._signed() if sign else self._power()
        self._depth -= 1
        return -value if sign == "-" else value

    def _power(self) -> Fraction:
        base = self._atom()
        return _raise(base, self._signed()) if self._take("**") else base

    def _atom(self) -> Fraction:
        found = self._peek()
        self._at += 1
        if found == "(":
            value = self._sum()
            if not self._take(")"):
                raise MathError("a bracket is not closed")
            return value
        if not found or found[0] not in "0123456789.":
            raise MathError(f"expected a number, found {found!r}" if found else "the expression ends too early")
        return Fraction(found)


def _combine(operator: str, left: Fraction, right: Fraction) -> Fraction:
    if operator == "*":
        return left * right
    if right == 0:
        raise MathError("division by zero")
    if operator == "/":
        return left / right
    quotient = Fraction(math.floor(left / right))
    return quotient if operator == "//" else left - quotient * right


def _raise(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise MathError("only whole exponents are supported")
    if abs(exponent) > MAX_EXPONENT or _size(base) * abs(exponent) > MAX_BITS:
        raise MathError("the power is too large")
    if base == 0 and exponent < 0:
        raise MathError("division by zero")
    return Fraction(base ** int(exponent))


def _size(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _bounded(value: Fraction) -> Fraction:
    if _size(value) > MAX_BITS:
        raise MathError("the number is too large")
    return value
