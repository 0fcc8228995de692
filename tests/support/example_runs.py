"""Runs that pages show as shell lines and as Python: the config that each would train with.

A line counts when it would train: not `--dry-run`, not `--resume` (judged when it began), not one that is refused
(`# exits 2` to 5). What only its reader has (a file that the page does not show) cannot be judged.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from doc_blocks import EXITS, Block, blocks
from repo_tree import ROOT

from surefoot.config import Config
from surefoot.config.load import config_from_values, load_config
from surefoot.errors import ConfigError

REFUSED = ("2", "3", "4", "5")
ASSIGNS = re.compile(r"[A-Z_]+=")
GIVEN = ("reward_funcs", "tools", "environment_factory", "view", "processing_class")
"""Arguments of `surefoot.train` that may be objects, and decide nothing here."""


class Shown(NamedTuple):
    """One run that a block shows."""

    words: str
    config: Config
    text: str
    """Of the config file that it names; empty where there is none."""


class UnreadableError(Exception):
    """An example whose run cannot be read from its text."""


def shown_runs(page: str, block: Block, folder: Path) -> list[Shown]:
    """The runs of one block; rows that it makes are written into `folder`."""
    if block.language == "python":
        return list(_python_runs(page, block, folder))
    return list(_shell_runs(page, block, folder)) if block.language in ("sh", "text") else []


def _shell_runs(page: str, block: Block, folder: Path) -> Iterator[Shown]:
    for line in block.text.replace("\\\n", " ").splitlines():
        if "surefoot train" not in line or line.lstrip().startswith("#"):
            continue
        exits = EXITS.search(line)
        words = _command(line)
        if words[:2] != ["surefoot", "train"] or {"--dry-run", "--resume"} & {*words}:
            continue
        if exits and exits[1] in REFUSED:
            continue
        if any(word.startswith("$") for word in words):
            raise UnreadableError(f"{line.strip()}: write its keys out")
        files = [word for word in words[2:] if word.endswith((".toml", ".yaml")) and "=" not in word]
        text = _file(page, files[0]) if files else ""
        if text is None:
            continue
        path = folder / Path(files[0]).name if files else None
        if path:
            path.write_text(text, encoding="utf-8")
        keys = [word for word in words[2:] if word not in files]
        yield Shown(line.strip(), load_config(path, keys).config, text)


def _command(line: str) -> list[str]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # a line of output with a lone quote
        return []
    while words and (words[0] == "$" or ASSIGNS.match(words[0])):
        words = words[1:]
    return words


def _file(page: str, name: str) -> str | None:
    """A config file that the page shows, or one of ours."""
    found = [block.content for block in blocks(page) if block.file == name]
    if found:
        return found[0]
    ours = ROOT / name
    return ours.read_text(encoding="utf-8") if ours.is_file() else None


def _python_runs(page: str, block: Block, folder: Path) -> Iterator[Shown]:
    tree = ast.parse(block.text)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_train(node.func, tree)]
    before = [each for each in blocks(page) if each.language == "python" and each.line < block.line]
    names = _values_of([*before, block]) if calls else {}
    for call in calls:
        words = ast.unparse(call)
        try:
            yield Shown(words, config_from_values(_keys(call, names, folder), source=words, base=folder).config, "")
        except ConfigError:  # it shows what is refused; that the others work is shown by running them
            continue


def _is_train(function: ast.expr, tree: ast.Module) -> bool:
    if isinstance(function, ast.Name):
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "surefoot"]
        return any(
            each.name == "train" and (each.asname or "train") == function.id for i in imports for each in i.names
        )
    return ast.unparse(function) == "surefoot.train"


def _values_of(scripts: Iterable[Block]) -> dict[str, Any]:
    """Names that these have given a value; those that need more than plain Python are left out."""
    names: dict[str, Any] = {}
    for block in scripts:
        for node in ast.parse(block.text).body:
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name)
                and "surefoot" not in ast.unparse(node)
            ):
                try:
                    names[node.targets[0].id] = eval(ast.unparse(node.value), {**names})
                except Exception:  # it needs what only a run of the page has
                    names.pop(node.targets[0].id, None)
    return names


def _keys(call: ast.Call, names: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The config's keys of a call: rows become files."""
    given = dict(zip(("model", "reward_funcs"), call.args, strict=False))
    for keyword in call.keywords:
        if keyword.arg is None:
            raise UnreadableError(f"{ast.unparse(call)}: write its keys out")
        given[keyword.arg] = keyword.value
    values = {key: _value(node, names) for key, node in given.items() if key not in GIVEN}
    rows = values.pop("train_dataset", values.pop("tasks", None))
    sets = values.pop("eval_dataset", None)
    sets = sets if isinstance(sets, dict) else {"eval_dataset": sets} if sets is not None else {}
    return {
        **values, "tasks": _as_file(rows, "rows", folder),
        "eval_sets": {name: _as_file(each, name, folder) for name, each in sets.items()},
    }  # fmt: skip


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise UnreadableError(f"{ast.unparse(node)} cannot be read from the page: write it out") from None


def _as_file(rows: Any, name: str, folder: Path) -> Any:
    if not isinstance(rows, list):
        return rows
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return f"{name}.jsonl"
