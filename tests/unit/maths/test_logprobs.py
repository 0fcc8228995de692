"""Which logit scores which token, at which temperature, and what happens at the edges."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from surefoot.errors import ConfigError, ShapeError
from surefoot.maths.logprobs import compute_logprobs, score_tokens, score_tokens_chunked

PROMPTS = [2, 5]  # unequal on purpose: equal prompts hide an alignment bug


def example(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2, 9, 11, generator=generator, dtype=torch.float64)
    return logits.to(dtype), torch.randint(0, 11, (2, 4), generator=generator)


def by_hand(logits: Tensor, ids: Tensor, prompts: list[int]) -> Tensor:
    rows = [
        [-torch.nn.functional.cross_entropy(logits[i, p - 1 + t], ids[i, t]) for t in range(ids.shape[1])]
        for i, p in enumerate(prompts)
    ]
    return torch.stack([torch.stack(row) for row in rows])


def test_each_row_is_scored_from_its_own_prompt_length() -> None:
    logits, ids = example()
    torch.testing.assert_close(
        compute_logprobs(logits, ids, prompt_lens=torch.tensor(PROMPTS)), by_hand(logits, ids, PROMPTS)
    )


@pytest.mark.parametrize("shift", [-1, 1])
def test_prompt_lengths_off_by_one_give_materially_different_answers(shift: int) -> None:
    logits, ids = example()
    right = compute_logprobs(logits, ids, prompt_lens=[3, 5])
    wrong = compute_logprobs(logits, ids, prompt_lens=[3 + shift, 5 + shift])
    assert (right - wrong).abs().min() > 1e-3


@pytest.mark.parametrize("prompts", [[7, 2], [2, 7], [0, 2]])
def test_a_position_outside_its_row_is_refused_by_row(prompts: list[int]) -> None:
    """Row 0 overflowing by one would silently read row 1 under flat indexing."""
    logits, ids = example()
    row = 1 if prompts[0] == 2 else 0
    with pytest.raises(ShapeError, match=f"row {row}"):
        compute_logprobs(logits, ids, prompt_lens=prompts)
    compute_logprobs(logits, ids, prompt_lens=[6, 1])  # both edges are fine


def test_without_prompt_lengths_completions_end_at_the_last_position() -> None:
    logits, ids = example()
    assert torch.equal(compute_logprobs(logits, ids), compute_logprobs(logits, ids, prompt_lens=[5, 5]))
    with pytest.raises(ShapeError, match="row 0"):
        compute_logprobs(logits[:, :4], ids)


def test_unaligned_scoring_is_one_to_one() -> None:
    logits, ids = example()
    got = compute_logprobs(logits[:, :4], ids, align=False)
    for i in range(2):
        for t in range(4):
            assert got[i, t].item() == pytest.approx(torch.log_softmax(logits[i, t], 0)[ids[i, t]].item(), abs=1e-12)
    with pytest.raises(ShapeError, match="align=False"):
        compute_logprobs(logits[:, :4], ids, align=False, prompt_lens=[1, 1])


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_divides_logits_in_closed_form(temperature: float) -> None:
    logits = torch.tensor([[[0.0, math.log(3.0)]]], dtype=torch.float64)
    ids = torch.tensor([[1]])
    odds = 3.0 ** (1 / temperature)
    got = compute_logprobs(logits, ids, align=False, temperature=temperature).item()
    assert got == pytest.approx(math.log(odds / (1 + odds)), abs=1e-12)
    assert got != pytest.approx(math.log(0.75) / temperature, abs=1e-3)  # dividing log-probabilities is another thing


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_a_temperature_that_is_no_distribution_is_refused(temperature: float) -> None:
    logits, ids = example()
    with pytest.raises(ConfigError, match="temperature"):
        compute_logprobs(logits, ids, temperature=temperature)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extreme_logits_stay_finite(dtype: torch.dtype) -> None:
    logits = torch.tensor([[[1e4, -1e4, 0.0]]], dtype=dtype)
    for token, expected in enumerate([0.0, -2e4, -1e4]):
        got = compute_logprobs(logits, torch.tensor([[token]]), align=False)
        assert got.dtype == torch.float32
        assert got.item() == pytest.approx(expected, rel=5e-3)  # bfloat16 rounds 1e4 by up to 0.4 %


def test_bfloat16_logits_cost_only_their_own_rounding() -> None:
    logits, ids = example(torch.float32)
    exact = compute_logprobs(logits, ids, prompt_lens=PROMPTS)
    coarse = compute_logprobs(logits.bfloat16(), ids, prompt_lens=PROMPTS)
    # |logit| < 16 rounds by at most 2^-5 in bfloat16; a log-probability moves by at most twice that.
    assert 0 < (exact - coarse).abs().max() < 2 * 2**-5


def test_the_same_input_gives_the_same_bits() -> None:
    for rows, length, width in [(1, 2, 1), (4, 64, 32), (16, 40, 8)]:
        generator = torch.Generator().manual_seed(rows)
        logits = torch.randn(rows, length, 50, generator=generator)
        ids = torch.randint(0, 50, (rows, width), generator=generator)
        first = compute_logprobs(logits, ids)
        assert first.shape == (rows, width)
        assert torch.equal(first, compute_logprobs(logits.clone(), ids.clone()))


def test_a_token_outside_the_vocabulary_is_refused_by_row() -> None:
    logits, ids = example()
    for bad in (-100, 11):
        ids[1, 2] = bad
        with pytest.raises(ShapeError, match="row 1"):
            compute_logprobs(logits, ids, prompt_lens=PROMPTS)


def test_entropy_is_none_unless_asked_for_and_right_when_asked() -> None:
    logits, ids = example()
    assert score_tokens(logits[:, :4], ids).entropy is None
    scores = score_tokens(logits[:, :4].requires_grad_(), ids, with_entropy=True)
    expected = torch.distributions.Categorical(logits=logits[:, :4]).entropy()
    assert scores.entropy is not None
    torch.testing.assert_close(scores.entropy, expected.detach())
    assert not scores.entropy.requires_grad
    assert scores.logprobs.requires_grad


def test_entropy_of_a_distribution_with_forbidden_tokens_is_finite() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]], dtype=torch.float64)
    ids = torch.tensor([0])
    full = score_tokens(logits, ids, with_entropy=True).entropy
    assert full is not None
    assert full.item() == pytest.approx(math.log(2))
    eye = torch.eye(3, dtype=torch.float64)
    bias = torch.tensor([0.0, 0.0, -math.inf], dtype=torch.float64)
    chunked = score_tokens_chunked(torch.zeros(1, 3, dtype=torch.float64), eye, ids, bias=bias, with_entropy=True)
    assert chunked.entropy is not None
    assert chunked.entropy.item() == pytest.approx(math.log(2))


class Case:
    """Hidden states, a head and tokens; `gradients` runs one path on fresh leaves."""

    def __init__(self, dtype: torch.dtype = torch.float64, *, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(3)
        self.hidden = torch.randn(3, 7, 6, generator=generator, dtype=torch.float64).to(dtype)
        self.weight = (scale * torch.randn(17, 6, generator=generator, dtype=torch.float64)).to(dtype)
        self.bias = torch.randn(17, generator=generator, dtype=torch.float64).to(dtype)
        self.ids = torch.randint(0, 17, (3, 7), generator=generator)
        self.pull = torch.randn(3, 7, generator=generator, dtype=torch.float64)
        self.pull[0, 2:] = 0.0  # tokens without gradient

    def gradients(self, chunk: int | None, temperature: float, *, bias: bool = True) -> list[Tensor]:
        h, w, b = (x.clone().requires_grad_() for x in (self.hidden, self.weight, self.bias))
        if chunk is None:
            logits = torch.nn.functional.linear(h, w, b if bias else None)
            scores = score_tokens(logits, self.ids, temperature=temperature, with_entropy=True)
        else:
            scores = score_tokens_chunked(
                h, w, self.ids, bias=b if bias else None, temperature=temperature, with_entropy=True, chunk_tokens=chunk
            )
        (scores.logprobs * self.pull).sum().backward()
        grads = [x.grad for x in (h, w, b)[: 3 if bias else 2]]
        assert scores.entropy is not None
        return [scores.logprobs.detach(), scores.entropy, *(g for g in grads if g is not None)]


@pytest.mark.parametrize("chunk", [1, 4, 21, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("bias", [True, False])
def test_the_chunked_form_equals_the_full_form_in_value_and_gradient(
    chunk: int, temperature: float, bias: bool
) -> None:
    case = Case()
    full = case.gradients(None, temperature, bias=bias)
    chunked = case.gradients(chunk, temperature, bias=bias)
    assert len(full) == len(chunked) == (5 if bias else 4)
    for ours, theirs in zip(chunked, full, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_the_chunked_form_works_in_lower_precision(dtype: torch.dtype, tolerance: float) -> None:
    """bfloat16 keeps 8 bits (relative 2^-8 per rounding); a few roundings on either side give 3e-2."""
    full, chunked = Case(dtype).gradients(None, 1.0), Case(dtype).gradients(4, 1.0)
    for ours, theirs in zip(chunked, full, strict=True):
        assert ours.dtype == theirs.dtype
        difference = (ours - theirs).double().abs().max()
        assert difference <= tolerance * theirs.double().abs().max()


def test_the_chunked_form_survives_extreme_logits() -> None:
    for ours in Case(torch.float32, scale=1e4).gradients(4, 1.0):
        assert torch.isfinite(ours).all()


def test_the_chunked_gradient_passes_a_finite_difference_check() -> None:
    case = Case()
    leaves = [x.clone().requires_grad_() for x in (case.hidden, case.weight, case.bias)]
    assert torch.autograd.gradcheck(
        lambda h, w, b: score_tokens_chunked(h, w, case.ids, bias=b, temperature=0.7, chunk_tokens=4).logprobs, leaves
    )


def test_nan_on_a_token_without_gradient_does_not_reach_the_head() -> None:
    case = Case()
    clean = case.gradients(4, 1.0)
    case.hidden[0, 3] = math.nan
    planted = case.gradients(4, 1.0)
    assert torch.equal(planted[3], clean[3])
    assert torch.equal(planted[4], clean[4])
    assert torch.equal(planted[2][0, 3], torch.zeros(6, dtype=torch.float64))
    full = case.gradients(None, 1.0)  # teeth: the plain form multiplies by zero and poisons every weight
    assert full[3].isnan().all()


def test_a_frozen_head_gets_no_gradient_and_costs_none() -> None:
    case = Case()
    hidden = case.hidden.clone().requires_grad_()
    score_tokens_chunked(hidden, case.weight, case.ids).logprobs.sum().backward()
    assert hidden.grad is not None
    assert case.weight.grad is None


def test_chunked_shapes_are_checked() -> None:
    case = Case()
    with pytest.raises(ShapeError, match="hidden"):
        score_tokens_chunked(case.hidden, case.weight[:, :5], case.ids)
    with pytest.raises(ShapeError, match="ids"):
        score_tokens_chunked(case.hidden, case.weight, case.ids[:, :6])
    with pytest.raises(ConfigError, match="chunk_tokens"):
        score_tokens_chunked(case.hidden, case.weight, case.ids, chunk_tokens=0)
    assert score_tokens_chunked(case.hidden, case.weight, case.ids).entropy is None
