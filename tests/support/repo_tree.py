"""What the tests about the repository look at: files, syntax trees, subprocesses.

Every check is a function that takes a tree or a source text and returns its findings, so that the same function
can be shown the real repository and a planted violation.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
PACKAGE = SRC / "surefoot"
HARNESS = ROOT / "harness" / "src"
PACKAGES = (PACKAGE, HARNESS / "surefoot_harness")
DOCS = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
LIGHT = "errors records protocols config data rewards tools sandbox tracking storage guards report system".split()
_NOT_OURS = {".git", ".venv", ".cache", ".reports", "__pycache__", "dist", "build"}


@dataclass(frozen=True)
class Source:
    """A Python file: where it is (relative to the repository), what it says, what that means."""

    name: str
    text: str
    tree: ast.Module


def parse(text: str, name: str = "planted.py") -> Source:
    return Source(name, text, ast.parse(text, filename=name))


def python_files(*folders: Path) -> list[Path]:
    found = [(folder, path) for folder in folders for path in sorted(folder.rglob("*.py"))]
    return [path for folder, path in found if not _NOT_OURS & set(path.relative_to(folder).parts)]


def sources(*folders: Path) -> list[Source]:
    return [parse(path.read_text(encoding="utf-8"), relative(path)) for path in python_files(*folders)]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def module_name(path: Path, src: Path = SRC) -> str:
    """src/surefoot/maths/losses.py -> surefoot.maths.losses."""
    parts = path.relative_to(src).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules(src: Path = SRC) -> list[str]:
    """Every importable module of the package; `assets` holds data and a script, no modules."""
    (package,) = (folder for folder in (src / "surefoot", src / "surefoot_harness") if folder.is_dir())
    found = [module_name(path, src) for path in python_files(package)]
    return [name for name in found if ".assets." not in name and not name.endswith((".__main__", ".sitecustomize"))]


def repository_files() -> list[Path]:
    """Tracked files and those that could be: what `git add -A` would take. Without git, a walk."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode == 0 and listed.stdout:
        found = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        found = [path for path in ROOT.rglob("*") if not _NOT_OURS & set(path.relative_to(ROOT).parts)]
    return sorted({path for path in found if path.is_file()})


def text_of(path: Path) -> str | None:
    """The text of a file, None for a binary one."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function with its dotted name inside the file, nested ones too."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + child.name, child
                yield from walk(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.ClassDef):
                yield from walk(child, f"{prefix}{child.name}.")
            else:
                yield from walk(child, prefix)

    return walk(tree, "")


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every absolute import anywhere in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module


def run_python(*args: str, cwd: Path = ROOT, src: Path = SRC, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """This interpreter on `args` with our packages first on the path; output captured as text."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(src), str(HARNESS)]), "NO_COLOR": "1", "COLUMNS": "120"}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # a pytest inside the pytest has nobody else's plugins to load
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )
