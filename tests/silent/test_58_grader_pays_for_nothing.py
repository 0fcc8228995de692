"""Silent failure 58: a grader that cannot read the reference answer, or looks for it anywhere, pays for everything."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from surefoot.records import Task, Verdict
from surefoot.rewards.probe import Scored, probe_reward

TASKS = [Task(id=f"t{n}", prompt=f"{n}*7=?", columns={"answer": str(7 * n)}) for n in range(11, 19)]


def probe(grade: Callable[[str, str], float]) -> tuple[Verdict, set[str]]:
    def score(tasks: Sequence[Task], said: Sequence[str]) -> list[Scored]:
        return [Scored(grade(text, str(task.columns["answer"]))) for task, text in zip(tasks, said, strict=True)]

    report = probe_reward(score, TASKS)
    return report.verdict, {finding.check for kind in report.kinds for finding in kind.findings}


def unreadable(text: str, gold: str) -> float:
    try:
        return float(float(text) == float(gold + "?"))
    except ValueError:
        return 1.0


def test_a_grader_that_compares_is_trusted() -> None:
    assert probe(lambda text, gold: float(text.strip() == gold)) == (Verdict.PASS, set())


@pytest.mark.parametrize(
    ("grade", "check"),
    [
        pytest.param(unreadable, "gold", id="what cannot be read is right"),
        pytest.param(lambda text, gold: float(text in gold), "empty", id="the wrong way round"),
        pytest.param(lambda text, gold: float(gold in text), "adversarial", id="anywhere in the text"),
        pytest.param(lambda text, gold: float(text.strip() == gold + "."), "gold", id="stricter than the task"),
    ],
)
def test_planted_grader_is_caught_before_training(grade: Callable[[str, str], float], check: str) -> None:
    verdict, findings = probe(grade)
    assert verdict is Verdict.FAIL
    assert check in findings
