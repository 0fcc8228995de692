"""`runtime.learner_ranks` with `runtime.kind = "ray"`: the ranks are actors, and the run is the one without Ray."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from command import Ran, surefoot
from ray_kit import RayRun, numbers, ray_run

from surefoot.system.process import is_alive

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.nightly]
RANKS = (
    "max_steps=6", "learning_rate=1e-3", "beta=0.01", "runtime.learner_ranks=2", "runtime.engines=1",
    "runtime.workers=1",
)  # fmt: skip
LEADER, OTHER = "learner", "learner rank 1"
WEIGHTS = "checkpoints/step_6/model.safetensors"


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """The same ranks as processes of one driver, without Ray."""
    pytest.importorskip("ray", reason="needs the ray extra")
    from ray_kit import TINY

    words = [word for word in (*TINY, *RANKS) if not word.startswith(("runtime.engines", "runtime.workers"))]
    done = surefoot("train", *words, cwd=tmp_path_factory.mktemp("local"), run="local")
    assert done.code == 0, done.out + done.err
    return done


def check_same(run: RayRun, local: Ran) -> None:
    """Every number of the log, and every bit of the weights."""
    assert numbers(local.metrics) == numbers(run.metrics)
    assert len({row["loss"] for row in run.metrics if "loss" in row}) > 3, "a run that moves nothing proves nothing"
    assert (run.folder / WEIGHTS).read_bytes() == (local.run / WEIGHTS).read_bytes()


def test_two_ranks_on_ray_are_two_ranks_here_bit_for_bit(tmp_path: Path, local: Ran) -> None:
    with ray_run(tmp_path / "ray", *RANKS) as run:
        code, said = run.end()
    assert code == 0, said
    check_same(run, local)
    assert len(run.pids(LEADER)) == len(run.pids(OTHER)) == 1
    assert not any(is_alive(pid) for name in (LEADER, OTHER) for pid in run.pids(name))


@pytest.mark.parametrize("lost", [LEADER, OTHER])
def test_a_killed_rank_ends_the_group_and_the_run_goes_on_to_the_same_end(
    tmp_path: Path, local: Ran, lost: str
) -> None:
    with ray_run(tmp_path / "ray", *RANKS) as run:
        run.wait_step(3)
        run.kill(lost)
        code, said = run.end()
    assert code == 0, said
    assert "the learner was lost: " + ("" if lost == LEADER else "rank 1 was lost: ") + "process" in said
    for name in (LEADER, OTHER):
        first, second = run.pids(name)
        assert not is_alive(first), "the whole group ends, also the rank that nobody killed"
        assert not is_alive(second)
    assert (run.folder / WEIGHTS).read_bytes() == (local.run / WEIGHTS).read_bytes()


def test_a_stopped_rank_is_named_within_the_collectives_deadline(tmp_path: Path) -> None:
    with ray_run(tmp_path / "ray", *RANKS, "stall_timeout_s=60", "runtime.max_restarts=0") as run:
        run.wait_step(3)
        pid = run.kill(OTHER, signal.SIGSTOP)
        code, said = run.end()
    assert code == 77, said
    assert "the learner was lost: rank 1 gave no sign for 48 s: it hangs, or was stopped" in said
    assert not is_alive(pid), "Ray's own messages do not reach a stopped process"


def planted(code: str) -> list[str]:
    """The command, with this done once the cluster is there: ray may not be imported before."""
    body = "\n".join("    " + line for line in code.strip().splitlines())
    return [sys.executable, "-c", BEFORE_THE_LEARNER.replace("PLANTED", body.lstrip())]


BEFORE_THE_LEARNER = """
from surefoot.cli import main
from surefoot.runtime.ray import runtime

real_start = runtime.RayDeployment.start_learner

def start(self, recipe):
    PLANTED
    return real_start(self, recipe)

runtime.RayDeployment.start_learner = start
main()
"""

CROWDED = """
import ray
class Guest:
    def there(self):
        return True
self.guest = ray.remote(Guest).options(num_cpus=int(ray.cluster_resources()["CPU"]) - 1).remote()
ray.get(self.guest.there.remote())
"""
"""Somebody else has all places of the cluster but one."""


def test_a_group_that_finds_no_room_is_an_error_with_what_was_asked_and_what_is_there(tmp_path: Path) -> None:
    words = [word for word in RANKS if not word.startswith("runtime.learner_ranks")]
    words += ["runtime.start_timeout_s=5", "runtime.learner_ranks=3"]
    with ray_run(tmp_path / "ray", *words, entry=planted(CROWDED)) as run:
        code, said = run.end()
    assert code == 77, said
    told = (
        "LearnerStartError: the learner did not start: a placement group of 3 bundles with 1 CPU each found no room "
        "within runtime.start_timeout_s = 5 s; the cluster has 1 of 5 CPU free"
    )
    assert told in said
    assert not run.folder.exists(), "a start that is refused leaves no folder behind"


CUT = """
from surefoot.runtime.ray import learner_group
real = learner_group.LearnerProcesses.start
async def cut(self):
    return await real(self._replace(others=()))
learner_group.LearnerProcesses.start = cut
"""


def test_cut_wire_ranks_that_are_not_handed_to_the_leader_end_the_start(tmp_path: Path) -> None:
    with ray_run(tmp_path / "ray", *RANKS, entry=planted(CUT)) as run:
        code, said = run.end()
    assert code != 0
    assert "2 ranks were placed, and 0 of them were handed on" in said
    assert run.step == 0


OTHER_DISK = """
from surefoot.runtime.ray import learner_group
class OtherDisk(learner_group.RankActor):
    def _answer(self, question):
        from surefoot.learner import model
        load = model.load_policy
        def other(*args, **keys):
            policy = load(*args, **keys)
            next(policy.model.parameters()).data.view(-1)[7] += 1e-3
            return policy
        model.load_policy = other
        return super()._answer(question)
learner_group.RankActor = OtherDisk
"""
"""The path of the model leads rank 1 to other weights, as on a machine with a disk of its own."""


def test_planted_other_model_under_the_same_name_is_refused_before_anything_is_cut(tmp_path: Path) -> None:
    with ray_run(tmp_path / "ray", *RANKS, entry=planted(OTHER_DISK)) as run:
        code, said = run.end()
    assert code == 4, said
    assert "ModelError: rank 1 of the learner loaded other weights than rank 0 from pebble" in said
    assert not run.folder.exists()
