"""Self-distillation: against a slow float64 reference, deaf to masked and unhinted rows, aligned or refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.errors import ConfigError, ShapeError
from surefoot.maths import distillation
from surefoot.maths.distillation import completion_logits, distillation_loss, live_mask, refuse_misaligned
from surefoot.maths.stats import merge

LENGTHS = [1, 2, 5, 9]  # very unequal rows: equal ones would hide a wrong denominator
WIDTH, VOCABULARY = max(LENGTHS), 11
MASK = torch.arange(WIDTH) < torch.tensor(LENGTHS).unsqueeze(1)
TOKENS = sum(LENGTHS)


def logits(seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(len(LENGTHS), WIDTH, VOCABULARY, generator=generator, dtype=dtype)


STUDENT, TEACHER = logits(1), logits(2)


def loss_of(student: Tensor = STUDENT, teacher: Tensor = TEACHER, mask: Tensor = MASK, **how: Any) -> Tensor:
    return distillation_loss(student, teacher, mask, **{"tokens_in_step": TOKENS} | how).loss


def gradient_of(student: Tensor = STUDENT, teacher: Tensor = TEACHER, **how: Any) -> Tensor:
    leaf = student.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(leaf, teacher, **how), leaf)
    return gradient


# -- an independent account, token by token -----------------------------------


def softmax(row: list[float]) -> list[float]:
    weights = [math.exp(x - max(row)) for x in row]
    return [weight / sum(weights) for weight in weights]


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def bucket(p: list[float], kept: list[int]) -> list[float]:
    return [p[i] for i in kept] + [sum(x for i, x in enumerate(p) if i not in kept)]


def slow(mixing: float, top_k: int | None, clip: float | None, log_ratio: Tensor) -> float:
    total = 0.0
    for row, length in enumerate(LENGTHS):
        for token in range(length):
            q, p = (softmax(side[row, token].tolist()) for side in (STUDENT, TEACHER))
            if top_k is not None and top_k < VOCABULARY:
                kept = sorted(range(VOCABULARY), key=lambda i: -q[i])[:top_k]
                p, q = bucket(p, kept), bucket(q, kept)
            if mixing in (0, 1):
                value = kl(p, q) if mixing == 0 else kl(q, p)
            else:
                m = [mixing * a + (1 - mixing) * b for a, b in zip(p, q, strict=True)]
                value = mixing * kl(p, m) + (1 - mixing) * kl(q, m)
            ratio = math.exp(float(log_ratio[row, token]))
            total += value * (1.0 if clip is None else min(ratio, clip))
    return total / TOKENS


@pytest.mark.parametrize("mixing", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("top_k", [None, 1, 3, VOCABULARY - 1, VOCABULARY, 99])
@pytest.mark.parametrize("clip", [None, 1.2])
def test_equal_to_a_slow_account(mixing: float, top_k: int | None, clip: float | None) -> None:
    log_ratio = 0.5 * logits(3)[..., 0]
    given = {} if clip is None else {"importance_clip": clip, "log_ratio": log_ratio}
    fast = loss_of(mixing=mixing, top_k=top_k, **given)
    assert float(fast) == pytest.approx(slow(mixing, top_k, clip, log_ratio), abs=1e-12)


def test_planted_swapped_direction_is_seen() -> None:
    """Teeth: forward and reverse differ on these inputs by far more than the tolerance above."""
    assert abs(float(loss_of(mixing=0.0)) - float(loss_of(mixing=1.0))) > 1e-2


def test_the_two_ends_are_the_two_kls() -> None:
    p, q = TEACHER.log_softmax(-1), STUDENT.log_softmax(-1)
    forward = (p.exp() * (p - q)).sum(-1)[MASK].sum() / TOKENS
    reverse = (q.exp() * (q - p)).sum(-1)[MASK].sum() / TOKENS
    assert abs(float(loss_of(mixing=0.0) - forward)) < 1e-6
    assert abs(float(loss_of(mixing=1.0) - reverse)) < 1e-6


@pytest.mark.parametrize(("mixing", "end"), [(1e-4, 0.0), (1 - 1e-4, 1.0)])
def test_near_an_end_the_mixture_leans_to_that_end(mixing: float, end: float) -> None:
    """w KL(P||M) + (1-w) KL(Q||M) is about w KL(P||Q) near 0: small, and of the right direction."""
    scaled = float(loss_of(mixing=mixing)) / 1e-4
    other = float(loss_of(mixing=1 - end))
    assert scaled == pytest.approx(float(loss_of(mixing=end)), rel=1e-2)
    assert abs(scaled - other) > 1e-2


# -- what it must not do ------------------------------------------------------


@pytest.mark.parametrize("mixing", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("top_k", [None, 3])
def test_an_empty_hint_costs_nothing_and_pulls_nowhere(mixing: float, top_k: int | None) -> None:
    assert abs(float(loss_of(STUDENT, STUDENT.clone(), mixing=mixing, top_k=top_k))) < 1e-12
    assert float(gradient_of(STUDENT, STUDENT.clone(), mixing=mixing, top_k=top_k).abs().max()) < 1e-12


@pytest.mark.parametrize("mixing", [0.0, 0.5, 1.0])
def test_the_teacher_gets_no_gradient_at_all(mixing: float) -> None:
    student, teacher = STUDENT.clone().requires_grad_(), TEACHER.clone().requires_grad_()
    loss_of(student, teacher, mixing=mixing).backward()
    assert teacher.grad is None
    assert student.grad is not None
    assert float(student.grad.abs().sum()) > 0


def test_planted_shared_weights_stay_out_of_the_teacher() -> None:
    """Teeth: student and teacher come from one parameter, as in self-distillation; only the student's path counts."""
    weight = torch.full((VOCABULARY,), 0.3, dtype=torch.float64).requires_grad_()
    (both,) = torch.autograd.grad(loss_of(STUDENT + weight, TEACHER * weight, mixing=0.0), weight)
    (one,) = torch.autograd.grad(loss_of(STUDENT + weight, (TEACHER * weight).detach(), mixing=0.0), weight)
    leaking = weight.clone().detach().requires_grad_()
    p, q = (TEACHER * leaking).log_softmax(-1), (STUDENT + leaking).log_softmax(-1)
    (leaked,) = torch.autograd.grad((p.exp() * (p - q)).sum(-1)[MASK].sum() / TOKENS, leaking)
    torch.testing.assert_close(both, one, rtol=0, atol=0)
    assert float((leaked - one).abs().max()) > 1e-3


