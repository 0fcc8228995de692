"""Nothing lost, nothing twice, nothing too old, nobody stuck: the real stream in a world where everything goes wrong."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from async_simulator import REPLICAS, SimulationError, simulate
from figures import Record, note

from surefoot.errors import EngineError
from surefoot.protocols import StepBatch
from surefoot.records import Group
from surefoot.runtime import sampler
from surefoot.runtime.buffer import GroupBuffer, StaleGroups
from surefoot.runtime.sampler import AsyncSampler, InFlightGroup, oldest_version
from surefoot.storage.batches import BatchLog
from surefoot.storage.ledger import Visit

SEEDS = 150
PLANTED_SEEDS = 300
SIMULATED = f"asynchronous runs simulated with {REPLICAS} replicas: none lost, twice or too old, nobody stuck"


def test_no_seed_loses_a_group_trains_one_twice_or_too_late_or_gets_stuck(record_property: Record) -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        seen += simulate(seed)
    wanted = [
        "answer lost", "cancelled", "dropped", "killed", "moved while waiting", "old", "replica crashed", "rewind",
        "saved", "stale", "stale weights", "ended by FleetError",
    ]  # fmt: skip
    assert [name for name in wanted if not seen[name]] == [], "the world was too kind"
    note(record_property, "P2", SIMULATED, SEEDS, seeds=range(SEEDS))


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(4))
def test_ten_thousand_seeds(part: int, record_property: Record) -> None:
    for seed in range(2500 * part, 2500 * (part + 1)):
        simulate(seed)
    note(record_property, "P2", SIMULATED, 2500, seeds=range(2500 * part, 2500 * (part + 1)))


def test_a_seed_replays_exactly() -> None:
    assert simulate(7) == simulate(7)


def a_seed_fails() -> str:
    """The message of the first seed that notices; a world that notices nothing fails the test."""
    for seed in range(PLANTED_SEEDS):
        try:
            simulate(seed)
        except SimulationError as error:
            assert str(error).startswith(f"seed {seed}: ")
            assert f"--seed {seed}" in str(error)
            return str(error)
    pytest.fail("the planted bug was not noticed")


def test_planted_batches_whose_age_nobody_looks_at_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupBuffer, "_evict", lambda self, where: StaleGroups())
    assert "is trained on ages" in a_seed_fails()


def test_planted_single_look_before_the_batch_fills_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version is read when the batch is asked for, not again when it forms."""
    real = AsyncSampler.next_batch

    async def next_batch(self: AsyncSampler, step: int, n: int) -> StepBatch:
        now, version = self.trained, self.trained()
        self.trained = lambda: version
        try:
            return await real(self, step, n)
        finally:
            self.trained = now

    monkeypatch.setattr(AsyncSampler, "next_batch", next_batch)
    assert "is trained on ages" in a_seed_fails()


def test_planted_stale_groups_that_are_dropped_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def send_back(self: AsyncSampler, aged: StaleGroups) -> None:
        self.ledger.drop(aged.back, "stale")
        self.batches.release(aged.back)

    monkeypatch.setattr(AsyncSampler, "_send_back", send_back)
    assert "were dropped: stale" in a_seed_fails()


async def _fly_on(self: AsyncSampler, flight: InFlightGroup, order: Any) -> None:
    """A group that takes too long is asked for again, and its answer still comes when it comes."""
    play = asyncio.ensure_future(self.runner.run(order))
    self.__dict__.setdefault("late_plays", []).append(play)
    try:
        done, _ = await asyncio.wait({play}, timeout=self.config.rollout_timeout_s / 20)
        if not done:
            self._give_up(flight, TimeoutError())
            self._flights.pop(flight.item, None)
            self._news.set()
            self._fill()
        await self._deliver(flight, (await play).group)
    except EngineError as error:
        if self.ledger.outcome(flight.lease) == "accepted":
            self._give_up(flight, error)
    except Exception as error:
        self._fatal = error
    finally:
        if self._flights.get(flight.item) is flight:
            del self._flights[flight.item]
        self._news.set()
    self._fill()


def _believe(self: AsyncSampler, arrived: Sequence[tuple[InFlightGroup, Group]]) -> None:
    """Takes whatever comes, under whichever lease."""
    for flight, group in arrived:
        self.batches.deliver({flight.item: group})
        self.ledger.complete([flight.lease])
        self.buffer.put(flight.item, oldest_version(group, flight.version), group)


def test_late_results_are_fenced_and_planted_belief_in_them_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = AsyncSampler.close

    async def close(self: AsyncSampler) -> None:
        late = self.__dict__.get("late_plays", [])
        for play in late:
            play.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        await real(self)

    monkeypatch.setattr(AsyncSampler, "close", close)
    monkeypatch.setattr(AsyncSampler, "_fly", _fly_on)
    for seed in range(20):
        simulate(seed)
    monkeypatch.setattr(AsyncSampler, "_keep_groups", _believe)
    assert "trained on twice" in a_seed_fails()


def test_planted_delivery_before_the_disk_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_groups(self: AsyncSampler, arrived: Sequence[tuple[InFlightGroup, Group]]) -> None:
        for flight, group in arrived:
            self.ledger.complete([flight.lease])
            self.batches.deliver({flight.item: group})
            self._put(flight.item, group, flight.version)

    monkeypatch.setattr(AsyncSampler, "_keep_groups", keep_groups)
    assert "its group is not in the journal" in a_seed_fails()


def test_planted_resume_that_forgets_finished_groups_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(ledger: Any, batches: BatchLog, tasks: Any, usable: Any) -> list[tuple[Visit, Group]]:
        ledger.requeue([lease.item for lease in ledger.delivered()], "restart")
        batches.release(batches.delivered())
        return []

    monkeypatch.setattr(sampler, "restore_groups", forget)
    assert "is asked for again, and its group" in a_seed_fails()


def test_planted_missing_back_pressure_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncSampler, "_room", lambda self: self.runner.capacity - len(self._flights))
    assert "groups are under way" in a_seed_fails()


def test_planted_journal_without_compositions_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def compose(self: BatchLog, step: int, items: Sequence[Visit]) -> None:
        self.release(items)

    monkeypatch.setattr(BatchLog, "compose", compose)
    a_seed_fails()


def test_planted_loss_of_wake_ups_ends_in_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for ever: not even for news that never come."""
    monkeypatch.setattr(asyncio.Event, "set", lambda self: None)
    assert simulate(0)["ended by StalledError"] > 0
