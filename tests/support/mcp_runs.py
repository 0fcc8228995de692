"""A short run of the real command with tool servers, on the CPU."""

from __future__ import annotations

from command import ROOT

CONFIG = str(ROOT / "configs" / "tools_mcp.toml")
TINY = (
    "num_tasks=400 tasks_per_step=4 num_generations=4 eval_steps=0 eval_on_start=false eval_tasks=4 reward_workers=1 "
    "threads=1 device=cpu guard.mode=off learning_rate=1e-6 target_metric=none target_value=none"
).split()
