"""Chat templates that come with surefoot, chosen by name: `chat_template = "builtin:chatml_tools"`.

Owns       the files in `assets/templates`, and which of them fits which tokenizer.
Promises   a template whose turn marks the tokenizer does not know as tokens is refused, with those that would fit: its
           marks would be plain text, and no turn would ever end.
Never      looks at a template that the user or the model brought: `chat.py` does.
"""

from __future__ import annotations

import difflib
import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.config.rules import BUILTIN, TEMPLATES
from surefoot.errors import ModelError, TaskError, ToolError, ToolFailedError
from surefoot.learner.rendering import Rendering, render_within_limits
from surefoot.protocols import ToolSpec
from surefoot.system.text import spelled_out

TEMPLATE_FOLDER = Path(__file__).parent.parent / "assets" / "templates"
_CHATML, _LLAMA, _OWN = ("<|im_start|>", "<|im_end|>"), ("<|start_header_id|>", "<|eot_id|>"), ("<|user|>", "<|end|>")
_MARKS = {"chatml_tools": (_CHATML, _OWN), "hermes_tools": (_CHATML,), "llama_tools": (_LLAMA,)}
"""Name -> the sets of marks of which the tokenizer has to know one as tokens that are not text."""


def template_text(chat_template: str, base: Path) -> str:
    """The template that the key `chat_template` means: one of ours, or a file."""
    if chat_template.startswith(BUILTIN):
        return (TEMPLATE_FOLDER / f"{chat_template.removeprefix(BUILTIN)}.jinja").read_text(encoding="utf-8")
    path = base / chat_template
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(
            f"chat_template {path} cannot be read: {error}", "messages become tokens by it",
            f"name a text file, or one of {', '.join(BUILTIN + name for name in TEMPLATES)}",
        ) from error  # fmt: skip


def fitting(tokenizer: Any) -> list[str]:
    """Names of our templates whose marks are tokens of this tokenizer, the one to try first in front."""
    known = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    known |= set(tokenizer.all_special_tokens)
    return [BUILTIN + name for name in TEMPLATES if any(all(mark in known for mark in marks) for marks in _MARKS[name])]


def refuse_misfit(chat_template: str | None, tokenizer: Any) -> None:
    """A template of ours for another kind of tokenizer is refused before anything is rendered with it."""
    if chat_template is None or not chat_template.startswith(BUILTIN):
        return
    usable = fitting(tokenizer)
    if chat_template in usable:
        return
    marks = " or ".join(" ".join(each) for each in _MARKS[chat_template.removeprefix(BUILTIN)])
    raise ModelError(
        f"chat_template = {chat_template} writes turns with {marks}, which are no tokens of this model",
        "they would be read as plain text: no turn would begin or end",
        f"use {' or '.join(usable)}" if usable else "name a file with a template in this model's own form",
    )


# -- What tools said, as tokens to append: never a token that opens or ends a turn, never the history again
# Owns       the tokens between two turns: the rest of the assistant's turn, the tools' answers, the next header.
# Promises   what the template writes around answers is found once and checked: a template that rewrites what was said
# before, or does not end the assistant's turn with a stop token, is refused with the turn and the difference;
# text from a tool never becomes one of the model's own tokens, however it is written; a long answer is cut
# where the reader can see it.
# Never      encodes a completion.


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


# -- Messages to tokens once; tokens to text for people and graders; never back again -------------
# Owns       the one place where text becomes token ids.
# Promises   completions are never re-tokenised: what was sampled is what is trained. The
# template is checked before training: it opens the assistant's turn. A message that spells
# one of the model's own tokens is refused where a template is used; a base model gets its text raw.
# Never      decodes in order to encode again.


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
