"""What the keys of `[runtime]` change: who runs where, how many of them, and how long a run puts up with losses.

The fleet is made of fakes here; the same keys with real processes are in tests/faults/test_ray_*.py.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fleet_kit import FakeTransport, until

from surefoot.config import RuntimeConfig
from surefoot.errors import ConfigError, FleetError, LearnerStartError, SecurityError
from surefoot.report.plan import batch_arithmetic
from surefoot.runtime.ray import cluster, runtime
from surefoot.runtime.replicas import ReplicaLostError, ReplicaSupervisor
from surefoot.runtime.specs import EmbeddedEngineSpec, WorkerSpec


class NoCluster:
    """Stands where Ray would be."""

    is_private = True

    def __init__(self, address: str | None, *, processes: int) -> None:
        self.address, self.processes = address, processes

    def close(self) -> None: ...


@pytest.fixture
def site(configure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`site(**keys)`: a `RayDeployment` without Ray; what it reserved is in `site.reserved`."""
    made = []

    def make(**keys: Any) -> runtime.RayDeployment:
        monkeypatch.setattr(runtime, "Cluster", NoCluster)
        reserved: list[dict[str, float]] = []
        monkeypatch.setattr(runtime, "room_for", reserved.append)
        config = configure(runtime__kind="ray", **keys).config
        found = runtime.RayDeployment(
            config.runtime, logs=tmp_path, threads=1, deterministic=True, rollout_timeout_s=config.rollout_timeout_s
        )
        found.reserved = reserved[0]  # type: ignore[attr-defined]
        made.append(found)
        return found

    yield make
    for each in made:
        each.close()


def fleet_of(site: runtime.RayDeployment, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, FakeTransport]:
    """The fleet that this site starts, over fakes."""
    transports: list[FakeTransport] = []

    def fake(*args: Any, **kwargs: Any) -> FakeTransport:
        transports.append(FakeTransport())
        transports[0].kwargs = kwargs  # type: ignore[attr-defined]
        return transports[0]

    monkeypatch.setattr(runtime, "make_transport", fake)
    engine = EmbeddedEngineSpec(None, 8, 16, "cpu", "float32")  # type: ignore[arg-type]
    worker = WorkerSpec({}, {}, None, 2, 1.0, 0, None, 0, 10)  # type: ignore[arg-type]
    return site.start_replicas(engine, worker, engine_slots=2), transports[0]


@pytest.mark.config_key("runtime.kind")
def test_the_kind_decides_which_runtime_is_built(
    configure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import surefoot.run.on_ray as on_ray
    from surefoot.run.build import build
    from surefoot.run.inputs import read_inputs

    def no_cluster(*args: Any, **kwargs: Any) -> Any:
        raise FleetError("a cluster was asked for", "a test", "none")

    monkeypatch.setattr(on_ray, "RayDeployment", no_cluster)
    loaded = configure(runtime__kind="ray")
    inputs = read_inputs(loaded.config, loaded.base)
    with pytest.raises(FleetError, match="a cluster was asked for"):
        build(loaded.config, loaded.base, inputs, None, logs=tmp_path)  # type: ignore[arg-type]


@pytest.mark.config_key("runtime.engines", "runtime.workers")
def test_as_many_engines_and_workers_are_started_as_were_asked_for(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, transport = fleet_of(site(runtime__engines=3, runtime__workers=4), monkeypatch)
    assert (sorted(transport.engines), sorted(transport.workers)) == ([0, 1, 2], [0, 1, 2, 3])
    assert fleet.capacity == 6


@pytest.mark.config_key(
    "runtime.engines", "runtime.workers", "runtime.engine_gpus", "runtime.learner_gpus", "runtime.learner_ranks"
)
def test_what_is_reserved_in_the_cluster_is_what_the_processes_need(site: Any) -> None:
    plain = site()
    assert plain.reserved == {"CPU": 4.0, "GPU": 0.0}
    large = site(runtime__engines=4, runtime__workers=2, runtime__engine_gpus=0.5, runtime__learner_gpus=1.0)
    assert large.reserved == {"CPU": 7.0, "GPU": 3.0}
    assert large.cluster.processes == 7
    ranks = site(runtime__engines=1, runtime__workers=1, runtime__learner_ranks=3, runtime__learner_gpus=1.0)
    assert ranks.reserved == {"CPU": 5.0, "GPU": 3.0}
    assert ranks.cluster.processes == 5, "each rank has a place"


@pytest.mark.config_key("runtime.learner_ranks")
def test_as_many_ranks_as_were_asked_for_share_the_learner(
    configure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from surefoot.run import build as wiring
    from surefoot.run.inputs import read_inputs

    asked: list[int] = []

    def none_come(size: int, logs: Path) -> Any:
        asked.append(size)
        raise LearnerStartError("no rank came", "a test", "none")

    monkeypatch.setattr(wiring, "start_followers", none_come)
    loaded = configure(runtime__learner_ranks=3)
    assert "learner   3 ranks share weights, optimiser and samples (FSDP2)" in batch_arithmetic(loaded.config)
    assert not any("ranks" in line for line in batch_arithmetic(configure().config))
    inputs = read_inputs(loaded.config, loaded.base)
    with pytest.raises(LearnerStartError, match="no rank came"):
        wiring.build(loaded.config, loaded.base, inputs, None, logs=tmp_path)  # type: ignore[arg-type]
    assert asked == [3]


@pytest.mark.config_key("runtime.learner_ranks", "runtime.learner_gpus")
@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"runtime__kind": "ray", "runtime__learner_gpus": 8.0},
            "a rank of the learner computes on one GPU, and the others",
        ),
        ({"runtime__learner_ranks": 0}, "must be above 0"),
        (
            {"runtime__learner_ranks": 2, "runtime__kind": "ray", "runtime__learner_gpus": 0.5},
            "ranks would share a GPU",
        ),
        ({"runtime__learner_ranks": 2, "runtime__kind": "ray", "device": "cuda"}, "ranks would share a GPU"),
        ({"runtime__learner_ranks": 9, "num_generations": 4, "tasks_per_step": 2}, "1 of them would never have one"),
        ({"runtime__learner_ranks": 2, "lora__rank": 4, "quantization": "nf4"}, "packed weights are not cut"),
        ({"runtime__learner_ranks": 2, "optim": "adamw_8bit"}, "256 entries share a scale"),
        ({"runtime__learner_ranks": 2, "engine__kind": "vllm"}, "the one process group of this process"),
        ({"runtime__learner_ranks": 2, "device": "mps"}, "it has no collectives"),
    ],
    ids=str,
)
def test_what_several_ranks_do_not_do_is_refused_by_name(configure: Any, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        configure(**keys)


@pytest.mark.config_key("runtime.engine_gpus")
def test_each_engine_reserves_its_gpus(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, transport = fleet_of(site(runtime__engine_gpus=0.5), monkeypatch)
    assert transport.kwargs["engine_gpus"] == 0.5  # type: ignore[attr-defined]


@pytest.mark.config_key("runtime.learner_gpus", "runtime.engine_gpus")
def test_gpus_that_the_cluster_does_not_have_are_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="needs the ray extra")
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 8.0, "GPU": 1.0})
    cluster.room_for({"CPU": 8.0, "GPU": 1.0})
    with pytest.raises(ConfigError, match="reserves 2 GPU; the cluster has 1 GPU"):
        cluster.room_for({"CPU": 2.0, "GPU": 2.0})


