"""Silent failure 60: a completion is clamped to the batch's width, and what is left of it is trained as if it were all."""

from __future__ import annotations

from typing import Any

import pytest
from silent_kit import STOP_ID, TASKS, make_engine, make_learner, make_runtime, make_sample, prepare, tiny_net

from surefoot.errors import EngineError, InvariantError
from surefoot.learner import grpo
from surefoot.maths.packing import make_batch
from surefoot.protocols import Completion

LONG, SHORT = (7, 8, 9, 10, 11, STOP_ID), (9, STOP_ID)


def rows() -> list[Any]:
    return [make_sample(ids, index=i, advantage=1.0 - 2 * i) for i, ids in enumerate((LONG, SHORT))]


def clamped(width: int) -> Any:
    """The planted bug: buckets whose largest is too small for the longest completion."""

    def packing(samples: Any, *, pad_token_id: int) -> Any:
        return make_batch(samples, pad_token_id=pad_token_id, completion_len_buckets=[width], seq_len_buckets=[64])

    return packing


def trained_tokens() -> int:
    learner = make_learner(tiny_net(), parity_tolerance=1e9)
    learner.learn(rows())
    return learner.checked_tokens


def test_every_completion_is_trained_to_its_last_token() -> None:
    assert trained_tokens() == len(LONG) + len(SHORT)


def test_a_wider_batch_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpo, "make_batch", clamped(32))
    assert trained_tokens() == len(LONG) + len(SHORT)


@pytest.mark.parametrize("width", [1, 5])
def test_planted_clamp_to_a_bucket_is_refused(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setattr(grpo, "make_batch", clamped(width))
    with pytest.raises(InvariantError, match=f"has room for {width} of 6 completion tokens"):
        trained_tokens()


def test_planted_clamp_of_the_sequence_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def packing(samples: Any, *, pad_token_id: int) -> Any:
        return make_batch(samples, pad_token_id=pad_token_id, seq_len_buckets=[12])  # prompt of 9, so 3 are left

    monkeypatch.setattr(grpo, "make_batch", packing)
    with pytest.raises(InvariantError, match="has room for 3 of 6 completion tokens"):
        trained_tokens()


def test_planted_engine_that_clamps_and_says_stop_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on the sampler's side: an answer that is cut short and called finished."""
    engine = make_engine(tiny_net())
    generate = engine.generate

    def cut(requests: Any) -> list[Completion]:
        return [
            Completion(c.request_id, c.token_ids[:1], c.logprobs[:1], "stop", c.version, c.version_end)
            for c in generate(requests)
        ]

    monkeypatch.setattr(engine, "generate", cut)
    with pytest.raises((InvariantError, EngineError), match="says stop but ends on"):
        prepare(make_runtime(engine).collect(TASKS, 1))
