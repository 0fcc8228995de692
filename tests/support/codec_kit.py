"""A codec for tests that need no tokenizer: every prompt is one token, and a subclass says what tokens are as text."""

from __future__ import annotations

from collections.abc import Sequence


class OneTokenPrompts:
    """Ends at token 2; ids below 50."""

    stop_ids = frozenset({2})
    pad_token_id = 0
    vocab_size = 50

    def encode_prompt(self, messages: Sequence[object]) -> tuple[int, ...]:
        return (4,)
