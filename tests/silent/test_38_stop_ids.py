"""Silent failure 38: a model has several stop tokens and the trainer knows one, so that finished answers count as truncated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from silent_kit import PROMPTS, make_engine, tiny_net

from surefoot.errors import ModelError
from surefoot.learner import model as special_tokens
from surefoot.learner.model import check_special_tokens
from surefoot.protocols import Request
from surefoot.records import STOP


class Tokens:
    """As much of a tokenizer as the check looks at."""

    def __init__(self, eos: int | None) -> None:
        self.eos_token_id, self.eos_token, self.pad_token_id = eos, "<end>", 0

    def __len__(self) -> int:
        return 32


def stop_ids(model: Any, generation: Any, tokenizer: int | None) -> frozenset[int]:
    net = tiny_net(eos_token_id=model)
    net.generation_config = SimpleNamespace(eos_token_id=generation)
    return check_special_tokens("tiny", net, Tokens(tokenizer))


def check() -> None:
    assert stop_ids(2, [2, 9], 2) == {2, 9}
    assert stop_ids([2, 9], None, 9) == {2, 9}


def test_all_stop_ids_of_model_and_tokenizer_are_known() -> None:
    check()


def test_an_answer_may_end_with_any_of_them() -> None:
    engine = make_engine(tiny_net(3))
    every = frozenset(range(2, 12))
    said = engine.generate([Request(f"r{i}", PROMPTS["long"], 8, 1.0, every, seed=i) for i in range(16)])
    endings = {c.token_ids[-1] for c in said if c.finish_reason == STOP}
    assert len(endings) > 1
    assert all(not set(c.token_ids[:-1]) & every for c in said)


@pytest.mark.parametrize(("model", "generation", "tokenizer"), [(2, 2, 9), (None, None, 2), (2, 2, None)])
def test_a_disagreement_is_refused_not_guessed(model: Any, generation: Any, tokenizer: int | None) -> None:
    with pytest.raises(ModelError):
        stop_ids(model, generation, tokenizer)


def test_planted_first_id_only_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(name: str, value: Any) -> frozenset[int]:
        return frozenset() if value is None else frozenset([value if isinstance(value, int) else value[0]])

    monkeypatch.setattr(special_tokens, "_ids", first)
    with pytest.raises((AssertionError, ModelError)):
        check()
