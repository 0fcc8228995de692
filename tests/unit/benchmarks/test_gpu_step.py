"""`benchmarks/gpu_step.py`: cells that end in time, samples that survive, and a table that says what they say."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from benchmark_scripts import FOLDER, benchmark

gpu_step = benchmark("gpu_step")
WORK = {"completions": 8, "sampled_tokens": 64}


def sample(side: str, value: float, cell: str = "step", **facts: Any) -> dict[str, Any]:
    return {"kind": "sample", "cell": cell, "side": side, "value": value, "unit": "s", "facts": facts}


def asked(folder: Path, *cells: str, seconds: float) -> Namespace:
    return Namespace(
        cells=list(cells), out=folder / "gpu.jsonl", logs=folder, worlds=folder / "worlds", table=None, tiny=True,
        device="cpu", threads=1, samples=1, seconds=seconds, commit="abcdef1",
    )  # fmt: skip


def step_row(*lines: dict[str, Any]) -> tuple[str, ...]:
    (row,) = gpu_step.rows_of(lines)[0]
    return tuple(row)


def test_the_faster_of_trls_settings_counts() -> None:
    lines = [sample(side, value) for side, value in (("ours", 0.4), ("TRL", 4.8), ("TRL, bf16 weights", 4.0))] * 3
    row = step_row(*lines)
    assert row[2].startswith("TRL, bf16 weights: 4.000 s")
    assert row[3].startswith("10.00x"), "against the slower one it would be 12x"
    assert row[5] == "yes"


def test_a_lost_goal_stands_in_the_table() -> None:
    slow = [sample("ours", 0.5), sample("TRL", 4.8)] * 3
    assert step_row(*slow)[5] == "**no**", "9.6x, and more than 0.45 s"
    assert step_row({"kind": "end", "cell": "step", "how": "failed with status 1"})[5] == "**no**", "nothing measured"


def test_planted_side_that_does_less_work_has_no_ratio() -> None:
    less = WORK | {"sampled_tokens": 32}
    row = step_row(*[sample("ours", 0.1, work=less), sample("TRL", 4.8, work=WORK)] * 3)
    assert row[3] == "no ratio: sampled_tokens: 32 against 64"
    assert row[5] == "**no**"


def test_an_adapter_is_published_with_what_merging_took() -> None:
    publish, merge = "timing/publish", "timing/merge"
    lines = [sample("ours", 1.0, "full", work=WORK, peak_gib=9.5, **{publish: 0.25, merge: None})]
    lines += [
        sample("ours", 0.5, "lora", work=WORK, **{publish: 0.5, merge: 0.5}),
        sample("TRL", 2.0, "lora", work=WORK),
    ]
    rows = gpu_step.rows_of(lines)[0]
    assert [row[1] for row in rows] == ["64 tokens/s, 9.5 GiB", "128 tokens/s", "1.000 s"]
    assert rows[2][2] == "every weight: 0.250 s"


def test_a_line_that_was_cut_off_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "gpu.jsonl"
    path.write_text(json.dumps(sample("ours", 0.4)) + "\n" + json.dumps(sample("TRL", 4.0))[:-9])
    assert [line["side"] for line in gpu_step.read(path)] == ["ours"]


def test_a_cell_that_hangs_is_stopped_and_the_next_one_has_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("loss", "decode"):
        monkeypatch.setitem(gpu_step.CELLS, name, replace(gpu_step.CELLS[name], limit_s=0.2))
    begun = time.monotonic()
    assert not gpu_step.run_all(asked(tmp_path, "loss", "decode", seconds=60))
    assert time.monotonic() - begun < 30
    ends = [line for line in gpu_step.read(tmp_path / "gpu.jsonl") if line["kind"] == "end"]
    assert [(end["cell"], end["how"]) for end in ends] == [
        (c, "stopped at its limit of 0 s") for c in ("loss", "decode")
    ]


def test_no_cell_is_begun_when_time_is_over(tmp_path: Path) -> None:
    assert not gpu_step.run_all(asked(tmp_path, "step", seconds=5))
    assert "not begun: no time was left" in gpu_step.markdown(gpu_step.read(tmp_path / "gpu.jsonl"))


# -- the page ------------------------------------------------------------------------------------------

RUN = {"kind": "run", "date": "2026-12-01", "commit": "abcdef123", "tiny": False, "machine": {"versions": {"trl": "1"}}}
DEVICE = {"kind": "device", "cell": "step", "name": "a GPU", "torch": "2.11"}


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    """A tree with the page, and no samples."""
    (tmp_path / "docs").mkdir()
    (tmp_path / gpu_step.PAGE).write_text(f"above\n{gpu_step.BEGIN}\n{gpu_step.END}\nbelow\n")
    return tmp_path


def write_down(folder: Path, *lines: dict[str, Any]) -> Path:
    file = folder / "gpu.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_the_table_on_the_page_says_what_the_samples_say() -> None:
    assert gpu_step.is_current(), "python benchmarks/gpu_step.py --write"


def test_a_cell_that_is_measured_again_is_replaced_and_the_others_stay(pages: Path) -> None:
    first = [RUN, DEVICE, sample("ours", 0.5), sample("TRL", 4.0), sample("ours", 0.2, "learn")]
    gpu_step.take_in([write_down(pages, *first)], pages)
    gpu_step.take_in([write_down(pages, RUN | {"date": "2026-12-02"}, DEVICE, sample("ours", 0.25))], pages)
    text = (pages / gpu_step.PAGE).read_text()
    assert text.startswith(f"above\n{gpu_step.BEGIN}\n")
    assert text.endswith(f"{gpu_step.END}\nbelow\n")
    assert "Measured 2026-12-01, 2026-12-02 on a GPU, torch 2.11, trl 1, commit abcdef1" in text
    assert "| 0.250 s | - | - |" in text
    assert "0.500 s" not in text
    assert "| 0.200 s |" in text
    assert "| GRPO step, 64 x 256 tokens, 0.5b | not measured yet |" in text
    assert gpu_step.is_current(pages)


def test_planted_figure_that_no_sample_says_is_seen(pages: Path) -> None:
    gpu_step.take_in([write_down(pages, RUN, DEVICE, sample("ours", 0.5))], pages)
    page = pages / gpu_step.PAGE
    page.write_text(page.read_text().replace("0.500 s", "0.400 s"))
    assert not gpu_step.is_current(pages)


def test_tiny_sizes_stand_on_no_page(pages: Path) -> None:
    before = (pages / gpu_step.PAGE).read_text()
    with pytest.raises(SystemExit, match="mean nothing"):
        gpu_step.take_in([write_down(pages, RUN | {"tiny": True}, sample("ours", 0.1))], pages)
    assert (pages / gpu_step.PAGE).read_text() == before
    assert not (pages / gpu_step.SAMPLES).exists()


# -- the cells themselves --------------------------------------------------------------------------------


def run_cells(folder: Path, *cells: str) -> str:
    """The command with the smallest sizes; the table it prints."""
    words = ["--tiny", "--out", str(folder / "t.jsonl"), "--worlds", str(folder / "w"), "--cells", ",".join(cells)]
    done = subprocess.run(
        [sys.executable, str(FOLDER / "gpu_step.py"), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.turns(5)
def test_a_cell_runs_with_the_smallest_sizes(tmp_path: Path) -> None:
    table = run_cells(tmp_path, "learn")
    assert "plain step: " in table
    assert "side_failed" not in (tmp_path / "t.jsonl").read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("cell", ["step", "loss", "prefix", "decode", "ahead", "builtin", "profile", "full", "lora"])
def test_every_cell_runs_with_the_smallest_sizes(cell: str, tmp_path: Path) -> None:
    run_cells(tmp_path, cell)
    assert "side_failed" not in (tmp_path / "t.jsonl").read_text()
