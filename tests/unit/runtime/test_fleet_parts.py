"""What a fleet is made of: recipes that travel, a thread that can be interrupted, players that wait for all."""

from __future__ import annotations

import asyncio
import pickle
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fleet_kit import FakeTransport, fleet_of, played

from surefoot.engines.openai import KEY_VARIABLE
from surefoot.errors import RewardError, TaskError
from surefoot.records import Task
from surefoot.rewards.functions import exact_answer
from surefoot.run.build import ServerEngineSpec
from surefoot.runtime.replica_pool import PoolBatchRunner
from surefoot.runtime.requests import Sampling
from surefoot.runtime.specs import FromFile, ProcessSpec, WorkerSpec, portable
from surefoot.runtime.threads import EventLoopThread
from surefoot.system.user_code import load_function
from surefoot.tools.mcp.servers import Server
from surefoot.tools.toolkits import ToolkitSpec

SAMPLING = Sampling(2, 1.0, 4, 8)


def test_a_reward_of_the_users_file_is_found_again_by_file_and_name(tmp_path: Path) -> None:
    file = tmp_path / "my rewärds.py"
    file.write_text("def score(completions, **columns):\n    return [1.0] * len(completions)\n\nother = score\n")
    function = load_function(f"{file}:score", tmp_path)
    closure = lambda completions, **columns: [0.0]  # noqa: E731
    found = portable({"score": function, "exact": exact_answer, "mine": closure})
    assert found == {"score": FromFile(str(file), "score"), "exact": exact_answer, "mine": closure}
    assert pickle.loads(pickle.dumps(found["score"])) == found["score"]


@pytest.mark.parametrize(("asked", "workers", "each"), [(2, 1, 2), (2, 2, 1), (5, 2, 3), (1, 8, 1)])
def test_reward_processes_are_shared_out_and_every_worker_has_one(asked: int, workers: int, each: int) -> None:
    recipe = WorkerSpec({}, {}, None, asked, 1.0, 0, None, 0, 10)  # type: ignore[arg-type]
    assert recipe.shared_by(workers).reward_workers == each


def test_a_process_is_given_the_tokens_that_it_sends_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TOOL_TOKEN", KEY_VARIABLE, "OTHER_TOKEN", "JUDGE_KEY"):
        monkeypatch.setenv(name, f"canary of {name}")
    tools = ToolkitSpec(
        (Server("far", url="https://example.org/mcp", token_env="TOOL_TOKEN"), Server("b", command=("x",)))
    )
    worker = WorkerSpec({}, {}, None, 1, 1.0, 0, None, 0, 10, tools)  # type: ignore[arg-type]
    process = ProcessSpec(tmp_path, 1, True).also(["JUDGE_KEY", "NOT_SET_ANYWHERE"])
    assert set(process.also(worker.variables).passed) == {"JUDGE_KEY", "TOOL_TOKEN"}
    assert set(process.also(ServerEngineSpec("http://127.0.0.1:1/v1", 1).variables).passed) == {
        "JUDGE_KEY",
        KEY_VARIABLE,
    }
    assert worker.shared_by(2).variables == ("TOOL_TOKEN",)
    assert "canary" not in repr(process)


def test_what_a_process_prints_and_how_it_crashes_goes_to_its_log_alone(tmp_path: Path) -> None:
    script = (
        "import os, sys, signal\nfrom pathlib import Path\n"
        "from surefoot.runtime.specs import ProcessSpec\n"
        f"ProcessSpec(Path({str(tmp_path / 'logs')!r}), 1, True).enter('engine 3')\n"
        "print('héllo')\nprint('to stderr', file=sys.stderr)\nos.kill(os.getpid(), signal.SIGSEGV)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    log = tmp_path / "logs" / "engine-3.log"
    said = log.read_text(encoding="utf-8")
    assert done.returncode == -signal.SIGSEGV
    assert (done.stdout, done.stderr) == ("", "")
    assert "engine 3 begins as process" in said
    assert "héllo" in said
    assert "to stderr" in said
    assert "Fatal Python error: Segmentation fault" in said
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_a_wait_that_is_interrupted_has_cancelled_its_work_when_it_ends() -> None:
    ends: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ends.append("cancelled")

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    thread = EventLoopThread()
    former = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            thread.wait(work())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
        thread.close()
    thread.close()
    assert ends == ["cancelled"]


@pytest.fixture
def players() -> Any:
    thread = EventLoopThread()

    async def make() -> tuple[FakeTransport, Any]:
        transport = FakeTransport()
        return transport, await fleet_of(transport)

    transport, fleet = thread.wait(make())

    class Own:
        closed = False

        def explain_failures(self) -> str:
            return "\n    1 x own"

        def close(self) -> None:
            self.closed = True

    yield transport, PoolBatchRunner(fleet, thread, Own(), {f"t{n}": (1, 2) for n in range(9)})  # type: ignore[arg-type]
    thread.wait(fleet.close())
    thread.close()


def tasks(count: int) -> list[Task]:
    return [Task(id=f"t{n}", prompt="?") for n in range(count)]


def test_groups_come_in_the_order_of_their_tasks(players: Any) -> None:
    _, crew = players
    found = crew.run_rollouts(tasks(9), SAMPLING, purpose="eval", step=0)
    assert [p.group.task.id for p in found] == [f"t{n}" for n in range(9)]
    assert [p.group.id for p in found] == [f"eval/0/{n}" for n in range(9)]


def test_the_first_error_ends_the_wait_and_nothing_goes_on(players: Any) -> None:
    transport, crew = players

    async def act(worker: Any, asked: Any, engine: Any, attempt: int) -> Any:
        if asked.position == 2:
            raise RewardError("the reward broke", "why", "fix")
        await asyncio.Event().wait()

    transport.act = act
    with pytest.raises(RewardError, match="the reward broke"):
        crew.run_rollouts(tasks(4), SAMPLING, purpose="train", step=1)
    assert crew.fleet.engine_router.loads == [0, 0]


def test_a_task_that_was_never_encoded_is_refused(players: Any) -> None:
    _, crew = players
    with pytest.raises(TaskError, match="never encoded"):
        crew.run_rollouts([Task(id="stranger", prompt="?")], SAMPLING, purpose="train", step=1)


def test_complaints_of_the_workers_graders_are_told_before_the_drivers_own(players: Any) -> None:
    from surefoot.runtime.replicas import RolloutReport

    transport, crew = players
    assert crew.environment.explain_failures() == "\n    1 x own"

    async def act(worker: Any, asked: Any, engine: Any, attempt: int) -> Any:
        return RolloutReport(asked.group, attempt, played(asked), "\n    2 x score:raised")

    transport.act = act
    crew.run_rollouts(tasks(1), SAMPLING, purpose="train", step=1)
    assert crew.environment.explain_failures() == "\n    2 x score:raised"
