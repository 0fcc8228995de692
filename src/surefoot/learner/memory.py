"""Memory ran out: what counts as that, in how many smaller pieces the step is done again, and when it is the end.

Owns       `MAX_SPLITS`, and the words of every message about memory.
Promises   a step is done again with half the rows per microbatch, at most three times in a run: the gradient is the
           same, so nothing about the batch changes but its cut, and that is said aloud; after that, a stop with sizes.
Never      leaves a row out.

Read next: `grpo.py`, which throws the gradients away and starts the step over; `footprint.py`, the arithmetic.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from surefoot.config import MICROBATCH_TOKENS
from surefoot.errors import MemoryLimitError
from surefoot.learner.footprint import ModelShape, Work, decided, lasting_bytes, microbatch_budget, predict
from surefoot.learner.samples import split_microbatches
from surefoot.records import TrainSample
from surefoot.system.memory import available_bytes, peak_resident_bytes, resident_bytes

if TYPE_CHECKING:
    from surefoot.learner.grpo import GRPOLearner

MAX_SPLITS = 3
"""Halvings in one run. What does not fit with an eighth of the rows needs another machine, not another cut."""
OUT_OF_MEMORY_MESSAGES = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "status_alloc_failed",
)
"""What a RuntimeError says when it means memory: torch's CPU allocator, Metal and CUDA, C++, cuBLAS."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on whatever device."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    said = str(error).lower()
    return isinstance(error, RuntimeError) and any(saying in said for saying in OUT_OF_MEMORY_MESSAGES)


def largest_piece(
    samples: Sequence[TrainSample], size: int, splits: int, *, tokens: int = MICROBATCH_TOKENS
) -> list[TrainSample]:
    """The microbatch with the most rows, at this many halvings."""
    return max(split_microbatches(list(samples), size, splits, tokens=tokens), key=len, default=[])


def plan_step(learner: GRPOLearner, samples: Sequence[TrainSample]) -> tuple[int, bool]:
    """Tokens of one microbatch, and whether layers are computed again; by what is free before the first step.

    Args:
        samples: of that step; later completions are taken to be as long as they may be.
    """
    shape, work = shape_of(learner.net), work_of(learner, samples)
    lasting, unused = lasting_bytes(shape, work), unused_bytes(learner.device)
    if unused is not None:  # of what lasts, the optimiser's states alone are made in the first step
        coming = 0.0 if learner.optimiser.state else lasting.get("optimiser states", 0.0)
        work = replace(work, free=unused + sum(lasting.values()) - coming)
    recomputes = decided(shape, work, learner.settings.gradient_checkpointing)
    work = replace(work, recomputes=recomputes)
    if not learner.fused:
        return MICROBATCH_TOKENS, recomputes
    gradients = predict(shape, work).passing["gradients"]
    return microbatch_budget(shape, work, None if unused is None else unused - coming - gradients), recomputes


def shape_of(net: Any) -> ModelShape:
    """The sizes of a network that is there; experts and the like count as their parameters alone."""
    config, parameters = net.config, dict(net.named_parameters())
    heads, hidden = getattr(config, "num_attention_heads", None) or 1, config.hidden_size  # recurrent ones have none
    inner = getattr(config, "intermediate_size", None) or 4 * hidden  # where it has another name, the usual one
    return ModelShape(
        sum(p.numel() for p in parameters.values()), config.num_hidden_layers, hidden, inner, heads,
        getattr(config, "num_key_value_heads", None) or heads, getattr(config, "head_dim", None) or hidden // heads,
        config.vocab_size, tied=bool(getattr(config, "tie_word_embeddings", False)),
        qk_norm=any(name.endswith("q_norm.weight") for name in parameters),
    )  # fmt: skip


def work_of(learner: GRPOLearner, samples: Sequence[TrainSample]) -> Work:
    """What this learner does in one step of such samples; engines are somebody else's."""
    settings, adapter = learner.settings, learner.adapter
    rounds = None if learner.masters is None else learner.masters.rounds
    width = next(learner.net.parameters()).element_size() if rounds is None else rounds.itemsize
    groups = len({sample.group for sample in samples}) or 1
    return Work(
        device=learner.device.type, width=width, groups=groups,
        siblings=max(1, len(samples) // groups), prompt=max((len(s.prompt_ids) for s in samples), default=1),
        completion=settings.max_completion_length,
        microbatch_size=settings.microbatch_size, optim=settings.optim, reference=learner.reference is not None,
        adapter=None if adapter is None else sum(p.numel() for p in learner.wholes().values()),
        fused=learner.fused, engine_copies=0,
    )  # fmt: skip


def unused_bytes(device: torch.device) -> float | None:
    """What the device can still give to this process; None where nobody says."""
    if device.type == "cuda":
        idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + idle)
    available = available_bytes() if device.type == "cpu" else None
    return None if available is None else float(available)


def take_peak(device: torch.device) -> int:
    """The most bytes in use since this was last asked: of torch's allocator on a GPU, of the whole process elsewhere.

    A process cannot forget its peak, so on a CPU it is that since its start.
    """
    if device.type != "cuda":
        return peak_resident_bytes()
    found = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return found


def split_note(rows: int, fewer: int, splits: int, version: int) -> tuple[str, str]:
    """What happened, and what to do: for the one warning about it."""
    return (
        f"memory ran out at version {version} with microbatches of {rows} rows; the step was done again with {fewer} "
        f"(halving {splits} of {MAX_SPLITS})",
        f"the gradient is the same and steps take longer; microbatch_size = {max(fewer, 1)} spares the failed attempt",
    )


def memory_limit(net: Any, piece: Sequence[TrainSample], *, splits: int, version: int, torn: bool) -> MemoryLimitError:
    """The end, with sizes.

    Args:
        piece: the largest microbatch of the step that did not fit.
        torn: the optimiser's step had begun.
    """
    tokens = sum(len(s.prompt_ids) + len(s.completion_ids) for s in piece)
    parameters = sum(p.numel() for p in net.parameters())
    device = next(net.parameters()).device
    where = "inside the optimiser's step" if torn else f"with microbatches of {len(piece)} rows ({tokens} tokens)"
    return MemoryLimitError(
        f"memory ran out at version {version} {where} after {splits} of {MAX_SPLITS} halvings; the model has "
        f"{parameters} parameters on {device}, {memory_in_use(device)} in use",
        "the weights may be half stepped, so nothing of them is saved"
        if torn
        else "nothing of this step was applied, and no row may be left out to make it fit",
        "give it more memory, then resume from the last checkpoint; or lower max_completion_length, or take a "
        "smaller model",
    )


def memory_in_use(device: torch.device) -> str:
    """Bytes on the device, or of this process, as `512 MiB`; `unknown memory` where nobody says."""
    if device.type == "cuda":
        return f"{torch.cuda.memory_allocated(device) >> 20} MiB"
    resident = resident_bytes(os.getpid())
    return f"{resident >> 20} MiB" if resident else "unknown memory"
