"""Memory runs out, for real and by failpoint: the run goes on in smaller pieces, or ends with sizes and code 74."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import surefoot

ROOT = Path(__file__).parents[2]
SMALL = [
    "model=pebble", "tasks=builtin:sums", "max_steps=3", "eval_on_start=false", "eval_tasks=4", "preflight_tasks=0",
    "num_generations=4", "tasks_per_step=2", "max_completion_length=8", "save_rollouts=false",
]  # fmt: skip

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="address space is limited as Linux does it")


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What came of one step in a process that may take 10, 200 or 2,000 MiB more than it has."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/support/memory_kit.py"), "10", "200", "2000"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr[-2000:]
    return dict(json.loads(done.stdout))


# -- memory that really is too small ------------------------------------------------------------------


@linux
def test_a_process_short_of_memory_goes_on_in_smaller_pieces_with_the_same_result(told: dict[str, Any]) -> None:
    """The whole batch needs between 300 and 400 MiB, half of it half as much."""
    short = told["200"]
    assert (short["code"], short["applied"]) == (0, True)
    assert 1 <= short["splits"] <= 3
    assert len(short["notes"]) == short["splits"], "every halving is said aloud"
    assert short["moved"]
    assert short["equal"], "the weights are those of a run that was cut so from the start"


@linux
def test_a_process_with_hardly_any_memory_stops_with_sizes_and_untouched_weights(told: dict[str, Any]) -> None:
    none = told["10"]
    assert (none["code"], none["error"]) == (74, "MemoryLimitError")
    assert "microbatches of 2 rows (262 tokens) after 3 of 3 halvings" in none["text"]
    assert "1601664 parameters on cpu" in none["text"]
    assert none["untouched"]


@linux
def test_a_process_with_enough_memory_splits_nothing(told: dict[str, Any]) -> None:
    """Otherwise the two tests above would show nothing about memory."""
    assert (told["2000"]["code"], told["2000"]["splits"], told["2000"]["notes"]) == (0, 0, [])


# -- through the command ------------------------------------------------------------------------------


def test_a_run_that_runs_out_of_memory_once_finishes_and_its_log_says_so(tmp_path: Path) -> None:
    done = surefoot(
        "train", *SMALL, cwd=tmp_path, env={"SUREFOOT_FAILPOINTS": "learner.after_backward=raise:torch.OutOfMemoryError@2"}
    )  # fmt: skip
    assert "Traceback" not in done.err
    assert done.verdict["executed_steps"] == 3
    splits = [line["memory/splits"] for line in done.metrics if "memory/splits" in line]
    assert splits == [0.0, 1.0, 1.0]
    assert "memory ran out at version 1" in done.out + done.err


@pytest.mark.nightly  # seconds of a whole run; its neighbours show the same every day
@pytest.mark.parametrize(
    ("where", "said"),
    [("learner.before_forward", "after 3 of 3 halvings"), ("learner.after_step", "inside the optimiser's step")],
)
def test_a_run_that_never_fits_ends_with_74_and_sizes(where: str, said: str, tmp_path: Path) -> None:
    done = surefoot("train", *SMALL, cwd=tmp_path, env={"SUREFOOT_FAILPOINTS": f"{where}=raise:torch.OutOfMemoryError"})
    assert done.code == 74
    assert "Traceback" not in done.err
    assert said in done.err
    assert "parameters on cpu" in done.err
    checkpoints = tmp_path / "run" / "checkpoints"
    assert not checkpoints.exists() or not any(checkpoints.glob("step_[1-9]*")), "a step that was not done is not saved"
