"""Where is the change: the posterior against brute force, and the search against seeded noise."""

from __future__ import annotations

import math
import random

import pytest

from surefoot.harness.bisect.noisy import Bernoulli, ChangeSearch, Gaussian, Model, Stats

SAMPLES = [(0, 1.1), (0, 0.9), (0, 1.3), (3, 0.8), (5, 0.2), (5, 0.1), (8, 0.0), (8, -0.2), (8, 0.3)]


def brute(model: Model, samples: list[tuple[int, float]], n: int) -> list[float]:
    """Posterior of each culprit 1..n, one by one, from the definition."""
    logs = []
    for culprit in range(1, n + 1):
        left = Stats.of(v for p, v in samples if p < culprit)
        right = Stats.of(v for p, v in samples if p >= culprit)
        logs.append(model.log_evidence(left, right))
    weights = [math.exp(value - max(logs)) for value in logs]
    return [weight / sum(weights) for weight in weights]


def spread_out(search: ChangeSearch) -> list[float]:
    shares = []
    for segment in search.segments():
        shares += [segment.mass / (segment.high - segment.low)] * (segment.high - segment.low)
    return shares


@pytest.mark.parametrize(
    "model", [Gaussian(), Gaussian(sd=0.5), Gaussian((1.0, 0.0)), Bernoulli(), Bernoulli((0.1, 0.8))]
)
def test_the_posterior_is_the_one_of_the_definition(model: Model) -> None:
    samples = [(p, float(v > 0.5)) if isinstance(model, Bernoulli) else (p, v) for p, v in SAMPLES]
    search = ChangeSearch(8, model)
    for position, value in samples:
        search.add(position, value)
    assert spread_out(search) == pytest.approx(brute(model, samples, 8), rel=1e-9)


def test_known_levels_give_the_textbook_likelihood() -> None:
    """Against the normal density itself: a constant apart, `log_evidence` is the sum of its logarithms."""
    model = Gaussian((1.0, 0.0), sd=0.5)

    def textbook(left: list[float], right: list[float]) -> float:
        return -sum((v - 1.0) ** 2 for v in left) / 0.5 - sum(v * v for v in right) / 0.5

    for left, right in [([1.0, 0.7], [0.2]), ([0.1], [1.1, 0.4])]:
        assert model.log_evidence(Stats.of(left), Stats.of(right)) == pytest.approx(textbook(left, right))


def test_a_metric_without_any_noise_is_no_division_by_zero() -> None:
    search = ChangeSearch(64, Gaussian())
    for position in (0, 0, 0, 64, 64, 64):
        search.add(position, 1.0 if position < 40 else 0.0)
    for _ in range(100):
        if search.best().mass > 0.999:
            break
        position = search.next()
        search.add(position, 1.0 if position < 40 else 0.0)
    assert (search.best().first, search.best().last) == (40, 40)


@pytest.mark.parametrize("learnt", [True, False])
def test_the_culprit_is_found_under_noise_and_few_commits_are_visited(learnt: bool) -> None:
    right = 0
    for seed in range(20):
        source = random.Random(seed)
        culprit = source.randint(1, 128)
        search = ChangeSearch(128, Gaussian() if learnt else Gaussian((0.0, -1.5)))
        for position in [0, 128] * 4:
            search.add(position, source.gauss(-1.5 * (position >= culprit), 1.0))
        while search.best().mass < 0.975:
            position = search.next()
            search.add(position, source.gauss(-1.5 * (position >= culprit), 1.0))
        right += search.best().first == culprit
        assert len(search.samples) < 60
    assert right >= 18


def test_commits_that_cannot_be_tested_widen_the_answer_and_are_never_asked_for() -> None:
    search = ChangeSearch(10, Bernoulli((0.01, 0.99)))
    for position in (4, 5, 6):
        search.skip(position)
    for position in (0, 10):
        search.add(position, float(position >= 5))
    while search.best().mass < 0.99:
        position = search.next()
        assert position not in (4, 5, 6)
        search.add(position, float(position >= 5))
    assert (search.best().first, search.best().last) == (4, 7)


def test_a_sampled_commit_that_breaks_later_is_forgotten() -> None:
    search = ChangeSearch(4, Bernoulli((0.1, 0.9)))
    for position, value in [(0, 0.0), (2, 1.0), (4, 1.0)]:
        search.add(position, value)
    search.skip(2)
    assert [(s.low, s.high) for s in search.segments()] == [(0, 4)]


def test_learnt_levels_go_back_to_the_references_and_given_ones_do_not() -> None:
    """Teeth for the rule that keeps a comparison honest: without references a search that learns gets stuck."""
    for model, asks in ((Gaussian(), True), (Gaussian((0.0, -1.0)), False)):
        source, search, ends = random.Random(3), ChangeSearch(64, model), 0
        for position in [0, 64] * 3:
            search.add(position, source.gauss(-1.0 * (position >= 20), 1.0))
        for _ in range(40):
            position = search.next()
            ends += position in (0, 64)
            search.add(position, source.gauss(-1.0 * (position >= 20), 1.0))
        assert (ends > 0) is asks
