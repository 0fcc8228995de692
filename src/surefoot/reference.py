"""GRPO in one slow file: the oracle.

What is left out, and why:
- No batches, no padding, no masks as tensors: one row and one token at a time, so there is no axis to mix up.
- No microbatches: the whole step is here, so every denominator is a plain count.
- No chunking, caching or buckets: those are promises to be checked against this file.
- No engine, no tokenizer, no reward function: it starts from token ids, rewards and group names.
- No float32: callers pass float64, so a difference is a bug and not rounding.
- No error handling beyond a few checks: it reads what the tests hand it.

It imports nothing of ours and nothing of ours imports it: an oracle that shares code with the suspect is
no oracle. Each function is the formula of docs/maths.md, in the same order.

Read it top to bottom: advantages, log-probabilities, the loss of one token, the loss of one step, one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class ReferenceRow:
    """One sampled completion."""

    prompt: list[int]
    completion: list[int]
    group: str
    reward: float
    sampled: list[bool]
    """True where the policy chose the token; other tokens (what a tool answered) carry no loss."""
    old: list[float]
    """Log-probabilities under the learner's weights at sampling time."""
    sampler: list[float] | None = None
    """What the engine reported."""
    reference: list[float] | None = None
    advantage: float = 0.0


@dataclass
class ReferenceOptions:
    """The same choices as the fast path, under the same names."""

    loss_type: str = "dapo"
    level: str | None = None
    """None: one ratio per row for gspo, one per token for all others."""
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    beta: float = 0.0
    kl_estimator: str = "k3"
    kl_input_clamp: float | None = None
    kl_output_clamp: float | None = None
    kl_bias_correction: bool = True
    correction: str | None = None
    correction_clip: float = 3.0
    correction_floor: float | None = None
    force_on_policy_ratio: bool = False
    positive_nll: float = 0.0
    max_completion_length: int = 256
    temperature: float = 1.0


# -- 1. rewards to advantages ------------------------------------------------------------------------------


def advantages(rewards: Sequence[float], groups: Sequence[str], scale: str = "group") -> list[float]:
    """How much better each row did than the rows that share its group name."""
    everyone = _std(rewards)
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        siblings = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        if all(r == siblings[0] for r in siblings):
            result.append(0.0)
        elif scale == "rank":
            below = sum(r < reward for r in siblings)
            above = sum(r > reward for r in siblings)
            result.append((below - above) / (len(siblings) - 1))
        else:
            centred = reward - math.fsum(siblings) / len(siblings)
            divisor = {"group": _std(siblings), "batch": everyone, "none": 1.0}[scale]
            result.append(centred / max(divisor, 1e-6))
    return result


def _std(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))


# -- 2. what the policy thinks of the tokens ---------------------------------------------------------------


def logprobs(model: Callable[[Tensor], Tensor], row: ReferenceRow, temperature: float = 1.0) -> list[Tensor]:
    """Log-probability of each completion token. `model` maps ids (1, L) to logits (1, L, V)."""
    logits = model(torch.tensor([row.prompt + row.completion]))[0]
    result = []
    for t, token in enumerate(row.completion):
        scores = logits[len(row.prompt) + t - 1] / temperature  # the position before a token predicts it
        result.append(scores[token] - torch.logsumexp(scores, dim=0))
    return result


# -- 3. the loss of one token ------------------------------------------------------------------------------


def _ratio(new: list[Tensor], row: ReferenceRow, t: int, o: ReferenceOptions) -> Tensor:
    """How much likelier the token (or the whole sequence, per token) has become."""
    if o.level != "sequence" and not LOSSES[o.loss_type].row_ratio:
        return _token_ratio(new, row, t, o)
    changes = []
    for s, chosen in enumerate(row.sampled):
        if chosen:
            old = new[s].detach() if o.force_on_policy_ratio else row.old[s]
            changes.append(new[s] - old)
    return torch.exp(_sum(changes) / len(changes))


def _token_ratio(new: list[Tensor], row: ReferenceRow, t: int, o: ReferenceOptions) -> Tensor:
    old = new[t].detach() if o.force_on_policy_ratio else row.old[t]
    return torch.exp(new[t] - old)


def _high(o: ReferenceOptions) -> float:
    return o.epsilon if o.epsilon_high is None else o.epsilon_high


def _weighed(new: list[Tensor], row: ReferenceRow, t: int, o: ReferenceOptions) -> Tensor:
    """The token's log-probability, weighed by a ratio that is capped and carries no gradient."""
    return -min(_ratio(new, row, t, o).item(), _high(o)) * row.advantage * new[t]


def _clipped(new: list[Tensor], row: ReferenceRow, t: int, o: ReferenceOptions) -> Tensor:
    """Clipped objective of one token, as a loss."""
    ratio, a, high = _ratio(new, row, t, o), row.advantage, _high(o)
    if ratio < 1 - o.epsilon:
        bounded = torch.full_like(ratio, 1 - o.epsilon)
    elif ratio > 1 + high:
        bounded = torch.full_like(ratio, 1 + high)
    else:
        bounded = ratio
    if o.delta is not None and ratio > o.delta:
        ratio = torch.full_like(ratio, o.delta)
    return -(ratio * a) if ratio * a <= bounded * a else -(bounded * a)


