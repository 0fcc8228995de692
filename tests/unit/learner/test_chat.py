"""Messages to tokens once: the assistant's turn is open, and what pads is never guessed."""

from __future__ import annotations

from typing import Any

import pytest

from surefoot.errors import ModelError
from surefoot.learner.chat import ChatCodec

USER = [{"role": "user", "content": "ab"}]
STOPS = frozenset({2, 9})


def codec(tokenizer: Any, **changes: Any) -> ChatCodec:
    return ChatCodec(tokenizer, STOPS, 61, **changes)


def test_a_prompt_ends_with_the_assistants_header(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer()
    ids = codec(tokenizer).encode_prompt(USER)
    assert ids == (4, *tokenizer("ab").input_ids, 2, 5)


@pytest.mark.config_key("system_prompt")
def test_the_system_prompt_comes_first_unless_the_task_brings_its_own(make_tokenizer: Any) -> None:
    speaking = codec(make_tokenizer(), system_prompt="q")
    plain = codec(make_tokenizer())
    own = [{"role": "system", "content": "z"}, *USER]
    assert speaking.encode_prompt(USER) == plain.encode_prompt([{"role": "system", "content": "q"}, *USER])
    assert speaking.encode_prompt(own) == plain.encode_prompt(own)


def test_encoding_does_not_change_the_messages_it_was_given(make_tokenizer: Any) -> None:
    messages = [dict(USER[0])]
    codec(make_tokenizer(), system_prompt="q").encode_prompt(messages)
    assert messages == USER


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}",
        "{% if add_generation_prompt %}<assistant>{% endif %}{% for m in messages %}{{ m['content'] }}{% endfor %}",
    ],
    ids=["flag ignored", "header in front"],
)
def test_a_template_that_does_not_open_the_answer_is_refused(template: str, make_tokenizer: Any) -> None:
    with pytest.raises(ModelError, match="does not open an assistant turn"):
        codec(make_tokenizer(template=template))


def test_pad_id_zero_is_a_pad_id(make_tokenizer: Any) -> None:
    assert codec(make_tokenizer()).pad_token_id == 0


def test_without_a_pad_token_a_stop_id_stands_in(make_tokenizer: Any) -> None:
    assert codec(make_tokenizer(pad=None)).pad_token_id == 2


def test_a_base_model_without_a_template_gets_the_text_as_it_stands(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer(template=None)
    plain = codec(tokenizer)
    assert plain.encode_prompt(USER) == tuple(tokenizer("ab").input_ids)
    both = [{"role": "system", "content": "q"}, *USER]
    assert plain.encode_prompt(both) == tuple(tokenizer("q\nab").input_ids)


def test_decoding_leaves_special_tokens_out_and_nothing_else(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer()
    assert codec(tokenizer).decode([5, *tokenizer("1+1 = 2").input_ids, 2, 0]) == "1+1 = 2"


def test_it_knows_how_many_ids_have_a_token(make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer()
    assert codec(tokenizer).token_count == len(tokenizer) < codec(tokenizer).vocab_size == 61
