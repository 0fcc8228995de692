"""A host without Landlock contains code behind the other walls; a run there says so in its plan, its records and its report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import surefoot
from sandbox_host import needs_sandbox

from surefoot.sandbox.sandbox import available

pytestmark = needs_sandbox
WORDS = [
    "tasks=code.jsonl", "heldout_fraction=0", "eval_steps=0", "tasks_per_step=2", "num_generations=2", "max_completion_length=4",
    "preflight_tasks=0", "reward_workers=1", "max_steps=1", "guard.mode=off",
]  # fmt: skip
WEAKER = "Landlock: this kernel has none, or it is switched off"
GOLD = "def double(x):\n    return 2 * x\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    test = ["assert double(4) == 8"]
    rows = [{"prompt": f"Task {n}: double", "verifier_type": "code", "tests": test, "answer": GOLD} for n in range(8)]
    (tmp_path / "code.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tmp_path


def test_a_weaker_sandbox_is_in_the_plan_the_records_and_the_report(project: Path) -> None:
    ran = surefoot("train", *WORDS, cwd=project, planted="no_landlock")
    assert ran.code in (0, 1), ran.err
    facts = {"usable": True, "missing": [], "weaker": [WEAKER]}
    assert json.loads((ran.run / "environment.json").read_text())["sandbox"] == facts
    assert ran.verdict["sandbox"] == facts
    assert f"the sandbox is weaker on this host: {WEAKER}" in ran.out + ran.err
    assert surefoot("report", "run", cwd=project).code == 0
    assert f"weaker: {WEAKER}" in (ran.run / "report.html").read_text()
    assert (
        f"sandbox   weaker on this host: {WEAKER}"
        in surefoot("train", *WORDS, "--dry-run", cwd=project, run="", planted="no_landlock").out
    )


def test_a_run_that_runs_no_code_was_not_made_to_ask(tmp_path: Path) -> None:
    """`None` is not "all walls stand": nobody looked."""
    from surefoot.run import inputs

    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(__import__("sys").modules, "surefoot.sandbox.sandbox")
        assert inputs.sandbox_facts() is None
    assert inputs.sandbox_facts() == {
        "usable": available().usable, "missing": [], "weaker": list(available().weaker),
    }  # fmt: skip


def test_planted_silence_about_it_is_caught() -> None:
    """Teeth: the page of a run whose record does not hold it shows nothing, so the record is what the first test reads."""
    from types import SimpleNamespace

    from surefoot.report.page import machine

    def page(sandbox: object) -> str:
        return machine(SimpleNamespace(environment={"python": "3.11", "sandbox": sandbox}))  # type: ignore[arg-type]

    assert f"weaker: {WEAKER}" in page({"weaker": [WEAKER]})
    assert all("weaker" not in page(other) for other in (None, {}, {"weaker": []}, {"weaker": 3}, "weaker"))
