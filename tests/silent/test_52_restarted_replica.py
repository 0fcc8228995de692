"""Silent failure 52: a replica dies, comes back with the checkpoint the run began with, and joins under today's version."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from sync_kit import EngineReplica, World

from surefoot.errors import EngineError, NumericsError
from surefoot.maths.checksums import checksums
from surefoot.runtime.weights import WeightProbe


class Restarted(EngineReplica):
    """The planted bug: it loads the model from the disk at start and takes that for what it was told to serve."""

    async def commit(self, version: int) -> Mapping[str, int]:
        self.engine.load_weights(self.first, version)
        return {}


async def join(kind: Any, *, moved_on: bool) -> EngineReplica:
    """Three steps with two engines; then a third engine joins."""
    world = World(learning_rate=1e-3)
    start = {name: tensor.detach().clone() for name, tensor in world.learner.weights().items()}
    await world.publish()
    for _ in range(3):
        await world.sync()
    current = {name: tensor.detach().clone() for name, tensor in world.learner.weights().items()}
    if moved_on:
        world.step()
    late: EngineReplica = kind("engine 2", world.replicas[0].engine.decoder.spec)
    late.first = start
    await world.publisher.admit(late, current, checksums(current), moved_on=moved_on)
    return late


@pytest.mark.parametrize("moved_on", [False, True], ids=["the learner waits", "the learner is a step ahead"])
def test_a_replacement_serves_what_the_others_serve(moved_on: bool) -> None:
    assert asyncio.run(join(EngineReplica, moved_on=moved_on)).engine.version == 3


@pytest.mark.parametrize("moved_on", [False, True], ids=["the learner waits", "the learner is a step ahead"])
def test_planted_replacement_with_the_first_weights_is_recognised(moved_on: bool) -> None:
    with pytest.raises((NumericsError, EngineError), match=r"engine 2.* It answers as version 0 did"):
        asyncio.run(join(Restarted, moved_on=moved_on))


def test_planted_replacement_passes_every_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: without the canary it samples with the first weights under the newest number."""
    monkeypatch.setattr(WeightProbe, "judge", lambda *_: {})
    assert asyncio.run(join(Restarted, moved_on=False)).engine.version == 3
