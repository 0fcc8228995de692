"""Engines that lie about their weights (50 by day, 100 by night) are caught within that sync and named; honest ones never.

Every sync follows a real optimiser step on the built-in model and goes to two real engines, one of which may lie.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
import torch
from figures import Record, note
from sync_kit import BY_CANARY, BY_CHECKSUM, BY_FORM, LIES, TOLERANCE, World

from surefoot.errors import SurefootError
from surefoot.runtime import weights
from surefoot.runtime.weights import WeightProbe

pytestmark = pytest.mark.usefixtures("one_thread")

ROUNDS = 2
HONEST_AND_TINY = 30


async def caught(world: World, lie: str, *, liar: int, seed: int) -> bool:
    """One lying sync; whether it was refused by the liar's name, without a new version."""
    before = world.publisher.version
    try:
        await world.sync(lie=lie, liar=liar, seed=seed)
    except SurefootError as error:
        assert f"engine {liar}" in error.what, f"{lie}: {error.what}"
        assert f"engine {1 - liar}" not in error.what, f"{lie}: {error.what}"
        assert world.publisher.version == before, lie
        return True
    return False


@pytest.mark.turns(2)
@pytest.mark.parametrize("half", range(2))
def test_50_lying_syncs_are_caught_within_the_sync_and_an_honest_one_never(half: int, record_property: Record) -> None:
    async def play() -> tuple[Counter[str], list[float]]:
        world, dice = World(learning_rate=1e-3), random.Random(f"lies {half}")
        await world.publish()
        seen: Counter[str] = Counter()
        gaps = []
        for number, lie in enumerate([*LIES] * ROUNDS):
            gaps.append((await world.sync())["sync/probe_gap"])  # everybody honest: nobody may be accused
            seen[lie] += await caught(world, lie, liar=dice.randrange(2), seed=number + 50 * half)
        return seen, gaps

    seen, gaps = asyncio.run(play())
    assert dict(seen) == dict.fromkeys(LIES, ROUNDS)
    assert len(gaps) == len(LIES) * ROUNDS == 50
    assert max(gaps) < TOLERANCE / 4, "honest engines are nowhere near the border"
    detail = f"{len(LIES)} kinds of lie, 2 engines; largest honest gap {max(gaps):.1e} of {TOLERANCE:g} nats"
    note(record_property, "P17", "lying weight syncs caught within the sync", 50, detail)
    note(record_property, "P17", "honest weight syncs, nobody accused", 50, detail)


def test_steps_too_small_to_see_accuse_nobody_and_checksums_still_tell() -> None:
    async def play() -> tuple[list[dict[str, float]], bool, bool]:
        world = World(learning_rate=1e-8)
        await world.publish()
        found = [await world.sync() for _ in range(HONEST_AND_TINY)]
        told = await caught(world, "one_tensor_old", liar=1, seed=3)
        await world.sync()
        return found, told, await caught(world, "keeps_old_weights", liar=1, seed=3)

    found, told, unseen = asyncio.run(play())
    assert max(metrics["sync/probe_gap"] for metrics in found) < TOLERANCE / 4
    assert 0 < max(metrics["sync/probe_move"] for metrics in found) < TOLERANCE, "the canary says that it is blind"
    assert told
    assert not unseen, "what no probability shows and the engine denies, nobody can see; nor does it matter yet"


@pytest.mark.parametrize("learning_rate", [1e-6, 1e-4])
def test_small_learning_rates_accuse_nobody(learning_rate: float) -> None:
    async def play() -> float:
        world = World(learning_rate=learning_rate)
        await world.publish()
        return max([(await world.sync())["sync/probe_gap"] for _ in range(HONEST_AND_TINY)])

    assert asyncio.run(play()) < TOLERANCE / 4


async def unnoticed(lies: list[str]) -> set[str]:
    world = World(learning_rate=1e-3)
    await world.publish()
    found = set()
    for number, lie in enumerate(lies):
        await world.sync()
        if not await caught(world, lie, liar=number % 2, seed=number):
            found.add(lie)
    return found


def nothing(*_: Any, **__: Any) -> dict[str, float]:
    return {}


def test_planted_publisher_without_checksums_misses_what_is_too_small_or_never_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights, "compare_checksums", nothing)
    assert asyncio.run(unnoticed(BY_CHECKSUM)) == {"acknowledges_nothing", "acknowledges_half", "one_bit"}


def test_planted_publisher_without_a_canary_misses_every_engine_that_only_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(WeightProbe, "judge", nothing)
    assert asyncio.run(unnoticed(BY_CANARY)) == set(BY_CANARY)


def test_planted_canary_that_reads_no_stamps_misses_wrong_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightProbe, "check_form", nothing)
    stamps = [lie for lie in BY_FORM if lie.endswith("_stamp")]
    assert asyncio.run(unnoticed(stamps)) == set(stamps)


def test_planted_probe_that_never_repeats_misses_a_stale_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth for the prompts: asked something new every time, an engine has nothing stale to answer from."""
    real = WeightProbe.questions

    def fresh(self: WeightProbe, version: int) -> Any:
        self.probes = tuple(_moved(probe) for probe in self.probes)
        return real(self, version)

    monkeypatch.setattr(WeightProbe, "questions", _once_per_version(fresh))
    assert asyncio.run(unnoticed(["stale_prefix_cache"])) == {"stale_prefix_cache"}


@pytest.mark.parametrize(("temperature", "found"), [(4.0, set()), (1.0, {"keeps_old_weights"})])
def test_planted_probes_at_a_low_temperature_prove_nothing_of_a_policy_that_is_sure(
    temperature: float, found: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it says has probability 1, before the step and after it."""
    monkeypatch.setattr(weights, "_TEMPERATURE", temperature)

    async def play() -> set[str]:
        world = World(learning_rate=1e-5)
        with torch.no_grad():
            world.learner.net.model.norm.weight *= 30
        await world.publish()
        missed = not await caught(world, "keeps_old_weights", liar=0, seed=0)
        return {"keeps_old_weights"} if missed else set()

    assert asyncio.run(play()) == found


def _moved(probe: Any) -> Any:
    import dataclasses

    return dataclasses.replace(probe, prompt_ids=(probe.prompt_ids[0], probe.prompt_ids[1] + 1, *probe.prompt_ids[2:]))


def _once_per_version(function: Any) -> Any:
    asked: dict[int, Any] = {}

    def questions(self: WeightProbe, version: int) -> Any:
        if version not in asked:
            asked[version] = function(self, version)
        return asked[version]

    return questions
