"""The GPU suite on a machine without one: its parts, what it keeps, what it does not run again, and its page."""

from __future__ import annotations

import shutil
from pathlib import Path

import gpu_results
import gpu_suite
import pytest
from gpu_suite import (
    Marked,
    failed,
    is_current,
    marked_in,
    marked_tests,
    page_with,
    problems,
    run_part,
    table,
    unfinished,
)
from repo_tree import ROOT

AROUND = {"commit": "abc", "changed": False, "date": "2026-11-19", "device": "a GPU", "versions": {"torch": "2"}}


def test_every_gpu_test_belongs_to_exactly_one_part_and_no_part_is_empty() -> None:
    assert problems(marked_tests()) == []
    assert sum(gpu_suite.PART_S for _ in (1, 2)) == gpu_suite.ALL_S == 960, "eight minutes a part, sixteen in all"


@pytest.mark.parametrize(
    "mark", ["@pytest.mark.gpu", "@pytest.mark.gpu('nowhere')", "@pytest.mark.gpu('learn')\n@pytest.mark.gpu('resume')"]
)
def test_planted_test_without_a_part_or_with_two_is_seen(mark: str) -> None:
    planted = marked_in(f"import pytest\n{mark}\ndef test_x(): pass\ndef test_y(): pass\n", "tests/test_planted.py")
    assert [test.name for test in planted] == ["test_x"]
    found = problems([*marked_tests(), *planted])
    assert len(found) == 1
    assert "tests/test_planted.py::test_x" in found[0]


def test_planted_file_whose_marker_stands_above_all_is_seen() -> None:
    text = "import pytest\npytestmark = [pytest.mark.slow, pytest.mark.gpu('learn')]\ndef test_x(): pass\n"
    assert marked_in(text, "t.py") == [Marked("t.py", "test_x", "learn")]
    assert problems([t for t in marked_tests() if t.part != "resume"]) == ["part 'resume' has no test"]


def test_the_table_on_the_page_is_current() -> None:
    assert is_current(), "python scripts/gpu_suite.py --write"


def test_planted_line_that_was_not_measured_is_seen(tmp_path: Path) -> None:
    for name in (gpu_suite.FIGURES, gpu_suite.PAGE):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "tests/runs", tmp_path / "tests/runs")
    gpu_suite.publish(tmp_path, None)
    assert is_current(tmp_path)
    page = tmp_path / gpu_suite.PAGE
    page.write_text(page.read_text().replace("| kernels |", "| kernels, twice as fast |"))
    assert not is_current(tmp_path)


@pytest.fixture
def small(tmp_path: Path) -> tuple[Path, list[Marked]]:
    """A tree with one part of three tests, the second of which ends the process the first time."""
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu(part): x\n")
    (tmp_path / "tests").mkdir()
    file = tmp_path / "tests/test_it.py"
    file.write_text(
        "import os, pathlib, pytest\npytestmark = pytest.mark.gpu('learn')\n"
        "def note(name):\n    with open('ran', 'a') as f: f.write(name)\n"
        "def test_a(record_property): note('a'); record_property('gpu', '7 tokens/s')\n"
        "def test_b():\n    note('b')\n    if pathlib.Path('ran').read_text() == 'ab': os._exit(9)\n"
        "@pytest.mark.parametrize('n', [1, 2])\ndef test_c(n): note('c'); assert n == 1\n"
    )
    return tmp_path, marked_in(file.read_text(), "tests/test_it.py")


def test_what_has_an_outcome_is_kept_when_the_machine_goes_and_is_not_run_again(
    small: tuple[Path, list[Marked]],
) -> None:
    root, tests = small
    keep = root / "keep"

    def again(around: dict[str, object] = AROUND) -> dict[str, object]:
        return run_part("learn", tests, keep, around, 60, root)

    first = again()
    assert list(first["tests"]) == ["tests/test_it.py::test_a"]
    assert len(unfinished(first)) == 3
    second = again()
    assert (root / "ran").read_text() == "abbcc"
    assert unfinished(second) == []
    assert failed(second) == ["tests/test_it.py::test_c[2]"]
    assert again() == second
    assert (root / "ran").read_text() == "abbcc", "everything has an outcome"
    row = next(line for line in table({"parts": {"learn": second}}, tests).splitlines() if line.startswith("| learn"))
    assert "3 of 4 passed" in row
    assert "test_c[2]: failed; 7 tokens/s" in row
    gpu_results.write(keep / "learn.json", {**second, "collected": ["tests/test_it.py::test_a"], "tests": {}})
    again(AROUND | {"commit": "def"})
    assert (root / "ran").read_text() == "abbccabcc", "another commit: all of it"


def test_a_test_that_takes_too_long_has_failed_and_the_next_one_runs(
    small: tuple[Path, list[Marked]], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, _ = small
    text = "import time\nimport pytest\npytestmark = pytest.mark.gpu('learn')\ndef test_a(): time.sleep(60)\ndef test_b(): pass\n"
    (root / "tests/test_it.py").write_text(text)
    monkeypatch.setattr(gpu_suite, "TEST_S", 0.3)
    kept = run_part("learn", marked_in(text, "tests/test_it.py"), root / "keep", AROUND, 60, root)
    assert [one["outcome"] for one in kept["tests"].values()] == ["failed", "passed"]
    assert "longer than 0.3 s" in kept["tests"]["tests/test_it.py::test_a"]["said"]


def test_without_a_gpu_nothing_runs_and_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_suite.main([]) == 0
    assert f"in {len(gpu_suite.PARTS)} parts: needs a CUDA GPU, none is visible" in capsys.readouterr().out
    assert gpu_suite.main(["--parts", "learn,warp"]) == 2


def test_a_page_without_marks_and_a_folder_without_results_are_refused(tmp_path: Path) -> None:
    with pytest.raises(gpu_suite.GpuSuiteError, match="has no"):
        page_with("text", "rows")
    with pytest.raises(gpu_suite.GpuSuiteError, match="no results"):
        gpu_suite.merged({}, tmp_path)
