"""Tasks that ask nearly the same thing, found across two sides.

Owns       the search for near-duplicates.
Promises   the same pairs in every process and for every order of the tasks; what is reported does overlap by the
           threshold, counted exactly; a pair at the threshold is missed in less than 1 of 1000 cases, one further
           above it practically never; few tasks are all compared, and then nothing is missed; a task that
           differs in a number, an operator or its target is another task.
Never      uses Python's `hash()`, a random state, or gives up in silence.

Alike means: equal numbers and operators in equal order, targets that do not contradict each other,
and prompts whose sets of character 5-grams overlap (intersection over union) by the threshold. What
at least half of the tasks have in common, a preamble or a template, is left out of the sets.

    texts --same numbers, same target--> joins --MinHash, bands in common--> candidates --exact overlap--> pairs

Read next: `minhash.py` for the candidates; `heldout.py`, which refuses what is found here.
"""

from __future__ import annotations

import hashlib
import heapq
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, product
from typing import NamedTuple

from surefoot.data.content import Content
from surefoot.data.minhash import shingles, similar_pairs
from surefoot.errors import ConfigError, TaskError

THRESHOLD = 0.8
"""Overlap from which two prompts count as nearly the same: one changed word in about twenty."""
RULES = 1
"""Number of the measure in this file: what was found under another number has to be looked for again."""
TEMPLATE_SHARE, TEMPLATE_TASKS, TEMPLATE_SAMPLE = 0.5, 20, 500
"""A 5-gram in half of the tasks is template. Decided on at most 500 tasks, and not on fewer than 20."""
ALL_PAIRS = 20_000
"""Up to so many pairs are compared in full; more go through MinHash first."""
MAX_COMPARISONS = 2_000_000
"""Pairs that are compared in full before the search says that the tasks are too alike: under a minute."""

_AROUND_SIGNS = re.compile(r" ?([^\w ]) ?")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_MARK = re.compile(r"\d+(?:[.,]\d+)*|(?<=\d)[-+*/^%×÷<>=]|[-+*/^%×÷<>=](?=\d)")
_PRIVATE = 0xF0000  # private-use characters stand for numbers, so that a number is one unit of a shingle


class NearPair(NamedTuple):
    """Two tasks that ask nearly the same: positions on either side, and their overlap."""

    left: int
    right: int
    overlap: float


def near_duplicates(
    left: Sequence[Content], right: Sequence[Content], threshold: float = THRESHOLD, limit: int | None = None,
    template: frozenset[str] | None = None,
) -> list[NearPair]:  # fmt: skip
    """Pairs across the two sides that are alike, in order; only `limit` of them where one is given.

    Args:
        template: what `template_of` said of all tasks, where these are only some of them; decided on these if left out.
    """
    if not 0 < threshold <= 1:
        raise ConfigError(
            f"near = {threshold}", "the overlap of two texts lies in (0, 1]", f"use for example near = {THRESHOLD}"
        )
    ours, theirs = [Text.of(content) for content in left], [Text.of(content) for content in right]
    if template is None:
        template = template_of(chain(ours, theirs))
    found: list[NearPair] = []

    @lru_cache(maxsize=1024)
    def grams(body: str) -> frozenset[str]:
        return shingles(body, template or frozenset())

    for place, (one, other) in enumerate(_candidates(ours, theirs, template, threshold), start=1):
        _refuse_endless(place)
        mine, yours = grams(ours[one].body), grams(theirs[other].body)
        shared = len(mine & yours)
        overlap = shared / (len(mine) + len(yours) - shared)
        if overlap >= threshold:
            found.append(NearPair(one, other, overlap))
            if len(found) == limit:
                break
    return sorted(found)


class Text(NamedTuple):
    """One task as the search sees it."""

    marks: tuple[str, ...]
    """Numbers and the operators beside them, in order."""
    target: tuple[str, ...]
    """The numbers of the targets, or the targets where they hold none."""
    body: str
    """The prompt with every number as one character."""

    @classmethod
    def of(cls, content: Content) -> Text:
        """What is compared of it."""
        text = _AROUND_SIGNS.sub(r"\1", " ".join(text for _, text in content.prompt))
        marks = tuple(map(_plain_number, _MARK.findall(text)))
        numbers = tuple(map(_plain_number, _NUMBER.findall(" ".join(content.targets))))
        places: dict[str, str] = {}  # equal numbers, equal characters; only equal sequences are ever compared

        def unit(match: re.Match[str]) -> str:
            return places.setdefault(_plain_number(match[0]), chr(_PRIVATE + len(places) % 0xFFF0))

        return cls(marks, numbers or content.targets, _NUMBER.sub(unit, text) if marks else text)


