"""The losses: additive over any cut, deaf to masked positions, clipped where they say, refusing nonsense."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surefoot.errors import ConfigError, ShapeError
from surefoot.maths import losses
from surefoot.maths.losses import LossSettings, LossTerms, StepTotals, estimate_kl, kl_in_reward, policy_loss
from surefoot.maths.stats import finish, merge

LENGTHS = [1, 2, 3, 5, 8, 13, 21, 34]  # very unequal rows: equal ones would hide a wrong denominator
TOTALS = StepTotals(rows=len(LENGTHS), tokens=sum(LENGTHS), max_completion_length=40)

VARIANTS: dict[str, dict[str, Any]] = {
    **{f"{kind}/token": {"loss_type": kind} for kind in ("grpo", "bnpo", "dr_grpo", "dapo")},
    **{f"{kind}/sequence": {"loss_type": kind, "level": "sequence"} for kind in ("grpo", "bnpo", "dr_grpo", "dapo")},
    "gspo": {"loss_type": "gspo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.05},
    "dual clip": {"delta": 1.5, "epsilon_high": 0.3},
    "plain kl": {"beta": 0.3, "kl_bias_correction": False},
    "kl and clamps": {"beta": 0.3, "kl_input_clamp": 0.2, "kl_output_clamp": 0.01},
    "token mask": {"correction": "token_mask", "correction_clip": 1.1, "correction_floor": 0.9, "beta": 0.1},
    "sequence truncate": {"loss_type": "grpo", "level": "sequence", "correction": "sequence_truncate"},
    "nll": {"positive_nll": 0.5, "loss_type": "grpo"},
    "forced ratio": {"force_on_policy_ratio": True},
}


class Step:
    """One optimiser step of eight rows in float64."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.mask = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS).unsqueeze(1)
        shape = self.mask.shape

        def noise(scale: float) -> Tensor:
            return scale * torch.randn(shape, generator=generator, dtype=torch.float64)

        self.logp = -torch.rand(shape, generator=generator, dtype=torch.float64) - 0.1
        self.old, self.ref, self.sampler = self.logp + noise(0.3), self.logp + noise(0.3), self.logp + noise(0.1)
        self.advantages = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)

    def run(
        self, rows: list[int] | slice, how: LossSettings, totals: StepTotals = TOTALS
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Loss (), gradient on logp (rows, T) and sums of some rows."""
        logp = self.logp[rows].clone().requires_grad_()
        terms = policy_loss(
            logp, self.old[rows], self.advantages[rows], self.mask[rows],
            settings=how, totals=totals, ref_logp=self.ref[rows], sampler_logp=self.sampler[rows],
        )  # fmt: skip
        (gradient,) = torch.autograd.grad(terms.loss, logp)
        return terms.loss.detach(), gradient, terms.sums


EVERYTHING = slice(None)


@pytest.mark.parametrize("name", VARIANTS)
@settings(max_examples=15, deadline=None)
@given(owner=st.lists(st.integers(0, 3), min_size=len(LENGTHS), max_size=len(LENGTHS)))
def test_the_gradient_does_not_depend_on_the_cut(name: str, owner: list[int]) -> None:
    how, step = LossSettings(**VARIANTS[name]), Step()
    whole_loss, whole_gradient, _ = step.run(EVERYTHING, how)
    loss, gradient = torch.zeros(()), torch.zeros_like(whole_gradient)
    for part in range(4):
        rows = [row for row, o in enumerate(owner) if o == part]
        if rows:
            piece_loss, piece_gradient, _ = step.run(rows, how)
            loss = loss + piece_loss
            gradient[rows] = piece_gradient
    torch.testing.assert_close(gradient, whole_gradient, rtol=0, atol=1e-12)
    torch.testing.assert_close(loss.double(), whole_loss, rtol=0, atol=1e-10)


def test_a_denominator_taken_from_the_microbatch_would_have_been_caught() -> None:
    """Teeth: let each half divide by its own tokens, as bnpo per microbatch does."""
    step, how = Step(), LossSettings(loss_type="bnpo")
    right = step.run(EVERYTHING, how)[1][:4]
    own = StepTotals(8, 2 * sum(LENGTHS[:4]), 40)
    wrong = step.run(slice(0, 4), how, own)[1]
    assert (wrong - right).abs().max() > 1e-3


@pytest.mark.parametrize("name", VARIANTS)
def test_nothing_on_a_masked_position_reaches_the_loss_or_the_gradient(name: str) -> None:
    how, step = LossSettings(**VARIANTS[name]), Step()
    clean_loss, clean_gradient, clean_sums = step.run(EVERYTHING, how)
    for junk in (math.nan, math.inf, -math.inf):
        for tensor in (step.logp, step.old, step.ref, step.sampler):
            tensor[~step.mask] = junk
        loss, gradient, sums = step.run(EVERYTHING, how)
        assert torch.equal(loss, clean_loss)
        assert torch.equal(gradient, clean_gradient)
        assert {k: v.item() for k, v in sums.items()} == {k: v.item() for k, v in clean_sums.items()}
    assert torch.equal(clean_gradient[~step.mask], torch.zeros_like(clean_gradient[~step.mask]))


@pytest.mark.parametrize("name", VARIANTS)
def test_nan_on_a_trained_token_is_never_hidden(name: str) -> None:
    how, step = LossSettings(**VARIANTS[name]), Step()
    step.logp[3, 2] = math.nan
    assert step.run(EVERYTHING, how)[0].isnan()


@pytest.mark.parametrize("correction", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_nan_from_the_sampler_is_never_hidden(correction: str) -> None:
    step = Step()
    step.sampler[3, 2] = math.nan
    assert step.run(EVERYTHING, LossSettings(correction=correction))[0].isnan()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", VARIANTS)
def test_wider_padding_changes_nothing(name: str) -> None:
    how, step = LossSettings(**VARIANTS[name]), Step()
    loss, gradient, _ = step.run(EVERYTHING, how)
    width = step.mask.shape[1]
    for field in ("logp", "old", "ref", "sampler"):
        setattr(step, field, torch.nn.functional.pad(getattr(step, field), (0, 9), value=-7.0))
    step.mask = torch.nn.functional.pad(step.mask, (0, 9))
    padded_loss, padded_gradient, _ = step.run(EVERYTHING, how)
    torch.testing.assert_close(padded_loss, loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(padded_gradient[:, :width], gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_order_of_rows_does_not_matter(name: str) -> None:
    how, step = LossSettings(**VARIANTS[name]), Step()
    order = [3, 1, 7, 0, 2, 6, 5, 4]
    loss, gradient, _ = step.run(EVERYTHING, how)
    shuffled_loss, shuffled_gradient, _ = step.run(order, how)
    torch.testing.assert_close(shuffled_loss, loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(shuffled_gradient, gradient[order], rtol=0, atol=1e-12)


def test_every_option_changes_the_gradient() -> None:
    """A setting that is parsed and then ignored would show here."""
    step = Step()
    gradients = {name: step.run(EVERYTHING, LossSettings(**how))[1] for name, how in VARIANTS.items()}
    names = [n for n in gradients if n not in ("bnpo/token", "bnpo/sequence", "gspo")]  # bnpo is dapo at step level
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            assert (gradients[a] - gradients[b]).abs().max() > 1e-6, (a, b)
    assert torch.equal(gradients["bnpo/token"], gradients["dapo/token"])
    assert torch.equal(gradients["gspo"], gradients["grpo/sequence"])


def test_on_policy_each_token_pulls_with_its_advantage_over_the_count() -> None:
    step = Step()
    step.old = step.logp.clone()
    for kind, divisor in (
        ("dapo", torch.full((8, 1), 87.0)),
        ("grpo", 8.0 * torch.tensor(LENGTHS).unsqueeze(1)),
        ("dr_grpo", torch.full((8, 1), 320.0)),
    ):
        _, gradient, _ = step.run(EVERYTHING, LossSettings(loss_type=kind))  # type: ignore[arg-type]
        expected = (-step.advantages.unsqueeze(1) / divisor) * step.mask
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("advantage", "log_ratio", "moves"),
    [(1.0, 0.5, False), (1.0, -0.5, True), (-1.0, 0.5, True), (-1.0, -0.5, False), (1.0, 0.0, True), (-1.0, 0.1, True)],
)
def test_the_gradient_is_zero_beyond_the_clip_on_the_favourable_side_only(
    advantage: float, log_ratio: float, moves: bool
) -> None:
    logp = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    terms = policy_loss(
        logp, logp.detach() - log_ratio, torch.tensor([advantage]), torch.tensor([[True]]),
        settings=LossSettings(), totals=StepTotals(1, 1, 1),
    )  # fmt: skip
    terms.loss.backward()  # type: ignore[no-untyped-call]
    assert logp.grad is not None
    assert logp.grad.item() == pytest.approx(-advantage * math.exp(log_ratio) if moves else 0.0)
    assert int(terms.sums["clip_region"]) == (not moves)
    assert int(terms.sums["clip_high"]) == (not moves and advantage > 0)
    assert int(terms.sums["clip_low"]) == (not moves and advantage < 0)


def single(how: LossSettings, log_ratio: float, advantage: float = 1.0, sampler: float = 0.0) -> tuple[float, float]:
    """Loss and gradient of one token whose old logprob is -1; `sampler` is old minus sampler."""
    logp = torch.tensor([[-1.0 + log_ratio]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.0]], dtype=torch.float64)
    terms = policy_loss(
        logp, old, torch.tensor([advantage], dtype=torch.float64), torch.tensor([[True]]),
        settings=how, totals=StepTotals(1, 1, 1), sampler_logp=old - sampler, ref_logp=old,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(terms.loss, logp)
    return terms.loss.item(), gradient.item()


def test_epsilon_zero_clips_to_exactly_one() -> None:
    how = LossSettings(epsilon=0.0)
    assert single(how, 0.0) == (-1.0, -1.0)  # the first, on-policy update is whole
    assert single(how, 1e-6) == (-1.0, 0.0)  # after it the favourable side is shut
    assert single(how, -1e-6)[1] == pytest.approx(-1.0, abs=1e-5)


def test_upper_and_lower_clip_are_separate() -> None:
    how = LossSettings(epsilon=0.1, epsilon_high=0.5)
    assert single(how, math.log(1.4))[1] == pytest.approx(-1.4)
    assert single(how, math.log(1.6)) == (pytest.approx(-1.5), 0.0)
    assert single(how, math.log(0.85), -1.0) == (pytest.approx(0.9), 0.0)


def test_dual_clip_bounds_what_a_negative_advantage_can_cost() -> None:
    how = LossSettings(delta=2.0)
    assert single(how, math.log(5.0), -1.0) == (pytest.approx(2.0), 0.0)
    assert single(LossSettings(), math.log(5.0), -1.0) == (pytest.approx(5.0), pytest.approx(5.0))
    assert single(how, math.log(5.0), 1.0) == single(LossSettings(), math.log(5.0), 1.0)


def test_cispo_caps_the_weight_and_keeps_the_gradient() -> None:
    how = LossSettings(loss_type="cispo", epsilon_high=2.0)
    assert single(how, math.log(5.0))[1] == pytest.approx(-2.0)
    assert single(how, math.log(1.5))[1] == pytest.approx(-1.5)
    assert single(how, math.log(0.01))[1] == pytest.approx(-0.01)


def test_a_sequence_ratio_is_the_geometric_mean_and_ignores_masked_tokens() -> None:
    logp = torch.tensor([[-1.0, -2.0, 50.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.1, -1.95, -50.0]], dtype=torch.float64)
    terms = policy_loss(
        logp, old, torch.tensor([1.0]), torch.tensor([[True, True, False]]),
        settings=LossSettings(level="sequence", loss_type="grpo"), totals=StepTotals(1, 2, 3),
    )  # fmt: skip
    assert terms.loss.item() == pytest.approx(-math.exp(0.05 / 2))
    assert int(terms.sums["ratios"]) == 1


@pytest.mark.parametrize(
    ("mode", "gap", "weight"),
    [
        ("token_truncate", 0.3, math.exp(0.3)),
        ("token_truncate", 2.0, 3.0),
        ("token_mask", 2.0, 0.0),
        ("token_mask", 0.3, math.exp(0.3)),
        ("sequence_truncate", 2.0, 3.0),
        ("sequence_mask", 2.0, 0.0),
    ],
)
def test_the_correction_weight_is_old_over_sampler_and_bounded(mode: str, gap: float, weight: float) -> None:
    how = LossSettings(correction=mode)  # type: ignore[arg-type]
    assert single(how, 0.0, sampler=gap)[1] == pytest.approx(-weight)


def test_the_correction_does_not_change_with_inner_steps() -> None:
    """The weight is old over sampler; taken from the current policy it would count the update twice."""
    how = LossSettings(correction="token_truncate", correction_clip=100.0)
    for log_ratio in (0.0, 0.1, -0.1):
        assert single(how, log_ratio, sampler=0.4)[1] == pytest.approx(-math.exp(log_ratio) * math.exp(0.4))


def test_a_lower_bound_truncates_or_masks_as_the_upper_one_does() -> None:
    for mode, weight in (("token_truncate", 0.5), ("token_mask", 0.0)):
        how = LossSettings(correction=mode, correction_floor=0.5)  # type: ignore[arg-type]
        assert single(how, 0.0, sampler=-2.0)[1] == pytest.approx(-weight)


def test_the_correction_leaves_the_kl_penalty_alone() -> None:
    how = LossSettings(correction="token_mask", beta=0.5, kl_estimator="k2", kl_bias_correction=False)
    assert single(how, 0.2, sampler=2.0)[1] == pytest.approx(0.5 * 0.2)


def test_a_sequence_correction_sums_over_the_row() -> None:
    step = Step()
    step.old = step.logp.clone()
    step.sampler = step.logp - 0.05
    _, gradient, sums = step.run(EVERYTHING, LossSettings(correction="sequence_truncate", correction_clip=2.0))
    weights = torch.tensor([min(2.0, math.exp(0.05 * n)) for n in LENGTHS], dtype=torch.float64)
    torch.testing.assert_close(gradient[:, 0], -step.advantages * weights / sum(LENGTHS))
    assert int(sums["corrections"]) == len(LENGTHS)
    assert int(sums["corrections_bounded"]) == sum(0.05 * n > math.log(2) for n in LENGTHS)


def test_a_forced_ratio_is_one_whatever_the_old_policy_said() -> None:
    assert single(LossSettings(force_on_policy_ratio=True), 3.0) == (-1.0, -1.0)


def test_the_kl_penalty_pulls_towards_the_reference_with_the_pinned_value() -> None:
    """Two-token distribution: policy 0.8, reference 0.5. Direction KL(policy || reference)."""
    p, q = 0.8, 0.5
    gap = torch.tensor([math.log(q / p)], dtype=torch.float64)
    assert estimate_kl(gap, "k3").item() == pytest.approx(q / p - math.log(q / p) - 1)
    assert estimate_kl(gap, "k3").item() != pytest.approx(p / q - math.log(p / q) - 1, abs=1e-2)  # reversed
    assert estimate_kl(gap, "k1").item() == pytest.approx(math.log(p / q))
    assert estimate_kl(gap, "k2").item() == pytest.approx(math.log(p / q) ** 2 / 2)
    # k1 and k3, averaged over the policy, are the analytic divergence.
    gaps = torch.tensor([math.log(q / p), math.log((1 - q) / (1 - p))], dtype=torch.float64)
    exact = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    for estimator in ("k1", "k3"):
        values = estimate_kl(gaps, estimator)  # type: ignore[arg-type]
        assert p * values[0].item() + (1 - p) * values[1].item() == pytest.approx(exact)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_descent_on_the_kl_term_lowers_a_token_above_the_reference(estimator: str) -> None:
    how = LossSettings(beta=1.0, kl_estimator=estimator)  # type: ignore[arg-type]
    assert single(how, 0.1, advantage=0.0)[1] > 0  # too likely: the gradient points up, descent lowers it
    assert single(how, -0.1, advantage=0.0)[1] < 0
    assert single(how, 0.0, advantage=0.0)[1] == 0.0


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_with_bias_correction_the_mean_gradient_is_that_of_the_divergence(estimator: str) -> None:
    """Two tokens, policy 0.8 / 0.2 from one logit, reference 0.5 / 0.5: the derivative is known in closed form.

    Without the correction k1 pulls by 0 on average whatever the reference says, and k3 by the wrong amount.
    """

    def mean_gradient(corrected: bool) -> float:
        logit = torch.tensor(math.log(4.0), dtype=torch.float64, requires_grad=True)
        both = torch.stack([torch.nn.functional.logsigmoid(logit), torch.nn.functional.logsigmoid(-logit)])
        how = LossSettings(beta=1.0, kl_estimator=estimator, kl_bias_correction=corrected)  # type: ignore[arg-type]
        total = 0.0
        for token, p in enumerate((0.8, 0.2)):
            logp = both[token].view(1, 1)
            terms = policy_loss(
                logp, logp, torch.zeros(1, dtype=torch.float64), torch.tensor([[True]]), settings=how,
                totals=StepTotals(1, 1, 1), ref_logp=torch.full((1, 1), math.log(0.5), dtype=torch.float64),
            )  # fmt: skip
            (gradient,) = torch.autograd.grad(terms.loss, logit, retain_graph=True)
            total += p * gradient.item()
        return total

    exact = 0.8 * 0.2 * math.log(4.0)  # d/dx of p log(2p) + (1 - p) log(2 - 2p), p = sigmoid(x)
    assert mean_gradient(True) == pytest.approx(exact)
    assert abs(mean_gradient(False) - exact) > 0.02


def test_the_kl_gradient_survives_a_large_gap_in_float32() -> None:
    """Autograd through ratio * k3 subtracts e^20 from e^20 here, and float32 keeps nothing of the 20 that is left."""
    logp = torch.tensor([[-20.0]], requires_grad=True)
    reference = torch.zeros(1, 1)
    terms = policy_loss(
        logp, logp, torch.zeros(1), torch.tensor([[True]]), settings=LossSettings(beta=1.0),
        totals=StepTotals(1, 1, 1), ref_logp=reference,
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(terms.loss, logp)
    assert gradient.item() == pytest.approx(-20.0)
    assert terms.loss.item() == pytest.approx(math.exp(20) - 21)
    plain = (reference - logp).exp() - (reference - logp) - 1
    (naive,) = torch.autograd.grad((plain * (logp - logp.detach()).exp()).sum(), logp)
    assert abs(naive.item() + 20.0) > 1.0  # teeth


def test_kl_clamps_bound_input_and_output() -> None:
    free = LossSettings(beta=1.0, kl_bias_correction=False)
    bounded_in = LossSettings(beta=1.0, kl_bias_correction=False, kl_input_clamp=0.5)
    bounded_out = LossSettings(beta=1.0, kl_bias_correction=False, kl_output_clamp=0.05)
    assert single(free, -2.0, 0.0)[0] == pytest.approx(math.exp(2) - 3)
    assert single(bounded_in, -2.0, 0.0)[0] == pytest.approx(math.exp(0.5) - 1.5)
    assert single(bounded_out, -2.0, 0.0)[0] == pytest.approx(0.05)


def test_kl_in_the_reward_subtracts_the_rows_sum_and_has_no_gradient() -> None:
    logp = torch.tensor([[-1.0, -2.0, math.nan], [-1.0, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([[-1.5, -2.1, 0.0], [-0.5, 7.0, 7.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    got = kl_in_reward(torch.tensor([1.0, 0.0], dtype=torch.float64), logp, ref, mask, beta=0.1)
    assert got.tolist() == pytest.approx([1.0 - 0.1 * 0.6, 0.0 + 0.1 * 0.5])
    assert not got.requires_grad
    assert kl_in_reward(torch.zeros(2), logp, ref, mask, beta=0.1, estimator="k2")[1].item() == pytest.approx(-0.0125)


def test_positive_nll_touches_rows_with_a_positive_advantage_only() -> None:
    step = Step()
    step.old = step.logp.clone()
    _, plain, _ = step.run(EVERYTHING, LossSettings())
    _, pushed, sums = step.run(EVERYTHING, LossSettings(positive_nll=0.5))
    good = (step.advantages > 0).unsqueeze(1) & step.mask
    torch.testing.assert_close(pushed - plain, -0.5 / sum(LENGTHS) * good.double(), rtol=0, atol=1e-15)
    assert int(sums["positive_tokens"]) == int(good.sum())


def test_scaling_rewards_scales_dr_grpo_gradients() -> None:
    step = Step()
    how = LossSettings(loss_type="dr_grpo")
    one = step.run(EVERYTHING, how)[1]
    step.advantages = 3 * step.advantages
    torch.testing.assert_close(step.run(EVERYTHING, how)[1], 3 * one)


FORBIDDEN: list[tuple[dict[str, Any], str]] = [
    ({"loss_type": "cispo", "epsilon_high": 5.0, "level": "sequence"}, "level = sequence"),
    ({"loss_type": "cispo", "epsilon_high": 5.0, "delta": 9.0}, "delta"),
    ({"loss_type": "cispo", "epsilon_high": 5.0, "force_on_policy_ratio": True}, "force_on_policy_ratio"),
    ({"loss_type": "cispo"}, "epsilon_high = None"),
    ({"loss_type": "cispo", "epsilon_high": 0.2}, "epsilon_high = 0.2"),
    ({"delta": 1.2}, "delta = 1.2"),
    ({"delta": 1.4, "epsilon_high": 0.5}, "delta = 1.4"),
    ({"level": "sequence", "correction": "token_truncate"}, "sequence correction"),
    ({"level": "sequence", "correction": "token_mask"}, "sequence correction"),
    ({"force_on_policy_ratio": True, "delta": 3.0}, "force_on_policy_ratio"),
    ({"correction": "token_mask", "correction_floor": 3.0}, "correction_floor"),
    ({"correction_floor": 0.5}, "bound nothing"),
    ({"kl_input_clamp": 1.0}, "beta = 0"),
    ({"kl_output_clamp": 1.0}, "beta = 0"),
    ({"epsilon": 1.0}, "epsilon"),
    ({"epsilon": -0.1}, "epsilon"),
    ({"epsilon_high": -0.1}, "high"),
    ({"beta": -0.1}, "beta"),
    ({"beta": math.nan}, "beta"),
    ({"positive_nll": -1.0}, "positive_nll"),
    ({"correction_clip": 0.0}, "correction_clip"),
    ({"beta": 1.0, "kl_input_clamp": 0.0}, "kl_input_clamp"),
    ({"loss_type": "ppo"}, "loss_type"),
    ({"level": "turn"}, "level"),
    ({"kl_estimator": "k4"}, "kl_estimator"),
    ({"correction": "truncate"}, "correction"),
]


@pytest.mark.parametrize(("arguments", "message"), FORBIDDEN, ids=str)
def test_forbidden_pairs_cannot_be_constructed(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LossSettings(**arguments)


def test_totals_without_tokens_are_refused_and_not_divided_by() -> None:
    step = Step()
    for how, totals in (
        ("dapo", StepTotals(8, 0, 40)),
        ("grpo", StepTotals(0, 87, 40)),
        ("dr_grpo", StepTotals(8, 87, 0)),
    ):
        with pytest.raises(ShapeError, match="the step's"):
            step.run(EVERYTHING, LossSettings(loss_type=how), totals)  # type: ignore[arg-type]


def test_a_microbatch_without_trained_tokens_adds_exactly_nothing() -> None:
    step = Step()
    step.mask[2] = False
    for name, how in VARIANTS.items():
        loss, gradient, sums = step.run([2], LossSettings(**how))
        assert loss.item() == 0.0, name
        assert not gradient.any(), name
        assert not any(value.item() for value in sums.values()), name


@pytest.mark.parametrize("field", ["old", "ref", "sampler", "advantages", "mask"])
def test_shapes_that_would_broadcast_are_refused(field: str) -> None:
    step = Step()
    setattr(step, field, getattr(step, field)[:, :1] if field != "advantages" else step.advantages.unsqueeze(1))
    with pytest.raises(ShapeError, match="shape"):
        step.run(EVERYTHING, LossSettings(beta=0.1, correction="token_mask"))


def test_missing_inputs_are_refused() -> None:
    logp, mask = torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool)
    for how in (LossSettings(beta=0.1), LossSettings(correction="token_mask")):
        with pytest.raises(ShapeError, match="without"):
            policy_loss(logp, logp, torch.zeros(1), mask, settings=how, totals=StepTotals(1, 1, 1))
    with pytest.raises(ShapeError, match="mask has type"):
        policy_loss(logp, logp, torch.zeros(1), mask.float(), settings=LossSettings(), totals=StepTotals(1, 1, 1))


# -- clamps, overflow, rounding ---------------------------------------------------------------------


def held_kl(x: float, ref: float, old: float, estimator: str, low: float | None, high: float | None) -> float | None:
    """Value of one token's weighed KL in plain Python, or None where a clamp holds it: then nothing may push."""
    gap = ref - x
    if low is not None and abs(gap) > low:
        return None
    k = {"k1": -gap, "k2": gap * gap / 2, "k3": math.exp(gap) - gap - 1}[estimator]
    value = math.exp(x - old) * k
    return None if high is not None and abs(value) > high else value


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize(("low", "high"), [(None, None), (5.0, None), (None, 2.0), (20.0, 10.0), (1.0, 0.3)])
@pytest.mark.parametrize("gap", [-22.0, -6.0, -1.5, -0.4, 0.3, 1.5, 3.0, 6.0, 21.0])
def test_a_clamped_kl_pushes_nowhere_and_any_other_as_finite_differences_say(
    gap: float, low: float | None, high: float | None, estimator: Any, level: Any
) -> None:
    x, old, h = -23.0, -23.2, 1e-4
    ref = x + gap
    values = [held_kl(at, ref, old, estimator, low, high) for at in (x - h, x, x + h)]
    expected = 0.0 if None in values else (values[2] - values[0]) / (2 * h)  # type: ignore[operator]
    how = LossSettings(beta=1.0, kl_estimator=estimator, kl_input_clamp=low, kl_output_clamp=high, level=level)
    logp = torch.tensor([[x]], dtype=torch.float64, requires_grad=True)
    terms = policy_loss(
        logp, torch.full_like(logp, old), torch.zeros(1), torch.tensor([[True]]), settings=how,
        totals=StepTotals(1, 1, 1), ref_logp=torch.full_like(logp, ref),
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(terms.loss, logp)
    assert gradient.item() == pytest.approx(expected, rel=1e-3, abs=1e-6)
    if values[1] is not None:
        assert terms.loss.item() == pytest.approx(values[1])
    elif high is not None and (low is None or abs(gap) <= low):
        assert abs(terms.loss.item()) == high


@pytest.mark.parametrize(("low", "high"), [(5.0, None), (20.0, 10.0)])
def test_planted_weight_that_keeps_its_gradient_drives_the_policy_away(
    monkeypatch: pytest.MonkeyPatch, low: float, high: float | None
) -> None:
    """Reference 6 nats above the policy: the bug raises the loss with the token's probability, by 142 and by 10."""

    def clamped_then_weighed(logp: Tensor, ref_logp: Tensor, ratio: Tensor, how: LossSettings) -> Tensor:
        gap = (ref_logp - logp).clamp(-low, low)
        kl = gap.exp() - gap - 1
        return (kl if high is None else kl.clamp(-high, high)) * ratio

    def push() -> float:
        logp = torch.tensor([[-7.0]], dtype=torch.float64, requires_grad=True)
        terms = policy_loss(
            logp, logp.detach(), torch.zeros(1), torch.tensor([[True]]), totals=StepTotals(1, 1, 1),
            settings=LossSettings(beta=1.0, kl_input_clamp=low, kl_output_clamp=high), ref_logp=logp.detach() + 6,
        )  # fmt: skip
        return float(torch.autograd.grad(terms.loss, logp)[0])

    assert push() == 0.0
    monkeypatch.setattr(losses, "_penalty", clamped_then_weighed)
    assert push() == pytest.approx(142.4 if high is None else 10.0, abs=0.1)


def test_at_sequence_level_a_kl_term_is_weighed_by_its_own_token() -> None:
    """Two tokens that moved in opposite ways: the row's ratio is 1, theirs are not."""
    logp = torch.tensor([[-1.0, -1.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.5, -0.5]], dtype=torch.float64)
    how = LossSettings(loss_type="gspo", beta=1.0, kl_estimator="k2")
    terms = policy_loss(
        logp, old, torch.zeros(1), torch.tensor([[True, True]]), settings=how, totals=StepTotals(1, 2, 2),
        ref_logp=torch.full_like(logp, -2.0).detach(),
    )  # fmt: skip
    assert terms.loss.item() == pytest.approx((math.exp(0.5) + math.exp(-0.5)) / 2 * 0.5)


def test_k3_is_no_rounding_where_policy_and_reference_nearly_agree() -> None:
    gap = torch.tensor([1e-4, -1e-4, 1e-3], dtype=torch.float32)
    found = estimate_kl(gap, "k3").tolist()
    assert found == pytest.approx([5.0e-9, 5.0e-9, 5.0e-7], rel=1e-2)
    assert (gap.exp() - gap - 1).tolist() != pytest.approx(found, rel=0.5), "the plain form is noise here"


@pytest.mark.parametrize(
    "how", [{}, {"loss_type": "gspo"}, {"loss_type": "cispo", "epsilon_high": 5.0}, {"delta": 4.0}]
)
@pytest.mark.parametrize("advantage", [1.0, 0.0, -1.0])
def test_a_ratio_that_overflows_is_harmless_where_a_clip_acts(how: dict[str, Any], advantage: float) -> None:
    """Log-ratio 95 in float32: e^95 is infinite, and 0 times infinity was the gradient."""
    logp = torch.tensor([[-1.0]], requires_grad=True)
    terms = policy_loss(
        logp, torch.tensor([[-96.0]]), torch.tensor([advantage]), torch.tensor([[True]]),
        settings=LossSettings(**how), totals=StepTotals(1, 1, 1),
    )  # fmt: skip
    (gradient,) = torch.autograd.grad(terms.loss, logp)
    if advantage < 0 and not {"delta", "epsilon_high"} & set(how):
        assert not terms.loss.isfinite(), "no clip acts here: such a step is refused, not bounded in silence"
        return
    cap = how.get("delta", 0.0) if advantage < 0 else 1.2
    weight, slope = (5.0, 5.0) if "epsilon_high" in how else (cap, 0.0)
    assert terms.loss.item() == pytest.approx(-weight * advantage * (-1.0 if "epsilon_high" in how else 1.0))
    assert gradient.item() == pytest.approx(-slope * advantage)
    assert all(math.isfinite(value) for value in finish(terms.sums).values())


@pytest.mark.parametrize("kind", ["sequence_truncate", "sequence_mask"])
def test_a_sequence_weight_that_overflows_leaves_every_metric_finite_in_any_cut(kind: Any) -> None:
    """4,000 tokens at 0.025 nats add up to 100: e^100 is no float32."""
    rows, width = 3, 4000
    mask = torch.ones(rows, width, dtype=torch.bool)
    logp = torch.full((rows, width), -1.0, requires_grad=True)
    sampler = logp.detach() - torch.tensor([[0.025], [0.0], [-0.025]])
    how = LossSettings(correction=kind)

    def run(part: slice) -> LossTerms:
        return policy_loss(
            logp[part], logp.detach()[part], torch.ones(rows)[part], mask[part], settings=how,
            totals=StepTotals(rows, rows * width, width), sampler_logp=sampler[part],
        )  # fmt: skip

    whole = run(slice(None))
    metrics = finish(whole.sums)
    cut = finish(merge([run(slice(0, 1)).sums, run(slice(1, 3)).sums]))
    assert all(math.isfinite(value) for value in metrics.values())
    assert cut == pytest.approx(metrics, rel=1e-6, abs=1e-7)
    assert metrics["correction/overflow"] == 1.0
    assert metrics["correction/raw_mean"] == pytest.approx((math.exp(20) + 1) / 3, rel=1e-5)
    assert metrics["correction/log_mean"] == pytest.approx(0.0, abs=1e-3)
    used = 3.0 if kind == "sequence_truncate" else 0.0
    (gradient,) = torch.autograd.grad(whole.loss, logp)
    assert gradient[:, 0].tolist() == pytest.approx([-used / 12000, -1 / 12000, 0.0], abs=1e-9)


@pytest.mark.parametrize("kind", ["token_mask", "sequence_mask"])
def test_what_the_mask_rejects_stays_in_the_denominator_and_is_told(kind: Any) -> None:
    """One row of two is rejected: the other pulls as hard as before, and the step is half of it."""
    logp = torch.full((2, 4), -1.0, dtype=torch.float64, requires_grad=True)
    mask, totals = torch.ones(2, 4, dtype=torch.bool), StepTotals(2, 8, 4)

    def gradient(sampler: Tensor) -> tuple[Tensor, dict[str, float]]:
        terms = policy_loss(
            logp, logp.detach(), torch.ones(2), mask, settings=LossSettings(correction=kind), totals=totals,
            sampler_logp=sampler,
        )  # fmt: skip
        return torch.autograd.grad(terms.loss, logp)[0], finish(terms.sums)

    agreed, before = gradient(logp.detach())
    strange = logp.detach().clone()
    strange[1] -= 2.0
    rejected, after = gradient(strange)
    torch.testing.assert_close(rejected[0], agreed[0], rtol=0, atol=0)
    assert not rejected[1].any()
    assert rejected.sum() == agreed.sum() / 2
    assert (before["correction/rejected_share"], after["correction/rejected_share"]) == (0.0, 0.5)
