"""Tokenizer and model agree on where an answer ends, or the model is refused."""

from __future__ import annotations

from typing import Any

import pytest

from surefoot.errors import ModelError
from surefoot.learner.model import check_special_tokens


def test_the_stop_ids_are_everything_that_either_side_declares(make_net: Any, make_tokenizer: Any) -> None:
    net = make_net(eos_token_id=[2, 7])
    net.generation_config.eos_token_id = [2, 9]
    assert check_special_tokens("m", net, make_tokenizer()) == {2, 7, 9}


def test_a_disagreement_names_both_sides(make_net: Any, make_tokenizer: Any) -> None:
    net = make_net(eos_token_id=3)
    net.generation_config.eos_token_id = 3
    with pytest.raises(ModelError, match=r"tokenizer ends .*2 \('<end>'\), the model .*\[3\]"):
        check_special_tokens("m", net, make_tokenizer())


def test_a_side_without_an_end_token_is_refused_by_name(make_net: Any, make_tokenizer: Any) -> None:
    with pytest.raises(ModelError, match="tokenizer declares none"):
        check_special_tokens("m", make_net(), make_tokenizer(end=None))
    net = make_net(eos_token_id=None)
    net.generation_config.eos_token_id = None
    with pytest.raises(ModelError, match="model declares none"):
        check_special_tokens("m", net, make_tokenizer())


def test_an_end_token_of_id_zero_is_an_end_token(make_net: Any, make_tokenizer: Any) -> None:
    net = make_net(eos_token_id=0)
    net.generation_config.eos_token_id = 0
    assert check_special_tokens("m", net, make_tokenizer(end="<pad>")) == {0}


def test_a_tokenizer_larger_than_the_model_is_refused_with_both_sizes(make_net: Any, make_tokenizer: Any) -> None:
    tokenizer = make_tokenizer()
    net = make_net(vocab_size=len(tokenizer) - 1)
    with pytest.raises(ModelError, match=f"tokenizer has {len(tokenizer)} tokens, the model {len(tokenizer) - 1}"):
        check_special_tokens("m", net, tokenizer)


def test_a_model_with_spare_rows_is_accepted(make_net: Any, make_tokenizer: Any) -> None:
    assert check_special_tokens("m", make_net(vocab_size=128), make_tokenizer()) == {2}


def test_a_stop_id_outside_the_model_is_refused(make_net: Any, make_tokenizer: Any) -> None:
    net = make_net(eos_token_id=[2, 61])
    with pytest.raises(ModelError, match=r"stop ids \[61\] are outside its 61 rows"):
        check_special_tokens("m", net, make_tokenizer())
