"""Rewards that misbehave, kind by kind: what each does when it meets the completion "bad", and what is to come of it.

Each call is a function of one number, its seed: kind, siblings and companions follow from it, so that a failure can be
played again alone:

    python tests/support/reward_kinds.py --seed 17
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from reward_kit import AMPLE_S

from surefoot.rewards.pool import RewardJob, RewardPool

BAD = "bad"
DEADLINE_S = 0.3
FINE, REFUSED = "fine", "refused"
"""Beside the reasons of `marks.py`: the call is answered as if nothing had happened, or the run stops with RewardError."""
CAP_MB = 256


def healthy(text: str) -> float:
    """What a completion earns when its reward is well: never 0, different for every text, exact in binary."""
    return 1.0 + zlib.crc32(text.encode()) / 2**33


# -- crimes: called once for the bad completion, in the worker -----------------------------------
def raise_error() -> None:
    raise ZeroDivisionError("the reward's own bug")


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def raise_cancelled() -> None:
    raise asyncio.CancelledError


def raise_own_base() -> None:
    class Unprintable(BaseException):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    raise Unprintable


def recurse() -> Any:
    return recurse()


def kill_oneself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_ones_group() -> None:
    os.killpg(0, signal.SIGKILL)


def segfault() -> None:
    ctypes.string_at(0)


def close_everything() -> None:
    os.closerange(0, 1024)


def sleep_on() -> None:
    time.sleep(600)


def spin() -> None:
    while True:
        pass


def shrug_off_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    spin()


def hold_the_gil() -> None:
    ctypes.PyDLL(None).sleep(600)  # a C call that never lets another thread run


def stop_oneself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def wait_for_oneself() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def wait_for_a_child() -> None:
    subprocess.run(["sleep", "600"], start_new_session=True, check=False)


def fork_many() -> None:
    for _ in range(20):
        if os.fork() == 0:
            os.fork()
            time.sleep(600)
    time.sleep(600)


def leave_a_daemon() -> float:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        os._exit(0)
    os.wait()
    return healthy(BAD)


def print_much() -> float:
    for _ in range(8):
        print("x" * 1_000_000)
    return healthy(BAD)


def leak_descriptors() -> float:
    for _ in range(50):
        os.dup(0)
    return healthy(BAD)


def leak_threads() -> float:
    for _ in range(10):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return healthy(BAD)


def take_memory() -> None:
    kept = bytearray(b"x") * (2 * CAP_MB * 2**20)
    while kept:
        pass


def take_absurd_memory() -> int:
    return len(bytearray(2**42))


class Prickly:
    """A number that cannot be had."""

    def __float__(self) -> float:
        raise RuntimeError("not today")

    def __repr__(self) -> str:
        raise RuntimeError("nor shown")


@dataclass(frozen=True)
class Kind:
    """One way to go wrong."""

    name: str
    outcome: tuple[str, ...]
    """Reasons that may come of it; of several, each is honest."""
    crime: Callable[[], Any] | None = None
    """What the bad completion's verdict is computed by."""
    shape: Callable[[list[Any]], Any] | None = None
    """What is made of the whole list, where the list itself is the crime."""

    def reward(self, prompts: list[Any], completions: list[Any]) -> Any:
        """What the user's function would return."""
        values = [healthy(c) if c != BAD or self.crime is None else self.crime() for c in completions]
        if BAD in completions and self.shape is not None:
            return self.shape(values)
        if self.name == "mutates its inputs":
            prompts.clear()
            completions[:] = ["rewritten"] * 9
        return values


def _each(outcome: str, **crimes: Callable[[], Any]) -> Iterator[Kind]:
    for name, crime in crimes.items():
        yield Kind(name.replace("_", " "), tuple(outcome.split("|")), crime)


