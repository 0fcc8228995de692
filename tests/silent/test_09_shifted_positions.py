"""Silent failure 09: log-probabilities read one position too early or too late; every number is still finite."""

from __future__ import annotations

import pytest
import torch
from silent_kit import make_learner, sampled, tiny_net

from surefoot.errors import NumericsError
from surefoot.learner import forward
from surefoot.maths.logprobs import compute_logprobs


def test_the_learner_scores_each_token_as_the_sampler_drew_it() -> None:
    net = tiny_net()
    report = make_learner(net).learn(sampled(net))
    assert report.metrics["sampling/sampling_logp_difference/max"] < 1e-4


def test_a_token_is_scored_by_the_logits_of_the_position_before_it() -> None:
    net, sample = tiny_net(), sampled(tiny_net())[0]
    ids = torch.tensor([[*sample.prompt_ids, *sample.completion_ids]])
    with torch.no_grad():
        logits = net(ids).logits
    start = len(sample.prompt_ids)
    one_by_one = [
        torch.log_softmax(logits[0, start + t - 1], -1)[token].item() for t, token in enumerate(sample.completion_ids)
    ]
    ours = compute_logprobs(logits, torch.tensor([sample.completion_ids]), prompt_lens=[start])
    assert ours[0].tolist() == pytest.approx(one_by_one, abs=1e-6)
    assert ours[0].tolist() == pytest.approx(sample.logprobs, abs=1e-4)


@pytest.mark.parametrize("wrong", [-1, 1])
def test_planted_wrong_prompt_length_gives_materially_other_numbers(wrong: int) -> None:
    torch.manual_seed(0)
    logits, ids = torch.randn(2, 12, 32), torch.randint(0, 32, (2, 5))
    right, shifted = (compute_logprobs(logits, ids, prompt_lens=[4 + off, 6 + off]) for off in (0, wrong))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(shifted, right, atol=1e-3, rtol=0)


@pytest.mark.parametrize("shift", [-1, 1], ids=["too early", "too late"])
def test_planted_shift_in_the_learner_stops_step_1(monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
    net = tiny_net()
    samples, real = sampled(net), forward.completion_hidden
    monkeypatch.setattr(forward, "completion_hidden", lambda n, batch: real(n, batch).roll(-shift, dims=1))
    with pytest.raises(NumericsError, match="disagree"):
        make_learner(net).learn(samples)
