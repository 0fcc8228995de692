"""Runs on made-up weights of a real model's shape: killed once, gone on with, and looked at."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmark_scripts import benchmark
from command import Ran, surefoot

MODES = {"full": ("learning_rate=1e-4",), "lora": ("learning_rate=1e-2", "lora.rank=16")}
"""Rates at which four steps move a made-up model visibly."""
STEPS, SAVED = 4, 2


def make_world(folder: Path, shape: str) -> Path:
    """A model of that shape, tasks, and a reward that differs from answer to answer."""
    folder.mkdir()
    benchmark("keeping").write_world(folder, shape=shape, tasks=64)
    return folder


def run_words(world: Path, device: str, dtype: str, *more: str) -> list[str]:
    """The command on a world: four steps, saved after two and at the end."""
    return [
        f"model={world / 'model'}", f"tasks={world / 'tasks.jsonl'}", f'reward_funcs=["{world / "reward.py"}:grade"]',
        f"device={device}", f"dtype={dtype}", "threads=1", "tasks_per_step=2", "num_generations=8",
        f"max_steps={STEPS}", f"save_steps={SAVED}", "eval_steps=0", "eval_on_start=false", "save_best=false",
        "preflight_tasks=0", "heldout_fraction=0", "guard.mode=off", *more,
    ]  # fmt: skip


def kill_and_resume(words: Sequence[str], cwd: Path, *, fresh: bool) -> tuple[Ran, Ran]:
    """The command, killed in its last step, and again with what it had saved."""
    failpoint = {"SUREFOOT_FAILPOINTS": f"learner.after_step=kill@{STEPS}"}
    killed = surefoot("train", *words, cwd=cwd, env=failpoint, fresh=fresh)
    assert killed.code < 0, f"it was to be killed, and ended with {killed.code}: {killed.err[-2000:]}"
    rows = steps_of(killed)
    resumed = surefoot("train", "--resume", "run", cwd=cwd, run="", fresh=fresh)
    assert resumed.code == 0, resumed.out[-2000:] + resumed.err[-2000:]
    assert [row["step"] for row in rows] == list(range(1, STEPS))
    return killed, replace(resumed, run=killed.run)


def steps_of(ran: Ran) -> list[dict[str, float]]:
    """The rows of training steps, each step as it was done last."""
    return list({row["step"]: row for row in ran.metrics if "reward" in row}.values())


def check_rows(rows: Sequence[dict[str, float]], parity: float) -> None:
    """Parity, each sync proved, finite numbers, weights that moved: what every mode promises."""
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    gaps = [row["sampling/sampling_logp_difference/max"] for row in rows]
    assert gaps[0] < parity, f"sampler and learner disagree at step 1 by {gaps[0]}"
    assert max(gaps) < 10 * parity, f"they part later: {gaps}"
    assert all(math.isfinite(row[name]) for row in rows for name in ("loss", "grad_norm", "entropy")), "finite"
    assert all(row["grad_norm"] > 0 for row in rows), "a reward that differs has a gradient"
    assert all(row["sync/replicas"] == 1 and 0 <= row["sync/probe_gap"] < parity for row in rows), "proved by questions"
    assert all(row["sync/probe_move"] > 0 for row in rows), "what the engine says has changed with every version"
    assert all(row["updates/changed_share"] > 0.9 for row in rows[1:]), "the trained weights moved"
    assert all(row["updates/published_share"] > 0 for row in rows), "and what engines got"
    assert all(row["steps_refused"] == 0 for row in rows), "nothing was refused"


def check_kept(ran: Ran, mode: str) -> None:
    """What lies in the last checkpoint is of this mode."""
    folder = ran.run / f"checkpoints/step_{STEPS}"
    names = {path.name for path in folder.iterdir()}
    if mode == "lora":
        assert "adapter_model.safetensors" in names, names
        assert "model.safetensors" not in names, names
    else:
        assert "model.safetensors" in names, names
        assert (folder / "training/masters.safetensors").exists(), names
    assert ran.verdict["status"] == "PASS", ran.verdict
    assert ran.verdict["executed_steps"] == STEPS, ran.verdict


def speed(rows: Sequence[dict[str, float]]) -> str:
    """For the table: what a step took once everything was warm, and the peak where it was measured."""
    warm = [row["step_time"] for row in rows if row["step"] in (2, STEPS)]
    peaks = [row["memory/peak"] for row in rows if "memory/peak" in row]
    peak = f", {max(peaks) / 2**30:.1f} GiB at most" if peaks else ""
    return f"{statistics.median(warm):.2f} s a step{peak}"
