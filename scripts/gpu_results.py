"""A pytest plugin for `gpu_suite.py`: what became of each test is on the disk before the next one begins.

    SUREFOOT_GPU_RESULTS=kept/learn.json python -m pytest -p gpu_results tests/runs/test_gpu.py

A test that has an outcome in the file is not run again. One that takes longer than its limit is ended and has failed;
the next one still runs.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FILE, LIMIT = "SUREFOOT_GPU_RESULTS", "SUREFOOT_GPU_TEST_S"


class TooLongError(BaseException):
    """A test that has used up its time; no test catches it by accident."""


def read(file: Path) -> dict[str, Any]:
    """What was kept there; nothing where there is no such file."""
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else {}


def write(file: Path, kept: dict[str, Any]) -> None:
    """The whole file or the old one: a machine may be taken away at any moment."""
    beside = file.with_suffix(".new")
    beside.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(beside, file)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what has an outcome, and note what there is to be done."""
    file = Path(os.environ[FILE])
    kept = read(file)
    kept["collected"] = sorted(item.nodeid for item in items)
    write(file, kept)
    done = [item for item in items if item.nodeid in kept["tests"]]
    if done:
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item not in done]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """The clock of one test, from its first fixture to its last."""

    def over(*_: object) -> None:
        raise TooLongError(f"{item.nodeid} took longer than {os.environ[LIMIT]} s")

    former = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, float(os.environ[LIMIT]))
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


_NOW: dict[str, Any] = {}


def pytest_runtest_logstart(nodeid: str) -> None:
    """A new test."""
    _NOW.clear()
    _NOW.update(nodeid=nodeid, outcome="passed", began=time.monotonic(), said="", figures=[])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """One of its three parts."""
    if report.outcome != "passed" and _NOW["outcome"] == "passed":
        _NOW.update(outcome=report.outcome, said=_words_of(report))
    if report.when == "call":
        _NOW["figures"] = [str(value) for name, value in report.user_properties if name == "gpu"]


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Keep it."""
    file = Path(os.environ[FILE])
    kept = read(file)
    one = {"outcome": _NOW["outcome"], "seconds": round(time.monotonic() - _NOW["began"], 1)}
    one |= {name: _NOW[name] for name in ("said", "figures") if _NOW[name]}
    kept["tests"][nodeid] = one
    write(file, kept)
    print(f"\n{nodeid}: {one['outcome']} in {one['seconds']} s {'; '.join(_NOW['figures'])}", flush=True)


def _words_of(report: pytest.TestReport) -> str:
    """The last lines of why, or the reason of a skip."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    return "\n".join(report.longreprtext.splitlines()[-12:])[-1500:]
