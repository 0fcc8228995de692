"""Our own nightly suite, shortened: a real training of the built-in run through `surefoot suite run`, judged by checks.

It runs in a repository of its own that holds a copy of our code, so the tree under test stays as it is.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command import ROOT, Ran, surefoot

RECIPE = "grpo-pebble-1n0g-local"
SHORT = ["tasks_per_step=4", "eval_tasks=8", "eval_on_start=false"]
CHECKS = {
    'last(data["eval/accuracy"]) >= 0.85': 'last(data["eval/accuracy"]) >= 0',
    'mean(data["train/reward"], -20) - mean(data["train/reward"], 1, 21) > 0.2': 'min(data["train/reward"]) >= 0',
    'mean(data["train/scored_entropy"], 1, 21) - mean(data["train/scored_entropy"], -20) > 0.2': 'min(data["train/scored_entropy"]) > 0',
    'count(data["train/loss"]) == 200': 'count(data["train/loss"]) == 3',
}
"""Checks of the full length, and what three steps can show instead."""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("nightly") / "repository"
    for code in ("src", "harness/src"):
        shutil.copytree(ROOT / code, root / code, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "suites", root / "suites")
    (root / ".gitignore").write_text("__pycache__/\n")
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-q", "-m", "copy"]):
        subprocess.run(["git", *words], cwd=root, check=True, capture_output=True)
    return root


def run(root: Path, *words: str, relax: dict[str, str]) -> Ran:
    changes = [word for old, new in relax.items() for word in ("--relax", f"{old}=>{new}")]
    return surefoot(
        "suite", "run", "nightly", "--recipe", RECIPE, "--set", "max_steps=3", *changes, *words, "--", *SHORT, cwd=root
    )


def verdict(root: Path) -> dict[str, Any]:
    return dict(json.loads((root / f"runs/suites/nightly/{RECIPE}/verdict.json").read_text()))


@pytest.fixture(scope="module")
def trained(copy: Path) -> Ran:
    """Both tests below look at one training, on whichever of their days."""
    return run(copy, relax=CHECKS)


def test_a_short_form_of_the_built_in_run_trains_and_passes_its_checks(copy: Path, trained: Ran) -> None:
    assert trained.code == 0, trained.out + trained.err
    record = verdict(copy)
    assert (record["status"], record["steps_reached"]) == ("PASS", 3)
    assert [row["status"] for row in record["checks"]] == ["PASS"] * 7
    assert record["extra_args"] == SHORT
    trainer = json.loads((copy / f"runs/suites/nightly/{RECIPE}/run/verdict.json").read_text())
    assert trainer["executed_steps"] == 3


@pytest.mark.usefixtures("trained")
def test_the_same_numbers_do_not_pass_the_checks_of_the_full_run(copy: Path) -> None:
    """Three steps reach no accuracy of 0.85: a suite that passed them would pass anything. Nothing trains again."""
    before = (copy / f"runs/suites/nightly/{RECIPE}/run/metrics.jsonl").stat().st_mtime_ns
    ran = run(copy, relax={})
    assert ran.code == 1, ran.out + ran.err
    failed = [row["check"] for row in verdict(copy)["checks"] if row["status"] == "FAIL"]
    assert 'last(data["eval/accuracy"]) >= 0.85' in failed
    assert (copy / f"runs/suites/nightly/{RECIPE}/run/metrics.jsonl").stat().st_mtime_ns == before


def test_our_suite_is_listed_and_consistent(copy: Path) -> None:
    assert RECIPE in surefoot("suite", "list", cwd=copy).out
    checked = surefoot("suite", "check", "nightly", cwd=copy)
    assert checked.code == 0, checked.out
