"""Cassettes under kill -9, a full disk and real runs: what was recorded is replayed to the bit, or refused by name."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import ROOT, Ran, surefoot
from frame_kit import payloads, pieces
from moods import WORLD

from surefoot.protocols import ToolAnswer
from surefoot.records import Task
from surefoot.tools.recording import RecordingToolkit

KEYS = ["max_steps=3", "eval_steps=3", "eval_tasks=8", "tasks_per_step=4", "num_generations=4", "tools.in_prompt=false"]


def train(cwd: Path, run: str, mode: str, *words: str, **how: Any) -> Ran:
    (cwd / "world.py").write_text(WORLD)
    keys = [*KEYS, "tools.environment=world.py:Mood", f"tools.mode={mode}", "tools.cassette=moods.jsonl", *words]
    return surefoot("train", *keys, cwd=cwd, run=run, **how)


def left(ran: Ran) -> dict[str, Any]:
    """What a run leaves that depends on every reward: its rollouts, and its weights as digests."""
    rollouts = {file.name: lines(file) for file in (ran.run / "rollouts").glob("*.jsonl")}
    weights = list((ran.run / "checkpoints").glob("step_3/*.safetensors"))
    assert (len(rollouts), len(weights)) >= (3, 1), ran.out + ran.err
    return {**rollouts, **{file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in weights}}


def lines(file: Path) -> list[Any]:
    clocks = ("seconds", "grading_seconds")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in clocks} for row in rows]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    cwd = tmp_path_factory.mktemp("a recorded run")
    ran = train(cwd, "recorded", "record")
    assert ran.code == 0, ran.out + ran.err
    return ran


def test_a_world_that_never_says_the_same_twice_is_replayed_to_the_bit(recorded: Ran) -> None:
    cwd = recorded.run.parent
    again = train(cwd, "again", "replay")
    assert again.code == 0, again.out + again.err
    assert left(again) == left(recorded)
    rewards = {line["reward"] for name, kept in left(recorded).items() if name.endswith("jsonl") for line in kept}
    assert len(rewards) == 48 + 16, (
        "of training and of two evaluations, no two alike: only the cassette can repeat them"
    )


def test_a_replay_with_another_seed_ends_by_name_and_so_does_a_damaged_cassette(recorded: Ran) -> None:
    cwd = recorded.run.parent
    other = train(cwd, "other", "replay", "seed=7")
    assert other.code == 4, other.out + other.err
    assert "does not hold this" in other.err or "recorded was" in other.err
    whole = (cwd / "moods.jsonl").read_bytes()
    middle = len(whole) // 2
    (cwd / "moods.jsonl").write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    try:
        damaged = train(cwd, "damaged", "replay")
        assert damaged.code == 3, damaged.out + damaged.err
        assert "not a cassette that can be used" in damaged.err
    finally:
        (cwd / "moods.jsonl").write_bytes(whole)


def test_a_recorded_run_that_was_killed_and_resumed_is_replayed_as_one(tmp_path: Path) -> None:
    killed = train(tmp_path, "killed", "record", env={"SUREFOOT_FAILPOINTS": "loop.after_collect=kill@2"})
    assert killed.code in (-signal.SIGKILL, 128 + signal.SIGKILL), killed.out + killed.err
    resumed = surefoot("train", "--resume", "killed", cwd=tmp_path, run="")
    assert resumed.code == 0, resumed.out + resumed.err
    whole = left(Ran(resumed.code, resumed.out, resumed.err, tmp_path / "killed"))
    again = train(tmp_path, "again", "replay")
    assert again.code == 0, again.out + again.err
    assert left(again) == whole


# -- the file alone ----------------------------------------------------------------------

WRITER = """
import sys
from pathlib import Path
from surefoot.tools.recording import RecordingToolkit
from surefoot.protocols import ToolAnswer, ToolSpec
from surefoot.errors import SurefootError
from surefoot.records import Task

