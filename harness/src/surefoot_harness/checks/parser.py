"""Text to tokens: numbers, quoted names, words and signs, all of it ASCII, all of it counted.

Promises   linear in the text, and refused above `MAX_LENGTH`, `MAX_TOKENS`, `MAX_STRING`, `MAX_DIGITS`, `MAX_NUMBER`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from typing import NamedTuple

from surefoot_harness.checks import language
from surefoot_harness.checks.language import (
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_LENGTH,
    MAX_NUMBER,
    MAX_STRING,
    MAX_TOKENS,
    CheckSyntaxError,
    refuse,
)

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


# -- Moving along the tokens of one expression, never deeper than allowed -------------------------


EXAMPLES = 'for example: mean(data["train/loss"], -6, -1) < 1.5'


class TokenStream:
    """The tokens of one expression, and how far we are."""

    def __init__(self, expression: str) -> None:
        self.expression = expression
        self.tokens = tokenize(expression)
        self.position = 0
        self.depth = 0

    @property
    def now(self) -> Token:
        """The next token."""
        return self.tokens[self.position]

    def sees(self, *texts: str) -> bool:
        """Whether the next token is one of these signs or words (a quoted text never is)."""
        return self.now.kind in (SIGN, NAME) and self.now.text in texts

    def take(self) -> Token:
        """The next token, passed."""
        token = self.now
        self.position += 1
        return token

    def expect(self, text: str) -> Token:
        """The next token, which has to be this sign or word."""
        if not self.sees(text):
            raise self.unexpected(text)
        return self.take()

    def unexpected(self, wanted: str) -> CheckSyntaxError:
        """The error for a token that does not belong here."""
        found = f"{self.now.text[:40]} is not expected" if self.now.kind != END else "the check ends too early"
        return refuse(self.expression, self.now.at, found, f"here could stand: {wanted}; {EXAMPLES}")

    def deeper(self) -> None:
        """Count one level of nesting; the caller takes it back when the level is closed."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise refuse(
                self.expression, self.now.at, f"nested more than {MAX_DEPTH} deep", "write several checks instead"
            )


# -- Tokens to a tree: a precedence parser for the check language, and nothing but the check language
# or < and < not < comparisons, in < + - < * / // % < sign < [step] < brackets
#
# Promises   never deeper than `MAX_DEPTH`; a tree that can be walked without fear of recursion; the exact place of
# whatever it refuses.
# Never      knows attributes: `data.get("x", {})` and `SERIES.items()` are two fixed forms, spelled out below.


COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
_WORDS = {"and", "or", "not", "in", "for", "if", "True", "False", "data"}
_CONVERSIONS = ("str", "int", "float")
_LEVELS = (("+", "-"), ("*", "/", "//", "%"))
_Rule = Callable[[], language.Node]


def parse(expression: str) -> language.Node:
    """The tree of one expression; `ConfigError` names the place where it stops making sense.

    Example:
        >>> parse("min(data['x']) > 0").first.name
        'min'
    """
    parser = _Parser(expression)
    tree = parser.choice()
    if parser.now.kind != END:
        raise parser.unexpected("and, or, a comparison or the end")
    return tree


