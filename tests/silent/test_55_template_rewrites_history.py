"""Silent failure 55: the chat template drops what was said earlier, so training sees another history than sampling."""

from __future__ import annotations

import pytest
from tool_kit import PEBBLE

from surefoot.errors import ModelError
from surefoot.learner import chat
from surefoot.learner.chat import ChatCodec

FORGETS = (
    "{% for m in messages %}{% set said = m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last "
    "else m.content %}<|{{ m.role }}|>{{ said }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def codec(template: str | None = None) -> ChatCodec:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(PEBBLE)
    tokenizer.chat_template = template or tokenizer.chat_template
    return ChatCodec(tokenizer, frozenset({tokenizer.eos_token_id}), len(tokenizer), max_reply_tokens=20)


def test_a_template_that_only_appends_is_accepted() -> None:
    assert codec().reply_overhead > 0


def test_a_template_that_forgets_its_reasoning_is_refused_with_the_turn_and_the_difference() -> None:
    with pytest.raises(ModelError, match="rewrites history: message 2") as refused:
        codec(FORGETS)
    assert "probe thought" in str(refused.value)


def test_planted_codec_without_the_question_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "check_history", lambda render: None)
    known = codec(FORGETS)
    talk = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "<think>a</think>b"}]
    first, second = (known._text(messages, False) for messages in (talk, [*talk, {"role": "tool", "content": "c"}]))
    assert not second.startswith(first), "the history that is rendered again is another one"
