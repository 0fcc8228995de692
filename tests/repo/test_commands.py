"""Everything compiles, every command answers --help, and CI runs only what the README names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from repo_tree import ROOT, python_files, run_python

from surefoot.cli.overview import HEADINGS, OTHERS

COMMANDS = tuple(name for lines in HEADINGS.values() for name in lines)


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
    assert [name for name in COMMANDS if f"\n  {name} " not in result.stdout] == []
    assert [f"\n{heading}:\n" for heading in HEADINGS if f"\n{heading}:\n" not in result.stdout] == []
    assert OTHERS not in result.stdout, "a command has no heading in cli/overview.py"
    assert cut_lines(result.stdout) == []


def cut_lines(shown: str) -> list[str]:
    """Lines of a list of commands that are wider than a terminal, end in dots, or go on in a second line."""
    *_, options = shown.partition("Options:")
    lists = options.partition("\n\n")[2].splitlines()
    return [line for line in lists if len(line) > 80 or line.rstrip().endswith("...") or line.startswith("   ")]


def test_planted_long_line_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from surefoot.cli import app

    monkeypatch.setitem(HEADINGS["Train"], "train", "Train a model by CONFIG, and without one, the built-in run: " * 2)
    shown = CliRunner().invoke(app, ["--help"], terminal_width=80).stdout
    assert len(cut_lines(shown)) == 1, "it is wrapped, and told"
    monkeypatch.delitem(HEADINGS["Train"], "train")
    assert f"\n{OTHERS}:\n  train" in CliRunner().invoke(app, ["--help"]).stdout


@pytest.mark.parametrize("group", ["suite", "baseline", "assets", "cover", "demo"])
def test_no_list_of_commands_is_cut(group: str) -> None:
    from typer.testing import CliRunner

    from surefoot.cli import app

    shown = CliRunner().invoke(app, [group, "--help"], terminal_width=80).stdout
    assert "Commands:" in shown
    assert "..." not in shown.partition("Commands:")[2]


def test_the_version_is_an_option_too() -> None:
    assert run_python("-m", "surefoot", "--version").stdout == run_python("-m", "surefoot", "version").stdout


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
    setup, *lines = lines
    assert setup.startswith("make setup || { echo "), "by hash, or said aloud"
    assert lines == ["make check", "make test", "make test-vllm"]
    assert [line for line in lines if f"{line}" not in readme] == []


def test_every_make_command_that_we_write_about_exists() -> None:
    known = targets((ROOT / "Makefile").read_text(encoding="utf-8"))
    assert {"setup", "train", "test", "check", "bench", "nightly", "unit", "quick"} <= known
    for name in ("README.md", "CONTRIBUTING.md", "tests/README.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        named = set(re.findall(r"(?:`|^\$? ?)make ([a-z]+)", text, flags=re.MULTILINE))
        assert named <= known, f"{name} names make targets that do not exist: {sorted(named - known)}"
