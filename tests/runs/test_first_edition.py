"""Run folders that the first edition wrote (`fixtures/first_edition.tar.gz`, commit b6fc68d) are read, and not guessed at.

`killed` ended by kill -9 in step 4 of 6, `finished` after its 2 steps; both trained the model in `mini`.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from command import ROOT, surefoot


@pytest.fixture
def place(tmp_path: Path) -> Path:
    with tarfile.open(ROOT / "tests" / "fixtures" / "first_edition.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_status_ledger_report_and_check_read_them(place: Path) -> None:
    assert "STOPPED" in surefoot("status", "killed", cwd=place).out
    assert "FINISHED" in surefoot("status", "finished", cwd=place).out
    ledger = surefoot("ledger", "killed", cwd=place)
    assert (ledger.code, "planned" in ledger.out) == (0, True), ledger.err
    assert surefoot("report", "finished", cwd=place).code == 0
    assert "<html" in (place / "finished" / "report.html").read_text()
    checked = surefoot("check", "finished", 'count(data["train/loss"]) == 2', cwd=place)
    assert checked.code == 0, checked.out + checked.err


def test_their_weights_are_evaluated_and_trained_on(place: Path) -> None:
    model = str(place / "finished" / "checkpoints" / "step_2")
    words = ["tasks_per_step=2", "num_generations=2", "max_completion_length=4", "num_tasks=60", "eval_tasks=4"]
    ran = surefoot("train", f"model={model}", "max_steps=1", *words, "preflight_tasks=0", cwd=place)
    assert ran.code in (0, 1), ran.err  # nothing is to be learned in one step; it runs
    assert ran.verdict["executed_steps"] == 1


@pytest.mark.parametrize(("run", "words"), [("killed", []), ("finished", ["max_steps=4"])])
def test_going_on_is_refused_with_both_formats_and_changes_nothing_of_theirs(
    place: Path, run: str, words: list[str]
) -> None:
    before = contents(place / run)
    ran = surefoot("train", "--resume", run, *words, cwd=place, run="")
    assert ran.code == 3, ran.out + ran.err
    assert "is of format 1, and this surefoot goes on from format 2" in ran.err
    assert "model = " in ran.err
    assert contents(place / run) == before


def test_the_fixture_is_what_it_says(place: Path) -> None:
    state = json.loads((place / "killed" / "checkpoints" / "step_2" / "training" / "state.json").read_text())
    assert (state["schema"], "changed_entries" in state) == (1, False)
