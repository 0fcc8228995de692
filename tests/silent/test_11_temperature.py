"""Silent failure 11: sampler and learner use the temperature differently; at temperature 1 nobody sees it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from silent_kit import make_learner, sampled, tiny_net

from surefoot.engines import embedded
from surefoot.engines.decoder import Drawn
from surefoot.errors import NumericsError
from surefoot.learner import forward
from surefoot.maths.logprobs import TokenScores, score_tokens

HOT, COLD = 1.6, 0.6


def learn(temperature: float, learner_temperature: float | None = None) -> float:
    net = tiny_net()
    learner = make_learner(net, temperature=learner_temperature or temperature)
    report = learner.learn(sampled(net, temperature=temperature))
    return report.metrics["sampling/sampling_logp_difference/max"]


def total_probability(score: Any, temperature: float) -> float:
    logits = torch.tensor([3.0, 1.0, -2.0, 0.5]).expand(4, 4)
    return float(score(logits, torch.arange(4), temperature=temperature).logprobs.exp().sum())


def scaled_afterwards(logits: Any, ids: Any, *, temperature: float = 1.0, with_entropy: bool = False) -> TokenScores:
    """The planted bug: the log-probability is divided, not the logits."""
    scores = score_tokens(logits, ids, with_entropy=with_entropy)
    return TokenScores(scores.logprobs / temperature, scores.entropy)


def raw(draw: Any) -> Any:
    """The planted bug: the engine draws at the temperature and reports the log-probability without it."""

    def drawing(logits: Any, *dice: Any) -> Drawn:
        drawn: Drawn = draw(logits, *dice)
        rows = logits if logits.dim() == 2 else logits.expand(len(drawn.tokens), -1)
        return Drawn(drawn.tokens, score_tokens(rows, drawn.tokens).logprobs)

    return drawing


@pytest.mark.parametrize("temperature", [COLD, 1.0, HOT])
def test_sampler_and_learner_agree_at_every_temperature(temperature: float) -> None:
    assert learn(temperature) < 1e-4


@pytest.mark.parametrize(("temperature", "expected"), [(0.5, 4.0), (2.0, 1.0)])
def test_two_tokens_have_the_closed_form(temperature: float, expected: float) -> None:
    logits = torch.tensor([[2.0, 0.0]])  # odds e^(2 / T)
    pair = [score_tokens(logits, torch.tensor([i]), temperature=temperature).logprobs for i in (0, 1)]
    assert float(pair[0] - pair[1]) == pytest.approx(expected)


def test_probabilities_of_all_tokens_add_up_to_one() -> None:
    assert total_probability(score_tokens, COLD) == pytest.approx(1.0, abs=1e-6)


def test_planted_division_of_logprobs_adds_up_to_something_else() -> None:
    with pytest.raises(AssertionError):
        assert total_probability(scaled_afterwards, COLD) == pytest.approx(1.0, abs=1e-6)


def test_planted_division_of_logprobs_in_the_learner_stops_step_1(monkeypatch: pytest.MonkeyPatch) -> None:
    real = forward.score_tokens_chunked

    def divided(*tensors: Any, temperature: float, **options: Any) -> TokenScores:
        scores = real(*tensors, temperature=1.0, **options)
        return TokenScores(scores.logprobs / temperature, scores.entropy)

    monkeypatch.setattr(forward, "score_tokens_chunked", divided)
    with pytest.raises(NumericsError, match="temperature"):
        learn(COLD)


def test_planted_raw_logprobs_from_the_engine_stop_step_1(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("draw", "draw_siblings"):
        monkeypatch.setattr(embedded, name, raw(getattr(embedded, name)))
    assert learn(1.0) < 1e-4, "at temperature 1 the bug must be invisible, or this test shows nothing"
    with pytest.raises(NumericsError, match="temperature"):
        learn(HOT)


def test_planted_learner_that_ignores_the_temperature_stops_step_1() -> None:
    with pytest.raises(NumericsError, match="temperature"):
        learn(HOT, learner_temperature=1.0)
