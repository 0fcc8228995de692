"""Runs in coarse numbers, killed and resumed, are the runs that were never killed.

In bfloat16: masters, moments and what engines got. With moments in 8 bits, or without any: what the optimiser keeps.
"""

from __future__ import annotations

import importlib.util
import signal

import pytest
from kill_runs import Bench, Case, differences, facts
from safetensors import safe_open

pytestmark = pytest.mark.usefixtures("bfloat16_products")
COARSE = Case(
    "bfloat16, two passes, saved between them",
    {"dtype": "bfloat16", "num_iterations": 2, "save_steps": 3, "max_steps": 6, "beta": 0.05, "learning_rate": 1e-4},
)
WORDS = {"model": "pebble", "num_iterations": 2, "save_steps": 3, "max_steps": 6, "learning_rate": 1e-2}
CODED = Case("moments in 8 bits", {"optim": "adamw_8bit", **WORDS})
PLAIN = Case("no moments at all", {"optim": "sgd", **WORDS})
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs the torchao extra")


@pytest.mark.parametrize("hit", [3, pytest.param(5, marks=pytest.mark.nightly)])
def test_killed_in_a_step_a_bfloat16_run_goes_on_to_the_last_bit_of_its_masters(bench: Bench, hit: int) -> None:
    folder = bench.folder(COARSE)
    assert bench.train(folder, failpoints=f"learner.after_step=kill@{hit}").code == -signal.SIGKILL
    whole = bench.whole(COARSE).facts
    assert "training/masters.safetensors" in whole["files"]
    bench.check(COARSE, folder, bench.resume(folder))


@pytest.mark.nightly
def test_planted_resume_from_rounded_masters_is_seen(bench: Bench) -> None:
    """Teeth: the masters of the checkpoint, rounded, fit the weights, and are not the run's."""
    from checkpoint_kit import resealed
    from safetensors.torch import load_file, save_file

    folder = bench.folder(COARSE)
    assert bench.train(folder, failpoints="loop.before_learn=kill@5").code == -signal.SIGKILL
    checkpoint = folder / "run/checkpoints/step_3"
    path = checkpoint / "training/masters.safetensors"
    with safe_open(path, "pt") as file:
        assert len(file.keys()) > 10
    save_file({name: value.bfloat16().float() for name, value in load_file(path).items()}, path)
    resealed(checkpoint)
    ended = bench.resume(folder)
    assert ended.code == 0, ended.said
    found = differences(bench.whole(COARSE).facts, facts(folder / "run"))
    assert any("masters" in line for line in found), found


@pytest.mark.nightly
@pytest.mark.config_key("optim")
@pytest.mark.parametrize("case", [pytest.param(CODED, marks=needs_torchao), PLAIN], ids=["adamw_8bit", "sgd"])
def test_killed_in_a_step_the_run_goes_on_to_the_last_bit(bench: Bench, case: Case) -> None:
    folder = bench.folder(case)
    assert bench.train(folder, failpoints="learner.after_step=kill@5").code == -signal.SIGKILL
    bench.check(case, folder, bench.resume(folder))


@pytest.mark.nightly
@needs_torchao
def test_planted_scales_of_the_start_are_seen(bench: Bench) -> None:
    """Teeth: a checkpoint whose moments come back as zeros fits, and does not end as the whole run did."""
    from checkpoint_kit import resealed
    from safetensors.torch import load_file, save_file

    folder = bench.folder(CODED)
    assert bench.train(folder, failpoints="learner.after_step=kill@5").code == -signal.SIGKILL
    checkpoint = folder / "run/checkpoints/step_3"
    path = checkpoint / "training/optimiser.safetensors"
    kept = load_file(path)
    assert any(name.startswith("exp_avg_codes/") for name in kept)
    save_file({n: v * 0 if n.startswith("exp_avg_scales/") else v for n, v in kept.items()}, path)
    resealed(checkpoint)
    with pytest.raises(AssertionError):
        bench.check(CODED, folder, bench.resume(folder))
