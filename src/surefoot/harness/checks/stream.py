"""Moving along the tokens of one expression, never deeper than allowed."""

from __future__ import annotations

from surefoot.harness.checks.limits import MAX_DEPTH
from surefoot.harness.checks.problems import CheckSyntaxError, refuse
from surefoot.harness.checks.tokens import END, NAME, SIGN, Token, tokenize

EXAMPLES = 'for example: mean(data["train/loss"], -6, -1) < 1.5'


class Stream:
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
