"""Samples become tensors.

Owns       padding, buckets, and the mask that says which tokens carry loss.
Promises   the mask comes from provenance and true lengths, never from the pad id; prompt plus
           completion always fits; every token that a bucket cuts off is counted.
Never      scores, weighs or reorders samples.

    TrainSample, TrainSample, ... --make_batch--> Batch, BatchStats
                                  --step_totals--> StepTotals   (independent of any cut)

Axes: B rows, L sequence positions, T completion positions.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surefoot.errors import ShapeError
from surefoot.maths.losses import StepTotals
from surefoot.records import LENGTH, TrainSample

SEQ_LEN_BUCKETS = (256, 512, 768, 1024)
COMPLETION_LEN_BUCKETS = (128, 256, 384, 512)
"""Used when an empty list is given; longer data keeps its own length, so defaults never cut. No run gives a list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The packed tensors of one step, or of a cut of it."""

    input_ids: Tensor
    """(B, L) prompt and completion, padded on the right."""
    completion_ids: Tensor
    """(B, T)"""
    logprobs: Tensor
    """(B, T) the sampler's; 0 where nothing was sampled."""
    rewards: Tensor
    """(B,)"""
    advantages: Tensor
    """(B,)"""
    mask: Tensor
    """(B, T) bool: the policy itself chose this token."""
    prompt_lens: Tensor
    """(B,)"""
    truncated: Tensor
    """(B,) bool: the length limit ended this completion."""
    ref_logprobs: Tensor | None
    """(B, T) under the reference, or None for every row. No run reads this: the learner scores the reference itself."""
    item_ids: list[str]
    groups: list[str]
    trainer_versions: list[int]

    def __len__(self) -> int:
        return len(self.item_ids)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        moved = {name: value.to(device) for name, value in self._tensors().items()}
        return dataclasses.replace(self, **moved)  # type: ignore[arg-type]

    def rows(self, index: Sequence[int] | Tensor) -> Batch:
        """The named rows, in that order; an integer list, an integer tensor or a (B,) bool tensor."""
        where = torch.as_tensor(index, device=self.mask.device)
        where = where.nonzero().flatten() if where.dtype == torch.bool else where.long()
        picked: dict[str, object] = {name: value[where] for name, value in self._tensors().items()}
        for name in ("item_ids", "groups", "trainer_versions"):
            picked[name] = [getattr(self, name)[row] for row in where.tolist()]
        return dataclasses.replace(self, **picked)  # type: ignore[arg-type]

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStats:
    """What packing saw, row by row, before any padding or cut; the learner makes metrics of it."""

    sequence_lengths: list[int]
    completion_lengths: list[int]
    padded_sequence_length: int
    padded_completion_length: int
    finish_reasons: dict[str, int]
    rewards: list[float]
    datasets: list[str]
    truncated_rows: int
    """Rows that lost tokens to a bucket (not those that the sampler ended at its limit)."""
    truncated_tokens: int


def make_batch(
    samples: Sequence[TrainSample],
    *,
    pad_token_id: int,
    seq_len_buckets: Sequence[int] | None = None,
    completion_len_buckets: Sequence[int] | None = None,
) -> tuple[Batch, BatchStats]:
    """Pack samples, in order, into one batch.

    Buckets round widths up, so that few shapes occur. None means the exact longest length; an
    empty list means the defaults above. The completion width is the first bucket that holds the
    longest completion, the sequence width the first that holds the longest prompt plus that.
    When the largest bucket is too small, completions are cut and the cut is counted. No run passes
    buckets, and no key sets them.
    """
    if not samples:
        raise ShapeError("make_batch got no samples", "an empty batch has no shape", "skip the step with a reason")
    if type(pad_token_id) is not int or pad_token_id < 0:  # 0 is a fine pad id; None and True are not
        raise ShapeError(f"pad_token_id = {pad_token_id!r}", "padding is embedded like any token", "pass a token id")
    length, width = _widths(samples, seq_len_buckets, completion_len_buckets)
    completions = [list(s.completion_ids[:width]) for s in samples]
    batch = Batch(
        input_ids=_pad([[*s.prompt_ids, *c] for s, c in zip(samples, completions, strict=True)], length, pad_token_id),
        completion_ids=_pad(completions, width, pad_token_id),
        logprobs=_pad([s.logprobs[:width] for s in samples], width, 0.0),
        rewards=torch.tensor([s.reward for s in samples], dtype=torch.float32),
        advantages=torch.tensor([s.advantage for s in samples], dtype=torch.float32),
        mask=_pad([s.sampled[:width] for s in samples], width, False),
        prompt_lens=torch.tensor([len(s.prompt_ids) for s in samples]),
        truncated=torch.tensor([s.finish_reason == LENGTH for s in samples]),
        ref_logprobs=_reference(samples, width),
        item_ids=[s.item_id for s in samples],
        groups=[s.group for s in samples],
        trainer_versions=[s.trainer_version for s in samples],
    )
    return batch, _stats(samples, length, width)


