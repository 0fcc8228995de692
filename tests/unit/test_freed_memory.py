"""Freed memory is kept where the C library can be told so; libraries are no work for the search for cycles."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from surefoot.system import memory

PROBE = """
import resource, torch
from surefoot.system.memory import keep_freed_memory
{keep}
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(2**21) for _ in range(16)]  # 8 MiB each, all alive, then all freed
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_a_second_round_of_the_same_allocations_takes_fewer_fresh_pages() -> None:
    counts = {}
    for keep in ("", "assert keep_freed_memory()"):
        done = subprocess.run(
            [sys.executable, "-c", PROBE.format(keep=keep)], capture_output=True, text=True, check=True
        )
        counts[keep] = int(done.stdout)
    assert counts["assert keep_freed_memory()"] < 0.75 * counts[""], f"{counts}: without it every round pays again"


# -- the search for cycles ---------------------------------------------------------------------------------


@pytest.fixture(params=[True, False], ids=["on", "off"])
def searching(request: pytest.FixtureRequest) -> Iterator[bool]:
    (gc.enable if request.param else gc.disable)()
    yield request.param
    gc.enable()


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "a user's"])
def test_nothing_is_searched_while_libraries_are_imported_and_what_was_set_before_holds_again(
    ours: bool, searching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[bool] = []
    monkeypatch.setattr(memory, "_process_is_ours", ours)
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    seen: list[bool] = []

    def load() -> None:
        with memory.importing():
            seen.append(gc.isenabled())
            raise ImportError

    with pytest.raises(ImportError):
        load()
    assert seen == [False]
    assert gc.isenabled() == searching
    assert frozen == [True] * ours, "a process with a user's objects in it sets nothing aside"


WATCHED = """
import atexit, gc, json, sys
early = []
def watch(phase, info):
    if phase == "start" and info["generation"] == 2 and "torch" in sys.modules and not gc.get_freeze_count():
        early.append(1)
def tell():
    with open("told.json", "w") as file:
        json.dump({"early": len(early), "aside": gc.get_freeze_count(), "on": gc.isenabled()}, file)
gc.callbacks.append(watch)
atexit.register(tell)
"""
COMMAND = "sys.argv[1:] = %r\nfrom surefoot.__main__ import main\nmain()"
FROM_PYTHON = """
import surefoot
surefoot.train(
    model="pebble", tasks="builtin:sums", max_steps=1, threads=1, eval_on_start=False,
    preflight_tasks=0, tasks_per_step=2, num_generations=2, output_dir="run",
)
"""


def watched(cwd: Path, entry: str) -> dict[str, int]:
    """A short run in a process of its own; whole searches with torch in them, and how much is set aside at the end."""
    done = subprocess.run([sys.executable, "-c", WATCHED + entry], cwd=cwd, capture_output=True, text=True, check=False)
    assert (cwd / "run/checkpoints/step_1").is_dir(), done.stderr[-2000:]
    return dict(json.loads((cwd / "told.json").read_text()))


@pytest.mark.turns(5)
def test_the_command_never_searches_what_its_libraries_consist_of(tmp_path: Path) -> None:
    words = ["train", "max_steps=1", "threads=1", "eval_on_start=false", "preflight_tasks=0"]
    words += ["tasks_per_step=2", "num_generations=2", "output_dir=run"]
    told = watched(tmp_path, COMMAND % words)
    assert told["early"] == 0
    assert told["aside"] > 100_000
    assert told["on"], "what the run itself leaves behind is searched"


@pytest.mark.turns(5, 2)
def test_a_run_from_python_sets_none_of_its_callers_objects_aside(tmp_path: Path) -> None:
    told = watched(tmp_path, FROM_PYTHON)
    assert told["aside"] == 0
    assert told["on"]
