"""Ours equals the installed TRL's `GRPOTrainer` on the same tiny model, batch and advantages.

Tolerance 1e-5 in float32: the two sides pad on different ends and sum in another order; gradients here are
of size 1e-2 to 1. Where we differ on purpose (docs/maths.md), the difference is asserted too.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.learner.grpo import GRPOLearner, LearnerSettings
from surefoot.maths.advantages import compute_advantages
from surefoot.maths.logprobs import compute_logprobs
from surefoot.maths.losses import LossSettings, StepTotals, policy_loss
from surefoot.records import TrainSample

pytest.importorskip("trl", reason="needs the trl extra")

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

pytestmark = pytest.mark.filterwarnings("default")  # their warnings are theirs

SHAPES = [(3, 1), (2, 7), (5, 4), (1, 12), (4, 2), (2, 9)]  # (prompt, completion): unequal on purpose
VOCABULARY, LIMIT = 32, 12
PROMPT, WIDTH = max(p for p, _ in SHAPES), max(c for _, c in SHAPES)
TOTALS = StepTotals(len(SHAPES), sum(c for _, c in SHAPES), LIMIT)


def tiny_model() -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=1,
        )
    )  # fmt: skip
    for parameter in model.parameters():
        parameter.data.mul_(3.0)  # initial weights are so small that all tokens look alike
    return model


def tiny_tokenizer() -> Any:
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


class Material:
    """The step's numbers, and the two ways of laying them out."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(4)
        self.rows = [torch.randint(2, VOCABULARY, (p + c,), generator=generator).tolist() for p, c in SHAPES]
        self.advantages = torch.randn(len(SHAPES), generator=generator)
        self.mask = torch.arange(WIDTH) < torch.tensor([c for _, c in SHAPES]).unsqueeze(1)
        self.noise = [torch.randn(self.mask.shape, generator=generator) for _ in range(3)]
        completions = [row[p:] for row, (p, _) in zip(self.rows, SHAPES, strict=True)]
        self.completions = torch.tensor([c + [0] * (WIDTH - len(c)) for c in completions])

    def ours(self, model: Any, temperature: float = 1.0) -> Tensor:
        """(B, T) logprobs with prompts padded on the right."""
        ids = torch.tensor([row + [0] * (PROMPT + WIDTH - len(row)) for row in self.rows])
        prompt_lens = [p for p, _ in SHAPES]
        return compute_logprobs(model(ids).logits, self.completions, prompt_lens=prompt_lens, temperature=temperature)

    def theirs(self, rows: slice = slice(None)) -> dict[str, Tensor]:
        """TRL's batch: prompts padded on the left."""
        prompts = [row[:p] for row, (p, _) in zip(self.rows, SHAPES, strict=True)]
        left = torch.tensor([[0] * (PROMPT - len(p)) + p for p in prompts])
        seen = torch.tensor([[0] * (PROMPT - len(p)) + [1] * len(p) for p in prompts])
        batch = {"prompt_ids": left, "prompt_mask": seen, "completion_ids": self.completions}
        batch |= {"completion_mask": self.mask.long(), "advantages": self.advantages}
        cut = {name: value[rows] for name, value in batch.items()}
        return cut | {"num_items_in_batch": torch.tensor(float(TOTALS.tokens))}


