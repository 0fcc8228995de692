"""The built-in tasks: two-digit addition, every answer exact.

Owns       the 10,000 sums a+b with a and b from 0 to 99.
Promises   the same (n, seed) gives the same tasks everywhere; no task twice; a smaller n
           is a prefix of a larger one.
Never      reads a file, the clock, or a global random state.

Read next: `sources.py`, which reaches this file as "builtin:sums".
"""

from __future__ import annotations

from collections.abc import Iterable

from surefoot.errors import TaskError
from surefoot.records import Task
from surefoot.system.files import sha256_bytes

SUMS_LIMIT = 100
"""Both numbers lie in range(LIMIT)."""

SUMS = "sums"


def sum_task(a: int, b: int) -> Task:
    """One addition as a task.

    Example:
        >>> task = sum_task(47, 85)
        >>> task.id, task.prompt, task.columns["answer"]
        ('sums/47+85', '47+85=', '132')
    """
    return Task(id=f"{SUMS}/{a}+{b}", prompt=f"{a}+{b}=", columns={"answer": str(a + b)}, dataset=SUMS)


def sums_tasks(n: int, seed: int) -> tuple[Task, ...]:
    """(n,) distinct tasks, in an order that only the seed decides."""
    total = SUMS_LIMIT * SUMS_LIMIT
    if not 1 <= n <= total:
        raise TaskError(
            f"builtin:sums was asked for {n} tasks and has {total}",
            "a task that comes twice would be counted as two",
            f"set num_tasks between 1 and {total}",
        )
    tasks = (sum_task(a, b) for a in range(SUMS_LIMIT) for b in range(SUMS_LIMIT))
    return tuple(sorted(tasks, key=lambda task: _rank(task.id, seed))[:n])


def _rank(task_id: str, seed: int) -> bytes:
    """A position that depends on the seed and the id alone, on every platform."""
    return sha256_bytes(f"{seed}/{task_id}")


# -- The built-in tasks for tool use: some that a calculator answers, some that it only delays ----
# Owns       10,000 products (`347*86=`) and 10,000 numbers to read backwards (`turn 4821=`).
# Promises   the same (n, seed) gives the same tasks everywhere; no task twice; a smaller n is a
# prefix of a larger one; the two kinds alternate, so every even n is half and half.
# Never      reads a file, the clock, or a global random state.
#
# times   three digits times two: the built-in model cannot do it in its head, a call pays
# turn    four digits backwards: the model can, the calculator cannot, a call only costs


ERRANDS = "errands"
KINDS = ("times", "turn")
PER_KIND = 10_000
TOTAL = PER_KIND * len(KINDS)

LEFT, RIGHT = range(100, 1000), range(12, 100)
"""The two factors of a product; of all pairs the seed picks `PER_KIND`."""

DIGITS = 4
"""How long a number to be read backwards is; zeros in front count."""

CALCULATOR = "calculator__evaluate"
"""The tool that pays for one kind: tool `evaluate` of a server called `calculator`; argument `expression`."""


def multiplication_task(a: int, b: int) -> Task:
    """One product as a task.

    Example:
        >>> task = times_task(347, 86)
        >>> task.id, task.prompt, task.columns["answer"]
        ('times/347*86', '347*86=', '29842')
    """
    return _task("times", f"{a}*{b}", f"{a}*{b}=", str(a * b))


def reversal_task(digits: str) -> Task:
    """One number to read backwards.

    Example:
        >>> task = turn_task("4821")
        >>> task.id, task.prompt, task.columns["answer"], task.columns["kind"]
        ('turn/4821', 'turn 4821=', '1284', 'turn')
    """
    return _task("turn", digits, f"turn {digits}=", digits[::-1])


def errands_tasks(n: int, seed: int) -> tuple[Task, ...]:
    """(n,) distinct tasks, times and turn by turns, in an order that only the seed decides."""
    if not 1 <= n <= TOTAL:
        raise TaskError(
            f"builtin:{ERRANDS} was asked for {n} tasks and has {TOTAL}",
            "a task that comes twice would be counted as two",
            f"set num_tasks between 1 and {TOTAL}",
        )
    products = _first((f"{a}*{b}" for a in LEFT for b in RIGHT), "times", seed, (n + 1) // 2)
    numbers = _first((f"{number:0{DIGITS}d}" for number in range(10**DIGITS)), "turn", seed, n // 2)
    times = [multiplication_task(*map(int, product.split("*"))) for product in products]
    turn = [reversal_task(digits) for digits in numbers]
    return tuple((times, turn)[i % 2][i // 2] for i in range(n))


def _task(kind: str, subject: str, prompt: str, answer: str) -> Task:
    return Task(id=f"{kind}/{subject}", prompt=prompt, columns={"answer": answer, "kind": kind}, dataset=ERRANDS)


def _first(subjects: Iterable[str], kind: str, seed: int, n: int) -> list[str]:
    """(n,) subjects with the lowest rank, which depends on the seed and the id alone, on every platform."""
    return sorted(subjects, key=lambda subject: sha256_bytes(f"{seed}/{kind}/{subject}"))[:n]
