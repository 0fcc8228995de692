"""What a start is refused for, and the many honest graders that it is not refused for."""

from __future__ import annotations

import difflib
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from surefoot.records import Task
from surefoot.rewards.probe import IDLE_SHARE, Pay, Scored, measure

SUMS = [Task(f"{a}+{b}", f"{a}+{b}=", {"answer": str(a + b)}) for a, b in [(17, 25), (3, 4), (40, 60), (8, 81)]]
TOWNS = [Task(town, f"Where is {thing}?", {"answer": town}) for town, thing in
         [("Rome", "the Forum"), ("Paris", "the Louvre"), ("Oslo", "the Fram"), ("Cairo", "the Nile")]]  # fmt: skip
LENGTHS = [Task(str(n), f"Write {n} words.", {"answer": str(n)}) for n in (10, 20, 30, 40)]
"""Here the column `answer` says what is wanted, and is itself no answer."""
Grader = Callable[[str, str], float | None]


def pay(grader: Grader, tasks: Sequence[Task] = SUMS, **settings: Any) -> Pay:
    def score(asked: Sequence[Task], answers: Sequence[str]) -> list[Scored]:
        found = []
        for task, said in zip(asked, answers, strict=True):
            try:
                value = grader(said, task.columns["answer"])
                found.append(
                    Scored(None if value is None else float(value), None if value is not None else "abstained")
                )
            except (ValueError, IndexError):
                found.append(Scored(None, "raised"))
        return found

    golds = {task.id: str(task.columns["answer"]) for task in tasks}
    return measure("mine", tasks, golds, score, **({"full_mark": 1.0} | settings))


def numbers(text: str) -> list[str]:
    return re.findall(r"-?\d+", text)


def in_box(text: str) -> str:
    return (re.findall(r"\\boxed\{(.*?)\}", text) or [""])[-1]


def tagged(text: str) -> str:
    return (re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL) or [""])[-1].strip()


def close(said: str, gold: str, tolerance: float) -> bool:
    try:
        return abs(float(said) - float(gold)) <= tolerance * abs(float(gold))
    except ValueError:
        return False


def overlap(said: str, gold: str) -> float:
    mine, theirs = set(said.lower().split()), set(gold.lower().split())
    return 2 * len(mine & theirs) / (len(mine) + len(theirs)) if mine else 0.0


R1 = re.compile(r"^<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>$", re.DOTALL)
HONEST: dict[str, Grader] = {
    "exact": lambda said, gold: said.strip() == gold,
    "whatever case": lambda said, gold: said.strip().casefold() == gold.casefold(),
    "the last number": lambda said, gold: (numbers(said) or [""])[-1] == gold,
    "the first number": lambda said, gold: (numbers(said) or [""])[0] == gold,
    "in a box": lambda said, gold: in_box(said) == gold,
    "between tags": lambda said, gold: tagged(said) == gold,
    "in a form of its own": lambda said, gold: said == f"<<{gold}>>",
    "mentioned, or in a form of its own": lambda said, gold: 1.0 if said == f"<<{gold}>>" else 0.1 * (gold in said),
    "right and thought through": lambda said, gold: 1.0 * (tagged(said) == gold) + 0.5 * bool(R1.match(said)),
    "thought through": lambda said, gold: bool(R1.match(said)),
    "tags alone": lambda said, gold: "<answer>" in said,
    "one of a hundred off": lambda said, gold: close(said, gold, 0.01),
    "tolerant": lambda said, gold: close(said, gold, 0.05),
    "near": lambda said, gold: max(0.0, 1 - abs(float(said) - float(gold)) / 100),
    "token overlap": overlap,
    "similar": lambda said, gold: difflib.SequenceMatcher(None, said, gold).ratio(),
    "partial credit": lambda said, gold: 1.0 if said.strip() == gold else 0.3 * bool(said.strip()),
    "a number at least": lambda said, gold: 1.0 if said.strip() == gold else 0.4 * said.strip().isdigit(),
    "never above 0": lambda said, gold: 0.0 if said.strip() == gold else -1.0,
    "silence is better than a mistake": lambda said, gold: 1.0 if said == gold else -1.0 if said.strip() else 0.0,
    "right, and short": lambda said, gold: 1.0 * (said.strip() == gold) - 0.001 * len(said),
    "about twenty characters": lambda said, gold: -abs(20 - len(said)),
    "the more the better": lambda said, gold: len(said),
    "so many words": lambda said, gold: -abs(len(said.split()) - int(re.sub(r"\D", "", gold) or 7)),
    "no bad words": lambda said, gold: 0.0 if "damn" in said else 1.0,
    "no repetition": lambda said, gold: 1.0 if len(set(said.split())) == len(said.split()) else 0.5,
    "always": lambda said, gold: 1.0,
    "never": lambda said, gold: 0.0,
    "by chance": lambda said, gold: random.random(),
    "fails on what it cannot read": lambda said, gold: float(int(said) == int(gold)),
    "has no opinion of what it cannot read": lambda said, gold: float(said == gold) if said.strip().isdigit() else None,
    "right half of the time": lambda said, gold: 0.5 * (said.strip() == gold),
    "out of ten": lambda said, gold: 10.0 if said.strip() == gold else 1.0 * bool(said.strip()),
    "the wrong one": lambda said, gold: 0.0 if said.strip() == gold else 1.0 * bool(said.strip()),
}
REFUSED: dict[str, tuple[Grader, str]] = {
    "the wrong way round": (lambda said, gold: said.strip() in gold, "empty"),
    "anything for nothing": (lambda said, gold: 1.0 if said.strip() == gold else 0.3, "empty"),
    "a little more than nothing": (lambda said, gold: 1.0 if said.strip() == gold else 0.06, "empty"),
    "silence is right": (lambda said, gold: float(not said.strip() or said.strip() == gold), "empty"),
    "out of ten, two for nothing": (lambda said, gold: 10.0 if said.strip() == gold else 2.0, "empty"),
    "what cannot be read is right": (
        lambda said, gold: (numbers(said) or [gold])[0] == gold if said.strip() else 0.0, "nonsense"
    ),
    "anywhere in the text": (lambda said, gold: gold in said, "guesses"),
    "anywhere in the box": (lambda said, gold: gold in in_box(said), "guesses"),
    "the shorter the better": (lambda said, gold: -float(len(said)), "empty"),
    "says little": (lambda said, gold: max(0.0, 1 - len(said) / 50), "empty"),
}  # fmt: skip


