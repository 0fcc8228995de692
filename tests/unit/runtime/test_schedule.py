"""Cadences by hand, every refusal with its numbers, and a simulated clock that tries to make groups too old."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.config import Config
from surefoot.config.schedule import Schedule, compute_schedule, schedule_of
from surefoot.errors import ConfigError
from surefoot.runtime.sampler import allowance, owed


def schedule(**sizes: Any) -> Schedule:
    usual: dict[str, Any] = dict(
        tasks_per_sync=8, tasks_per_reference_sync=None, tasks_per_step=8, tasks_per_microbatch=8, max_staleness=0
    )
    return compute_schedule(**usual | sizes)


def configured(**keys: Any) -> Config:
    return Config(model="pebble", tasks="builtin:sums", importance_sampling_correction=True, **keys)


def lead(config: Config) -> int:
    """Groups that may be under way at any time of the run: what is allowed when engines are furthest behind."""
    return allowance(config, schedule_of(config).required_staleness)


# -- cadences -------------------------------------------------------------------------


def test_a_sync_after_every_step_needs_no_staleness() -> None:
    assert schedule() == Schedule(accumulation_steps=1, sync_every=1, reference_every=None, required_staleness=0)


def test_every_cadence_is_the_quotient_of_its_sizes() -> None:
    found = schedule(
        tasks_per_sync=32, tasks_per_reference_sync=80, tasks_per_step=8, tasks_per_microbatch=2, max_staleness=3
    )
    assert found == Schedule(accumulation_steps=4, sync_every=4, reference_every=10, required_staleness=3)


def test_a_cadence_that_cannot_keep_the_bound_is_refused_with_all_numbers() -> None:
    with pytest.raises(ConfigError) as caught:
        schedule(tasks_per_sync=32, tasks_per_microbatch=4, tasks_per_reference_sync=64)
    said = str(caught.value)
    for part in (
        "every 4 steps", "at least 3", "it is 0", "tasks_per_sync = 32", "tasks_per_step = 8",
        "tasks_per_microbatch = 4", "tasks_per_reference_sync = 64", "set max_staleness = 3",
    ):  # fmt: skip
        assert part in said
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("batches", [1, 2, 3, 7])
@pytest.mark.parametrize("passes", [1, 2, 5])
def test_the_bound_is_one_sync_less_one_batch_and_not_a_version_more(batches: int, passes: int) -> None:
    needed = (batches - 1) * passes
    sizes = dict(tasks_per_sync=8 * batches, num_iterations=passes)
    found = schedule(**sizes, max_staleness=needed)
    assert (found.sync_every, found.required_staleness) == (batches * passes, needed)
    if needed:
        with pytest.raises(ConfigError, match=f"at least {needed}, and it is {needed - 1}"):
            schedule(**sizes, max_staleness=needed - 1)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (dict(tasks_per_step=8, tasks_per_microbatch=3), "tasks_per_step = 8 is not a multiple of tasks_per_microbatch = 3"),
        (dict(tasks_per_step=4, tasks_per_microbatch=8), "tasks_per_step = 4 is not a multiple of tasks_per_microbatch = 8"),
        (dict(tasks_per_sync=12, max_staleness=9), "tasks_per_sync = 12 is not a multiple of tasks_per_step = 8: 4 would"),
        (dict(tasks_per_sync=4), "tasks_per_sync = 4 is not a multiple of tasks_per_step = 8"),
        (dict(tasks_per_reference_sync=9), "tasks_per_reference_sync = 9 is not a multiple of tasks_per_step = 8"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_divide_are_refused_with_both_and_never_floored(sizes: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        schedule(**sizes)


@pytest.mark.parametrize("bad", [0, -1, -8, 2.0, True, "8", None])
@pytest.mark.parametrize(
    "name", ["tasks_per_sync", "tasks_per_step", "tasks_per_microbatch", "num_iterations", "tasks_per_reference_sync"]
)
def test_sizes_that_are_no_positive_whole_numbers_are_refused(name: str, bad: Any) -> None:
    if name == "tasks_per_reference_sync" and bad is None:
        assert schedule(**{name: bad}).reference_every is None
        return
    with pytest.raises(ConfigError, match=f"{name} = "):
        schedule(**{name: bad})


@pytest.mark.parametrize("bad", [-1, 1.0, False, None])
def test_a_staleness_that_is_no_number_of_versions_is_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match="max_staleness = "):
        schedule(max_staleness=bad)


# -- from a config -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (dict(), (None, 1, None, 0)),
        (dict(num_iterations=4), (None, 4, None, 0)),
        (dict(weight_sync_steps=3, max_staleness=2), (None, 3, None, 2)),
        (dict(weight_sync_steps=8, num_iterations=4, max_staleness=4), (None, 8, None, 4)),
        (dict(weight_sync_steps=4, num_iterations=4), (None, 4, None, 0)),
        (dict(tasks_per_step=4, num_generations=8, microbatch_size=4), (8, 1, None, 0)),
        (dict(reference_sync_steps=7, num_iterations=2, beta=0.1), (None, 2, 7, 0)),
    ],
)
def test_the_schedule_of_a_config(keys: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert schedule_of(configured(**keys)) == Schedule(*expected)


def test_a_sync_between_two_passes_over_a_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="weight_sync_steps = 6 is not a multiple of num_iterations = 4"):
        schedule_of(configured(weight_sync_steps=6, num_iterations=4, max_staleness=9))
    with pytest.raises(ConfigError, match="weight_sync_steps = 2 is not a multiple of num_iterations = 4"):
        schedule_of(configured(weight_sync_steps=2, num_iterations=4, max_staleness=9))


def test_too_little_staleness_is_refused_by_the_names_of_the_keys() -> None:
    with pytest.raises(ConfigError) as caught:
        schedule_of(configured(weight_sync_steps=8, num_iterations=2, max_staleness=5, tasks_per_step=3))
    said = str(caught.value)
    for part in (
        "weight_sync_steps = 8",
        "max_staleness = 5",
        "num_iterations = 2",
        "tasks_per_step = 3",
        "at least 6",
    ):
        assert part in said


# -- how far ahead -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (dict(tasks_per_step=4), 4),
        (dict(tasks_per_step=4, max_staleness=1), 8),
        (dict(tasks_per_step=4, max_staleness=3), 16),
        (dict(tasks_per_step=4, max_staleness=3, num_iterations=2), 8),
        (dict(tasks_per_step=4, max_staleness=1, num_iterations=2), 4),
        (dict(tasks_per_step=4, max_staleness=3, weight_sync_steps=4), 4),
        (dict(tasks_per_step=4, max_staleness=5, weight_sync_steps=4), 12),
        (dict(tasks_per_step=4, max_staleness=9, weight_sync_steps=4, num_iterations=2), 4 * (1 + 3)),
    ],
)
def test_the_lead_by_hand(keys: dict[str, Any], expected: int) -> None:
    assert lead(configured(**keys)) == expected


def test_right_after_a_sync_more_may_be_asked_for_than_just_before_the_next() -> None:
    config = configured(tasks_per_step=4, max_staleness=3, weight_sync_steps=4)
    assert [allowance(config, behind) for behind in range(5)] == [16, 12, 8, 4, 0]
    with pytest.raises(ConfigError, match="behind = -1"):
        allowance(config, -1)


def test_what_is_owed_is_what_later_batches_have_no_seats_for() -> None:
    config = configured(tasks_per_step=2, max_staleness=2)
    assert owed([], config) == []
    assert owed([0, 0, 0, 0], config) == [], "four seats in later batches"
    assert owed([0] * 5, config) == [(1, 0)]
    assert owed([2, 0], config) == [(1, 2)], "the old one has no later batch"
    assert owed([1, 1, 1, 2], config) == [(1, 2), (2, 1)], "one of age 2, and with it two of age 1 or more"
    with pytest.raises(ConfigError, match="the age of a group = -1"):
        owed([0, -1], config)


# -- whatever the timing: a simulated clock -------------------------------------------------


@dataclass
class Clockwork:
    """A learner and as many engines as there are groups under way; nothing here knows how the limits were derived."""

    config: Config
    playing: Iterator[int]
    learning: Iterator[int]
    publishing: Iterator[int]
    limit: Callable[[int], int]
    """Groups that may be under way, by how far the engines are behind."""
    overtaking: bool
    by_debt: bool = True
    now: int = 0
    version: int = 0
    published: int = 0
    free_at: int = 0
    hand: int = 0
    out: list[tuple[int, int]] = field(default_factory=list)
    """(version, when it will be finished), in the order of asking."""
    trained: list[int] = field(default_factory=list)
    """Age of every trained group at its batch's begin."""
    overlapped: int = 0
    """Groups that were under way beside a batch in hand, over all batches."""

    def ask(self) -> None:
        while len(self.out) + self.hand < self.limit(self.version - self.published):
            self.out.append((self.published, self.now + next(self.playing)))

    def batch(self) -> list[tuple[int, int]]:
        size = self.config.tasks_per_step
        if not self.overtaking:  # strictly in the order of asking: wait for the slowest of them
            first = self.out[:size]
            return first if len(first) == size and all(at <= self.now for _, at in first) else []
        done = [group for group in self.out if group[1] <= self.now]
        ages = [self.version - version for version, _ in done]
        debts = owed([self.version - version for version, _ in self.out], self.config) if self.by_debt else []
        paid = all(sum(age >= old for age in ages) >= n for n, old in debts)
        return sorted(done)[:size] if len(done) >= size and paid else []

    def train(self, batch: list[tuple[int, int]]) -> None:
        self.trained += [self.version - version for version, _ in batch]
        for group in batch:
            self.out.remove(group)
        self.hand = self.config.tasks_per_step
        self.free_at = self.now + next(self.learning)

    def finish(self) -> None:
        """The last pass is over; engines sample from the old weights until the publication is over too."""
        self.overlapped += len(self.out)
        following = self.version + self.config.num_iterations
        due = following % max(self.config.weight_sync_steps, self.config.num_iterations) == 0
        self.now = self.free_at
        if due:
            self.now += next(self.publishing)
            self.published = following
        self.version, self.hand = following, 0

    def run(self, batches: int) -> Clockwork:
        size = self.config.tasks_per_step
        while len(self.trained) < batches * size:
            self.ask()
            if not self.hand and (batch := self.batch()):
                self.train(batch)
                continue
            ahead = [at for _, at in self.out if at > self.now] + ([self.free_at] if self.hand else [])
            assert ahead, f"deadlock: {len(self.out)} groups out, none of them will do"
            self.now = max(self.now, min(ahead))
            if self.hand and self.free_at <= self.now:
                self.finish()
        return self


