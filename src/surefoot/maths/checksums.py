"""A 64-bit sum over a tensor's bits, to tell whether two copies of the weights are the same.

Fast and not cryptographic: it finds what went wrong by itself, not what somebody forged. The bits are read as a table
of 64-bit words, `LANES` wide, and the table is cut into pieces of `ROWS` rows, small enough for the processor's cache:

    row sums    each row is added up
    lane sums   the columns of each piece are added up, and folded from piece to piece: s = s * FOLD + sum

Both lists are mixed, place by place, into one number with the shape and the dtype. One changed word always changes its
row's sum; two words that changed places changed two rows, or two lanes of one row. What stays unseen by construction is
the same amount added and taken away in turn at the four corners of a rectangle inside one piece, which no fault does by
itself; anything else goes unnoticed once in 2^64.

Axes: C pieces at once, R rows of a piece, L lanes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

LANES = 4096
ROWS = 32
"""A piece is 1 MiB: read from memory once, then twice from the cache."""
_PIECES_AT_ONCE = {"cpu": 1}
_PIECES_ON_OTHER_DEVICES = 128
"""Where every call is a launch; the result does not depend on it."""
_FOLD = 0x5851F42D4C957F2D
_MIX = 0x369DEA0F31A53F85  # odd, and below 2^63: torch's integers are signed
_LOW_HALF = 0xFFFFFFFF
_WORD = 2**64 - 1


def checksums(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """The checksum of every tensor, by name."""
    return {name: checksum(tensor) for name, tensor in weights.items()}


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """The same number on every device for the same bits, shape and dtype.

    Example:
        >>> checksum(torch.tensor([1.0, -1.0])) == checksum(torch.tensor([-1.0, 1.0]))
        False
    """
    words = _words(tensor)
    lanes = torch.zeros(LANES, dtype=torch.int64, device=words.device)
    rows = [torch.zeros(0, dtype=torch.int64, device=words.device)]
    for pieces in _pieces(words):
        rows.append(pieces.sum(2).flatten())
        _fold(lanes, pieces.sum(1))
    return _joined([_mixed(lanes), _mixed(torch.cat(rows)), *tensor.shape, *str(tensor.dtype).encode()])


def _words(tensor: Tensor) -> Tensor:
    """(N,) the tensor's bytes as 64-bit words, filled up with zeros."""
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    if data.numel() % 8 or data.data_ptr() % 8 or data.storage_offset() % 8:
        data = torch.nn.functional.pad(data, (0, -data.numel() % 8)).clone()  # a copy begins where a word may begin
    return data.view(torch.int64)


def _pieces(words: Tensor) -> Iterator[Tensor]:
    """(C, R, L) whole pieces, then the rest as one piece of fewer rows, its last row filled up with zeros."""
    size = ROWS * LANES
    whole = words.numel() // size
    if whole:
        at_once = _PIECES_AT_ONCE.get(words.device.type, _PIECES_ON_OTHER_DEVICES)
        yield from words[: whole * size].view(whole, ROWS, LANES).split(at_once)
    rest = words[whole * size :]
    if rest.numel():
        yield torch.nn.functional.pad(rest, (0, -rest.numel() % LANES)).view(1, -1, LANES)


def _fold(lanes: Tensor, sums: Tensor) -> None:
    """(L,) take in the (C, L) lane sums of further pieces, the last of which counts once."""
    count = len(sums)
    if count > 1:
        powers = [_signed(pow(_FOLD, count - 1 - piece, 2**64)) for piece in range(count)]
        sums = (sums * torch.tensor(powers, device=sums.device).unsqueeze(1)).sum(0, keepdim=True)
    torch.add(sums[0], lanes, alpha=_signed(pow(_FOLD, count, 2**64)), out=lanes)


def _mixed(values: Tensor) -> int:
    """One number out of a list, sensitive to places and to the length."""
    places = 2 * torch.arange(values.numel(), device=values.device) + 1
    stirred = (values ^ ((values >> 32) & _LOW_HALF)) * _MIX
    stirred = (stirred ^ ((stirred >> 29) & _LOW_HALF)) * (places * _MIX)
    return (int(stirred.sum()) + values.numel()) & _WORD


def _joined(parts: list[int]) -> int:
    total = len(parts)
    for part in parts:
        total = ((total ^ part) * _FOLD) & _WORD
        total ^= total >> 32
    return total


def _signed(value: int) -> int:
    """The same 64 bits as torch's integers have them."""
    return value - 2**64 if value >= 2**63 else value
