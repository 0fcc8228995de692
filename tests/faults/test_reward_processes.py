"""What reward functions leave behind: output, processes, descriptors, changed inputs. Nothing may outlive the pool.

`test_rewards.py` has the failures of the calls themselves.
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

import pytest
from reward_kit import GOOD, HANG_S, children_of, guilty, is_running, job, nothing_is_left, pool_of, wait_until_gone  # noqa: F401 - the fixture works by being here

from surefoot.errors import RewardError
from surefoot.records import Rollout, Task, Turn
from surefoot.rewards.grading import SingleTurnEnvironment

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks for leaked processes in /proc")


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
    assert len(story) < 20_000


def test_text_waiting_in_the_drivers_buffer_is_printed_once() -> None:
    program = (
        "from surefoot.rewards.pool import RewardJob, RewardPool\n"
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

    with pool_of(guilty(crime), timeout_s=3 * HANG_S) as pool:
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
        [fork_server] = children_of(os.getpid()) - before
        assert len(children_of(fork_server)) == 2


# -- the end of the driver ---------------------------------------------------------------------
DRIVER = """
import os, sys, time
from surefoot.rewards.pool import RewardJob, RewardPool

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
            assert len(family) >= 5  # fork server, two workers, two daemons
            driver.send_signal(getattr(signal, end))
        driver.wait(10)
        assert wait_until_gone(family) == set()
        assert reports.read() == b""  # the end of file: nobody, seen or unseen, holds the other end


def test_a_killed_fork_server_takes_its_workers_along_and_stops_the_run_with_a_typed_error() -> None:
    before = children_of(os.getpid())
    with pool_of(guilty(lambda: None)) as pool:
        [fork_server] = children_of(os.getpid()) - before
        workers = children_of(fork_server)
        assert len(workers) == 2
        os.kill(fork_server, signal.SIGKILL)
        assert wait_until_gone(workers) == set()
        with pytest.raises(RewardError, match="does not answer"):
            pool.score([job("ok")])
