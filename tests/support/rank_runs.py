"""Runs whose learner has several ranks: their words, and what they leave behind."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

WORDS = (
    "num_tasks=64", "eval_steps=0", "heldout_fraction=0.1", "tasks_per_step=4", "num_generations=4", "threads=1",
    "preflight_tasks=0", "num_iterations=2", "beta=0.05",
)  # fmt: skip


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of the log so far, whole ones."""
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def weights(run: Path) -> dict[str, torch.Tensor]:
    """Of the last checkpoint: those of the model, or of its adapter."""
    folders = (run / "checkpoints").glob("step_*")
    newest = max(folders, key=lambda path: int(path.name.removeprefix("step_")))
    whole = newest / "model.safetensors"
    return dict(load_file(whole if whole.exists() else newest / "adapter_model.safetensors"))


def ranks_of(run: Path) -> list[int]:
    """Process numbers of rank 1, from the first to the newest."""
    log = run / "logs/learner-rank-1.log"
    return [int(pid) for pid in re.findall(r"begins as process (\d+)", log.read_text())] if log.exists() else []
