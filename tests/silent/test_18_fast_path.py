"""Silent failure 18: the fast path of the loss ignores an option, and says nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from silent_kit import make_learner, sampled, tiny_net

from surefoot.errors import NumericsError
from surefoot.learner import forward
from surefoot.maths.logprobs import TokenScores, score_tokens, score_tokens_chunked

N, H, V = 7, 5, 13
OPTIONS = [
    {"temperature": t, "bias": b, "with_entropy": e} for t in (0.7, 1.0) for b in (False, True) for e in (False, True)
]


def both(fast: Any, temperature: float, bias: bool, with_entropy: bool) -> list[tuple[Any, ...]]:
    """(logprobs, entropy, gradients) from the plain and from the fast path."""
    results = []
    for path in ("plain", "fast"):
        torch.manual_seed(0)
        leaves = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((N, H), (V, H), (V,))]
        hidden, weight, offset = leaves
        ids, pull = torch.randint(0, V, (N,)), torch.randn(N, dtype=torch.float64)
        keys: dict[str, Any] = {"temperature": temperature, "with_entropy": with_entropy}
        if path == "plain":
            scores = score_tokens(hidden @ weight.T + (offset if bias else 0), ids, **keys)
        else:
            scores = fast(hidden, weight, ids, bias=offset if bias else None, chunk_tokens=3, **keys)
        wanted = leaves if bias else leaves[:2]
        results.append(
            (scores.logprobs.detach(), scores.entropy, *torch.autograd.grad((scores.logprobs * pull).sum(), wanted))
        )
    return results


def check(fast: Any, options: dict[str, Any]) -> None:
    plain, chunked = both(fast, **options)
    for left, right in zip(plain, chunked, strict=True):
        assert (left is None) == (right is None)
        if left is not None:
            torch.testing.assert_close(right, left, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_fast_path_equals_the_plain_one_under_every_option(options: dict[str, Any]) -> None:
    check(score_tokens_chunked, options)


def test_a_step_is_the_same_on_both_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    norms = []
    for budget in (2**28, 0):
        monkeypatch.setattr(forward, "LOGITS_BUDGET", budget)
        net = tiny_net()
        metrics = make_learner(net, temperature=0.8).learn(sampled(net, temperature=0.8)).metrics
        norms.append((metrics["grad_norm"], metrics["scored_entropy"]))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize("forgotten", ["temperature", "bias", "with_entropy"])
def test_planted_path_that_forgets_an_option_is_seen(forgotten: str) -> None:
    def forgetful(*args: Any, **keys: Any) -> TokenScores:
        return score_tokens_chunked(*args, **{name: value for name, value in keys.items() if name != forgotten})

    with pytest.raises((AssertionError, RuntimeError)):  # a bias that is not used has no gradient at all
        check(forgetful, {"temperature": 0.7, "bias": True, "with_entropy": True})


def test_planted_forgotten_temperature_stops_step_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(*args: Any, temperature: float, **keys: Any) -> TokenScores:
        return score_tokens_chunked(*args, **keys)

    monkeypatch.setattr(forward, "LOGITS_BUDGET", 0)
    monkeypatch.setattr(forward, "score_tokens_chunked", forgetful)
    net = tiny_net()
    with pytest.raises(NumericsError, match="temperature"):
        make_learner(net, temperature=0.8).learn(sampled(net, temperature=0.8))
