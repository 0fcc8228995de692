"""Text to tokens to a tree: the check language is a small part of Python's expressions, and Python parses it.

Promises   refused above `MAX_LENGTH`, `MAX_TOKENS`, `MAX_STRING`, `MAX_DIGITS`, `MAX_NUMBER` and `MAX_DEPTH` before
           Python sees anything; what it sees is one line of ASCII made of our own tokens: no prefix, escape, comment,
           other way to write a number or letter that only looks like one reaches it; of its tree only the nodes and
           forms below are taken; whatever is refused has a place.
Never      evaluates, compiles or knows attributes: `data.get("x", {})` and `SERIES.items()` are two fixed forms.
"""

from __future__ import annotations

import ast
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Mapping
from typing import NamedTuple, NoReturn

from surefoot_harness.checks import language
from surefoot_harness.checks.language import (
    MAX_DEPTH,
    MAX_DIGITS,
    MAX_LENGTH,
    MAX_NUMBER,
    MAX_STRING,
    MAX_TOKENS,
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


# -- Tokens to a tree -----------------------------------------------------------------------------


EXAMPLES = 'for example: mean(data["train/loss"], -6, -1) < 1.5'
_WORDS = {"and", "or", "not", "in", "for", "if", "True", "False", "data"}
_OPERATORS = {"and", "or", "not", "in", "for", "if"}
_CONVERTED = tuple(f"map ( {word} , " for word in ("str", "int", "float"))
_LEVELS: tuple[Mapping[type[ast.operator], str], ...] = (
    {ast.Add: "+", ast.Sub: "-"},
    {ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%"},
)
_SIGNED: Mapping[type[ast.unaryop], str] = {ast.UAdd: "+", ast.USub: "-"}
_COMPARED: Mapping[type[ast.cmpop], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.In: "in",
    ast.NotIn: "not in",
}  # fmt: skip


def parse(expression: str) -> language.Node:
    """The tree of one expression; `ConfigError` names the place where it stops making sense.

    Example:
        >>> parse("min(data['x']) > 0").first.name
        'min'
    """
    reader = _CheckReader(expression)
    return reader.node(reader.read())


class _CheckReader:
    """One expression on its way: its tokens, the line that Python parses, and where each token is in both."""

    def __init__(self, expression: str) -> None:
        self.expression = expression
        self.tokens = tokenize(expression)
        words = [ascii(token.value) if token.kind in (TEXT, NUMBER) else token.text for token in self.tokens]
        self.line = " ".join(words)
        self.columns = [0]
        for word in words[:-1]:
            self.columns.append(self.columns[-1] + len(word) + 1)
        self.bound: tuple[str, ...] = ()

    def read(self) -> ast.expr:
        """Python's tree of the line, once its nesting is counted."""
        self.count_depth()
        try:
            return ast.parse(self.line, mode="eval").body
        except SyntaxError as error:
            wanted = "and, or, a comparison or the end"
            if "follows keyword" in error.msg:
                wanted = "NAME=VALUE: an argument without a name cannot follow one with a name"
            self.unexpected(self.place(error), wanted)
        except (MemoryError, RecursionError):
            self.unexpected(self.tokens[0])

    def place(self, error: SyntaxError) -> Token:
        """The token that Python stumbled over; of two expressions side by side it marks both, we the second."""
        at, end = error.offset or 0, error.end_offset or 0
        if at < 1 or error.lineno != 1 or "never closed" in error.msg:
            return self.tokens[-1]
        return self.token(max(at, end - 1) - 1 if "forgot a comma" in error.msg else at - 1)

    def count_depth(self) -> None:
        """Brackets, calls, `not` and signs inside each other; two quoted texts side by side are one to Python."""
        inside, before, prefixes = [0], self.tokens[-1], 0
        for token, after in zip(self.tokens, [*self.tokens[1:], self.tokens[-1]], strict=True):
            if token.kind == before.kind == TEXT:
                self.unexpected(token)
            if token.kind == SIGN and token.text in "([{":
                fixed = before.kind == NAME and before.text in ("data", "get") and after.kind == TEXT
                inside.append(inside[-1] + prefixes + (0 if fixed else 1))
                prefixes = 0
            elif token.kind == SIGN and token.text in ")]}" and len(inside) > 1:
                inside.pop()
            elif token.kind in (SIGN, NAME) and token.text in ("not", "-", "+") and not _ends_operand(before):
                prefixes += 1
            else:
                prefixes = 0
            if 1 + inside[-1] + prefixes > MAX_DEPTH:
                problem = f"nested more than {MAX_DEPTH} deep"
                raise refuse(self.expression, token.at, problem, "write several checks instead")
            before = token

    # -- places -------------------------------------------------------------------

    def token(self, column: int) -> Token:
        """The token at this column of the line."""
        return self.tokens[bisect_right(self.columns, column) - 1]

    def at(self, node: ast.expr) -> int:
        """Where `node` begins in the expression."""
        return self.token(node.col_offset).at

    def after(self, node: ast.expr, *texts: str) -> Token:
        """The first token behind `node` that is one of these."""
        behind = self.tokens[bisect_right(self.columns, (node.end_col_offset or 0) - 1) :]
        return next((token for token in behind if token.text in texts), self.tokens[-1])

    def text(self, node: ast.expr) -> str:
        """What the line says there: fixed forms are compared to the letter."""
        return self.line[node.col_offset : node.end_col_offset]

    def unexpected(self, token: Token, wanted: str = "a number, a quoted name, data[...], a helper or (") -> NoReturn:
        """Refuse a token that does not belong here."""
        found = f"{token.text[:40]} is not expected" if token.kind != END else "the check ends too early"
        raise refuse(self.expression, token.at, found, f"here could stand: {wanted}; {EXAMPLES}")

    # -- every node that is part of the language ------------------------------------

    def node(self, node: ast.expr) -> language.Node:
        """Our node for Python's."""
        match node:
            case ast.Constant(value=bool(value)):
                return language.Flag(self.at(node), value)
            case ast.Constant(value=int(value) | float(value)):
                return language.Number(self.at(node), value)
            case ast.Constant(value=str(value)):
                return language.QuotedText(self.at(node), value)
            case ast.Name() | ast.Constant():
                return self.name(node)
            case ast.BoolOp():
                word = "and" if isinstance(node.op, ast.And) else "or"
                return language.Logic(self.at(node), word, tuple(map(self.node, node.values)))
            case ast.UnaryOp(op=ast.Not()):
                return language.Not(self.at(node), self.node(node.operand))
            case ast.UnaryOp() if type(node.op) in _SIGNED:
                return language.Sign(self.at(node), _SIGNED[type(node.op)], self.node(node.operand))
            case ast.BinOp():
                return self.arithmetic(node)
            case ast.Compare():
                return self.comparison(node)
            case ast.Subscript():
                return self.subscript(node)
            case ast.Call():
                return self.call(node)
            case ast.Dict() if node.keys and not any(node.keys):
                return language.Merge(self.at(node), tuple(map(self.node, node.values)))
            case ast.ListComp():
                return self.loop(node, node.generators, None, node.elt)
            case ast.DictComp():
                return self.loop(node, node.generators, node.key, node.value)
        return self.other(node)

    def other(self, node: ast.expr) -> NoReturn:
        """What Python has and checks have not, with its place."""
        if isinstance(node, ast.List | ast.Set | ast.Dict):
            at = self.tokens[bisect_right(self.columns, node.col_offset)].at
            hint = f"compare one number; {EXAMPLES}"
            raise refuse(self.expression, at, "lists and sets of values are not part of checks", hint)
        if isinstance(node, ast.IfExp):
            self.unexpected(self.after(node.body, "if"))
        if isinstance(node, ast.Attribute):
            self.unexpected(self.after(node.value, "."))
        self.unexpected(self.token(node.col_offset))

    def name(self, node: ast.Name | ast.Constant) -> language.Node:
        word = self.text(node)
        if word == "data":
            return language.Data(self.at(node))
        if word in self.bound:
            return language.Variable(self.at(node), word)
        raise refuse(self.expression, self.at(node), f"unknown name {word[:40]}", f"metrics are data[...]; {EXAMPLES}")

    def arithmetic(self, node: ast.BinOp) -> language.Node:
        """One level of precedence as one node, left to right."""
        at, signs = self.at(node), next((level for level in _LEVELS if type(node.op) in level), {})
        if isinstance(node.op, ast.Pow):
            power = self.after(node.left, "**").at
            raise refuse(self.expression, power, "there are no powers here", "multiply instead")
        rest: list[tuple[str, language.Node]] = []
        first: ast.expr = node
        while isinstance(first, ast.BinOp) and type(first.op) in signs:
            rest.insert(0, (signs[type(first.op)], self.node(first.right)))
            first = first.left
        return language.Arithmetic(at, self.node(first), tuple(rest)) if rest else self.other(node)

    def comparison(self, node: ast.Compare) -> language.Node:
        if any(type(operator) not in _COMPARED for operator in node.ops):
            self.unexpected(self.after(node.left, "is"))
        signs = [_COMPARED[type(operator)] for operator in node.ops]
        rest = tuple(zip(signs, map(self.node, node.comparators), strict=True))
        return language.Compare(self.at(node), self.node(node.left), rest)

    def subscript(self, node: ast.Subscript) -> language.Node:
        if isinstance(node.value, ast.Name) and node.value.id == "data":
            return language.MetricName(self.at(node), self.quoted(node.slice, "data [ {} ]", node))
        at = self.after(node.value, "[").at
        series = self.node(node.value)
        if isinstance(series, language.StepValue):
            raise refuse(self.expression, at, "a point has no parts", 'data["METRIC"]["STEP"] is one number')
        return language.StepValue(at, series, self.node(node.slice))

    def quoted(self, name: ast.expr, form: str, node: ast.expr) -> str:
        """The name of a metric, where `node` is written like `form` and not otherwise."""
        if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
            self.unexpected(self.token(name.col_offset), "the quoted name of a metric")
        if self.text(node) != form.format(ascii(name.value)):
            self.unexpected(self.token(name.col_offset))
        return name.value

    def call(self, node: ast.Call) -> language.Node:
        at, word = self.at(node), self.text(node.func)
        if word == "data . get" and node.args and not node.keywords:
            form = "data . get ( {} )" if len(node.args) == 1 else "data . get ( {} , {{ }} )"
            return language.MetricName(at, self.quoted(node.args[0], form, node), optional=True)
        if not isinstance(node.func, ast.Name) or word in _WORDS or node.func.col_offset != node.col_offset:
            self.other(node.func)
        if word in ("range", "map") and (node.keywords or self.text(node).endswith(", )")):
            self.unexpected(self.token((node.end_col_offset or 1) - 1))
        if word == "range" and len(node.args) in (1, 2):
            start = [language.Number(at, 0), *map(self.node, node.args)][-2:]
            return language.Steps(at, *start)
        if word == "map":  # steps are whole numbers here, so str, int and float change nothing
            if len(node.args) != 2 or not self.text(node).startswith(_CONVERTED):
                self.unexpected(self.after(node.func, "("), "str, as in set(map(str, range(1, 21)))")
            return self.node(node.args[1])
        if any(keyword.arg is None for keyword in node.keywords):
            self.unexpected(self.after(node.func, "**"))
        words = [(keyword.arg or "", self.node(keyword.value)) for keyword in node.keywords]
        return language.HelperCall(at, word, tuple(map(self.node, node.args)), tuple(words))

    def loop(
        self, node: ast.expr, loops: list[ast.comprehension], key: ast.expr | None, value: ast.expr
    ) -> language.Node:
        """A series made from a series: one `for`, over it or over its items."""
        if self.bound or len(loops) > 1 or len(loops[0].ifs) > 1 or loops[0].is_async:
            at = self.tokens[bisect_right(self.columns, node.col_offset)].at
            raise refuse(self.expression, at, "a for inside a for", "one loop, with one if, in one expression")
        target, source = loops[0].target, loops[0].iter
        names = tuple(self.text(target).strip("( )").split(" , "))
        pairs = isinstance(source, ast.Call) and self.text(source).endswith(" . items ( )")
        if isinstance(source, ast.Call) and isinstance(source.func, ast.Attribute) and pairs:
            source = source.func.value
        made = self.node(source)
        fits = f" for {' , '.join(names)} in " in self.text(node) and not _WORDS.intersection(names)
        if not fits or len(names) != (2 if pairs else 1) or len(set(names)) != len(names):
            hint = "for k, v in SERIES.items(), or for s in SERIES"
            raise refuse(self.expression, self.at(node), "the for does not fit", hint)
        self.bound = names
        parts = [self.node(part) if part else None for part in (key, *loops[0].ifs[:1])]
        tree = language.Loop(
            self.at(node), parts[0], self.node(value), names, made, pairs, parts[1] if loops[0].ifs else None
        )
        self.bound = ()
        return tree


def _ends_operand(token: Token) -> bool:
    """Whether a sign behind this token has something on its left."""
    return (
        token.kind in (NUMBER, TEXT)
        or token.text in (")", "]", "}")
        or (token.kind == NAME and token.text not in _OPERATORS)
    )
