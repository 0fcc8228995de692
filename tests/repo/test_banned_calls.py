"""Calls that run what they read, and other habits that hide a failure, do not occur in src.

What is allowed in spite of it, with its reason, is in `exceptions.py`: the user's own reward file, for one, which the
config on the command line names. Nothing of ours pickles, not even between its own processes. What actors of Ray send
each other is serialised by Ray, in Ray's own way, inside the cluster of one run: that is the one thing not seen here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from exceptions import BANNED_CALLS
from figures import Record, note
from repo_tree import PACKAGES, ROOT, Source, parse, sources

BANNED = {
    "eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec", "builtins.compile", "builtins.__import__",
    "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "pty.spawn", "code.interact",
    "runpy.run_path", "runpy.run_module", "importlib.reload",
    "torch.load", "torch.jit.load", "torch.hub.load", "torch.package.PackageImporter", "torch.serialization.load",
    "numpy.lib.npyio.load", "pandas.read_pickle",
    "yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.full_load", "yaml.full_load_all",
    "yaml.Loader", "yaml.FullLoader", "yaml.UnsafeLoader", "yaml.CLoader",
    "multiprocessing.Pipe", "multiprocessing.Queue", "multiprocessing.SimpleQueue", "multiprocessing.JoinableQueue",
    "multiprocessing.Pool", "multiprocessing.Manager", "multiprocessing.Process", "multiprocessing.get_context",
    "concurrent.futures.ProcessPoolExecutor", "concurrent.futures.process.ProcessPoolExecutor", "copyreg.pickle",
    "logging.config.listen", "tempfile.mktemp",
}  # fmt: skip
"""Called, or only named: `read = pickle.loads` is as bad as calling it."""
BANNED_MODULES = {
    "pickle", "_pickle", "pickletools", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle", "imp", "dbm",
}  # fmt: skip
"""Not to be imported at all: reading runs what it reads, and what is written has to be read."""
PICKLING = (
    "multiprocessing.reduction", "multiprocessing.connection", "multiprocessing.managers", "multiprocessing.queues",
    "multiprocessing.pool", "multiprocessing.spawn", "torch.multiprocessing", "ray.cloudpickle",
)  # fmt: skip
"""Parts of other packages that pickle whatever they are given, without a word: `Connection.send(object)`."""
METHODS = {
    "exec_module": "runs a file",
    "extractall": "follows names out of an archive",
    "read_pickle": "runs what it reads",
    "from_code": "runs what it is given",
}
"""Whatever object they are called on."""
SWITCHES = {"shell": False, "trust_remote_code": False, "allow_pickle": False, "weights_only": True}
"""Keyword arguments, and the one literal that each may have."""
INDIRECT = {"eval", "exec", "compile", "system", "popen", "loads", "__import__", "__subclasses__", "__globals__"}
"""Names that `getattr` must not be asked for."""


def findings(source: Source) -> Iterator[str]:
    aliases = _aliases(source.tree)
    for node in ast.walk(source.tree):
        for name, why in _of_node(node, aliases):
            if f"{source.name}::{name}" not in BANNED_CALLS:
                yield f"{source.name}:{getattr(node, 'lineno', 0)}: {name}: {why}"


def _of_node(node: ast.AST, aliases: dict[str, str]) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
        name = _dotted(node, aliases)
        if name in BANNED:
            yield name, "runs what it reads"
        elif isinstance(node, ast.Attribute) and node.attr in METHODS:
            yield node.attr, METHODS[node.attr]
    elif isinstance(node, ast.Call):
        yield from _of_call(node, aliases)
    elif isinstance(node, ast.Import | ast.ImportFrom):
        within = [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
        found = {name for name in (*names, *within) if f"{name}.".startswith(tuple(f"{part}." for part in PICKLING))}
        for name in [n for n in names if n.split(".")[0] in BANNED_MODULES] or sorted(found, key=len)[:1]:
            yield name, "unpickling runs what it reads"
    elif isinstance(node, ast.Assert) and node.msg is None:
        yield "assert", "an assert without a message says nothing to the person it stops"
    elif isinstance(node, ast.ExceptHandler) and _swallows(node):
        yield "except", "a broad except has to raise, or keep the exception it caught"


def _of_call(node: ast.Call, aliases: dict[str, str]) -> Iterator[tuple[str, str]]:
    name = _dotted(node.func, aliases)
    if name == "importlib.import_module" and not _is_text(node.args[:1]):
        yield name, "imports only what is written here, never a name that was read somewhere"
    if name == "getattr" and _is_text(node.args[1:2]) and node.args[1].value in INDIRECT:  # type: ignore[attr-defined]
        yield "getattr", "reaches a banned call by the back door"
    if name.endswith("numpy.load") and "allow_pickle" not in {keyword.arg for keyword in node.keywords}:
        yield "numpy.load", "say allow_pickle=False, so that no version of numpy can think otherwise"
    for keyword in node.keywords:
        if keyword.arg in SWITCHES and not _is_literally(keyword.value, SWITCHES[keyword.arg]):
            yield keyword.arg, f"only the literal {SWITCHES[keyword.arg]} is allowed"
        if keyword.arg is None and isinstance(keyword.value, ast.Dict):
            yield from _of_switches(keyword.value)


def _of_switches(given: ast.Dict) -> Iterator[tuple[str, str]]:
    """`f(**{"shell": True})` is the same as `f(shell=True)`."""
    for key, value in zip(given.keys, given.values, strict=True):
        name = key.value if isinstance(key, ast.Constant) and isinstance(key.value, str) else ""
        if name in SWITCHES and not _is_literally(value, SWITCHES[name]):
            yield name, f"only the literal {SWITCHES[name]} is allowed"


def _is_text(nodes: list[ast.expr]) -> bool:
    return bool(nodes) and isinstance(nodes[0], ast.Constant) and isinstance(nodes[0].value, str)


def _is_literally(node: ast.expr, wanted: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is wanted


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
    assert [finding for source in sources(*PACKAGES) for finding in findings(source)] == []


def starts_git(source: Source) -> Iterator[int]:
    """Lines where a command line begins with git."""
    for node in ast.walk(source.tree):
        first = node.elts[0] if isinstance(node, ast.List | ast.Tuple) and node.elts else None
        if isinstance(first, ast.Constant) and first.value == "git":
            yield node.lineno


def test_git_is_started_in_one_place_which_starts_nothing_of_the_repositorys() -> None:
    """`system/git.py`; words to be shown to the user, or compared with a log of git's own, are no command."""
    shown = {
        "harness/src/surefoot_harness/bisect/repository.py",
        "harness/src/surefoot_harness/bisect/evidence.py",
        "src/surefoot/report/page.py",
    }
    found = {source.name for source in sources(*PACKAGES, ROOT / "scripts") if list(starts_git(source))}
    assert found - shown == {"harness/src/surefoot_harness/system/git.py"}
    assert list(starts_git(parse('subprocess.run(["git", "status"])'))) == [1]