class Box:
    opening = None
    def call(self, name, arguments, deadline_s):
        return ToolAnswer("answer %d " % arguments["n"] + "x" * (arguments["n"] % 500))
    def reward(self): return 1.0
    def close(self): pass

class Kit:
    specs = [ToolSpec("ask", "Ask.", {"type": "object"})]
    def open(self, task, rollout, seed): return Box()
    def close(self): pass

path, limit = Path(sys.argv[1]), int(sys.argv[2])
if limit:
    import resource, signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    kit = RecordingToolkit(Kit(), path)
    for rollout in range(int(sys.argv[3]), 10**9):
        box = kit.open(Task(id="t", prompt="?"), "r%d" % rollout, 0)
        for n in range(5):
            box.call("ask", {"n": 100 * rollout + n}, 1)
            print(rollout, n, flush=True)
        box.reward(); box.close()
except SurefootError as error:
    print(str(error), file=sys.stderr)
    sys.exit(error.exit_code)
"""


def write(folder: Path, *, limit: int = 0, first: int = 0) -> subprocess.Popen[str]:
    (folder / "writer.py").write_text(WRITER)
    return subprocess.Popen(
        [sys.executable, "writer.py", "a cassette", str(limit), str(first)], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip


def replayed(folder: Path, acknowledged: list[str]) -> None:
    """Every answer that somebody has seen is in the cassette."""
    replay = RecordingToolkit(None, folder / "a cassette", mode="replay")
    boxes: dict[str, Any] = {}
    for line in acknowledged:
        rollout, n = line.split()
        if rollout not in boxes:
            boxes[rollout] = replay.open(Task(id="t", prompt="?"), f"r{rollout}", 0)
        number = 100 * int(rollout) + int(n)
        expected = ToolAnswer(f"answer {number} " + "x" * (number % 500))
        assert boxes[rollout].call("ask", {"n": number}, 1) == expected
    replay.close()


def test_every_answer_that_was_seen_survives_kill_9_and_recording_goes_on_behind_it(tmp_path: Path) -> None:
    seen: list[str] = []
    for life, amount in enumerate((1, 17, 230)):
        writer = write(tmp_path, first=1000 * life)
        assert writer.stdout is not None
        seen += [writer.stdout.readline().strip() for _ in range(amount)]
        writer.kill()
        rest, _ = writer.communicate()
        seen += [line.strip() for line in rest.splitlines(keepends=True) if line.endswith("\n")]
        replayed(tmp_path, seen)


def test_a_disk_that_is_full_stops_the_recording_with_74_and_a_later_one_goes_on(tmp_path: Path) -> None:
    writer = write(tmp_path, limit=20_000)
    out, err = writer.communicate(timeout=60)
    assert writer.returncode == 74, err
    assert "could not be written" in err
    size = (tmp_path / "a cassette").stat().st_size
    assert size <= 20_000
    replayed(tmp_path, out.splitlines())
    second = write(tmp_path, first=1000)
    assert second.stdout is not None
    lines = [second.stdout.readline().strip() for _ in range(7)]
    second.kill()
    second.communicate()
    replayed(tmp_path, [*out.splitlines(), *lines])


def test_planted_recorder_that_acts_before_it_writes_is_seen(tmp_path: Path) -> None:
    """An answer that is handed out and then lost: the check above finds the gap."""
    writer = write(tmp_path)
    assert writer.stdout is not None
    lines = [writer.stdout.readline().strip() for _ in range(9)]
    writer.kill()
    writer.communicate()
    path = tmp_path / "a cassette"
    kept = pieces(path.read_bytes())
    gap = next(i for i, record in enumerate(payloads(path), 1) if record.get("arguments") == '{"n":102}')
    path.write_bytes(b"".join(kept[:gap]))
    with pytest.raises(Exception, match="does not hold this"):
        replayed(tmp_path, lines)
