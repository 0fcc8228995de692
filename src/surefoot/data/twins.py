"""Training tasks that repeat a held-out task, and what becomes of them: refused, left out, or allowed by name.

Owns       the one check that every run makes of its two sides before anything starts, and what it says of it.
Promises   a prompt that is on both sides, whatever its targets, is never trained on; a near-duplicate is refused or
           left out unless a key allows it, and then it is counted; the same tasks give the same sides everywhere.
Never      moves a task to the held-out side, or drops a held-out one.

    train, held out --same prompt? nearly the same?--> twins --refuse | drop | allow--> train, and lines for the plan

Read next: `near_duplicates.py`, what "nearly" means; `large/large_twins.py`, the same for tasks on the disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from surefoot.data.content import Content, task_content
from surefoot.data.heldout import HeldoutLeakError, Leak
from surefoot.data.near_duplicates import near_duplicates
from surefoot.errors import TaskError
from surefoot.records import Task

Mode = Literal["refuse", "drop", "allow"]
"""What becomes of a training task that is nearly a held-out one."""
SHOWN = 3
"""Pairs of prompts in an error."""
KEPT = 100
"""Pairs that a run folder names."""
_WIDTH, _BEFORE = 100, 30


@dataclass(frozen=True)
class Twins:
    """What the search across the border found, and what was done about it."""

    mode: Mode
    train: int
    """Training tasks that were compared."""
    heldout: int
    """Held-out tasks that they were compared with."""
    found: tuple[Leak, ...]
    """One for each training twin, with the held-out task that is closest to it."""
    seconds: float
    counted: bool = True
    """Whether `found` is all there is: False where there were too many to read, and they are allowed."""
    known: bool = False
    """Whether an earlier start had found it, in the same tasks."""

    def line(self) -> str:
        """For the plan: what was compared, how long it took, what was found and what became of it."""
        took = f"{self.seconds:.1f}s{' (remembered from an earlier start)' * self.known}"
        return (
            f"border    {_count(self.heldout, 'held-out task')} checked against {_count(self.train, 'training task')} "
            f"for near-duplicates in {took}: {self.outcome()}"
        )

    def outcome(self) -> str:
        """What was found, and what became of it."""
        if not self.counted:
            return 'too many to count, allowed (heldout_near = "allow")'
        if not self.found:
            return "none"
        if self.mode == "drop":
            return f"{_count(len(self.found), 'twin')} left out of training (heldout_near = drop)"
        return f"{_count(len(self.found), 'twin')} in training, allowed by heldout_near = allow"

    def warning(self) -> str | None:
        """What whoever reads the verdict has to know; None where nothing crosses."""
        if self.mode != "allow" or (self.counted and not self.found):
            return None
        number = len(self.found) if self.counted else "too many"
        return f"held-out tasks have {number} near-duplicates in training: allowed by key (heldout_near)"

    def facts(self) -> dict[str, Any]:
        """For verdict.json."""
        return {
            "near": self.mode, "compared": [self.train, self.heldout],
            "twins": len(self.found) if self.counted else None,
            "left_out": len(self.found) if self.mode == "drop" else 0,
            "pairs": [[leak.task_id, leak.heldout_id, leak.how, round(leak.overlap, 3)] for leak in self.found[:KEPT]],
        }  # fmt: skip


def keep_apart(train: Sequence[Task], heldout: Sequence[Task], mode: Mode) -> tuple[tuple[Task, ...], Twins]:
    """(what may be trained on, what was found); raises `HeldoutLeakError` when a twin may not stay.

    Args:
        heldout: everything that answers are measured on, wherever it comes from.
        mode: `refuse` raises; `drop` leaves the training twin out; `allow` keeps it, but never an equal prompt.

    Example:
        >>> asked = [Task(id="a", prompt="Name the river of Vienna."), Task(id="b", prompt="Name a planet.")]
        >>> left, twins = keep_apart(asked, [Task(id="c", prompt="name the river of Vienna")], "drop")
        >>> [task.id for task in left], twins.outcome()
        (['b'], '1 twin left out of training (heldout_near = drop)')
    """
    began = time.perf_counter()
    found, counted = _found(train, heldout, mode)
    twins = Twins(mode, len(train), len(heldout), tuple(found), time.perf_counter() - began, counted)
    if found:
        ours, theirs = ({task.id: task for task in side} for side in (train, heldout))
        refuse_twins(twins, ours.__getitem__, theirs.__getitem__)
    gone = {leak.task_id for leak in found} if mode == "drop" else set()
    return tuple(task for task in train if task.id not in gone), twins


def refuse_twins(twins: Twins, train: Callable[[str], Task], heldout: Callable[[str], Task]) -> None:
    """Raise when something was found that `twins.mode` does not let pass; the sides are asked by id, to be shown."""
    if twins.mode == "drop":
        return
    wrong = [leak for leak in twins.found if leak.how != "near" or twins.mode == "refuse"]
    if not wrong:
        return
    equal = sum(leak.how != "near" for leak in wrong)
    said = [f"{equal} held-out prompts are also training prompts"] if equal else []
    said += [f"{len(wrong) - equal} of {twins.train} training tasks are nearly held-out tasks"] * (len(wrong) > equal)
    wrong.sort(key=lambda leak: -leak.overlap)
    raise HeldoutLeakError(
        f"{', and '.join(said)}\n"
        + "\n".join(_shown(leak, train(leak.task_id), heldout(leak.heldout_id)) for leak in wrong[:SHOWN]),
        "held-out accuracy would measure memory",
        'remove them, keep them on one side with heldout_group = "COLUMN", or set heldout_near = "drop" to leave the '
        'training twins out ("allow" where they are different tasks all the same); docs/heldout.md',
        wrong,
    )


def refuse_pairs(rows: Sequence[Task], heldout: Sequence[Task], mode: Mode) -> None:
    """Raise when the prompt of a recorded preference is held out, or nearly; `allow` lets the second pass.

    Ids mean nothing here, and a pair has no target: its prompt alone decides.
    """
    found, _ = find([(row.id, Content.of(row.messages())) for row in rows], seen(heldout), mode)
    wrong = [leak for leak in found if leak.how != "near" or mode != "allow"]
    if wrong:
        pairs, held = {row.id: row for row in rows}, {task.id: task for task in heldout}
        raise HeldoutLeakError(
            f"replay_pairs: the prompts of {len(wrong)} of {len(rows)} pairs are held-out tasks, or nearly\n"
            + "\n".join(_shown(leak, pairs[leak.task_id], held[leak.heldout_id]) for leak in wrong[:SHOWN]),
            "a preference is trained on, so held-out accuracy would measure memory",
            "remove these pairs, or record pairs of training tasks",
            wrong,
        )


def seen(tasks: Iterable[Task]) -> list[tuple[str, Content]]:
    """(id, what it asks) of each task."""
    return [(task.id, content) for task in tasks if (content := task_content(task)) is not None]


def find(
    train: Sequence[tuple[str, Content]], heldout: Sequence[tuple[str, Content]], mode: Mode,
    template: frozenset[str] | None = None,
) -> tuple[list[Leak], bool]:  # fmt: skip
    """(twins, whether those are all): an equal prompt first, whatever its target, else the closest likeness."""
    prompts = {content.prompt: known for known, content in reversed(heldout)}
    copies = [
        Leak(known, prompts[content.prompt], "content", 1.0) for known, content in train if content.prompt in prompts
    ]
    rest = [(known, content) for known, content in train if content.prompt not in prompts]
    try:
        pairs = near_duplicates([c for _, c in rest], [c for _, c in heldout], template=template)
    except TaskError:  # too many are alike to be read; who allows them does not need the number
        if mode != "allow":
            raise
        return copies, False
    closest = {pair.left: pair for pair in sorted(pairs, key=lambda pair: (pair.overlap, -pair.right))}
    near = [Leak(rest[at][0], heldout[closest[at].right][0], "near", closest[at].overlap) for at in sorted(closest)]
    return [*copies, *near], True


def _found(train: Sequence[Task], heldout: Sequence[Task], mode: Mode) -> tuple[list[Leak], bool]:
    return find(seen(train), seen(heldout), mode) if train and heldout else ([], True)


def _shown(leak: Leak, train: Task, heldout: Task) -> str:
    """Both prompts, cut to what tells them apart."""
    one, other = (" ".join(" ".join(str(m.get("content")) for m in t.messages()).split()) for t in (train, heldout))
    differ = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    start = max(0, differ - _BEFORE) if max(len(one), len(other)) > _WIDTH else 0
    return f"    {leak}\n      train     {_cut(one, start)}\n      held out  {_cut(other, start)}"


def _cut(text: str, start: int) -> str:
    start = max(0, min(start, len(text) - _WIDTH))
    piece = text[start : start + _WIDTH]
    return ("... " if start else "") + piece + (" ..." if start + _WIDTH < len(text) else "")


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
