"""Environments in a process and a Python of their own: what they see, and what becomes of the bad ones."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import ToolError, ToolFailedError
from surefoot.records import Task
from surefoot.system.frames import LinePipe, PipeEndedError, PipeFloodedError
from surefoot.system.process import descendants
from surefoot.tools.python.foreign import ForeignToolkit, ProcessRunner
from surefoot.tools.python.pool import EnvLimits

PYTHON = [sys.executable, "-S", "-E"]
"""Without site packages: none of ours can be imported there."""
WRAPPER = '''
import os, sys, time, subprocess, signal
import arena  # only importable over there

class Env:
    def reset(self, **row):
        self.game = arena.Game(row.get("level", 1))
        self.row = row
        print("noise on standard output")
        return "level %s" % self.game.level

    async def act(self, power: int) -> dict:
        """Act.

        Args:
            power: how much
        """
        return {"score": self.game.act(power), "canary": self.game.canary}

    def mark(self, canary: str) -> str:
        """Leave a mark.

        Args:
            canary: the mark
        """
        self.game.canary = canary
        return "ok"

    def look(self, what: str) -> str:
        """Look at something.

        Args:
            what: one of several
        """
        return {
            "packages": " ".join(sorted({name.split(".")[0] for name in sys.modules})),
            "environment": " ".join(os.environ),
            "path": os.pathsep.join(sys.path),
            "pid": str(os.getpid()),
            "row": repr(sorted(self.row.items())),
        }[what]

    def misbehave(self, how: str) -> str:
        """Do something bad.

        Args:
            how: what
        """
        if how == "raise":
            raise LookupError("no such room")
        if how == "exit":
            sys.exit(7)
        if how == "die":
            print("last words"); os._exit(9)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            while True: time.sleep(60)
        if how == "spawn":
            subprocess.Popen(["sleep", "600"]); os._exit(5)
        if how == "flood":
            return "x" * (20 << 20)
        if how == "memory":
            raise MemoryError()
        if how == "close":
            os.closerange(3, 64)
        if how == "garbage":
            for fd in range(3, 12):
                try: os.write(fd, b"this is no answer\\n")
                except OSError: pass
        if how == "endless line":
            for fd in range(3, 12):
                try:
                    while True: os.write(fd, b"x" * 65536)
                except OSError: pass
        if how == "down":
            class ToolFailedError(Exception):
                reason = "arena_down"
            raise ToolFailedError("the arena is closed")
        return "fine"

    def get_reward(self):
        rewards = {"nan": float("nan"), "text": "much", "none": None}
        return rewards.get(self.row.get("reward"), self.game.score / 10)


class Walk:
    """The other form."""
    def reset(self, *, seed=None, options=None):
        self.at = 0
        return "seed %s" % seed, {}
    def step(self, action):
        self.at += 1
        return "at %s" % self.at, 0.5, self.at == 2, False, {}
    def close(self):
        open(os.environ["CLOSED"], "a").write("closed ")
'''
ARENA = """
class Game:
    def __init__(self, level):
        self.level, self.score, self.canary = level, 0, "clean"
    def act(self, power):
        self.score += power
        return self.score
