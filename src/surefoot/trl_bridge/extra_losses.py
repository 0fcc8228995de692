"""Wires the two loss channels into a TRL trainer: hinted prompts at generation time, losses at training time.

Owns       the channels' settings and sources, their watches, and which denominator each loss gets.
Promises   a channel that is switched on has a source, or nothing is constructed; it is watched at every step.
Never      runs a forward pass for a channel whose weight is 0: it does not exist then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from surefoot.errors import InputError
from surefoot.trl_bridge import ranks
from surefoot.trl_bridge.channels import NOTHING, Distillation, Watch, distil
from surefoot.trl_bridge.hints import HintFn, HintRow, ask, hinted, padded_left
from surefoot.trl_bridge.problems import refused
from surefoot.trl_bridge.replay import Replay

PICTURES = ("pixel_values", "images", "num_images")


class SdpoChannel:
    """Self-distillation: the model with a hint in its context teaches the model without."""

    def __init__(self, hints: HintFn, *, mixing: float = 1.0, top_k: int | None = None, dead_steps: int) -> None:
        if not 0 <= mixing <= 1 or (top_k is not None and top_k < 1):
            raise refused(f"sdpo_mixing = {mixing}, sdpo_top_k = {top_k}", "0 to 1, and at least 1 or None")
        self.hints, self.mixing, self.top_k = hints, mixing, top_k
        self.watch = Watch("sdpo", dead_steps)

    def add_teachers(self, trainer: Any, examples: Sequence[dict[str, Any]], batch: dict[str, Any]) -> dict[str, Any]:
        """TRL's batch of rollouts with a hinted prompt for each row that has a hint."""
        if any(name in batch for name in PICTURES):
            raise InputError("the batch holds pictures", "hints are text, in text prompts", "train with alpha_sdpo=0")
        rows = _rows(trainer, examples, batch)
        given = ask(self.hints, rows)
        prompts = [hinted(row.example["prompt"], hint) for row, hint in zip(rows, given, strict=True)]
        ids, _, _ = trainer._tokenize_prompts(prompts)
        device = batch["prompt_ids"].device
        teacher, mask = padded_left(ids, trainer._tokenizer.pad_token_id, device)
        live = torch.tensor([hint is not None for hint in given], device=device)
        trained = batch["completion_mask"] * batch["tool_mask"] if "tool_mask" in batch else batch["completion_mask"]
        (tokens,) = ranks.summed([float(trained[live].sum())])
        found = {"teacher_prompt_ids": teacher, "teacher_prompt_mask": mask, "teacher_live": live}
        return batch | found | {"sdpo_tokens": torch.tensor(tokens, device=device)}

    def loss(self, trainer: Any, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, float]:
        """These rows' share in the step's loss, and the share of them with a live teacher."""
        step = trainer.state.global_step
        if "sdpo_tokens" not in inputs or float(inputs["sdpo_tokens"]) == 0.0:  # the same on every rank
            self.watch.note(step, alive=False)
            return inputs["completion_ids"].new_zeros((), dtype=torch.float32), 0.0
        how = Distillation(self.mixing, self.top_k, float(getattr(trainer, "temperature", 1.0)))
        total, sums = distil(model, inputs, how)
        tokens, live, rows, divergence = ranks.summed(
            [float(sums[f"distill_{name}"]) for name in ("tokens", "rows_live", "rows", "divergence")]
        )
        self.watch.note(step, alive=tokens > 0 and divergence / tokens > NOTHING)
        return total / _window(trainer, float(inputs["sdpo_tokens"])), live / max(rows, 1.0)


def _window(trainer: Any, tokens: float) -> float:
    """The step's live tokens per process: `tokens` spans a generation batch, which may feed more or fewer steps."""
    share = trainer.current_gradient_accumulation_steps / trainer.args.steps_per_generation
    return float(tokens / ranks.world_size() * share)


def _rows(trainer: Any, examples: Sequence[dict[str, Any]], batch: dict[str, Any]) -> list[HintRow]:
    kept = [ids[mask.bool()] for ids, mask in zip(batch["completion_ids"], batch["completion_mask"], strict=True)]
    texts = trainer._tokenizer.batch_decode(kept, skip_special_tokens=True)
    advantages = batch["advantages"]
    advantages = advantages if advantages.dim() == 1 else advantages[:, 0]
    return [
        HintRow(example, text, advantage)
        for example, text, advantage in zip(examples, texts, advantages.tolist(), strict=True)
    ]


class ReplayChannel:
    """Deals pairs to microbatches and ranks, and watches the loss."""

    def __init__(self, stock: Replay, *, dead_steps: int) -> None:
        self.stock = stock
        self.watch = Watch("replay", dead_steps)
        self._step, self._part = -1, 0

    def loss(self, trainer: Any, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, float]:
        """This microbatch's share in the step's loss, and the share of its pairs that the policy already gets right."""
        step, parts = trainer.state.global_step, trainer.current_gradient_accumulation_steps
        self._part = self._part + 1 if step == self._step else 0
        self._step = step
        turn = (step * parts + self._part) * ranks.world_size() + ranks.rank()
        terms = self.stock.loss(model, self.stock.deal(turn), inputs["completion_ids"].device)
        pairs, wins, total = ranks.summed(
            [float(terms.sums[f"preference_{name}"]) for name in ("pairs", "wins", "total")]
        )
        self.watch.note(step, alive=pairs > 0 and total / pairs > 0.0)
        return terms.loss / parts, wins / max(pairs, 1.0)
