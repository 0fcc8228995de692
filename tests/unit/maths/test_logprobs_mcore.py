"""Our log-probabilities beside Megatron's: a vocabulary that is split over two ranks scores tokens as one that is not.

Run it by `scripts/run_unit.sh --mcore-only`. On GPUs the ranks talk by nccl; where torch sees none, by gloo.
"""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.mcore, pytest.mark.filterwarnings("ignore")]  # Megatron's own, of what it does without
V, ROWS, TOKENS = 16, 3, 4


def score() -> None:
    """One rank: both sides on the same logits, values and gradients compared."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel

    from surefoot.maths.logprobs import compute_logprobs

    on_gpus = torch.cuda.device_count() >= 2
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    dice = torch.Generator().manual_seed(7)
    logits = torch.randn(ROWS, TOKENS, V, generator=dice).to(device)
    tokens = torch.randint(0, V, (ROWS, TOKENS), generator=dice).to(device)
    whole = logits.clone().requires_grad_()
    ours = compute_logprobs(whole, tokens, align=False)
    part = logits.chunk(ranks, dim=-1)[rank].clone().requires_grad_()  # this rank's share of the vocabulary
    theirs = -tensor_parallel.vocab_parallel_cross_entropy(part.clone(), tokens)  # it overwrites what it is given
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)
    weights = torch.rand(ROWS, TOKENS, generator=dice).to(device)  # as advantages weigh tokens
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    torch.testing.assert_close(part.grad, whole.grad.chunk(ranks, dim=-1)[rank], rtol=0, atol=1e-5)
    print(f"rank {rank} of {ranks}: {tokens.numel()} tokens agree")
    dist.destroy_process_group()


def test_a_split_vocabulary_scores_tokens_as_a_whole_one(distributed_runner: Any) -> None:
    ranks = distributed_runner(score, world_size=2, timeout=300)
    for rank in range(2):
        assert f"rank {rank} of 2: {ROWS * TOKENS} tokens agree" in ranks.output(rank)
