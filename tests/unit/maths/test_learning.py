"""The maths teaches a tiny transformer what it says it teaches: direction, stability, isolation, restraint."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from surefoot.errors import ShapeError
from surefoot.maths.advantages import compute_advantages
from surefoot.maths.logprobs import compute_logprobs
from surefoot.maths.losses import LossSettings, LossTerms, policy_loss
from surefoot.maths.packing import make_batch, step_totals
from surefoot.records import TrainSample

VOCABULARY, GOOD, BAD = 16, 5, 9
FIRST, SECOND = (1, 2, 3), (4, 6)  # two prompts


class Transformer(torch.nn.Module):
    """One causal attention block, width 16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(VOCABULARY, 16)
        self.place = torch.nn.Embedding(16, 16)
        self.block = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.head = torch.nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        states = self.block(self.embed(ids) + self.place(torch.arange(length)), src_mask=future)
        logits: Tensor = self.head(states)
        return logits


def attempt(prompt: tuple[int, ...], answer: int, group: str, advantage: float = 0.0, size: int = 2) -> TrainSample:
    return TrainSample(
        item_id=group, trainer_version=0, group=group, prompt_ids=prompt, completion_ids=(answer,) * size,
        sampled=(True,) * size, logprobs=(0.0,) * size, reward=0.0, advantage=advantage,
    )  # fmt: skip


def score(model: Transformer, samples: list[TrainSample]) -> tuple[Tensor, Tensor]:
    """(B, T) logprobs and mask."""
    batch, _ = make_batch(samples, pad_token_id=0)
    ids = torch.nn.functional.pad(batch.input_ids, (0, batch.mask.shape[1]))
    return compute_logprobs(model(ids), batch.completion_ids, prompt_lens=batch.prompt_lens), batch.mask


def probability(model: Transformer, prompt: tuple[int, ...], answer: int) -> float:
    with torch.no_grad():
        return score(model, [attempt(prompt, answer, "probe")])[0][0, 0].exp().item()


def train(
    model: Transformer,
    samples: list[TrainSample],
    rewards: list[float],
    *,
    groups: list[str] | None = None,
    how: LossSettings | None = None,
    scale: str = "group",
    steps: int = 50,
    rate: float = 0.01,
) -> list[LossTerms]:
    """Repeat one step; the reference is the model at the start."""
    how = how or LossSettings()
    advantages = compute_advantages(rewards, groups or [s.group for s in samples], scale=scale)  # type: ignore[arg-type]
    totals = step_totals(samples, max_completion_length=8)
    reference = score(model, samples)[0].detach()
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    history = []
    for _ in range(steps):
        logp, mask = score(model, samples)
        terms = policy_loss(logp, logp.detach(), advantages, mask, settings=how, totals=totals, ref_logp=reference)
        optimizer.zero_grad()
        torch.autograd.backward(terms.loss)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                assert torch.isfinite(parameter.grad).all(), name
        optimizer.step()
        history.append(terms)
    return history


KINDS = [
    LossSettings(loss_type="grpo"),
    LossSettings(loss_type="dapo"),
    LossSettings(loss_type="dr_grpo"),
    LossSettings(loss_type="cispo", epsilon_high=5.0),
    LossSettings(level="sequence"),
]


@pytest.mark.parametrize("how", KINDS, ids=lambda s: f"{s.loss_type}/{s.level}")
def test_the_rewarded_completion_rises_and_the_other_falls(how: LossSettings) -> None:
    model, prompt = Transformer(), (1, 2, 3)
    before = probability(model, prompt, GOOD), probability(model, prompt, BAD)
    samples = [attempt(prompt, GOOD, "a"), attempt(prompt, BAD, "a")]
    train(model, samples, [1.0, 0.0], how=how, scale="none" if how.loss_type == "dr_grpo" else "group")
    assert probability(model, prompt, GOOD) > before[0] + 0.3
    assert probability(model, prompt, BAD) < before[1] / 5


@pytest.mark.parametrize(("rewards", "rises"), [([1.0, 0.0], True), ([0.0, 1.0], False)])
def test_the_sign_of_the_advantage_is_the_direction(rewards: list[float], rises: bool) -> None:
    model, prompt = Transformer(), (1, 2, 3)
    before = probability(model, prompt, GOOD)
    train(model, [attempt(prompt, GOOD, "a"), attempt(prompt, BAD, "a")], rewards, steps=10)
    after = probability(model, prompt, GOOD)
    assert after > 1.2 * before if rises else after < before / 1.2


def test_equal_rewards_move_nothing_at_all() -> None:
    """Null control: a trainer that pulls anyway would pass the direction test by luck."""
    model, prompt = Transformer(), (1, 2, 3)
    before = {name: p.clone() for name, p in model.named_parameters()}
    train(model, [attempt(prompt, GOOD, "a"), attempt(prompt, BAD, "a")], [0.1, 0.1])
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def sample(model: Transformer, prompt: tuple[int, ...], rows: int, size: int, generator: torch.Generator) -> Tensor:
    """(rows, size) token ids drawn from the model."""
    ids = torch.tensor([prompt] * rows)
    with torch.no_grad():
        for _ in range(size):
            chances = model(ids)[:, -1].softmax(-1)
            ids = torch.cat([ids, torch.multinomial(chances, 1, generator=generator)], 1)
    return ids[:, len(prompt) :]


