"""What answers of known worth earn: the right one, a wrong one, nonsense, a list of guesses, nothing at all.

Owns       the comparison of these for tasks of one kind, and which of its findings are certain enough to refuse a run.
Promises   a reward is refused only on what most of the probed tasks show, and only where it is seen to know right from
           wrong: each gold answer earns more on its own task than on another. What may as well be a reward for form or
           length is told and not refused, unless nothing earns more than silence; one that does not say the same twice
           is not refused at all.
Never      runs a reward function itself.

    right      the gold answer, in the form (alone, boxed, tagged ...) that earns most
    elsewhere  the same answer to another task        wrong     the answer to another task
    nonsense   words without meaning                  guesses   many answers, the right one among them
    empty      no call and no word                    busy      calls, then a wrong answer

Read next: `reward_probe.py`, which asks twenty adversarial answers more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from surefoot.envs.verify.final_answer import final_answer
from surefoot.envs.verify.probe_answers import are_apart, guesses, nonsense
from surefoot.records import Task

IDLE_SHARE = 0.05
"""Doing nothing may earn this share of what the right answer earns."""
PLAIN = "{}"
FORMS = (
    PLAIN, "\\boxed{{}}", "<answer>{}</answer>", "#### {}", "The answer is {}.",
    "<think>\n{}\n</think>\n<answer>\n{}\n</answer>",
)  # fmt: skip
"""Ways to state an answer; graders may ask for one of them."""
NOT_COMPARED = ("format", "ifeval", "code")
"""Kinds whose gold answer is one of many right ones: it is only said as it stands."""


class Scored(NamedTuple):
    """The whole reward of one answer, or why there is none."""

    reward: float | None
    reason: str | None = None


Score = Callable[[Sequence[Task], Sequence[str]], Sequence[Scored]]
"""`score(tasks, answers)`: (N,) the reward that training would give."""


@dataclass(frozen=True)
class Way:
    """How an answer is given: its form, and whether tools are called before."""

    form: str
    calls: bool
    score: Score

    def say(self, gold: str) -> str:
        """The completion that gives a gold answer; one with its working is cut to what it ends up with."""
        return gold if self.form == PLAIN else self.put(_short(gold))

    def put(self, text: str) -> str:
        """Any text in this form."""
        return self.form.replace("{}", text)

    def words(self) -> str:
        """For people."""
        form = "the answer alone" if self.form == PLAIN else repr(self.form.replace("{}", "..."))
        return f"{form} after the expected calls" if self.calls else form


class Earned(NamedTuple):
    """What answers to one task earned; None where there was no score."""

    task_id: str
    gold: str
    right: float | None
    again: float | None
    elsewhere: float | None
    wrong: float | None
    nonsense: float | None
    guesses: float | None
    empty: float | None
    busy: float | None


class Refusal(NamedTuple):
    """Why a run with this reward is not started."""

    check: str
    task_id: str
    answer: str
    what: str


@dataclass(frozen=True)
class Pay:
    """What was found about the tasks of one kind."""

    kind: str
    way: Way
    tasks: tuple[Earned, ...]
    full_mark: float | None = None
    """What an answer earns that every function gives 1; None when that is not known."""

    def mean(self, name: str) -> float | None:
        """The mean of one column over the tasks that have a score there."""
        known = [value for each in self.tasks if (value := getattr(each, name)) is not None]
        return math.fsum(known) / len(known) if known else None

    @property
    def unsteady(self) -> bool:
        """Whether the same right answer earned something else the second time."""
        return any(each.right != each.again for each in self.tasks)

    @property
    def constant(self) -> bool:
        """Whether everything earned the same."""
        return len({value for each in self.tasks for value in each[2:] if value is not None}) <= 1

    @property
    def compares(self) -> bool:
        """Whether every gold answer earns more on its own task than on another: the reward knows right from wrong."""
        pairs = [(each.right, each.elsewhere) for each in self.tasks]
        return bool(pairs) and all(
            own is not None and other is not None and own > other and not _same(own, other) for own, other in pairs
        )

    @property
    def share(self) -> float | None:
        """What a wrong answer earns, as a share of what the right one does; None where that has no meaning."""
        right, wrong = self.mean("right"), self.mean("wrong")
        return wrong / right if right is not None and wrong is not None and right > 0 else None

    def refusals(self) -> Iterator[Refusal]:
        """What is certain enough not to train with this reward."""
        if not self.tasks or self.unsteady or self.constant:
            return
        if not self.compares:
            yield from self._silence()
            return
        if found := self._most("empty", idle=True):
            yield Refusal(
                "empty", found.task_id, "", f"an empty answer earns {found.empty:g}, the right one, "
                f"{self._said(found)}, {found.right:g}: doing nothing pays",
            )  # fmt: skip
        if found := self._most("nonsense"):
            yield Refusal(
                "nonsense", found.task_id, "meaningless words", f"meaningless words earn {found.nonsense:g}, the right "
                f"answer, {self._said(found)}, {found.right:g}: what the grader cannot read counts as right",
            )  # fmt: skip
        sure = self.full_mark is not None and all((each.right or 0.0) >= self.full_mark for each in self.tasks)
        if sure and (found := self._most("guesses")):
            yield Refusal(
                "guesses", found.task_id, guesses(found.gold, "..."), f"many answers at once, {found.gold[:40]!r} "
                f"among them, earn {found.guesses:g}, as the right one alone does: guessing pays",
            )  # fmt: skip

    def _silence(self) -> Iterator[Refusal]:
        """For a reward that does not compare with the gold answer: certain only when it pays for silence before all."""
        best = [
            each.empty is not None
            and each.right is not None
            and each.empty > each.right
            and all(value <= each.empty for value in each[2:] if value is not None)
            for each in self.tasks
        ]
        if all(best):
            first = self.tasks[0]
            yield Refusal(
                "empty", first.task_id, "", f"an empty answer earns {first.empty:g}, {self._said(first)} "
                f"{first.right:g}, and no other answer that was tried earns more: saying nothing pays best",
            )  # fmt: skip

    def _most(self, name: str, *, idle: bool = False) -> Earned | None:
        """The first task on which this column pays too much, when it does on more than half of them."""
        known = [each for each in self.tasks if each.right is not None and getattr(each, name) is not None]
        paid = [each for each in known if _pays(getattr(each, name), each.right, idle=idle)]
        return paid[0] if 2 * len(paid) > len(known) else None

    def _said(self, each: Earned) -> str:
        return repr(self.way.say(each.gold)[:60])

    def lines(self) -> Iterator[str]:
        """What is worth knowing, for people."""
        if (right := self.mean("right")) is None:
            yield "no right answer got a score"
            return
        earned = {name: self.mean(name) for name in ("wrong", "empty", "busy")}
        words = {"wrong": "a wrong one", "empty": "an empty one", "busy": "a wrong one after calls"}
        others = ", ".join(f"{words[name]} {value:g}" for name, value in earned.items() if value is not None)
        yield (
            f"a right answer ({self.way.words()}) earns {right:g}, {others}"
            if others
            else f"a right answer earns {right:g}"
        )
        if self.unsteady:
            yield "the same right answer earned something else the second time: nothing about it is certain"
        elif self.constant:
            yield "every answer that was tried earns the same"
        elif any(each.elsewhere is None for each in self.tasks):
            yield "the answers are too much alike to tell whether it looks at them"
        elif not self.compares:
            yield "right answers earn no more on their own task than on another: it goes by something else"
        elif self.share is not None and self.share > IDLE_SHARE:
            yield f"a wrong answer earns {self.share:.0%} of what a right one does"


def measure(
    kind: str, tasks: Sequence[Task], golds: Mapping[str, str], score: Score, busy: Score | None = None,
    full_mark: float | None = None,
) -> Pay:  # fmt: skip
    """Ask about right answers in every form, then about the others in the form that earned most.

    Args:
        tasks: those that are probed; each has a gold answer.
        golds: task id -> gold answer, of these and of others.
        score: an answer without calls.
        busy: the same answer after the calls that the task expects; None where there are no tools.
    """
    ways = _ways(kind, score, busy)
    way = _best(ways, tasks, golds)
    pay = Pay(kind, way, tuple(_earned(kind, way, tasks, golds, score, busy)), full_mark)
    if pay.compares or way is ways[0]:
        return pay
    # It does not go by the answer, so that the form that it likes best is nobody's: as it stands, then.
    return Pay(kind, ways[0], tuple(_earned(kind, ways[0], tasks, golds, score, busy)), full_mark)


def _earned(
    kind: str, way: Way, tasks: Sequence[Task], golds: Mapping[str, str], score: Score, busy: Score | None
) -> Iterator[Earned]:
    pairs = [(task, _other(task, tasks, golds)) for task in tasks]
    right = [(task, way.say(golds[task.id])) for task in tasks]
    wrong = [(t, way.put(nonsense(_question(t))) if o is None else way.say(golds[o.id])) for t, o in pairs]
    asked: dict[str, Sequence[tuple[Task, str] | None]] = {
        "right": right,
        "again": right,
        "elsewhere": [
            None if other is None else (other, text) for (_, text), (_, other) in zip(right, pairs, strict=True)
        ],
        "nonsense": [(task, way.put(nonsense(_question(task)))) for task in tasks],
        "guesses": [
            None
            if other is None or kind in NOT_COMPARED
            else (task, way.put(guesses(_short(golds[task.id]), _short(golds[other.id]))))
            for task, other in pairs
        ],
    }
    idle: dict[str, Sequence[tuple[Task, str] | None]] = {"wrong": wrong, "empty": [(task, "") for task in tasks]}
    earned = _asked(score, asked | idle) if way.score is score else _asked(way.score, asked) | _asked(score, idle)
    earned |= {"busy": [None] * len(tasks)} if busy is None else _asked(busy, {"busy": wrong})
    for row, task in enumerate(tasks):
        yield Earned(task.id, golds[task.id], **{name: column[row] for name, column in earned.items()})


def _ways(kind: str, score: Score, busy: Score | None) -> list[Way]:
    forms = FORMS[:1] if kind in NOT_COMPARED else FORMS
    how = [(False, score)] if busy is None else [(False, score), (True, busy)]
    return [Way(form, calls, ask) for calls, ask in how for form in forms]


def _best(ways: Sequence[Way], tasks: Sequence[Task], golds: Mapping[str, str]) -> Way:
    """The way in which right answers earn most; of equal ones the plainest."""
    means: list[float] = []
    for calls in dict.fromkeys(way.calls for way in ways):
        alike = [way for way in ways if way.calls == calls]
        asked = {way.form: [(task, way.say(golds[task.id])) for task in tasks] for way in alike}
        for earned in _asked(alike[0].score, asked).values():
            known = [reward for reward in earned if reward is not None]
            means.append(math.fsum(known) / len(known) if 2 * len(known) > len(tasks) else -math.inf)
    best = max(means)
    return next(way for way, mean in zip(ways, means, strict=True) if mean == best or _same(mean, best))


def _other(task: Task, tasks: Sequence[Task], golds: Mapping[str, str]) -> Task | None:
    """Another of these tasks, whose answer is clearly not this one's."""
    place = [each.id for each in tasks].index(task.id)
    for other in (*tasks[place + 1 :], *tasks[:place]):
        if are_apart(_short(golds[task.id]), _short(golds[other.id])):
            return other
    return None


def _asked(score: Score, asked: Mapping[str, Sequence[tuple[Task, str] | None]]) -> dict[str, list[float | None]]:
    """The reward of everything that is asked, in one go; None where nothing is."""
    flat = [each for column in asked.values() for each in column if each is not None]
    given = iter(score([task for task, _ in flat], [text for _, text in flat])) if flat else iter(())
    return {
        name: [None if each is None else next(given).reward for each in column] for name, column in asked.items()
    }  # fmt: skip


def _pays(value: float, right: float | None, *, idle: bool) -> bool:
    assert right is not None, "asked only where there is one"
    if idle and right > 0:
        return value > IDLE_SHARE * right and not _same(value, IDLE_SHARE * right)
    return value >= right or _same(value, right)


def _same(one: float, two: float) -> bool:
    return math.isclose(one, two, rel_tol=1e-9, abs_tol=1e-12)


def _short(gold: str) -> str:
    return final_answer(gold) or gold


def _question(task: Task) -> str:
    return " ".join(str(message.get("content") or "") for message in task.messages())
