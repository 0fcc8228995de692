"""Which test shows that a config key changes something: read from the tests, never kept by hand.

A test claims a key with a marker, on itself, on its class, or on the whole file (`pytestmark`):

    @pytest.mark.config_key("temperature", "engine.rows")
    def test_a_higher_temperature_flattens_the_choice() -> None: ...
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from repo_tree import ROOT, Source, python_files, relative, sources


def all_keys() -> list[str]:
    """Every key of the config in order of declaration; keys of a table are dotted."""
    return list(all_defaults())


def all_defaults() -> dict[str, str]:
    """Key -> what it is when it is left out, as Python writes it; `required` where it cannot be."""
    from pydantic import BaseModel

    from surefoot.config import Config

    def walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str]]:
        for name, field in model.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from walk(kind, f"{prefix}{name}.")
            else:
                default = repr(field.get_default(call_default_factory=True))
                yield prefix + name, "required" if field.is_required() else default

    return dict(walk(Config, ""))


def decided_defaults() -> dict[str, str]:
    """The same as it was decided: tests/repo/config_keys.txt."""
    lines = (ROOT / "tests" / "repo" / "config_keys.txt").read_text(encoding="utf-8").splitlines()
    return {key: default for key, _, default in (line.partition(" = ") for line in lines)}


def key_effects(folder: Path = ROOT / "tests") -> dict[str, list[str]]:
    """Key -> node ids of the tests that claim it."""
    table: dict[str, list[str]] = defaultdict(list)
    for source in sources(folder):
        for key, node in claims(source):
            table[key].append(node)
    return dict(table)


def claims(source: Source) -> Iterator[tuple[str, str]]:
    """(key, node id) for every test of a file under a `config_key` marker."""
    yield from _claims(source.tree, source.name, list(_file_marks(source.tree)))


def _claims(scope: ast.Module | ast.ClassDef, prefix: str, outer: list[str]) -> Iterator[tuple[str, str]]:
    for node in scope.body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            yield from _claims(node, f"{prefix}::{node.name}", outer + _marks(node.decorator_list))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            for key in outer + _marks(node.decorator_list):
                yield key, f"{prefix}::{node.name}"


def _file_marks(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets):
            yield from _marks([part for part in ast.walk(node.value) if isinstance(part, ast.Call)])


def _marks(nodes: list[ast.expr] | list[ast.Call]) -> list[str]:
    keys = []
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.config_key":
            for argument in node.args:
                literal = isinstance(argument, ast.Constant) and isinstance(argument.value, str)
                assert literal, f"line {node.lineno}: config_key takes literal names, so that they can be read"
                keys.append(argument.value)
    return keys


if __name__ == "__main__":
    print(f"{len(python_files(ROOT / 'tests'))} files below {relative(ROOT / 'tests')}")
    table = key_effects()
    for key in all_keys():
        print(f"{key:32} {', '.join(table.get(key, ['-- no test --']))}")
