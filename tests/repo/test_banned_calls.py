"""Calls that run what they read, and other habits that hide a failure, do not occur in src."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from exceptions import BANNED_CALLS
from repo_tree import PACKAGE, Source, parse, sources

BANNED = {
    "eval", "exec", "os.system", "os.popen", "torch.load", "yaml.load", "yaml.load_all", "yaml.unsafe_load",
    "yaml.full_load", "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads", "shelve.open", "dill.load",
    "dill.loads", "joblib.load", "cloudpickle.load", "cloudpickle.loads", "multiprocessing.reduction.ForkingPickler.loads",
}  # fmt: skip
BANNED_MODULES = {"dill", "cloudpickle", "joblib", "shelve", "marshal"}


def findings(source: Source) -> Iterator[str]:
    aliases = _aliases(source.tree)
    for node in ast.walk(source.tree):
        for name, why in _of_node(node, aliases):
            if f"{source.name}::{name}" not in BANNED_CALLS:
                yield f"{source.name}:{getattr(node, 'lineno', 0)}: {name}: {why}"


def _of_node(node: ast.AST, aliases: dict[str, str]) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Call):
        name = _dotted(node.func, aliases)
        if name in BANNED:
            yield name, "runs what it reads"
        for keyword in node.keywords:
            off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            if keyword.arg in ("shell", "trust_remote_code") and not off:
                yield keyword.arg, "only the literal False is allowed"
    elif isinstance(node, ast.Import | ast.ImportFrom):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        for name in names:
            if name.split(".")[0] in BANNED_MODULES:
                yield name, "unpickling runs what it reads"
    elif isinstance(node, ast.Assert) and node.msg is None:
        yield "assert", "an assert without a message says nothing to the person it stops"
    elif isinstance(node, ast.ExceptHandler) and _swallows(node):
        yield "except", "a broad except has to raise, or keep the exception it caught"


def _swallows(node: ast.ExceptHandler) -> bool:
    """A handler of everything that neither raises nor looks at what it caught."""
    keepers = {"format_exc", "print_exc", "exc_info"}
    names = {part.id for part in ast.walk(node.type) if isinstance(part, ast.Name)} if node.type else {"BaseException"}
    if not names & {"Exception", "BaseException"}:
        return False
    inside = [part for statement in node.body for part in ast.walk(statement)]
    used = node.name is not None and any(isinstance(part, ast.Name) and part.id == node.name for part in inside)
    kept = any(isinstance(part, ast.Attribute) and part.attr in keepers for part in inside)
    return not used and not kept and not any(isinstance(part, ast.Raise) for part in inside)


def _aliases(tree: ast.Module) -> dict[str, str]:
    """Local name -> full name, so that `from torch import load as read` is seen for what it is."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _dotted(node: ast.expr, aliases: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, aliases)}.{node.attr}"
    return "?"


def test_src_has_no_banned_call_and_no_silent_handler() -> None:
    assert [finding for source in sources(PACKAGE) for finding in findings(source)] == []


def test_every_exception_has_a_reason_and_a_file() -> None:
    names = {source.name for source in sources(PACKAGE)}
    for key, reason in BANNED_CALLS.items():
        assert key.split("::")[0] in names, f"{key} no longer exists"
        assert reason.strip(), f"{key} needs a reason"


@pytest.mark.parametrize(
    "text",
    [
        "import pickle\npickle.loads(data)",
        "from pickle import Unpickler as Reader\nReader(file)",
        "from multiprocessing.reduction import ForkingPickler\nForkingPickler.loads(data)",
        "from dill import loads",
        "import torch\ntorch.load('x')",
        "import torch as t\nt.load('x', weights_only=True)",
        "from torch import load as read\nread('x')",
        "import yaml\nyaml.load(text, Loader=yaml.SafeLoader)",
        "eval('1')",
        "exec(text)",
        "import subprocess\nsubprocess.run('ls', shell=True)",
        "import subprocess\nsubprocess.run('ls', shell=flag)",
        "AutoModel.from_pretrained(name, trust_remote_code=config.trust)",
        "assert x > 0",
        "try:\n    f()\nexcept Exception:\n    result = 0",
        "try:\n    f()\nexcept:\n    pass",
        "try:\n    f()\nexcept (ValueError, BaseException) as error:\n    x = 0",
    ],
)
def test_planted_violation_is_seen(text: str) -> None:
    assert len(list(findings(parse(text)))) == 1, text


@pytest.mark.parametrize(
    "text",
    [
        "import json\njson.loads('1')",
        "import yaml\nyaml.safe_load(text)",
        "model.eval()",
        "import subprocess\nsubprocess.run(['ls'], shell=False)",
        "assert x > 0, 'x is a count'",
        "try:\n    f()\nexcept Exception as error:\n    raise StateError('a', 'b', 'c') from error",
        "try:\n    f()\nexcept Exception as error:\n    reasons.append(repr(error))",
        "try:\n    f()\nexcept KeyError:\n    pass",
    ],
)
def test_harmless_code_is_not_accused(text: str) -> None:
    assert list(findings(parse(text))) == []
