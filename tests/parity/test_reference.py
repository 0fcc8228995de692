"""Ours equals the oracle: losses and gradients against `surefoot/reference.py`, which shares no code with them.

Tolerance 1e-10 in float64: both sides do the same arithmetic in another order, on numbers of size one.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot import reference
from surefoot.maths.advantages import compute_advantages
from surefoot.maths.logprobs import compute_logprobs, score_tokens_chunked
from surefoot.maths.losses import LossSettings, policy_loss
from surefoot.maths.packing import Batch, make_batch, step_totals
from surefoot.records import TrainSample

TOLERANCE = {"rtol": 0.0, "atol": 1e-10}
LIMIT = 12
VOCABULARY = 13
SHAPES = [(3, 1), (2, 7), (5, 4), (1, 12), (4, 2), (2, 9)]  # (prompt, completion): unequal on purpose

CLIPPED = ["grpo", "bnpo", "dr_grpo", "dapo"]
CORRECTIONS = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
CASES: list[dict[str, Any]] = [
    *({"loss_type": t, "level": lv} for t, lv in itertools.product(CLIPPED, ["token", "sequence"])),
    *({"loss_type": t, "level": "sequence", "epsilon": 3e-2, "epsilon_high": 4e-2} for t in CLIPPED),
    {"loss_type": "gspo"},
    {"loss_type": "gspo", "epsilon": 3e-2, "epsilon_high": 4e-2, "beta": 0.2, "correction": "sequence_mask"},
    {"loss_type": "cispo", "epsilon_high": 1.1},
    {"loss_type": "cispo", "epsilon_high": 5.0, "beta": 0.2},
    *({"beta": 0.3, "kl_estimator": k, "loss_type": t} for k, t in itertools.product(["k1", "k2", "k3"], CLIPPED)),
    *({"beta": 0.3, "kl_estimator": k, "kl_bias_correction": False} for k in ["k1", "k2", "k3"]),
    {"beta": 0.3, "level": "sequence"},
    {"beta": 0.3, "level": "sequence", "kl_estimator": "k2", "kl_input_clamp": 0.2},
    *({"beta": 0.3, "kl_input_clamp": 0.1, "kl_estimator": k} for k in ["k1", "k2", "k3"]),
    *({"beta": 0.3, "kl_output_clamp": 0.02, "kl_estimator": k} for k in ["k1", "k2", "k3"]),
    {"beta": 0.3, "kl_input_clamp": 0.2, "kl_output_clamp": 0.01},
    {"beta": 0.3, "kl_input_clamp": 0.2, "kl_output_clamp": 0.01, "kl_bias_correction": False},
    {"epsilon": 0.0},
    {"epsilon": 0.1, "epsilon_high": 0.5},
    {"delta": 1.3, "loss_type": "grpo"},
    {"delta": 1.5, "level": "sequence", "epsilon": 0.01},
    *({"correction": c, "correction_clip": 1.15, "loss_type": t} for c, t in itertools.product(CORRECTIONS, CLIPPED)),
    *({"correction": c, "correction_clip": 1.15, "correction_floor": 0.9, "beta": 0.1} for c in CORRECTIONS),
    {"correction": "sequence_mask", "level": "sequence", "correction_clip": 1.1},
    {"correction": "token_truncate", "correction_clip": 1.1, "loss_type": "cispo", "epsilon_high": 1.2},
    {"force_on_policy_ratio": True},
    {"force_on_policy_ratio": True, "level": "sequence", "loss_type": "grpo"},
    *({"positive_nll": 0.4, "loss_type": t} for t in CLIPPED),
    {"positive_nll": 0.4, "beta": 0.2, "correction": "token_mask", "correction_clip": 1.1, "delta": 1.4},
]


def rows(seed: int = 0) -> list[reference.ReferenceRow]:
    """Six completions of two tasks; one holds tokens that a tool wrote, one starts with them."""
    rng = random.Random(seed)
    made = []
    for i, (prompt, completion) in enumerate(SHAPES):
        old = [-rng.random() * 2 - 0.1 for _ in range(completion)]
        made.append(
            reference.ReferenceRow(
                prompt=[rng.randrange(VOCABULARY) for _ in range(prompt)],
                completion=[rng.randrange(VOCABULARY) for _ in range(completion)],
                group="ab"[i % 2],
                reward=rng.choice([0.0, 0.5, 1.0]) + 0.1 * i,
                sampled=[not (i == 1 and t in (2, 3)) and not (i == 3 and t < 2) for t in range(completion)],
                old=old,
                sampler=[x + rng.gauss(0, 0.1) for x in old],
                reference=[x + rng.gauss(0, 0.2) for x in old],
            )
        )
    for row, weight in zip(made, reference.advantages([r.reward for r in made], [r.group for r in made]), strict=True):
        row.advantage = weight
    return made


def packed(made: list[reference.ReferenceRow]) -> tuple[list[TrainSample], Batch]:
    samples = [
        TrainSample(
            item_id=row.group, trainer_version=0, group=row.group, index=i,
            prompt_ids=tuple(row.prompt), completion_ids=tuple(row.completion), sampled=tuple(row.sampled),
            logprobs=tuple(row.sampler or ()), reward=row.reward, advantage=row.advantage,
        )
        for i, row in enumerate(made)
    ]  # fmt: skip
    return samples, make_batch(samples, pad_token_id=0)[0]


def padded(values: list[list[float]], width: int) -> Tensor:
    """(B, T) float64, with a value on the padding that would show."""
    return torch.tensor([v + [99.0] * (width - len(v)) for v in values], dtype=torch.float64)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss_and_gradient_equal_the_oracle(case: dict[str, Any]) -> None:
    made, rng = rows(), random.Random(5)
    values = [[x + rng.gauss(0, 0.3) for x in row.old] for row in made]
    slow = [[torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in row] for row in values]
    slow_loss = reference.step_loss(made, slow, reference.ReferenceOptions(**case, max_completion_length=LIMIT))
    torch.autograd.backward(slow_loss)

    samples, batch = packed(made)
    width = batch.mask.shape[1]
    fast = padded(values, width).requires_grad_()
    terms = policy_loss(
        fast, padded([r.old for r in made], width), torch.tensor([r.advantage for r in made], dtype=torch.float64),
        batch.mask, settings=LossSettings(**case), totals=step_totals(samples, max_completion_length=LIMIT),
        ref_logp=padded([r.reference or [] for r in made], width),
        sampler_logp=padded([r.sampler or [] for r in made], width),
    )  # fmt: skip
    torch.autograd.backward(terms.loss)
    assert fast.grad is not None
    torch.testing.assert_close(terms.loss, slow_loss, **TOLERANCE)
    expected = padded([[0.0 if x.grad is None else x.grad.item() for x in row] for row in slow], width)
    torch.testing.assert_close(fast.grad[batch.mask], expected[batch.mask], **TOLERANCE)
    assert fast.grad[batch.mask].abs().max() > 1e-4
    assert not fast.grad[~batch.mask].any()


def test_gspo_is_one_ratio_per_row_and_the_mean_over_rows() -> None:
    """In the oracle too: the name is only a name."""
    made = rows()
    new = [[torch.tensor(x + 0.1, dtype=torch.float64) for x in row.old] for row in made]
    one, two = (reference.step_loss(made, new, reference.ReferenceOptions(**o)) for o in (  # type: ignore[arg-type]
        {"loss_type": "gspo"}, {"loss_type": "grpo", "level": "sequence"}
    ))  # fmt: skip
    assert (
        one.item() == two.item() != reference.step_loss(made, new, reference.ReferenceOptions(loss_type="grpo")).item()
    )


@pytest.mark.parametrize("scale", ["group", "batch", "rank", "none"])
def test_advantages_equal_the_oracle(scale: Any) -> None:
    made = rows(3)
    rewards, groups = [row.reward for row in made] + [0.7] * 3, [row.group for row in made] + ["same"] * 3
    ours = compute_advantages(rewards, groups, scale=scale)
    torch.testing.assert_close(
        ours, torch.tensor(reference.advantages(rewards, groups, scale)).double(), rtol=0, atol=1e-6
    )
    assert ours.tolist() == pytest.approx(reference.advantages(rewards, groups, scale), abs=1e-12)


class Policy(torch.nn.Module):
    """A tiny causal model: each position reads the running mean of embeddings before it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = torch.nn.Embedding(VOCABULARY, 8, dtype=torch.float64)
        self.mix = torch.nn.Linear(8, 8, dtype=torch.float64)
        self.head = torch.nn.Linear(8, VOCABULARY, bias=False, dtype=torch.float64)

    def hidden(self, ids: Tensor) -> Tensor:
        seen = self.embed(ids).cumsum(1) / torch.arange(1, ids.shape[1] + 1).view(1, -1, 1)
        return torch.tanh(self.mix(seen)) + self.embed(ids)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(ids))
        return logits


