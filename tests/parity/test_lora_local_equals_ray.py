"""With an adapter, local and Ray give the same run too: the learner's process merges, and engines read the sum."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import surefoot
from ray_kit import TINY, numbers, ray_run

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.turns(5, together=True)]
STEPS = ["max_steps=6", "learning_rate=3e-3", "beta=0.01", "lora.rank=8"]


@pytest.mark.parametrize("base", ["none", pytest.param("nf4", marks=pytest.mark.nightly)])
def test_an_adapter_is_trained_and_merged_in_another_process_bit_for_bit_as_in_one(base: str, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the ray extra")
    if base == "nf4":
        pytest.importorskip("bitsandbytes", reason="needs the extra quantization")
    words = [word for word in TINY if not word.startswith("runtime.")]
    told = [*STEPS, f"quantization={base}"]
    local = surefoot("train", *words, *told, cwd=tmp_path, run="local")
    assert local.code == 0, local.out + local.err
    with ray_run(tmp_path / "ray", *told) as run:
        code, said = run.end()
    assert code == 0, said
    here, there = numbers(local.metrics), numbers(run.metrics)
    assert len({row["loss"] for row in here if "loss" in row}) > 3, "a run that moves nothing proves nothing"
    assert here == there
    files = [folder / "checkpoints/step_6/adapter_model.safetensors" for folder in (local.run, run.folder)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert max(row["sync/probe_gap"] for row in run.metrics if "sync/probe_gap" in row) < 1e-4
