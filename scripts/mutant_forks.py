"""A warm process that runs tests in forks: most of what one mutant costs is otherwise importing torch, again.

    python scripts/mutant_forks.py            reads requests from standard input, one JSON object a line

The request `{"words": [...], "out": FILE}` is `pytest WORDS...` in a fork, with its output in FILE; the answers are
`{"pid": N}`, at once, and `{"code": N}` at its end. Loaded before the fork is what importing our own commands loads of
other people's packages, and nothing of ours: the fork imports that from the tree as it is then, with the mutant in it.

Never      forks with a second thread alive: what such a thread holds, the fork would wait for.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

OURS = ("surefoot", "surefoot_harness", "surefoot_affected")
LISTED = """
import sys
for name in ("surefoot.cli", "surefoot.run.session", "surefoot.run.build", "surefoot.learner.model"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        pass
print("\\n".join(name for name, module in sys.modules.items() if getattr(module, "__file__", None)))
"""


def warm_up() -> None:
    """Import what our commands import of others, found out by asking an interpreter that imports them."""
    found = subprocess.run([sys.executable, "-c", LISTED], capture_output=True, text=True, check=True).stdout.split()
    for name in [*found, "pytest", "hypothesis"]:
        if name.partition(".")[0] not in OURS and not name.startswith(("__", "sitecustomize")):
            try:
                importlib.import_module(name)
            except ImportError:
                continue  # a private part that only its own package can load; the fork imports it when it needs it
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    gc.collect()
    gc.freeze()


def threads() -> int:
    """How many threads this process has."""
    return len(os.listdir("/proc/self/task"))


def run_tests(words: list[str], out: str) -> None:
    """The fork: a session of its own, its own streams, and then it is pytest."""
    os.setsid()
    target = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, place in ((0, nothing), (1, target), (2, target)):
        os.dup2(place, number)
    sys.argv = ["pytest", *words]
    import pytest

    code = 3
    try:
        code = int(pytest.main(words))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    """One request after the other, until standard input closes."""
    warm_up()
    assert threads() == 1, f"a fork of {threads()} threads could wait for ever"
    print(json.dumps({"ready": len(sys.modules)}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run_tests(asked["words"], asked["out"])
        print(json.dumps({"pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    sys.path[:] = [place for place in sys.path if Path(place or ".").resolve() != Path(__file__).resolve().parent]
    serve()
