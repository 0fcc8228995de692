"""Memory ran out: what counts as that, in how many smaller pieces the step is done again, and when it is the end.

Owns       `MAX_SPLITS`, and the words of every message about memory.
Promises   a step is done again with half the rows per microbatch, at most three times in a run: the gradient is the
           same, so nothing about the batch changes but its cut, and that is said aloud; after that, a stop with sizes.
Never      leaves a row out.

Read next: `grpo.py`, which throws the gradients away and starts the step over.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from surefoot.config import MICROBATCH_TOKENS
from surefoot.errors import MemoryLimitError
from surefoot.learner.samples import split_microbatches
from surefoot.records import TrainSample
from surefoot.system.memory import resident_bytes

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


ACTIVATION_BYTES = 10 << 30
"""What the fused forward pass may keep for the backward pass at most; more rows at once would not be faster."""


def microbatch_tokens(net: Any) -> int:
    """How many tokens the fused forward pass takes at once on this GPU, with half of its free memory."""
    device = next(net.parameters()).device
    free = ACTIVATION_BYTES
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        free = min(free, (torch.cuda.mem_get_info(device)[0] + unused) // 2)
    return max(MICROBATCH_TOKENS, free // bytes_per_token(net))


def bytes_per_token(net: Any) -> int:
    """What the fused forward pass keeps of one token, in all layers."""
    config, kept = net.config, next(net.parameters()).element_size()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    numbers = 4 * config.hidden_size + 3 * config.intermediate_size + size * (4 * heads + 6 * kv_heads)
    return int(config.num_hidden_layers * numbers * kept)


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
