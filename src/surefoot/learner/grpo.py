"""The learner's numbers, in one record."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefoot.config import MICROBATCH_TOKENS
from surefoot.errors import InvariantError, NumericsError
from surefoot.guards import invariants
from surefoot.learner import checkpoint
from surefoot.learner.architectures import lasting_buffers
from surefoot.learner.auxiliary_losses import AuxiliaryLosses
from surefoot.learner.forward import recomputed_layers, score_batch
from surefoot.learner.fused_forward import score_batch_fused, why_not_fused
from surefoot.learner.fused_options import unlisted
from surefoot.learner.lora import Adapter, Merged
from surefoot.learner.memory import (
    MAX_SPLITS,
    is_out_of_memory,
    largest_piece,
    memory_limit,
    plan_step,
    split_note,
    take_peak,
)
from surefoot.learner.nonfinite import nonfinite_error, nonfinite_sources, not_finite
from surefoot.learner.optimizer import all_finite, allocate_moments, make_optimizer, moments
from surefoot.learner.precision import MasterShards, MasterWeights, make_master_weights, put_masters
from surefoot.learner.samples import split_microbatches
from surefoot.learner.schedule import learning_rate_at
from surefoot.learner.sharding import OneRank, as_stats, check_dealt, gather_into, plain_stats
from surefoot.learner.updates import CountedStep, StepUpdates, check_rate, check_taken_in, watch_updates
from surefoot.maths import stats
from surefoot.maths.logprobs import TokenScores
from surefoot.maths.losses import LossSettings, StepTotals, policy_loss
from surefoot.maths.packing import Batch, BatchStats, make_batch, rows_by_dataset, sequence_metrics, step_totals
from surefoot.protocols import LearnerFacts, ParameterUpdates, Scored, StepReport, Weights, WeightSource
from surefoot.records import TrainSample
from surefoot.storage.files import failpoint
from surefoot.system.signals import tick


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
    optim: str = "adamw"
    max_grad_norm: float = 1.0
    microbatch_size: int = 0
    mask_truncated: bool = False
    cuda_kernels: bool = True
    """On a GPU, the fused forward pass and microbatches by free memory."""
    gradient_checkpointing: bool | str = False
    """Or "auto": where the first step would not fit otherwise."""
    reference_sync_steps: int | None = None
    parity_tolerance: float = 1e-4
    max_staleness: int = 0


# -- Forward, loss, backward, one optimiser step: the only place that changes the weights ---------
# Owns       the parameters, the optimiser, the reference, and the version.
# Promises   the gradient does not depend on the cut into microbatches; a step that is not
# finite never reaches the weights, and names who is to blame; a step that does not fit
# into memory is done again in smaller pieces; on-policy samples are scored once, so the
# first ratio is exactly 1; groups that cannot move anything cost no forward.
# Never      samples, grades, or decides when to stop.


PROOF_ROWS = 8
"""Rows of the first microbatch that the network's own modules score too, where fused kernels train."""
DEAD_KL_STEPS = 5
"""Applied steps after which a KL that is still exactly 0 means the reference follows the policy."""