@pytest.mark.parametrize("mixing", [0.0, 0.5, 1.0])
def test_a_teacher_one_token_off_costs_more(mixing: float) -> None:
    """A teacher that agrees with the student but for a little; shifted, it agrees with the neighbour."""
    teacher = STUDENT + 0.1 * TEACHER
    aligned = float(loss_of(teacher=teacher, mixing=mixing))
    for shift in (1, -1):
        assert float(loss_of(teacher=teacher.roll(shift, dims=1), mixing=mixing)) > 10 * aligned


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("mixing", [0.0, 0.5, 1.0])
def test_rows_without_feedback_are_selected_away_not_filled_with_zero(bad: float, mixing: float) -> None:
    has_feedback = torch.tensor([True, False, True, False])
    teacher = TEACHER.clone()
    teacher[~has_feedback] = bad
    teacher[~MASK] = bad
    student = STUDENT.clone()
    student[~MASK] = bad
    tokens = LENGTHS[0] + LENGTHS[2]
    how = {"mixing": mixing, "has_feedback": has_feedback, "tokens_in_step": tokens}
    terms = distillation_loss(student, teacher, MASK, **how)
    alone = distillation_loss(STUDENT[::2], TEACHER[::2], MASK[::2], mixing=mixing, tokens_in_step=tokens)
    torch.testing.assert_close(terms.loss, alone.loss, rtol=0, atol=1e-12)
    gradient = gradient_of(student, teacher, **how)
    assert bool((gradient[~live_mask(MASK, has_feedback)] == 0).all())
    assert bool(gradient.isfinite().all())
    assert {name: int(terms.sums[name]) for name in ("distill_rows", "distill_rows_live", "distill_tokens")} == {
        "distill_rows": 4, "distill_rows_live": 2, "distill_tokens": tokens,
    }  # fmt: skip


