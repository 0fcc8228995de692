"""Weights that change while somebody is being answered."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from vllm_asking import ask, crowd, gaps, tokens

from surefoot.engines.vllm_engine import VllmEngine
from surefoot.errors import EngineError

LONG = 120


def nudged(policy: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        name: value.detach() + 0.02 * torch.randn(value.shape, generator=generator)
        for name, value in policy.model.named_parameters()
    }


@pytest.fixture
def caught(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`caught(requests, act)`: runs `act` when the requests have some tokens each; their answers."""

    def run(requests: Any, act: Any) -> Any:
        underway, go_on = threading.Event(), threading.Event()
        real, steps = engine._inner.core.step, [0]

        def step() -> Any:
            drawn = real()
            steps[0] += 1
            if steps[0] == 10:
                underway.set()
                go_on.wait(60)
            return drawn

        monkeypatch.setattr(engine._inner.core, "step", step)
        future = engine.submit(requests)
        assert underway.wait(60)
        assert not future.done()
        acting = threading.Thread(target=act)
        acting.start()
        go_on.set()
        answers = future.result(60)
        acting.join(60)
        return answers

    return run


def test_what_is_kept_goes_on_under_the_new_weights(engine: VllmEngine, policy: Any, learner: Any, caught: Any) -> None:
    """Tokens before the sync have the old model's logprobs, those after it the new model's: exactly two models."""
    requests = crowd(6, max_new_tokens=LONG)
    alone = engine.generate(requests)
    weights = nudged(policy)

    def sync() -> None:
        engine.pause("keep")
        engine.load_weights(weights, 1)
        engine.resume()

    answers = caught(requests, sync)
    assert {(a.version, a.version_end) for a in answers} == {(0, 1)}
    with torch.no_grad():
        for name, value in learner.net.named_parameters():
            value.copy_(weights[name])
    new = gaps(learner, requests, answers, 1.0)
    assert all(a.token_ids[:8] == b.token_ids[:8] for a, b in zip(answers, alone, strict=True))
    for i in range(6):
        row = new[i * LONG : (i + 1) * LONG]
        assert max(row[:8]) > 1e-3, "the first tokens are the old model's"
        assert max(row[30:]) < 1e-4, "the last ones are the new model's, keys and values and all"


def test_what_is_aborted_begins_again_unseen(engine: VllmEngine, policy: Any, caught: Any) -> None:
    weights = nudged(policy)
    requests = crowd(6, max_new_tokens=LONG)

    def sync() -> None:
        engine.pause("abort")
        engine.load_weights(weights, 1)
        engine.resume()

    answers = caught(requests, sync)
    assert {(a.version, a.version_end) for a in answers} == {(1, 1)}
    assert answers == engine.generate(requests), "as if nothing had been asked before"


def test_waiting_lets_everybody_finish_under_the_old_weights(engine: VllmEngine, policy: Any, caught: Any) -> None:
    weights = nudged(policy)
    requests = crowd(6, max_new_tokens=LONG)
    before = engine.generate(requests)
    left: list[int] = []

    def sync() -> None:
        engine.pause("wait")
        left.append(engine.in_flight)
        engine.load_weights(weights, 1)
        engine.resume()

    answers = caught(requests, sync)
    assert answers == before
    assert left == [0]
    assert tokens(engine.generate(requests)) != tokens(answers)


def test_nothing_is_drawn_while_paused(engine: VllmEngine) -> None:
    engine.pause()
    future = engine.submit(crowd(3))
    assert engine.in_flight == 3
    assert not future.done()
    engine.resume()
    assert len(future.result(60)) == 3


def test_a_cancelled_future_leaves_no_request_behind(engine: VllmEngine) -> None:
    engine.pause()
    future = engine.submit(crowd(3))
    assert future.cancel()
    engine.resume()
    assert engine.in_flight == 0
    assert len(engine.generate(crowd(2))) == 2
    assert not engine._inner.core._engine.has_unfinished_requests()


def test_a_load_that_fails_half_way_ends_what_runs_and_serves_nothing(
    engine: VllmEngine, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torn(weights: Any) -> None:
        raise EngineError("half", "way", "through")

    monkeypatch.setattr(engine._inner.core, "load", torn)
    with pytest.raises(EngineError, match="half"):
        engine.load_weights(dict(policy.model.named_parameters()), 1)
    with pytest.raises(EngineError, match="no weights yet"):
        engine.generate([ask()])
    monkeypatch.undo()
    engine.load_weights(dict(policy.model.named_parameters()), 2)
    assert engine.generate([ask()])[0].version == 2


def test_a_commit_without_its_prepare_is_refused(engine: VllmEngine, policy: Any) -> None:
    weights = dict(policy.model.named_parameters())
    with pytest.raises(EngineError, match="prepared was nothing"):
        engine.commit(1)
    engine.prepare(weights, 1)
    with pytest.raises(EngineError, match="prepared was 1"):
        engine.commit(2)
    assert engine.version == 0


def test_sleep_is_refused_by_name_on_a_cpu(engine: VllmEngine) -> None:
    with pytest.raises(EngineError, match="cannot sleep here"):
        engine.sleep()
    assert len(engine.generate([ask()])) == 1
