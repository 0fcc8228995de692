"""Seeds are a pure function of names."""

from __future__ import annotations

from itertools import product

from surefoot.runtime.requests import derive_seed


def test_names_have_different_seeds_and_the_same_name_the_same() -> None:
    names = list(product((0, 1), ("train", "eval"), (1, 2, 11), ("a", "b"), range(4)))
    seeds = [derive_seed(*name) for name in names]
    assert len(set(seeds)) == len(names)
    assert seeds == [derive_seed(*name) for name in names]


def test_where_one_name_ends_and_the_next_begins_matters() -> None:
    assert derive_seed(0, "train", 1, "1/x", 2) != derive_seed(0, "train", 11, "/x", 2)
    assert derive_seed(0, "ab", "c") != derive_seed(0, "a", "bc")


def test_the_value_is_the_same_on_every_machine() -> None:
    """Written down: a changed seed changes every run that was ever recorded."""
    assert derive_seed(0, "train", 1, "sums/1+1", 0) == 3197581344000588718
    assert 0 <= min(derive_seed(s) for s in range(100)) <= max(derive_seed(s) for s in range(100)) < 2**63