@pytest.mark.parametrize("tasks", [SUMS, TOWNS, LENGTHS], ids=["sums", "towns", "lengths"])
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_grader_is_never_refused(name: str, tasks: list[Task]) -> None:
    assert list(pay(HONEST[name], tasks).refusals()) == []


@pytest.mark.parametrize("name", REFUSED)
def test_a_grader_that_pays_for_nothing_or_for_anything_is_refused_by_name(name: str) -> None:
    grader, check = REFUSED[name]
    found = [refusal.check for refusal in pay(grader).refusals()]
    assert check in found, (name, found)


def test_the_border_is_a_twentieth_of_the_right_answer() -> None:
    for full in (1.0, 4.0):
        for share, refused in ((IDLE_SHARE, False), (IDLE_SHARE * 1.01, True)):
            found = pay(lambda said, gold, full=full, share=share: full if said.strip() == gold else full * share)  # type: ignore[misc]
            assert bool(list(found.refusals())) is refused


def test_one_task_in_four_that_pays_for_nothing_is_told_and_not_refused() -> None:
    """There are tasks whose right answer is to do nothing."""
    assert list(pay(lambda said, gold: said.strip() == gold or (gold == "7" and not said)).refusals()) == []


def test_the_form_that_right_answers_need_is_found_and_what_others_earn_in_it_is_told() -> None:
    found = pay(HONEST["right and thought through"])
    assert (found.way.form, found.mean("right"), found.mean("wrong"), found.mean("empty")) == (
        "<think>\n{}\n</think>\n<answer>\n{}\n</answer>", 1.5, 0.5, 0.0,
    )  # fmt: skip
    assert "a wrong answer earns 33% of what a right one does" in list(found.lines())


def test_where_there_are_tools_calls_are_part_of_the_answer() -> None:
    def after_calls(asked: Sequence[Task], answers: Sequence[str]) -> list[Scored]:
        return [Scored(float(said == task.columns["answer"])) for task, said in zip(asked, answers, strict=True)]

    found = pay(lambda said, gold: 0.0, busy=after_calls)
    assert (found.way.calls, found.mean("right"), found.mean("busy")) == (True, 1.0, 0.0)
    assert found.compares
    assert list(found.refusals()) == []
    paid = pay(lambda said, gold: 0.2, busy=after_calls)
    assert [refusal.check for refusal in paid.refusals()] == ["empty"], "doing nothing is what earns without a call"


def test_guessing_is_certain_only_where_the_right_answer_is_known_to_earn_the_full_mark() -> None:
    found = pay(lambda said, gold: gold in said, full_mark=2.0)
    assert list(found.refusals()) == [], "another function may be waiting for a form that nobody here knows"
    assert found.mean("guesses") == found.mean("right") == 1.0


def test_an_answer_that_is_part_of_another_does_not_hide_the_bug() -> None:
    tasks = [Task(gold, f"{gold}?", {"answer": gold}) for gold in ("4", "42", "420", "17")]
    assert [refusal.check for refusal in pay(lambda said, gold: said.strip() in gold, tasks).refusals()] == ["empty"]


def test_without_another_answer_to_compare_with_nothing_is_certain() -> None:
    same = [Task(str(n), f"{n}?", {"answer": "yes"}) for n in range(4)]
    assert list(pay(lambda said, gold: said.strip() in gold, same).refusals()) == []
    assert list(pay(lambda said, gold: said.strip() in gold, SUMS[:1]).refusals()) == []
