"""Dice: tokens come from the stated distribution, by private streams, with the probability they were drawn with."""

from __future__ import annotations

import math

import pytest
import torch

from surefoot.engines.decoder import draw, draw_siblings, random_stream

pytestmark = pytest.mark.usefixtures("one_thread")

ALMOST_ONE = math.nextafter(1.0, 0.0)


def many(logits: list[float], uniforms: list[float], temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.tensor(logits).expand(len(uniforms), -1)
    return draw(rows, torch.full((len(uniforms),), temperature), torch.tensor(uniforms, dtype=torch.float64))


# -- streams --------------------------------------------------------------------------


def test_a_stream_is_a_function_of_its_seed_alone() -> None:
    torch.manual_seed(1)
    first = random_stream(7, 5)
    torch.manual_seed(2)
    assert random_stream(7, 5) == first
    assert random_stream(7, 3) == first[:3], "a shorter answer must not change the numbers before it"
    assert all(0.0 <= u < 1.0 for u in first)


def test_drawing_leaves_the_global_stream_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    random_stream(7, 100)
    many([0.0, 1.0], [0.3, 0.6])
    assert torch.equal(torch.rand(3), expected)


def test_different_seeds_have_different_streams() -> None:
    streams = {tuple(random_stream(seed, 2)) for seed in range(500)}
    assert len(streams) == 500


def test_all_63_bits_of_a_seed_count() -> None:
    """Seeds are digests of names: two that share their low 32 bits are still two rollouts."""
    assert random_stream(5, 4) != random_stream(5 + 2**32, 4)


# -- distribution ---------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_frequencies_are_those_of_the_softmax(temperature: float) -> None:
    """Chi-square over 6 tokens, 20,000 rollouts with a seed each; 36 is the 1e-6 quantile for 5 degrees of freedom."""
    logits, n = [0.0, 1.5, -1.0, 0.3, -2.5, 0.9], 20_000
    uniforms = [random_stream(seed, 1)[0] for seed in range(n)]
    drawn = many(logits, uniforms, temperature)
    expected = torch.softmax(torch.tensor(logits).double() / temperature, 0) * n
    seen = torch.bincount(drawn[0], minlength=6).double()
    assert float(((seen - expected) ** 2 / expected).sum()) < 36


def test_the_test_above_would_notice_a_wrong_temperature() -> None:
    logits, n = [0.0, 1.5, -1.0, 0.3, -2.5, 0.9], 20_000
    drawn = many(logits, [random_stream(seed, 1)[0] for seed in range(n)], 1.1)
    expected = torch.softmax(torch.tensor(logits).double(), 0) * n
    assert float(((torch.bincount(drawn[0], minlength=6) - expected) ** 2 / expected).sum()) > 36


def test_each_token_gets_the_interval_of_its_probability() -> None:
    logits = [math.log(p) for p in (0.1, 0.2, 0.3, 0.4)]
    tokens, _ = many(logits, [0.0, 0.09, 0.11, 0.29, 0.31, 0.59, 0.61, ALMOST_ONE])
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("hopeless", [-math.inf, -1e4])
def test_a_token_of_probability_zero_is_never_drawn(hopeless: float) -> None:
    """At both ends of the vocabulary and in the middle, at both ends of the unit interval."""
    logits = [hopeless, hopeless, 0.5, hopeless, 0.1, hopeless, hopeless]
    uniforms = [0.0, 5e-324, 0.25, 0.5, 0.5986876601124521, 0.75, ALMOST_ONE, *random_stream(3, 2000)]
    tokens, logprobs = many(logits, uniforms)
    assert set(tokens.tolist()) == {2, 4}
    assert torch.isfinite(logprobs).all()


@pytest.mark.parametrize("shift", [-3e4, 0.0, 3e4])
def test_a_large_common_offset_changes_nothing(shift: float) -> None:
    tokens, logprobs = many([shift + x for x in (0.0, 4.0, 8.0)], [0.0001, 0.01, 0.5])
    assert tokens.tolist() == [0, 1, 2]
    expected = torch.log_softmax(torch.tensor([0.0, 4.0, 8.0]), 0)
    torch.testing.assert_close(logprobs, expected)


def test_one_certain_token_has_logprob_zero() -> None:
    tokens, logprobs = many([0.0, 3e4, 0.0], random_stream(0, 50))
    assert set(tokens.tolist()) == {1}
    assert logprobs.abs().max() == 0


def test_the_tail_of_a_large_vocabulary_keeps_its_probability() -> None:
    """A float32 running sum over 200,000 equal tokens stops growing evenly; the last tokens would starve."""
    size, uniforms = 200_000, [(k + 0.5) / 20 for k in range(20)]
    tokens, _ = many([0.0] * size, uniforms)
    assert tokens.tolist() == [int(u * size) for u in uniforms]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_the_logprob_is_that_of_the_distribution_drawn_from(temperature: float) -> None:
    logits = torch.randn(64, 30, generator=torch.Generator().manual_seed(0)) * 4
    drawn = draw(logits, torch.full((64,), temperature), torch.tensor(random_stream(1, 64), dtype=torch.float64))
    expected = torch.log_softmax(logits / temperature, -1).gather(1, drawn.tokens[:, None]).squeeze(1)
    torch.testing.assert_close(drawn.logprobs, expected, atol=1e-6, rtol=1e-6)


def test_temperature_zero_takes_the_most_likely_token_and_rows_do_not_mix() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, 2.0, 1.0]])
    drawn = draw(logits, torch.tensor([0.0, 1.0]), torch.tensor([0.999, 0.999], dtype=torch.float64))
    assert drawn.tokens.tolist() == [1, 2], "row 0 is greedy, row 1 sampled the last token"
    torch.testing.assert_close(drawn.logprobs[0], torch.log_softmax(logits[0], 0)[1])


# -- siblings -------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_siblings_draw_what_separate_rows_would_draw(temperature: float) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1)) * 3
    uniforms = torch.tensor(random_stream(4, 25), dtype=torch.float64)
    together = draw_siblings(logits, temperature, uniforms)
    apart = draw(logits.expand(25, -1), torch.full((25,), temperature), uniforms)
    assert together.tokens.tolist() == apart.tokens.tolist()
    assert torch.equal(together.logprobs, apart.logprobs)
    assert together.pairs() == list(zip(apart.tokens.tolist(), apart.logprobs.tolist(), strict=True))
