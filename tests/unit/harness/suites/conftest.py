"""A small git repository with a trainer that is not ours: a script that writes numbers, or fails to, as it is told."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from surefoot.harness.suites import session
from surefoot.harness.suites.manifest import Overrides, Suite, load_suite
from surefoot.harness.suites.package import masked_crc

TRAINER = """
import json, os, pathlib, sys
run, steps, mode = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
print("sample 7: the student wrote FAIL, the teacher wrote PASS", flush=True)
(run / "seen.json").write_text(json.dumps({"argv": sys.argv[4:], "cwd": os.getcwd(), "env": dict(os.environ)}))
if mode == "crash":
    sys.exit(3)
if mode == "silent":
    sys.exit(0)
if mode == "short":
    steps -= 1
if mode == "forever":
    import time
    time.sleep(600)
path = run / "metrics.json"
table = json.loads(path.read_text()) if path.exists() else {"train/loss": {}, "train/reward": {}}
for step in range(len(table["train/loss"]) + 1, steps + 1):
    table["train/loss"][str(step)] = float("nan") if mode == "nan" and step == 2 else 1 / step
    table["train/reward"][str(step)] = step / 10
path.write_text(json.dumps(table))
sys.exit(7 if mode == "late-crash" else 0)
"""
RECIPE = """
[[recipe]]
name = "{name}"
max_steps = {steps}
minutes = 5
command = ["{{python}}", "-S", "trainer.py", "{{run}}", "{{steps}}", "{mode}", "{{resume}}"]
checks = ['max(data["train/loss"]) < 1.5', 'last(data["train/reward"]) > 0.2']
{more}
"""


@dataclass
class Project:
    """The repository, and what the harness said about it."""

    root: Path
    said: list[str] = field(default_factory=list)

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def git(self, *words: str) -> str:
        who = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@example.org", "GIT_COMMITTER_NAME": "a"}
        who |= {
            "GIT_COMMITTER_EMAIL": "a@example.org",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_SYSTEM": os.devnull,
        }
        words = ("-c", "protocol.file.allow=always", *words)
        return subprocess.run(
            ["git", *words], cwd=self.root, env={**os.environ, **who}, check=True, capture_output=True, text=True
        ).stdout

    def commit(self) -> None:
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "state")

    def suite(self, text: str, name: str = "try") -> Suite:
        return load_suite(self.write(f"suites/{name}.toml", text), self.root)

    def recipe(self, mode: str = "good", *, name: str = "one", steps: int = 4, more: str = "") -> str:
        return RECIPE.format(name=name, mode=mode, steps=steps, more=more)

    def run(
        self, text: str, *, overrides: Overrides | None = None, extra: Sequence[str] = (), fresh: bool = False,
        results: Path | None = None, recipes: Sequence[str] = (), executor: str = "local",
        environ: Mapping[str, str] | None = None, commit: bool = True,
    ) -> int:  # fmt: skip
        """Everything behind `surefoot suite run try`."""
        suite = self.suite("free_names = true\n" + text)
        if commit and self.git("status", "--porcelain"):
            self.commit()
        request = session.make_request(suite, recipes, overrides or Overrides(), extra, executor, None)
        return session.run(request, environ or {}, self.said.append, fresh=fresh, results_folder=results)

    def folder(self, recipe: str = "one") -> Path:
        return self.root / "runs/suites/try" / recipe

    def verdict(self, recipe: str = "one") -> dict[str, Any]:
        return dict(json.loads((self.folder(recipe) / "verdict.json").read_text()))

    def seen(self, recipe: str = "one") -> dict[str, Any]:
        return dict(json.loads((self.folder(recipe) / "run/seen.json").read_text()))


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = Project(tmp_path_factory.mktemp("template"))
    project.write("trainer.py", TRAINER)
    project.write(".gitignore", "__pycache__/\n")
    project.git("init", "-q", "-b", "main")
    project.commit()
    return project.root


@pytest.fixture
def project(template: Path, tmp_path: Path) -> Project:
    shutil.copytree(template, tmp_path / "project", symlinks=True)
    return Project(tmp_path / "project")


@pytest.fixture(scope="session")
def event_file() -> Callable[[Sequence[tuple[str, float, int]]], bytes]:
    """`event_file([("train/loss", 0.5, 1)])`: an event file, byte by byte, as its format is documented."""
    return _event_file


def _event_file(points: Sequence[tuple[str, float, int]]) -> bytes:
    wall = bytes([1 << 3 | 1]) + struct.pack("<d", 1.0)
    events = [wall + _text(3, b"brain.Event:2")]
    for tag, value, step in points:
        inner = _text(1, tag.encode()) + bytes([2 << 3 | 5]) + struct.pack("<f", value)
        events.append(wall + bytes([2 << 3, step]) + _text(5, _text(1, inner)))
    return b"".join(map(_record, events))


def _text(number: int, text: bytes) -> bytes:
    return bytes([number << 3 | 2, len(text)]) + text


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc(length)) + data + struct.pack("<I", masked_crc(data))
