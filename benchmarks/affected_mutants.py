"""Seeded edits of the sample: single mutants for the miss count, and whole commits for the replay."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

SWAPS: dict[type, type] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Gt: ast.LtE}


class Mutant(NamedTuple):
    """One changed file."""

    path: Path
    text: str
    what: str


def mutants(package: Path, count: int, seed: int) -> list[Mutant]:
    """`count` different mutants, drawn evenly from all operators and numbers of the package."""
    places = [
        (path, index) for path in sorted(package.rglob("_m*.py")) for index in range(len(_spots(path.read_text())))
    ]
    chosen = random.Random(seed).sample(places, min(count, len(places)))
    return [_mutate(path, index) for path, index in chosen]


def _spots(text: str) -> list[ast.AST]:
    def counts(node: ast.AST) -> bool:
        if isinstance(node, ast.Constant):
            return isinstance(node.value, int) and not isinstance(node.value, bool)
        return isinstance(node, ast.BinOp | ast.Compare) and type(_operator(node)) in SWAPS

    return [node for node in ast.walk(ast.parse(text)) if counts(node)]


def _operator(node: ast.AST) -> ast.AST:
    return node.op if isinstance(node, ast.BinOp) else node.ops[0]  # type: ignore[attr-defined]


def _mutate(path: Path, index: int) -> Mutant:
    text = path.read_text()
    tree = ast.parse(text)
    spot = _spots(text)[index]
    node = next(each for each in ast.walk(tree) if _same_spot(each, spot))
    if isinstance(node, ast.Constant):
        what = f"{node.value} to {node.value + 1}"  # type: ignore[operator]
        node.value += 1  # type: ignore[operator]
    elif isinstance(node, ast.BinOp):
        what = f"{type(node.op).__name__} swapped"
        node.op = SWAPS[type(node.op)]()
    else:
        what = "comparison turned"
        node.ops = [SWAPS[type(node.ops[0])]()]  # type: ignore[attr-defined]
    return Mutant(path, ast.unparse(tree), f"{path.name}:{node.lineno} {what}")  # type: ignore[attr-defined]


def _same_spot(one: ast.AST, other: ast.AST) -> bool:
    fields = ("lineno", "col_offset", "end_col_offset")
    return type(one) is type(other) and all(getattr(one, f, None) == getattr(other, f, None) for f in fields)


def commits(package: Path, seed: int) -> list[tuple[str, Callable[[], None]]]:
    """Named edits that build on one another: bodies, constants, data, new, deleted and renamed files, comments."""
    dice = random.Random(seed)
    files = sorted(package.glob("_m*.py"), key=lambda path: int(path.stem[2:]))
    top, spare = files[-1], package / "_spare.py"

    def replace(path: Path, before: str, after: str) -> Callable[[], None]:
        def edit() -> None:
            text = path.read_text()
            assert before in text, f"{before!r} is not in {path.name}"
            path.write_text(text.replace(before, after, 1))

        return edit

    def add(path: Path, text: str) -> Callable[[], None]:
        return lambda: path.write_text((path.read_text() if path.exists() else "") + text) and None

    def rename_module() -> None:
        (package / "_m5_core.py").write_text(files[5].read_text())
        files[5].write_text("from ._m5_core import *\nfrom ._m5_core import f_5_17_fill\n")

    edits: list[tuple[str, Callable[[], None]]] = []
    for number in dice.sample(range(6, 20), 8):
        edits.append(
            (
                f"body of f_{number}_3",
                replace(
                    files[number],
                    f"def f_{number}_3(x",
                    f"def f_{number}_3_old(x):\n    return x\n\n\ndef f_{number}_3(x",
                ),
            )
        )
        edits.append(
            (f"constant SCALE_{number}", replace(files[number], f"SCALE_{number} = ", f"SCALE_{number} = 1 + "))
        )
    edits += [
        ("a comment", add(files[2], "\n# nothing to see\n")),
        ("a new file", add(spare, "def unused():\n    return 1\n")),
        ("a new function", add(top, "\n\ndef brand_new(x):\n    return x\n")),
        ("data", replace(package / "rates.json", '"3": ', '"3": 1')),
        ("a deleted file", lambda: spare.unlink()),
        ("a renamed module", rename_module),
        (
            "a cached helper",
            replace(files[8], "def f_8_17_fill():\n    return ", "def f_8_17_fill():\n    return 1 + "),
        ),
        ("the hot core", replace(files[0], "def f_0_1(x", "def f_0_1_old(x):\n    return x\n\n\ndef f_0_1(x")),
    ]
    return edits
