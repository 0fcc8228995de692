"""Whether a model answers the same tasks better or worse than before, by more than noise.

Owns       the comparison of two evaluations of the same tasks, task by task.
Promises   a model that did not change is called worse in fewer than 1 of 100 runs, however few tasks there are (at
           most 0.7 %, computed exactly for 1 to 70 tasks whose two answers are independent draws, and less for
           more); equal answers are never a change; a task that was graded only once is left out and not counted.
Never      decides what that means for a run: `verdict.py` does.

The tasks are the same before and after, so the differences per task are compared with 0; how hard the tasks are cancels
out. Two tasks are added, one that went from worst to best and one that went back, as `noise.proportion_se` adds a right
and a wrong answer: without them four answers of four that got worse would have no noise at all. For 0 and 1 this is
the interval of Bonett and Price for paired proportions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.errors import InvariantError
from surefoot.protocols import count_text

MARGIN_SE = 2.6
"""Standard errors that a change has to exceed to be more than noise, on one side."""

Scores = Sequence[float | None]
"""One number per held-out task, always in the same order; None where nobody could grade it."""


@dataclass(frozen=True)
class Change:
    """The same tasks, before training and after."""

    before: float
    after: float
    noise: float
    """What a change has to exceed."""
    tasks: int
    counted: bool
    """Whether each task was either right or wrong, so that a mean of few is shown as a count."""

    @property
    def worse(self) -> bool:
        """Lower than before by more than noise."""
        return self.before - self.after > self.noise

    @property
    def better(self) -> bool:
        """Higher than before by more than noise."""
        return self.after - self.before > self.noise

    @property
    def text(self) -> str:
        """`0.14 -> 0.00`, or `5 of 9 -> 2 of 9`."""
        return " -> ".join(self._shown(value) for value in (self.before, self.after))

    @property
    def margin(self) -> str:
        """`±0.077 at 150 tasks`."""
        return f"±{self.noise:.2g} at {self.tasks} task{'s' * (self.tasks != 1)}"

    def _shown(self, value: float) -> str:
        right = {"eval_right": round(value * self.tasks), "eval_n": self.tasks} if self.counted else {}
        return count_text(right) or f"{value:.4g}"


def compare(before: Scores, after: Scores) -> Change | None:
    """What became of the tasks that were graded both times; None when there is no such task.

    Example:
        >>> found = compare([1.0] * 21 + [0.0] * 129, [0.0] * 150)
        >>> found.worse, found.text, found.margin
        (True, '0.14 -> 0', '±0.078 at 150 tasks')
        >>> compare([1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 0.0]).worse  # 3 of 4 -> 1 of 4
        False
    """
    if before and after and len(before) != len(after):
        raise InvariantError(
            f"{len(before)} held-out tasks were answered before training and {len(after)} after it",
            "tasks are compared one by one, so they have to be the same",
            "evaluate the same tasks every time; this is a bug in surefoot",
        )
    pairs = [(b, a) for b, a in zip(before, after, strict=False) if b is not None and a is not None]
    if not pairs:
        return None
    n, seen = len(pairs), {score for pair in pairs for score in pair}
    width = 1.0 if seen <= {0.0, 1.0} else max(seen) - min(seen)
    total = math.fsum(a - b for b, a in pairs) / (n + 2)
    squares = (math.fsum((a - b) ** 2 for b, a in pairs) + 2 * width * width) / (n + 2)
    se = math.sqrt(max(squares - total * total, 0.0) / (n + 2))
    return Change(
        before=math.fsum(b for b, _ in pairs) / n, after=math.fsum(a for _, a in pairs) / n,
        noise=MARGIN_SE * se * (n + 2) / n, tasks=n, counted=seen <= {0.0, 1.0},
    )  # fmt: skip
