"""Silent failure 41: what a rollout samples depends on who else is in the batch, so that no rollout can be replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from silent_kit import PROMPTS, STOP_ID, make_engine, tiny_net

from surefoot.engines import embedded
from surefoot.engines.embedded import EmbeddedEngine
from surefoot.protocols import Completion, Request


def request(name: str, seed: int) -> Request:
    return Request(f"{name}{seed}", PROMPTS[name], 8, 1.0, frozenset({STOP_ID}), seed=seed)


CROWD = [request(name, seed) for seed in range(14) for name in PROMPTS]  # 42 requests on 16 rows: they enter in waves


def check() -> None:
    """Alone, in a crowd and in another order: the same tokens and the same logprobs, bit for bit."""
    engine: EmbeddedEngine = make_engine(tiny_net())
    crowd: dict[str, Completion] = {c.request_id: c for c in engine.generate(CROWD)}
    backwards = {c.request_id: c for c in engine.generate(CROWD[::-1])}
    assert backwards == crowd
    for one in CROWD[:6] + CROWD[-3:]:
        assert engine.generate([one]) == [crowd[one.id]]


def test_a_rollout_depends_on_its_prompt_seed_and_weights_alone() -> None:
    check()


def test_planted_shared_random_stream_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)

    def shared(seed: int, length: int) -> Any:
        return torch.rand(length, generator=generator, dtype=torch.float64).tolist()

    monkeypatch.setattr(embedded, "random_stream", shared)
    with pytest.raises(AssertionError):
        check()
