"""The full form of the built-in run, through the real command: five seeds, every one must get there.

The planted versions of the same run (learning rate 0, shuffled rewards, turned sign, weights that never arrive) are
in tests/runs; what passes here fails there.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from command import Ran, surefoot

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module", params=range(5), ids="seed{}".format)
def full(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    cwd: Path = tmp_path_factory.mktemp("full")
    return surefoot("train", f"seed={request.param}", cwd=cwd)


def test_it_starts_and_runs_every_planned_step(full: Ran) -> None:
    assert full.code == 0, full.err
    assert full.verdict["executed_steps"] == full.verdict["planned_steps"] == 200


def test_a_single_step_moves_every_parameter(full: Ran) -> None:
    first = next(m for m in full.metrics if m["step"] == 1 and "reward" in m)
    assert first["census/moved"] == first["census/parameters"]
    assert first["grad_norm"] > 0


def test_the_entropy_falls_while_the_reward_rises(full: Ran) -> None:
    steps = [m for m in full.metrics if "reward" in m]
    early, late = steps[:20], steps[-20:]
    for name, sign in (("reward", 1), ("scored_entropy", -1)):
        means = [sum(m[name] for m in part) / len(part) for part in (early, late)]
        assert sign * (means[1] - means[0]) > 0.2, name


def test_the_sampler_has_the_weights_of_every_step(full: Ran) -> None:
    """At version n the sampler agrees with the learner to 1e-4, though 199 updates lie between first and last."""
    gaps = [m["sampling/sampling_logp_difference/max"] for m in full.metrics if "reward" in m]
    assert len(gaps) == 200
    assert max(gaps) < 1e-4


def test_held_out_accuracy_reaches_the_target(full: Ran) -> None:
    accuracy = [m["eval_accuracy"] for m in full.metrics if "eval_accuracy" in m]
    assert 0.1 <= accuracy[0] <= 0.4
    assert accuracy[-1] >= 0.85
