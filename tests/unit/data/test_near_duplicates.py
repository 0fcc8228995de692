"""Near-duplicates: found whatever the order and the process, counted exactly, and no wolf for other numbers."""

from __future__ import annotations

import random

import pytest

from surefoot.data import near_duplicates
from surefoot.data.near_duplicates import Content, NearPair, rows_per_band, shingles, signatures, similar_pairs
from surefoot.errors import ConfigError, TaskError

WORDS = "river stone lantern garden winter copper silent marble orchard thunder velvet harbor meadow crystal".split()
BASE = "The old lantern by the river was lit every evening by a careful woman who lived alone in a small stone house."


def find(left: list[Content], right: list[Content], threshold: float = 0.8) -> list[NearPair]:
    return near_duplicates.near_duplicates(left, right, threshold)


def alike(one: str, other: str, targets: tuple[str | None, str | None] = (None, None)) -> bool:
    return bool(find([Content.of(one, targets[0])], [Content.of(other, targets[1])]))


def prose(n: int, seed: int, words: int = 40) -> list[str]:
    """Texts without numbers over a small vocabulary: much in common, little of it in a row."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=words)) for _ in range(n)]


# -- what is alike ------------------------------------------------------------

ALIKE = [
    (BASE, BASE.replace("small", "little")),
    (BASE, BASE + " Why?"),
    (BASE, BASE.replace(".", " !")),
    ("47+85=", "47 + 85 ="),
    ("He has 1,000 coins and 2.50 in cash left over", "He has 1000 coins and 2.5 in cash left over"),
]
NOT_ALIKE = [
    ("2+3", "2+4"),
    ("47+85=", "47-85="),
    ("47+85=", "85+47="),
    (f"{BASE} It had 12 windows.", f"{BASE} It had 13 windows."),
    (f"{BASE} Compute 7 * 9.", f"{BASE} Compute 7 / 9."),
    (BASE, "A completely different sentence about ships, storms and the price of bread in winter."),
    ("x", "y"),
    ("", "abc"),
]


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_a_small_change_is_seen(one: str, other: str) -> None:
    assert alike(one, other)
    assert alike(other, one)


@pytest.mark.parametrize(("one", "other"), NOT_ALIKE)
def test_another_number_operator_or_text_is_another_task(one: str, other: str) -> None:
    assert not alike(one, other)
    assert not alike(other, one)


def test_planted_shingles_without_the_number_rule_cry_wolf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: drop the numbers from what must agree, and two different tasks are called alike."""
    of = near_duplicates.ComparedText.of
    monkeypatch.setattr(near_duplicates.ComparedText, "of", lambda content: of(content)._replace(marks=()))
    assert alike(*NOT_ALIKE[3])


def test_targets_that_contradict_make_two_tasks_and_missing_ones_do_not() -> None:
    other = BASE.replace("small", "little")
    assert not alike(BASE, other, ("Vienna", "Canberra"))
    assert alike(BASE, other, ("Vienna", "VIENNA"))
    assert alike(BASE, other, ("42", "the answer is 42.0"))
    assert not alike(BASE, other, ("42", "43"))
    assert alike(BASE, other, ("Vienna", None))
    assert alike(BASE, other, (None, "Vienna"))


def test_the_overlap_is_counted_exactly_at_the_threshold() -> None:
    one, other = shingles("abcdefghij"), shingles("abcdefghik")
    exact = len(one & other) / len(one | other)
    assert exact == 5 / 7
    (pair,) = find([Content.of("abcdefghij")], [Content.of("abcdefghik")], exact)
    assert pair == (0, 0, exact)
    assert not find([Content.of("abcdefghij")], [Content.of("abcdefghik")], exact + 1e-9)


def test_a_preamble_that_all_share_does_not_make_tasks_alike() -> None:
    preamble = "You are a careful assistant who thinks before answering and never guesses. " * 5
    tasks = [Content.of(f"{preamble} Tell me about {one} and {other}.") for one in WORDS for other in WORDS[:3]]
    assert find(tasks[::2], tasks[1::2]) == []
    copy = Content.of(f"{preamble} Tell me about {WORDS[0]} and {WORDS[0]} !")
    assert [pair.left for pair in find([*tasks[2:], copy], [tasks[0]])] == [len(tasks) - 2]


def test_planted_comparison_with_the_preamble_cries_wolf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_duplicates, "template_of", lambda texts: frozenset())
    with pytest.raises(AssertionError):
        test_a_preamble_that_all_share_does_not_make_tasks_alike()


@pytest.mark.parametrize("threshold", [0.0, -0.5, 1.5, float("nan")])
def test_a_threshold_outside_its_range_is_refused(threshold: float) -> None:
    with pytest.raises(ConfigError, match="near"):
        find([Content.of("a")], [Content.of("b")], threshold)


def test_no_tasks_have_no_duplicates() -> None:
    assert find([], [Content.of("a")]) == find([Content.of("a")], []) == find([], []) == []


# -- many tasks ---------------------------------------------------------------


