"""Run folders that the first edition wrote (`fixtures/first_edition*.tar.gz`, commit b6fc68d) are read, and not guessed at.

`killed` ended by kill -9 in step 4 of 6, `finished` after its 2 steps; both trained the model in `mini`. `early` ended in
step 2 of 4, before its first checkpoint.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from command import ROOT, surefoot


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("first_edition.tar.gz", "first_edition_early.tar.gz"):
        with tarfile.open(ROOT / "tests" / "fixtures" / name) as archive:
            archive.extractall(tmp_path, filter="data")
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("run", "state", "steps"), [("killed", "STOPPED", 3), ("finished", "FINISHED", 2), ("early", "STOPPED", 1)]
)
def test_status_ledger_report_and_check_read_them(place: Path, run: str, state: str, steps: int) -> None:
    status = surefoot("status", run, "--json", cwd=place)
    assert (status.code, json.loads(status.out)["state"]) == (0, state), status.err
    ledger = surefoot("ledger", run, "--json", cwd=place)
    assert ledger.code == 0, ledger.err
    facts = json.loads(ledger.out)
    assert (facts["planned"], facts["trained"], facts["step"]) == (55, 2 * steps, steps)
    assert surefoot("report", run, cwd=place).code == 0
    page = (place / run / "report.html").read_text()
    verdict = "PASS" if state == "FINISHED" else "no verdict yet"
    assert f">{verdict}</div></header>" in page
    checked = surefoot("check", run, f'count(data["train/loss"]) == {steps}', cwd=place)
    assert checked.code == 0, checked.out + checked.err


@pytest.mark.parametrize("run", ["killed", "finished"])
def test_eval_answers_with_their_weights(place: Path, run: str) -> None:
    done = surefoot("eval", run, "--json", cwd=place)
    assert done.code == 0, done.out + done.err
    found = json.loads(done.out)
    assert found["metrics"]["eval_n"] == 4
    assert 0 <= found["metrics"]["eval_accuracy"] <= 1


def test_one_that_died_before_its_first_checkpoint_goes_on_from_its_journal(place: Path) -> None:
    ran = surefoot("train", "--resume", "early", cwd=place, run="")
    assert ran.code in (0, 1), ran.out + ran.err  # four steps are few to learn in
    verdict = json.loads((place / "early" / "verdict.json").read_text())
    assert verdict["executed_steps"] == 4
    ledger = surefoot("ledger", "early", cwd=place)
    assert "2 journaled batches repeated" in ledger.out
    assert "every item is accounted for" in ledger.out


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