def test_planted_zero_fill_would_look_like_a_loss() -> None:
    """Teeth: a teacher of zeros is the uniform distribution, and it pulls."""
    filled = TEACHER.clone()
    filled[1::2] = 0.0
    has_feedback = torch.tensor([True, False, True, False])
    honest = loss_of(teacher=filled, has_feedback=has_feedback, tokens_in_step=6)
    assert abs(float(loss_of(teacher=filled, tokens_in_step=6) - honest)) > 0.1


@pytest.mark.parametrize("mixing", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("top_k", [None, 2, 9])
def test_forbidden_tokens_cost_nothing_and_leave_gradients_finite(mixing: float, top_k: int | None) -> None:
    student, teacher = STUDENT.clone(), TEACHER.clone()
    student[..., :2] = teacher[..., :2] = -math.inf
    how = {"mixing": mixing, "top_k": top_k}
    without = loss_of(student[..., 2:], teacher[..., 2:], **how)
    torch.testing.assert_close(loss_of(student, teacher, **how), without, rtol=0, atol=1e-12)
    assert bool(gradient_of(student, teacher, **how).isfinite().all())


def test_what_the_student_forbids_and_the_teacher_wants_is_infinite_not_hidden() -> None:
    student = STUDENT.clone()
    student[..., 0] = -math.inf
    assert float(loss_of(student, mixing=0.0)) == math.inf


# -- sums, cuts, precision ----------------------------------------------------


@pytest.mark.parametrize("cut", [[2, 2], [1, 3], [1, 1, 1, 1]], ids=str)
@pytest.mark.parametrize("how", [{"mixing": 0.5}, {"mixing": 1.0, "top_k": 3}, {"chunk_tokens": 4}], ids=str)
def test_loss_gradient_and_sums_do_not_depend_on_the_cut(cut: list[int], how: dict[str, Any]) -> None:
    has_feedback = torch.tensor([True, True, False, True])
    how = how | {"tokens_in_step": 12, "has_feedback": has_feedback}
    whole = distillation_loss(STUDENT, TEACHER, MASK, **how)
    gradient, parts = [], []
    for rows in torch.arange(4).split(cut):
        leaf = STUDENT[rows].clone().requires_grad_()
        terms = distillation_loss(leaf, TEACHER[rows], MASK[rows], **how | {"has_feedback": has_feedback[rows]})
        gradient.append(torch.autograd.grad(terms.loss, leaf)[0])
        parts.append(terms.sums)
    torch.testing.assert_close(torch.cat(gradient), gradient_of(**how), rtol=0, atol=1e-14)
    for name, value in merge(parts).items():
        torch.testing.assert_close(value, whole.sums[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_chunks_change_neither_loss_nor_gradient(chunk: int) -> None:
    for how in ({"mixing": 0.5}, {"mixing": 0.0, "top_k": 3}):
        torch.testing.assert_close(loss_of(**how, chunk_tokens=chunk), loss_of(**how), rtol=0, atol=1e-13)
        torch.testing.assert_close(gradient_of(**how, chunk_tokens=chunk), gradient_of(**how), rtol=0, atol=1e-14)


@pytest.mark.parametrize("chunk", [None, 2])
def test_a_microbatch_without_a_live_row_adds_zero_and_still_goes_backward(chunk: int | None) -> None:
    none = torch.zeros(4, dtype=torch.bool)
    assert float(loss_of(has_feedback=none, chunk_tokens=chunk)) == 0
    assert float(gradient_of(has_feedback=none, chunk_tokens=chunk).abs().sum()) == 0


def test_log_probabilities_do_as_well_as_logits_and_half_precision_is_widened() -> None:
    torch.testing.assert_close(loss_of(STUDENT.log_softmax(-1), mixing=0.5), loss_of(mixing=0.5), rtol=0, atol=1e-12)
    half = loss_of(STUDENT.bfloat16(), TEACHER.bfloat16(), mixing=1.0)
    assert half.dtype == torch.float32
    rounded = loss_of(STUDENT.bfloat16().double(), TEACHER.bfloat16().double(), mixing=1.0)
    assert float(half) == pytest.approx(float(rounded), rel=1e-5)


def test_temperature_divides_both_sides() -> None:
    torch.testing.assert_close(loss_of(temperature=2.0), loss_of(STUDENT / 2, TEACHER / 2), rtol=0, atol=1e-13)


def test_the_importance_weight_is_clipped_counted_and_carries_no_gradient() -> None:
    log_ratio = torch.zeros(MASK.shape, dtype=torch.float64)
    log_ratio[3, :4] = 2.0
    leaf = log_ratio.clone().requires_grad_()
    terms = distillation_loss(
        STUDENT.clone().requires_grad_(), TEACHER, MASK, tokens_in_step=TOKENS, importance_clip=1.5, log_ratio=leaf
    )
    terms.loss.backward()
    assert leaf.grad is None
    assert int(terms.sums["distill_clipped"]) == 4


# -- alignment ----------------------------------------------------------------


def test_contexts_of_different_length_meet_token_by_token() -> None:
    """A causal toy model: logits depend on the current token, so the same completion gives the same logits."""
    table = 2 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    completion = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    plain = torch.cat([torch.tensor([[7, 8], [7, 8]]), completion], dim=1)
    hinted = torch.cat([torch.tensor([[1, 2, 3, 4, 8], [5, 5, 5, 5, 8]]), completion], dim=1)
    mask = torch.ones(2, 5, dtype=torch.bool)
    student = completion_logits(table[plain], 5, [2, 2])
    teacher = completion_logits(table[hinted], 5, [5, 5])
    assert float(loss_of(student, teacher, mask)) == 0
    torch.testing.assert_close(teacher[:, 1:], table[completion[:, :-1]], rtol=0, atol=0)
    assert float(loss_of(student, completion_logits(table[hinted], 5, [4, 4]), mask)) > 0.1
    refuse_misaligned(plain[:, 2:], hinted[:, 5:], mask)
    with pytest.raises(ShapeError, match="row 0, token 0: the student scores id 3, the teacher 8"):
        refuse_misaligned(plain[:, 2:], hinted[:, 4:9], mask)


def test_different_ids_under_the_mask_are_refused_and_outside_it_do_not_matter() -> None:
    ids = torch.arange(MASK.numel()).view(MASK.shape)
    refuse_misaligned(ids, ids + (~MASK).long(), MASK)
    with pytest.raises(ShapeError, match="17 such tokens"):
        refuse_misaligned(ids, ids + 1, MASK)


# -- refusals -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"mixing": -0.1}, "mixing"), ({"mixing": 1.1}, "mixing"), ({"mixing": math.nan}, "mixing"),
        ({"top_k": 0}, "top_k"), ({"importance_clip": 2.0}, "without log_ratio"), ({"temperature": 0.0}, "temperature"),
        ({"importance_clip": 0.0, "log_ratio": torch.zeros(MASK.shape)}, "importance_clip"),
        ({"log_ratio": torch.zeros(MASK.shape)}, "with log_ratio"), ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"tokens_in_step": 0}, "live tokens are 0"),
        ({"has_feedback": torch.ones(3, dtype=torch.bool)}, "has_feedback"),
        ({"has_feedback": torch.ones(4)}, "has_feedback"), ({"mask": MASK.long()}, "mask has type"),
        ({"mask": MASK[:, :-1]}, "mask has shape"), ({"teacher": TEACHER[:, 1:]}, "teacher_logits has shape"),
        ({"teacher": TEACHER[:1]}, "teacher_logits has shape"), ({"student": STUDENT[0]}, "student_logits"),
    ],
    ids=str,
)  # fmt: skip
def test_what_does_not_fit_is_refused(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        loss_of(**change)


def test_planted_undetached_teacher_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: take the detach away, and the test of the teacher's gradient goes red."""
    monkeypatch.setattr(Tensor, "detach", lambda self: self)
    with pytest.raises(AssertionError):
        test_the_teacher_gets_no_gradient_at_all(0.0)


def test_planted_shift_in_the_cut_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: cut one position early, as when the token itself is taken for the one that predicts it."""
    right = distillation._align
    monkeypatch.setattr(distillation, "_align", lambda logits, width, lens: right(logits, width, [n - 1 for n in lens]))
    with pytest.raises(AssertionError):
        test_contexts_of_different_length_meet_token_by_token()
