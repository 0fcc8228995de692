"""Packing: widths from buckets, masks from provenance, cuts counted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.errors import ShapeError
from surefoot.maths.packing import COMPLETION_LEN_BUCKETS, SEQ_LEN_BUCKETS, make_batch, step_totals
from surefoot.records import TrainSample

PAD = 0


def sample(prompt: int, completion: int, **changes: Any) -> TrainSample:
    """Token ids count up, so every position is recognisable; none is the pad id."""
    fields: dict[str, Any] = {
        "item_id": "t", "trainer_version": 3, "group": "g", "reward": 1.0,
        "prompt_ids": tuple(range(100, 100 + prompt)),
        "completion_ids": tuple(range(500, 500 + completion)),
        "sampled": (True,) * completion,
        "logprobs": tuple(-0.1 * (i + 1) for i in range(completion)),
    }  # fmt: skip
    return TrainSample(**(fields | changes))


def test_every_row_holds_prompt_then_completion_then_padding() -> None:
    batch, _ = make_batch([sample(3, 2), sample(1, 4)], pad_token_id=PAD)
    assert batch.input_ids.tolist() == [
        [100, 101, 102, 500, 501, 0, 0],
        [100, 500, 501, 502, 503, 0, 0],
    ]
    assert batch.completion_ids.tolist() == [[500, 501, 0, 0], [500, 501, 502, 503]]
    assert batch.mask.tolist() == [[True, True, False, False], [True] * 4]
    assert batch.prompt_lens.tolist() == [3, 1]
    torch.testing.assert_close(batch.logprobs[0], torch.tensor([-0.1, -0.2, 0.0, 0.0]))
    assert batch.mask.dtype == torch.bool


def test_completion_tokens_sit_where_the_logits_are_read() -> None:
    batch, _ = make_batch([sample(3, 2), sample(1, 4), sample(7, 3)], pad_token_id=PAD)
    for row in range(3):
        for t in range(int(batch.mask[row].sum())):
            assert batch.input_ids[row, batch.prompt_lens[row] + t] == batch.completion_ids[row, t]


def test_the_stop_token_is_trained_when_it_equals_the_pad_id() -> None:
    ending = sample(2, 3, completion_ids=(7, 9, 2))
    batch, _ = make_batch([ending, sample(2, 6)], pad_token_id=2)
    assert batch.mask[0].tolist() == [True, True, True, False, False, False]


def test_a_pad_id_in_the_middle_of_a_completion_is_trained() -> None:
    batch, _ = make_batch([sample(2, 4, completion_ids=(5, 0, 0, 6)), sample(2, 5)], pad_token_id=0)
    assert batch.mask[0].tolist() == [True] * 4 + [False]


def test_pad_id_zero_is_used_and_not_replaced() -> None:
    batch, _ = make_batch([sample(1, 1), sample(1, 3)], pad_token_id=0)
    assert batch.input_ids[0].tolist() == [100, 500, 0, 0]
    for bad in (None, True, -1):
        with pytest.raises(ShapeError, match="pad_token_id"):
            make_batch([sample(1, 1)], pad_token_id=bad)  # type: ignore[arg-type]


def test_tokens_of_tools_carry_no_loss() -> None:
    spoken = sample(2, 5, sampled=(True, True, False, False, True))
    batch, _ = make_batch([spoken], pad_token_id=PAD)
    assert batch.mask.tolist() == [[True, True, False, False, True]]


def test_lengths_five_and_ten_give_masks_of_five_and_ten() -> None:
    batch, _ = make_batch([sample(4, 5), sample(4, 10)], pad_token_id=PAD)
    assert batch.mask.sum(1).tolist() == [5, 10]


def test_identical_completions_have_identical_mask_rows() -> None:
    batch, _ = make_batch([sample(4, 5), sample(4, 5), sample(1, 9)], pad_token_id=PAD)
    assert torch.equal(batch.mask[0], batch.mask[1])
    assert not torch.equal(batch.mask[0], batch.mask[2])


def test_prompt_lengths_come_in_batch_order() -> None:
    rows = [sample(10, 3), sample(10, 4), sample(30, 3), sample(30, 9)]
    assert make_batch(rows, pad_token_id=PAD)[0].prompt_lens.tolist() == [10, 10, 30, 30]


@pytest.mark.parametrize(
    ("prompt", "completion", "seq", "comp", "length", "width"),
    [
        (20, 100, [256, 512], [128, 256], 256, 128),
        (10, 30, [64], [16, 32, 64], 64, 32),
        (200, 300, [256], [512], 256, 56),
        (200, 300, [256], None, 256, 56),
        (5, 1, [8], [1, 4], 8, 1),
        (5, 3, None, None, 8, 3),
        (5, 3, None, [4], 9, 4),
        (5, 300, [], [], 512, 384),
        (5, 2000, [], [], 2005, 2000),
        (5, 9, [64], [4, 8], 64, 8),
    ],
)
def test_known_widths(
    prompt: int, completion: int, seq: list[int] | None, comp: list[int] | None, length: int, width: int
) -> None:
    batch, stats = make_batch(
        [sample(prompt, completion)], pad_token_id=PAD, seq_len_buckets=seq, completion_len_buckets=comp
    )
    assert (batch.input_ids.shape[1], batch.completion_ids.shape[1]) == (length, width)
    assert (stats.padded_sequence_length, stats.padded_completion_length) == (length, width)
    assert stats.truncated_tokens == max(0, completion - width)
    assert stats.truncated_rows == (completion > width)


def test_the_longest_prompt_decides_how_much_of_a_completion_fits() -> None:
    rows = [sample(10, 120), sample(150, 100)]
    batch, stats = make_batch(rows, pad_token_id=PAD, seq_len_buckets=[256], completion_len_buckets=[128])
    assert batch.completion_ids.shape[1] == 106
    assert (stats.truncated_rows, stats.truncated_tokens) == (1, 14)
    assert batch.mask.sum(1).tolist() == [106, 100]
    assert stats.completion_lengths == [120, 100]


@pytest.mark.parametrize("prompt", [256, 300])
def test_a_prompt_that_fills_the_largest_bucket_is_refused(prompt: int) -> None:
    with pytest.raises(ShapeError, match=f"prompt of {prompt}"):
        make_batch([sample(prompt, 5)], pad_token_id=PAD, seq_len_buckets=[128, 256])
    make_batch([sample(255, 5)], pad_token_id=PAD, seq_len_buckets=[128, 256])


@pytest.mark.parametrize("bad", [[256, 128], [0, 128], [-4], [64, 64]])
def test_buckets_out_of_order_are_refused(bad: list[int]) -> None:
    for key in ("seq_len_buckets", "completion_len_buckets"):
        with pytest.raises(ValueError, match="buckets"):
            make_batch([sample(3, 3)], pad_token_id=PAD, **{key: bad})  # type: ignore[arg-type]


def test_no_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        make_batch([], pad_token_id=PAD)


lengths = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=6)
buckets = st.none() | st.lists(st.integers(1, 90), unique=True, max_size=4).map(sorted)


@settings(max_examples=150, deadline=None)
@given(shapes=lengths, seq=buckets, comp=buckets)
def test_a_width_is_a_bucket_or_a_counted_cut(
    shapes: list[tuple[int, int]], seq: list[int] | None, comp: list[int] | None
) -> None:
    rows = [sample(p, c) for p, c in shapes]
    longest_prompt, longest = max(p for p, _ in shapes), max(c for _, c in shapes)
    if seq and longest_prompt >= seq[-1]:
        with pytest.raises(ShapeError):
            make_batch(rows, pad_token_id=PAD, seq_len_buckets=seq, completion_len_buckets=comp)
        return
    batch, stats = make_batch(rows, pad_token_id=PAD, seq_len_buckets=seq, completion_len_buckets=comp)
    length, width = batch.input_ids.shape[1], batch.completion_ids.shape[1]
    assert longest_prompt + width <= length
    assert length in (seq or (SEQ_LEN_BUCKETS if seq == [] else ())) or seq is None
    clamped = width == length - longest_prompt
    allowed = comp or (COMPLETION_LEN_BUCKETS if comp == [] else (longest,))
    assert width in allowed or clamped
    assert width >= longest or (stats.truncated_rows > 0 and stats.truncated_tokens > 0)
    kept = [min(c, width) for _, c in shapes]
    assert batch.mask.sum(1).tolist() == kept
    assert stats.truncated_tokens == sum(c for _, c in shapes) - sum(kept)


@settings(max_examples=50, deadline=None)
@given(shapes=lengths, data=st.data())
def test_a_row_is_the_same_whoever_shares_its_batch(shapes: list[tuple[int, int]], data: st.DataObject) -> None:
    row = data.draw(st.integers(0, len(shapes) - 1))
    rows = [sample(p, c) for p, c in shapes]
    together, alone = make_batch(rows, pad_token_id=PAD)[0], make_batch([rows[row]], pad_token_id=PAD)[0]
    used = int(alone.input_ids.shape[1])
    assert torch.equal(together.input_ids[row, :used], alone.input_ids[0])
    assert int(together.mask[row].sum()) == int(alone.mask.sum())
    assert (together.input_ids[row, used:] == PAD).all()


def test_reference_logprobs_keep_their_places() -> None:
    rows = [sample(2, 3, ref_logprobs=(-1.0, -2.0, -3.0)), sample(2, 5, ref_logprobs=(-1.5,) * 5)]
    wide = make_batch(rows, pad_token_id=PAD, completion_len_buckets=[8])[0].ref_logprobs
    assert wide is not None
    assert wide.shape == (2, 8)
    assert wide[0].tolist() == [-1.0, -2.0, -3.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    narrow = make_batch(rows, pad_token_id=PAD, completion_len_buckets=[2])[0].ref_logprobs
    assert narrow is not None
    assert narrow[0].tolist() == [-1.0, -2.0]
    assert make_batch([sample(2, 2)], pad_token_id=PAD)[0].ref_logprobs is None


@pytest.mark.parametrize("first", [True, False])
def test_reference_logprobs_for_some_rows_only_are_refused(first: bool) -> None:
    rows = [sample(2, 2, ref_logprobs=(-1.0, -1.0)), sample(2, 2)]
    with pytest.raises(ValueError, match="1 of 2"):
        make_batch(rows if first else rows[::-1], pad_token_id=PAD)


def test_stats_tell_true_lengths_and_finish_reasons() -> None:
    rows = [
        sample(5, 10, finish_reason="stop", dataset="sums"),
        sample(5, 20, finish_reason="length", reward=0.0),
        sample(10, 20, finish_reason="stop"),
    ]
    batch, stats = make_batch(rows, pad_token_id=PAD, seq_len_buckets=[64], completion_len_buckets=[32])
    assert stats.sequence_lengths == [15, 25, 30]
    assert stats.finish_reasons == {"stop": 2, "length": 1}
    assert stats.rewards == [1.0, 0.0, 1.0]
    assert stats.datasets == ["sums", "", ""]
    assert batch.truncated.tolist() == [False, True, False]
    assert batch.mask.sum(1).tolist() == [10, 20, 20]


def test_rows_selects_tensors_and_lists_together() -> None:
    rows = [sample(2, n, item_id=f"t{n}", group=f"g{n}", trainer_version=n, reward=float(n)) for n in (1, 2, 3)]
    batch = make_batch(rows, pad_token_id=PAD)[0]
    picked = batch.rows([2, 0])
    assert picked.item_ids == ["t3", "t1"]
    assert picked.groups == ["g3", "g1"]
    assert picked.trainer_versions == [3, 1]
    assert picked.rewards.tolist() == [3.0, 1.0]
    assert picked.mask.sum(1).tolist() == [3, 1]
    assert len(picked) == 2
    assert batch.rows(torch.tensor([True, False, True])).item_ids == ["t1", "t3"]
    assert batch.to("meta").input_ids.device.type == "meta"
    assert batch.to("meta").item_ids == batch.item_ids


def test_totals_count_only_rows_and_tokens_that_carry_loss() -> None:
    rows = [
        sample(2, 4),
        sample(2, 6, finish_reason="length"),
        sample(2, 3, sampled=(True, False, True)),
        sample(2, 2, sampled=(False, False)),
    ]
    assert step_totals(rows, max_completion_length=9) == (3, 12, 9)
    assert step_totals(rows, max_completion_length=9, mask_truncated=True) == (2, 6, 9)


def test_totals_equal_the_mask_that_multiplies_the_loss() -> None:
    rows = [sample(2, n, finish_reason="length" if n % 3 == 0 else "stop") for n in range(1, 9)]
    batch = make_batch(rows, pad_token_id=PAD)[0]
    for masked in (True, False):
        totals = step_totals(rows, max_completion_length=8, mask_truncated=masked)
        mask = batch.mask & ~batch.truncated.unsqueeze(1) if masked else batch.mask
        assert totals.tokens == int(mask.sum())
        assert totals.rows == int(mask.any(1).sum())
