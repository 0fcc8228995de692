"""Candidates for likeness by MinHash: few pairs to read out of billions.

Owns       the 5-grams of a text, their signatures, bands, and the join of two sides.
Promises   the same candidates in every process; a pair whose overlap is the threshold is missed in less than
           1 of 1000 cases, one further above it practically never.
Never      decides that two texts are alike: the caller counts.

    5-grams --64 smallest hash values--> signatures --equal bands--> pairs --enough equal values--> candidates

Read next: `near_duplicates.py`, which counts.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from surefoot.errors import TaskError

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
            _refuse_endless(joined)
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
        digest = hashlib.sha256(f"surefoot minhash {place}".encode()).digest()
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


def _refuse_endless(joined: int) -> None:
    if joined > MAX_JOINED:
        raise TaskError(
            f"more than {MAX_JOINED:,} pairs of tasks share parts of their texts",
            "the tasks share a long template, so nearly every pair would have to be read",
            'pass content= with a view that leaves the template out, or near=None; in a config heldout_near = "allow"',
        )