def parameter_gradients(model: torch.nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_whole_step_through_a_model_equals_the_oracle(chunked: bool, temperature: float) -> None:
    """From token ids to parameter gradients: packing, alignment, scoring and loss at once."""
    model, made = Policy(), rows(1)
    case: dict[str, Any] = {"loss_type": "grpo", "beta": 0.1}
    options = reference.ReferenceOptions(**case, temperature=temperature)
    for row in made:
        scored = [x.item() for x in reference.logprobs(model, row, temperature)]
        row.old = [x - 0.05 * (-1) ** t for t, x in enumerate(scored)]
    slow = reference.step_loss(made, [reference.logprobs(model, row, temperature) for row in made], options)

    samples, batch = packed(made)
    if chunked:
        starts = (batch.prompt_lens - 1).unsqueeze(1) + torch.arange(batch.mask.shape[1])
        starts = starts.clamp(max=batch.input_ids.shape[1] - 1)  # past a short row's end: masked positions only
        states = model.hidden(batch.input_ids)[torch.arange(len(batch)).unsqueeze(1), starts]
        logp = score_tokens_chunked(
            states, model.head.weight, batch.completion_ids, temperature=temperature, chunk_tokens=5
        ).logprobs
    else:
        wide = torch.nn.functional.pad(batch.input_ids, (0, batch.mask.shape[1]))
        logp = compute_logprobs(
            model(wide), batch.completion_ids, prompt_lens=batch.prompt_lens, temperature=temperature
        )
    width = batch.mask.shape[1]
    terms = policy_loss(
        logp, padded([r.old for r in made], width), torch.tensor([r.advantage for r in made], dtype=torch.float64),
        batch.mask, settings=LossSettings(**case), totals=step_totals(samples, max_completion_length=LIMIT),
        ref_logp=padded([r.reference or [] for r in made], width),
    )  # fmt: skip
    torch.testing.assert_close(terms.loss, slow, **TOLERANCE)
    for ours, theirs in zip(parameter_gradients(model, terms.loss), parameter_gradients(model, slow), strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE)


def test_the_oracle_itself_learns() -> None:
    """An oracle that is wrong in the same way everywhere would still show here."""
    model = Policy()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    pair = [
        reference.ReferenceRow([1, 2], [answer], "task", float(answer == 7), [True], old=[0.0]) for answer in (7, 3)
    ]  # fmt: skip
    before = [reference.logprobs(model, row)[0].exp().item() for row in pair]
    for _ in range(20):
        for row in pair:
            row.old = [reference.logprobs(model, row)[0].item()]
        reference.step(model, optimizer, pair, reference.ReferenceOptions())
    after = [reference.logprobs(model, row)[0].exp().item() for row in pair]
    assert after[0] > before[0] + 0.3
    assert after[1] < before[1]
