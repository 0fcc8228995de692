"""Statistics add up over any cut, and say nothing where nothing was measured."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surefoot.errors import ShapeError
from surefoot.maths.losses import LossSettings, StepTotals, policy_loss
from surefoot.maths.stats import finish, merge, sequence_errors, sequence_sums, token_sums

LENGTHS = [1, 2, 3, 5, 8, 13]  # very unequal rows: equal ones would hide an average of averages


def step() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS).unsqueeze(1)
    sampler = -3 * torch.rand(mask.shape, generator=generator, dtype=torch.float64)
    learner = sampler + 0.3 * torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    return learner, sampler, mask


def test_identical_sides_have_an_error_of_exactly_one() -> None:
    learner, _, mask = step()
    metrics = finish(token_sums(mask, logp=learner, sampler_logp=learner))
    assert metrics["token_mult_prob_error"] == 1.0
    assert metrics["sampling/sampling_logp_difference/max"] == 0.0
    assert metrics["sampling/importance_sampling_ratio/mean"] == 1.0
    for name in ("gen_kl_error", "policy_kl_error", "js_divergence_error"):
        assert metrics[name] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_known_offset_gives_its_exponential(sign: int) -> None:
    learner, _, mask = step()
    metrics = finish(token_sums(mask, logp=learner, sampler_logp=learner + sign * 0.1))
    assert metrics["token_mult_prob_error"] == pytest.approx(math.exp(0.1))
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(math.exp(-sign * 0.1))
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(0.1)


def test_the_documented_example_of_five_against_fifteen() -> None:
    one = torch.ones(1, 1, dtype=torch.bool)
    metrics = finish(token_sums(one, logp=torch.tensor([[-15.0]]), sampler_logp=torch.tensor([[-5.0]])))
    assert metrics["gen_kl_error"] == pytest.approx(9.00005, abs=1e-4)
    assert metrics["policy_kl_error"] == pytest.approx(22015.47, abs=0.01)
    assert round(metrics["js_divergence_error"]) == 9
    assert metrics["js_divergence_error"] == pytest.approx(8.614, abs=1e-3)


def test_nothing_measured_is_absent_and_never_zero_or_one() -> None:
    learner, sampler, mask = step()
    assert finish({}) == {}
    assert finish(token_sums(mask, logp=learner)) == {}
    assert finish(token_sums(mask, sampler_logp=sampler)) == {}
    empty = torch.zeros_like(mask)
    assert finish(token_sums(empty, logp=learner, sampler_logp=sampler, entropy=learner)) == {}
    assert finish(token_sums(mask[:0], logp=learner[:0], sampler_logp=sampler[:0])) == {}
    assert "entropy" not in finish(token_sums(mask, logp=learner, sampler_logp=sampler))


def test_a_non_finite_measurement_stays_visible() -> None:
    learner, sampler, mask = step()
    learner[3, 0] = math.nan
    metrics = finish(token_sums(mask, logp=learner, sampler_logp=sampler))
    assert math.isnan(metrics["token_mult_prob_error"])
    assert math.isnan(metrics["sampling/sampling_logp_difference/max"])


def test_masked_positions_do_not_count_whatever_they_hold() -> None:
    learner, sampler, mask = step()
    clean = finish(token_sums(mask, logp=learner, sampler_logp=sampler, entropy=-learner))
    for junk in (math.nan, -math.inf, 1e9):
        dirty = [x.masked_fill(~mask, junk) for x in (learner, sampler, -learner)]
        assert finish(token_sums(mask, logp=dirty[0], sampler_logp=dirty[1], entropy=dirty[2])) == clean


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=len(LENGTHS), max_size=len(LENGTHS)))
def test_metrics_do_not_depend_on_the_cut(owner: list[int]) -> None:
    learner, sampler, mask = step()
    correct = torch.tensor([True, False, True, False, True, False])
    chosen = LossSettings(beta=0.1, correction="token_truncate", delta=3.0, positive_nll=0.1)
    totals = StepTotals(len(LENGTHS), sum(LENGTHS), 16)

    def sums(rows: list[int]) -> dict[str, Tensor]:
        a, b, m = learner[rows], sampler[rows], mask[rows]
        weights = torch.linspace(-1, 1, len(LENGTHS), dtype=torch.float64)[rows]
        loss = policy_loss(a, b, weights, m, settings=chosen, totals=totals, ref_logp=b, sampler_logp=b - 0.5)
        by_row, _ = sequence_sums(a, b, m, threshold=1.3, correct=correct[rows])
        return loss.sums | by_row | token_sums(m, logp=a, sampler_logp=b, entropy=-a)

    pieces = [[row for row, o in enumerate(owner) if o == part] for part in range(3)]
    whole = finish(sums(list(range(len(LENGTHS)))))
    merged = finish(merge(sums(rows) for rows in pieces if rows))
    assert merged.keys() == whole.keys()
    assert merged == {name: pytest.approx(value, rel=1e-9, abs=1e-12) for name, value in whole.items()}


def test_an_average_of_averages_would_have_been_caught() -> None:
    learner, sampler, mask = step()
    halves = [finish(token_sums(mask[s], logp=learner[s], sampler_logp=sampler[s])) for s in (slice(0, 3), slice(3, 6))]
    whole = finish(token_sums(mask, logp=learner, sampler_logp=sampler))
    naive = sum(h["token_mult_prob_error"] for h in halves) / 2
    assert abs(naive - whole["token_mult_prob_error"]) > 1e-3


def test_per_sequence_errors_name_the_bad_row_and_mask_it() -> None:
    mask = torch.tensor([[True, True], [True, False], [False, False], [True, True]])
    sampler = torch.zeros(4, 2, dtype=torch.float64)
    learner = torch.tensor([[0.1, -0.1], [2.0, math.nan], [5.0, 5.0], [0.0, 0.0]], dtype=torch.float64)
    errors = sequence_errors(learner, sampler, mask)
    assert errors[:2].tolist() == pytest.approx([math.exp(0.1), math.exp(2.0)])
    assert errors[2].isnan()
    sums, keep = sequence_sums(learner, sampler, mask, threshold=1.5, correct=torch.tensor([1, 1, 1, 0]).bool())
    metrics = finish(sums)
    assert keep.tolist() == [True, False, True, True]
    assert metrics["seq_mult_prob_error/max"] == pytest.approx(math.exp(2.0))
    assert metrics["seq_mult_prob_error/min"] == 1.0
    assert metrics["seq_mult_prob_error/mean"] == pytest.approx((math.exp(0.1) + math.exp(2.0) + 1) / 3)
    assert metrics["seq_mult_prob_error/kept_max"] == pytest.approx(math.exp(0.1))
    assert metrics["seq_mult_prob_error/masked_rows"] == 1.0
    assert metrics["seq_mult_prob_error/masked_correct_share"] == 1.0


def test_a_nan_sequence_is_masked_and_not_waved_through() -> None:
    learner = torch.tensor([[math.nan], [0.0]])
    _, keep = sequence_sums(learner, torch.zeros(2, 1), torch.ones(2, 1, dtype=torch.bool), threshold=1.5)
    assert keep.tolist() == [False, True]


def test_without_masked_rows_the_share_of_correct_ones_is_absent() -> None:
    learner, _, mask = step()
    correct = torch.ones(len(LENGTHS), dtype=torch.bool)
    metrics = finish(sequence_sums(learner, learner, mask, threshold=2.0, correct=correct)[0])
    assert "seq_mult_prob_error/masked_correct_share" not in metrics
    assert metrics["seq_mult_prob_error/masked_rows"] == 0.0


def test_shapes_are_checked() -> None:
    learner, sampler, mask = step()
    with pytest.raises(ShapeError, match="sampler_logp"):
        token_sums(mask, logp=learner, sampler_logp=sampler[:, :1])
