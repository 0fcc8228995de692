"""Tasks that ask nearly the same thing: few pairs to read out of billions, found by MinHash, then counted.

Owns       the 5-grams of a text, their signatures, bands, and the join of two sides.
Promises   the same candidates in every process; a pair whose overlap is the threshold is missed in less than
           1 of 1000 cases, one further above it practically never.

    5-grams --64 smallest hash values--> signatures --equal bands--> pairs --enough equal values--> candidates
"""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain, product
from typing import TYPE_CHECKING, Any, NamedTuple

from surefoot.data.tasks import Content
from surefoot.errors import ConfigError, TaskError
from surefoot.system.files import sha256_bytes, sha256_number

if TYPE_CHECKING:
    import numpy as np


SHINGLE = 5
VALUES = 64
"""Hash values per signature."""
MISSED = 1e-3
"""Chance that a pair at the threshold shares no band."""
MAX_JOINED = 300_000_000
"""Pairs of equal bands before the search says that the tasks are too alike: about half a minute."""
_CHARACTERS_AT_ONCE, _PAIRS_AT_ONCE = 1 << 19, 1 << 20


def shingles(body: str, template: frozenset[str] = frozenset()) -> frozenset[str]:
    """Character 5-grams outside the template; all of them where nothing else is left."""
    whole = frozenset(body[at : at + SHINGLE] for at in range(max(1, len(body) - SHINGLE + 1)))
    return whole - template or whole


def similar_pairs(
    left: Sequence[str], right: Sequence[str], threshold: float, template: frozenset[str] = frozenset()
) -> Iterator[tuple[int, int]]:
    """(left, right) positions whose `shingles` probably overlap by `threshold`, each pair once, in order."""
    import numpy as np

    ours, theirs = signatures(left, template), signatures(right, template)
    rows = rows_per_band(threshold)
    found = [np.empty((0, 2), np.int64)]
    joined = 0
    for start in range(0, VALUES - rows + 1, rows):
        band = slice(start, start + rows)
        for one, other in _join(_keys(ours[:, band]), _keys(theirs[:, band])):
            joined += len(one)
            _refuse_endless_join(joined)
            equal = (ours[one] == theirs[other]).sum(1)
            close = equal >= _least_equal(threshold)
            found.append(np.stack([one[close], other[close]], axis=1))
    for one, other in np.unique(np.concatenate(found), axis=0).tolist():
        yield one, other