def sequence_metrics(packed: Sequence[BatchStats]) -> dict[str, float]:
    """How long these batches' rows are, prompt and completion, in tokens; the same however they were cut."""
    lengths = [length for each in packed for length in each.sequence_lengths]
    if not lengths:
        return {}
    return {"sequences/mean_length": sum(lengths) / len(lengths), "sequences/max_length": float(max(lengths))}


def rows_by_dataset(packed: Sequence[BatchStats]) -> dict[str, int]:
    """Data set -> how many rows of these batches are of it."""
    return dict(collections.Counter(name for each in packed for name in each.datasets))


def step_totals(
    samples: Sequence[TrainSample], *, max_completion_length: int, mask_truncated: bool = False
) -> StepTotals:
    """The denominators of one optimiser step, from its samples alone.

    A sample counts as a row only if it has a token that carries loss, so numerator and
    denominator always speak of the same tokens. Tokens that a bucket cuts off later are not
    known here: a caller that uses buckets must refuse a batch with `truncated_tokens`.
    """
    counts = [s.trained_tokens for s in samples if not (mask_truncated and s.finish_reason == LENGTH)]
    return StepTotals(sum(count > 0 for count in counts), sum(counts), max_completion_length)


def _widths(
    samples: Sequence[TrainSample], seq_buckets: Sequence[int] | None, completion_buckets: Sequence[int] | None
) -> tuple[int, int]:
    """(L, T) such that the longest prompt plus T fits in L."""
    prompt = max(len(s.prompt_ids) for s in samples)
    width = _bucket(max(len(s.completion_ids) for s in samples), completion_buckets, COMPLETION_LEN_BUCKETS)
    length = _bucket(prompt + width, seq_buckets, SEQ_LEN_BUCKETS)
    if prompt >= length:
        longest = max(samples, key=lambda s: len(s.prompt_ids))
        raise ShapeError(
            f"sample {longest.item_id} has a prompt of {prompt} tokens, the largest sequence bucket holds {length}",
            "no room is left for a completion",
            "call make_batch with larger seq_len_buckets (a run has none), or leave out tasks with long prompts",
        )
    return length, min(width, length - prompt)


def _bucket(natural: int, buckets: Sequence[int] | None, default: tuple[int, ...]) -> int:
    """The first bucket that holds `natural`; else the largest (given list) or `natural` (defaults)."""
    if buckets is None:
        return natural
    given = list(buckets)
    if any(size < 1 for size in given) or given != sorted(set(given)):
        raise ShapeError(
            f"buckets {given}", "the first that fits is taken, so order matters", "use rising positive sizes"
        )
    fallback = given[-1] if given else natural
    return next((size for size in given or default if size >= natural), fallback)


def _pad(rows: Sequence[Sequence[int]] | Sequence[Sequence[float]], width: int, value: int | float) -> Tensor:
    """(B, width), each row followed by `value`; the dtype is that of `value`."""
    dtype = {bool: torch.bool, int: torch.int64, float: torch.float32}[type(value)]
    out = torch.full((len(rows), width), value, dtype=dtype)
    flat = out.numpy()  # the same memory: writing a row there costs a third of making a tensor of it
    for i, row in enumerate(rows):
        flat[i, : len(row)] = row
    return out


def _reference(samples: Sequence[TrainSample], width: int) -> Tensor | None:
    present = [s.ref_logprobs for s in samples if s.ref_logprobs is not None]
    if len(present) not in (0, len(samples)):
        lacking = next(s for s in samples if s.ref_logprobs is None)
        raise ShapeError(
            f"{len(present)} of {len(samples)} samples have ref_logprobs; {lacking.item_id}#{lacking.index} has none",
            "a filler would read as a KL of its own",
            "score all samples with the reference, or none",
        )
    return _pad([values[:width] for values in present], width, 0.0) if present else None


def _stats(samples: Sequence[TrainSample], length: int, width: int) -> BatchStats:
    completions = [len(s.completion_ids) for s in samples]
    lost = [max(0, count - width) for count in completions]
    return BatchStats(
        sequence_lengths=[len(s.prompt_ids) + count for s, count in zip(samples, completions, strict=True)],
        completion_lengths=completions,
        padded_sequence_length=length,
        padded_completion_length=width,
        finish_reasons=dict(collections.Counter(s.finish_reason for s in samples)),
        rewards=[s.reward for s in samples],
        datasets=[s.dataset for s in samples],
        truncated_rows=sum(count > 0 for count in lost),
        truncated_tokens=sum(lost),
    )
