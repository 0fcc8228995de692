"""Chat templates that come with surefoot, chosen by name: `chat_template = "builtin:chatml_tools"`.

Owns       the files in `assets/templates`, and which of them fits which tokenizer.
Promises   a template whose turn marks the tokenizer does not know as tokens is refused, with those that would fit: its
           marks would be plain text, and no turn would ever end.
Never      looks at a template that the user or the model brought: `chat.py` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surefoot.config_rules import BUILTIN, TEMPLATES
from surefoot.errors import ModelError

FOLDER = Path(__file__).parent.parent / "assets" / "templates"
_CHATML, _LLAMA, _OWN = ("<|im_start|>", "<|im_end|>"), ("<|start_header_id|>", "<|eot_id|>"), ("<|user|>", "<|end|>")
_MARKS = {"chatml_tools": (_CHATML, _OWN), "hermes_tools": (_CHATML,), "llama_tools": (_LLAMA,)}
"""Name -> the sets of marks of which the tokenizer has to know one as tokens that are not text."""


def template_text(chat_template: str, base: Path) -> str:
    """The template that the key `chat_template` means: one of ours, or a file."""
    if chat_template.startswith(BUILTIN):
        return (FOLDER / f"{chat_template.removeprefix(BUILTIN)}.jinja").read_text(encoding="utf-8")
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
