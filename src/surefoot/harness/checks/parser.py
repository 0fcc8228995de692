"""Tokens to a tree: a precedence parser for the check language, and nothing but the check language.

    or < and < not < comparisons, in < + - < * / // % < sign < [step] < brackets

Promises   never deeper than `MAX_DEPTH`; a tree that can be walked without fear of recursion; the exact place of
           whatever it refuses.
Never      knows attributes: `data.get("x", {})` and `SERIES.items()` are two fixed forms, spelled out below.

Read next: `kinds.py`, which says whether the parts fit together.
"""

from __future__ import annotations

from collections.abc import Callable

from surefoot.harness.checks import nodes as n
from surefoot.harness.checks.problems import refuse
from surefoot.harness.checks.stream import EXAMPLES, Stream
from surefoot.harness.checks.tokens import END, NAME, NUMBER, SIGN, TEXT, Token

COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
_WORDS = {"and", "or", "not", "in", "for", "if", "True", "False", "data"}
_CONVERSIONS = ("str", "int", "float")
_LEVELS = (("+", "-"), ("*", "/", "//", "%"))
_Rule = Callable[[], n.Node]


def parse(expression: str) -> n.Node:
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


class _Parser(Stream):
    def __init__(self, expression: str) -> None:
        super().__init__(expression)
        self.bound: list[str] = []

    # -- precedence, lowest first -----------------------------------------------

    def choice(self) -> n.Node:
        self.deeper()
        tree = self.logic("or", lambda: self.logic("and", self.negation))
        self.depth -= 1
        return tree

    def logic(self, word: str, operand: _Rule) -> n.Node:
        at, operands = self.now.at, [operand()]
        while self.sees(word):
            self.take()
            operands.append(operand())
        return operands[0] if len(operands) == 1 else n.Logic(at, word, tuple(operands))

    def negation(self) -> n.Node:
        if not self.sees("not"):
            return self.comparison()
        self.deeper()
        token = self.take()
        tree = n.Not(token.at, self.negation())
        self.depth -= 1
        return tree

    def comparison(self) -> n.Node:
        at, first, rest = self.now.at, self.arithmetic(0), []
        while (operator := self.comparison_sign()) is not None:
            rest.append((operator, self.arithmetic(0)))
        return n.Compare(at, first, tuple(rest)) if rest else first

    def comparison_sign(self) -> str | None:
        if self.sees(*COMPARISONS, "in"):
            return self.take().text
        if self.sees("not"):
            self.take()
            self.expect("in")
            return "not in"
        return None

    def arithmetic(self, level: int) -> n.Node:
        if level == len(_LEVELS):
            return self.signed()
        at, first, rest = self.now.at, self.arithmetic(level + 1), []
        while self.sees(*_LEVELS[level]):
            rest.append((self.take().text, self.arithmetic(level + 1)))
        if self.sees("**"):
            raise refuse(self.expression, self.now.at, "there are no powers here", "multiply instead")
        return n.Arithmetic(at, first, tuple(rest)) if rest else first

    def signed(self) -> n.Node:
        if not self.sees("-", "+"):
            return self.indexed()
        self.deeper()
        token = self.take()
        tree = n.Sign(token.at, token.text, self.signed())
        self.depth -= 1
        return tree

    def indexed(self) -> n.Node:
        tree = self.primary()
        if self.sees("["):
            at = self.take().at
            tree = n.Point(at, tree, self.choice())
            self.expect("]")
        if self.sees("["):
            raise refuse(self.expression, self.now.at, "a point has no parts", 'data["METRIC"]["STEP"] is one number')
        return tree

    # -- what stands alone --------------------------------------------------------

    def primary(self) -> n.Node:
        token = self.now
        if token.kind == NUMBER and not isinstance(token.value, str):
            self.take()
            return n.Number(token.at, token.value)
        if token.kind == TEXT:
            self.take()
            return n.Text(token.at, str(token.value))
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

    def word(self) -> n.Node:
        token = self.take()
        if token.text in ("True", "False"):
            return n.Flag(token.at, token.text == "True")
        if token.text == "data":
            return self.data(token)
        if self.sees("(") and token.text not in _WORDS:
            return self.call(token)
        if token.text in self.bound:
            return n.Variable(token.at, token.text)
        raise refuse(self.expression, token.at, f"unknown name {token.text[:40]}", f"metrics are data[...]; {EXAMPLES}")

    def data(self, token: Token) -> n.Node:
        if self.sees("["):
            self.take()
            name = self.quoted()
            self.expect("]")
            return n.Metric(token.at, name)
        if self.sees("."):
            self.take()
            self.expect("get")
            self.expect("(")
            name = self.quoted()
            if self.sees(","):
                for sign in ",{}":
                    self.expect(sign)
            self.expect(")")
            return n.Metric(token.at, name, optional=True)
        return n.Data(token.at)

    def quoted(self) -> str:
        if self.now.kind != TEXT:
            raise self.unexpected("the quoted name of a metric")
        return str(self.take().value)

    def call(self, token: Token) -> n.Node:
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
        args: list[n.Node] = []
        keywords: list[tuple[str, n.Node]] = []
        while not self.sees(")"):
            self.argument(args, keywords)
            if not self.sees(")"):
                self.expect(",")
        self.take()
        return n.Call(token.at, token.text, tuple(args), tuple(keywords))

    def argument(self, args: list[n.Node], keywords: list[tuple[str, n.Node]]) -> None:
        following = self.tokens[self.position + 1] if self.now.kind != END else self.now
        if self.now.kind == NAME and following.kind == SIGN and following.text == "=":
            name = self.take().text
            self.take()
            keywords.append((name, self.choice()))
        elif keywords:
            raise self.unexpected("NAME=VALUE: an argument without a name cannot follow one with a name")
        else:
            args.append(self.choice())

    def steps(self, token: Token) -> n.Node:
        start: n.Node = n.Number(token.at, 0)
        end = self.choice()
        if self.sees(","):
            self.take()
            start, end = end, self.choice()
        self.expect(")")
        return n.Steps(token.at, start, end)

    # -- series made from series ----------------------------------------------------

    def braces(self) -> n.Node:
        at = self.expect("{").at
        if self.sees("**"):
            parts = []
            while self.sees("**"):
                self.take()
                parts.append(self.choice())
                if self.sees(","):
                    self.take()
            self.expect("}")
            return n.Merge(at, tuple(parts))
        self.find_names()
        key = self.choice()
        self.expect(":")
        return self.loop(at, key, self.choice(), "}")

    def made_list(self) -> n.Node:
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

    def loop(self, at: int, key: n.Node | None, value: n.Node, close: str) -> n.Node:
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
        return n.Loop(at, key, value, tuple(names), source, pairs, condition)

    def name(self) -> str:
        if self.now.kind != NAME or self.now.text in _WORDS:
            raise self.unexpected("a name")
        return self.take().text
