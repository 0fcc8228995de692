"""A weight sync changes what vLLM says, and says it as the learner does; the same on a GPU, where there is one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from vllm_asking import WIDTH, crowd, gaps, model_config, tokens

from surefoot.engines.vllm_engine import VllmEngine
from surefoot.errors import EngineError
from surefoot.learner.grpo import GRPOLearner

ROWS = 16
BOUND_ON_A_GPU = 0.2
"""Largest gap between the logprobs of the two sides in bfloat16: the parity bound of a run."""


def moved(weights: Any) -> dict[str, torch.Tensor]:
    """Other weights of the same model: what training far would bring."""
    return {name: value.detach() * 1.2 for name, value in weights.items()}


def changed_rows(engine: VllmEngine, weights: Any) -> int:
    """How many of the same seeded requests are answered with other tokens once these weights were handed over."""
    before = tokens(engine.generate(crowd(ROWS)))
    assert tokens(engine.generate(crowd(ROWS))) == before, "the same weights say the same"
    engine.load_weights(weights, engine.version + 1)
    return sum(old != new for old, new in zip(before, tokens(engine.generate(crowd(ROWS))), strict=True))


def test_other_weights_are_heard_in_nearly_every_row(engine: VllmEngine, policy: Any) -> None:
    assert changed_rows(engine, moved(dict(policy.model.named_parameters()))) >= ROWS // 2
    engine.load_weights(dict(policy.model.named_parameters()), engine.version + 1)
    assert changed_rows(engine, dict(policy.model.named_parameters())) == 0, "the same weights once more are no change"


def test_planted_sync_that_loads_nothing_changes_no_row_and_is_refused(
    engine: VllmEngine, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._inner.core, "load", lambda weights: None)
    with pytest.raises(EngineError, match="are not in vLLM's memory"):
        changed_rows(engine, moved(dict(policy.model.named_parameters())))
    monkeypatch.undo()
    engine.load_weights(dict(policy.model.named_parameters()), 1)
    others = moved(dict(policy.model.named_parameters()))
    monkeypatch.setattr(engine._inner.core, "load", lambda weights: None)
    monkeypatch.setattr(engine._inner, "read_back", lambda: engine._inner.staged(others))
    assert changed_rows(engine, others) == 0, "an engine that lies about its memory too is told apart by what it says"


@pytest.mark.gpu("vllm")
def test_a_sync_on_a_gpu_is_heard_and_both_sides_agree(policy: Any, learner: Any) -> None:
    """The same with vLLM on the GPU in bfloat16, and a learner of the same weights beside it."""
    there = GRPOLearner(copy.deepcopy(policy.model).to("cuda", torch.bfloat16), learner.settings)
    engine = VllmEngine(model_config(policy), max_width=WIDTH, rows=ROWS, dtype="bfloat16", device="cuda")
    try:
        engine.load_weights(dict(there.net.named_parameters()), 0)
        with torch.no_grad():
            for value in there.net.parameters():
                value.mul_(1.2)
        assert changed_rows(engine, dict(there.net.named_parameters())) >= ROWS // 2
        requests = crowd(ROWS)
        assert max(gaps(there, requests, engine.generate(requests), 1.0)) < BOUND_ON_A_GPU
    finally:
        engine.close()