KINDS = (
    *_each(
        "raised", raises=raise_error, exits=sys.exit, interrupts=raise_interrupt, cancels=raise_cancelled,
        own_BaseException=raise_own_base, recurses=recurse,
    ),
    *_each(
        "died", os_exit=lambda: os._exit(0), kills_itself=kill_oneself, kills_its_group=kill_ones_group,
        segfaults=segfault, aborts=os.abort, closes_its_sockets=close_everything,
    ),
    *_each(
        "timeout", sleeps=sleep_on, spins=spin, ignores_signals=shrug_off_signals, holds_the_GIL_in_C=hold_the_gil,
        stops_itself=stop_oneself, deadlocks=wait_for_oneself, waits_for_a_child=wait_for_a_child, fork_bomb=fork_many,
    ),
    *_each("died|raised", takes_memory=take_memory, takes_absurd_memory=take_absurd_memory),
    *_each("nan", nan=lambda: float("nan"), infinity=lambda: -float("inf"), beyond_floats=lambda: 10**400),
    *_each("abstained", none=lambda: None),
    *_each(
        "not_a_number", text=lambda: "1.0", complex=lambda: 1j, dict=lambda: {"reward": 1.0}, array=lambda: np.ones(2),
        prickly=Prickly, function=lambda: healthy,
    ),
    *_each(
        FINE, daemon=leave_a_daemon, prints_much=print_much, leaks_descriptors=leak_descriptors,
        leaks_threads=leak_threads, array_of_0_dimensions=lambda: np.array(healthy(BAD)),
    ),
    Kind("mutates its inputs", (FINE,)),
    Kind("one too few", (REFUSED,), shape=lambda values: values[1:]),
    Kind("one too many", (REFUSED,), shape=lambda values: [*values, 1.0]),
    Kind("a generator", (REFUSED,), shape=lambda values: (value for value in values)),
    Kind("a dict of all", (REFUSED,), shape=lambda values: dict(enumerate(values))),
    Kind("one bare number", (REFUSED,), shape=lambda values: 1.0),
)  # fmt: skip
"""Every kind in one tuple; `seed % len(KINDS)` picks."""


def reward(prompts: list[Any], completions: list[Any], kind: list[int], **_: Any) -> Any:
    """The one reward function of these tests: the tasks' column says how it misbehaves."""
    return KINDS[kind[0]].reward(prompts, completions)


class WatchedPool(RewardPool):
    """A pool that notes how long past its deadline each failed call was really over, its worker ended.

    Healthy calls get ample time on however busy a machine; the guilty keep the pool's short deadline.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__({"f": reward}, workers=2, timeout_s=DEADLINE_S, memory_mb=CAP_MB, **settings)
        self.overruns: list[float] = []

    def _hand_out(self) -> None:
        super()._hand_out()
        for call in self._busy.values():
            kind = KINDS[self._jobs[call.job].columns["kind"][0]]
            hangs = BAD in [self._jobs[call.job].completions[row] for row in call.rows] and "timeout" in kind.outcome
            call.deadline = call.deadline if hangs else max(call.deadline, time.monotonic() + AMPLE_S)

    def _fail(self, slot: int, reason: str) -> None:
        deadline = self._busy[slot].deadline
        super()._fail(slot, reason)
        self.overruns.append(time.monotonic() - deadline)


@dataclass(frozen=True)
class Case:
    """One bad call with its siblings, and a healthy group beside it."""

    seed: int
    kind: Kind
    guilty: RewardJob
    beside: RewardJob

    @classmethod
    def of(cls, seed: int) -> Case:
        rng = random.Random(seed)
        number = seed % len(KINDS)
        siblings = [f"sibling {rng.random()}" for _ in range(rng.randint(0, 2))]
        siblings.insert(rng.randint(0, len(siblings)), BAD)
        beside = [f"healthy {rng.random()}" for _ in range(rng.randint(1, 3))]
        return cls(seed, KINDS[number], _job(siblings, number), _job(beside, number))

    def problem(self, pool: RewardPool) -> str | None:
        """Score it and say what was wrong with the outcome, if anything; untyped exceptions pass through."""
        from surefoot.errors import RewardError

        try:
            marks = [mark["f"] for mark in pool.score([self.guilty, self.beside])]
        except RewardError as error:
            if REFUSED not in self.kind.outcome:
                return f"{self}: refused: {error}"
            marks = [mark["f"] for mark in pool.score([self.beside])]
            return self._wrong(self.beside, marks)
        return self._wrong(self.guilty, marks[: self.guilty.size]) or self._wrong(
            self.beside, marks[self.guilty.size :]
        )

    def _wrong(self, job: RewardJob, marks: list[Any]) -> str | None:
        for text, mark in zip(job.completions, marks, strict=True):
            expected = self.kind.outcome if text == BAD else (FINE,)
            if (mark.reason or FINE) not in expected or (mark.reason is None and mark.value != healthy(text)):
                return f"{self}: {text!r} got {mark}, expected {expected}"
        return None

    def __str__(self) -> str:
        return f"seed {self.seed} ({self.kind.name}; replay: python tests/support/reward_kinds.py --seed {self.seed})"


def _job(completions: list[str], kind: int) -> RewardJob:
    return RewardJob(["p"] * len(completions), completions, {"kind": [kind] * len(completions)})


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description="Play one bad reward call again.")
    parser.add_argument("--seed", type=int, required=True)
    case = Case.of(parser.parse_args().seed)
    with WatchedPool() as pool:
        problem = case.problem(pool)
        stories = "\n".join(story for _, story in pool.describe_failures().values())
    sys.exit(problem or print(f"{case}: as it should be\n{stories}"))