class GRPOLearner:
    """One policy under training.

    Args:
        net: a Hugging Face causal language model in eval mode.
        channels: further losses of the step; None when there are none.
        masters: the network's parameters in the precision of its file, where it computes in a coarser one.
        tokenizer: saved beside the weights; a learner without one cannot be saved.
        adapter: of `net`, whose other weights it has frozen; None where every weight is trained.
        ranks: who else trains this policy; `net` is cut into shards here, so it must be whole when it is given.
    """

    def __init__(
        self, net: Any, settings: LearnerSettings, channels: AuxiliaryLosses | None = None,
        masters: Mapping[str, Tensor] | None = None, tokenizer: Any = None, adapter: Adapter | None = None,
        ranks: OneRank | None = None,
    ) -> None:  # fmt: skip
        self.ranks = ranks or OneRank()
        self.net, self.settings, self.channels, self.tokenizer = net, settings, channels, tokenizer
        self.adapter = adapter
        self._buffers = lasting_buffers(net)
        self._version = 0
        self.parameter_updates: ParameterUpdates | None = None
        self.reference = _frozen_copy(net) if settings.loss.beta > 0 and adapter is None else None
        self.masters = self._take_weights(masters)
        """What is trained where the network computes in bfloat16; None where its own parameters are."""
        self.checked_tokens = 0
        self.changed_entries = 0
        """Parameter entries that optimiser steps changed, summed over the steps of the run."""
        self._old: dict[tuple[str, int], Tensor] = {}
        self._packed: list[BatchStats] = []
        """What packing saw of this attempt at a step, piece by piece."""
        self._rows: list[tuple[str, int]] = []
        """Samples that this attempt has scored, by group and index; on this rank."""
        self._copies: dict[str, Tensor] = {}
        """Whole weights for engines, where those that are trained are in shards."""
        self._copied: int | None = None
        self._kl_seen = False
        self._pushes = 0  # applied steps with a gradient from rewards: after those the policy has left its start
        self.splits = 0
        """How often microbatches were halved because memory ran out."""
        known = not why_not_fused(net) and not unlisted(settings)
        self.fused = settings.cuda_kernels and self.ranks.size == 1 and known
        """Whether fused kernels compute the forward pass."""
        self._fused_proven = not self.fused
        self._tokens = 0
        self.recomputes = False
        """Whether layers are computed again in the backward pass; decided before the first step."""
        self._torn = False  # a step has begun and not ended: the weights belong to no version
        self.optimiser = make_optimizer(
            self.trained().values(), learning_rate=settings.learning_rate, weight_decay=settings.weight_decay,
            betas=settings.betas, epsilon=settings.adam_epsilon, kind=settings.optim, added=self.ranks.sum_each,
        )  # fmt: skip

    def _take_weights(self, given: Mapping[str, Tensor] | None) -> MasterWeights | MasterShards | None:
        """Cut them into shards, where there are several ranks; returns the masters of what is trained."""
        if self.ranks.size == 1:
            return None if self.adapter is not None else make_master_weights(self.net, given)
        if self.reference is not None:
            self.ranks.shard(self.reference)
        computes = None if self.adapter is not None else put_masters(self.net, given)
        self.ranks.shard(self.net, computes)
        if self.adapter is not None:
            self.adapter.share(self.ranks)
        return None if computes is None else MasterShards(self.net, computes)

    @property
    def version(self) -> int:
        """How many optimiser steps were applied."""
        return self._version

    @property
    def device(self) -> torch.device:
        """Where the weights live."""
        return next(self.net.parameters()).device  # type: ignore[no-any-return]

    @property
    def facts(self) -> LearnerFacts:
        """How far it got."""
        return LearnerFacts(
            self._version, self.parameter_updates, self.checked_tokens, self.splits, self.changed_entries
        )

    def published(self) -> WeightSource:
        """The current parameters and their version; views, not copies."""
        return self.weights(), self._version

    def save(self, folder: Path, *, step: int, extra: Mapping[str, Any]) -> None:
        """A whole checkpoint of this learner: see `checkpoint.save_training_checkpoint`."""
        checkpoint.save_training_checkpoint(self, self.tokenizer, folder, step=step, extra=extra)

    def load(self, folder: Path) -> Mapping[str, Any]:
        """Go back to a checkpoint: see `checkpoint.load_training_checkpoint`."""
        return checkpoint.load_training_checkpoint(self, folder).extra

    def weights(self) -> Weights:
        """Parameters and lasting buffers by name, as engines get them: views, or an adapter's merged ones.

        Of shards, copies that were gathered one tensor at a time; their memory is that of the next version.
        """
        own = dict(self.net.named_parameters()) if self.adapter is None else self.adapter.published(self._version)
        if self.ranks.size > 1 and self.adapter is None:
            own = self._gathered(own)
        return {**own, **self._buffers}

    def _gathered(self, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self._copied != self._version:
            self._copied = None
            with torch.no_grad():
                rounds = None if self.masters is None else self.masters.rounds
                gather_into(self._copies, shards, keep=self.ranks.index == 0, rounded=rounds)
            self._copied = self._version
        return dict(self._copies)

    def trained(self) -> dict[str, Tensor]:
        """What the optimiser steps, by name: the parameters themselves, their float32 masters, or an adapter alone."""
        own = self.ranks.own(self.net) if self.adapter is None else self.adapter.trained
        return own if self.masters is None else own | self.masters.beside

    def wholes(self) -> dict[str, Tensor]:
        """What is trained, as a checkpoint holds it: whole tensors, gathered only when somebody reads them."""
        trained = self.trained()
        if self.ranks.size == 1:
            return trained
        return {name: p for name, p in self.net.named_parameters() if name in trained}

    def forget_gradients(self) -> None:
        """Gradients of what is trained, and any that an interrupted backward pass left on its way there."""
        self.optimiser.zero_grad(set_to_none=True)
        if self.masters is not None or self.ranks.size > 1:
            self.net.zero_grad(set_to_none=True)

    def score(self, texts: Sequence[Scored], *, temperature: float) -> list[tuple[float, ...]]:
        """Log-probabilities of given completions under the current weights; changes nothing."""
        rows = [_as_sample(f"probe/{i}", prompt, completion) for i, (prompt, completion) in enumerate(texts)]
        if not rows:
            return []
        batch = make_batch(rows, pad_token_id=self.settings.pad_token_id)[0]
        with torch.no_grad():
            scores = score_batch(self.net, batch.to(self.device), temperature=temperature, with_entropy=False)
        found = scores.logprobs.float().cpu().tolist()
        return [tuple(row[: len(text[1])]) for row, text in zip(found, texts, strict=True)]

    def learn(self, samples: Sequence[TrainSample], *, iteration: int = 0) -> StepReport:
        """One optimiser step; done again with smaller microbatches when memory runs out.

        Args:
            samples: everything that was collected for this step, zero advantages included:
                they count in the denominators whether or not they cost a forward.
            iteration: which pass over the same samples this is; the first is on policy.
        """
        if iteration == 0:
            invariants.check_fresh(samples, self._version, self.settings.max_staleness)
        moving = [s for s in samples if self._moves(s)]
        notes: list[tuple[str, str]] = []
        if self._tokens == 0:  # once, so that a step is cut as the one before
            self._tokens, recomputes = plan_step(self, samples)
            [self.recomputes] = self.ranks.any_each([recomputes])  # each rank has its own free memory
        while (report := self._attempt(samples, moving, iteration)) is None:
            notes.append(self._split(moving or samples))
        if not report.applied:
            report = replace(report, suspects=self._nonfinite_sources(samples, moving, iteration, report.suspects))
        return replace(report, notes=tuple(notes), memory_peak=take_peak(self.device))

    def _attempt(self, samples: Sequence[TrainSample], moving: list[TrainSample], iteration: int) -> StepReport | None:
        """The whole step, or None when memory ran out before a weight was touched; then nothing of it is left."""
        checked = self.checked_tokens
        idle = {} if self.channels is None else dict(self.channels._dead)
        try:
            return self._apply(self._gradient(samples, moving, iteration), samples, moving)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if self._torn or self.ranks.size > 1:  # the other ranks are in the middle of it, with their own cut
                piece = largest_piece(moving, self.settings.microbatch_size, self.splits, tokens=self._room())
                raise memory_limit(
                    self.net, piece, splits=self.splits, version=self._version, torn=self._torn
                ) from error
        # Only here, behind the except clause: until its end the error's traceback keeps every activation alive.
        self.forget_gradients()
        self.checked_tokens = checked
        if self.channels is not None:
            self.channels._dead = idle
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def _split(self, samples: Sequence[TrainSample]) -> tuple[str, str]:
        """Halve the microbatches from now on; the third time was the last."""
        size = self.settings.microbatch_size
        now, then = (largest_piece(samples, size, self.splits + more, tokens=self._room()) for more in (0, 1))
        if self.splits == MAX_SPLITS or (len(now) == len(then) and self.channels is None):
            raise memory_limit(self.net, now, splits=self.splits, version=self._version, torn=False)
        self.splits += 1
        return split_note(len(now), len(then), self.splits, self._version)

    def _gradient(self, samples: Sequence[TrainSample], moving: list[TrainSample], iteration: int) -> dict[str, float]:
        """The step's gradient in the parameters, microbatch by microbatch; returns its metrics."""
        if iteration == 0:
            self._old.clear()
        totals = self._totals(samples)
        self.forget_gradients()
        self._packed, self._rows = [], []
        checked = self.checked_tokens
        pieces = self.ranks.pieces(moving, self._cut)
        parts = [self._backward(piece, totals, iteration) if counts else self._echo(piece) for piece, counts in pieces]
        self.ranks.take_gradients(self.net)
        if samples and not moving and self._version == 0 and iteration == 0:
            parts = [self._parity_only(samples)]
        parts = [self._of_all_ranks(parts, moving, checked), self._unscored(samples, moving, totals)]
        if iteration == 0:
            self.ranks.share_old(self._old, moving)
        metrics = stats.finish(stats.merge(parts))
        if iteration == 0 and samples:
            self._check_parity(metrics, moving or samples)
        if self.channels is not None and math.isfinite(metrics.get("loss", 0.0)):
            with recomputed_layers(self.net, wanted=self.recomputes):
                added = self.channels.backward(self.net, samples, self._version, self.splits, self.ranks)
            self.ranks.take_gradients(self.net)
            metrics = stats.finish(stats.merge([*parts, *added])) | self.channels.facts
        return metrics

    def _cut(self, samples: list[TrainSample]) -> Iterator[list[TrainSample]]:
        return split_microbatches(samples, self.settings.microbatch_size, self.splits, tokens=self._room())

    def _of_all_ranks(self, parts: Sequence[stats.Sums], moving: Sequence[TrainSample], checked: int) -> stats.Sums:
        """The statistics of all ranks, and what each of them packed; every sample that moves was scored by one."""
        own = stats.merge(parts)
        if self.ranks.size == 1:
            return own
        told = self.ranks.exchange([self._rows, plain_stats(self._packed), self.checked_tokens - checked])
        if moving:
            check_dealt([rows for rows, _, _ in told], moving)
        self._packed = [each for _, packed, _ in told for each in as_stats(packed)]
        self.checked_tokens = checked + sum(count for _, _, count in told)
        return {name: value.to(self.device) for name, value in self.ranks.merged(own).items()}

    def _room(self) -> int:
        """Tokens of one microbatch."""
        return self._tokens or MICROBATCH_TOKENS

    def _unscored(
        self, samples: Sequence[TrainSample], moving: Sequence[TrainSample], totals: StepTotals
    ) -> stats.Sums:
        """What statistics over all sampled tokens need of rows that were not scored, because they move nothing.

        With an advantage of 0 nothing is ever counted as clipped, so such rows belong into the denominator of the clip
        ratios and add 0 above it. Their entropy nobody knows: `scored_share` says what share of the tokens it is of.
        """
        scored = self._totals(moving)
        left = totals.rows - scored.rows if self.settings.loss.whole_rows else totals.tokens - scored.tokens
        sampled = sum(s.trained_tokens for s in samples)
        numbers = {"clip_places": left, "step_tokens": sampled, "entropy_tokens": 0}
        return {name: torch.tensor(value, device=self.device) for name, value in numbers.items()}

    def _totals(self, samples: Sequence[TrainSample]) -> StepTotals:
        settings = self.settings
        return step_totals(
            samples, max_completion_length=settings.max_completion_length, mask_truncated=settings.mask_truncated
        )

    def _moves(self, sample: TrainSample) -> bool:
        """Whether a sample can change the gradient at all."""
        if self.settings.mask_truncated and sample.finish_reason == "length":
            return False
        loss = self.settings.loss
        return sample.advantage != 0 or loss.beta > 0 or loss.kind.every_row

    def _pack(self, piece: Sequence[TrainSample]) -> Batch:
        batch, packed = make_batch(piece, pad_token_id=self.settings.pad_token_id)
        self.checked_tokens += invariants.check_batch(batch, piece)
        self._packed.append(packed)
        return batch.to(self.device)

    def _backward(self, piece: Sequence[TrainSample], totals: StepTotals, iteration: int) -> stats.Sums:
        """Gradients of one microbatch, added to the parameters'; returns its statistics."""
        failpoint("learner.before_forward")
        batch = self._pack(piece)
        self._rows += [(s.group, s.index) for s in piece]
        scores = self._scored(batch)
        logp = scores.logprobs
        old = self._old_logprobs(piece, logp, iteration)
        terms = policy_loss(
            logp, old, batch.advantages, batch.mask, settings=self.settings.loss, totals=totals,
            ref_logp=self._reference_logprobs(batch), sampler_logp=batch.logprobs,
        )  # fmt: skip
        terms.loss.backward()
        failpoint("learner.after_backward")
        tick("learning from the step's samples")
        sampler = batch.logprobs if iteration == 0 else None  # mismatch is measured on the weights that sampled
        seen = stats.token_sums(batch.mask, logp=old, sampler_logp=sampler, entropy=scores.entropy)
        return terms.sums | seen

    def _echo(self, piece: Sequence[TrainSample]) -> stats.Sums:
        """A microbatch that counts for nothing, beside those of ranks that have more: weights are gathered from all."""
        batch = make_batch(piece, pad_token_id=self.settings.pad_token_id)[0].to(self.device)
        scores = self._scored(batch)
        self._reference_logprobs(batch)
        (scores.logprobs.sum() * 0.0).backward()
        return {}

    def _scored(self, batch: Batch) -> TokenScores:
        """The microbatch under the policy, with gradients."""
        temperature = self.settings.temperature
        if not self.fused:
            with recomputed_layers(self.net, wanted=self.recomputes):
                return score_batch(self.net, batch, temperature=temperature, with_entropy=True)
        scores = score_batch_fused(self.net, batch, temperature=temperature, recomputes=self.recomputes)
        if not self._fused_proven:
            with torch.no_grad():
                rows = batch.rows(range(min(len(batch), PROOF_ROWS)))
                own = score_batch(self.net, rows, temperature=temperature, with_entropy=False).logprobs
            gap = float((scores.logprobs.detach()[: len(rows)] - own).abs().max())
            invariants.check_fused(gap, self.settings.parity_tolerance)
            self._fused_proven = True
        return scores

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
            old[row, : len(sample.completion_ids)] = kept if len(kept) else math.nan  # emptied by `_nonfinite_sources`
        return old

    def _reference_logprobs(self, batch: Batch) -> Tensor | None:
        if self.settings.loss.beta == 0:
            return None
        base = self.net if self.reference is None else self.reference
        with torch.no_grad(), nullcontext() if self.adapter is None else self.adapter.off():
            return score_batch(base, batch, temperature=self.settings.temperature, with_entropy=False).logprobs

    def _parity_only(self, samples: Sequence[TrainSample]) -> stats.Sums:
        """Step 1 without a moving sample still compares sampler and learner."""
        piece = next(self._cut(list(samples)))
        checked = self.checked_tokens
        batch = self._pack(piece)
        with torch.no_grad():
            scores = score_batch(self.net, batch, temperature=self.settings.temperature, with_entropy=True)
        if self.ranks.index > 0:  # all ranks score the same rows; the first of them reports
            self.checked_tokens, self._packed = checked, []
            return {}
        return stats.token_sums(batch.mask, logp=scores.logprobs, sampler_logp=batch.logprobs, entropy=scores.entropy)

    def _check_parity(self, metrics: dict[str, float], samples: Sequence[TrainSample]) -> None:
        """Strict at step 1; later ten times wider, which still catches weights that never arrived."""
        if any(s.trainer_version != self._version for s in samples):
            return  # older weights sampled some of these: a gap is expected, and the importance weights carry it
        gap = metrics.get("sampling/sampling_logp_difference/max")
        if gap is not None and math.isfinite(gap):  # what is not finite is no disagreement: `_apply` refuses the step
            limit = self.settings.parity_tolerance * (1 if self._version == 0 else 10)
            invariants.check_parity(gap, limit, sorted({s.item_id for s in samples}), self._version)

    def _apply(
        self, metrics: dict[str, float], samples: Sequence[TrainSample], moving: Sequence[TrainSample]
    ) -> StepReport:
        """Step the optimiser, unless a number is not finite."""
        settings = self.settings
        rate = self._rate_at(self._version + 1)
        always = {"learning_rate": rate, "memory/splits": float(self.splits)}
        always["memory/recomputes"] = float(self.recomputes)
        always |= {"updates/changed_share": 0.0, "updates/published_share": 0.0}
        trained = self.trained()
        silent = not moving and "loss" not in metrics  # a channel may have a loss where the samples have none
        if not silent:
            limit = settings.max_grad_norm if settings.max_grad_norm > 0 else float("inf")
            metrics["grad_norm"] = self.ranks.clip(trained.values(), limit)
        elif samples:  # every advantage is 0, so these are exact; without samples they are undefined
            metrics |= {"loss": 0.0, "grad_norm": 0.0}
        if broken := not_finite(metrics) or self._broken_memory():
            self.forget_gradients()
            return StepReport(always, self._version, applied=False, suspects=broken)
        if not silent:
            updates, merged = self._step(rate, trained)
            always["updates/changed_share"] = updates.changed_share
            always["updates/published_share"] = updates.published_share
            if merged is not None:
                always |= {"updates/published_share": merged.changed / merged.entries, "timing/merge": merged.seconds}
            self.changed_entries += updates.changed
            self._pushes += rate > 0 and any(s.advantage != 0 for s in moving)
        self._version += 1  # a step without signal is a step: planned = executed
        self._torn = False
        if not silent:
            self._watch_reference(metrics)
        rows = rows_by_dataset(self._packed) if moving else {}
        always |= sequence_metrics(self._packed) if moving else {}
        return StepReport(metrics | always, self._version, applied=True, trained_rows=rows)

    def _rate_at(self, step: int) -> float:
        settings = self.settings
        return learning_rate_at(
            step, peak=settings.learning_rate, kind=settings.lr_scheduler_type, warmup_steps=settings.warmup_steps,
            max_steps=settings.max_steps,
        )  # fmt: skip

    def _broken_memory(self) -> tuple[str, ...]:
        """One NaN in a moment would be written into its weight by the best of gradients."""
        finite = self.ranks.every(all_finite(moments(self.optimiser)))
        return () if finite else ("the optimiser's state is not finite",)

    def _step(self, rate: float, trained: Mapping[str, Tensor]) -> tuple[StepUpdates, Merged | None]:
        """Change the weights. From the first to the last of them the learner is torn, and cannot be saved."""
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        if self.adapter is not None:
            self.adapter.check_step(self.optimiser)
            self.adapter.allocate()
        allocate_moments(self.optimiser)
        masters = self.masters
        copies, rounds = (None, None) if masters is None else (masters.by_tensor(), masters.rounds)
        step = CountedStep(self.optimiser, copies, rounds)
        known = self.parameter_updates
        still_waiting = (
            known is None or known.moved == 0 or (self.adapter is not None and known.total < len(self.adapter.trained))
        )
        watched = trained if self.adapter is None or not still_waiting else self.adapter.awake()
        with watch_updates(watched, wanted=still_waiting, anywhere=self.ranks.any_each) as found:
            failpoint("learner.before_step")
            check_rate(self.optimiser, rate, self._version)
            self._torn = True
            updates = StepUpdates(*self.ranks.total_each(astuple(step.take())))
            check_rate(self.optimiser, rate, self._version)
            failpoint("learner.after_step")
        self.parameter_updates = found[0] if still_waiting else self.parameter_updates
        if not self.ranks.every(all_finite(self.ranks.own(self.net).values())):
            raise NumericsError(
                f"the step from version {self._version} made weights that are not finite, from a finite gradient",
                "the update itself overflowed; nothing of it is saved or published",
                "lower learning_rate, then resume from the last checkpoint",
            )
        dtypes = {value.dtype for value in trained.values()}
        highest = self._rate_at(min(max(self.settings.warmup_steps, 1), self.settings.max_steps))
        check_taken_in(updates, rate, highest, self._version, dtypes)
        if self.adapter is None:
            return updates, None
        if still_waiting:
            self.adapter.check_base()
        return updates, self.adapter.merge(self._version + 1)

    def _nonfinite_sources(
        self, samples: Sequence[TrainSample], moving: list[TrainSample], iteration: int, seen: Sequence[str]
    ) -> tuple[str, ...]:
        """Who is to blame for a refused step; the learner is afterwards as it was."""
        # A row that is not finite cannot be saved; without numbers it says the same, and the next pass is refused too.
        emptied = {key: value if bool(value.isfinite().all()) else value[:0] for key, value in self._old.items()}
        kept, totals = (emptied, self.checked_tokens), self._totals(samples)
        self._old = dict(emptied)

        def examine(sample: TrainSample) -> dict[str, float]:
            self.forget_gradients()
            sums = self._echo([sample]) if self.ranks.index else self._backward([sample], totals, iteration)
            self.ranks.take_gradients(self.net)
            norm = self.ranks.norm([p.grad for p in self.trained().values() if p.grad is not None])
            return stats.finish(self.ranks.merged(sums)) | {"gradient norm": norm}

        beside = () if self.channels is None else ("a loss beside the policy's may be to blame",)
        try:
            return nonfinite_sources(
                moving or samples, examine, net=self.net, optimiser=self.optimiser, seen=(*seen, *beside),
                masters=None if self.masters is None else self.masters.beside, parameters=self.ranks.own(self.net),
                everywhere=lambda names: [name for told in self.ranks.exchange(names) for name in told],
            )  # fmt: skip
        finally:
            self._old, self.checked_tokens = kept
            self.forget_gradients()

    def _watch_reference(self, metrics: dict[str, float]) -> None:
        """Refresh the reference when due, and refuse a penalty that never did anything."""
        if self.settings.loss.beta == 0:
            return
        self._kl_seen = self._kl_seen or metrics.get("kl", 0.0) != 0.0
        if self._pushes > DEAD_KL_STEPS and not self._kl_seen:
            raise InvariantError(
                f"beta = {self.settings.loss.beta}, yet the KL was exactly 0 for {self._pushes} steps that moved",
                "the reference follows the policy, so the penalty does nothing",
                'keep the reference fixed: reference_sync_steps = "never"',
            )
        every = self.settings.reference_sync_steps
        if self.reference is not None and every is not None and self._version % every == 0:
            self.reference.load_state_dict(self.net.state_dict())


def _as_sample(name: str, prompt: tuple[int, ...], completion: tuple[int, ...]) -> TrainSample:
    """Tokens that are scored and never trained on; each is a group of its own."""
    n = len(completion)
    return TrainSample(
        item_id=name, trainer_version=0, group=name, index=0, prompt_ids=prompt, completion_ids=completion,
        sampled=(True,) * n, logprobs=(0.0,) * n, reward=0.0,
    )  # fmt: skip


def _frozen_copy(net: Any) -> Any:
    reference = copy.deepcopy(net).eval()
    for parameter in reference.parameters():
        parameter.requires_grad_(False)
    return reference


__all__ = ["DEAD_KL_STEPS", "GRPOLearner", "LearnerSettings", "nonfinite_error"]