"""


@pytest.fixture(scope="module")
def wrapper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("a foreign folder")
    (folder / "arena.py").write_text(ARENA)
    (folder / "wrap.py").write_text(WRAPPER)
    return folder / "wrap.py"


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before, threads = set(descendants(os.getpid())), set(threading.enumerate())
    files = set(os.listdir("/proc/self/fd"))
    yield
    assert set(descendants(os.getpid())) <= before, "a process was left behind"
    assert set(threading.enumerate()) <= threads, "a thread was left behind"
    assert len(os.listdir("/proc/self/fd")) <= len(files), "a descriptor was left behind"


@pytest.fixture
def kit(wrapper: Path) -> Iterator[ForeignToolkit]:
    toolkit = ForeignToolkit(PYTHON, wrapper, "Env", limits=EnvLimits(max_chars=100_000))
    yield toolkit
    toolkit.close()


def task(**columns: Any) -> Task:
    return Task(id="t", prompt="?", columns=columns)


def test_a_world_that_only_the_other_python_can_import_is_played_from_here(kit: ForeignToolkit) -> None:
    with pytest.raises(ImportError):
        __import__("arena")
    box = kit.open(task(level=4, word="ä ✓"), "train/0/0/0", seed=0)
    assert box.opening == "level 4"
    assert box.call("act", {"power": 3}, 10).text == '{"score": 3, "canary": "clean"}'
    assert box.call("act", {"power": "3"}, 10).outcome == "refused"
    assert "('word', 'ä ✓')" in box.call("look", {"what": "row"}, 10).text
    assert box.reward() == 0.3


def test_nothing_of_ours_is_loaded_or_found_over_there(kit: ForeignToolkit, monkeypatch: pytest.MonkeyPatch) -> None:
    box = kit.open(task(), "train/0/0/0", seed=0)
    loaded = box.call("look", {"what": "packages"}, 10).text.split()
    assert not {"surefoot", "pydantic", "numpy", "torch", "typer"} & set(loaded)
    path = box.call("look", {"what": "path"}, 10).text.split(os.pathsep)
    assert [entry for entry in path if entry.rstrip("/").endswith("envs") or "site-packages" in entry] == []


def test_secrets_and_our_python_path_are_not_handed_over_and_what_you_add_is(
    wrapper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_API_KEY", "s3cr3t-value")
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("PLAIN_WORD", "x")
    monkeypatch.setenv("LC_TIME", "C")
    toolkit = ForeignToolkit(PYTHON, wrapper, "Env", env={"ARENA_TOKEN": "given"})
    seen = toolkit.open(task(), "train/0/0/0", 0).call("look", {"what": "environment"}, 10).text.split()
    toolkit.close()
    assert {"PATH", "LC_TIME", "ARENA_TOKEN"} <= set(seen)
    assert not {"MY_API_KEY", "PYTHONPATH", "PLAIN_WORD"} & set(seen)


def test_planted_deny_list_hands_over_what_nobody_would_suspect(wrapper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIN_WORD", "x")
    monkeypatch.setattr("surefoot.tools.python.foreign.inherited", lambda: dict(os.environ))
    toolkit = ForeignToolkit(PYTHON, wrapper, "Env")
    seen = toolkit.open(task(), "train/0/0/0", 0).call("look", {"what": "environment"}, 10).text.split()
    toolkit.close()
    assert "PLAIN_WORD" in seen


def test_processes_are_used_again_after_reset_and_never_by_two_at_once(kit: ForeignToolkit) -> None:
    first = kit.open(task(), "train/0/0/0", 0)
    first.call("mark", {"canary": "A was here"}, 10)
    second = kit.open(task(), "train/0/0/1", 0)
    pids = [box.call("look", {"what": "pid"}, 10).text for box in (first, second)]
    assert len(set(pids)) == 2
    assert "clean" in second.call("act", {"power": 0}, 10).text
    first.close()
    third = kit.open(task(), "train/1/0/0", 0)
    assert third.call("look", {"what": "pid"}, 10).text == pids[0]
    assert "clean" in third.call("act", {"power": 0}, 10).text


def test_a_process_that_died_while_it_was_idle_is_replaced_unseen(kit: ForeignToolkit) -> None:
    box = kit.open(task(), "train/0/0/0", 0)
    runner = box._runner
    box.close()
    os.kill(runner.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    os.waitid(os.P_PID, runner.pid, os.WEXITED | os.WNOWAIT)  # type: ignore[attr-defined]
    assert kit.open(task(), "train/1/0/0", 0).call("act", {"power": 1}, 10).outcome == "ok"


def test_what_the_environment_raises_is_its_answer_and_it_lives_on(kit: ForeignToolkit) -> None:
    box = kit.open(task(), "train/0/0/0", 0)
    answer = box.call("misbehave", {"how": "raise"}, 10)
    assert (answer.text, answer.outcome) == ("LookupError: no such room", "error")
    assert box.call("misbehave", {"how": "flood"}, 10).text.endswith(f"of {20 << 20} characters are shown]")
    assert box.call("misbehave", {"how": "nothing"}, 10).text == "fine"


@pytest.mark.parametrize(
    ("how", "reason", "words"),
    [
        ("exit", "tool_crashed", "SystemExit: 7"),
        ("memory", "tool_crashed", "MemoryError"),
        ("die", "tool_crashed", "last words"),
        ("kill", "tool_crashed", "ended with -9"),
        ("close", "tool_crashed", "ended"),
        ("garbage", "tool_protocol", "not JSON"),
        ("endless line", "tool_flooded", "more than"),
        ("down", "arena_down", "the arena is closed"),
    ],
)
def test_a_process_that_fails_costs_its_own_rollout_under_one_reason(
    kit: ForeignToolkit, how: str, reason: str, words: str
) -> None:
    sibling = kit.open(task(), "train/0/0/1", 0)
    box = kit.open(task(), "train/0/0/0", 0)
    with pytest.raises(ToolFailedError, match=words) as failed:
        box.call("misbehave", {"how": how}, 20)
    assert failed.value.reason == reason
    with pytest.raises(ToolFailedError):
        box.call("look", {"what": "pid"}, 10)
    box.close()
    assert sibling.call("act", {"power": 1}, 10).outcome == "ok"
    assert kit.open(task(), "train/0/0/2", 0).call("act", {"power": 1}, 10).outcome == "ok"


def test_a_call_that_overruns_and_what_a_dead_process_started_are_ended(kit: ForeignToolkit) -> None:
    for how, seconds, reason in (("hang", 0.1, "tool_timeout"), ("spawn", 20, "tool_crashed")):
        box = kit.open(task(), "train/0/0/0", 0)
        group = box._runner.pid  # type: ignore[attr-defined]
        with pytest.raises(ToolFailedError) as failed:
            box.call("misbehave", {"how": how}, seconds)
        assert failed.value.reason == reason
        assert gone(group), "the process, and what it started, are gone"


def gone(group: int) -> bool:
    """Whether a group empties: a killed process takes a moment to end."""
    until = time.monotonic() + 2.0
    while members(group):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def members(group: int) -> list[int]:
    """Processes of a group that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(pgrp) == group and state != "Z":
            found.append(int(stat.parent.name))
    return found


