"""Messages to tokens once; tokens to text for people and graders; never back again.

Owns       the one place where text becomes token ids.
Promises   completions are never re-tokenised: what was sampled is what is trained. The
           template is checked before training: it opens the assistant's turn.
Never      decodes in order to encode again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from surefoot.errors import ModelError


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
        self._check_template()

    def encode_prompt(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Chat messages, with the assistant's header, as token ids."""
        full = list(messages)
        if self.system_prompt and full and full[0].get("role") != "system":
            full = [{"role": "system", "content": self.system_prompt}, *full]
        if self._tokenizer.chat_template is None:
            return self._encode_plain(full)
        return self._render(full, generation_prompt=True)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _encode_plain(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """A base model has no template: contents one after the other, as they stand."""
        text = "\n".join(str(message["content"]) for message in messages)
        return tuple(self._tokenizer(text).input_ids)

    def _render(self, messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool) -> tuple[int, ...]:
        try:
            ids = self._tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=generation_prompt, tokenize=True, return_dict=False
            )
        except TemplateError as error:
            raise ModelError(
                f"the chat template refuses {messages[0].get('role')!r}: {error}",
                "what cannot be rendered cannot be asked",
                "mend chat_template.jinja, or use messages that it knows",
            ) from error
        return tuple(ids)

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