NEVER = BANNED | BANNED_MODULES | SWITCHES.keys() | {"numpy.load"}
"""What runs data: for these there is to be no exception. The user's own files, named by the config, are no data."""


def test_the_exceptions_for_what_runs_data_are_counted(record_property: Record) -> None:
    files, excused = list(sources(*PACKAGES)), [key for key in BANNED_CALLS if key.partition("::")[2] in NEVER]
    what = (
        "file of the package searched for calls that run data (pickle, torch.load, yaml.load, eval, exec, shell=True, "
        "trust_remote_code); an exception is a failure"
    )
    note(record_property, "P21", what, len(files), ", ".join(excused), bad=len(excused))
    assert len(excused) == 0, "the last one is the way to the reward workers"


def test_every_exception_has_a_reason_and_a_file() -> None:
    names = {source.name for source in sources(*PACKAGES)}
    for key, reason in BANNED_CALLS.items():
        assert key.split("::")[0] in names, f"{key} no longer exists"
        assert reason.strip(), f"{key} needs a reason"


def test_every_exception_is_still_needed() -> None:
    excused = {key.split("::")[0] for key in BANNED_CALLS}
    found = set()
    for source in sources(*PACKAGES):
        aliases = _aliases(source.tree) if source.name in excused else {}
        nodes = ast.walk(source.tree) if source.name in excused else []
        found |= {f"{source.name}::{name}" for node in nodes for name, _ in _of_node(node, aliases)}
    assert set(BANNED_CALLS) - found == set(), "an exception that nobody uses hides the next offence"


