"""Reward functions that misbehave, in real processes: each is "no verdict" under its reason, and only for the guilty.

Every reward here gives a healthy completion `GOOD` points, never 0: a 0 could only be a failure in disguise.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reward_kit import AMPLE_S, GOOD, HANG_S, guilty, job, nothing_is_left, pool_of, wait_until_gone  # noqa: F401 - the fixture works by being here

from surefoot.errors import RewardError
from surefoot.guards.reward_values import RewardValue

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks for leaked processes in /proc")


# -- crimes -----------------------------------------------------------------------------
def raise_error() -> None:
    raise ZeroDivisionError("the reward's own bug")


def interrupt() -> None:
    raise KeyboardInterrupt


def sleep_on() -> None:
    time.sleep(600)


def spin() -> None:
    while True:
        pass


def shrug_off_sigterm() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    spin()


def stop_oneself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep_in_a_child() -> None:
    subprocess.run(["sleep", "600"], start_new_session=True, check=False)


def kill_oneself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_ones_group() -> None:
    os.killpg(0, signal.SIGKILL)


def crash() -> None:
    import ctypes

    ctypes.string_at(0)


def close_everything() -> None:
    os.closerange(0, 1024)


def raise_unprintable() -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    raise Unprintable


CRIMES = [
    (raise_error, "raised"), (sys.exit, "raised"), (interrupt, "raised"), (raise_unprintable, "raised"),
    (sleep_on, "timeout"), (spin, "timeout"), (shrug_off_sigterm, "timeout"), (stop_oneself, "timeout"), (sleep_in_a_child, "timeout"),
    (lambda: os._exit(0), "died"), (kill_oneself, "died"), (kill_ones_group, "died"), (crash, "died"), (close_everything, "died"),
    (lambda: None, "abstained"), (lambda: float("nan"), "nan"), (lambda: -float("inf"), "nan"), (lambda: 10**400, "nan"),
    (lambda: "1.0", "not_a_number"), (lambda: 1j, "not_a_number"), (lambda: {"reward": 1}, "not_a_number"),
    (lambda: [1.0], "not_a_number"), (lambda: np.ones(2), "not_a_number"), (object, "not_a_number"),
]  # fmt: skip


@pytest.mark.parametrize(("crime", "reason"), CRIMES, ids=[f"{reason}-{i}" for i, (_, reason) in enumerate(CRIMES)])
def test_only_the_guilty_completion_loses_its_verdict(crime: Callable[[], Any], reason: str) -> None:
    with pool_of(guilty(crime), timeout_s=HANG_S if reason == "timeout" else AMPLE_S) as pool:
        marks = [m["f"] for m in pool.score([job("ok", "bad", "ok"), job("ok", "ok")])]
        assert marks == [RewardValue(GOOD, None), RewardValue(None, reason), *[RewardValue(GOOD, None)] * 3]
        assert [m["f"].value for m in pool.score([job("ok")])] == [GOOD]  # and the pool goes on
        [(found, (count, story))] = pool.describe_failures().items()
        assert (found, count) == (reason, 1)
        assert story.startswith("f, completion 1:")


@pytest.mark.parametrize(
    ("returned", "value"),
    [(True, 1.0), (np.float32(0.5), 0.5), (np.array(2), 2.0), (-0.0, 0.0), (1e308, 1e308)],
    ids=repr,
)
def test_numbers_of_every_make_cross_the_process_unharmed(returned: Any, value: float) -> None:
    with pool_of(guilty(lambda: returned)) as pool:
        assert pool.score([job("bad")])[0]["f"] == RewardValue(value, None)


@pytest.mark.parametrize(
    ("returned", "got"),
    [
        (lambda n: [GOOD] * (n - 1), "2 values for 3"), (lambda n: [GOOD] * (n + 1), "4 values for 3"), (lambda n: [], "0 values for 3"),
        (lambda n: GOOD, "a float instead of a list for 3"), (lambda n: (GOOD for _ in range(n)), "a generator instead"),
        (lambda n: dict.fromkeys(range(n), GOOD), "a dict instead"), (lambda n: None, "a NoneType instead"),
        (lambda n: "abc", "a str instead"), (lambda n: np.ones((n, 1)), "a ndarray instead"),
    ],
)  # fmt: skip
def test_a_list_of_the_wrong_shape_is_refused_at_once_and_named(returned: Callable[[int], Any], got: str) -> None:
    def f(completions: list[str], **_: Any) -> Any:
        return returned(len(completions)) if len(completions) == 3 else [GOOD] * len(completions)

    with pool_of(f) as pool:
        with pytest.raises(RewardError, match=got) as caught:
            pool.score([job("a"), job("a", "b", "c"), job("d")])
        assert "reward function f returned" in caught.value.what
        assert caught.value.exit_code == 4
        assert [m["f"].value for m in pool.score([job("x"), job("y")])] == [GOOD, GOOD]


def test_no_answer_of_an_abandoned_call_is_taken_for_a_later_one() -> None:
    """The slow call is still running when the malformed one is refused; its answer (1) must not surface."""

    def f(completions: list[str], **_: Any) -> list[float]:
        if completions == ["slow"]:
            time.sleep(0.1)
            return [1.0]
        return [] if completions == ["malformed"] else [GOOD]

    with pool_of(f) as pool:
        with pytest.raises(RewardError):
            pool.score([job("slow"), job("malformed")])
        time.sleep(0.2)
        assert [m["f"].value for m in pool.score([job("ok")] * 4)] == [GOOD] * 4


# -- deadlines ----------------------------------------------------------------------------
@pytest.mark.parametrize("crime", [sleep_on, shrug_off_sigterm])
def test_a_hanging_call_is_ended_at_its_deadline_and_others_proceed(crime: Callable[[], Any]) -> None:
    with pool_of(guilty(crime), timeout_s=HANG_S) as pool:
        started = time.monotonic()
        marks = [m["f"].value for m in pool.score([job("bad"), *[job("ok")] * 20])]
        assert marks == [None, *[GOOD] * 20]
        assert HANG_S <= time.monotonic() - started < 60  # it would have gone on for 600


def test_a_timeout_says_where_it_was_stuck_and_a_crash_says_how_it_ended() -> None:
    with pool_of(guilty(sleep_on), timeout_s=HANG_S) as pool:
        pool.score([job("bad")])
        assert "in sleep_on" in pool.describe_failures()["timeout"][1]
    with pool_of(guilty(kill_oneself)) as pool:
        pool.score([job("bad")])
        assert "signal SIGKILL" in pool.describe_failures()["died"][1]
    with pool_of(guilty(crash)) as pool:
        pool.score([job("bad")])
        assert "in crash" in pool.describe_failures()["died"][1]


def test_the_first_traceback_of_each_kind_is_kept_and_all_are_counted() -> None:
    def f(completions: list[str], **_: Any) -> list[float]:
        raise ValueError(f"cannot read {completions}")

    with pool_of(f, workers=1) as pool:
        assert {m["f"] for m in pool.score([job("a", "b"), job("c")])} == {RewardValue(None, "raised")}
        count, story = pool.describe_failures()["raised"]
    assert count == 3
    assert "Traceback" in story
    assert "ValueError: cannot read ['" in story


def test_a_reward_that_raises_for_every_third_completion_loses_exactly_those() -> None:
    completions = ["bad" if i % 3 == 0 else "ok" for i in range(48)]
    with pool_of(guilty(raise_error)) as pool:
        marks = pool.score([job(*completions[i : i + 8]) for i in range(0, 48, 8)])
        assert [m["f"].reason for m in marks] == ["raised" if c == "bad" else None for c in completions]
        assert pool.describe_failures()["raised"][0] == 16


def test_a_worker_that_ends_between_calls_costs_nobody_a_verdict() -> None:
    with pool_of(lambda completions, **_: [os.getpid()] * len(completions), workers=1) as pool:
        first = int(pool.score([job("a", "b")])[1]["f"].value or 0)
        os.kill(first, signal.SIGKILL)
        assert wait_until_gone({first}) == set()
        second = pool.score([job("a", "b")])[1]["f"].value
        assert second not in (None, first)
        assert pool.describe_failures() == {}
