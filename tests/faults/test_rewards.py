"""Reward functions that misbehave, in real processes: each is "no verdict" under its reason, and only for the guilty.

Every reward here gives a healthy completion `GOOD` points, never 0: a 0 could only be a failure in disguise.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surefoot.envs.marks import Mark
from surefoot.envs.reward_pool import RewardJob, RewardPool
from surefoot.envs.single_turn import SingleTurnEnvironment
from surefoot.errors import RewardError
from surefoot.records import Rollout, Task, Turn

GOOD = 0.75
HANG_S, AMPLE_S = 0.5, 30.0
"""Deadlines for calls that never answer, and for calls that do, on however busy a machine."""
pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks for leaked processes in /proc")


# -- what is left behind ------------------------------------------------------------
def children_of(pid: int) -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.add(int(stat.parent.name))
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids: set[int], patience_s: float = 5.0) -> set[int]:
    deadline = time.monotonic() + patience_s
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return {pid for pid in pids if is_running(pid)}


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """Every test here, whatever its reward did: no process and no descriptor more than before."""
    descriptors, children = len(os.listdir("/proc/self/fd")), children_of(os.getpid())
    yield
    assert children_of(os.getpid()) - children == set()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def pool_of(function: Callable[..., Any], **settings: Any) -> RewardPool:
    return RewardPool({"f": function}, **{"workers": 2, "timeout_s": AMPLE_S, **settings})


def job(*completions: str) -> RewardJob:
    return RewardJob(["p"] * len(completions), list(completions))


def guilty(crime: Callable[[], Any]) -> Callable[..., list[Any]]:
    """A reward that commits `crime` when it meets the completion "bad", and is healthy otherwise."""

    def f(completions: list[str], **_: Any) -> list[Any]:
        return [crime() if c == "bad" else GOOD for c in completions]

    return f


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
        assert marks == [Mark(GOOD, None), Mark(None, reason), *[Mark(GOOD, None)] * 3]
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
        assert pool.score([job("bad")])[0]["f"] == Mark(value, None)


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
        assert {m["f"] for m in pool.score([job("a", "b"), job("c")])} == {Mark(None, "raised")}
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


# -- output ---------------------------------------------------------------------------------
def test_a_flood_of_output_is_capped_and_never_reaches_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def f(completions: list[str], **_: Any) -> list[float]:
        print("first line")
        for _i in range(100):
            print("x" * 1_000_000)
        os.write(2, b"from C, so to speak\n")
        subprocess.run(["echo", "from a child"], check=True)
        return [GOOD] * len(completions)

    log = tmp_path / "rewards.log"
    with pool_of(f, log_path=log) as pool:
        assert pool.score([job("a")])[0]["f"].value == GOOD
    assert capfd.readouterr() == ("", "")
    text = log.read_text()
    assert text.startswith("first line\nxxx")
    assert text.endswith("[more output was discarded]\n")
    assert len(text) < 1_100_000
    assert log.stat().st_mode & 0o777 == 0o600


def test_the_last_lines_before_a_death_are_in_the_story() -> None:
    def f(completions: list[str], **_: Any) -> list[float]:
        print("x" * 3_000_000)
        print("opening the pod bay doors")
        os._exit(7)

    with pool_of(f) as pool:
        pool.score([job("a")])
        story = pool.describe_failures()["died"][1]
    assert "exit code 7" in story
    assert "opening the pod bay doors" in story
    assert len(story) < 10_000


def test_text_waiting_in_the_drivers_buffer_is_printed_once() -> None:
    program = (
        "from surefoot.envs.reward_pool import RewardJob, RewardPool\n"
        "print('once')\n"
        "def f(completions, **_):\n    print('hidden'); raise SystemExit\n"
        "with RewardPool({'f': f}) as pool:\n    pool.score([RewardJob(['p'], ['c'])])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("once\n", "", 0)


# -- side effects ---------------------------------------------------------------------------
def test_inputs_are_copies() -> None:
    def f(prompts: list[Any], completions: list[Any], entry: list[Any], **_: Any) -> list[float]:
        n = len(completions)
        for each in (prompts[0], completions[0]):
            each[0]["content"] = "rewritten"
        entry[0]["answer"] = "rewritten"
        completions.clear()
        return [GOOD] * n

    columns = {"entry": {"answer": "2"}}
    task = Task("sums/1", ({"role": "user", "content": "1+1="},), columns)
    rollouts = [Rollout(task.id, "0", i, (Turn((1,), (2,), (-0.1,), 0, text="2"),)) for i in range(2)]
    with pool_of(f) as pool:
        env = SingleTurnEnvironment(pool, {"f": 1.0})
        assert [grade.reward for grade in env.grade([task, task], rollouts)] == [GOOD, GOOD]
    assert columns == {"entry": {"answer": "2"}}
    assert task.prompt == ({"role": "user", "content": "1+1="},)
    assert [rollout.text for rollout in rollouts] == ["2", "2"]


def test_a_reward_that_forks_does_not_answer_twice() -> None:
    def f(completions: list[str], **_: Any) -> list[float]:
        return [GOOD if os.fork() else 99.0] * len(completions)

    with pool_of(f, workers=1) as pool:
        for _ in range(3):
            assert pool.score([job("a", "b")])[0]["f"].value == GOOD


def daemon(marker: Path) -> Callable[[], float]:
    """Fork twice, leave the session, ignore everything: the classical way to get away."""

    def crime() -> float:
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                marker.write_text(str(os.getpid()))
                time.sleep(600)
            os._exit(0)
        os.wait()
        while not (marker.exists() and marker.read_text()):
            time.sleep(0.005)
        return GOOD

    return crime


def test_a_daemon_left_by_a_reward_is_ended_with_the_pool(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    with pool_of(guilty(daemon(marker))) as pool:
        assert pool.score([job("bad")])[0]["f"].value == GOOD
        pid = int(marker.read_text())
        assert is_running(pid)
    assert wait_until_gone({pid}) == set()


def test_a_child_of_a_hanging_reward_is_ended_with_its_worker(tmp_path: Path) -> None:
    marker = tmp_path / "pid"

    def crime() -> None:
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        marker.write_text(str(child.pid))
        child.wait()

    with pool_of(guilty(crime), timeout_s=HANG_S) as pool:
        assert pool.score([job("bad")])[0]["f"].reason == "timeout"
        assert wait_until_gone({int(marker.read_text())}) == set()


def test_a_reward_that_leaks_descriptors_gets_a_fresh_process_before_they_run_out() -> None:
    import resource

    def f(completions: list[str], **_: Any) -> list[int]:
        for _i in range(20):
            os.dup(0)
        return [os.getpid()] * len(completions)

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with pool_of(f, workers=1) as pool:
            pids = [pool.score([job("a")])[0]["f"].value for _ in range(40)]
            assert None not in pids
            assert len(set(pids)) > 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_five_hundred_bad_calls_leave_nothing_behind() -> None:
    def f(completions: list[str], **_: Any) -> list[float]:
        if completions == ["die"]:
            os._exit(3)
        if completions == ["raise"]:
            raise RuntimeError
        return [float("nan") if completions == ["nan"] else GOOD]

    kinds, before = ["die", "raise", "nan", "ok", "ok"], children_of(os.getpid())
    with pool_of(f) as pool:
        marks = pool.score([job(kinds[i % 5]) for i in range(500)])
        assert [m["f"].reason for m in marks] == ["died", "raised", "nan", None, None] * 100
        assert {m["f"].value for m in marks} == {GOOD, None}
        [nursery] = children_of(os.getpid()) - before
        assert len(children_of(nursery)) == 2


# -- the end of the driver ---------------------------------------------------------------------
DRIVER = """
import os, sys, time
from surefoot.envs.reward_pool import RewardJob, RewardPool

