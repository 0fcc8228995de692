"""The benchmark method: what may be printed as a ratio, and what may not."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import FOLDER, benchmark

load: Any = benchmark("load")
method: Any = benchmark("method")
report: Any = benchmark("report")
sides: Any = benchmark("sides")


class Probe:
    """A load probe that says what it is told, window by window."""

    def __init__(self, dirty: list[bool]) -> None:
        self.dirty = itertools.chain(dirty, itertools.repeat(False))

    def mark(self) -> None:
        return None

    def since(self, mark: None) -> Any:
        dirty = next(self.dirty)
        return load.Load(0.5 if dirty else 0.0, 1.0, dirty)


def side(name: str, calls: list[str], seconds: float = 1.0, **work: Any) -> Callable[[], Any]:
    def measure() -> Any:
        calls.append(name)
        return method.Sample(name, seconds, work or {"tokens": 8})

    return measure


def pairs_of(ratios: list[float], dirty: tuple[int, ...] = ()) -> list[Any]:
    return [
        method.Pair(i, method.Sample("ours", 1.0), method.Sample("peer", r), load.Load(0.0, 1.0, i in dirty))
        for i, r in enumerate(ratios)
    ]


# -- order and redoing ------------------------------------------------------------


def test_sides_alternate_a_b_b_a() -> None:
    calls: list[str] = []
    method.alternate(side("A", calls), side("B", calls), pairs=4, probe=Probe([]))
    assert "".join(calls) == "ABBAABBA"


def test_each_side_keeps_its_name_whatever_the_order() -> None:
    done = method.alternate(side("A", [], 1.0), side("B", [], 3.0), pairs=2, probe=Probe([]))
    assert [(p.ours.side, p.peer.side, p.ratio) for p in done] == [("A", "B", 3.0), ("A", "B", 3.0)]


def test_a_dirty_pair_is_kept_marked_and_done_again() -> None:
    done = method.alternate(side("A", []), side("B", []), pairs=3, probe=Probe([False, True]))
    assert [p.load.dirty for p in done] == [False, True, False, False]


def test_redoing_ends_on_a_machine_that_never_gets_quiet() -> None:
    calls: list[str] = []
    done = method.alternate(side("A", calls), side("B", calls), pairs=3, redo=2, probe=Probe([True] * 99))
    assert len(done) == 5
    assert isinstance(method.compare(done), method.NoRatio)


def test_every_pair_is_recorded_even_the_one_that_is_refused() -> None:
    seen: list[Any] = []
    with pytest.raises(method.DifferentWorkError):
        method.alternate(side("A", [], tokens=8), side("B", [], tokens=9), pairs=3, probe=Probe([]), record=seen.append)
    assert len(seen) == 1


# -- the same work ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "peer", "complaint"),
    [
        ({"tokens": 8}, {"tokens": 7}, "tokens: A did 8, B did 7"),
        ({"tokens": 8, "prompts": "x"}, {"tokens": 8}, "prompts"),
        ({}, {"tokens": 8}, "A gave no proof"),
        ({"tokens": 8}, {}, "B gave no proof"),
    ],
)
def test_two_sides_that_differ_or_prove_nothing_are_refused(ours: Any, peer: Any, complaint: str) -> None:
    with pytest.raises(method.DifferentWorkError, match=complaint):
        method.check_same_work(method.Sample("A", 1.0, ours), method.Sample("B", 1.0, peer))


# -- the ratio --------------------------------------------------------------------


def test_the_ratio_is_the_median_of_pairs_not_of_sides() -> None:
    ours, peer = [1.0, 10.0, 100.0], [300.0, 20.0, 2.0]
    pairs = [
        method.Pair(i, method.Sample("a", a), method.Sample("b", b), load.Load(0.0, 1.0, False))
        for i, (a, b) in enumerate(zip(ours, peer, strict=True))
    ]
    assert [p.ratio for p in pairs] == [300.0, 2.0, 0.02]
    assert isinstance(method.compare(pairs), method.NoRatio), "the sides' medians alone would have claimed 2x"


def test_an_interval_that_crosses_one_is_not_a_ratio() -> None:
    refused = method.compare(pairs_of([0.9, 1.4, 1.5, 0.8, 1.3, 1.2, 0.95]))
    assert isinstance(refused, method.NoRatio)
    assert "crosses 1" in str(refused)
    assert not any(figure in str(refused) for figure in ("1.2", "0.9", "x ["))


def test_a_loss_is_printed_like_a_win() -> None:
    lost = method.compare(pairs_of([0.5, 0.52, 0.48, 0.5, 0.51, 0.49, 0.5]))
    assert str(lost).startswith("0.50x [0.4")
    assert not report.goal_met(lost, 3.0)


def test_dirty_pairs_do_not_count_unless_asked() -> None:
    pairs = pairs_of([3.0, 3.1, 3.2, 99.0], dirty=(3,))
    assert method.compare(pairs).high == 3.2
    assert method.compare(pairs, allow_dirty=True).high == 99.0
    assert method.medians(pairs) == (1.0, 3.1)
    assert "1 dirty" in method.dirt(pairs)


def test_two_pairs_are_too_few() -> None:
    assert isinstance(method.compare(pairs_of([3.0, 3.0])), method.NoRatio)
    assert isinstance(method.compare(pairs_of([3.0, 3.0, 3.0])), method.Ratio)


def test_the_interval_holds_the_median_narrows_with_pairs_and_repeats() -> None:
    values = [2.0, 2.2, 2.4, 2.6, 2.8, 3.0, 3.2]
    low, high = method.bootstrap_interval(values)
    assert 2.0 <= low < 2.6 < high <= 3.2
    assert (low, high) == method.bootstrap_interval(values)
    wide = method.bootstrap_interval(values * 8)
    assert wide[1] - wide[0] < high - low


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [1.0, 0.0], [float("inf")]])
def test_an_interval_of_nonsense_is_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        method.bootstrap_interval(values)


# -- foreign load -----------------------------------------------------------------


def fake_proc(folder: Path, user: int, steal: int, processes: dict[int, tuple[int, int]]) -> Path:
    """`processes`: pid -> (parent, ticks)."""
    folder.mkdir(exist_ok=True)
    (folder / "stat").write_text(f"cpu  {user} 0 0 900 50 0 0 {steal} 0 0\ncpu0 1\ncpu1 1\nintr 5\n")
    for pid, (parent, ticks) in processes.items():
        (folder / str(pid)).mkdir(exist_ok=True)
        rest = ["S", str(parent), *["0"] * 9, str(ticks), "0", "0", "0", "20"]
        (folder / str(pid) / "stat").write_text(f"{pid} (a ) b) {' '.join(rest)}\n")
    return folder


def test_own_time_is_the_whole_tree_and_nobody_elses(tmp_path: Path) -> None:
    proc = fake_proc(tmp_path / "proc", 100, 0, {10: (1, 5), 11: (10, 7), 12: (11, 9), 20: (1, 1000)})
    assert load.tree_ticks(proc, 10) == 21
    assert load.busy_ticks(proc) == 100
    assert load.cpu_count(proc) == 2


def test_idle_and_waiting_for_the_disk_are_not_load_but_steal_is(tmp_path: Path) -> None:
    assert load.busy_ticks(fake_proc(tmp_path / "proc", 100, 30, {})) == 130


@pytest.mark.parametrize(("foreign", "dirty"), [(0, False), (39, False), (41, True), (-4, False)])
def test_more_than_two_percent_of_the_window_is_dirty(foreign: int, dirty: bool) -> None:
    start, end = load.Mark(0.0, 0, 0), load.Mark(10.0, 1000 + foreign, 1000)
    got = load.judge(start, end, cpus=2, ticks_per_second=100)
    assert got.dirty is dirty
    assert got.share == max(0, foreign) / 2000


def test_a_short_window_is_not_condemned_for_the_grain_of_the_clock() -> None:
    start = load.Mark(0.0, 0, 0)
    assert not load.judge(start, load.Mark(0.1, 3, 0), cpus=2, ticks_per_second=100).dirty
    assert load.judge(start, load.Mark(0.1, 4, 0), cpus=2, ticks_per_second=100).dirty


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="no /proc on this system")
def test_a_child_that_ended_counts_as_ours() -> None:
    before = load.tree_ticks(load.PROC, os.getpid())
    subprocess.run([sys.executable, "-c", "x = sum(i * i for i in range(3_000_000))"], check=True)
    assert load.tree_ticks(load.PROC, os.getpid()) >= before + 3


# -- files and tables -------------------------------------------------------------


def test_the_journal_keeps_the_setting_and_every_raw_sample(tmp_path: Path) -> None:
    journal = method.Journal("demo", {"threads": 2}, tmp_path)
    method.alternate(
        side("A", []), side("B", []), pairs=2, probe=Probe([True]), record=journal.pair("cell 1")
    )  # one dirty, two clean
    lines = [json.loads(line) for line in (tmp_path / "demo.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["run", "pair", "pair", "pair"]
    assert lines[0]["setting"] == {"threads": 2}
    assert {"cpu", "versions", "git"} <= lines[0]["machine"].keys()
    assert [line["load"]["dirty"] for line in lines[1:]] == [True, False, False]
    assert lines[1]["ours"]["seconds"] == 1.0
    assert lines[1]["ours"]["work"] == {"tokens": 8}


ROWS = [("won", True), ("lost", False), ("shown", None)]


def test_losing_rows_are_in_the_table_and_decide_the_exit_status(tmp_path: Path, capsys: Any) -> None:
    rows = [report.Row("speed", name, "1 s", "2 s", "2.00x", ">= 3x", met, note="how") for name, met in ROWS]
    assert report.publish(rows, tmp_path / "rows.jsonl") == 1
    printed = capsys.readouterr().out
    assert all(name in printed for name, _ in ROWS)
    assert printed.count("speed: how") == 1
    assert report.read_rows(tmp_path / "rows.jsonl") == rows
    assert report.publish([rows[0], rows[2]], None) == 0


def test_results_replace_what_stood_between_the_marks_and_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    text = report.as_markdown([report.Row("speed", "a|b", "1 s")])
    report.write_between_marks(page, text)
    report.write_between_marks(page, text)
    assert page.read_text() == f"before\n{report.BEGIN}\n{text}\n{report.END}\nafter\n"
    assert "a\\|b" in text
    page.write_text("no marks")
    with pytest.raises(ValueError, match="once each"):
        report.write_between_marks(page, text)


# -- two processes in turns -------------------------------------------------------

CHILD = """
import sys
sys.path.insert(0, {folder!r})
from sides import Gate
gate = Gate()
print("libraries print what they like")
gate.ready({{"name": "child"}})
step, facts = 0, None
while gate.turn(facts):
    step += 1
    {body}
    facts = {{"step": step}}
"""


def child(tmp_path: Path, body: str = "pass") -> Any:
    script = tmp_path / "child.py"
    script.write_text(CHILD.format(folder=str(FOLDER), body=body))
    return sides.Side("child", [str(script)], tmp_path / "child.log")


def test_a_side_works_only_when_told_and_ends_when_let_go(tmp_path: Path) -> None:
    with child(tmp_path) as one:
        assert one.setting == {"name": "child"}
        assert [one.step()["step"] for _ in range(3)] == [1, 2, 3]
    assert "libraries print" in (tmp_path / "child.log").read_text()


def test_a_side_that_dies_says_its_last_words(tmp_path: Path) -> None:
    with child(tmp_path, 'sys.exit("out of luck")') as one, pytest.raises(sides.SideFailedError, match="out of luck"):
        one.step()
