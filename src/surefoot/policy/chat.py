"""Messages to tokens once; tokens to text for people and graders; never back again.

Owns       the one place where text becomes token ids.
Promises   completions are never re-tokenised: what was sampled is what is trained. The
           template is checked before training: it opens the assistant's turn. A message that spells
           one of the model's own tokens is refused where a template is used; a base model gets its text raw.
Never      decodes in order to encode again.

Read next: `template_limits.py`, why a template cannot run away.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from surefoot.errors import ModelError, TaskError, ToolError
from surefoot.policy.chat_replies import ReplyEncoder
from surefoot.policy.template_limits import render_within_limits
from surefoot.policy.template_process import Rendering
from surefoot.policy.templates import fitting
from surefoot.protocols import ToolSpec


class ChatCodec:
    """A tokenizer behind two verbs.

    Args:
        tokenizer: a Hugging Face tokenizer.
        stop_ids: every id that ends a turn.
        vocab_size: embedding rows of the model.
        system_prompt: put before messages that bring no system message of their own.
        tools: what the template shows of them, in the form of `protocols.ToolSpec`; empty when it shows none.
        max_reply_tokens: longest tool answer; 0 when there are no tools.
    """

    def __init__(
        self, tokenizer: Any, stop_ids: frozenset[int], vocab_size: int, system_prompt: str = "", *,
        tools: Sequence[ToolSpec] = (), max_reply_tokens: int = 0,
    ) -> None:  # fmt: skip
        self._tokenizer, self.stop_ids, self.vocab_size = tokenizer, stop_ids, vocab_size
        self.system_prompt = system_prompt
        self._tools = [_schema(tool) for tool in tools]
        self.token_count = len(tokenizer)
        pad = tokenizer.pad_token_id  # 0 is a valid id, so no truthiness here
        self.pad_token_id: int = min(stop_ids) if pad is None else pad
        self._special = _any_of(special_texts(tokenizer))
        self._refuse_forging_tools()
        self._check_template()
        self._replies = self._reply_encoder(max_reply_tokens) if max_reply_tokens else None

    def encode_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[str] | None = None
    ) -> tuple[int, ...]:
        """Chat messages, with the assistant's header, as token ids.

        Args:
            tools: names of those that the template is to show; all of them when left out.
        """
        full = list(messages)
        if self.system_prompt and full and full[0].get("role") != "system":
            full = [{"role": "system", "content": self.system_prompt}, *full]
        if self._tokenizer.chat_template is None:
            return self._encode_plain(full)
        self._refuse_forged_tokens(full)
        return self._render(full, generation_prompt=True, tools=tools)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def encode_replies(self, answers: Sequence[str]) -> tuple[int, ...]:
        """What tools said, from behind the assistant's stop token to the header of its next turn."""
        if self._replies is None:
            raise ModelError("this codec was made without tools", "their answers have no form", "give max_reply_tokens")
        return self._replies.encode(answers)

    @property
    def has_template(self) -> bool:
        """Whether messages are rendered, or stand one after the other as they are."""
        return self._tokenizer.chat_template is not None

    @property
    def reply_overhead(self) -> int:
        """Tokens that the template writes around one tool answer; 0 without tools."""
        return 0 if self._replies is None else self._replies.overhead

    def call_text(self) -> str | None:
        """How the template writes a call of `probe` with x = "y", as graders read it; None if it writes none."""
        asked: list[dict[str, Any]] = [{"role": "user", "content": "probe"}]
        call = {"type": "function", "function": {"name": "probe", "arguments": {"x": "y"}}}
        try:
            before = self._text(asked, True)
            after = self._text([*asked, {"role": "assistant", "content": "", "tool_calls": [call]}], False)
        except ModelError:
            return None  # it knows no calls; what it knows is checked elsewhere
        said = after[len(before) :] if after.startswith(before) else ""
        return self.decode(self._tokenizer(said, add_special_tokens=False).input_ids) if "probe" in said else None

    def render(self, messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool = True) -> str:
        """The template's text of these messages, tools included: for a person to look at, never to be tokenised."""
        return self._text(messages, generation_prompt)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Every token as text, those that are not text too: what the model is really given, for a person to look at."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def _reply_encoder(self, max_tokens: int) -> ReplyEncoder:
        if self._tokenizer.chat_template is None:
            raise ModelError(
                "a model without a chat template was given tools",
                "nothing tells it where a tool's answer begins and ends",
                'use an instruct model, or set chat_template = "builtin:chatml_tools" where it fits, or a file',
            )
        self._check_marks()
        return ReplyEncoder(
            self._tokenizer, self._text, stop_ids=self.stop_ids,
            special_ids=structural_ids(self._tokenizer), max_tokens=max_tokens,
        )  # fmt: skip

    def _check_marks(self) -> None:
        """A call that decoding swallows would never be seen; tools that the template hides would never be called."""
        call = '<tool_call>{"name": "probe", "arguments": {}}</tool_call>'
        seen = self.decode(self._tokenizer(call, add_special_tokens=False).input_ids)
        if seen != call:
            raise ModelError(
                f"a tool call of this model reads {seen!r} instead of {call!r}",
                "its marks are lost when tokens become text, so no call would ever be made",
                "use a model whose tokenizer writes <tool_call> as text",
            )
        if self._tools:
            probe = [{"role": "user", "content": "probe"}]
            names = [tool["function"]["name"] for tool in self._tools]
            shown = self._text(probe, True)
            missing = [name for name in names if name not in shown]
            if missing:
                usable = [f'"{name}"' for name in fitting(self._tokenizer)]
                raise ModelError(
                    f"the chat template does not show the tool {missing[0]!r} to the model",
                    "it would have to guess the tools' names and arguments",
                    f"set chat_template = {' or '.join(usable) or 'a file whose template renders `tools`'}; or "
                    "tools.in_prompt = false where the policy knows the tools already",
                )

    def _encode_plain(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """A base model has no template: contents one after the other, as they stand."""
        text = "\n".join(str(message["content"]) for message in messages)
        return tuple(self._tokenizer(text).input_ids)

    def _render(
        self, messages: Sequence[Mapping[str, Any]], *, generation_prompt: bool, tools: Sequence[str] | None = None
    ) -> tuple[int, ...]:
        text = self._text(messages, generation_prompt, tools)
        return tuple(self._tokenizer(text, add_special_tokens=False).input_ids)

    def _text(
        self, messages: Sequence[Mapping[str, Any]], generation_prompt: bool, tools: Sequence[str] | None = None
    ) -> str:
        shown = [tool for tool in self._tools if tools is None or tool["function"]["name"] in tools]
        given = sum(len(str(message.get("content") or "")) for message in messages) + len(str(self._tools))
        return render_within_limits(
            lambda: str(
                self._tokenizer.apply_chat_template(
                    list(messages), tools=shown or None, add_generation_prompt=generation_prompt, tokenize=False
                )
            ),
            given,
            lambda: Rendering(
                self._tokenizer.get_chat_template(None, shown or None), list(messages), shown or None,
                generation_prompt, self._tokenizer.special_tokens_map,
            ),
        )  # fmt: skip

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

    def _refuse_forging_tools(self) -> None:
        """What a server says of its tools stands in the prompt: it must not end a turn or open one."""
        for tool in self._tools:
            told = json.dumps(tool, ensure_ascii=False)
            if found := self._special and self._special.search(told):
                raise ToolError(
                    f"the description of {tool['function']['name']!r} spells the model's own token {found.group()!r}",
                    "in the prompt it would not be read as text: it ends the turn, or speaks for somebody else",
                    "leave the tool out (`tools` in the servers file), or ask whoever runs the server",
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


def _schema(tool: ToolSpec) -> dict[str, Any]:
    """As OpenAI writes tools, which is what templates read."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def structural_ids(tokenizer: Any) -> frozenset[int]:
    """Tokens that are not text: special ones, and added ones that look like marks, such as <tool_call>."""
    added = tokenizer.added_tokens_decoder.items()
    marks = (number for number, token in added if token.special or token.content.startswith("<"))
    return frozenset({*tokenizer.all_special_ids, *marks})


def special_texts(tokenizer: Any) -> frozenset[str]:
    """How the tokens that are not text are written: end, padding, and the headers of a chat."""
    added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
    return frozenset({*tokenizer.all_special_tokens, *added})


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Finds the first of these texts, the longest where several begin; None when there is nothing to find."""
    wanted = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, wanted))) if wanted else None
