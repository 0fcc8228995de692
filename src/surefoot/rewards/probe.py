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

Read next: `probe_answers.py`, the answers that have fooled graders before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from surefoot.errors import RewardError
from surefoot.records import Task, Verdict
from surefoot.rewards.probe_answers import Trap, are_apart, code_traps, guesses, nonsense, traps
from surefoot.rewards.verifiers.choice import gold_letter
from surefoot.rewards.verifiers.final_answer import final_answer
from surefoot.rewards.verifiers.format import broken, read_checks
from surefoot.rewards.verifiers.multi import gold_of, problem_of
from surefoot.system.files import sha256_bytes

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


# -- Can this reward be trusted? Asked before training, with answers whose worth is known ---------
# Owns       the questions put to a reward, and the verdict on it.
# Promises   PASS only when every gold answer earned the full reward, no empty and no adversarial answer did, every
# score
# was the same twice, and `probe.py` refuses nothing; a missing gold answer or score is never PASS.
# Never      runs a reward function itself.
#
# gold          earns the full reward           else the reward punishes what is right
# empty         earns less                      else silence pays
# adversarial   earns less, each of k           else cheating pays
# repeated      says the same a second time     else it is noise
# pay           next to nothing for nothing     else a run with it is not started


GOLD, EMPTY = "gold", "empty"
_FORM = ("format", "ifeval")
TASKS_PER_KIND, ADVERSARIAL = 8, 20


class ProbeQuestion(NamedTuple):
    """One answer to one task, and what it stands for."""

    task: Task
    trap: Trap


class ProbeFinding(NamedTuple):
    """One thing that is wrong with a reward."""

    check: str
    """gold, empty, adversarial, repeated, pay, or missing."""
    task_id: str
    trap: str
    answer: str
    says: str


@dataclass
class KindReport:
    """What was found about the tasks of one kind."""

    kind: str
    tasks: int = 0
    without_gold: int = 0
    full: float | None = None
    asked: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("gold", "empty", "adversarial", "repeated"), 0)
    )
    findings: list[ProbeFinding] = field(default_factory=list)
    highest: float | None = None
    """The most that an adversarial answer earned."""
    pay: Pay | None = None
    """What right, wrong and empty answers earn; None when there was nobody to ask about."""

    def wrong(self, check: str) -> int:
        """How many answers failed one check."""
        return sum(finding.check == check for finding in self.findings)

    @property
    def verdict(self) -> Verdict:
        """FAIL when something is wrong, INCOMPLETE when something is not known."""
        if any(self.wrong(check) for check in ("pay", *self.asked)):
            return Verdict.FAIL
        nothing = not all(self.asked.values())
        return Verdict.INCOMPLETE if nothing or self.without_gold or self.wrong("missing") else Verdict.PASS