def make_trainer(tmp_path: Path, model: Any, **arguments: Any) -> Any:
    config = GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=6, num_generations=2, report_to="none", use_cpu=True,
        bf16=False, gradient_checkpointing=False, max_completion_length=LIMIT, **arguments,
    )  # fmt: skip
    tasks = Dataset.from_list([{"prompt": "w2"}] * 6)
    trainer = GRPOTrainer(
        model=model, reward_funcs=lambda prompts, **_: [0.0] * len(prompts), args=config, train_dataset=tasks,
        processing_class=tiny_tokenizer(),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def require_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert max(g.abs().max().item() for g in theirs.values()) > 1e-2
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(({"loss_type": t}, {"loss_type": t}) for t in ("grpo", "bnpo", "dr_grpo", "dapo")),
    *(
        ({"loss_type": t, "level": "sequence"}, {"loss_type": t, "importance_sampling_level": "sequence"})
        for t in ("grpo", "bnpo", "dr_grpo", "dapo")
    ),
    ({"loss_type": "cispo", "epsilon_high": 1.1}, {"loss_type": "cispo", "epsilon_high": 1.1}),
    ({"epsilon": 0.05, "epsilon_high": 0.4}, {"epsilon": 0.05, "epsilon_high": 0.4}),
    ({"delta": 1.3, "epsilon": 0.1}, {"delta": 1.3, "epsilon": 0.1}),
    ({"beta": 0.3, "loss_type": "grpo"}, {"loss_type": "grpo"}),
    ({"beta": 0.3, "loss_type": "cispo", "epsilon_high": 1.1}, {"loss_type": "cispo", "epsilon_high": 1.1}),
    ({"beta": 0.3, "kl_bias_correction": False}, {"use_bias_correction_kl": False}),
    ({"loss_type": "gspo"}, {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
]


@pytest.mark.parametrize(("mine", "theirs"), CASES, ids=[str(mine) for mine, _ in CASES])
@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_loss_and_gradient_equal_trl(
    tmp_path: Path, mine: dict[str, Any], theirs: dict[str, Any], temperature: float
) -> None:
    model, material = tiny_model(), Material()
    trainer = make_trainer(tmp_path, copy.deepcopy(model), temperature=temperature, **theirs)
    trainer.beta = mine.get("beta", 0.0)  # set afterwards: otherwise it loads a second model from a hub
    logp = material.ours(model, temperature)
    old, ref = (logp.detach() + 0.2 * noise for noise in material.noise[:2])
    batch = material.theirs() | {"old_per_token_logps": old, "ref_per_token_logps": ref}
    their_loss = trainer._compute_loss(trainer.model, batch)
    terms = policy_loss(
        logp, old, material.advantages, material.mask, settings=LossSettings(**mine), totals=TOTALS, ref_logp=ref
    )
    assert terms.loss.item() == pytest.approx(their_loss.item(), abs=1e-5)
    require_equal(gradients(model, terms.loss), gradients(trainer.model, their_loss))


@pytest.mark.parametrize("kind", ["dapo", "grpo"])
def test_at_sequence_level_the_kl_weight_differs_on_purpose(tmp_path: Path, kind: str) -> None:
    """TRL weighs each token's KL by the row's ratio, ours by the token's own: all of the difference, and nothing else."""
    model, material = tiny_model(), Material()
    trainer = make_trainer(tmp_path, copy.deepcopy(model), loss_type=kind, importance_sampling_level="sequence")
    trainer.beta = 0.3
    logp = material.ours(model)
    old, ref = (logp.detach() + 0.2 * noise for noise in material.noise[:2])
    batch = material.theirs() | {"old_per_token_logps": old, "ref_per_token_logps": ref}
    their_loss = trainer._compute_loss(trainer.model, batch)
    how = LossSettings(loss_type=kind, level="sequence", beta=0.3)  # type: ignore[arg-type]
    terms = policy_loss(
        logp, old, material.advantages, material.mask, settings=how, totals=TOTALS, ref_logp=ref
    )  # fmt: skip
    change, counts = (logp - old) * material.mask, material.mask.sum(1, keepdim=True)
    of_row = torch.exp(change.sum(1, keepdim=True) / counts)
    k3 = torch.exp(ref - logp) - (ref - logp) - 1
    moved = 0.3 * k3 * (torch.exp(change) - of_row) * material.mask
    known = moved.sum() / TOTALS.tokens if kind == "dapo" else (moved.sum(1, keepdim=True) / counts).mean()
    assert terms.loss.item() == pytest.approx(their_loss.item() + known.item(), abs=1e-5)
    theirs, extra = gradients(trainer.model, their_loss), gradients(model, known)
    model.zero_grad()
    ours = gradients(model, policy_loss(
        material.ours(model), old, material.advantages, material.mask, settings=how, totals=TOTALS, ref_logp=ref
    ).loss)  # fmt: skip
    require_equal(ours, {name: theirs[name] + extra[name] for name in theirs})
    assert max((ours[name] - theirs[name]).abs().max().item() for name in ours) > 1e-3, "there is a difference"


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_the_correction_enters_where_trl_lets_it_enter(tmp_path: Path, mode: str) -> None:
    """On the policy term, before the KL penalty is added."""
    model, material, clip = tiny_model(), Material(), 1.15
    trainer = make_trainer(tmp_path, copy.deepcopy(model))
    trainer.use_vllm, trainer.vllm_importance_sampling_correction, trainer.beta = True, True, 0.2
    logp = material.ours(model)
    old, ref, sampler = (logp.detach() + 0.1 * noise for noise in material.noise)
    gap = (old - sampler) * material.mask
    weight = torch.exp(gap.sum(-1, keepdim=True) if mode.startswith("sequence") else gap)
    weight = weight.clamp(max=clip) if mode.endswith("truncate") else weight * (weight <= clip)
    batch = {"old_per_token_logps": old, "ref_per_token_logps": ref, "importance_sampling_ratio": weight}
    their_loss = trainer._compute_loss(trainer.model, material.theirs() | batch)
    terms = policy_loss(
        logp, old, material.advantages, material.mask, totals=TOTALS, ref_logp=ref, sampler_logp=sampler,
        settings=LossSettings(correction=mode, correction_clip=clip, beta=0.2),  # type: ignore[arg-type]
    )  # fmt: skip
    require_equal(gradients(model, terms.loss), gradients(trainer.model, their_loss))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_clip_ratios_are_trls_though_rows_without_an_advantage_are_not_scored(tmp_path: Path, level: Any) -> None:
    """A constant group is in the denominator, as in TRL; the entropy of scored tokens alone has its own name."""
    model, material = tiny_model(), Material()
    material.advantages[[1, 4]] = 0.0
    trainer = make_trainer(tmp_path, copy.deepcopy(model), importance_sampling_level=level, epsilon=0.05)
    logp = material.ours(model).detach()
    old = logp + 0.2 * material.noise[0]
    trainer._compute_loss(trainer.model, material.theirs() | {"old_per_token_logps": old})
    theirs = {name: values[-1] for name, values in trainer._metrics["train"].items() if values}

    settings = LearnerSettings(
        loss=LossSettings(level=level, epsilon=0.05), learning_rate=0.0, max_steps=9, max_completion_length=LIMIT,
        temperature=1.0, pad_token_id=0, microbatch_size=2,
    )  # fmt: skip
    learner, samples = GRPOLearner(model.eval(), settings), []
    for i, (ids, (p, c)) in enumerate(zip(material.rows, SHAPES, strict=True)):
        samples.append(TrainSample(
            item_id="w2", trainer_version=0, group="g", index=i, prompt_ids=tuple(ids[:p]), completion_ids=tuple(ids[p:]),
            sampled=(True,) * c, logprobs=tuple(old[i, :c].tolist()), reward=0.0,
            advantage=float(material.advantages[i]),
        ))  # fmt: skip
        learner._old["g", i] = old[i, :c]
    ours = learner.learn(samples, iteration=1).metrics
    for name in ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"):
        assert ours[name] == pytest.approx(theirs[name], abs=1e-6), name
    assert ours["clip_ratio/region_mean"] > 0
    scored = [i for i in range(len(SHAPES)) if material.advantages[i] != 0]
    assert ours["scored_share"] == pytest.approx(sum(SHAPES[i][1] for i in scored) / TOTALS.tokens)
    assert ours["scored_share"] < 0.9
    assert "entropy" not in ours
    assert abs(ours["scored_entropy"] - theirs["entropy"]) > 1e-3, "these rows alone were scored"
    moving = learner.learn([samples[i] for i in scored], iteration=1).metrics
    assert moving["clip_ratio/region_mean"] > 1.2 * ours["clip_ratio/region_mean"], "what leaving them out would report"


def halves(trainer: Any, material: Material) -> dict[str, Tensor]:
    """TRL's gradient of the same step, accumulated over two microbatches of three rows."""
    trainer.current_gradient_accumulation_steps = 2
    trainer.args.steps_per_generation = 2
    parts = [gradients(trainer.model, trainer._compute_loss(trainer.model, material.theirs(s))) for s in
             (slice(0, 3), slice(3, 6))]  # fmt: skip
    return {name: parts[0][name] + parts[1][name] for name in parts[0]}


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo"])
def test_trl_cut_in_two_equals_our_whole_step(tmp_path: Path, kind: str) -> None:
    model, material = tiny_model(), Material()
    trainer = make_trainer(tmp_path, copy.deepcopy(model), loss_type=kind)
    logp = material.ours(model)
    how = LossSettings(loss_type=kind)  # type: ignore[arg-type]
    terms = policy_loss(logp, logp.detach(), material.advantages, material.mask, settings=how, totals=TOTALS)
    require_equal(gradients(model, terms.loss), halves(trainer, material))


def test_bnpo_differs_on_purpose_once_a_step_is_cut(tmp_path: Path) -> None:
    """TRL's bnpo divides each microbatch by its own tokens, so its gradient depends on the cut; ours does not."""
    model, material = tiny_model(), Material()
    trainer = make_trainer(tmp_path, copy.deepcopy(model), loss_type="bnpo")
    whole = gradients(trainer.model, trainer._compute_loss(trainer.model, material.theirs()))
    cut = halves(trainer, material)
    assert max((whole[n] - cut[n]).abs().max().item() for n in whole) > 1e-2
    logp = material.ours(model)
    how = LossSettings(loss_type="bnpo")
    terms = policy_loss(logp, logp.detach(), material.advantages, material.mask, settings=how, totals=TOTALS)
    require_equal(gradients(model, terms.loss), whole)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_our_advantages_are_trls_times_a_known_factor(size: int) -> None:
    """Sample std against population std, and 1e-4 in the denominator: the factor that docs/maths.md states."""
    rewards = torch.tensor([1.0] + [0.0] * (size - 1), dtype=torch.float64)
    theirs = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
    ours = compute_advantages(rewards, [0] * size)
    factor = (rewards.std() + 1e-4) / rewards.std() * (size / (size - 1)) ** 0.5
    torch.testing.assert_close(ours, theirs * factor)