@st.composite
def stories(draw: st.DrawFn) -> dict[str, Any]:
    passes, batches_per_sync = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    spare = draw(st.integers(0, 4))
    config = configured(
        tasks_per_step=draw(st.integers(1, 4)), num_iterations=passes, weight_sync_steps=passes * batches_per_sync,
        max_staleness=(batches_per_sync - 1) * passes + spare,
    )  # fmt: skip
    long_tailed = st.lists(st.sampled_from([0, 1, 1, 2, 3, 40, 1000]), min_size=1, max_size=25)
    short = st.lists(st.sampled_from([0, 1, 7, 100]), min_size=1, max_size=4)
    return dict(
        config=config, playing=cycle(draw(long_tailed)), learning=cycle(draw(short)), publishing=cycle(draw(short)),
        overtaking=draw(st.booleans()),
    )  # fmt: skip


unhurried = settings(max_examples=150, deadline=None, derandomize=True, database=None)


@given(story=stories(), exact=st.booleans())
@unhurried
def test_with_this_lead_no_group_is_too_old_when_trained_whatever_the_timing(
    story: dict[str, Any], exact: bool
) -> None:
    config = story["config"]
    steady = lead(config)
    work = Clockwork(**story, limit=(lambda behind: allowance(config, behind)) if exact else (lambda _: steady)).run(12)
    assert max(work.trained) <= config.max_staleness
    if config.max_staleness < config.num_iterations:
        assert work.overlapped == 0, "what is asked for while a batch is in hand could never be used"


