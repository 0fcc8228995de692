"""The router, story by story; `test_router_machine.py` tells random ones, and brings the crowd."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from surefoot.errors import ConfigError, InvariantError
from surefoot.runtime.router import LoadAwareRouter, Slot


async def settled() -> None:
    """Everything that is ready has run."""
    for _ in range(5):
        await asyncio.sleep(0)


def told(story: Callable[[], Awaitable[None]]) -> None:
    """Run one story, and fail rather than hang when a wake-up is lost."""

    async def bounded() -> None:
        async with asyncio.timeout(20):
            await story()

    asyncio.run(bounded())


async def full(replicas: int, capacity: int) -> tuple[LoadAwareRouter, list[Slot]]:
    """A router without a free slot, and everything that is held."""
    router = LoadAwareRouter(replicas, capacity)
    return router, [await router.acquire_slot() for _ in range(replicas * capacity)]


# -- who is next ----------------------------------------------------------------------


def test_three_replicas_are_taken_in_turn_and_then_the_first_again() -> None:
    async def story() -> None:
        router, seen = LoadAwareRouter(3), []
        for _ in range(4):
            seen.append((await router.acquire_slot(), router.loads))
        assert seen == [
            ((0, 0), [1, 0, 0]), ((1, 0), [1, 1, 0]), ((2, 0), [1, 1, 1]), ((0, 1), [2, 1, 1]),
        ]  # fmt: skip

    told(story)


def test_the_least_loaded_replica_gets_its_lowest_free_slot() -> None:
    async def story() -> None:
        router = LoadAwareRouter(2)
        held = [await router.acquire_slot() for _ in range(8)]
        assert held == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3)]
        for slot in (2, 0, 3):
            router.release_slot(1, slot)
        assert router.loads == [4, 1]
        assert [await router.acquire_slot() for _ in range(4)] == [(1, 0), (1, 2), (1, 3), (0, 4)]

    told(story)


def test_a_remembered_prefix_decides_between_equals_and_never_against_the_load() -> None:
    async def story() -> None:
        router = LoadAwareRouter(3)
        first, second = await router.acquire_slot(), await router.acquire_slot("sums")
        assert second == (1, 0)
        router.release_slot(*first)
        router.release_slot(*second)
        again = await router.acquire_slot("sums")
        assert again == (1, 0), "all loads are zero, and replica 1 knows the prefix"
        assert (await router.acquire_slot("sums"))[0] == 0, "replica 1 knows it and carries more"
        assert (await router.acquire_slot("sums"))[0] == 2

    told(story)


def test_only_the_most_recent_prefixes_are_remembered() -> None:
    async def story() -> None:
        router = LoadAwareRouter(1, remember=2)
        for prefix in ("a", "b", "a", "c"):
            router.release_slot(*await router.acquire_slot(prefix))
        assert [router.remembers(0, prefix) for prefix in "abc"] == [True, False, True]
        router.forget_prefixes()
        assert not router.remembers(0, "c")

    told(story)


def test_no_prefix_is_not_a_prefix_that_is_remembered() -> None:
    async def story() -> None:
        router = LoadAwareRouter(2)
        router.release_slot(*await router.acquire_slot())
        assert not router.remembers(0, None)

    told(story)


# -- waiting --------------------------------------------------------------------------


def test_callers_wait_in_order_and_a_late_one_overtakes_nobody() -> None:
    async def story() -> None:
        router, held = await full(2, 1)
        order: list[str] = []

        async def ask(name: str) -> None:
            await router.acquire_slot()
            order.append(name)

        tasks = [asyncio.create_task(ask(name)) for name in "abc"]
        await settled()
        assert (router.waiting, order) == (3, [])
        router.release_slot(*held[1])
        late = asyncio.create_task(ask("late"))  # asks in the very tick in which the slot was given to `a`
        await settled()
        assert order == ["a"]
        for _ in range(3):
            router.release_slot(1, 0)
            await settled()
        assert order == ["a", "b", "c", "late"]
        await asyncio.gather(*tasks, late)
        assert router.loads == [1, 1]

    told(story)


def test_a_granted_slot_counts_before_its_owner_wakes_up() -> None:
    async def story() -> None:
        router, held = await full(1, 2)
        task = asyncio.create_task(router.acquire_slot())
        await settled()
        router.release_slot(*held[0])
        assert router.loads == [2], "free for nobody else"
        assert await task == held[0]

    told(story)


def test_cancelled_while_waiting_leaves_no_slot_behind() -> None:
    async def story() -> None:
        router, held = await full(1, 1)
        first, second = (asyncio.create_task(router.acquire_slot()) for _ in range(2))
        await settled()
        first.cancel()
        await settled()
        assert router.waiting == 1
        router.release_slot(*held[0])
        assert await second == (0, 0)
        router.release_slot(0, 0)
        assert router.loads == [0]

    told(story)


@pytest.mark.parametrize("order", ["grant, cancel", "cancel, grant"])
def test_cancelled_in_the_tick_of_the_grant_the_next_caller_wakes_up(order: str) -> None:
    async def story() -> None:
        router, held = await full(1, 1)
        first, second = (asyncio.create_task(router.acquire_slot()) for _ in range(2))
        await settled()
        acts: list[Callable[[], Any]] = [lambda: router.release_slot(*held[0]), first.cancel]
        for act in acts if order == "grant, cancel" else reversed(acts):
            act()
        await settled()
        assert first.cancelled()
        assert second.done(), "the wake-up went to a caller that was gone"
        assert second.result() == (0, 0)
        router.release_slot(0, 0)
        assert router.loads == [0]

    told(story)


def test_a_timeout_is_a_cancel_like_any_other() -> None:
    async def story() -> None:
        router, held = await full(2, 2)
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(router.acquire_slot(), 0)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await router.acquire_slot()
        for slot in held:
            router.release_slot(*slot)
        assert (router.loads, router.waiting) == ([0, 0], 0)

    told(story)


def test_a_coroutine_that_is_thrown_away_leaves_no_slot_behind() -> None:
    async def story() -> None:
        router, held = await full(1, 1)
        waiting = router.acquire_slot()
        waiting.send(None)  # as far as the wait
        router.release_slot(*held[0])
        assert router.loads == [1]
        waiting.close()
        assert (router.loads, router.waiting) == ([0], 0)

    told(story)


# -- replicas that come and go ----------------------------------------------------------


def test_a_closed_replica_gets_nothing_until_it_is_open_again() -> None:
    async def story() -> None:
        router = LoadAwareRouter(2, 2)
        router.close_replica(0)
        router.close_replica(0)
        assert [await router.acquire_slot() for _ in range(2)] == [(1, 0), (1, 1)]
        waiting = asyncio.create_task(router.acquire_slot())
        await settled()
        assert not waiting.done()
        router.open_replica(0)
        assert await waiting == (0, 0)
        assert router.is_open == [True, True]

    told(story)


def test_slots_of_a_dead_replica_are_released_and_go_to_nobody() -> None:
    async def story() -> None:
        router, _ = await full(2, 1)
        waiting = asyncio.create_task(router.acquire_slot())
        await settled()
        router.close_replica(0)
        router.release_slot(0, 0)
        await settled()
        assert not waiting.done()
        assert router.loads == [0, 1]
        router.release_slot(1, 0)
        assert await waiting == (1, 0)

    told(story)


def test_with_every_replica_closed_callers_wait_even_without_a_limit() -> None:
    async def story() -> None:
        router = LoadAwareRouter(2)
        router.close_replica(0)
        router.close_replica(1)
        tasks = [asyncio.create_task(router.acquire_slot()) for _ in range(5)]
        await settled()
        assert (router.waiting, router.loads) == (5, [0, 0])
        router.open_replica(1)
        assert await asyncio.gather(*tasks) == [(1, i) for i in range(5)]

    told(story)


def test_a_replaced_replica_has_an_empty_cache_and_keeps_its_old_load() -> None:
    async def story() -> None:
        router = LoadAwareRouter(2)
        await router.acquire_slot("sums")
        router.close_replica(0)
        router.open_replica(0)
        assert not router.remembers(0, "sums")
        assert router.loads == [1, 0]
        assert (await router.acquire_slot("sums"))[0] == 1

    told(story)


# -- misuse ---------------------------------------------------------------------------


@pytest.mark.parametrize("slot", [(0, 1), (1, 0), (2, 0), (-1, 0), (-2, 0), (0, -1), (True, 0), (0.0, 0), (0, False)])
def test_releasing_what_is_not_held_is_refused_and_changes_nothing(slot: Any) -> None:
    async def story() -> None:
        router = LoadAwareRouter(2)
        assert await router.acquire_slot() == (0, 0)
        with pytest.raises(InvariantError, match=r"is not held|there is no replica"):
            router.release_slot(*slot)
        assert router.loads == [1, 0]

    told(story)


def test_releasing_twice_is_refused_also_when_another_caller_waits() -> None:
    async def story() -> None:
        router, held = await full(1, 1)
        router.release_slot(*held[0])
        with pytest.raises(InvariantError, match="slot 0 of replica 0 is not held"):
            router.release_slot(*held[0])
        assert router.loads == [0]

    told(story)


@pytest.mark.parametrize("index", [-1, 2, 10**30, True, None, "0"])
def test_a_replica_that_does_not_exist_cannot_be_opened_or_closed(index: Any) -> None:
    router = LoadAwareRouter(2)
    for act in (router.close_replica, router.open_replica, lambda i: router.remembers(i, "x")):
        with pytest.raises(InvariantError, match="there is no replica"):
            act(index)


@pytest.mark.parametrize("bad", [0, -1, True, 1.0, "2", None])
def test_numbers_that_make_everybody_wait_are_refused(bad: Any) -> None:
    with pytest.raises(ConfigError, match="replicas = "):
        LoadAwareRouter(bad)
    with pytest.raises(ConfigError, match="remember = "):
        LoadAwareRouter(1, remember=bad)
    if bad is not None:
        with pytest.raises(ValueError, match="capacity = "):
            LoadAwareRouter(1, bad)


def test_a_prefix_that_cannot_be_remembered_is_refused_by_its_own_caller() -> None:
    async def story() -> None:
        router, held = await full(1, 1)
        with pytest.raises(TypeError, match="unhashable"):
            await router.acquire_slot(["not", "hashable"])  # type: ignore[arg-type]
        router.release_slot(*held[0])
        assert (router.loads, router.waiting) == ([0], 0)

    told(story)


@pytest.mark.parametrize("ending", ["falls through", "raises", "cancelled"])
def test_the_context_manager_gives_back_however_the_block_ends(ending: str) -> None:
    async def story() -> None:
        router = LoadAwareRouter(1, 1)

        async def work() -> None:
            async with router.slot("sums") as (replica, slot):
                assert (replica, slot, router.loads) == (0, 0, [1])
                if ending == "raises":
                    raise RuntimeError("the engine is gone")
                if ending == "cancelled":
                    await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await settled()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert router.loads == [0]

    told(story)
