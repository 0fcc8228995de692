"""Which tasks are never trained on: a pure function of the task's id, and proof that nothing crosses.

Owns       the border between training tasks and held-out tasks.
Promises   a task keeps its side when others are added, removed or reordered; a larger
           fraction only adds held-out tasks; no side is ever silently empty; no id, no content
           and no near-duplicate is on both sides of a `HeldoutSplit`.
Never      looks at the position, the order, or Python's `hash()`.

    tasks --split(by hash of id or group)--> train | held out --refuse(ids, contents, near-duplicates)--> HeldoutSplit

Read next: `tasks.py` and `near_duplicates.py`, for what "the same" means.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from surefoot.data.near_duplicates import THRESHOLD, near_duplicates
from surefoot.data.tasks import Content, HeldoutGate, field_of, task_content
from surefoot.errors import ConfigError, TaskError
from surefoot.records import Task
from surefoot.system.files import sha256_number

T = TypeVar("T")
View = Callable[[Any], Content | str | None]
"""What a task asks, for comparison: `Content.of(prompt, targets)`, or just the text."""

How = Literal["id", "content", "near"]

SHOWN = 5
MAX_NEAR = 1000
_RANGE = 2**64


class Leak(NamedTuple):
    """A task that must not be trained on, and the held-out task that it repeats."""

    task_id: str
    heldout_id: str
    how: How
    overlap: float

    def __str__(self) -> str:
        if self.how == "id":
            return repr(self.task_id)
        alike = "has the content of" if self.how == "content" else f"is {self.overlap:.0%} like"
        return f"{self.task_id!r} {alike} {self.heldout_id!r}"


class HeldoutLeakError(TaskError):
    """Tasks are on both sides of the border; `leaks` names them."""

    def __init__(self, what: str, why: str, fix: str, leaks: Sequence[Leak] = ()) -> None:
        super().__init__(what, why, fix)
        self.leaks = tuple(leaks)


class HeldoutSplit(Generic[T]):
    """Training tasks and held-out tasks that were shown to have nothing in common.

    A task is a `Task`, a row (mapping) or object with a `task_id` or `id`, or a bare id. Rows and objects are also
    compared by `prompt` and targets; a bare id has no content to compare.

    Example:
        >>> split = HeldoutSplit([Task(id="a", prompt="1+1=")], [Task(id="b", prompt="2+2=")])
        >>> split.heldout_ids, split.leaks([Task(id="c", prompt="2 + 2 =")])[0].how
        (frozenset({'b'}), 'near')
    """

    def __init__(
        self, train: Iterable[T], heldout: Iterable[T], *,
        content: View | None = task_content, near: float | None = THRESHOLD,
    ) -> None:  # fmt: skip
        """Keep both sides as given, or raise.

        Args:
            content: how to see what a task asks; None compares ids alone.
            near: overlap from which two prompts are nearly the same; None looks for exact copies alone.
        """
        self.train, self.heldout = _side("train", train), _side("heldout", heldout)
        self.train_ids, self.heldout_ids = frozenset(map(task_id, self.train)), frozenset(map(task_id, self.heldout))
        self._view, self._near = content, near
        self._contents = [(task_id(task), seen) for task in self.heldout if (seen := self._content(task)) is not None]
        self._copies: dict[str, dict[str, str]] = {}
        for known, seen in self._contents:
            self._copies.setdefault(seen.prompt_hash, {}).setdefault(seen.targets_hash, known)
        self.refuse(self.train)

    @classmethod
    def split(
        cls, tasks: Iterable[T], holdout_frac: float, seed: int = 0, *,
        group: Callable[[T], Hashable] | str | None = None,
        content: View | None = task_content, near: float | None = THRESHOLD,
    ) -> HeldoutSplit[T]:  # fmt: skip
        """Divide `tasks` by a hash of (seed, id); both sides come back sorted by id.

        Args:
            holdout_frac: expected share of held-out ids (or groups), in (0, 1).
            seed: another seed, another split; 0 is the rule of the config key `heldout_fraction`.
            group: a function, or the name of a column, that gives each task's group; a group stays on one side.
        """
        if not _is_share(holdout_frac):
            raise _refused("holdout_frac", holdout_frac, "both sides need tasks, so the share lies inside (0, 1)")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise _refused("seed", seed, "the seed is a whole number, so that it can be repeated")
        by_id = {task_id(task): task for task in _side("tasks", tasks)}
        keys = {known: known if group is None else _group(task, known, group) for known, task in by_id.items()}
        held = {key: is_heldout(key, holdout_frac, seed) for key in set(keys.values())}
        sides: tuple[list[T], list[T]] = ([], [])
        for known in sorted(by_id):
            sides[held[keys[known]]].append(by_id[known])
        _refuse_empty_side(f"holdout_frac = {holdout_frac}", "holdout_frac", len(held), sides)
        return cls(*sides, content=content, near=near)

    def leaks(self, tasks: Iterable[T], *, near: bool = True) -> tuple[Leak, ...]:
        """Which of `tasks` repeat a held-out task, each once: by id, else by content, else by likeness."""
        found: list[Leak] = []
        rest: list[tuple[str, Content]] = []
        for task in tasks:
            known, seen = task_id(task), self._content(task)
            copied = known if known in self.heldout_ids else self._copy_of(seen)
            if copied is not None:
                found.append(Leak(known, copied, "id" if known in self.heldout_ids else "content", 1.0))
            elif seen is not None:
                rest.append((known, seen))
        return (*found, *self._near_leaks(rest if near else []))

    def refuse(self, tasks: Iterable[T], *, near: bool = True) -> None:
        """Raise `HeldoutLeakError` if any of `tasks` repeats a held-out task; for what a generator made, too."""
        leaks = self.leaks(tasks, near=near)
        if not leaks:
            return
        counts = Counter(leak.how for leak in leaks)
        kinds = ", ".join(f"{counts[how]} by {name}" for how, name in _HOW.items() if counts[how])
        more = f" and {len(leaks) - SHOWN} more" if len(leaks) > SHOWN else ""
        raise HeldoutLeakError(
            f"{len(leaks)} task(s) to train on are held out ({kinds}): {'; '.join(map(str, leaks[:SHOWN]))}{more}",
            "held-out accuracy would measure memory",
            "remove them from one side, or keep both on one side with group=; docs/heldout.md",
            leaks,
        )

    def describe(self) -> str:
        """One line: sizes, and what was compared with what."""
        total = len(self.train) + len(self.heldout)
        compared = sum(self._content(task) is not None for task in (*self.train, *self.heldout))
        near = "not searched" if self._near is None else f"none from an overlap of {self._near} on"
        return (
            f"{len(self.train)} tasks to train on, {len(self.heldout)} held out; no id on both sides; "
            f"contents compared: {compared} of {total}; near-duplicates: {near if compared else 'not searched'}"
        )

    def _content(self, task: T) -> Content | None:
        seen = None if self._view is None else self._view(task)
        return Content.of(seen) if isinstance(seen, str) else seen

    def _copy_of(self, seen: Content | None) -> str | None:
        """Id of a held-out task with this prompt and targets; a missing target contradicts nothing."""
        targets = {} if seen is None else self._copies.get(seen.prompt_hash, {})
        if seen is None or not targets:
            return None
        mine = seen.targets_hash
        return targets.get(mine, targets.get("")) if mine else next(iter(targets.values()))

    def _near_leaks(self, rest: Sequence[tuple[str, Content]]) -> list[Leak]:
        if self._near is None or not rest or not self._contents:
            return []
        sides = [seen for _, seen in rest], [seen for _, seen in self._contents]
        pairs = near_duplicates(*sides, self._near, limit=MAX_NEAR)
        closest = {pair.left: pair for pair in sorted(pairs, key=lambda pair: (pair.overlap, -pair.right))}
        return [Leak(rest[at][0], self._contents[pair.right][0], "near", pair.overlap) for at, pair in closest.items()]


_HOW: dict[How, str] = {"id": "id", "content": "content", "near": "likeness"}


def task_id(task: object) -> str:
    """The id of a task, row or object, or the id itself; a missing one is refused."""
    value = task
    if isinstance(task, Task):
        value = task.id
    elif not isinstance(task, str | int):
        value = field_of(task, "task_id")
        value = field_of(task, "id") if value is None else value
    if isinstance(value, bool) or not isinstance(value, str | int) or not str(value).strip():
        raise TaskError(
            f"a task has no id: {task!r:.80}",
            "what is held out is known by its id",
            "give it a non-empty task_id (text or a whole number), or pass the ids themselves",
        )
    return str(value)


def _side(name: str, tasks: Iterable[T]) -> tuple[T, ...]:
    """The tasks of one side: at least one, every id once."""
    if isinstance(tasks, str | bytes | Mapping):
        raise TaskError(f"{name} is {type(tasks).__name__}", "its parts are not tasks", "pass a list of tasks or ids")
    fixed = tuple(tasks)
    if not fixed:
        raise TaskError(f"{name} has no tasks", "an empty side proves nothing", "bring at least one task")
    repeated = [known for known, count in Counter(map(task_id, fixed)).items() if count > 1]
    if repeated:
        raise TaskError(
            f"{name} has {len(repeated)} id(s) more than once: {', '.join(map(repr, repeated[:SHOWN]))}",
            "a task counted twice weighs twice, and one of the two may be another task",
            "make the ids unique",
        )
    return fixed


def _group(task: T, known: str, group: Callable[[T], Hashable] | str) -> str:
    if isinstance(group, str):
        columns = task.columns if isinstance(task, Task) else task
        value = field_of(columns, group)
    else:
        value = group(task)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise TaskError(
            f"task {known!r} has the group {value!r}",
            "a group is named by text or a whole number, the same in every process",
            "give every task a group; one that belongs to none can use its own id",
        )
    return str(value)


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and 0 < value < 1  # NaN, True and False are not inside


def _refused(name: str, value: object, why: str) -> ConfigError:
    return ConfigError(f"{name} is {value!r}", why, "use for example holdout_frac = 0.1, seed = 0")


def _refuse_empty_side(asked: str, key: str, units: int, sides: tuple[Sequence[Any], Sequence[Any]]) -> None:
    train, heldout = map(len, sides)
    if not (train and heldout):
        raise TaskError(
            f"{asked} splits {train + heldout} tasks ({units} ids or groups) into {train} to train on and {heldout} "
            "held out",
            "an accuracy over no tasks, or a training over none, would say nothing",
            f"bring more tasks or smaller groups, or change {key}",
        )


# -- the rule, and the split by a config's heldout_fraction ---------------------


def is_heldout(task_id: str, fraction: float, seed: int = 0) -> bool:
    """Whether this id (or group) falls into the held-out share.

    The first 8 bytes of SHA-256(id), read as a number in [0, 1), lie below `fraction`. A seed other than 0 is
    written in front of the id.

    Example:
        >>> is_heldout("sums/47+85", 0.0), is_heldout("sums/47+85", 1.0)
        (False, True)
    """
    if not 0.0 <= fraction <= 1.0:  # also refuses NaN
        raise ConfigError(
            f"heldout_fraction is {fraction}",
            "a share of the tasks lies between 0 and 1",
            "use for example heldout_fraction = 0.1",
        )
    text = f"{seed}/{task_id}" if seed else task_id
    return sha256_number(text, errors="surrogatepass") < int(fraction * _RANGE)


def split_heldout(
    tasks: Sequence[Task], fraction: float, *, seed: int = 0, group: str | None = None
) -> tuple[tuple[Task, ...], tuple[Task, ...]]:
    """(train, held-out), each in the order given; every task is on exactly one side.

    Args:
        seed: the config key `heldout_seed`; another seed, another split.
        group: name of a column; tasks with the same value in it are on the same side.
    """
    sides: tuple[list[Task], list[Task]] = ([], [])
    for task in tasks:
        sides[is_heldout(side_key(task, group), fraction, seed)].append(task)
    refuse_empty_side(fraction, len(sides[0]), len(sides[1]), group)
    return tuple(sides[0]), tuple(sides[1])


def side_key(task: Task, group: str | None) -> str:
    """What decides the side of a task: its id, or its value in the column that names its group."""
    return task.id if group is None else _group(task, task.id, group)


def refuse_empty_side(fraction: float, train: int, heldout: int, group: str | None = None) -> None:
    """Raise when a share above 0 leaves one side without tasks."""
    if fraction > 0 and not (train and heldout):
        asked = f"heldout_fraction = {fraction}" + ("" if group is None else f" with heldout_group = {group!r}")
        raise TaskError(
            f"{asked} splits {train + heldout} tasks into {train} to train on and {heldout} held out",
            "an accuracy over no tasks, or a training over none, would say nothing",
            "bring more tasks" + ("" if group is None else " or smaller groups")
            + ", change heldout_fraction, or set heldout_fraction = 0 to hold out nothing",
        )  # fmt: skip


def repeated_prompts(train: Sequence[Task], heldout: Sequence[Task]) -> tuple[tuple[str, str], ...]:
    """Pairs (train id, held-out id) that ask the same thing under two ids, whatever their targets.

    The split goes by id, so a prompt that occurs twice may sit on both sides; what is
    measured there is memory. Prompts are compared under the rule of `Content`.
    """
    seen = {Content.of(task.messages()).prompt: task.id for task in train}
    keys = ((Content.of(task.messages()).prompt, task.id) for task in heldout)
    return tuple((seen[key], known) for key, known in keys if key in seen)


# -- Training tasks that repeat a held-out task, and what becomes of them: refused, left out, or allowed by name
# Owns       the one check that every run makes of its two sides before anything starts, and what it says of it.
# Promises   a prompt that is on both sides, whatever its targets, is never trained on; a near-duplicate is refused or
# left out unless a key allows it, and then it is counted; the same tasks give the same sides everywhere.
# Never      moves a task to the held-out side, or drops a held-out one.
#
# train, held out --same prompt? nearly the same?--> twins --refuse | drop | allow--> train, and lines for the plan


Mode = Literal["refuse", "drop", "allow"]
"""What becomes of a training task that is nearly a held-out one."""
TWINS_SHOWN = 3
"""Pairs of prompts in an error."""
TWINS_KEPT = 100
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
            "pairs": [
                [leak.task_id, leak.heldout_id, leak.how, round(leak.overlap, 3)] for leak in self.found[:TWINS_KEPT]
            ],
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
        + "\n".join(_shown(leak, train(leak.task_id), heldout(leak.heldout_id)) for leak in wrong[:TWINS_SHOWN]),
        "held-out accuracy would measure memory",
        'remove them, keep them on one side with heldout_group = "COLUMN", or set heldout_near = "drop" to leave the '
        'training twins out ("allow" where they are different tasks all the same); docs/heldout.md',
        wrong,
    )


def refuse_pairs(rows: Sequence[Task], heldout: Sequence[Task], mode: Mode) -> None:
    """Raise when the prompt of a recorded preference is held out, or nearly; `allow` lets the second pass.

    Ids mean nothing here, and a pair has no target: its prompt alone decides.
    """
    found, _ = find_twins([(row.id, Content.of(row.messages())) for row in rows], contents_of(heldout), mode)
    wrong = [leak for leak in found if leak.how != "near" or mode != "allow"]
    if wrong:
        pairs, held = {row.id: row for row in rows}, {task.id: task for task in heldout}
        raise HeldoutLeakError(
            f"replay_pairs: the prompts of {len(wrong)} of {len(rows)} pairs are held-out tasks, or nearly\n"
            + "\n".join(_shown(leak, pairs[leak.task_id], held[leak.heldout_id]) for leak in wrong[:TWINS_SHOWN]),
            "a preference is trained on, so held-out accuracy would measure memory",
            "remove these pairs, or record pairs of training tasks",
            wrong,
        )


def contents_of(tasks: Iterable[Task]) -> list[tuple[str, Content]]:
    """(id, what it asks) of each task."""
    return [(task.id, content) for task in tasks if (content := task_content(task)) is not None]


def find_twins(
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
    return find_twins(contents_of(train), contents_of(heldout), mode) if train and heldout else ([], True)


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


# -- A border around a few tasks, for a training side that is too large to hold -------------------


_LEAKS_SHOWN = 3


class ContentGate:
    """Refuses tasks that ask what one of `never_trained` asks, and whatever the border that it goes with refuses.

    Prompts are compared under the rule of `Content`, whatever their targets; likeness is not looked for.

    Args:
        beside: another border over the same training side; None when there is none.
    """

    def __init__(self, never_trained: Sequence[Task], beside: HeldoutGate | None = None) -> None:
        self._beside = beside
        self._ids = {task.id for task in never_trained}
        self._prompts = {Content.of(task.messages()).prompt: task.id for task in never_trained}

    def refuse(self, tasks: Iterable[Task], *, near: bool = True) -> None:
        """Raise if any of `tasks` is held out."""
        asked = list(tasks)
        if self._beside is not None:
            self._beside.refuse(asked, near=near)
        leaks = [leak for task in asked if (leak := self._leak(task)) is not None]
        if leaks:
            more = " ..." if len(leaks) > _LEAKS_SHOWN else ""
            raise HeldoutLeakError(
                f"{len(leaks)} task(s) to train on are held out: {'; '.join(map(str, leaks[:_LEAKS_SHOWN]))}{more}",
                "held-out accuracy would measure memory", "remove the repeated rows from one side", leaks,
            )  # fmt: skip

    def _leak(self, task: Task) -> Leak | None:
        if task.id in self._ids:
            return Leak(task.id, task.id, "id", 1.0)
        held = self._prompts.get(Content.of(task.messages()).prompt)
        return None if held is None else Leak(task.id, held, "content", 1.0)
