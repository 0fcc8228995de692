"""A LoRA run, killed and resumed, is the run that was never killed: the adapter, its moments and what engines got."""

from __future__ import annotations

import signal

import pytest
from kill_runs import Bench, Case

ADAPTED = Case(
    "LoRA, two passes, saved between them",
    {
        "lora": {"rank": 4, "modules_to_save": ["norm"]}, "num_iterations": 2, "save_steps": 3, "max_steps": 6,
        "beta": 0.05, "learning_rate": 1e-2,
    },
)  # fmt: skip


@pytest.mark.parametrize("hit", [3, pytest.param(5, marks=pytest.mark.nightly)])
def test_killed_in_a_step_a_lora_run_goes_on_to_the_last_bit_of_its_adapter(bench: Bench, hit: int) -> None:
    folder = bench.folder(ADAPTED)
    assert bench.train(folder, failpoints=f"learner.after_step=kill@{hit}").code == -signal.SIGKILL
    whole = bench.whole(ADAPTED).facts
    assert "adapter_model.safetensors" in whole["files"]
    assert "model.safetensors" not in whole["files"]
    bench.check(ADAPTED, folder, bench.resume(folder))


@pytest.mark.nightly
def test_planted_resume_from_an_adapter_of_the_start_is_seen(bench: Bench) -> None:
    """Teeth: the second halves of the pairs, back at 0, fit the state, and are not the run's."""
    from checkpoint_kit import resealed
    from safetensors.torch import load_file, save_file

    folder = bench.folder(ADAPTED)
    assert bench.train(folder, failpoints="loop.before_learn=kill@5").code == -signal.SIGKILL
    checkpoint = max((folder / "run/checkpoints").glob("step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    path = checkpoint / "adapter_model.safetensors"
    kept = load_file(path)
    assert any(bool(value.any()) for name, value in kept.items() if "lora_B" in name)
    save_file({name: value * 0 if "lora_B" in name else value for name, value in kept.items()}, path)
    resealed(checkpoint)
    ended = bench.resume(folder)
    assert ended.code == 78, ended.said
    assert "sampler and learner disagree" in ended.said, "the journaled batch was sampled by another adapter"
