"""Forward, loss, backward, one optimiser step: the only place that changes the weights.

Owns       the parameters, the optimiser, the reference, and the version.
Promises   the gradient does not depend on the cut into microbatches; a step that is not
           finite never reaches the weights; on-policy samples are scored once, so the first
           ratio is exactly 1; groups that cannot move anything cost no forward.
Never      samples, grades, or decides when to stop.

Read next: `forward.py` for the scores, `maths.losses` for the formulas, `channels.py` for the losses beside them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.errors import InvariantError, NumericsError
from surefoot.guards import invariants
from surefoot.maths import stats
from surefoot.maths.losses import LossSettings, StepTotals, policy_loss
from surefoot.maths.packing import Batch, make_batch, step_totals
from surefoot.policy.census import Census, take_census
from surefoot.policy.channels import Channels
from surefoot.policy.forward import score_batch
from surefoot.policy.samples import cut
from surefoot.policy.schedule import learning_rate_at
from surefoot.protocols import StepReport, Weights
from surefoot.records import TrainSample

DEAD_KL_STEPS = 5
"""Applied steps after which a KL that is still exactly 0 means the reference follows the policy."""


@dataclass(frozen=True)
class LearnerSettings:
    """The learner's numbers; see the config keys of the same names."""

    loss: LossSettings
    learning_rate: float
    max_steps: int
    max_completion_length: int
    temperature: float
    pad_token_id: int
    lr_scheduler_type: str = "constant"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    microbatch_size: int = 0
    mask_truncated: bool = False
    reference_sync_steps: int | None = None
    parity_tolerance: float = 1e-4


