"""Everything compiles, every command answers --help, and CI runs only what the README names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from repo_tree import ROOT, python_files, run_python

COMMANDS = ("train eval config version check dump baseline trend assets bisect suite test cover demo ledger").split()


def syntax_errors(*folders: Path) -> list[str]:
    """file:line of every Python file that does not compile."""
    found = []
    for path in python_files(*folders):
        try:
            compile(path.read_text(encoding="utf-8"), str(path), "exec", dont_inherit=True)
        except SyntaxError as error:
            found.append(f"{path.name}:{error.lineno}: {error.msg}")
    return found


def targets(makefile: str) -> set[str]:
    return set(re.findall(r"^([a-z]+):", makefile, flags=re.MULTILINE))


def test_everything_compiles() -> None:
    assert syntax_errors(*(ROOT / name for name in ("src", "tests", "scripts", "benchmarks"))) == []


def test_planted_syntax_error_is_found_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os\n\ndef train(:\n    pass\n", encoding="utf-8")
    (finding,) = syntax_errors(tmp_path)
    assert finding.startswith("train.py:3:")


def test_help_lists_every_command() -> None:
    result = run_python("-m", "surefoot", "--help")
    assert result.returncode == 0, result.stderr
    assert [name for name in COMMANDS if name not in result.stdout] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_answers_help(command: str) -> None:
    result = run_python("-m", "surefoot", command, "--help")
    assert result.returncode == 0, result.stderr
    assert "Usage" in result.stdout


def test_an_unknown_command_is_a_usage_error() -> None:
    assert run_python("-m", "surefoot", "trian").returncode == 2


def test_ci_runs_only_what_the_readme_names() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [line for line in script.splitlines() if line and not line.startswith(("#", "set ", "cd "))]
    assert lines == ["make check", "make test", "make test-vllm"]
    assert [line for line in lines if f"{line}" not in readme] == []


def test_every_make_command_that_we_write_about_exists() -> None:
    known = targets((ROOT / "Makefile").read_text(encoding="utf-8"))
    assert {"setup", "train", "test", "check", "bench", "nightly", "unit", "integration"} <= known
    for name in ("README.md", "CONTRIBUTING.md", "tests/README.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        named = set(re.findall(r"(?:`|^\$? ?)make ([a-z]+)", text, flags=re.MULTILINE))
        assert named <= known, f"{name} names make targets that do not exist: {sorted(named - known)}"
