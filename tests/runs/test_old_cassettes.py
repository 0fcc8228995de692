"""A cassette that the first edition recorded is what `tools.mode = "replay"` answers from, through the command.

`fixtures/cassettes/format_1_run.jsonl` is the run below, recorded by commit b6fc68d. Its rewards are random numbers that
nothing else can repeat.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command import ROOT, Ran, surefoot
from moods import WORLD

OLD = ROOT / "tests" / "fixtures" / "cassettes" / "format_1_run.jsonl"
KEYS = ["max_steps=2", "eval_steps=2", "eval_tasks=4", "tasks_per_step=2", "num_generations=2", "tools.in_prompt=false"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "world.py").write_text(WORLD)
    shutil.copy(OLD, tmp_path / "moods.jsonl")
    return tmp_path


def train(cwd: Path, mode: str) -> Ran:
    return surefoot(
        "train", *KEYS, "tools.environment=world.py:Mood", f"tools.mode={mode}", "tools.cassette=moods.jsonl", cwd=cwd
    )


def recorded(purpose: str) -> list[float]:
    """The rewards of all rollouts of one purpose, in order of size."""
    records = [json.loads(line)["record"] for line in OLD.read_text().splitlines()]
    names = {record["n"]: record["rollout"] for record in records if record["kind"] == "open"}
    rewards = [record for record in records if record["kind"] == "reward"]
    return sorted(each["value"] for each in rewards if names[each["take"]].startswith(f"{purpose}/"))


def given(ran: Ran, files: str) -> list[float]:
    """What the world of each rollout said, in order of size."""
    lines = [line for file in (ran.run / "rollouts").glob(files) for line in file.read_text().splitlines()]
    return sorted(json.loads(line)["own_reward"] for line in lines)


def test_a_run_is_replayed_from_it(place: Path) -> None:
    ran = train(place, "replay")
    assert ran.code in (0, 1), ran.out + ran.err  # whether random rewards taught anything is not asked
    assert ran.verdict["executed_steps"] == 2
    assert given(ran, "step_*.jsonl") == recorded("train")
    assert given(ran, "eval_*.jsonl") == recorded("eval")
    assert len(set(recorded("train") + recorded("eval"))) == 8 + 8, "no two alike: only the cassette can repeat them"
    assert (place / "moods.jsonl").read_bytes() == OLD.read_bytes()


def test_recording_to_it_ends_with_3_and_names_both_formats(place: Path) -> None:
    ran = train(place, "record")
    assert ran.code == 3, ran.out + ran.err
    assert "is a cassette of format 1, and this surefoot records to format 2" in ran.err
    assert (place / "moods.jsonl").read_bytes() == OLD.read_bytes()
