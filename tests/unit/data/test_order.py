"""Orders that nobody stores: permutations for every size, exact epochs, resumable anywhere in constant time."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import pairwise, permutations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.data import order
from surefoot.data.order import CountedRandom, IndexStream, Permutation
from surefoot.errors import ConfigError, StateError, TaskError

SEEDS = st.integers(0, 2**63)


# -- one permutation ---------------------------------------------------------------------


@pytest.fixture
def only_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small orders are computed like large ones."""
    monkeypatch.setattr(order, "SMALL", 0)


@pytest.mark.usefixtures("only_rounds")
def test_rounds_of_every_small_size_are_permutations() -> None:
    for n in range(1, 201):
        assert sorted(map(Permutation(n, 7, 1), range(n))) == list(range(n))


def test_sorted_orders_of_every_small_size_are_permutations() -> None:
    for n in [*range(1, 60), order.SMALL - 1, order.SMALL, order.SMALL + 1]:
        assert sorted(map(Permutation(n, 7, 1), range(n))) == list(range(n))


@settings(max_examples=15, deadline=None)
@given(n=st.integers(order.SMALL + 1, 6000), seed=SEEDS, epoch=st.integers(0, 9))
def test_larger_sizes_are_permutations_for_every_key(n: int, seed: int, epoch: int) -> None:
    assert len(set(map(Permutation(n, seed, epoch), range(n)))) == n


@pytest.mark.usefixtures("only_rounds")
def test_planted_bug_without_walking_the_cycle_positions_fall_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Permutation, "__call__", lambda self, position: self._rounds(position))
    assert any(sorted(map(Permutation(n, 7, 1), range(n))) != list(range(n)) for n in range(1, 50))


@pytest.mark.usefixtures("only_rounds")
def test_planted_bug_without_walking_but_with_a_remainder_positions_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Permutation, "__call__", lambda self, position: self._rounds(position) % self.n)
    assert any(len(set(map(Permutation(n, 7, 1), range(n)))) < n for n in range(1, 50))


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_orders_of_a_few_are_equally_likely(n: int) -> None:
    draws = 3000
    counts = Counter(tuple(map(Permutation(n, seed, 0), range(n))) for seed in range(draws))
    orders = list(permutations(range(n)))
    expected = draws / len(orders)
    chi = sum((counts[one] - expected) ** 2 / expected for one in orders)
    assert chi < {2: 10.8, 3: 20.5, 4: 49.7, 5: 173.6}[n], "beyond the 0.1 % point"


@pytest.mark.usefixtures("only_rounds")
def test_planted_bug_rounds_over_a_few_do_not_reach_every_order_equally() -> None:
    with pytest.raises(AssertionError):
        test_all_orders_of_a_few_are_equally_likely(5)


