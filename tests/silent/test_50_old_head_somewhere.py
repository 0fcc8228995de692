"""Silent failure 50: all tensors arrive, and the output layer goes on with a copy of its own.

The copy was made once, from the embedding it is tied to. Checksums of what arrived are right; only answers can tell.
"""

from __future__ import annotations

import asyncio

import pytest
from sync_kit import World

from surefoot.errors import NumericsError
from surefoot.maths.checksums import checksums
from surefoot.runtime.weights import WeightProbe


async def sync(lie: str | None) -> World:
    world = World(learning_rate=1e-3)
    await world.publish()
    await world.sync(lie=lie, liar=1)
    return world


def test_after_a_sync_embedding_and_head_are_one() -> None:
    world = asyncio.run(sync(None))
    for replica in world.replicas:
        decoder = replica.engine.decoder
        assert decoder.head is not None
        assert decoder.head.weights[0].data_ptr() == decoder.embed.data_ptr()
    assert world.publisher.version == 1


def test_planted_old_head_is_caught_by_its_answers() -> None:
    with pytest.raises(NumericsError, match=r"engine 1 does not serve version 1: probe/0/1"):
        asyncio.run(sync("old_head"))


def test_planted_old_head_passes_every_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: without the canary nobody notices."""
    monkeypatch.setattr(WeightProbe, "judge", lambda *_: {})
    world = asyncio.run(sync("old_head"))
    sent = checksums({name: tensor.detach() for name, tensor in world.learner.weights().items()})
    assert checksums(world.replicas[1].in_force) == sent
