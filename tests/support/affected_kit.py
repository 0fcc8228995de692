"""A toy project and the real command, for the tests of affected-test selection."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from project_folder import ProjectFolder

SOURCE = os.pathsep.join(str(Path(__file__).parents[2] / name) for name in ("src", "harness/src"))


@dataclass(frozen=True)
class Said:
    """What one pytest said, and which tests it ran with which outcome."""

    code: int
    text: str

    @property
    def ran(self) -> dict[str, str]:
        lines = re.findall(
            r"^(?:\[gw\d\].*?)?(\S+::\S+) (PASSED|FAILED|ERROR|SKIPPED)|^\[gw\d\] \[.*?\] (PASSED|FAILED) (\S+)",
            self.text,
            re.M,
        )
        return {(a or d).rpartition("::")[2]: (b or c).lower() for a, b, c, d in lines}


class Toy(ProjectFolder):
    """A project in a folder of its own."""

    def __init__(self, root: Path, files: dict[str, str]) -> None:
        super().__init__(root, {"pytest.ini": "[pytest]\npythonpath = .\n", **files})

    def pytest(self, *words: str, plugins: tuple[str, ...] = (), affected: bool = True, source: str = SOURCE) -> Said:
        env = {**os.environ, "PYTHONPATH": source, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "NO_COLOR": "1"}
        env.pop("PYTEST_ADDOPTS", None)
        ours = "surefoot.harness.plugin" if source == SOURCE else "surefoot_harness.plugin"
        loaded = [word for name in (ours, *plugins) for word in ("-p", name)]
        flag = ["--affected"] if affected else []
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-v", *loaded, *flag, *words],
            cwd=self.root, env=env, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        return Said(done.returncode, done.stdout + done.stderr)

    def affected(self, *words: str) -> dict[str, str]:
        """Tests that ran, with their outcome."""
        return self.pytest(*words).ran
