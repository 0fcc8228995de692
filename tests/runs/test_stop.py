"""Asked to stop, a run finishes its step, saves, says so and ends with 75."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import ROOT


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_stop_between_two_steps_is_saved(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "surefoot", "train", "output_dir=run", "tasks_per_step=4", "eval_on_start=false"]
    running = subprocess.Popen(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    metrics = tmp_path / "run/metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < 2:
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline, "no step within two minutes"
        time.sleep(0.1)
    running.send_signal(number)
    _, err = running.communicate(timeout=120)
    assert running.returncode == 75, err
    assert "stopped after step" in err
    verdict = json.loads((tmp_path / "run/verdict.json").read_text())
    steps = verdict["executed_steps"]
    assert verdict["status"] == "INCOMPLETE"
    assert 2 <= steps < verdict["planned_steps"]
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(1, steps + 1))
    assert (tmp_path / f"run/checkpoints/step_{steps}/manifest.json").exists()
