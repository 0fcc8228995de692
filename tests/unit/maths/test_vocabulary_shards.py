"""Log-probabilities over a vocabulary in parts equal the plain ones, on two gloo ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from gloo_kit import GlooExchange, on_ranks
from torch import Tensor

from surefoot.errors import ShapeError
from surefoot.maths import vocabulary_shards
from surefoot.maths.logprobs import compute_logprobs
from surefoot.maths.vocabulary_shards import compute_logprobs_sharded

ROWS, LENGTH, WIDTH, V = 5, 12, 4, 13
LENS = [3, 8, 3, 1, 8]  # two lengths come twice, not side by side: grouping may not mix up rows
BEGINS = (0, 6, V)  # uneven parts
Score = Callable[..., Tensor]


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    dice = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(ROWS, LENGTH, V, generator=dice, dtype=dtype)
    ids = torch.randint(0, V, (ROWS, WIDTH), generator=dice)
    return logits, ids, torch.randn(ROWS, WIDTH, generator=dice, dtype=dtype)


def plain(dtype: torch.dtype, **keys: Any) -> tuple[Tensor, Tensor]:
    logits, ids, pull = problem(dtype)
    logits.requires_grad_()
    scores = compute_logprobs(logits, ids, **keys)
    (scores * pull).sum().backward()
    assert logits.grad is not None, "every logit has a part in some score"
    return scores.detach(), logits.grad


def in_parts(dtype: torch.dtype, *, begins: tuple[int, ...] = BEGINS, **keys: Any) -> tuple[list[Tensor], Tensor]:
    """What each rank says, and the gradients of their parts side by side."""
    logits, ids, pull = problem(dtype)

    def body(rank: int, exchange: GlooExchange) -> tuple[Tensor, Tensor]:
        part = logits[..., begins[rank] : begins[rank + 1]].clone().requires_grad_()
        scores = compute_logprobs_sharded(part, ids, first=begins[rank], vocabulary=V, exchange=exchange, **keys)
        (scores * pull).sum().backward()
        assert part.grad is not None, "every rank has a gradient"
        return scores.detach(), part.grad

    found = on_ranks(2, body)
    return [scores for scores, _ in found], torch.cat([grad for _, grad in found], dim=-1)


@pytest.mark.parametrize("keys", [{"prompt_lens": LENS}, {"prompt_lens": LENS, "temperature": 0.7}, {}], ids=str)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
def test_two_ranks_say_what_one_says(dtype: torch.dtype, limit: float, keys: dict[str, Any]) -> None:
    scores, gradient = plain(dtype, **keys)
    parts, gradients = in_parts(dtype, **keys)
    for part in parts:
        torch.testing.assert_close(part, scores, rtol=0, atol=limit)
    torch.testing.assert_close(gradients, gradient, rtol=0, atol=limit)


@pytest.mark.parametrize("bug", ["local softmax", "own peak", "row order"])
def test_planted_bugs_are_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: a softmax over this rank's part alone; parts shifted by unlike peaks; rows put back in group order."""
    if bug == "local softmax":
        real = GlooExchange.sum
        monkeypatch.setattr(GlooExchange, "sum", lambda self, values: real(self, values[1:]))
    elif bug == "own peak":
        monkeypatch.setattr(GlooExchange, "max", lambda self, values: None)
    else:
        monkeypatch.setattr(vocabulary_shards, "sorted", lambda lens: sorted(lens)[:1], raising=False)
    scores, _ = plain(torch.float64, prompt_lens=LENS)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(in_parts(torch.float64, prompt_lens=LENS)[0][0], scores, rtol=0, atol=1e-6)


def test_parts_with_a_gap_are_refused() -> None:
    logits, ids, _ = problem()

    def body(rank: int, exchange: GlooExchange) -> Tensor:
        part = logits[..., : V // 2] if rank == 0 else logits[..., V - 2 :]
        return compute_logprobs_sharded(
            part, ids, first=0 if rank == 0 else V - 2, vocabulary=V, exchange=exchange, prompt_lens=LENS
        )

    with pytest.raises(ShapeError, match="in 0 to 1 parts"):
        on_ranks(2, body)


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"first": 9}, "do not go with"),
        ({"first": -1}, "do not go with"),
        ({"prompt_lens": [0, 3, 3, 3, 3]}, "a prompt of 0"),
        ({"prompt_lens": [3, 3, 3, 3, 10]}, "row 4: a prompt of 10"),
        ({"prompt_lens": [3]}, "1 prompt lengths"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_before_anybody_is_asked(keys: dict[str, Any], word: str) -> None:
    logits, ids, _ = problem()
    nobody: Any = None
    with pytest.raises(ShapeError, match=word):
        compute_logprobs_sharded(logits[..., :6], ids, **({"first": 0, "vocabulary": V, "exchange": nobody} | keys))
