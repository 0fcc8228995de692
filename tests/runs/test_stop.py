"""Asked to stop, a run leaves the step it has no time for, saves, says so and ends with 75; resumed, it goes on.

`tests/faults/test_stop_signals.py` asks in every phase and compares to the last bit; this is one stop as a user sees it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from command import ROOT, surefoot

WORDS = [
    "train",
    "output_dir=run",
    "tasks_per_step=4",
    "eval_on_start=false",
    "eval_tasks=8",
    "max_steps=6",
    "num_tasks=400",
]


def test_a_stopped_run_is_saved_and_goes_on(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "SUREFOOT_FAILPOINTS": "loop.before_log=sleep:2@3"}
    running = subprocess.Popen(
        [sys.executable, "-m", "surefoot", *WORDS], cwd=tmp_path, env=env, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    metrics = tmp_path / "run/metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < 2:
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline, "no step within two minutes"
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=120)
    assert running.returncode == 75, err
    assert "stopped after step" in err
    assert "surefoot train --resume" in err
    verdict = json.loads((tmp_path / "run/verdict.json").read_text())
    steps = verdict["executed_steps"]
    assert verdict["status"] == "INCOMPLETE"
    assert 2 <= steps < verdict["planned_steps"] == 6
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(1, steps + 1))
    assert (tmp_path / f"run/checkpoints/step_{steps}/manifest.json").exists()
    went_on = surefoot("train", "--resume", "run", cwd=tmp_path, run="")
    assert went_on.code in (0, 1), went_on.err  # six steps do not reach the built-in target
    assert json.loads((tmp_path / "run/verdict.json").read_text())["executed_steps"] == 6
