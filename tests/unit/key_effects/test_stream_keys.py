"""Keys of sampling ahead: how old a batch may be, and how long one group may take."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from virtual_clock import run_virtually

from surefoot.records import Group, Rollout, Task, Turn
from surefoot.runtime.requests import RolloutRequest, RolloutResult, Sampling
from surefoot.runtime.sampler import AsyncSampler
from surefoot.storage.batches import BatchLog
from surefoot.storage.files import Journal
from surefoot.storage.ledger import Ledger

AHEAD = {"importance_sampling_correction": True}


@pytest.mark.config_key("max_staleness")
def test_staleness_lets_groups_be_older_than_the_weights_and_never_more_than_it_says(ran: Any) -> None:
    plain = ran(max_steps=4)
    assert not any(name.startswith(("async/", "off_policy/")) for row in plain.metrics for name in row)
    ahead = ran(max_steps=8, max_staleness=1, **AHEAD)
    ages = [row["async/staleness_max"] for row in ahead.metrics if "loss" in row]
    assert max(ages) == 1.0, "sampling went on while the learner learned"
    assert ages[0] == 0.0


class Slow:
    """Every group takes 100 seconds of a clock that jumps."""

    capacity = 50

    async def run(self, order: RolloutRequest) -> RolloutResult:
        await asyncio.sleep(100.0)
        turn = Turn((1,), (2, 3), (-0.1, -0.2), 0)
        return RolloutResult(
            Group(order.task, order.group, (Rollout(order.task.id, order.group, 0, (turn,), 1.0),)), (None,)
        )


@pytest.mark.config_key("rollout_timeout_s")
@pytest.mark.parametrize(("timeout", "given_up"), [(99.0, True), (101.0, False)])
def test_a_group_that_takes_longer_than_it_may_is_given_up(
    timeout: float, given_up: bool, configure: Any, tmp_path: Path
) -> None:
    config = configure(max_staleness=1, rollout_timeout_s=timeout, **AHEAD).config
    tasks = [Task(id=f"t{i}", prompt="?") for i in range(9)]

    def order(task: Task, visit: int, position: int) -> RolloutRequest:
        return RolloutRequest(task, (1,), Sampling(4, 1.0, 4, 8), "train", visit, position)

    async def first_batch() -> Any:
        ledger = Ledger.open(Journal.create(tmp_path / "ledger.journal"))
        stream = AsyncSampler(ledger, BatchLog(tmp_path), tasks, Slow(), order, config=config, trained=lambda: 0)
        drawing = asyncio.ensure_future(stream.next_batch(1, config.tasks_per_step))
        await asyncio.sleep(100.5)
        seen = dict(ledger.balance().requeued), drawing.done()
        drawing.cancel()
        await stream.close()
        return seen

    assert run_virtually(first_batch()) == (({"timeout": 2}, False) if given_up else ({}, True))