def rows_per_band(threshold: float) -> int:
    """The longest band with which a pair at the threshold is missed in less than one of 1000 cases."""
    fitting = [r for r in range(1, VALUES + 1) if (1 - threshold**r) ** (VALUES // r) < MISSED]
    return max(fitting, default=1)


def _least_equal(threshold: float) -> float:
    """Equal values that a pair at the threshold falls short of in less than one of 10,000 cases (4 sd)."""
    return VALUES * threshold - 4 * math.sqrt(VALUES * threshold * (1 - threshold))


def signatures(bodies: Sequence[str], template: Iterable[str] = ()) -> np.ndarray[Any, Any]:
    """(n, VALUES) uint32: for each of 64 fixed hash functions the smallest value among a text's 5-grams."""
    import numpy as np

    known = _hashes("".join(_padded(gram) for gram in template))[::SHINGLE]
    made = np.empty((len(bodies), VALUES), np.uint32)
    for start, some in _pieces(bodies):
        values, starts = _grams(some, np.unique(known))
        for place, (factor, offset) in enumerate(_functions()):
            mixed = values * np.uint32(factor)  # modulo 2^32, as all arithmetic here
            mixed += np.uint32(offset)
            made[start : start + len(some), place] = np.minimum.reduceat(mixed, starts)
    return made


def _pieces(bodies: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """(first position, texts): runs of texts that are short enough together to be held as arrays."""
    some: list[str] = []
    length = 0
    for place, body in enumerate(bodies):
        if some and length + len(body) > _CHARACTERS_AT_ONCE:
            yield place - len(some), some
            some, length = [], 0
        some.append(_padded(body))
        length += len(some[-1])
    if some:
        yield len(bodies) - len(some), some


def _grams(bodies: Sequence[str], template: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    """Hashes of the 5-grams of all bodies in a row, and where each body's begin; the rule of `shingles`."""
    import numpy as np

    counts = np.array([len(body) - SHINGLE + 1 for body in bodies])
    inside = np.ones(sum(map(len, bodies)), bool)
    ends = np.cumsum(counts + SHINGLE - 1)
    for back in range(1, SHINGLE):
        inside[ends - back] = False  # a window that begins here would reach into the next body
    values = _hashes("".join(bodies))[inside[: len(inside) - SHINGLE + 1]]
    kept = ~np.isin(values, template)
    starts = np.cumsum(counts) - counts
    kept |= np.repeat(~np.logical_or.reduceat(kept, starts), counts)  # nothing but template: keep it all
    counts = np.add.reduceat(kept.astype(np.int64), starts)
    return values[kept], np.cumsum(counts) - counts


def _hashes(text: str) -> np.ndarray[Any, Any]:
    """(len - 4,) uint32: one well-mixed number for every window of five characters."""
    import numpy as np

    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
    windows = max(0, len(codes) - SHINGLE + 1)
    value = np.zeros(windows, np.uint64)
    for place in range(SHINGLE):
        value = (value ^ codes[place : place + windows]) * np.uint64(0x9E3779B97F4A7C15)
        value ^= value >> np.uint64(29)
    return (value >> np.uint64(16)).astype(np.uint32)


def _padded(body: str) -> str:
    return body.ljust(SHINGLE, "\0")


def _functions() -> Iterator[tuple[int, int]]:
    """64 pairs (odd factor, offset), the same everywhere."""
    for place in range(VALUES):
        digest = sha256_bytes(f"surefoot minhash {place}")
        yield int.from_bytes(digest[:4], "big") | 1, int.from_bytes(digest[4:8], "big")


def _keys(band: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """(n,) one number per band, equal for equal bands."""
    import numpy as np

    key = np.zeros(len(band), np.uint64)
    for column in band.T:
        key = (key ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        key ^= key >> np.uint64(29)
    return key


def _join(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """(left, right) positions with equal keys, as arrays of bounded length."""
    import numpy as np

    order = np.argsort(theirs, kind="stable")
    ranked = theirs[order]
    low, high = np.searchsorted(ranked, ours, "left"), np.searchsorted(ranked, ours, "right")
    ends = np.cumsum(high - low)
    total = int(ends[-1]) if len(ends) else 0
    for start in range(0, total, _PAIRS_AT_ONCE):
        pairs = np.arange(start, min(start + _PAIRS_AT_ONCE, total))
        one = np.searchsorted(ends, pairs, "right")
        yield one, order[high[one] - (ends[one] - pairs)]


def _refuse_endless_join(joined: int) -> None:
    if joined > MAX_JOINED:
        raise TaskError(
            f"more than {MAX_JOINED:,} pairs of tasks share parts of their texts",
            "the tasks share a long template, so nearly every pair would have to be read",
            'pass content= with a view that leaves the template out, or near=None; in a config heldout_near = "allow"',
        )


# -- Tasks that ask nearly the same thing, found across two sides ---------------------------------
# Owns       the search for near-duplicates.
# Promises   the same pairs in every process and for every order of the tasks; what is reported does overlap by the
# threshold, counted exactly; a pair at the threshold is missed in less than 1 of 1000 cases, one further
# above it practically never; few tasks are all compared, and then nothing is missed; a task that
# differs in a number, an operator or its target is another task.
# Never      uses Python's `hash()`, a random state, or gives up in silence.
#
# Alike means: equal numbers and operators in equal order, targets that do not contradict each other,
# and prompts whose sets of character 5-grams overlap (intersection over union) by the threshold. What
# at least half of the tasks have in common, a preamble or a template, is left out of the sets.
#
# texts --same numbers, same target--> joins --MinHash, bands in common--> candidates --exact overlap--> pairs


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
    ours, theirs = [ComparedText.of(content) for content in left], [ComparedText.of(content) for content in right]
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


class ComparedText(NamedTuple):
    """One task as the search sees it."""

    marks: tuple[str, ...]
    """Numbers and the operators beside them, in order."""
    target: tuple[str, ...]
    """The numbers of the targets, or the targets where they hold none."""
    body: str
    """The prompt with every number as one character."""

    @classmethod
    def of(cls, content: Content) -> ComparedText:
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


def template_of(texts: Iterable[ComparedText]) -> frozenset[str]:
    """What so many of these tasks have in common that it says nothing of any."""
    sample = Sample()
    for text in texts:
        sample.add(text)
    return sample.template()


class Sample:
    """The tasks on which a template is decided: those with the smallest hashes of their texts, whatever the order."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, str]] = []

    def add(self, text: ComparedText) -> None:
        """One more task."""
        ranked = -sha256_number(text.body, size=32, errors="surrogatepass"), text.body
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
        texts = list(map(ComparedText.of, few))
        self._marks = {text.marks for text in texts}
        self._aimless = {text.marks for text in texts if not text.target}
        self._aimed = {(text.marks, text.target) for text in texts if text.target}

    def __contains__(self, text: ComparedText) -> bool:
        if not text.target:
            return text.marks in self._marks
        return text.marks in self._aimless or (text.marks, text.target) in self._aimed


_Key = tuple[tuple[str, ...], tuple[str, ...]]


def _joins(
    ours: Sequence[ComparedText], theirs: Sequence[ComparedText]
) -> Iterator[tuple[dict[int, _Key], dict[int, _Key]]]:
    """Keys by position on either side; only tasks with equal keys may be alike. No pair is in two joins."""
    aimed, free = _sorted_out(ours), _sorted_out(theirs)
    yield (
        {at: (ours[at].marks, ours[at].target) for at in aimed[0]},
        {at: (theirs[at].marks, theirs[at].target) for at in free[0]},
    )
    # A task without a target contradicts nobody.
    yield {at: (ours[at].marks, ()) for at in aimed[0]}, {at: (theirs[at].marks, ()) for at in free[1]}
    yield {at: (ours[at].marks, ()) for at in aimed[1]}, {at: (text.marks, ()) for at, text in enumerate(theirs)}


def _sorted_out(texts: Sequence[ComparedText]) -> tuple[list[int], list[int]]:
    """Positions of texts with a target, and of those without."""
    sides: tuple[list[int], list[int]] = ([], [])
    for at, text in enumerate(texts):
        sides[not text.target].append(at)
    return sides


def _candidates(
    ours: Sequence[ComparedText], theirs: Sequence[ComparedText], template: frozenset[str], threshold: float
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