def _plain_number(text: str) -> str:
    """1,000 and 42.50 as 1000 and 42.5; anything else as it is."""
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    return text.rstrip("0").rstrip(".") if text.count(".") == 1 and "," not in text else text


def template_of(texts: Iterable[Text]) -> frozenset[str]:
    """What so many of these tasks have in common that it says nothing of any."""
    sample = Sample()
    for text in texts:
        sample.add(text)
    return sample.template()


class Sample:
    """The tasks on which a template is decided: those with the smallest hashes of their texts, whatever the order."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, str]] = []

    def add(self, text: Text) -> None:
        """One more task."""
        ranked = -int.from_bytes(hashlib.sha256(text.body.encode("utf-8", "surrogatepass")).digest(), "big"), text.body
        if len(self._kept) < TEMPLATE_SAMPLE:
            heapq.heappush(self._kept, ranked)
        else:
            heapq.heappushpop(self._kept, ranked)

    def template(self) -> frozenset[str]:
        """5-grams that at least half of the sample shares."""
        if len(self._kept) < TEMPLATE_TASKS:
            return frozenset()
        counts = Counter(chain.from_iterable(shingles(body) for _, body in self._kept))
        return frozenset(shingle for shingle, count in counts.items() if count >= TEMPLATE_SHARE * len(self._kept))


class Likely:
    """Asks of one task after another whether it may be like one of a few: most differ in a number or in the target."""

    def __init__(self, few: Iterable[Content]) -> None:
        texts = list(map(Text.of, few))
        self._marks = {text.marks for text in texts}
        self._aimless = {text.marks for text in texts if not text.target}
        self._aimed = {(text.marks, text.target) for text in texts if text.target}

    def __contains__(self, text: Text) -> bool:
        if not text.target:
            return text.marks in self._marks
        return text.marks in self._aimless or (text.marks, text.target) in self._aimed


_Key = tuple[tuple[str, ...], tuple[str, ...]]


def _joins(ours: Sequence[Text], theirs: Sequence[Text]) -> Iterator[tuple[dict[int, _Key], dict[int, _Key]]]:
    """Keys by position on either side; only tasks with equal keys may be alike. No pair is in two joins."""
    aimed, free = _sorted_out(ours), _sorted_out(theirs)
    yield (
        {at: (ours[at].marks, ours[at].target) for at in aimed[0]},
        {at: (theirs[at].marks, theirs[at].target) for at in free[0]},
    )
    # A task without a target contradicts nobody.
    yield {at: (ours[at].marks, ()) for at in aimed[0]}, {at: (theirs[at].marks, ()) for at in free[1]}
    yield {at: (ours[at].marks, ()) for at in aimed[1]}, {at: (text.marks, ()) for at, text in enumerate(theirs)}


def _sorted_out(texts: Sequence[Text]) -> tuple[list[int], list[int]]:
    """Positions of texts with a target, and of those without."""
    sides: tuple[list[int], list[int]] = ([], [])
    for at, text in enumerate(texts):
        sides[not text.target].append(at)
    return sides


def _candidates(
    ours: Sequence[Text], theirs: Sequence[Text], template: frozenset[str], threshold: float
) -> Iterator[tuple[int, int]]:
    """(left, right) positions worth comparing."""
    for left, right in _joins(ours, theirs):
        common = set(left.values()) & set(right.values())
        members: dict[_Key, tuple[list[int], list[int]]] = {key: ([], []) for key in common}
        for side, keys in enumerate((left, right)):
            for at, key in keys.items():
                if key in common:
                    members[key][side].append(at)
        for mine, yours in members.values():
            if len(mine) * len(yours) <= ALL_PAIRS:
                yield from product(mine, yours)
                continue
            bodies = [ours[at].body for at in mine], [theirs[at].body for at in yours]
            for one, other in similar_pairs(*bodies, threshold, template):
                yield mine[one], yours[other]


def _refuse_endless(compared: int) -> None:
    if compared > MAX_COMPARISONS:
        raise TaskError(
            f"more than {MAX_COMPARISONS:,} pairs of tasks look alike enough to be compared in full",
            "the tasks share a long template, so nearly every pair would have to be read",
            'pass content= with a view that leaves the template out, or near=None; in a config heldout_near = "allow"',
        )