def _correction(row: ReferenceRow, t: int, o: ReferenceOptions) -> float:
    """How much likelier the learner found the token than the engine that sampled it: old over sampler."""
    if o.correction is None or row.sampler is None:
        return 1.0
    gaps = {s: row.old[s] - row.sampler[s] for s, chosen in enumerate(row.sampled) if chosen}
    weight = math.exp(math.fsum(gaps.values()) if o.correction.startswith("sequence") else gaps[t])
    floor = 0.0 if o.correction_floor is None else o.correction_floor
    if floor <= weight <= o.correction_clip:
        return weight
    if o.correction.endswith("mask"):
        return 0.0
    return o.correction_clip if weight > o.correction_clip else floor


def _kl(new: list[Tensor], row: ReferenceRow, t: int, o: ReferenceOptions) -> Tensor:
    """Estimate of KL(policy || reference) at one sampled token; where a clamp acts it is a constant."""
    if row.reference is None:
        raise ValueError("beta > 0 needs reference log-probabilities")
    gap, weight = row.reference[t] - new[t], torch.ones_like(new[t])
    if o.kl_bias_correction:
        weight = _token_ratio(new, row, t, o)  # the KL is one of tokens, so its weight is too, at either level
    if o.kl_input_clamp is not None and abs(gap.item()) > o.kl_input_clamp:
        gap, weight = torch.full_like(gap, math.copysign(o.kl_input_clamp, gap.item())), weight.detach()
    if o.kl_estimator == "k1":
        kl = -gap
    elif o.kl_estimator == "k2":
        kl = gap * gap / 2
    else:
        kl = torch.expm1(gap) - gap
    kl = kl * weight
    if o.kl_output_clamp is not None and abs(kl.item()) > o.kl_output_clamp:
        kl = torch.full_like(kl, math.copysign(o.kl_output_clamp, kl.item()))
    return kl


def token_loss(new: list[Tensor], row: ReferenceRow, t: int, o: ReferenceOptions) -> Tensor:
    """Everything one token contributes, before dividing."""
    loss = LOSSES[o.loss_type].objective(new, row, t, o) * _correction(row, t, o)
    if o.beta > 0:
        loss = loss + o.beta * _kl(new, row, t, o)
    if o.positive_nll > 0 and row.advantage > 0:
        loss = loss - o.positive_nll * new[t]
    return loss


# -- 4. the loss of one step -------------------------------------------------------------------------------


def step_loss(rows: Sequence[ReferenceRow], new: Sequence[list[Tensor]], o: ReferenceOptions) -> Tensor:
    """() the loss of a whole optimiser step. `new[i][t]` is the log-probability that carries the gradient."""
    per_row = []
    for row, logp in zip(rows, new, strict=True):
        losses = [token_loss(logp, row, t, o) for t, chosen in enumerate(row.sampled) if chosen]
        if losses:
            per_row.append(losses)
    return LOSSES[o.loss_type].reduce(per_row, o)


def _mean_over_rows(per_row: list[list[Tensor]], o: ReferenceOptions) -> Tensor:
    """The mean over rows of the mean over tokens: a long row's token counts less."""
    return _sum([_sum(losses) / len(losses) for losses in per_row]) / len(per_row)


def _mean_over_tokens(per_row: list[list[Tensor]], o: ReferenceOptions) -> Tensor:
    """Every token of the step counts the same."""
    return _sum([loss for losses in per_row for loss in losses]) / sum(len(losses) for losses in per_row)


def _sum_over_limit(per_row: list[list[Tensor]], o: ReferenceOptions) -> Tensor:
    """A constant: length neither rewards nor punishes."""
    return _sum([loss for losses in per_row for loss in losses]) / (len(per_row) * o.max_completion_length)


@dataclass
class ReferenceLoss:
    """One loss type: the loss of one token, and how the step's tokens become one number."""

    objective: Callable[[list[Tensor], ReferenceRow, int, ReferenceOptions], Tensor]
    reduce: Callable[[list[list[Tensor]], ReferenceOptions], Tensor]
    row_ratio: bool = False
    """One ratio for the whole row, whatever `level` says."""


LOSSES = {
    "grpo": ReferenceLoss(_clipped, _mean_over_rows),
    "bnpo": ReferenceLoss(_clipped, _mean_over_tokens),
    "dr_grpo": ReferenceLoss(_clipped, _sum_over_limit),
    "dapo": ReferenceLoss(_clipped, _mean_over_tokens),
    "cispo": ReferenceLoss(_weighed, _mean_over_tokens),
    "gspo": ReferenceLoss(_clipped, _mean_over_rows, row_ratio=True),
}


def _sum(terms: Sequence[Tensor]) -> Tensor:
    total = torch.zeros_like(terms[0])
    for term in terms:
        total = total + term
    return total


# -- 5. one step -------------------------------------------------------------------------------------------


def step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    rows: Sequence[ReferenceRow],
    o: ReferenceOptions,
    scale: str = "group",
) -> float:
    """Advantages, scores, loss, backward, update. The whole algorithm."""
    weights = advantages([row.reward for row in rows], [row.group for row in rows], scale)
    for row, weight in zip(rows, weights, strict=True):
        row.advantage = weight
    loss = step_loss(rows, [logprobs(model, row, o.temperature) for row in rows], o)
    optimizer.zero_grad()
    torch.autograd.backward(loss)
    optimizer.step()
    return float(loss.detach())
