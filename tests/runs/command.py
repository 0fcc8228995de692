"""Runs the real command in a process of its own, as a user would, and reads what it left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SHORT = [
    "max_steps=100",
    "eval_steps=100",
    "eval_tasks=400",
    "lr_scheduler_type=constant",
    "target_metric=eval_accuracy",
    "target_value=0.7",
]
"""The shorter form of the built-in run: fewer steps, and a target that only learning reaches."""


@dataclass(frozen=True)
class Ran:
    """What a finished command said and wrote."""

    code: int
    out: str
    err: str
    run: Path

    @property
    def verdict(self) -> dict[str, Any]:
        return dict(json.loads((self.run / "verdict.json").read_text()))

    @property
    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]


def surefoot(
    *words: str, cwd: Path, planted: str | None = None, run: str = "run", env: dict[str, str] | None = None
) -> Ran:
    """`surefoot WORDS...` in `cwd`; with `planted`, the same command with that bug put in first."""
    entry = (
        [sys.executable, "-m", "surefoot"]
        if planted is None
        else [sys.executable, str(ROOT / "tests/runs/planted.py"), planted]
    )
    where = [f"output_dir={run}"] if words and words[0] == "train" and run else []
    if where and not any(word.startswith(("threads=", "device=")) for word in words):
        where.append("threads=1")  # two of these run side by side
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        "NO_COLOR": "1",
        **(env or {}),
    }
    done = subprocess.run(
        [*entry, *words, *where], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    return Ran(done.returncode, done.stdout, done.stderr, cwd / run)
