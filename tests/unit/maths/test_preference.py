"""Preference pairs: the right sign, additive sums, and every dropped pair under one reason."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.errors import ConfigError, ShapeError
from surefoot.maths.preference import PreferencePair, completion_logp, preference_loss, sift_pairs
from surefoot.maths.stats import merge

CHOSEN = torch.tensor([-4.0, -9.0, -2.0, -30.0], dtype=torch.float64)
REJECTED = torch.tensor([-5.0, -3.0, -2.5, -10.0], dtype=torch.float64)
REF_CHOSEN = torch.tensor([-4.5, -8.0, -2.2, -29.0], dtype=torch.float64)
REF_REJECTED = torch.tensor([-4.8, -4.0, -2.0, -11.0], dtype=torch.float64)
PAIR = PreferencePair((1, 2), (3, 4, 9), (5, 9), "trace 1", -1.0, -2.0)


def loss_of(chosen: Tensor = CHOSEN, rejected: Tensor = REJECTED, **how: Any) -> Tensor:
    given = {"ref_chosen_logp": REF_CHOSEN, "ref_rejected_logp": REF_REJECTED, "beta": 0.3, "pairs_in_step": 4} | how
    return preference_loss(chosen, rejected, **given).loss


def test_equal_to_a_slow_account() -> None:
    total = 0.0
    for c, r, rc, rr in zip(*(x.tolist() for x in (CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED)), strict=True):
        total += math.log1p(math.exp(-0.3 * ((c - rc) - (r - rr))))
    assert float(loss_of()) == pytest.approx(total / 4, abs=1e-12)


def test_at_the_reference_every_pair_costs_log_two() -> None:
    assert float(loss_of(REF_CHOSEN, REF_REJECTED)) == pytest.approx(math.log(2), abs=1e-12)


def test_the_loss_falls_when_the_chosen_rises_and_when_the_rejected_falls() -> None:
    assert float(loss_of(CHOSEN + 0.1)) < float(loss_of())
    assert float(loss_of(rejected=REJECTED - 0.1)) < float(loss_of())
    chosen, rejected = CHOSEN.clone().requires_grad_(), REJECTED.clone().requires_grad_()
    loss_of(chosen, rejected).backward()
    assert chosen.grad is not None
    assert rejected.grad is not None
    assert bool((chosen.grad < 0).all())
    torch.testing.assert_close(rejected.grad, -chosen.grad, rtol=0, atol=0)


def test_planted_swapped_sides_are_seen() -> None:
    """Teeth: with chosen and rejected exchanged, raising the chosen answer raises the loss."""

    def swapped(chosen: Tensor) -> float:
        refs = {"ref_chosen_logp": REF_REJECTED, "ref_rejected_logp": REF_CHOSEN}
        return float(loss_of(REJECTED, chosen, **refs))

    assert swapped(CHOSEN + 0.1) > swapped(CHOSEN)


def test_far_margins_stay_finite_and_keep_their_gradient() -> None:
    chosen = torch.tensor([-1e4], dtype=torch.float32).requires_grad_()
    zero = torch.zeros(1)
    loss = preference_loss(chosen, zero, zero, zero, beta=1.0, pairs_in_step=1).loss
    loss.backward()
    assert float(loss.detach()) == pytest.approx(1e4)
    assert chosen.grad is not None
    assert float(chosen.grad) == -1.0


@pytest.mark.parametrize("missing", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["ref_chosen_logp", "ref_rejected_logp"])
def test_a_pair_without_a_reference_is_dropped_and_counted_not_scored(missing: float, side: str) -> None:
    given = {"ref_chosen_logp": REF_CHOSEN.clone(), "ref_rejected_logp": REF_REJECTED.clone()}
    given[side][1] = missing
    chosen = CHOSEN.clone().requires_grad_()
    terms = preference_loss(chosen, REJECTED, **given, beta=0.3, pairs_in_step=3)
    terms.loss.backward()
    keep = torch.tensor([0, 2, 3])
    refs = {"ref_chosen_logp": REF_CHOSEN[keep], "ref_rejected_logp": REF_REJECTED[keep]}
    without = loss_of(CHOSEN[keep], REJECTED[keep], pairs_in_step=3, **refs)
    torch.testing.assert_close(terms.loss.detach(), without, rtol=0, atol=1e-14)
    assert chosen.grad is not None
    assert float(chosen.grad[1]) == 0
    assert (int(terms.sums["preference_pairs"]), int(terms.sums["preference_dropped"])) == (3, 1)


def test_a_policy_that_is_not_finite_stays_loud() -> None:
    chosen = CHOSEN.clone()
    chosen[0] = math.nan
    assert math.isnan(float(loss_of(chosen)))


@pytest.mark.parametrize("cut", [[2, 2], [1, 3], [1, 1, 1, 1]], ids=str)
def test_loss_and_sums_do_not_depend_on_the_cut(cut: list[int]) -> None:
    everything = (CHOSEN, REJECTED, REF_CHOSEN, REF_REJECTED)
    whole = preference_loss(*everything, beta=0.3, pairs_in_step=4).sums
    parts = [
        preference_loss(*(x[rows] for x in everything), beta=0.3, pairs_in_step=4).sums
        for rows in torch.arange(4).split(cut)
    ]
    for name, value in merge(parts).items():
        torch.testing.assert_close(value, whole[name], rtol=0, atol=1e-12)
    assert int(whole["preference_wins"]) == 2


def test_the_reference_gets_no_gradient() -> None:
    reference = REF_CHOSEN.clone().requires_grad_()
    loss_of(CHOSEN.clone().requires_grad_(), ref_chosen_logp=reference).backward()
    assert reference.grad is None


def test_an_answer_is_the_sum_of_its_own_tokens() -> None:
    mask = torch.tensor([[True, True, False], [False, False, False]])
    logp = torch.tensor([[-1.0, -2.0, math.nan], [math.nan] * 3])
    assert completion_logp(logp, mask).tolist() == [-3.0, 0.0]
    with pytest.raises(ShapeError, match="mask has type"):
        completion_logp(logp, mask.long())


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"beta": 0.0}, "beta"), ({"beta": math.nan}, "beta"), ({"beta": math.inf}, "beta"),
        ({"pairs_in_step": 0}, "pairs are 0"), ({"rejected": REJECTED[:1]}, "rejected_logp has shape"),
        ({"ref_chosen_logp": REF_CHOSEN.unsqueeze(1)}, "ref_chosen_logp has shape"),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_fit_is_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        loss_of(**change)


def test_token_matrices_are_refused() -> None:
    matrix = torch.zeros(2, 3)
    with pytest.raises(ShapeError, match="one number per pair"):
        preference_loss(matrix, matrix, matrix, matrix, beta=0.1, pairs_in_step=2)


# -- sifting ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"source": ""}, "no_source"),
        ({"rejected_ids": ()}, "too_short"),
        ({"chosen_ids": (7,) * 99}, "too_long"),
        ({"prompt_ids": (7,) * 99}, "too_long"),
        ({"rejected_ids": (3, 4, 9)}, "identical"),
        ({"ref_chosen_logp": None}, "no_reference"),
        ({"ref_rejected_logp": math.nan}, "no_reference"),
    ],
)
def test_a_pair_that_cannot_teach_is_dropped_under_its_reason(change: dict[str, Any], reason: str) -> None:
    sifted = sift_pairs([PAIR, dataclasses.replace(PAIR, **change)], max_tokens=10)
    assert sifted.kept == (PAIR,)
    assert sifted.dropped == {reason: 1}


def test_the_limits_themselves_are_kept() -> None:
    assert sift_pairs([PAIR], max_tokens=5, min_completion=2).dropped == {}
    assert sift_pairs([PAIR], max_tokens=4).dropped == {"too_long": 1}
    assert sift_pairs([PAIR], max_tokens=5, min_completion=3).dropped == {"too_short": 1}


def test_a_repeated_pair_is_kept_once_whatever_its_source() -> None:
    sifted = sift_pairs([PAIR, dataclasses.replace(PAIR, source="trace 2"), PAIR], max_tokens=10)
    assert (sifted.kept, sifted.dropped) == ((PAIR,), {"repeated": 2})


def test_a_contradiction_drops_both_ways_round() -> None:
    reverse = dataclasses.replace(PAIR, chosen_ids=PAIR.rejected_ids, rejected_ids=PAIR.chosen_ids)
    elsewhere = dataclasses.replace(reverse, prompt_ids=(1, 3))
    sifted = sift_pairs([PAIR, reverse, elsewhere], max_tokens=10)
    assert (sifted.kept, sifted.dropped) == ((elsewhere,), {"contradicted": 2})


def test_every_pair_is_kept_or_has_exactly_one_reason() -> None:
    changes = [{}, {"source": ""}, {"rejected_ids": (3, 4, 9), "ref_chosen_logp": None}, {"chosen_ids": ()}, {}]
    sifted = sift_pairs([dataclasses.replace(PAIR, **change) for change in changes], max_tokens=10)
    assert len(sifted.kept) + sum(sifted.dropped.values()) == len(changes)


def test_lengths_below_one_are_refused() -> None:
    for limits in ({"max_tokens": 0}, {"max_tokens": 5, "min_completion": 0}):
        with pytest.raises(ConfigError, match="lengths count tokens"):
            sift_pairs([PAIR], **limits)