@pytest.mark.parametrize(
    "text",
    [
        "import pickle\npickle.loads(data)",
        "import pickle\npickle.dumps(data)",
        "from pickle import Unpickler as Reader\nReader(file)",
        "from pickle import dumps",
        "import pickle as p\nread = p.loads",
        "import _pickle",
        "import pickletools",
        "from multiprocessing.reduction import ForkingPickler\nForkingPickler.loads(data)",
        "from multiprocessing.reduction import ForkingPickler\nForkingPickler.dumps(data)",
        "import multiprocessing.reduction",
        "from multiprocessing import reduction",
        "from multiprocessing import connection",
        "import multiprocessing\nmultiprocessing.Queue()",
        "from multiprocessing import Pool\nPool(2)",
        "import multiprocessing as mp\nmp.get_context('spawn')",
        "import multiprocessing as mp\nours, theirs = mp.Pipe()",
        "from multiprocessing.connection import Client\nClient(address)",
        "from multiprocessing.managers import BaseManager",
        "import torch.multiprocessing as mp",
        "from ray import cloudpickle",
        "from concurrent.futures import ProcessPoolExecutor\nProcessPoolExecutor()",
        "import copyreg\ncopyreg.pickle(Thing, how)",
        "from dill import loads",
        "import shelve",
        "import marshal",
        "import pickle\nlist(map(pickle.loads, rows))",
        "import torch\ntorch.jit.load('x')",
        "import torch.hub\ntorch.hub.load('x', 'y')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import numpy as np\nnp.load('x', allow_pickle=flag)",
        "import numpy as np\nnp.load('x')",
        "load_file('x', weights_only=False)",
        "import yaml\nyaml.unsafe_load(text)",
        "import yaml\nyaml.full_load(text)",
        "import yaml\nreader = yaml.UnsafeLoader",
        "compile(text, 'x', 'exec')",
        "run = eval",
        "import builtins\nbuiltins.exec(text)",
        "getattr(builtins, 'eval')(text)",
        "getattr(os, 'system')(text)",
        "__import__(name)",
        "import importlib\nimportlib.import_module(row['module'])",
        "from importlib import import_module as get\nget(name)",
        "spec.loader.exec_module(module)",
        "import runpy\nrunpy.run_path(path)",
        "import os\nos.system('ls')",
        "from os import popen\npopen('ls')",
        "import subprocess\nsubprocess.getoutput('ls')",
        "import subprocess\nsubprocess.run('ls', **{'shell': True})",
        "archive.extractall(folder)",
        "frame.read_pickle('x')",
        "import tempfile\ntempfile.mktemp()",
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
        "import re\nre.compile('x')",
        "import torch\nfast = torch.compile(model)",
        "import importlib\nimportlib.import_module('reasoning_gym')",
        "import numpy as np\nnp.load('x', allow_pickle=False)",
        "from multiprocessing import shared_memory\nshared_memory.SharedMemory(name)",
        "from concurrent.futures import ThreadPoolExecutor\nThreadPoolExecutor()",
        "sock.send(data)",
        "getattr(config, 'loss_type')",
        "load(path, weights_only=True, trust_remote_code=False)",
        "import subprocess\nsubprocess.run(['ls'], shell=False)",
        "assert x > 0, 'x is a count'",
        "try:\n    f()\nexcept Exception as error:\n    raise StateError('a', 'b', 'c') from error",
        "try:\n    f()\nexcept Exception as error:\n    reasons.append(repr(error))",
        "try:\n    f()\nexcept KeyError:\n    pass",
    ],
)
def test_harmless_code_is_not_accused(text: str) -> None:
    assert list(findings(parse(text))) == []
