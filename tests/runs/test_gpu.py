"""The built-in run on a GPU: the same command, one key changed. Skipped, and counted, where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import SHORT, surefoot


@pytest.mark.gpu
def test_the_built_in_run_learns_on_a_gpu(tmp_path: Path) -> None:
    ran = surefoot("train", *SHORT, "device=cuda", cwd=tmp_path, fresh=True)
    assert ran.code == 0, ran.err
    step_1 = next(m for m in ran.metrics if m["step"] == 1 and "reward" in m)
    assert 0 < step_1["sampling/sampling_logp_difference/max"] < 1e-4


@pytest.mark.gpu
@pytest.mark.config_key("dtype", "device")
def test_bfloat16_runs_within_its_own_parity_bound(tmp_path: Path) -> None:
    ran = surefoot("train", "max_steps=3", "device=cuda", "dtype=bfloat16", cwd=tmp_path, fresh=True)
    assert ran.code == 0, ran.err
    gaps = [m["sampling/sampling_logp_difference/max"] for m in ran.metrics if "reward" in m]
    assert gaps[0] < 0.2, "the bound at step 1"
    assert max(gaps) < 2.0, "ten times that later: single tokens of a model that moves"
    assert max(gaps) > 1e-4, "bfloat16 was really used"
