"""Silent failure 10: a completion that runs past its row is scored with the logits of the next row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from surefoot.errors import ShapeError
from surefoot.maths.logprobs import compute_logprobs

Scorer = Callable[[Tensor, Tensor, list[int]], Tensor]
B, L, T, V = 2, 7, 3, 11
FITS, OVERFLOWS = [5, 2], [6, 2]  # row 0 needs positions 4..6, or 5..7 of which 7 does not exist


def ours(logits: Tensor, ids: Tensor, prompt_lens: list[int]) -> Tensor:
    return compute_logprobs(logits, ids, prompt_lens=prompt_lens)


def flattened(logits: Tensor, ids: Tensor, prompt_lens: list[int]) -> Tensor:
    """The planted bug: (B, L) is flattened before indexing, so position L of row i is position 0 of row i + 1."""
    logp = torch.log_softmax(logits, -1).flatten(0, 1)
    start = torch.arange(B) * L + torch.tensor(prompt_lens) - 1
    return logp[start[:, None] + torch.arange(T)].gather(-1, ids[..., None]).squeeze(-1)


def check(score: Scorer) -> None:
    """Row 0 never depends on row 1: where it would have to, the call is refused."""
    torch.manual_seed(0)
    logits, ids = torch.randn(B, L, V), torch.randint(0, V, (B, T))
    other = logits.clone()
    other[1] = torch.randn(L, V)
    assert torch.equal(score(logits, ids, FITS)[0], score(other, ids, FITS)[0])
    try:
        rows = score(logits, ids, OVERFLOWS)[0], score(other, ids, OVERFLOWS)[0]
    except ShapeError as error:
        assert "row 0" in str(error)
        return
    assert torch.equal(*rows), "row 0 was scored with logits of row 1"


def test_a_position_outside_its_row_is_refused_by_name() -> None:
    check(ours)
    with pytest.raises(ShapeError, match="row 0"):
        ours(torch.randn(B, L, V), torch.zeros(B, T, dtype=torch.long), OVERFLOWS)


def test_the_planted_variant_is_right_as_long_as_everything_fits() -> None:
    torch.manual_seed(1)
    logits, ids = torch.randn(B, L, V), torch.randint(0, V, (B, T))
    torch.testing.assert_close(flattened(logits, ids, FITS), ours(logits, ids, FITS))


def test_planted_flat_index_reads_the_next_row() -> None:
    with pytest.raises(AssertionError, match="row 1"):
        check(flattened)