def test_a_hundred_sampled_steps_stay_finite_and_bounded_and_learn() -> None:
    """The whole circle: sample, grade (share of GOOD tokens), compare, update; beta 0.1 against the start."""
    model, frozen, how = Transformer(), Transformer(), LossSettings(beta=0.1)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    earned = []
    for _ in range(100):
        answers = sample(model, FIRST, 16, 3, generator)
        rewards = (answers == GOOD).double().mean(1)
        tries = [attempt(FIRST, int(row[0]), "a", size=3) for row in answers]
        tries = [
            dataclasses.replace(t, completion_ids=tuple(row)) for t, row in zip(tries, answers.tolist(), strict=True)
        ]
        (logp, mask), (reference, _) = score(model, tries), score(frozen, tries)
        terms = policy_loss(
            logp, logp.detach(), compute_advantages(rewards, ["a"] * 16), mask, settings=how, ref_logp=reference,
            totals=step_totals(tries, max_completion_length=3),
        )  # fmt: skip
        optimizer.zero_grad()
        torch.autograd.backward(terms.loss)
        assert math.isfinite(terms.loss.item())
        assert abs(terms.loss.item()) < 5
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
        optimizer.step()
        earned.append(rewards.mean().item())
    assert sum(earned[-10:]) / 10 > sum(earned[:10]) / 10 + 0.4


def test_a_nan_reward_stops_the_step_before_it_starts() -> None:
    model, prompt = Transformer(), (1, 2, 3)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(ShapeError, match="non-finite"):
        train(model, [attempt(prompt, GOOD, "a"), attempt(prompt, BAD, "a")], [1.0, math.nan])
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def four_probabilities(model: Transformer) -> list[float]:
    return [probability(model, prompt, token) for prompt in (FIRST, SECOND) for token in (GOOD, BAD)]


def two_tasks(groups: list[str]) -> tuple[list[float], list[float]]:
    """Task one wants GOOD, task two wants BAD; the second task pays ten times as much."""
    model = Transformer()
    samples = [attempt(p, token, g) for p, g in ((FIRST, "a"), (SECOND, "b")) for token in (GOOD, BAD)]
    before = four_probabilities(model)
    train(model, samples, [1.0, 0.0, 10.0, 20.0], groups=groups, steps=60)
    return before, four_probabilities(model)


def test_two_tasks_in_one_batch_each_move_their_own_way() -> None:
    before, after = two_tasks(["a", "a", "b", "b"])
    assert after[0] > before[0] + 0.3
    assert after[1] < before[1]
    assert after[2] < before[2]
    assert after[3] > before[3] + 0.3


def test_swapped_group_boundaries_teach_the_wrong_thing() -> None:
    """Teeth: comparing across tasks makes everything of the cheap task look bad."""
    before, after = two_tasks(["a", "b", "a", "b"])
    assert after[0] < before[0]  # the right answer of task one is punished


def test_a_higher_beta_holds_the_policy_nearer_to_a_fixed_reference() -> None:
    """Unscaled advantages of 0.5: k3 pulls back with at most beta, so a whole advantage of 1 would outrun beta 1."""
    moved = {}
    for beta in (0.01, 1.0):
        model, how = Transformer(), LossSettings(beta=beta)
        before = probability(model, FIRST, GOOD)
        samples = [attempt(FIRST, GOOD, "a"), attempt(FIRST, BAD, "a")]
        history = train(model, samples, [1.0, 0.0], how=how, scale="none")
        moved[beta] = probability(model, FIRST, GOOD) - before
        assert history[0].sums["kl"].item() == pytest.approx(0.0, abs=1e-6)
        assert history[-1].sums["kl"].item() > 1e-3
    assert moved[0.01] > moved[1.0] + 0.3
    assert moved[1.0] > 0.01


def test_reward_scale_moves_dr_grpo_and_not_grpo() -> None:
    def first_gradient(how: LossSettings, scale: str, factor: float) -> Tensor:
        model = Transformer()
        samples = [attempt(FIRST, GOOD, "a"), attempt(FIRST, BAD, "a", size=4)]
        train(model, samples, [factor, 0.0], how=how, scale=scale, steps=1)
        assert model.head.weight.grad is not None
        return model.head.weight.grad

    dr, group = LossSettings(loss_type="dr_grpo"), LossSettings(loss_type="grpo")
    torch.testing.assert_close(
        first_gradient(dr, "none", 3.0), 3 * first_gradient(dr, "none", 1.0), rtol=1e-4, atol=1e-7
    )
    torch.testing.assert_close(first_gradient(group, "group", 3.0), first_gradient(group, "group", 1.0))
