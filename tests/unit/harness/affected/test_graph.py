"""Imports are followed all the way, however they are written."""

from __future__ import annotations

import pytest

from surefoot.harness.affected.blocks import split
from surefoot.harness.affected.tree import Graph


def graph(files: dict[str, str], roots: tuple[str, ...] = ()) -> Graph:
    return Graph({path: split(text.encode()) for path, text in files.items()}, roots)


@pytest.mark.parametrize(
    "line",
    [
        "import pkg.deep.leaf",
        "from pkg.deep import leaf",
        "from pkg.deep.leaf import x",
        "from pkg.deep.leaf import *",
        "def f():\n    from pkg.deep import leaf",
        "import importlib\nimportlib.import_module('pkg.deep.leaf')",
        "patch('pkg.deep.leaf.x')",
        "pytest_plugins = ['pkg.deep.leaf']",
        "if TYPE_CHECKING:\n    import pkg.deep.leaf",
    ],
)
def test_every_way_to_write_an_import_reaches_the_module_and_its_packages(line: str) -> None:
    files = {
        "tests/test_x.py": line,
        "src/pkg/__init__.py": "",
        "src/pkg/deep/__init__.py": "",
        "src/pkg/deep/leaf.py": "",
    }
    assert graph(files).closure(["tests/test_x.py"]) == set(files)


def test_relative_imports_climb_and_siblings_are_found() -> None:
    files = {"pkg/__init__.py": "", "pkg/a/__init__.py": "", "pkg/a/one.py": "from ..b import two\nfrom . import three", "pkg/a/three.py": "", "pkg/b/two.py": ""}  # fmt: skip
    assert graph(files).closure(["pkg/a/one.py"]) == set(files)


def test_the_closure_has_no_depth_limit_and_survives_cycles() -> None:
    files = {f"m{i}.py": f"import m{(i + 1) % 50}" for i in range(50)}
    assert graph(files).closure(["m0.py"]) == set(files)


def test_a_name_that_could_mean_two_files_means_both() -> None:
    files = {"tests/test_x.py": "import helper", "helper.py": "", "tests/helper.py": ""}
    assert graph(files).closure(["tests/test_x.py"]) == set(files)


def test_an_import_of_something_else_leads_nowhere() -> None:
    assert graph({"a.py": "import os, json.decoder\nfrom . import nothing"}).closure(["a.py"]) == {"a.py"}
