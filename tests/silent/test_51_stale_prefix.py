"""Silent failure 51: the weights are new, and prompts that come back are answered from keys and values of the old ones.

A probe that is new every time would never hit the cache. Ours are the same after every update, long enough to fill
cache blocks, and two of them begin alike.
"""

from __future__ import annotations

import asyncio

import pytest
from sync_kit import World

from surefoot.errors import NumericsError
from surefoot.runtime.weights import LONG, WeightProbe


async def sync(lie: str | None) -> World:
    world = World(learning_rate=1e-3)
    await world.publish()
    await world.sync(lie=lie, liar=0)
    return world


def test_the_same_prompts_are_asked_after_every_update_and_one_fills_the_cache() -> None:
    world = asyncio.run(sync(None))
    canary = world.publisher.canary
    one, two = ([r.prompt_ids for r in canary.questions(version)] for version in (1, 2))
    assert one == two
    assert len(one[0]) == LONG
    assert one[0][: LONG // 2] == one[1][: LONG // 2]


def test_planted_cache_that_outlives_the_sync_is_caught_by_the_first_token() -> None:
    with pytest.raises(NumericsError, match=r"engine 0 does not serve version 1"):
        asyncio.run(sync("stale_prefix_cache"))


def test_planted_stale_cache_passes_every_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: without the canary nobody notices."""
    monkeypatch.setattr(WeightProbe, "judge", lambda *_: {})
    assert asyncio.run(sync("stale_prefix_cache")).publisher.version == 1