def planted(n: int) -> tuple[list[Content], list[Content], set[tuple[int, int]]]:
    """Two sides of prose with every tenth held-out text repeated on the left, one word changed."""
    left, right = prose(n, 1), prose(n // 4, 2)
    leaks = set()
    for place in range(0, len(right), 10):
        words = right[place].split()
        words[place % len(words)] = "zebra"
        left[3 * place] = " ".join(words)
        leaks.add((3 * place, place))
    return [Content.of(text) for text in left], [Content.of(text) for text in right], leaks


def test_every_planted_pair_is_found_among_many_and_nothing_else() -> None:
    left, right, leaks = planted(1200)
    assert len(left) * len(right) > near_duplicates.ALL_PAIRS, "too few: MinHash would not be asked"
    pairs = find(left, right)
    assert {(pair.left, pair.right) for pair in pairs} == leaks
    assert pairs == sorted(pairs)


def test_order_does_not_matter() -> None:
    left, right, leaks = planted(600)
    assert {(len(left) - 1 - a, len(right) - 1 - b) for a, b, _ in find(left[::-1], right[::-1])} == leaks


def test_the_fast_way_finds_what_comparing_all_pairs_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right, _ = planted(400)
    monkeypatch.setattr(near_duplicates, "ALL_PAIRS", 0)
    fast = find(left, right, 0.7)
    monkeypatch.setattr(near_duplicates, "ALL_PAIRS", 10**9)
    assert fast == find(left, right, 0.7)
    assert fast


def test_planted_blind_bands_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: with bands that must agree in all 64 values, the planted pairs are missed."""
    monkeypatch.setattr(near_duplicates, "rows_per_band", lambda threshold: 64)
    with pytest.raises(AssertionError):
        test_every_planted_pair_is_found_among_many_and_nothing_else()


def test_a_limit_ends_the_search_early() -> None:
    same = [Content.of(BASE) for _ in range(30)]
    assert len(near_duplicates.near_duplicates(same, same, limit=7)) == 7


def test_too_many_alike_tasks_are_refused_not_compared_for_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = [Content.of(text) for text in prose(50, 1)], [Content.of(text) for text in prose(50, 2)]
    monkeypatch.setattr(near_duplicates, "MAX_COMPARISONS", 2499)
    with pytest.raises(TaskError, match="more than 2,499 pairs"):
        find(left, right)
    monkeypatch.setattr(near_duplicates, "MAX_JOINED", 10)
    monkeypatch.setattr(near_duplicates, "ALL_PAIRS", 0)
    same = [Content.of(BASE) for _ in range(30)]
    with pytest.raises(TaskError, match="share parts of their texts"):
        find(same, same)


# -- MinHash ------------------------------------------------------------------


@pytest.mark.parametrize("edits", [2, 6, 20])
def test_equal_values_estimate_the_overlap_without_bias(edits: int) -> None:
    rng = random.Random(5)
    left = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=240)) for _ in range(400)]
    right = ["".join("#" if place in spots else mark for place, mark in enumerate(text))
             for text in left for spots in [rng.sample(range(240), edits)]]  # fmt: skip
    exact = [len(shingles(a) & shingles(b)) / len(shingles(a) | shingles(b)) for a, b in zip(left, right, strict=True)]
    estimate = (signatures(left) == signatures(right)).mean(1)
    assert abs(float((estimate - exact).mean())) < 4 * (0.25 / near_duplicates.VALUES / len(left)) ** 0.5


def test_signatures_are_frozen_and_do_not_depend_on_the_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written down once: another process, platform or order must give these."""
    texts = ["", "abc", "abcdefgh", "später ☃ \ud800", BASE]
    whole = signatures(texts)
    monkeypatch.setattr(near_duplicates, "_CHARACTERS_AT_ONCE", 12)
    assert (signatures(texts) == whole).all()
    for place, text in enumerate(texts):
        assert (signatures([text])[0] == whole[place]).all()
    assert whole[2][:4].tolist() == [47711681, 953982358, 814677664, 1953213579]


def test_what_the_signature_leaves_out_is_what_the_count_leaves_out() -> None:
    template = shingles("a preamble that all of them share: ")
    with_preamble = signatures(["a preamble that all of them share: tell me of rivers"], template)
    own = shingles("a preamble that all of them share: tell me of rivers", template)
    same = signatures(sorted(own))  # the minimum over single 5-grams is the minimum over the set
    assert (with_preamble[0] == same.min(0)).all()
    only = signatures(["all of them share"], template)
    assert (only[0] == signatures(["all of them share"])[0]).all()


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.7, 0.8, 0.9, 0.95])
def test_bands_miss_less_than_one_in_a_thousand_at_the_threshold(threshold: float) -> None:
    rows = rows_per_band(threshold)
    assert (1 - threshold**rows) ** (near_duplicates.VALUES // rows) < 1e-3
    assert rows_per_band(1.0) == near_duplicates.VALUES


def test_joined_pairs_come_in_bounded_pieces_and_none_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_duplicates, "_PAIRS_AT_ONCE", 7)
    monkeypatch.setattr(near_duplicates, "_CHARACTERS_AT_ONCE", 150)
    left, right = [BASE, "other text here", BASE, BASE] * 3, ["nothing alike at all", BASE, BASE]
    expected = [(one, other) for one in range(12) if left[one] == BASE for other in (1, 2)]
    assert list(similar_pairs(left, right, 0.8)) == expected
