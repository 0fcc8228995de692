"""One number that tells two copies of a tensor apart, whatever was done to one of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surefoot.maths import checksums as module
from surefoot.maths.checksums import LANES, ROWS, checksum, checksums

PIECE = ROWS * LANES
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.bool]
SIZES = [1, 2, 3, 7, 8, 9, 575, LANES - 1, LANES, 2 * LANES + 1]


def numbers(size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).mul(50).to(dtype)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, lanes and pieces of a size at which every border is crossed by a short tensor."""
    monkeypatch.setattr(module, "LANES", 4)
    monkeypatch.setattr(module, "ROWS", 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_a_copy_has_the_same_sum_and_one_flipped_bit_another(size: int, dtype: torch.dtype) -> None:
    tensor = numbers(size, dtype)
    before = checksum(tensor)
    assert checksum(tensor.clone()) == before
    assert 0 <= before < 2**64
    for place in {0, size // 2, size - 1}:
        changed = tensor.clone()
        changed.view(torch.uint8)[place * dtype.itemsize] ^= 1
        assert checksum(changed) != before, f"the lowest bit at {place}"


@pytest.mark.parametrize("bit", range(8))
@pytest.mark.parametrize("byte", range(8))
def test_every_bit_of_a_word_counts(byte: int, bit: int) -> None:
    tensor = numbers(3 * LANES)
    changed = tensor.clone()
    changed.view(torch.uint8)[8 * LANES + byte] ^= 1 << bit
    assert checksum(changed) != checksum(tensor)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([0.0, 1.0, -1.0, 2.0, -2.0]), min_size=2, max_size=70), st.data())
def test_two_elements_that_changed_places_change_the_sum(values: list[float], data: Any) -> None:
    """Signs are the highest bits of a word: a weighted sum alone cannot see them move."""
    i, j = (data.draw(st.integers(0, len(values) - 1)) for _ in "ij")
    swapped = list(values)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "LANES", 4)
        patch.setattr(module, "ROWS", 2)
        same = checksum(torch.tensor(values)) == checksum(torch.tensor(swapped))
    assert same == (values == swapped)


@pytest.mark.parametrize("apart", [1, 2, LANES, 2 * LANES, PIECE, 2 * PIECE, 2 * PIECE + 2])
def test_words_that_differ_in_their_highest_bit_only_are_seen_to_change_places(apart: int) -> None:
    tensor = torch.zeros(3 * PIECE, dtype=torch.int64)
    tensor[0] = -(2**63)
    moved = torch.zeros_like(tensor)
    moved[apart] = -(2**63)
    assert checksum(tensor) != checksum(moved)


def test_shape_and_dtype_are_part_of_it() -> None:
    flat = numbers(24)
    sums = [checksum(t) for t in (flat, flat.view(4, 6), flat.view(6, 4), flat.view(1, 24), flat.view(torch.int32))]
    assert len(set(sums)) == len(sums)
    lengths = [checksum(torch.zeros(n)) for n in range(40)]
    assert len(set(lengths)) == len(lengths), "zeros of every length differ, no zeros at all included"


def test_the_sum_is_of_the_numbers_and_not_of_their_layout() -> None:
    tensor = numbers(24).view(4, 6)
    apart = torch.empty(4, 12)[:, ::2].copy_(tensor)
    assert checksum(apart) == checksum(tensor)
    inside = torch.cat([torch.zeros(1), numbers(9)])[1:]
    assert checksum(inside) == checksum(numbers(9)), "a view that does not begin on a word"
    assert checksum(torch.nn.Parameter(tensor)) == checksum(tensor)


def test_nan_and_the_two_zeros_are_bit_patterns() -> None:
    assert checksum(torch.tensor([float("nan")])) == checksum(torch.tensor([float("nan")]))
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))


@pytest.mark.parametrize("size", [PIECE, 2 * PIECE + 5, 5 * PIECE])
@pytest.mark.parametrize("at_once", [2, 3, 128])
def test_how_many_pieces_are_read_at_once_does_not_matter(
    size: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other devices read many: a launch costs more there than a sum."""
    tensor = torch.arange(size) * 0x9E3779B97F4A7C1
    alone = checksum(tensor)
    monkeypatch.setattr(module, "_PIECES_AT_ONCE", {"cpu": at_once})
    assert checksum(tensor) == alone


def test_sums_come_by_name() -> None:
    weights = {"a": numbers(5), "b": numbers(5, seed=1)}
    assert checksums(weights) == {"a": checksum(weights["a"]), "b": checksum(weights["b"])}
    assert checksums({}) == {}


@pytest.mark.usefixtures("small_pieces")
def test_no_two_of_many_near_copies_collide() -> None:
    tensor = numbers(64)
    sums = {checksum(tensor)}
    for place in range(64 * 4):
        for bit in range(8):
            changed = tensor.clone()
            changed.view(torch.uint8)[place] ^= 1 << bit
            sums.add(checksum(changed))
    assert len(sums) == 1 + 64 * 4 * 8


@pytest.mark.usefixtures("small_pieces")
def test_planted_sum_without_rows_is_blind_to_signs_that_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: without the row sums, two words in one lane that differ in the highest bit may change places."""
    one = torch.zeros(32, dtype=torch.int64)
    two = one.clone()
    one[0], two[4] = -(2**63), -(2**63)
    assert checksum(one) != checksum(two)
    real = module._mixed
    monkeypatch.setattr(module, "_mixed", lambda values: real(values) if len(values) == 4 else 0)
    assert checksum(one) == checksum(two)
