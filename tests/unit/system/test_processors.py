"""Torch threads by default: what this process may use of the machine."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from surefoot.system import processors
from surefoot.system.processors import MOST, usable_cores


@pytest.fixture(autouse=True)
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 64 if logical else 32)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)


def test_a_large_machine_is_not_taken_whole(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == MOST < 32


def test_threads_of_one_core_are_one_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 4 if logical else 2)
    assert usable_cores(tmp_path) == 2


def test_it_stays_on_the_processors_it_is_scheduled_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 7}, raising=False)
    assert usable_cores(tmp_path) == 3


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "250000 100000\n"}, 2), ({"cpu.max": "50000 100000\n"}, 1), ({"cpu.max": "max 100000\n"}, MOST),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, MOST), ({"cpu.max": "nonsense"}, MOST),
    ],
)  # fmt: skip
def test_a_container_is_asked_for_its_share(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == cores


def test_a_machine_that_tells_nothing_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: None)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores(tmp_path) == 1
    assert processors.CGROUP.name == "cgroup"
