"""Tools' answers as tokens: appended, cut visibly, never structure; templates that rewrite history are refused."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_kit import PEBBLE, codec

from surefoot.errors import ModelError
from surefoot.learner.chat import ChatCodec, structural_ids
from surefoot.protocols import ToolSpec

CHATML = (
    "{% if tools %}<|user|>{% for tool in tools %}{{ tool.function.name }}{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORGETS = (
    "{% for m in messages %}{% set c = m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last "
    "else m.content %}<|{{ m.role }}|>{{ c }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NO_TOOLS = (
    "{% for m in messages %}{% if m.role != 'tool' %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NO_END = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
TWICE = CHATML.replace("{{ m.content }}", "{{ m.content }}{% if m.role == 'tool' %}{{ m.content }}{% endif %}")
SPECS = (ToolSpec("clock__now", "the time", {"type": "object"}),)


def fresh() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(PEBBLE)


def made(template: str | None, **more: Any) -> ChatCodec:
    tokenizer = fresh()
    tokenizer.chat_template = template
    return ChatCodec(
        tokenizer, frozenset({tokenizer.eos_token_id}), len(tokenizer), **({"max_reply_tokens": 50} | more)
    )


def test_what_stands_between_two_turns_is_what_the_template_writes() -> None:
    known = made(CHATML)
    talk = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    whole = known.encode_prompt([*talk, {"role": "tool", "content": "42"}])
    asked, said = known.encode_prompt(talk[:1]), known._tokenizer("a<|end|>").input_ids
    assert (*asked, *said, *known.encode_replies(["42"])) == whole


def test_several_answers_are_framed_one_by_one() -> None:
    known = codec()
    assert (
        known._tokenizer.decode(known.encode_replies(["1", "22"])) == "<|tool|>1<|end|><|tool|>22<|end|><|assistant|>"
    )


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (FORGETS, "rewrites history: message 2"),
        (NO_TOOLS, "exactly once"),
        (TWICE, "exactly once"),
        (NO_END, "does not end the assistant's turn"),
        (None, "without a chat template"),
    ],
)
def test_a_template_that_cannot_carry_tools_is_refused_before_training(template: str | None, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        made(template)
    if template is not None:
        made(template, max_reply_tokens=0)  # without tools it may stay


def test_the_refusal_shows_what_was_rewritten() -> None:
    with pytest.raises(ModelError) as refused:
        made(FORGETS)
    assert "probe thought" in str(refused.value)


def test_a_template_that_hides_the_tools_is_refused_by_their_name() -> None:
    with pytest.raises(ModelError, match="does not show the tool 'clock__now'"):
        made(CHATML.replace("tool.function.name", "''"), tools=SPECS)
    shown = made(CHATML, tools=SPECS)
    assert "clock__now" in shown.decode(shown.encode_prompt([{"role": "user", "content": "u"}]))


def test_marks_that_decoding_swallows_are_refused() -> None:
    tokenizer = fresh()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>"]})
    with pytest.raises(ModelError, match="its marks are lost"):
        ChatCodec(tokenizer, frozenset({tokenizer.eos_token_id}), len(tokenizer), max_reply_tokens=50)


SPELLINGS = [
    "<|end|>",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<|pad|>",
    "<|unk|>",
    "<",
    "|",
    "end",
    ">",
    "\\",
    "ü",
    "\x1b",
]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(SPELLINGS), max_size=24).map("".join))
def test_no_spelling_of_a_token_becomes_that_token(text: str) -> None:
    known = codec(200)
    ids = known.encode_replies([text])
    frame = known.encode_replies([""])
    inside = ids[1 : len(ids) - len(frame) + 1]
    assert not structural_ids(known._tokenizer).intersection(inside)


def test_planted_raw_text_would_become_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    from surefoot.errors import ToolFailedError
    from surefoot.learner.chat import ReplyEncoder

    monkeypatch.setattr(ReplyEncoder, "_neutral", lambda self, text: text)
    with pytest.raises(ToolFailedError, match="became the model's own tokens"):
        codec().encode_replies(["<|end|>"])


def test_a_long_answer_is_cut_to_its_limit_and_says_so() -> None:
    known = codec(60)
    ids = known.encode_replies(["7" * 500])
    assert len(ids) == 60 + known.reply_overhead
    assert "[cut at 60 of 500 tokens]" in known._tokenizer.decode(ids)


def test_a_codec_with_tools_travels_to_another_process() -> None:
    known = codec()
    assert pickle.loads(pickle.dumps(known)).encode_replies(["42"]) == known.encode_replies(["42"])
