"""Text to tokens: numbers, quoted names, words and signs, all of it ASCII, all of it counted.

Promises   linear in the text, and refused above `MAX_LENGTH`, `MAX_TOKENS`, `MAX_STRING`, `MAX_DIGITS`, `MAX_NUMBER`.
"""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

from surefoot.harness.checks.limits import MAX_DIGITS, MAX_LENGTH, MAX_NUMBER, MAX_STRING, MAX_TOKENS
from surefoot.harness.checks.problems import refuse

NUMBER, TEXT, NAME, SIGN, END = "number", "text", "name", "sign", "end"

_TOKEN = re.compile(
    r"[ \t\r\n]+"
    r"|(?P<number>(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_]*)"
    r"|(?P<quote>[\"'])"
    r"|(?P<sign>\*\*|//|<=|>=|==|!=|[-+*/%<>()\[\]{},:=.])"
)
_ESCAPES = {"\\": "\\", "'": "'", '"': '"'}


class Token(NamedTuple):
    """A piece of an expression and where it begins. `value` is the number or the unquoted text."""

    kind: str
    text: str
    at: int
    value: float | int | str = ""


def tokenize(expression: str) -> list[Token]:
    """The tokens of `expression`, with one `END` at the end.

    Example:
        >>> [token.text for token in tokenize("min(x) > -1.5")]
        ['min', '(', 'x', ')', '>', '-', '1.5', '']
    """
    if len(expression) > MAX_LENGTH:
        raise refuse(expression, MAX_LENGTH, f"the check has {len(expression)} characters", _at_most(MAX_LENGTH))
    tokens: list[Token] = []
    at = 0
    while at < len(expression):
        match = _TOKEN.match(expression, at)
        if match is None:
            raise refuse(expression, at, f"{_spell(expression[at])} has no meaning here", "remove or quote it")
        at = match.end()
        if match["quote"]:
            token, at = _quoted(expression, match.start())
            tokens.append(token)
        elif match["number"]:
            tokens.append(_number(expression, match["number"], match.start()))
        elif match["name"] or match["sign"]:
            tokens.append(Token(NAME if match["name"] else SIGN, match[0], match.start()))
        if len(tokens) > MAX_TOKENS:
            raise refuse(expression, at, f"the check has more than {MAX_TOKENS} tokens", _at_most(MAX_TOKENS))
    tokens.append(Token(END, "", len(expression)))
    return tokens


def _quoted(expression: str, start: int) -> tuple[Token, int]:
    """The text between two equal quotes; the other kind of quote needs no backslash inside."""
    quote, at = expression[start], start + 1
    value: list[str] = []
    while at < len(expression):
        char = expression[at]
        if char == quote:
            return Token(TEXT, expression[start : at + 1], start, "".join(value)), at + 1
        if char == "\\":
            at += 1
            if expression[at : at + 1] not in _ESCAPES:
                raise refuse(expression, at - 1, "this backslash escapes nothing", r"write \\, \' or \"")
            char = expression[at]
        value.append(char)
        at += 1
        if len(value) > MAX_STRING:
            raise refuse(expression, start, f"the quoted text is longer than {MAX_STRING}", _at_most(MAX_STRING))
    raise refuse(expression, start, "the quote that begins here is never closed", f"add a {quote}")


def _number(expression: str, text: str, at: int) -> Token:
    if len(text) > MAX_DIGITS:
        raise refuse(expression, at, f"a number of {len(text)} characters", _at_most(MAX_DIGITS))
    value = float(text)
    if abs(value) > MAX_NUMBER:
        raise refuse(expression, at, f"the number {text} is too large", f"numbers go to {MAX_NUMBER:g}")
    whole = text.isdigit() and value <= 2**53
    return Token(NUMBER, text, at, int(text) if whole else value)


def _at_most(limit: int) -> str:
    return f"at most {limit} are allowed; write several checks"


def _spell(char: str) -> str:
    if char.isascii() and char.isprintable():
        return repr(char)
    return f"the character U+{ord(char):04X} ({unicodedata.name(char, 'unnamed')})"
