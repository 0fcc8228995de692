"""Processes are started, watched and ended in one place: `system/process.py`. Eleven copies of it had grown before.

Scripts that run without our packages, in a bare interpreter, keep what they need; each of them says so in its docstring.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from repo_tree import PACKAGES, Source, parse, sources

STARTS_AND_ENDS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.killpg", "os.waitid", "os.posix_spawn"}
PROC = "/proc/"
ALONE = {
    "run/guardian.py": "watches the interpreter of a run from outside, with `python -I -S`",
    "runtime/ray/reaper.py": "outlives the driver, with `python -I -S`",
    "tools/mcp/supervisor.py": "stands between driver and tool server, with `python -I -S`",
    "tools/python/foreign_host.py": "runs in somebody else's Python",
    "sandbox/server.py": "gives birth to sandboxes: a few megabytes, with `python -S`",
}
"""Scripts that cannot import what we have installed."""
READS_PROC = {
    "system/process.py": "children twenty times a second; the start of a process in the kernel's ticks; which boot this is",
    "system/memory.py": "resident sizes twenty times a second; the data segment and the stack, which psutil does not know",
    "system/environment.py": "where the block of the environment lies in memory",
    "runtime/shared_weights.py": "who holds a lock on a file",
    "runtime/ray/actors.py": "every descriptor of this process, sockets too",
}


def findings(source: Source) -> Iterator[str]:
    where = place(source)
    for node in ast.walk(source.tree) if where not in ALONE else ():
        at = f"{source.name}:{getattr(node, 'lineno', 0)}"
        if where != "system/process.py":
            yield from (f"{at}: {name}: use Child of system/process.py" for name in names_of(node) & STARTS_AND_ENDS)
        if isinstance(node, ast.Constant) and where not in READS_PROC and reads_proc(node):
            yield f"{at}: {PROC}: ask system/process.py or psutil"


def place(source: Source) -> str:
    return source.name.removeprefix("src/surefoot/").removeprefix("harness/src/surefoot_harness/")


def names_of(node: ast.AST) -> set[str]:
    if isinstance(node, ast.ImportFrom):
        return {f"{node.module}.{each.name}" for each in node.names}
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return {f"{node.value.id}.{node.attr}"}
    return set()


def reads_proc(node: ast.Constant) -> bool:
    return isinstance(node.value, str) and node.value.startswith(PROC)


def test_nobody_but_the_supervisor_starts_or_ends_a_process_or_reads_the_process_table() -> None:
    found = [each for source in sources(*PACKAGES) for each in findings(source)]
    assert found == [], "\n".join(found)


def test_every_exception_is_still_needed() -> None:
    present = {place(source): source for source in sources(*PACKAGES)}
    assert set(ALONE) <= set(present)
    for name in READS_PROC:
        constants = [node for node in ast.walk(present[name].tree) if isinstance(node, ast.Constant)]
        assert any(map(reads_proc, constants)), f"{name} reads no {PROC} any more"


def test_planted_copies_of_the_supervisor_are_seen() -> None:
    for planted in (
        "import subprocess\nchild = subprocess.Popen(['true'])",
        "from subprocess import Popen\nPopen(['true'])",
        "import os\nos.killpg(1, 9)",
        "import os\nif os.fork() == 0: pass",
        "def f(pid): return open(f'/proc/{pid}/stat')",
    ):
        assert len(list(findings(parse(planted)))) == 1, planted
