"""benchmarks/history.jsonl: read as `surefoot trend` reads it, made of commits that git knows, and of what was published."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import figure_rows
import pytest
from benchmark_scripts import FOLDER, benchmark
from repo_tree import ROOT

from surefoot_harness.ratios import RatioRow, read_ratios

history: Any = benchmark("history")
report: Any = benchmark("report")
run: Any = benchmark("run")
HISTORY = FOLDER / "history.jsonl"
PAGE = ROOT / "docs" / "benchmarks.md"


def unknown_commits(rows: list[RatioRow]) -> list[str]:
    known = {commit: figure_rows._git(ROOT, "cat-file", "-t", commit) for commit in {row.commit for row in rows}}
    return sorted(commit for commit, kind in known.items() if kind != "commit")


def test_every_line_is_read_and_its_commit_is_one_that_git_knows() -> None:
    rows = read_ratios(HISTORY)
    assert len(rows) >= 15
    if why := figure_rows.why_no_history(ROOT):
        pytest.skip(why)
    assert unknown_commits(rows) == []
    assert unknown_commits([replace(rows[0], commit="0123456789")]) == ["0123456789"], "planted"


def test_every_ratio_that_the_page_publishes_with_its_interval_is_in_it() -> None:
    """Generated, not typed: a new row of the page is appended by `history.py published --append`."""
    page, rows = PAGE.read_text(encoding="utf-8"), read_ratios(HISTORY)
    published = list(history.published(page))
    assert len(published) >= 15
    assert [row for row in published if row not in rows] == []
    planted = list(history.published(page.replace("2.43x [2.10, 2.93]", "2.53x [2.10, 2.93]")))
    assert [row.ratio for row in planted if row not in rows] == [2.53]


def test_a_published_row_keeps_which_way_is_better() -> None:
    better = {row.cell: row.better for row in history.published(PAGE.read_text(encoding="utf-8"))}
    assert better["training step, 1 task, 32 tokens"] == "higher"
    assert better["recording for `--affected`, tests of 3.6 ms"] == "lower"
    assert better["start of a contained tool server"] == "lower"


# -- what a benchmark appends -----------------------------------------------------------------------


def test_a_results_file_becomes_lines_and_words_do_not(tmp_path: Path) -> None:
    rows = [
        report.Row("decode", "batch 8", "159 tok/s", "HF 73 tok/s", "1.99x [1.80, 2.35] n=5 (4 dirty, used)", limit="281 tok/s"),
        report.Row("end to end", "1 task", "4.60 s", "TRL 11.17 s", "2.43x [2.10, 2.93] n=5", limit="1.83 s"),
        report.Row("startup", "config error", "269 ms", ratio="no difference shown: interval crosses 1, n=7"),
    ]  # fmt: skip
    assert report.publish(rows, tmp_path / "rows.jsonl") == 0
    into = tmp_path / "history.jsonl"
    words = [
        "--commit",
        "a46ab46",
        "--date",
        "2026-11-19",
        "--machine",
        "2 cores",
        "--load",
        "0.01",
        "--history",
        str(into),
    ]
    assert history.main(["append", str(tmp_path / "rows.jsonl"), *words]) == 0
    one, two = read_ratios(into)
    assert one == RatioRow(
        "2026-11-19", "a46ab46", "decode, batch 8", "HF", "2 cores", 1.99, 1.8, 2.35, "higher", 0.5658, 0.01
    )
    assert (two.against, two.ratio, two.limit_share) == ("TRL", 2.43, 0.3978)
    words[1] = "HEAD"
    assert history.main(["append", str(tmp_path / "rows.jsonl"), *words]) == 2
    assert len(read_ratios(into)) == 2


def test_the_suite_keeps_ratios_of_a_tree_without_changes_alone(tmp_path: Path) -> None:
    rows = [report.Row("decode", "batch 8", "159 tok/s", "HF 73 tok/s", "1.99x [1.80, 2.35] n=5", limit="281 tok/s")]
    into = tmp_path / "history.jsonl"
    machine = {"cpus": 2, "cpu": "a processor", "git": {"commit": "a46ab46a46ab46", "dirty": True}}
    assert "differs from its commit" in run.keep(rows, 0.01, machine, into)
    assert not into.exists()
    machine["git"] = {"commit": "a46ab46a46ab46", "dirty": False}
    assert run.keep(rows, 0.01, machine, into) == "1 lines more in history.jsonl"
    (kept,) = read_ratios(into)
    assert (kept.commit, kept.machine, kept.load) == ("a46ab46a46", "2 x a processor", 0.01)


def test_a_benchmark_that_has_no_time_is_a_row_that_says_so_and_is_ended(tmp_path: Path) -> None:
    endless = [run.sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    assert run.ended(endless, 0.2) is None
    assert run.ended(endless, 0.0) is None
    assert run.ended([run.sys.executable, "-S", "-c", "raise SystemExit(3)"], 60) == 3
    (row,) = run.run_one("startup", [], tmp_path, 0.0)
    assert (row.ratio, row.ours, row.met) == ("-", "the minutes were over", False)
