"""The two optional loss channels of the guarded trainer: what they compute, and whether they are alive.

Owns       the self-distillation forward passes, and the watch over a channel that contributes nothing.
Promises   student and teacher score the same completion tokens by their index; the teacher gets no gradient; rows
           without a hint are selected away; a cut of the step into microbatches does not change the gradient.
Never      decides which rank runs a forward pass by local data: all ranks run it, or none.

Read next: `hints.py`, where teachers come from; `replay.py`, the other channel; `maths/distillation.py`, the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.errors import NumericsError, ShapeError
from surefoot.maths.distillation import distillation_loss, refuse_misaligned
from surefoot.trl_bridge import ranks
from surefoot.trl_bridge.evaluation import eval_mode
from surefoot.trl_bridge.problems import ChannelDeadError, refused

DEAD_STEPS = 10
"""Optimiser steps in a row without any contribution after which an enabled channel is an error."""
NOTHING = 1e-9
"""A mean loss at or below this is rounding."""


def checked_weight(name: str, value: Any) -> float:
    """A finite weight of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise refused(
            f"{name} is {value!r}, not a finite number of at least 0",
            "a negative weight would teach the opposite of what the channel is for",
            f"leave {name} out, or use for example {name}=0.1",
        )
    return float(value)


def require_finite(name: str, loss: Tensor, step: int) -> float:
    """The component's mean over all ranks; not finite on one of them is an error on all of them."""
    mean = ranks.summed([float(loss.detach())])[0] / ranks.world_size()
    if not math.isfinite(mean):
        raise NumericsError(
            f"step {step}: the {name} loss is {mean}",
            "added to the policy loss it would destroy every weight",
            f"look at the {name} rows of this step; set its weight to 0 to train without it",
        )
    return mean


@dataclass
class Watch:
    """Counts the steps in which a channel gave nothing.

    Example:
        >>> watch = Watch("sdpo", limit=2)
        >>> watch.note(0, alive=False); watch.note(1, alive=True); watch.note(2, alive=False)
        >>> watch.dead_steps
        1
    """

    name: str
    limit: int = DEAD_STEPS
    dead_steps: int = 0
    step: int | None = None
    alive: bool = False

    def note(self, step: int, *, alive: bool) -> None:
        """Take in one microbatch; a step is alive when one of its microbatches is."""
        if step != self.step:
            self.step, self.alive = step, False
            self.dead_steps += 1
        if alive:
            self.alive, self.dead_steps = True, 0
        if self.dead_steps > self.limit:
            raise ChannelDeadError(
                f"step {step}: the {self.name} channel has contributed nothing for {self.limit} steps",
                "a term that is switched on and always 0 looks like a result and is none",
                f"check the source of the {self.name} channel; set its weight to 0 to train without it",
            )


@dataclass(frozen=True)
class Distillation:
    """How student and teacher are compared."""

    mixing: float = 1.0
    top_k: int | None = None
    temperature: float = 1.0


def distil(model: Any, inputs: Mapping[str, Any], how: Distillation) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of the divergences over the live tokens of these rows, and the additive statistics.

    Args:
        inputs: TRL's batch with `teacher_prompt_ids`, `teacher_prompt_mask` (B, P') and `teacher_live` (B,).
    """
    completion, seen = inputs["completion_ids"], inputs["completion_mask"]
    trained = seen * inputs["tool_mask"] if "tool_mask" in inputs else seen
    _require_rows(completion, inputs["teacher_prompt_ids"], inputs["teacher_live"])
    student_ids = torch.cat([inputs["prompt_ids"], completion], dim=1)
    teacher_ids = torch.cat([inputs["teacher_prompt_ids"], completion], dim=1)
    width = completion.shape[1]
    refuse_misaligned(student_ids[:, -width:], teacher_ids[:, -width:], trained.bool())
    with torch.no_grad(), eval_mode(model):
        teacher = completion_scores(model, teacher_ids, torch.cat([inputs["teacher_prompt_mask"], seen], 1), width)
    student = completion_scores(model, student_ids, torch.cat([inputs["prompt_mask"], seen], dim=1), width)
    terms = distillation_loss(
        student, teacher, trained.bool(), tokens_in_step=1, mixing=how.mixing, top_k=how.top_k,
        has_feedback=inputs["teacher_live"].bool(), temperature=how.temperature,
    )  # fmt: skip
    return terms.loss, terms.sums


def completion_scores(model: Any, ids: Tensor, mask: Tensor, width: int) -> Tensor:
    """(B, T, V) the logits that predict each of the last `width` tokens."""
    kept: Tensor = model(input_ids=ids, attention_mask=mask, logits_to_keep=width + 1, use_cache=False).logits
    return kept[:, -(width + 1) : -1]  # the logits at place t predict the token at t + 1


def _require_rows(completion: Tensor, teacher: Tensor, live: Tensor) -> None:
    if not completion.shape[0] == teacher.shape[0] == live.shape[0]:
        raise ShapeError(
            f"{completion.shape[0]} completions, {teacher.shape[0]} teacher prompts, {live.shape[0]} marks",
            "row i of one has to be row i of the other",
            "hand in one teacher prompt per completion, dead ones included",
        )
