"""The functional tests, each by its name: a short real training, its events as numbers, the table of checks at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import warm_command
from command import ROOT

HERE = ROOT / "tests/functional"
BY_DAY = "grpo"
NAMES = sorted(path.stem for path in HERE.glob("*.sh") if path.stem != "begin")


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    folder: Path

    @property
    def table(self) -> list[str]:
        """The status of every row of the table, which is the last thing that is said."""
        _, found, rows = self.out.rpartition("Metric Checks\n")
        return [line.split()[0] for line in rows.splitlines()[2:]] if found else []


def run(name: str, out: Path, *words: str) -> Said:
    """`bash tests/functional/NAME.sh WORDS`, with `surefoot` on PATH as a fork that has the libraries loaded."""
    warm = warm_command.shared()
    tool = out / "bin/surefoot"
    tool.parent.mkdir(parents=True, exist_ok=True)
    tool.write_text(f'#!/bin/sh\nexec {sys.executable} {warm.client} surefoot {warm.address} "$@"\n')
    tool.chmod(0o755)
    env = {**warm.env, "PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}", "FUNCTIONAL_OUT": str(out)}
    done = subprocess.run(
        ["bash", str(HERE / f"{name}.sh"), "threads=1", *words],
        cwd=out, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    return Said(done.returncode, done.stdout + done.stderr, out / name)


def test_there_are_functional_tests() -> None:
    assert len(NAMES) >= 2
    assert BY_DAY in NAMES


@pytest.mark.parametrize("name", [n if n == BY_DAY else pytest.param(n, marks=pytest.mark.nightly) for n in NAMES])
def test_it_trains_and_passes_its_checks(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "of_before").write_text("an earlier run's")
    said = run(name, tmp_path)
    assert said.code == 0, said.out
    assert set(said.table) == {"PASS"}, said.out
    assert len(said.table) >= 4
    assert {path.name for path in said.folder.iterdir()} == {"run", "run.log", "metrics.json"}, "recreated"
    assert "PASS  after" in (said.folder / "run.log").read_text()
    loss = json.loads((said.folder / "metrics.json").read_text())["loss"]
    assert len(loss) == json.loads((said.folder / "run/verdict.json").read_text())["planned_steps"]


def test_a_trainer_that_fails_ends_it_before_any_check(tmp_path: Path) -> None:
    said = run(BY_DAY, tmp_path, "model=nowhere")
    assert (said.code, said.table) == (4, []), said.out
    assert not (said.folder / "metrics.json").exists()


@pytest.mark.nightly
def test_numbers_that_do_not_hold_fail_it_and_words_reach_the_trainer(tmp_path: Path) -> None:
    said = run(BY_DAY, tmp_path, "max_steps=2")
    assert said.code == 1, said.out
    assert said.table[0] == "FAIL", said.out
    assert set(said.table[1:]) == {"PASS"}, said.out