def test_neighbours_are_torn_apart_and_every_place_is_as_likely() -> None:
    """A tenth of the file is not recognisable in a tenth of the order."""
    n = 10_000
    mapped = list(map(Permutation(n, 3, 0), range(n)))
    tenths = [Counter(value * 10 // n for value in mapped[start : start + 1000]) for start in range(0, n, 1000)]
    chi = sum((tenth[part] - 100) ** 2 / 100 for tenth in tenths for part in range(10))
    assert chi < 127.3, "81 degrees of freedom, 0.1 % point"
    assert sum(abs(a - b) == 1 for a, b in pairwise(mapped)) < 12


def test_a_permutation_without_rounds_is_caught_by_the_same_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "ROUNDS", 0)
    with pytest.raises(AssertionError):
        test_neighbours_are_torn_apart_and_every_place_is_as_likely()


def test_the_order_is_the_same_on_every_machine() -> None:
    """Fixed numbers: a run that is resumed elsewhere, or by a later version, must see them again."""
    assert list(map(Permutation(10, 0, 0), range(10))) == [9, 5, 0, 8, 1, 7, 3, 4, 2, 6]
    assert [Permutation(10**6, 0, e)(123) for e in range(3)] == [398179, 108174, 857106]


def test_a_billion_costs_no_more_than_a_few() -> None:
    huge = Permutation(10**15, 0, 0)
    assert len({huge(position) for position in range(100)}) == 100


def test_positions_outside_are_refused() -> None:
    with pytest.raises(IndexError):
        Permutation(3, 0, 0)(3)
    with pytest.raises(ConfigError):
        Permutation(0, 0, 0)


# -- the stream of positions ---------------------------------------------------------------


@given(size=st.integers(1, 12), takes=st.lists(st.integers(1, 12), max_size=30), seed=st.integers(0, 5))
def test_nothing_twice_in_a_take_and_everything_once_per_epoch(size: int, takes: list[int], seed: int) -> None:
    stream = IndexStream(size, seed)
    dealt: list[int] = []
    for n in takes:
        taken = stream.take(min(n, size))
        assert len(set(taken)) == len(taken)
        dealt += taken
    for start in range(0, len(dealt) - size + 1, size):
        assert len(set(dealt[start : start + size])) == size
    assert stream.epoch == max(0, (len(dealt) - 1) // size)


def test_planted_bug_epochs_joined_end_to_end_repeat_within_a_take(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = IndexStream._arrange

    def forgetful(self: IndexStream) -> None:
        self._held, self._needed = (), 0
        plain(self)

    monkeypatch.setattr(IndexStream, "_arrange", forgetful)
    stream = IndexStream(5, 0)
    assert any(len(set(stream.take(3))) < 3 for _ in range(60))


@given(size=st.integers(1, 40), before=st.integers(0, 15), n=st.integers(1, 7))
def test_resuming_anywhere_gives_the_same_continuation(size: int, before: int, n: int) -> None:
    n = min(n, size)
    whole, saved = IndexStream(size, 3, "x"), IndexStream(size, 3, "x")
    for _ in range(before):
        whole.take(n)
        saved.take(n)
    resumed = IndexStream(size, 3, "x")
    resumed.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    assert resumed.state_dict() == whole.state_dict()
    assert [resumed.take(n) for _ in range(9)] == [whole.take(n) for _ in range(9)]


def test_planted_bug_a_state_without_what_was_held_goes_on_differently() -> None:
    def goes_on(before: int) -> list[list[int]]:
        whole = IndexStream(7, 1)
        return [whole.take(5) for _ in range(before + 3)][before:]

    def resumed(before: int, **forgotten: Any) -> list[list[int]]:
        stream, fresh = IndexStream(7, 1), IndexStream(7, 1)
        for _ in range(before):
            stream.take(5)
        fresh.load_state_dict(stream.state_dict() | forgotten)
        return [fresh.take(5) for _ in range(3)]

    assert all(resumed(before) == goes_on(before) for before in range(20))
    assert any(resumed(before, held=[], needed=0) != goes_on(before) for before in range(20))


def test_the_state_of_a_billion_tasks_is_a_few_hundred_bytes() -> None:
    stream = IndexStream(10**9, 0, "0" * 64)
    stream.take(8)
    assert len(json.dumps(stream.state_dict())) < 400


def test_resuming_near_the_end_of_an_epoch_computes_no_more_than_at_its_beginning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    plain = Permutation.__call__
    monkeypatch.setattr(Permutation, "__call__", lambda self, at: asked.append(at) or plain(self, at))  # type: ignore[func-returns-value]
    stream = IndexStream(10**6, 0)
    stream.load_state_dict(stream.state_dict() | {"position": 900_000})
    stream.take(8)
    assert asked == list(range(900_000, 900_008)), "one seek, not 900,000 skipped tasks"


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 9}, {"tasks": "other"}, {"size": 8}, {"position": 99}, {"position": -1}, {"position": "3"},
        {"epoch": None}, {"held": [99]}, {"held": [1, 1]}, {"held": "12"}, {"held": [True]}, {"needed": 99},
        {"surprise": 1}, {"epoch": 1.0},
    ],
    ids=str,
)  # fmt: skip
def test_a_foreign_state_is_refused_and_changes_nothing(change: dict[str, Any]) -> None:
    stream = IndexStream(7, 3, "mine")
    stream.take(5)
    before = stream.state_dict()
    with pytest.raises(StateError, match="does not fit"):
        stream.load_state_dict(before | change)
    assert stream.state_dict() == before


def test_a_take_of_nothing_or_of_too_much_is_refused_without_dealing() -> None:
    stream = IndexStream(3, 0)
    with pytest.raises(TaskError, match="4 different tasks were asked for and there are 3"):
        stream.take(4)
    with pytest.raises(ConfigError, match="take"):
        stream.take(0)
    assert stream.position == 0


def test_what_is_left_of_an_epoch_never_crosses_its_border() -> None:
    stream = IndexStream(5, 0)
    assert sorted(stream.rest(3) + stream.rest(3)) == [0, 1, 2, 3, 4]
    assert stream.rest(3) == []
    assert stream.epoch == 0


@given(size=st.integers(2, 12), held=st.sets(st.integers(0, 11), max_size=6), needed=st.integers(0, 6))
def test_what_somebody_holds_is_not_among_the_first_of_a_new_epoch(size: int, held: set[int], needed: int) -> None:
    there = sorted(value for value in held if value < size)
    stream = IndexStream(size, 1)
    if len(there) + needed > size:
        with pytest.raises(TaskError, match="beside"):
            stream.next_epoch(there, needed)
        return
    stream.next_epoch(there, needed)
    dealt = stream.rest(size)
    assert not set(dealt[:needed]) & set(there)
    assert sorted(dealt) == list(range(size))


# -- the random stream -----------------------------------------------------------------------


def test_a_counted_stream_is_uniform_and_goes_on_from_its_count() -> None:
    stream = CountedRandom(5, "x")
    values = [stream.uniform() for _ in range(5000)]
    assert all(0 <= value < 1 for value in values)
    tenths = Counter(int(value * 10) for value in values)
    assert sum((tenths[part] - 500) ** 2 / 500 for part in range(10)) < 27.9, "9 degrees of freedom, 0.1 % point"
    again = CountedRandom(5, "x", asked=4999)
    assert again.uniform() == values[-1]


def test_streams_of_other_names_or_seeds_differ_and_nobody_touches_the_global_one() -> None:
    random.seed(1)
    state = random.getstate()
    assert len({CountedRandom(seed, name).uniform() for seed in (0, 1) for name in "ab"}) == 4
    assert random.getstate() == state
