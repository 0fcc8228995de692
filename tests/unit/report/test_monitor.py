"""One object by which others see a run; it stops nobody."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from surefoot.report.view import RunMonitor
from surefoot.tracking.live import read_timeline, span


@pytest.fixture
def told() -> list[str]:
    return []


def test_a_run_leaves_status_timeline_and_report(tmp_path: Path, told: list[str]) -> None:
    (tmp_path / "config.toml").write_text('model = "pebble"\n')
    entered: list[str] = []

    @contextmanager
    def inner(name: str) -> Iterator[None]:
        entered.append(name)
        yield

    with RunMonitor(tmp_path, max_steps=3, warn=lambda what, fix: told.append(what)) as monitor:
        phase = monitor.phase(inner)
        with monitor.asking(lambda: {"replicas": [{"name": "engine 0", "state": "ready", "restarts": 2}]}):
            with phase("collect"), span("group", track="worker 0"):
                pass
            monitor.step(3, {"reward": 0.5, "version": 3.0})
            monitor.evaluated(3, {"eval_accuracy": 0.75})
            monitor.finished(3)
            monitor.writer.write()
    page = monitor.report()
    facts = json.loads((tmp_path / "status.json").read_text())
    (window,), _ = read_timeline((tmp_path / "timeline.jsonl").read_bytes())
    assert entered == ["collect"]
    assert (facts["step"], facts["eval_accuracy"], facts["ended"]) == (3, 0.75, True)
    assert {(s.name, s.track) for s in window.spans} == {("collect", "loop"), ("group", "worker 0")}
    assert page == tmp_path / "report.html"
    assert told == []


def test_a_folder_that_takes_nothing_gives_warnings_and_no_error(tmp_path: Path, told: list[str]) -> None:
    with RunMonitor(tmp_path / "gone", max_steps=3, warn=lambda what, fix: told.append(what)) as monitor:
        monitor.finished(1)
    assert monitor.report() is None
    assert ["status" in told[0], "timeline" in told[1], "report" in told[2]] == [True, True, True]
    assert len(told) == 3


def test_an_error_inside_a_phase_is_the_callers_and_is_still_a_span(tmp_path: Path, told: list[str]) -> None:
    monitor = RunMonitor(tmp_path, max_steps=3, warn=lambda what, fix: told.append(what))
    with pytest.raises(KeyError), monitor.phase(lambda name: span(name))("learn"):
        raise KeyError
    monitor.finished(1)
    assert [s.name for s in monitor.timeline.windows()[0].spans] == ["learn"]
