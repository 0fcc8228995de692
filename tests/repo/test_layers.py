"""The floors have teeth: the contracts hold on this tree, and a planted import turns each of them red."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repo_tree import HARNESS, PACKAGE, PACKAGES, ROOT, SRC, Source, parse, sources

HEAVY = ("accelerate", "bitsandbytes", "peft", "ray", "torchao", "transformers", "trl", "vllm")


def lint(root: Path) -> subprocess.CompletedProcess[str]:
    """lint-imports on a tree with src/ and pyproject.toml, in its own interpreter and without its cache."""
    command = "import sys; from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache'])"
    env = os.environ | {
        "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root / 'harness' / 'src'}",
        "NO_COLOR": "1",
        "COLUMNS": "200",
    }
    return subprocess.run(
        [sys.executable, "-c", command], cwd=root, env=env, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the tree that may be damaged."""
    skip = shutil.ignore_patterns("__pycache__", "*.safetensors")
    shutil.copytree(SRC, tmp_path / "src", ignore=skip)
    shutil.copytree(HARNESS, tmp_path / "harness" / "src", ignore=skip)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_contracts_hold() -> None:
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "No matches for ignored import" not in result.stdout, "the register names a use that is gone"


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        ("pairing.py", "import surefoot.errors", "Imports only go down"),
        ("system/json.py", "import surefoot.records", "Imports only go down"),
        (
            "../../harness/src/surefoot_harness/errors.py",
            "import surefoot.records",
            "The harness is a distribution of its own",
        ),
        (
            "../../harness/src/surefoot_harness/checks/kinds.py",
            "import torch",
            "The harness is a distribution of its own",
        ),
        ("../../harness/src/surefoot_harness/system/json.py", "import surefoot_harness.series", "In the harness, too"),
        ("maths/advantages.py", "import surefoot.config", "Imports only go down"),
        ("engines/scripted.py", "def later():\n    import surefoot.learner.model", "Imports only go down"),
        ("data/tasks.py", "import surefoot.tools", "Imports only go down"),
        ("learner/model.py", "import surefoot.run", "Imports only go down"),
        ("reference.py", "import surefoot.errors", "Imports only go down"),
        ("new_corner.py", "import json", "Imports only go down"),
        ("../../harness/src/surefoot_harness/new_corner.py", "import json", "In the harness, too"),
        ("maths/losses.py", "import surefoot.reference", "nobody imports the oracle"),
        ("rewards/functions.py", "import torch", "Light modules never import torch"),
        *[("protocols.py", f"def later():\n    import {name}", "One home per heavy dependency") for name in HEAVY],
    ],
)
def test_planted_import_turns_a_contract_red(copy: Path, file: str, line: str, broken: str) -> None:
    target = copy / "src" / "surefoot" / file
    assert target.exists() or target.name == "new_corner.py", f"{file} is gone; choose another file to damage"
    with target.open("a", encoding="utf-8") as handle:
        handle.write(f"\n{line}\n")
    result = lint(copy)
    assert result.returncode == 1, result.stdout + result.stderr
    verdicts = [text for text in result.stdout.splitlines() if " BROKEN" in text]
    assert any(broken in text for text in verdicts), result.stdout


def test_no_module_is_named_after_a_package_that_it_imports() -> None:
    clashes = [path for name in HEAVY for path in PACKAGE.rglob(f"{name}.py")]
    assert clashes == []


def class_names(source: Source) -> list[str]:
    return [node.name for node in source.tree.body if isinstance(node, ast.ClassDef)]


def test_a_class_name_is_used_once_in_the_tree() -> None:
    """Who reads a name in a message or in a stack finds one class, not the first of three."""
    homes: dict[str, list[str]] = {}
    for source in sources(*PACKAGES):
        if "/child/" not in source.name:
            for name in class_names(source):
                homes.setdefault(name, []).append(source.name)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}
    assert class_names(parse("class A: ...\ndef f(): ...\n")) == ["A"]
