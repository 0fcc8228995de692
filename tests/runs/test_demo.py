"""`surefoot demo hack --quick`, through the real command: the collapse, the stop, and no claim without the guard."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command import ROOT, Ran, surefoot

pytestmark = pytest.mark.slow
ON_STAGE = (
    pytest.mark.nightly
)  # more than a minute of two cores; tests/runs/test_guard.py shows the same, small, every day
CALL_SITE = "    run.last_eval |= update_guard(run)\n"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, Path]:
    home = tmp_path_factory.mktemp("on stage")
    return surefoot("demo", "hack", "--quick", "--out", "both runs", cwd=home), home / "both runs"


@ON_STAGE
def test_both_halves_go_as_described(shown: tuple[Ran, Path]) -> None:
    ran, _ = shown
    assert ran.code == 0, ran.out + ran.err
    assert ran.err == ""
    answers = [line for line in ran.out.splitlines() if line.startswith(("yes", "NO"))]
    assert len(answers) == 7
    assert all(line.startswith("yes") for line in answers)
    assert "PASS  both runs are in" in ran.out


@ON_STAGE
def test_the_numbers_on_the_screen_are_those_of_the_run_folders(shown: tuple[Ran, Path]) -> None:
    ran, folder = shown
    unguarded, guarded = Ran(0, "", "", folder / "unguarded"), Ran(79, "", "", folder / "guarded")
    heldout = [row["eval_accuracy"] for row in unguarded.metrics if "eval_accuracy" in row]
    assert f"{heldout[0]:.2f} -> {max(heldout):.2f} -> {heldout[-1]:.2f}" in ran.out
    assert heldout[-1] < 0.5 * max(heldout)
    assert f"stopped at step {guarded.verdict['guard']['step']} of" in ran.out
    assert guarded.verdict["guard"]["reason"] in ran.out
    assert guarded.verdict["executed_steps"] < unguarded.verdict["executed_steps"]
    assert (folder / "guarded" / guarded.verdict["best"]["checkpoint"] / "manifest.json").is_file()


@ON_STAGE
def test_progress_is_visible_while_it_runs(shown: tuple[Ran, Path]) -> None:
    ran, folder = shown
    evaluations = [row for row in Ran(0, "", "", folder / "unguarded").metrics if "eval_accuracy" in row]
    first_half = ran.out.partition("[2/2]")[0]
    assert len([line for line in first_half.splitlines() if line.strip().startswith("step ")]) == len(evaluations)


@ON_STAGE
def test_a_second_demo_does_not_touch_the_first(shown: tuple[Ran, Path]) -> None:
    _, folder = shown
    again = surefoot("demo", "hack", "--quick", "--out", str(folder), cwd=folder.parent)
    assert again.code == 3
    assert "is there already" in again.err


@pytest.mark.nightly  # both halves again: a minute of two cores; tests/runs/test_guard.py plants it small every day
def test_planted_missing_call_site_makes_the_demo_exit_1(tmp_path: Path) -> None:
    """Teeth: in a copy of the package without the one line that tells the guard, the story is not true any more."""
    copy = tmp_path / "src"
    shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("__pycache__"))
    loop = copy / "surefoot/evaluation.py"
    text = loop.read_text(encoding="utf-8")
    assert text.count(CALL_SITE) == 1, "the call site has moved: this test plants nothing"
    loop.write_text(text.replace(CALL_SITE, ""), encoding="utf-8")
    ran = surefoot("demo", "hack", "--quick", "--out", "planted", cwd=tmp_path, env={"PYTHONPATH": str(copy)})
    assert ran.code == 1, ran.out + ran.err
    assert "NO   the guard stopped the same run" in ran.out
    assert "never stopped" in ran.out
    assert "FAIL  both runs are in" in ran.out


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)]
)  # the same road; tests/faults/test_stop_signals.py sends both to every phase of a run
def test_a_stop_request_ends_the_run_too_and_exits_75(tmp_path: Path, number: signal.Signals) -> None:
    paths = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        [sys.executable, "-m", "surefoot", "demo", "hack", "--quick", "--out", "stopped"], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as demo:  # fmt: skip
        assert demo.stdout is not None
        for line in demo.stdout:
            if line.strip().startswith("step "):  # the first evaluation: the run is under way
                break
        demo.send_signal(number)
        _, errors = demo.communicate(timeout=300)
    assert demo.returncode == 75, errors
    assert errors.startswith("StoppedError")
    verdict = Ran(75, "", "", tmp_path / "stopped/unguarded").verdict
    assert verdict["status"] == "INCOMPLETE", "the run itself was asked, and had time to say so"
    assert not (tmp_path / "stopped/guarded").exists()