def test_planted_kill_that_spares_the_children_is_seen(kit: ForeignToolkit, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []

    def spare(pid: int) -> None:
        killed.append(pid)
        os.kill(pid, signal.SIGKILL)

    monkeypatch.setattr("surefoot.system.process.kill_tree", spare)
    with pytest.raises(AssertionError, match="and what it started"):
        test_a_call_that_overruns_and_what_a_dead_process_started_are_ended(kit)
    os.killpg(killed[-1], signal.SIGKILL)


@pytest.mark.parametrize("reward", ["nan", "text"])
def test_a_reward_that_is_no_number_is_a_failure(kit: ForeignToolkit, reward: str) -> None:
    with pytest.raises(ToolFailedError) as failed:
        kit.open(task(reward=reward), "train/0/0/0", 0).reward()
    assert failed.value.reason == "reward_failed"


def test_no_opinion_stays_no_opinion(kit: ForeignToolkit) -> None:
    assert kit.open(task(reward="none"), "train/0/0/0", 0).reward() is None


def test_a_task_that_is_not_plain_data_is_refused_by_its_type(kit: ForeignToolkit) -> None:
    with pytest.raises(ToolError, match="set"):
        kit.open(task(odd={1, 2}), "train/0/0/0", 0)


def test_gymnasiums_form_gets_the_seed_and_is_closed_in_the_end(wrapper: Path, tmp_path: Path) -> None:
    toolkit = ForeignToolkit(PYTHON, wrapper, "Walk", "gym", env={"CLOSED": str(tmp_path / "closed")})
    box = toolkit.open(task(), "train/0/0/0", seed=11)
    assert box.opening == "seed 11"
    assert [box.call("step", {"action": "go"}, 10).text for _ in range(2)] == [
        "at 1",
        "at 2\n[the episode has ended: terminated]",
    ]
    assert box.reward() == 1.0
    toolkit.close()
    assert (tmp_path / "closed").read_text() == "closed "


@pytest.mark.parametrize(
    ("python", "name", "form", "words"),
    [
        (["/no/such/python"], "Env", "trl", "cannot be started"),
        ([sys.executable, "-c", "pass"], "Env", "trl", "ended"),
        ([sys.executable, "-c", "import sys; sys.exit('no arena here')"], "Env", "trl", "no arena here"),
        ([sys.executable, "-c", "print('hello'); input()"], "Env", "trl", "something else"),
        (PYTHON, "Nothing", "trl", "Nothing"),
        (PYTHON, "ARENA", "gym", "ARENA"),
        (sys.executable, "Env", "trl", "explicit argv"),
        ([], "Env", "trl", "explicit argv"),
        (PYTHON, "Env", "verl", "one of two forms"),
    ],
)
def test_what_cannot_be_started_is_refused_with_its_own_words(
    wrapper: Path, python: Any, name: str, form: Any, words: str
) -> None:
    with pytest.raises(ToolError, match=words) as refused:
        ForeignToolkit(python, wrapper, name, form)
    assert not isinstance(refused.value, ToolFailedError)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="does not exist"):
        ForeignToolkit(PYTHON, tmp_path / "no.py", "Env")