class _Parser(TokenStream):
    def __init__(self, expression: str) -> None:
        super().__init__(expression)
        self.bound: list[str] = []

    # -- precedence, lowest first -----------------------------------------------

    def choice(self) -> language.Node:
        self.deeper()
        tree = self.logic("or", lambda: self.logic("and", self.negation))
        self.depth -= 1
        return tree

    def logic(self, word: str, operand: _Rule) -> language.Node:
        at, operands = self.now.at, [operand()]
        while self.sees(word):
            self.take()
            operands.append(operand())
        return operands[0] if len(operands) == 1 else language.Logic(at, word, tuple(operands))

    def negation(self) -> language.Node:
        if not self.sees("not"):
            return self.comparison()
        self.deeper()
        token = self.take()
        tree = language.Not(token.at, self.negation())
        self.depth -= 1
        return tree

    def comparison(self) -> language.Node:
        at, first, rest = self.now.at, self.arithmetic(0), []
        while (operator := self.comparison_sign()) is not None:
            rest.append((operator, self.arithmetic(0)))
        return language.Compare(at, first, tuple(rest)) if rest else first

    def comparison_sign(self) -> str | None:
        if self.sees(*COMPARISONS, "in"):
            return self.take().text
        if self.sees("not"):
            self.take()
            self.expect("in")
            return "not in"
        return None

    def arithmetic(self, level: int) -> language.Node:
        if level == len(_LEVELS):
            return self.signed()
        at, first, rest = self.now.at, self.arithmetic(level + 1), []
        while self.sees(*_LEVELS[level]):
            rest.append((self.take().text, self.arithmetic(level + 1)))
        if self.sees("**"):
            raise refuse(self.expression, self.now.at, "there are no powers here", "multiply instead")
        return language.Arithmetic(at, first, tuple(rest)) if rest else first

    def signed(self) -> language.Node:
        if not self.sees("-", "+"):
            return self.indexed()
        self.deeper()
        token = self.take()
        tree = language.Sign(token.at, token.text, self.signed())
        self.depth -= 1
        return tree

    def indexed(self) -> language.Node:
        tree = self.primary()
        if self.sees("["):
            at = self.take().at
            tree = language.StepValue(at, tree, self.choice())
            self.expect("]")
        if self.sees("["):
            raise refuse(self.expression, self.now.at, "a point has no parts", 'data["METRIC"]["STEP"] is one number')
        return tree

    # -- what stands alone --------------------------------------------------------

    def primary(self) -> language.Node:
        token = self.now
        if token.kind == NUMBER and not isinstance(token.value, str):
            self.take()
            return language.Number(token.at, token.value)
        if token.kind == TEXT:
            self.take()
            return language.QuotedText(token.at, str(token.value))
        if token.kind == NAME:
            return self.word()
        if self.sees("("):
            self.take()
            tree = self.choice()
            self.expect(")")
            return tree
        if self.sees("{"):
            return self.braces()
        if self.sees("["):
            return self.made_list()
        raise self.unexpected("a number, a quoted name, data[...], a helper or (")

    def word(self) -> language.Node:
        token = self.take()
        if token.text in ("True", "False"):
            return language.Flag(token.at, token.text == "True")
        if token.text == "data":
            return self.data(token)
        if self.sees("(") and token.text not in _WORDS:
            return self.call(token)
        if token.text in self.bound:
            return language.Variable(token.at, token.text)
        raise refuse(self.expression, token.at, f"unknown name {token.text[:40]}", f"metrics are data[...]; {EXAMPLES}")

    def data(self, token: Token) -> language.Node:
        if self.sees("["):
            self.take()
            name = self.quoted()
            self.expect("]")
            return language.MetricName(token.at, name)
        if self.sees("."):
            self.take()
            self.expect("get")
            self.expect("(")
            name = self.quoted()
            if self.sees(","):
                for sign in ",{}":
                    self.expect(sign)
            self.expect(")")
            return language.MetricName(token.at, name, optional=True)
        return language.Data(token.at)

    def quoted(self) -> str:
        if self.now.kind != TEXT:
            raise self.unexpected("the quoted name of a metric")
        return str(self.take().value)

    def call(self, token: Token) -> language.Node:
        self.expect("(")
        if token.text == "range":
            return self.steps(token)
        if token.text == "map":  # steps are whole numbers here, so str, int and float change nothing
            if not self.sees(*_CONVERSIONS):
                raise self.unexpected("str, as in set(map(str, range(1, 21)))")
            self.take()
            self.expect(",")
            tree = self.choice()
            self.expect(")")
            return tree
        args: list[language.Node] = []
        keywords: list[tuple[str, language.Node]] = []
        while not self.sees(")"):
            self.argument(args, keywords)
            if not self.sees(")"):
                self.expect(",")
        self.take()
        return language.HelperCall(token.at, token.text, tuple(args), tuple(keywords))

    def argument(self, args: list[language.Node], keywords: list[tuple[str, language.Node]]) -> None:
        following = self.tokens[self.position + 1] if self.now.kind != END else self.now
        if self.now.kind == NAME and following.kind == SIGN and following.text == "=":
            name = self.take().text
            self.take()
            keywords.append((name, self.choice()))
        elif keywords:
            raise self.unexpected("NAME=VALUE: an argument without a name cannot follow one with a name")
        else:
            args.append(self.choice())

    def steps(self, token: Token) -> language.Node:
        start: language.Node = language.Number(token.at, 0)
        end = self.choice()
        if self.sees(","):
            self.take()
            start, end = end, self.choice()
        self.expect(")")
        return language.Steps(token.at, start, end)

    # -- series made from series ----------------------------------------------------

    def braces(self) -> language.Node:
        at = self.expect("{").at
        if self.sees("**"):
            parts = []
            while self.sees("**"):
                self.take()
                parts.append(self.choice())
                if self.sees(","):
                    self.take()
            self.expect("}")
            return language.Merge(at, tuple(parts))
        self.find_names()
        key = self.choice()
        self.expect(":")
        return self.loop(at, key, self.choice(), "}")

    def made_list(self) -> language.Node:
        at = self.expect("[").at
        self.find_names()
        return self.loop(at, None, self.choice(), "]")

    def find_names(self) -> None:
        """Bind the loop's names before its body is read: they are written after it."""
        if self.bound:
            raise refuse(self.expression, self.now.at, "a for inside a for", "one loop in one expression")
        ahead = self.position
        while self.tokens[ahead].kind != END and not (
            self.tokens[ahead].kind == NAME and self.tokens[ahead].text == "for"
        ):
            ahead += 1
        names = self.tokens[ahead + 1 : ahead + 4] if self.tokens[ahead].kind != END else []
        self.bound = [token.text for token in names if token.kind == NAME and token.text not in _WORDS]
        if not self.bound:
            raise refuse(
                self.expression,
                self.now.at,
                "lists and sets of values are not part of checks",
                f"compare one number; {EXAMPLES}",
            )

    def loop(self, at: int, key: language.Node | None, value: language.Node, close: str) -> language.Node:
        self.expect("for")
        names = [self.name()]
        if self.sees(","):
            self.take()
            names.append(self.name())
        self.expect("in")
        inner, self.bound = self.bound, []
        source = self.arithmetic(0)
        pairs = self.sees(".")
        if pairs:
            for text in (".", "items", "(", ")"):
                self.expect(text)
        self.bound = inner
        condition = None
        if self.sees("if"):
            self.take()
            condition = self.choice()
        self.bound = []
        self.expect(close)
        if len(names) != (2 if pairs else 1) or len(set(names)) != len(names):
            raise refuse(self.expression, at, "the for does not fit", "for k, v in SERIES.items(), or for s in SERIES")
        return language.Loop(at, key, value, tuple(names), source, pairs, condition)

    def name(self) -> str:
        if self.now.kind != NAME or self.now.text in _WORDS:
            raise self.unexpected("a name")
        return self.take().text
