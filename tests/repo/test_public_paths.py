"""What the documentation has ever imported stays importable, through one table of moved names."""

from __future__ import annotations

import importlib

import pytest
from repo_tree import ROOT, run_python

from surefoot.moved_names import MOVED

PATHS = (ROOT / "tests" / "repo" / "public_paths.txt").read_text(encoding="utf-8").split()


IMPORTS_TRL = "surefoot.trl_bridge:GuardedGRPOTrainer"


def test_what_imports_trl_is_importable_too() -> None:
    """In a process of its own: TRL asks which packages are installed, and other tests change what it would hear."""
    assert IMPORTS_TRL in PATHS
    module, _, name = IMPORTS_TRL.partition(":")
    done = run_python("-c", f"from {module} import {name}; print({name}.__module__)")
    assert done.stdout.startswith("surefoot."), done.stdout + done.stderr


@pytest.mark.parametrize("path", [path for path in PATHS if path != IMPORTS_TRL])
def test_every_path_that_was_ever_documented_is_importable(path: str) -> None:
    module, _, name = path.partition(":")
    found = importlib.import_module(module)
    if name:
        assert getattr(found, name).__module__.startswith("surefoot"), path


def test_a_moved_name_is_the_very_same_thing() -> None:
    from surefoot.envs.sandbox import Limits  # type: ignore[import-not-found]
    from surefoot.sandbox.sandbox import SandboxLimits

    assert Limits is SandboxLimits


def test_importing_the_package_loads_no_moved_module_and_an_unknown_name_is_refused() -> None:
    done = run_python("-c", "import sys, surefoot; print([m for m in sys.modules if m.startswith('surefoot.')])")
    assert done.stdout.strip() == "['surefoot.moved_names']", done.stdout + done.stderr
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        exec("from surefoot.envs.sandbox import Nothing")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("surefoot.envs.nothing")


def test_the_documented_program_still_starts() -> None:
    done = run_python("-m", "surefoot.envs.sandbox")
    assert done.returncode in (0, 5), done.stderr
    assert done.stdout.strip() == run_python("-m", "surefoot.sandbox").stdout.strip() != ""


def test_the_table_holds_nothing_that_exists_and_nothing_that_nobody_was_told_of() -> None:
    told = {tuple(path.partition(":")[::2]) for path in PATHS}
    for module, names in MOVED.items():
        assert not (ROOT / "src" / (module.replace(".", "/") + ".py")).exists(), module
        assert {(module, name) for name in names} <= told, module