class GRPOLearner:
    """One policy under training.

    Args:
        net: a Hugging Face causal language model in eval mode.
        channels: further losses of the step; None when there are none.
    """

    def __init__(self, net: Any, settings: LearnerSettings, channels: Channels | None = None) -> None:
        self.net, self.settings, self.channels = net, settings, channels
        self._version = 0
        self.census: Census | None = None
        self.reference = _frozen_copy(net) if settings.loss.beta > 0 else None
        self.checked_tokens = 0
        self._old: dict[tuple[str, int], Tensor] = {}
        self._kl_seen = False
        self._pushes = 0  # applied steps with a gradient from rewards: after those the policy has left its start
        decayed = [p for p in net.parameters() if p.dim() >= 2]
        plain = [p for p in net.parameters() if p.dim() < 2]
        self.optimiser = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}],
            lr=settings.learning_rate, betas=settings.betas, eps=settings.adam_epsilon, fused=True,
        )  # fmt: skip

    @property
    def version(self) -> int:
        """How many optimiser steps were applied."""
        return self._version

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return next(self.net.parameters()).device  # type: ignore[no-any-return]

    def weights(self) -> Weights:
        """The current parameters by Hugging Face name; views, not copies."""
        return dict(self.net.named_parameters())

    def learn(self, samples: Sequence[TrainSample], *, iteration: int = 0) -> StepReport:
        """One optimiser step.

        Args:
            samples: everything that was collected for this step, zero advantages included:
                they count in the denominators whether or not they cost a forward.
            iteration: which pass over the same samples this is; the first is on policy.
        """
        settings = self.settings
        if iteration == 0:
            invariants.check_on_policy(samples, self._version)
            self._old.clear()
        totals = step_totals(
            samples, max_completion_length=settings.max_completion_length, mask_truncated=settings.mask_truncated
        )
        moving = [s for s in samples if self._moves(s)]
        self.optimiser.zero_grad(set_to_none=True)
        parts = [self._backward(piece, totals, iteration) for piece in cut(moving, settings.microbatch_size)]
        if samples and not moving and self._version == 0 and iteration == 0:
            parts = [self._parity_only(samples)]
        metrics = stats.finish(stats.merge(parts))
        if iteration == 0 and samples:
            self._check_parity(metrics, moving or samples)
        if self.channels is not None and math.isfinite(metrics.get("loss", 0.0)):
            added = self.channels.backward(self.net, samples, self._version)
            metrics = stats.finish(stats.merge([*parts, *added])) | self.channels.facts
        return self._apply(metrics, samples, moving)

    def _moves(self, sample: TrainSample) -> bool:
        """Whether a sample can change the gradient at all."""
        if self.settings.mask_truncated and sample.finish_reason == "length":
            return False
        loss = self.settings.loss
        return sample.advantage != 0 or loss.beta > 0

    def _pack(self, piece: Sequence[TrainSample]) -> Batch:
        batch, _ = make_batch(piece, pad_token_id=self.settings.pad_token_id)
        self.checked_tokens += invariants.check_batch(batch, piece)
        return batch.to(self.device)

    def _backward(self, piece: Sequence[TrainSample], totals: StepTotals, iteration: int) -> stats.Sums:
        """Gradients of one microbatch, added to the parameters'; returns its statistics."""
        batch = self._pack(piece)
        scores = score_batch(self.net, batch, temperature=self.settings.temperature, with_entropy=True)
        logp = scores.logprobs
        old = self._old_logprobs(piece, logp, iteration)
        terms = policy_loss(
            logp, old, batch.advantages, batch.mask, settings=self.settings.loss, totals=totals,
            ref_logp=self._reference_logprobs(batch), sampler_logp=batch.logprobs,
        )  # fmt: skip
        terms.loss.backward()
        sampler = batch.logprobs if iteration == 0 else None  # mismatch is measured on the weights that sampled
        seen = stats.token_sums(batch.mask, logp=old, sampler_logp=sampler, entropy=scores.entropy)
        return terms.sums | seen

    def _old_logprobs(self, piece: Sequence[TrainSample], logp: Tensor, iteration: int) -> Tensor:
        """(B, T) under the policy at the first pass; on the first pass, this very forward."""
        if iteration == 0:
            old = logp.detach()
            for row, sample in enumerate(piece):
                self._old[sample.group, sample.index] = old[row, : len(sample.completion_ids)].clone()
            return old
        old = torch.zeros_like(logp)
        for row, sample in enumerate(piece):
            kept = self._old[sample.group, sample.index]
            old[row, : len(kept)] = kept
        return old

    def _reference_logprobs(self, batch: Batch) -> Tensor | None:
        if self.reference is None:
            return None
        with torch.no_grad():
            return score_batch(
                self.reference, batch, temperature=self.settings.temperature, with_entropy=False
            ).logprobs

    def _parity_only(self, samples: Sequence[TrainSample]) -> stats.Sums:
        """Step 1 without a moving sample still compares sampler and learner."""
        piece = next(cut(list(samples), self.settings.microbatch_size))
        batch = self._pack(piece)
        with torch.no_grad():
            scores = score_batch(self.net, batch, temperature=self.settings.temperature, with_entropy=True)
        return stats.token_sums(batch.mask, logp=scores.logprobs, sampler_logp=batch.logprobs, entropy=scores.entropy)

    def _check_parity(self, metrics: dict[str, float], samples: Sequence[TrainSample]) -> None:
        """Strict at step 1; later ten times wider, which still catches weights that never arrived."""
        gap = metrics.get("sampling/sampling_logp_difference/max")
        if gap is not None:
            limit = self.settings.parity_tolerance * (1 if self._version == 0 else 10)
            invariants.check_parity(gap, limit, sorted({s.item_id for s in samples}), self._version)

    def _apply(
        self, metrics: dict[str, float], samples: Sequence[TrainSample], moving: Sequence[TrainSample]
    ) -> StepReport:
        """Step the optimiser, unless a number is not finite."""
        settings = self.settings
        rate = learning_rate_at(
            self._version + 1, peak=settings.learning_rate, kind=settings.lr_scheduler_type,
            warmup_steps=settings.warmup_steps, max_steps=settings.max_steps,
        )  # fmt: skip
        metrics["learning_rate"] = rate
        if not moving and "loss" not in metrics:  # a channel may have one where the samples have none
            if samples:  # every advantage is 0, so these are exact; without samples they are undefined
                metrics |= {"loss": 0.0, "grad_norm": 0.0}
            self._version += 1  # a step without signal is a step: planned = executed
            return StepReport(metrics, self._version, applied=True)
        limit = settings.max_grad_norm if settings.max_grad_norm > 0 else float("inf")
        norm = torch.nn.utils.clip_grad_norm_(self.net.parameters(), limit)
        metrics["grad_norm"] = float(norm)
        if not all(map(math.isfinite, metrics.values())):
            self.optimiser.zero_grad(set_to_none=True)
            return StepReport({"learning_rate": rate}, self._version, applied=False)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        still_waiting = self.census is None or self.census.moved == 0
        with take_census(self.net, wanted=still_waiting) as census:
            self.optimiser.step()
        self.census = census.result() if still_waiting else self.census
        self._version += 1
        self._pushes += rate > 0 and any(s.advantage != 0 for s in moving)
        self._watch_reference(metrics)
        return StepReport(metrics, self._version, applied=True)

    def _watch_reference(self, metrics: dict[str, float]) -> None:
        """Refresh the reference when due, and refuse a penalty that never did anything."""
        if self.reference is None:
            return
        self._kl_seen = self._kl_seen or metrics.get("kl", 0.0) != 0.0
        if self._pushes > DEAD_KL_STEPS and not self._kl_seen:
            raise InvariantError(
                f"beta = {self.settings.loss.beta}, yet the KL was exactly 0 for {self._pushes} steps that moved",
                "the reference follows the policy, so the penalty does nothing",
                'keep the reference fixed: reference_sync_steps = "never"',
            )
        every = self.settings.reference_sync_steps
        if every is not None and self._version % every == 0:
            self.reference.load_state_dict(self.net.state_dict())


def nonfinite_error(samples: Sequence[TrainSample], in_a_row: int) -> NumericsError:
    """What to raise when too many steps in a row were refused."""
    names = ", ".join(sorted({s.item_id for s in samples})[:8])
    return NumericsError(
        f"{in_a_row} steps in a row had a non-finite loss or gradient; the last on tasks {names}",
        "no such step was applied; the weights are those of the last finite one",
        "lower learning_rate, or look at the dumped batch in the run folder",
    )


def _frozen_copy(net: Any) -> Any:
    reference = copy.deepcopy(net).eval()
    for parameter in reference.parameters():
        parameter.requires_grad_(False)
    return reference
