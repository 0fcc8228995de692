"""One test's tracker: what it keeps, what it refuses, and when."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from surefoot.harness.series import Unavailable
from surefoot.harness.tracker import tracker as tracker_module
from surefoot.harness.tracker.memory import DefaultMonitor, Reading
from surefoot.harness.tracker.tracker import UNAVAILABLE, JournalWriter, MetricTracker, read_journals

TEST = "tests/test_a.py::test_one"
CYCLE: list[Any] = []
CYCLE.append(CYCLE)


class Monitor:
    def __init__(self, reading: Reading | None) -> None:
        self._reading = reading

    def read(self) -> Reading | None:
        return self._reading


def make(folder: Path, monitor: Monitor | None = None) -> MetricTracker:
    return MetricTracker(TEST, JournalWriter(folder / "main.journal"), monitor or Monitor(None))


def kept(folder: Path) -> dict[str, Any]:
    return read_journals(folder).metrics[TEST]


@pytest.mark.parametrize(
    "value",
    [{1, 2}, object(), b"bytes", 1j, {1: "a"}, {None: 1}, [1, {"a": {2}}], "\ud800", {"\ud800": 1}, CYCLE, 1 << 5000, Path(), range(3)],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_json_cannot_hold_is_refused_at_the_call_and_the_name_stays_free(tmp_path: Path, value: Any) -> None:
    tracker = make(tmp_path)
    with pytest.raises(TypeError, match=r"thing|key"):
        tracker.track("thing", value)
    tracker.track("thing", 1)
    assert kept(tmp_path)["thing"] == 1


@pytest.mark.parametrize("value", [None, True, 0, -7, 1.5, "", "é ☃", [1, [2, {"a": None}]], {"b": (1, 2)}, 2**60])
def test_json_values_are_on_disk_when_the_call_returns(tmp_path: Path, value: Any) -> None:
    make(tmp_path).track("thing", value)
    assert kept(tmp_path)["thing"] == json.loads(json.dumps(value))


def test_a_value_is_copied_when_it_is_tracked(tmp_path: Path) -> None:
    tracker, series = make(tmp_path), [1.0]
    tracker.track("series", series)
    series.append(2.0)
    assert kept(tmp_path)["series"] == [1.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, [0.0, {"deep": math.nan}]])
def test_a_number_that_is_not_finite_fails_the_test_and_is_kept_as_tagged_text(tmp_path: Path, value: Any) -> None:
    tracker = make(tmp_path)
    with pytest.raises(ValueError, match="not finite"):
        tracker.track("loss", value)
    text = json.dumps(kept(tmp_path)["loss"], allow_nan=False)
    assert "non-finite: " in text


def test_a_second_value_under_one_name_is_refused_unless_asked_for(tmp_path: Path) -> None:
    tracker = make(tmp_path)
    tracker.track("loss", 1)
    with pytest.raises(ValueError, match="already tracked"):
        tracker.track("loss", 2)
    assert kept(tmp_path)["loss"] == 1
    tracker.track("loss", 3, overwrite=True)
    assert kept(tmp_path)["loss"] == 3


@pytest.mark.parametrize("name", ["_elapsed", "_x"])
def test_names_of_automatic_fields_are_reserved(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="automatically"):
        make(tmp_path).track(name, 1)


@pytest.mark.parametrize("name", ["", 3, None, "\ud800"])
def test_a_name_is_text(tmp_path: Path, name: Any) -> None:
    with pytest.raises(TypeError):
        make(tmp_path).track(name, 1)


def test_elapsed_comes_from_the_monotonic_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([100.0, 102.5])
    monkeypatch.setattr(tracker_module.time, "monotonic", lambda: next(ticks))
    monkeypatch.setattr(tracker_module.time, "time", lambda: pytest.fail("the wall clock can be set back"))
    tracker = make(tmp_path)
    assert kept(tmp_path) == {"_unfinished": True}
    tracker.close()
    tracker.close()
    assert kept(tmp_path) == {"_elapsed": 2.5}


def test_a_value_that_comes_after_the_test_is_refused(tmp_path: Path) -> None:
    tracker = make(tmp_path)
    tracker.close()
    with pytest.raises(RuntimeError, match="is over"):
        tracker.track("late", 1)


def test_max_mem_is_the_largest_over_all_nodes(tmp_path: Path) -> None:
    reading = Reading("two nodes", {"node0.gpu0": 100.0, "node0.gpu1": 250.0, "node1.gpu0": 900.5})
    tracker = make(tmp_path, Monitor(reading))
    assert tracker.get_max_mem() == 900.5
    tracker.log_max_mem("mem")
    assert (kept(tmp_path)["mem"], kept(tmp_path)["_mem_source"]) == (900.5, "two nodes")


@pytest.mark.parametrize("reading", [None, Reading("empty", {})])
def test_memory_that_nobody_knows_is_unavailable_and_not_zero(tmp_path: Path, reading: Reading | None) -> None:
    tracker = make(tmp_path, Monitor(reading))
    before = tracker.get_max_mem()
    assert isinstance(before, Unavailable)
    tracker.log_max_mem("mem")
    tracker.track("change", tracker.get_max_mem() - before)
    tracker.track("parts", {"list": [before, 1.0]})
    assert (kept(tmp_path)["mem"], kept(tmp_path)["change"]) == (UNAVAILABLE, UNAVAILABLE)
    assert kept(tmp_path)["parts"] == {"list": [UNAVAILABLE, 1.0]}
    assert DefaultMonitor([lambda: None]).read() is None


@pytest.mark.parametrize(
    "act", [float, int, math.isfinite, lambda x: x < 1, lambda x: x > 1, lambda x: x >= x, lambda x: max(x, 1)]
)
def test_what_nobody_measured_is_never_a_number_and_never_smaller_or_larger(act: Any) -> None:
    with pytest.raises(TypeError):
        act(Unavailable("no GPU"))


@pytest.mark.parametrize(
    "act",
    [
        lambda x: x - 1,
        lambda x: 1 - x,
        lambda x: x - x,
        lambda x: sum([1.0, x]),
        lambda x: x / 2**20,
        lambda x: -abs(x),
    ],
)
def test_what_is_computed_from_it_is_unavailable_too(act: Any) -> None:
    found = act(Unavailable("no GPU"))
    assert isinstance(found, Unavailable)
    assert found.reason == "no GPU"
    assert (found == 0, found is None, bool(found)) == (False, False, False)
