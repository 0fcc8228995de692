"""A pytest inside pytest that loads our plugin and no other.

Test modules import from here and load it as a plugin as well, so: PYTEST_DONT_REWRITE
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SOURCES = [str(Path(__file__).parents[2] / name) for name in ("src", "harness/src")]
Nested = Callable[..., pytest.RunResult]


def environment(**extra: str) -> dict[str, str]:
    """Variables for a nested session: ours on the path, nobody else's plugins, no colours."""
    path = os.pathsep.join([*SOURCES, os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "NO_COLOR": "1", **extra}


@pytest.fixture
def nested(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Nested:
    """`nested("-n", "2", fresh=True, plugins=["xdist.plugin"])`: run the tests of `pytester.path`.

    `fresh` gives it a process of its own, for what a session does to its process; the rest is ten times faster.
    """
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "COVERAGE_PROCESS_START"):
        monkeypatch.delenv(name, raising=False)

    def run(*words: str, plugins: tuple[str, ...] = (), fresh: bool = False) -> pytest.RunResult:
        loaded = [word for name in ("surefoot.harness.plugin", *plugins) for word in ("-p", name)]
        command = [*loaded, "-p", "no:cacheprovider", *words]
        if fresh or plugins:
            return pytester.runpytest_subprocess(*command, timeout=120)
        return pytester.runpytest_inprocess(*command)

    return run


def results(folder: Path) -> dict[str, Any]:
    """`unit_results.json` of a folder."""
    return dict(json.loads((folder / "unit_results.json").read_text(encoding="utf-8")))


def history(folder: Path) -> list[dict[str, Any]]:
    """Every session of the history, oldest first."""
    return [json.loads(file.read_text(encoding="utf-8")) for file in sorted((folder / "unit_results").glob("*.json"))]
