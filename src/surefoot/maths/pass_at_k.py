"""pass@k: the share of tasks that k answers would solve, from n answers of which c are right."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that k of these n answers, drawn without putting any back, hold a right one: 1 - C(n-c, k) / C(n, k).

    Unbiased for the chance that k fresh answers would (Chen et al. 2021); 1 - (1 - c/n)^k is not.

    Args:
        n: answers to one task.
        c: how many of them are right.
        k: at least 1, at most n.

    Example:
        >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
        (0.25, 0.5, 1.0)
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {c} right answers in {n} is not defined")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def powers_up_to(n: int) -> list[int]:
    """Which k are shown for n answers: powers of two, and n itself; none for a single answer.

    Example:
        >>> powers_up_to(1), powers_up_to(4), powers_up_to(6)
        ([], [1, 2, 4], [1, 2, 4, 6])
    """
    if n < 2:
        return []
    return sorted({*(2**i for i in range(n.bit_length()) if 2**i <= n), n})


def mean_pass_at(right: Sequence[Iterable[bool]], n: int) -> dict[int, float]:
    """k -> mean over the tasks; a task with fewer than k judged answers does not count for that k.

    Args:
        right: per task, whether each of its judged answers is right.
        n: answers that each task was asked for.
    """
    counted = [(len(each), sum(each)) for each in map(list, right)]
    found = {}
    for k in powers_up_to(n):
        shares = [pass_at_k(judged, c, k) for judged, c in counted if judged >= k]
        if shares:
            found[k] = math.fsum(shares) / len(shares)
    return found