def test_the_host_ends_when_the_other_side_goes_away(wrapper: Path) -> None:
    toolkit = ForeignToolkit(PYTHON, wrapper, "Env")
    box = toolkit.open(task(), "train/0/0/0", 0)
    runner = box._runner
    assert isinstance(runner, ProcessRunner)
    runner._process.stdin.close()
    assert runner._process.wait(10) == -signal.SIGKILL, "it ended itself, and its group"
    runner._dead = True
    runner._process.release()
    toolkit.close()


# -- the pipe --------------------------------------------------------------------------


def piped(answer: Callable[[int, int], None]) -> Any:
    there, back = os.pipe(), os.pipe()
    answer(there[0], back[1])
    return LinePipe(back[0], there[1], cap=1000), [*there, *back]


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b"x" * 5000, PipeFloodedError),
        (b"no end", TimeoutError),
        (b"", TimeoutError),
        (b"one\n", None),
    ],
)
def test_a_line_comes_whole_and_in_time_or_not_at_all(said: bytes, error: type[Exception] | None) -> None:
    pipe, descriptors = piped(lambda _, back: os.write(back, said) and None)
    try:
        if error is None:
            assert pipe.exchange(b"?\n", 1) == b"one"
        else:
            with pytest.raises(error):
                pipe.exchange(b"?\n", 0.01)
    finally:
        for each in descriptors:
            os.close(each)


def test_bytes_that_nobody_asked_for_are_not_the_next_answer() -> None:
    pipe, descriptors = piped(lambda _, back: os.write(back, b"one\ntwo\n") and None)
    assert pipe.exchange(b"?\n", 1) == b"one"
    with pytest.raises(PipeFloodedError, match="unasked"):
        pipe.exchange(b"?\n", 1)
    for each in descriptors:
        os.close(each)


def test_writing_to_somebody_who_does_not_read_ends_at_the_deadline_and_to_nobody_at_once() -> None:
    pipe, descriptors = piped(lambda *_: None)
    with pytest.raises(TimeoutError):
        pipe.exchange(b"x" * (1 << 20), 0.01)
    os.close(descriptors[0])
    with pytest.raises(PipeEndedError):
        pipe.exchange(b"x\n", 1)
    for each in descriptors[1:]:
        os.close(each)


def test_planted_pipe_without_a_cap_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = LinePipe.__init__
    monkeypatch.setattr(LinePipe, "__init__", lambda self, reading, writing, cap: real(self, reading, writing, 1 << 60))
    with pytest.raises(TimeoutError):
        test_a_line_comes_whole_and_in_time_or_not_at_all(b"x" * 5000, PipeFloodedError)