def ages(limit: Callable[[int], int], *, overtaking: bool = False, by_debt: bool = True, **keys: Any) -> list[int]:
    """Twenty batches of one task; every fifth group is slow, and so is the learner."""
    work = Clockwork(
        configured(**keys), cycle([1, 1, 1, 1, 30]), cycle([5]), cycle([1]), limit, overtaking=overtaking,
        by_debt=by_debt,
    )  # fmt: skip
    return work.run(20).trained


CASES = [
    dict(tasks_per_step=2),
    dict(tasks_per_step=2, max_staleness=1),
    dict(tasks_per_step=3, max_staleness=4, num_iterations=2),
    dict(tasks_per_step=1, max_staleness=5, weight_sync_steps=4),
]


@pytest.mark.parametrize("keys", CASES)
def test_one_group_more_than_the_lead_and_some_are_too_old(keys: dict[str, Any]) -> None:
    config = configured(**keys)
    assert max(ages(lambda _: lead(config), **keys)) <= config.max_staleness
    assert max(ages(lambda _: lead(config) + 1, **keys)) > config.max_staleness


@pytest.mark.parametrize("keys", CASES[1:])
def test_overtaking_without_looking_at_what_is_owed_lets_groups_age(keys: dict[str, Any]) -> None:
    config = configured(**keys)
    assert max(ages(lambda _: lead(config), overtaking=True, **keys)) <= config.max_staleness
    assert max(ages(lambda _: lead(config), overtaking=True, by_debt=False, **keys)) > config.max_staleness


def test_with_staleness_to_spare_sampling_goes_on_while_the_learner_learns() -> None:
    def beside_a_batch(**keys: Any) -> int:
        config = configured(tasks_per_step=2, **keys)
        work = Clockwork(config, cycle([3]), cycle([5]), cycle([0]), lambda _: lead(config), overtaking=False).run(10)
        return work.overlapped

    assert beside_a_batch(max_staleness=0) == 0
    assert beside_a_batch(max_staleness=1) >= 9 * 2