def f(completions, **_):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    os.write(report, b"%d\\n" % os.getpid())
    while True:
        pass

report = int(sys.argv[1])
pool = RewardPool({"f": f}, workers=2, timeout_s=600.0).start()
if sys.argv[2] == "exit":
    os.write(report, b"0\\n0\\n")
    sys.exit()
pool.score([RewardJob(["p"], ["c"])] * 2)
"""


def descendants_of(pid: int) -> set[int]:
    found, frontier = set[int](), {pid}
    while frontier:
        frontier = set().union(*(children_of(each) for each in frontier)) - found
        found |= frontier
    return found


@pytest.mark.parametrize("end", ["SIGKILL", "SIGTERM", "exit"])
def test_nothing_outlives_the_driver_however_it_ends(end: str) -> None:
    """Both workers are in a busy loop and have left a daemon; the driver has no chance to clean up."""
    reading, writing = os.pipe()
    argv = [sys.executable, "-c", DRIVER, str(writing), end]
    with subprocess.Popen(argv, pass_fds=[writing]) as driver, os.fdopen(reading, "rb") as reports:
        os.close(writing)
        for _ in range(2):
            reports.readline()
        family = descendants_of(driver.pid)
        if end != "exit":
            assert len(family) >= 5  # nursery, two workers, two daemons
            driver.send_signal(getattr(signal, end))
        driver.wait(10)
        assert wait_until_gone(family) == set()
        assert reports.read() == b""  # the end of file: nobody, seen or unseen, holds the other end


def test_a_reward_that_kills_its_parent_stops_the_run_with_a_typed_error() -> None:
    with pool_of(guilty(lambda: os.kill(os.getppid(), signal.SIGKILL))) as pool:
        with pytest.raises(RewardError, match="does not answer"):
            pool.score([job("bad")] * 4)
