"""What tools said, as tokens to append: never a token that opens or ends a turn, never the history again.

Owns       the tokens between two turns: the rest of the assistant's turn, the tools' answers, the next header.
Promises   what the template writes around answers is found once and checked: a template that rewrites what was said
           before, or does not end the assistant's turn with a stop token, is refused with the turn and the difference;
           text from a tool never becomes one of the model's own tokens, however it is written; a long answer is cut
           where the reader can see it.
Never      encodes a completion.

Read next: `chat.py`, for prompts.
"""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from surefoot.errors import ModelError, ToolFailedError
from surefoot.safe_text import spelled_out

Render = Callable[[Sequence[Mapping[str, Any]], bool], str]
"""Messages, and whether the assistant's header comes last: the template's text."""

THOUGHT = "<think>\nprobe thought\n</think>\n\n"
FORGED = "special_token_in_tool_text"
"""Failure reason: a tool's text cannot be written without the model's own tokens."""


class ReplyEncoder:
    """Tokens of tools' answers.

    Args:
        special_ids: ids that are not text.
        max_tokens: of one answer.
    """

    def __init__(
        self, tokenizer: Any, render: Render, *, stop_ids: frozenset[int], special_ids: frozenset[int], max_tokens: int
    ) -> None:
        self._tokenizer, self._render = tokenizer, render
        self._stop_ids, self._special_ids, self.max_tokens = stop_ids, special_ids, max_tokens
        self._frames: dict[int, list[tuple[int, ...]]] = {}
        texts = (str(tokenizer.convert_ids_to_tokens(i)) for i in special_ids)
        self._spellings = sorted(filter(None, texts), key=len, reverse=True)
        self._instead_of_unknown = list(tokenizer("?", add_special_tokens=False).input_ids)
        check_history(render)
        self._frame(1)

    @property
    def overhead(self) -> int:
        """Tokens that the template writes around one answer."""
        return sum(len(piece) for piece in self._frame(1))

    def encode(self, answers: Sequence[str]) -> tuple[int, ...]:
        """Everything between the assistant's stop token and the next sampled token."""
        first, *others = self._frame(len(answers))
        ids = list(first)
        for answer, piece in zip(answers, others, strict=True):
            ids += [*self._text(answer), *piece]
        return tuple(ids)

    def _text(self, answer: str) -> list[int]:
        """One answer, cut to its limit; none of its tokens is one of the model's own."""
        ids = self._plain(answer)
        if len(ids) > self.max_tokens:
            note = f"\n[cut at {self.max_tokens} of {len(ids)} tokens]"
            kept = str(self._tokenizer.decode(ids[: max(0, self.max_tokens - len(self._plain(note)))]))
            ids = (self._plain(kept.rstrip("\ufffd")) + self._plain(note))[: self.max_tokens]
        return ids

    def _plain(self, text: str) -> list[int]:
        text = self._neutral(spelled_out(text))
        ids = list(self._tokenizer(text, add_special_tokens=False).input_ids) if text else []
        unknown = self._tokenizer.unk_token_id
        if unknown in self._special_ids and unknown in ids:
            ids = [piece for token in ids for piece in (self._instead_of_unknown if token == unknown else [token])]
        forged = self._special_ids.intersection(ids)
        if forged:
            raise ToolFailedError(
                f"a tool's answer became the model's own tokens {sorted(forged)[:5]}: {text[:80]!r}",
                "it would open or end turns in the tool's name", "report the tokenizer; its text cannot be kept apart",
                FORGED,
            )  # fmt: skip
        return ids

    def _neutral(self, text: str) -> str:
        """Break up every spelling of a token that is not text, until none is left."""
        for _ in range(8):
            found = [spelling for spelling in self._spellings if spelling in text]
            if not found:
                break
            for spelling in found:
                text = text.replace(spelling, f"{spelling[0]}\\{spelling[1:]}" if len(spelling) > 1 else "?")
        return text

    def _frame(self, n: int) -> list[tuple[int, ...]]:
        """What the template writes before, between and after `n` answers, as tokens; n + 1 pieces."""
        if n not in self._frames:
            self._frames[n] = self._find_frame(n)
        return self._frames[n]

    def _find_frame(self, n: int) -> list[tuple[int, ...]]:
        said, *marks = (f"mark{secrets.token_hex(8)}" for _ in range(n + 1))
        base = [{"role": "user", "content": "probe"}, {"role": "assistant", "content": said}]
        tools = [{"role": "tool", "content": mark, "name": "probe"} for mark in marks]
        text = self._render([*base, *tools], True)
        pieces = []
        for mark in (said, *marks):
            before, found, text = text.partition(mark)
            if not found or mark in text:
                raise _misfit("it does not show a tool's answer exactly once", before[-80:])
            pieces.append(before)
        first, *others = [self._tokenizer(piece, add_special_tokens=False).input_ids for piece in (*pieces[1:], text)]
        return [self._after_stop(first), *map(tuple, others)]

    def _after_stop(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The completion brought the stop token itself."""
        places = [place for place, token in enumerate(ids) if token in self._stop_ids]
        if not places:
            raise _misfit("it does not end the assistant's turn with a token that stops the model", "")
        return tuple(ids[places[0] + 1 :])


def check_history(render: Render) -> None:
    """Refuse a template that changes what was said before when more is said."""
    talk: list[dict[str, Any]] = [{"role": "user", "content": "first question"}]
    for turn in range(2):
        talk += [
            {"role": "assistant", "content": f"{THOUGHT}I ask tool {turn}"},
            {"role": "tool", "content": f"answer {turn}", "name": "probe"},
        ]
    for turn in range(1, len(talk)):
        before, after = render(talk[:turn], False), render(talk[: turn + 1], False)
        if not after.startswith(before):
            raise ModelError(
                f"the chat template rewrites history: message {turn} changes what stood before it\n"
                + _difference(before, after),
                "the model would be trained on another history than the one it sampled with",
                "set chat_template to a file with a template that only appends (keep reasoning in earlier turns)",
            )


def _difference(before: str, after: str) -> str:
    shown = [line for line in difflib.ndiff(before.splitlines(), after.splitlines()) if line[:1] in "-?"]
    return "\n".join(f"    {line}" for line in shown[:8])


def _misfit(what: str, near: str) -> ModelError:
    return ModelError(
        f"the chat template cannot be used with tools: {what}" + (f" (near {near!r})" if near else ""),
        "tools' answers are appended as tokens, so what the template writes around them has to be known",
        'set chat_template = "builtin:chatml_tools" ("builtin:llama_tools" for a Llama), or a file that knows tools',
    )
