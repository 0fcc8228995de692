"""The probe tells a sound reward from a broken one, and never passes what it could not see."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from surefoot.errors import RewardError
from surefoot.records import Task, Verdict
from surefoot.rewards import probe
from surefoot.rewards.probe import ProbeReport, Scored, probe_reward
from surefoot.rewards.probe_answers import code_traps, traps
from surefoot.rewards.verifiers.math import read_number, same_number
from surefoot.rewards.verifiers.multi import MultiVerifier

SUMS = [Task(f"{a}+{b}", f"{a}+{b}=", {"answer": str(a + b)}) for a, b in [(17, 25), (3, 4), (40, 60), (0, 0), (8, 81)]]
TOWNS = [
    Task(town, f"Where is the {thing}?", {"answer": town}) for town, thing in [("Rome", "Forum"), ("Paris", "Louvre")]
]


def by(grader: Callable[[str, str], Any]) -> probe.Score:
    def score(tasks: Sequence[Task], answers: Sequence[str]) -> list[Scored]:
        return [Scored(float(grader(said, task.columns["answer"]))) for task, said in zip(tasks, answers, strict=True)]

    return score


def tolerant(said: str, gold: str) -> bool:
    try:
        return abs(float(said) - float(gold)) < 1.5
    except ValueError:
        return False


def forgiving(said: str, gold: str) -> bool:
    try:
        return float(said) == float(gold)
    except ValueError:
        return True


SOUND: dict[str, Callable[[str, str], Any]] = {
    "exact": lambda said, gold: said.strip() == gold,
    "whatever case": lambda said, gold: said.strip().casefold() == gold.casefold(),
    "partial credit": lambda said, gold: 1.0 if said.strip() == gold else 0.1 * bool(said.strip()),
    "negative": lambda said, gold: 0.0 if said.strip() == gold else -1.0,
}
BROKEN: dict[str, tuple[Callable[[str, str], Any], str]] = {
    "substring": (lambda said, gold: gold in said, "adversarial"),
    "reversed substring": (lambda said, gold: said in gold, "empty"),
    "prefix": (lambda said, gold: said.startswith(gold), "adversarial"),
    "suffix": (lambda said, gold: said.endswith(gold), "adversarial"),
    "only one side in small letters": (lambda said, gold: said.lower() == gold.upper() + "!", "gold"),
    "always": (lambda said, gold: 1, "gold"),
    "never": (lambda said, gold: 0, "gold"),
    "by chance": (lambda said, gold: random.random(), "repeated"),
    "wrong sign kept": (lambda said, gold: said.lstrip("-") == gold, "adversarial"),
    "anything but silence": (lambda said, gold: bool(said.strip()), "adversarial"),
}


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("tasks", [SUMS, TOWNS], ids=["sums", "towns"])
def test_a_sound_reward_passes(name: str, tasks: list[Task]) -> None:
    report = probe_reward(by(SOUND[name]), tasks)
    assert report.verdict is Verdict.PASS, report
    assert report.kinds[0].asked["adversarial"] == 20 * len(tasks)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_reward_fails_by_the_name_of_what_is_wrong(name: str) -> None:
    grader, check = BROKEN[name]
    report = probe_reward(by(grader), SUMS)
    assert report.verdict is Verdict.FAIL
    assert report.kinds[0].wrong(check) > 0, report


@pytest.mark.parametrize(
    ("grader", "trap"),
    [(tolerant, "off by one"), (forgiving, "not the answer"), (BROKEN["prefix"][0], "longer on the right"),
     (BROKEN["suffix"][0], "longer on the left"), (lambda said, gold: eval(said) == float(gold), "code that computes it")],
)  # fmt: skip
def test_the_trap_that_was_fallen_into_is_named(grader: Callable[[str, str], Any], trap: str) -> None:
    def careful(said: str, gold: str) -> Any:
        try:
            return grader(said, gold)
        except Exception:
            return 0

    found = {
        finding.trap
        for finding in probe_reward(by(careful), SUMS[:3]).kinds[0].findings
        if finding.check == "adversarial"
    }
    assert trap in found


def test_without_gold_answers_it_is_incomplete() -> None:
    bare = [Task("a", "?", {"answer": None}), Task("b", "?", {})]
    report = probe_reward(by(SOUND["exact"]), bare)
    assert report.verdict is Verdict.INCOMPLETE
    assert report.kinds[0].without_gold == 2
    assert probe_reward(by(SOUND["exact"]), [*SUMS, *bare]).verdict is Verdict.INCOMPLETE
    assert ProbeReport(()).verdict is Verdict.INCOMPLETE


def test_an_answer_without_a_score_is_incomplete_and_gold_without_one_fails() -> None:
    def silent_on(what: str) -> probe.Score:
        def score(tasks: Sequence[Task], answers: Sequence[str]) -> list[Scored]:
            sound = by(SOUND["exact"])(tasks, answers)
            return [Scored(None, "raised") if said == what else each for said, each in zip(answers, sound, strict=True)]

        return score

    assert probe_reward(silent_on("nan"), SUMS).verdict is Verdict.INCOMPLETE
    assert probe_reward(silent_on("42"), SUMS).verdict is Verdict.FAIL


def test_gold_must_earn_the_full_reward_that_was_named() -> None:
    assert probe_reward(by(lambda said, gold: 0.5 * (said == gold)), SUMS).verdict is Verdict.PASS
    assert probe_reward(by(lambda said, gold: 0.5 * (said == gold)), SUMS, full=1.0).verdict is Verdict.FAIL


def test_asking_nothing_is_refused() -> None:
    for tasks, k in ((SUMS, 0), ([], 20)):
        with pytest.raises(RewardError, match="nothing"):
            probe_reward(by(SOUND["exact"]), tasks, k=k)


PROBLEMS: list[dict[str, Any]] = [
    {"verifier_type": "math", "answer": "1/2"}, {"verifier_type": "math", "answer": r"\{1, 2\}"},
    {"verifier_type": "math", "answer": "(x+1)^2"}, {"verifier_type": "math", "answer": "0"},
    {"verifier_type": "math", "answer": "-7"}, {"verifier_type": "gsm8k", "answer": "so #### 1,200"},
    {"verifier_type": "exact", "answer": "None"}, {"verifier_type": "exact", "answer": "x = x"},
    {"verifier_type": "choice", "answer": 2, "choices": ["a", "b", "c"]}, {"verifier_type": "choice", "answer": "A"},
    {"verifier_type": "format", "answer": "A good day. A fine night.",
     "checks": [{"check": "min_sentences", "value": 2}, {"check": "include", "value": "good"}]},
    {"verifier_type": "ifeval", "answer": "yes", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
]  # fmt: skip


def test_our_own_verifiers_pass_on_every_kind() -> None:
    verifier = MultiVerifier(isolate=False)

    def score(tasks: Sequence[Task], answers: Sequence[str]) -> list[Scored]:
        judged = verifier.verify_batch([task.columns for task in tasks], answers)
        return [Scored(each.score, each.reason) for each in judged]

    tasks = [Task(str(row), f"Question {row}?", problem) for row, problem in enumerate(PROBLEMS)]
    report = probe_reward(score, tasks)
    assert report.verdict is Verdict.PASS, [kind.findings for kind in report.kinds]
    assert sum(kind.asked["adversarial"] for kind in report.kinds) == 20 * len(PROBLEMS)


def test_traps_are_many_different_wrong_and_the_same_every_time() -> None:
    for gold in ("42", "0", "-1", "0.5", "1/2", "50%", "Paris", "C", "nan", "True", "\\boxed{}", "é"):
        made = traps(gold, "Question?", ["7", gold], 20)
        number = read_number(gold)
        assert len({trap.text for trap in made}) == 20
        assert made == traps(gold, "Question?", ["7", gold], 20)
        for trap in made:
            said = read_number(trap.text)
            assert trap.text.strip() != gold
            assert number is None or said is None or not same_number(number, said), trap
    assert len(code_traps("def add(a, b): return a + b")) >= 14
