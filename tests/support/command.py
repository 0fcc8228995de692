"""Runs the real command in a process of its own, and reads what it left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import warm_command

ROOT = Path(__file__).parents[2]
SHORT = [
    "max_steps=60",
    "eval_steps=60",
    "eval_tasks=400",
    "lr_scheduler_type=constant",
    "target_metric=eval_accuracy",
    "target_value=0.6",
]
"""The shorter form of the built-in run: fewer steps, and a target that only learning reaches.

The warm start solves 0.26 of 400 tasks; three seeds came to 0.735, 0.738 and 0.748, with a standard error of 0.02.
"""


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
    *words: str,
    cwd: Path,
    planted: str | None = None,
    run: str = "run",
    env: dict[str, str] | None = None,
    fresh: bool = False,
) -> Ran:
    """`surefoot WORDS...` in `cwd`; with `planted`, the same command with that bug put in first.

    It runs in a fork of a process that has the libraries loaded (`warm_command.py`). `fresh` asks for an interpreter of
    its own, for tests of how the command starts; an environment that only a fresh one would read gets one unasked.
    """
    where = [f"output_dir={run}"] if words and words[0] == "train" and run else []
    if where and not any(word.startswith(("threads=", "device=")) for word in words):
        where.append("threads=1")  # two of these run side by side
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        "NO_COLOR": "1",
        **(env or {}),
    }
    fresh |= any(
        word.startswith("runtime.kind=") and word != "runtime.kind=local" for word in words
    )  # its own start-up
    warm = None if fresh else warm_command.shared()
    if warm and warm.serves(environment, env or ()):
        return Ran(*warm.run([*words, *where], cwd, environment, planted=planted), cwd / run)
    entry = [sys.executable, "-m", "surefoot"]
    if planted is not None:
        entry = [sys.executable, str(ROOT / "tests/support/planted.py"), planted]
    done = subprocess.run(
        [*entry, *words, *where], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    return Ran(done.returncode, done.stdout, done.stderr, cwd / run)


def typed(*words: str) -> list[str]:
    """What to start for `surefoot WORDS...` as a process that can be sent signals: it stands for the fork."""
    return [sys.executable, "-I", "-S", warm_command.__file__, "surefoot", warm_command.shared().address, *words]


def python(script: Path, cwd: Path) -> Ran:
    """`python SCRIPT` in `cwd`, for a script that imports surefoot: a fork that has it loaded."""
    warm = warm_command.shared()
    return Ran(*warm.run([str(script)], cwd, warm.env, what="python"), cwd / "run")


def ledger(ran: Ran) -> dict[str, Any]:
    """What became of every task of a run, by the command."""
    said = surefoot("ledger", str(ran.run), "--json", cwd=ran.run.parent)
    assert said.code == 0, said.err
    return dict(json.loads(said.out))
