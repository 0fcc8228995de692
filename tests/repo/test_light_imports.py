"""`surefoot --help` and the light modules never wait for torch. Asked of fresh interpreters."""

from __future__ import annotations

import json

import pytest
from repo_tree import LIGHT, run_python

HEAVY = ["torch", "transformers", "tokenizers", "numpy.linalg", "ray", "vllm", "trl", "datasets", "pandas", "pyarrow"]
REPORT = f"import json, sys; print('LOADED', json.dumps([name for name in {HEAVY} if name in sys.modules]))"


def loaded_by(code: str) -> list[str]:
    """Which heavy packages a fresh interpreter holds after running `code`, even when `code` exits."""
    guarded = f"try:\n    {code}\nexcept SystemExit as end:\n    assert not end.code, end.code\n{REPORT}"
    result = run_python("-c", guarded)
    assert result.returncode == 0, result.stdout + result.stderr
    found: list[str] = json.loads(result.stdout.rpartition("LOADED")[2])
    return found


@pytest.mark.parametrize("module", LIGHT)
def test_a_light_module_imports_nothing_heavy(module: str) -> None:
    assert loaded_by(f"import surefoot.{module}") == []


def test_help_imports_nothing_heavy() -> None:
    assert loaded_by("import sys; sys.argv = ['surefoot', '--help']; from surefoot.cli import main; main()") == []


def test_planted_heavy_import_is_seen() -> None:
    assert "torch" in loaded_by("import torch")
