"""Real runs on a private Ray cluster, and the processes they are made of."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from command import ROOT

from surefoot.runtime.ray.reaper import MARK, SHARED_MEMORY, WEIGHTS, marked

PATIENCE_S = 240.0
"""Nothing here depends on speed: this only ends a test that would wait for ever."""
TINY = (
    "num_tasks=400 tasks_per_step=4 num_generations=4 max_completion_length=8 eval_tasks=16 eval_steps=4 save_steps=2 "
    "preflight_tasks=0 reward_workers=1 threads=1 device=cpu guard.mode=off runtime.engines=2 runtime.workers=2"
).split()
"""A step takes a tenth of a second; what takes time is the cluster."""
_BEGINS = re.compile(r"^(\w[\w ]*) begins as process (\d+)$", re.MULTILINE)


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "NO_COLOR": "1", "RAY_ADDRESS": "", **extra}


@dataclass
class RayRun:
    """`surefoot train` with runtime.kind = "ray", under way."""

    folder: Path
    process: subprocess.Popen[str]
    killed: list[str] = field(default_factory=list)

    def pids(self, name: str) -> list[int]:
        """Every process that was `engine 0` (or so) in this run, oldest first."""
        try:
            log = (self.folder / "logs" / f"{name.replace(' ', '-')}.log").read_text()
        except FileNotFoundError:  # not yet, or taken back with the folder of a start that failed
            return []
        return [int(pid) for _, pid in _BEGINS.findall(log)]

    def pid(self, name: str) -> int:
        """The present one; waits for the first."""
        wait_for(lambda: bool(self.pids(name)), f"{name} of {self.folder}", self)
        return self.pids(name)[-1]

    def is_ready(self, name: str, after: int) -> bool:
        """Whether a successor of process `after` is ready."""
        log = self.folder / "logs" / f"{name.replace(' ', '-')}.log"
        _, _, since = log.read_text().partition(f"begins as process {after}\n")
        return "begins as process" in since and "is ready" in since.rpartition("begins as process")[2]

    def kill(self, name: str, number: int = signal.SIGKILL) -> int:
        """Send a signal to the present process of this name; its pid."""
        pid = self.pid(name)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            self.killed.append(name)
        return pid

    @property
    def metrics(self) -> list[dict[str, float]]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def step(self) -> int:
        return max((int(row["step"]) for row in self.metrics if "loss" in row), default=0)

    def wait_step(self, step: int) -> None:
        wait_for(lambda: self.step >= step, f"step {step}", self)

    def end(self, patience_s: float = PATIENCE_S) -> tuple[int, str]:
        """Wait for it: exit code, and what it said."""
        out, err = self.process.communicate(timeout=patience_s)
        return self.process.returncode, out + err


@contextlib.contextmanager
def ray_run(
    folder: Path, *words: str, env: dict[str, str] | None = None, entry: list[str] | None = None
) -> Iterator[RayRun]:
    """Start a run, `words` before `TINY`; whatever the test does, it is over afterwards."""
    command = entry or [sys.executable, "-m", "surefoot"]
    given = {word.partition("=")[0] for word in words}
    tiny = [word for word in TINY if word.partition("=")[0] not in given]
    process = subprocess.Popen(
        [*command, "train", *tiny, "runtime.kind=ray", f"output_dir={folder}", *words],
        cwd=folder.parent, env=environment(**(env or {})), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield RayRun(folder, process)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_for(holds: Callable[[], bool], what: str, run: RayRun | None = None) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not holds():
        if run is not None and run.process.poll() is not None:
            raise AssertionError(f"waiting for {what}, and the run has ended:\n{''.join(run.process.communicate())}")
        assert time.monotonic() < give_up, f"{what} never came"
        time.sleep(0.02)


def mark_of(pid: int) -> bytes:
    """The mark that a process of a run carries."""
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next(entry for entry in entries if entry.startswith(MARK.encode()))


def left_after(mark: bytes, patience_s: float) -> list[int]:
    """Processes with this mark that are still there after so long; as soon as there are none, none."""
    give_up = time.monotonic() + patience_s
    while (found := marked(mark)) and time.monotonic() < give_up:
        time.sleep(0.05)
    return found


def litter() -> dict[str, set[str]]:
    """Clusters' folders and weights in shared memory that exist now."""
    return {
        "folders": {path.name for path in Path(tempfile.gettempdir()).glob("sf-ray-*")},
        "memory": {name for name in os.listdir(SHARED_MEMORY) if name.startswith(WEIGHTS)},
    }


def litter_of(pids: set[int], since: dict[str, set[str]]) -> list[str]:
    """What these processes left of it."""
    now = litter()
    new = [name for kind, names in now.items() for name in names - since[kind]]
    return [name for name in new if any(str(pid) in re.split(r"\D+", name) for pid in pids)]


REWARD = """
import os, time

def score(prompts, completions, answer, **columns):
    time.sleep(float(os.environ.get("SUREFOOT_SLOW_REWARD", "0")))
    return [float(c.strip() == str(a)) + 0.1 * (len(c) % 3) for c, a in zip(completions, answer)]
"""
"""A reward that takes as long as the environment says, and gives the same numbers whatever it takes."""


def place(folder: Path) -> list[str]:
    """Put the reward file there; the words that name it."""
    (folder / "slow.py").write_text(REWARD)
    return [f"reward_funcs=['{folder / 'slow.py'}:score']", "probe_reward_tasks=0"]


COMPARED = (
    "loss",
    "grad_norm",
    "reward",
    "kl",
    "scored_entropy",
    "eval_accuracy",
    "eval_reward",
    "completions/mean_length",
)


def numbers(rows: list[dict[str, float]]) -> list[dict[str, Any]]:
    """What two runs must agree on bit for bit."""
    return [{name: row[name] for name in ("step", *COMPARED) if name in row} for row in rows]
