"""Can this reward be trusted? Asked before training, with answers whose worth is known.

Owns       the questions put to a reward, and the verdict on it.
Promises   PASS only when every gold answer earned the full reward, no empty and no adversarial answer did, every score
           was the same twice, and `reward_pay.py` refuses nothing; a missing gold answer or score is never PASS.
Never      runs a reward function itself.

    gold          earns the full reward           else the reward punishes what is right
    empty         earns less                      else silence pays
    adversarial   earns less, each of k           else cheating pays
    repeated      says the same a second time     else it is noise
    pay           next to nothing for nothing     else a run with it is not started

Read next: `reward_pay.py`, what answers earn; `probe_answers.py`, the adversarial ones.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from surefoot.envs.verify.final_answer import final_answer
from surefoot.envs.verify.probe_answers import Trap, code_traps, traps
from surefoot.envs.verify.reward_pay import Pay, Score, Scored, Way, measure
from surefoot.envs.verify.verifier_kinds import gold_of, problem_of
from surefoot.envs.verify.verify_choice import gold_letter
from surefoot.envs.verify.verify_format import broken, read_checks
from surefoot.errors import RewardError
from surefoot.records import Task, Verdict

GOLD, EMPTY = "gold", "empty"
_FORM = ("format", "ifeval")
TASKS_PER_KIND, ADVERSARIAL = 8, 20


__all__ = ["ProbeReport", "Score", "Scored", "probe_reward"]


class Asked(NamedTuple):
    """One answer to one task, and what it stands for."""

    task: Task
    trap: Trap


class Finding(NamedTuple):
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
    findings: list[Finding] = field(default_factory=list)
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

    def twice(self, asked: Sequence[Asked], way: Way) -> tuple[list[Scored], list[Scored]]:
        """Once, and once more backwards: a grader that remembers, or goes by the place among siblings, may differ."""
        return self._once(asked, way), self._once(asked[::-1], way)[::-1]

    def _once(self, asked: Sequence[Asked], way: Way) -> list[Scored]:
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
    chosen = sorted((task for task in tasks if task.id in golds), key=lambda task: _digest(task.id))[:per_kind]
    report.tasks = len(chosen)
    if not chosen:
        return report
    report.pay = measure(kind, chosen, golds, asking.score, asking.busy, asking.full_mark)
    report.findings += [Finding("pay", r.task_id, r.check, r.answer[:80], r.what) for r in report.pay.refusals()]
    asked = [each for task in chosen for each in _questions(kind, task, golds, k, report.pay.way)]
    first, again = asking.twice(asked, report.pay.way)
    earned = [scored.reward for each, scored in zip(asked, first, strict=True) if each.trap.name == GOLD]
    report.full = max((reward for reward in earned if reward is not None), default=None) if full is None else full
    constant = len({scored.reward for scored in first}) == 1
    for each, one, two in zip(asked, first, again, strict=True):
        _compare(report, each, one, two, constant)
    if report.asked["adversarial"] < k * len(chosen):
        says = f"{report.asked['adversarial']} instead of {k * len(chosen)} could be made"
        report.findings.append(Finding("missing", chosen[0].id, "adversarial answers", "", says))
    return report


def _questions(kind: str, task: Task, golds: Mapping[str, str], k: int, way: Way) -> list[Asked]:
    """Everything that is asked about one task, in the form in which right answers earn most."""
    gold = golds[task.id]
    short = final_answer(gold) or gold
    others = [final_answer(other) or other for name, other in golds.items() if name != task.id][:50]
    made = traps(short, _question(task), others, k, _own_traps(kind, task, gold, k), only_own=kind in _FORM)
    given = [Trap(trap.name, way.put(trap.text)) for trap in made]
    return [Asked(task, trap) for trap in (Trap(GOLD, way.say(gold)), Trap(EMPTY, ""), Trap(EMPTY, " \n\t "), *given)]


def _own_traps(kind: str, task: Task, gold: str, k: int) -> list[Trap]:
    if kind in _FORM:  # any text of the right form is right, so each of these has the wrong one
        checks = read_checks(problem_of(task.columns))
        bases = [
            gold,
            _question(task),
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


def _compare(report: KindReport, each: Asked, one: Scored, two: Scored, constant: bool) -> None:
    check = each.trap.name if each.trap.name in (GOLD, EMPTY) else "adversarial"
    report.asked[check] += 1
    report.asked["repeated"] += 1

    def note(what: str, says: str) -> None:
        report.findings.append(Finding(what, each.task.id, each.trap.name, each.trap.text[:80], says))

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


def _question(task: Task) -> str:
    return " ".join(str(message.get("content") or "") for message in task.messages())


def _digest(name: str) -> Any:
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
