"""Local and Ray give the same run: with the embedded engine, float32 and no staleness, equal bit for bit.

Everything that could differ is on: the learner, two engines and two workers in processes of their own, groups that come
back in any order, weights through shared memory.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from command import Ran, surefoot
from ray_kit import TINY, numbers, ray_run

pytestmark = [pytest.mark.ray, pytest.mark.slow]
STEPS = ["max_steps=8", "learning_rate=1e-3", "beta=0.01"]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The same run in one process."""
    pytest.importorskip("ray", reason="needs the ray extra")
    words = [word for word in TINY if not word.startswith("runtime.")]
    done = surefoot("train", *words, *STEPS, cwd=tmp_path_factory.mktemp("one process"), run="local")
    assert done.code == 0, done.out + done.err
    return done


def test_losses_gradients_rewards_and_evaluations_are_equal_bit_for_bit(tmp_path: Path, local: Ran) -> None:
    with ray_run(tmp_path / "ray", *STEPS) as run:
        code, said = run.end()
    assert code == 0, said
    here, there = numbers(local.metrics), numbers(run.metrics)
    assert len([row for row in here if "loss" in row]) == 8
    assert len({row["loss"] for row in here if "loss" in row}) > 4, "a run that moves nothing proves nothing"
    assert here == there
    weights = [(folder / "checkpoints/step_8/model.safetensors").read_bytes() for folder in (local.run, run.folder)]
    assert weights[0] == weights[1]


ELSEWHERE = """
from surefoot.runtime.ray.runtime import WeightHandle
from surefoot.cli import main

def by_value(self, node):
    self._shipped = self._shipped or self.learner.member.handle.ship.remote(self.staged)
    return self._shipped

WeightHandle.for_engine = by_value
main()
"""
"""Every engine is treated as one on another machine: weights go by value, through the object store."""


@pytest.mark.nightly
def test_weights_that_go_by_value_to_other_machines_give_the_same_numbers(tmp_path: Path, local: Ran) -> None:
    with ray_run(tmp_path / "ray", *STEPS, entry=[sys.executable, "-c", ELSEWHERE]) as run:
        code, said = run.end()
    assert code == 0, said
    assert numbers(local.metrics) == numbers(run.metrics)


def test_the_comparison_sees_one_last_bit() -> None:
    """Teeth: what Ray's own OMP_NUM_THREADS would change is as small as this."""
    assert numbers([{"step": 1.0, "loss": 0.1}]) != numbers([{"step": 1.0, "loss": 0.1 + 2**-56}])