@pytest.mark.config_key("runtime.address")
def test_an_address_is_joined_and_none_starts_a_private_cluster(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert site().cluster.address is None
    assert site(runtime__address="10.0.0.1:6379").cluster.address == "10.0.0.1:6379"
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    with pytest.raises(SecurityError, match="RAY_AUTH_TOKEN") as refused:
        cluster.Cluster("10.0.0.1:6379", processes=1)
    assert refused.value.exit_code == 5


@pytest.mark.config_key("runtime.start_timeout_s")
def test_a_process_that_takes_longer_to_start_is_given_up(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(self: FakeTransport, index: int, life: int) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(FakeTransport, "start_worker", never)
    with pytest.raises(FleetError, match=r"not ready within runtime.start_timeout_s = 0.01 s"):
        fleet_of(site(runtime__start_timeout_s=0.01, runtime__max_restarts=0), monkeypatch)


@pytest.mark.config_key("runtime.max_restarts")
@pytest.mark.parametrize("restarts", [0, 2])
def test_so_often_is_one_of_them_replaced(site: Any, monkeypatch: pytest.MonkeyPatch, restarts: int) -> None:
    made = site(runtime__max_restarts=restarts, runtime__engines=1)
    fleet, transport = fleet_of(made, monkeypatch)

    async def end() -> None:
        transport.dead_on_arrival.add("engine 0")
        transport.engines[0].die()
        await until(lambda: fleet.failed.done())

    made.thread.wait(end())
    assert fleet.engines[0].restarts == restarts


@pytest.mark.config_key("runtime.restart_timeout_s")
@pytest.mark.parametrize(("seconds", "ends"), [(0.05, True), (30.0, False)])
def test_so_long_are_they_replaced_whatever_their_number(
    site: Any, monkeypatch: pytest.MonkeyPatch, seconds: float, ends: bool
) -> None:
    """Twenty starts that fail after a hundredth of a second each, far below the number that is allowed."""
    made = site(runtime__max_restarts=1000, runtime__restart_timeout_s=seconds, runtime__engines=1)
    fleet, transport = fleet_of(made, monkeypatch)

    async def dies_soon(self: FakeTransport, member: Any) -> Any:
        await asyncio.sleep(0.01)
        raise ReplicaLostError("it died while it started")

    async def end() -> None:
        monkeypatch.setattr(FakeTransport, "_started", dies_soon)
        monkeypatch.setattr(ReplicaSupervisor, "_pause", lambda self: 0.0)
        transport.engines[0].die()
        await until(lambda: fleet.failed.done() or fleet.engines[0].restarts >= 20)

    made.thread.wait(end())
    assert fleet.failed.done() == ends
    if ends:
        said = str(fleet.failed.result())
        assert "runtime.restart_timeout_s" in said
        assert "engine 0 was lost" in said


def test_the_defaults_are_one_engine_and_two_workers() -> None:
    assert (RuntimeConfig().engines, RuntimeConfig().workers, RuntimeConfig().max_restarts) == (1, 2, 5)
