"""`run` and `runtime` ask protocols: no `cast`, and no switch on the concrete class of a part.

A look at data (text or list, which record, which exception) is no switch. What a user brings is looked at by its
attributes, since it has no protocol of ours. Everything else that is still there is counted, and may only become less.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import surefoot

SOURCE = Path(surefoot.__file__).parent
DATA = frozenset(
    "str int float bool list tuple dict bytes type None Mapping Sequence Iterable Path BaseException Exception dtype "
    "Pending Lease Dropped BadCall ComponentReward FromFile".split()
)
"""Builtin and abstract kinds of data, and records of ours that are one of several."""
OF_USERS = frozenset({"run/arguments.py", "run/api.py", "run/evaluate.py", "run/stepping.py"})
"""Where objects that a user hands over are looked at: rows, functions, models, tokenizers, callbacks."""
LEFT = {
    ("run/model.py", "isinstance StreamingDataset"): 2,
    ("run/task_plan.py", "isinstance StreamingDataset"): 4,
    ("run/inputs.py", "isinstance StreamingDataset"): 1,
    ("run/tasks.py", "isinstance HeldoutSplit"): 1,
    ("run/build.py", "getattr fingerprint"): 1,
    ("run/inputs.py", "getattr __name__"): 1,
    ("runtime/ray/runtime.py", "isinstance RemoteWeights"): 1,
    ("runtime/ray/transport.py", "hasattr for_engine"): 1,
    ("runtime/ray/cluster.py", "getattr resolve_ip_for_localhost"): 1,
    ("runtime/shared_weights.py", "getattr MAP_POPULATE"): 1,
    ("runtime/specs.py", "getattr __module__"): 1,
}
"""(file, what) -> how often; a streamed file of tasks and a list of them are two classes, and so on."""


def switches(source: str) -> Iterator[str]:
    """Every `cast`, and every `isinstance`, `hasattr` and `getattr` that is no look at data, in words."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id == "cast":
            yield "cast"
        elif node.func.id == "isinstance":
            yield from (f"isinstance {name}" for name in named(node.args[1]) if not is_data(name))
        elif node.func.id in ("getattr", "hasattr") and isinstance(node.args[1], ast.Constant):
            yield f"{node.func.id} {node.args[1].value}"


def named(kinds: ast.expr) -> list[str]:
    """The last part of each name: `int | torch.dtype` is int and dtype."""
    if isinstance(kinds, ast.BinOp):
        return [*named(kinds.left), *named(kinds.right)]
    if isinstance(kinds, ast.Tuple):
        return [name for each in kinds.elts for name in named(each)]
    return [ast.unparse(kinds).rpartition(".")[2]]


def is_data(name: str) -> bool:
    return name in DATA or name.endswith("Error") or name == "kind"


def found() -> Counter[tuple[str, str]]:
    files = [path for part in ("run", "runtime") for path in sorted((SOURCE / part).rglob("*.py"))]
    assert len(files) > 30, "the folders have moved"
    count: Counter[tuple[str, str]] = Counter()
    for path in files:
        name = path.relative_to(SOURCE).as_posix()
        if name not in OF_USERS:
            count.update((name, what) for what in switches(path.read_text(encoding="utf-8")))
    return count


def test_run_and_runtime_do_not_ask_which_class_a_part_is() -> None:
    assert dict(found()) == LEFT, "use a member of the protocol instead"


def test_planted_switches_are_seen_and_looks_at_data_are_not() -> None:
    planted = """
engine = cast(ServingEngine, engine)
if isinstance(runtime, RayRuntime) or isinstance(queue, (DurableTaskQueue, str)) or hasattr(engine, "submit"):
    seconds = getattr(engine, "pack_seconds", 0.0)
if isinstance(value, int | float) or isinstance(error, SurefootError) or getattr(handle, method):
    pass
"""
    assert sorted(switches(planted)) == [
        "cast",
        "getattr pack_seconds",
        "hasattr submit",
        "isinstance DurableTaskQueue",
        "isinstance RayRuntime",
    ]
