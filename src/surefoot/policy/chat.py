"""Messages to tokens once; tokens to text for people and graders; never back again.

Owns       the one place where text becomes token ids.
Promises   completions are never re-tokenised: what was sampled is what is trained. The
           template is checked before training: it opens the assistant's turn. A message that spells
           one of the model's own tokens is refused where a template is used; a base model gets its text raw.
Never      decodes in order to encode again.

Read next: `template_limits.py`, why a template cannot run away.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from surefoot.errors import ModelError, TaskError
from surefoot.policy.template_limits import render_within_limits


class ChatCodec:
    """A tokenizer behind two verbs.

    Args:
        tokenizer: a Hugging Face tokenizer.
        stop_ids: every id that ends a turn.
        vocab_size: embedding rows of the model.
        system_prompt: put before messages that bring no system message of their own.
    """

    def __init__(self, tokenizer: Any, stop_ids: frozenset[int], vocab_size: int, system_prompt: str = "") -> None:
        self._tokenizer, self.stop_ids, self.vocab_size = tokenizer, stop_ids, vocab_size
        self.system_prompt = system_prompt
        self.token_count = len(tokenizer)
        pad = tokenizer.pad_token_id  # 0 is a valid id, so no truthiness here
        self.pad_token_id: int = min(stop_ids) if pad is None else pad
        self._special = _any_of(special_texts(tokenizer))
        self._check_template()

    def encode_prompt(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Chat messages, with the assistant's header, as token ids."""
        full = list(messages)
        if self.system_prompt and full and full[0].get("role") != "system":
            full = [{"role": "system", "content": self.system_prompt}, *full]
        if self._tokenizer.chat_template is None:
            return self._encode_plain(full)
        self._refuse_forged_tokens(full)
        return self._render(full, generation_prompt=True)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _encode_plain(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """A base model has no template: contents one after the other, as they stand."""
        text = "\n".join(str(message["content"]) for message in messages)
        return tuple(self._tokenizer(text).input_ids)

    def _render(self, messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool) -> tuple[int, ...]:
        given = sum(len(str(message.get("content") or "")) for message in messages)
        text = render_within_limits(
            lambda: str(
                self._tokenizer.apply_chat_template(
                    list(messages), add_generation_prompt=generation_prompt, tokenize=False
                )
            ),
            given,
        )
        return tuple(self._tokenizer(text, add_special_tokens=False).input_ids)

    def _refuse_forged_tokens(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """A text that spells one of the model's own tokens would become that token, and end or open turns."""
        for message in messages:
            content = message.get("content")
            if isinstance(content, str) and (found := self._special and self._special.search(content)):
                raise TaskError(
                    f"a {message.get('role')} message spells the model's own token {found.group()!r}: "
                    f"{content[max(0, found.start() - 40) : found.end() + 40]!r}",
                    "it would not be read as text: it ends the turn, or speaks for somebody else",
                    "write it differently (a space inside is enough), or leave the task out; "
                    "a prompt that was rendered beforehand is given as plain messages",
                )

    def _check_template(self) -> None:
        if self._tokenizer.chat_template is None:
            return
        probe = [{"role": "user", "content": "probe"}]
        bare, opened = (self._render(probe, generation_prompt=flag) for flag in (False, True))
        if opened[: len(bare)] != bare or len(opened) == len(bare):
            raise ModelError(
                "the chat template does not open an assistant turn (add_generation_prompt changes nothing)",
                "the model would continue the user's text instead of answering",
                "add the generation-prompt branch to the chat template",
            )


def special_texts(tokenizer: Any) -> frozenset[str]:
    """How the tokens that are not text are written: end, padding, and the headers of a chat."""
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return frozenset({*tokenizer.all_special_tokens, *added})


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Finds the first of these texts, the longest where several begin; None when there is nothing to find."""
    wanted = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, wanted))) if wanted else None