@dataclass(frozen=True)
class ProbeReport:
    """What was found about a reward."""

    kinds: tuple[KindReport, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of any kind; INCOMPLETE when there is none."""
        found = {kind.verdict for kind in self.kinds}
        if Verdict.FAIL in found:
            return Verdict.FAIL
        return Verdict.PASS if found == {Verdict.PASS} else Verdict.INCOMPLETE


def probe_reward(
    score: Score,
    tasks: Sequence[Task],
    *,
    k: int = ADVERSARIAL,
    per_kind: int = TASKS_PER_KIND,
    full: float | None = None,
    kind_of: Callable[[Task], str] = lambda task: str(problem_of(task.columns).get("verifier_type", "reward")),
    busy: Score | None = None,
    full_mark: float | None = None,
) -> ProbeReport:
    """Ask `score` about gold, empty and `k` adversarial answers to a few tasks of each kind, twice.

    Args:
        per_kind: how many tasks of each kind are probed; chosen by hash of their ids.
        full: the full reward; the most that a gold answer of the kind earned, when left out.
        kind_of: how tasks are grouped.
        busy: as `score`, for an answer that comes after the tool calls that its task expects.
        full_mark: what an answer earns that every function gives 1, where that is known.
    """
    if k < 1 or per_kind < 1 or not tasks:
        raise RewardError(f"a probe of {len(tasks)} tasks, {per_kind} per kind, with {k} adversarial answers each",
                          "nothing would be asked, and nothing is no evidence", "ask at least once")  # fmt: skip
    kinds: dict[str, list[Task]] = {}
    for task in tasks:
        kinds.setdefault(kind_of(task), []).append(task)
    asking = _Asking(score, busy, full_mark)
    return ProbeReport(tuple(_probe_kind(asking, kind, kinds[kind], k, per_kind, full) for kind in sorted(kinds)))


class _Asking(NamedTuple):
    """Whom to ask, and what is known of the full reward."""

    score: Score
    busy: Score | None
    full_mark: float | None

    def twice(self, asked: Sequence[ProbeQuestion], way: Way) -> tuple[list[Scored], list[Scored]]:
        """Once, and once more backwards: a grader that remembers, or goes by the place among siblings, may differ."""
        return self._once(asked, way), self._once(asked[::-1], way)[::-1]

    def _once(self, asked: Sequence[ProbeQuestion], way: Way) -> list[Scored]:
        """An empty answer comes without calls, whatever right ones come with."""
        idle = [each.trap.name == EMPTY and way.calls for each in asked]
        found: dict[int, Scored] = {}
        for score, places in ((way.score, [i for i, no in enumerate(idle) if not no]),
                              (self.score, [i for i, no in enumerate(idle) if no])):  # fmt: skip
            if places:
                given = score([asked[i].task for i in places], [asked[i].trap.text for i in places])
                found |= dict(zip(places, given, strict=True))
        return [found[i] for i in range(len(asked))]


def _probe_kind(
    asking: _Asking, kind: str, tasks: Sequence[Task], k: int, per_kind: int, full: float | None
) -> KindReport:
    golds = {task.id: gold for task in tasks if (gold := gold_answer(kind, task)) is not None}
    report = KindReport(kind, without_gold=len(tasks) - len(golds))
    chosen = sorted(
        (task for task in tasks if task.id in golds), key=lambda task: sha256_bytes(task.id, errors="surrogatepass")
    )[:per_kind]
    report.tasks = len(chosen)
    if not chosen:
        return report
    report.pay = measure(kind, chosen, golds, asking.score, asking.busy, asking.full_mark)
    report.findings += [ProbeFinding("pay", r.task_id, r.check, r.answer[:80], r.what) for r in report.pay.refusals()]
    asked = [each for task in chosen for each in _questions(kind, task, golds, k, report.pay.way)]
    first, again = asking.twice(asked, report.pay.way)
    earned = [scored.reward for each, scored in zip(asked, first, strict=True) if each.trap.name == GOLD]
    report.full = max((reward for reward in earned if reward is not None), default=None) if full is None else full
    constant = len({scored.reward for scored in first}) == 1
    for each, one, two in zip(asked, first, again, strict=True):
        _compare(report, each, one, two, constant)
    if report.asked["adversarial"] < k * len(chosen):
        says = f"{report.asked['adversarial']} instead of {k * len(chosen)} could be made"
        report.findings.append(ProbeFinding("missing", chosen[0].id, "adversarial answers", "", says))
    return report


def _questions(kind: str, task: Task, golds: Mapping[str, str], k: int, way: Way) -> list[ProbeQuestion]:
    """Everything that is asked about one task, in the form in which right answers earn most."""
    gold = golds[task.id]
    short = final_answer(gold) or gold
    others = [final_answer(other) or other for name, other in golds.items() if name != task.id][:50]
    made = traps(short, _prompt_text(task), others, k, _own_traps(kind, task, gold, k), only_own=kind in _FORM)
    given = [Trap(trap.name, way.put(trap.text)) for trap in made]
    return [
        ProbeQuestion(task, trap)
        for trap in (Trap(GOLD, way.say(gold)), Trap(EMPTY, ""), Trap(EMPTY, " \n\t "), *given)
    ]


def _own_traps(kind: str, task: Task, gold: str, k: int) -> list[Trap]:
    if kind in _FORM:  # any text of the right form is right, so each of these has the wrong one
        checks = read_checks(problem_of(task.columns))
        bases = [
            gold,
            _prompt_text(task),
            *(f"{gold} {word}" for word in "and so it goes on and on until the very end".split()),
        ]
        bases += [f"Variant {number}: {gold}" for number in range(k)]
        return [Trap("the wrong form", text) for text in broken(checks, bases)]
    return code_traps(gold) if kind == "code" else []


def gold_answer(kind: str, task: Task) -> str | None:
    """A completion that deserves the full reward; None when the task has none."""
    gold = gold_of(task.columns)
    if gold is None or isinstance(gold, Mapping | list | tuple):
        return None
    if kind == "choice":
        choices = problem_of(task.columns).get("choices")
        return gold_letter(gold, [" ".join(str(each).casefold().split()).rstrip(".") for each in choices or ()])
    return str(gold)


def _compare(report: KindReport, each: ProbeQuestion, one: Scored, two: Scored, constant: bool) -> None:
    check = each.trap.name if each.trap.name in (GOLD, EMPTY) else "adversarial"
    report.asked[check] += 1
    report.asked["repeated"] += 1

    def note(what: str, says: str) -> None:
        report.findings.append(ProbeFinding(what, each.task.id, each.trap.name, each.trap.text[:80], says))

    if (one.reward, one.reason) != (two.reward, two.reason):
        note("repeated", f"earned {_said(one)}, then {_said(two)}: the reward is not a function of the answer")
    if check == "adversarial" and one.reward is not None:
        report.highest = one.reward if report.highest is None else max(report.highest, one.reward)
    is_full = one.reward is not None and report.full is not None and _reaches(one.reward, report.full)
    if constant and one.reward is not None:  # whether that is called nothing or full is a matter of taste
        if check == GOLD:
            note(GOLD, f"earned {_said(one)}, as every other answer did: nothing is told apart")
    elif check == GOLD and not is_full:
        note(GOLD, f"earned {_said(one)}, full is {_number(report.full)}")
    elif check != GOLD and one.reward is None:
        note("missing", f"got no score ({one.reason})")
    elif check != GOLD and is_full:
        hint = "saying nothing pays" if check == EMPTY else each.trap.hint
        note(check, f"earned {_said(one)}, the full reward: {hint}")


def _reaches(reward: float, full: float) -> bool:
    return reward >= full or math.isclose(reward, full, rel_tol=1e-9, abs_tol=1e-12)


def _said(scored: Scored) -> str:
    return f"no score ({scored.reason})" if scored.reward is None else _number(scored.reward)


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:g}"


def _prompt_text(task: Task) -> str:
    return " ".join(str(message.get("content") or "") for message in task.messages())


__all__ = ["ProbeReport", "Score", "Scored", "probe_reward"]
