"""The cache: bounded, the oldest goes first, None is a value."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.data.lru import MISS, LRUCache

Step = tuple[str, int, Any]
STEPS = st.lists(st.tuples(st.sampled_from(["get", "put"]), st.integers(0, 6), st.sampled_from([None, 0, 1])))


class Slow:
    """The reference: a list of pairs, oldest first, searched from end to end."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.pairs = capacity, list[tuple[int, Any]]()

    def get(self, key: int) -> Any:
        for at, (known, value) in enumerate(self.pairs):
            if known == key:
                self.pairs.append(self.pairs.pop(at))
                return value
        return MISS

    def put(self, key: int, value: Any) -> None:
        self.pairs = [pair for pair in self.pairs if pair[0] != key] + [(key, value)]
        self.pairs = self.pairs[-self.capacity :]


def check_against_reference(make: Callable[[int], Any], steps: list[Step], capacity: int) -> None:
    cache, slow = make(capacity), Slow(capacity)
    for what, key, value in steps:
        if what == "put":
            cache.put(key, value)
            slow.put(key, value)
        else:
            assert cache.get(key) is slow.get(key) or cache.get(key) == slow.get(key)
        assert cache.items() == slow.pairs
        assert len(cache) <= capacity


@given(steps=STEPS, capacity=st.integers(1, 4))
def test_it_does_what_the_slow_reference_does(steps: list[Step], capacity: int) -> None:
    check_against_reference(LRUCache, steps, capacity)


class NeverRefreshed(LRUCache[int, Any]):
    """The planted bug: first in, first out."""

    def get(self, key: int) -> Any:
        return dict(self.items()).get(key, MISS)


def test_planted_bug_a_get_that_does_not_refresh_is_seen() -> None:
    steps: list[Step] = [("put", 1, 0), ("put", 2, 0), ("get", 1, 0), ("put", 3, 0)]
    with pytest.raises(AssertionError):
        check_against_reference(NeverRefreshed, steps, 2)


def test_the_fourth_of_three_pushes_out_the_first() -> None:
    cache: LRUCache[str, int] = LRUCache(3)
    for value, key in enumerate("abcd"):
        cache.put(key, value)
    assert "a" not in cache
    assert [key for key, _ in cache.items()] == ["b", "c", "d"]
    assert cache.evicted == 1


def test_a_stored_none_is_a_hit_and_a_missing_key_is_not() -> None:
    cache: LRUCache[str, None] = LRUCache(1)
    cache.put("a", None)
    assert cache.get("a") is None
    assert cache.get("b") is MISS
    assert (cache.hits, cache.misses) == (1, 1)


@pytest.mark.parametrize("capacity", [0, -1, True, 1.5, None])
def test_a_capacity_that_holds_nothing_is_refused_at_once(capacity: Any) -> None:
    with pytest.raises(ValueError, match="capacity"):
        LRUCache(capacity)


def test_many_threads_never_exceed_the_capacity_or_mix_up_values() -> None:
    cache: LRUCache[int, int] = LRUCache(8)
    wrong: list[tuple[int, Any]] = []

    def work(start: int) -> None:
        for key in range(start, start + 2000):
            cache.put(key % 20, key % 20)
            value = cache.get((key * 7) % 20)
            if value is not MISS and value != (key * 7) % 20:
                wrong.append((key, value))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(cache) <= 8
