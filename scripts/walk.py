"""How much of surefoot one training step goes through: modules entered, functions called, records made.

    python scripts/walk.py               a table for people
    python scripts/walk.py --json        one JSON object
    python scripts/walk.py --step 3      another step than the second

The built-in run (`pebble` on sums, one thread, two tasks a step) is trained in this process, and one step of it is
profiled: from `TaskQueue.next_batch` of that step to the end of its `TaskQueue.close_batch`. So collecting, grading,
checking, journaling, learning, publishing and logging are inside; start-up, evaluation, checkpoints and the steps
before it, in which everything lazy is imported and cached, are outside.

Counted is what the loop's own thread runs and what other threads do meanwhile: the engine's, graders', writers':

    modules     files of surefoot and surefoot_harness of which at least one function ran
    functions   distinct functions, methods, lambdas and nested functions of these files; a comprehension belongs to
                the function around it
    records     dataclasses and named tuples of surefoot of which at least one instance was made by its constructor

Not seen: reward workers, which are other processes; `WATCHERS`, threads that look on at their own pace whatever the
step does; records that are copied or unpickled without their constructor.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = str(ROOT / "src" / "surefoot") + os.sep
PACKAGES = (PACKAGE, str(ROOT / "harness" / "src" / "surefoot_harness") + os.sep)
KEYS = (
    "threads=1 tasks_per_step=2 num_generations=4 num_tasks=100 reward_workers=1 eval_tasks=4 eval_steps=0 "
    "eval_on_start=false preflight_tasks=0 save_steps=0 save_best=false"
).split()
PARTS_OF_FUNCTIONS = ("<module>", "<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")
GENERATED = "<string>"
"""The file name of constructors that `dataclass` and `NamedTuple` write."""


WATCHERS = frozenset({"surefoot-watchdog", "surefoot-stop", "status"})
"""Names of threads that look on."""


class Walk:
    """What was seen between `begin` and `end`."""

    def __init__(self) -> None:
        self.functions: Counter[str] = Counter()
        self.records: Counter[str] = Counter()
        self.looking = False

    def see(self, frame: FrameType, event: str, argument: Any) -> None:
        """A profile function: every call of a Python function comes here."""
        if event != "call" or not self.looking or threading.current_thread().name in WATCHERS:
            return
        code = frame.f_code
        if code.co_filename.startswith(PACKAGES) and code.co_name not in PARTS_OF_FUNCTIONS:
            file = code.co_filename.removeprefix(PACKAGES[0]).removeprefix(PACKAGES[1])
            self.functions[f"{file}:{code.co_qualname}"] += 1
        if code.co_name == "__init__" or (code.co_name == "<lambda>" and code.co_filename == GENERATED):
            made = frame.f_locals.get(code.co_varnames[0]) if code.co_varnames else None
            kind = made if isinstance(made, type) else type(made)
            if kind.__module__.startswith("surefoot.") and is_record(kind):
                self.records[kind.__qualname__] += 1

    def begin(self) -> None:
        """Count from here on, in this thread and in those that were started with this profile."""
        self.looking = True
        sys.setprofile(self.see)

    def end(self) -> None:
        """Count no more."""
        sys.setprofile(None)
        self.looking = False

    def summary(self) -> dict[str, Any]:
        """Counts, and what was counted."""
        modules = sorted({name.partition(":")[0] for name in self.functions})
        return {
            "modules": len(modules), "functions": len(self.functions), "records": len(self.records),
            "entered": modules, "made": dict(sorted(self.records.items())),
        }  # fmt: skip


def is_record(kind: type) -> bool:
    """Whether a class is a dataclass or a named tuple."""
    return dataclasses.is_dataclass(kind) or (issubclass(kind, tuple) and hasattr(kind, "_fields"))


def walk(
    folder: Path, steps: Sequence[int] = (2,), before: Callable[[int], None] = lambda step: None
) -> dict[int, dict[str, Any]]:
    """Train the built-in run in this process; what each of these steps went through.

    Args:
        folder: where the run folder is made.
        before: called before each of these steps, outside the profile; a test plants growth with it.
    """
    from surefoot.config.load import load_config
    from surefoot.report.view import PlainView
    from surefoot.run.session import train
    from surefoot.runtime.task_queue import StepSampler

    walks = {step: Walk() for step in steps}
    current = Walk()
    next_batch, close_batch = StepSampler.next_batch, StepSampler.close_batch

    def first(self: StepSampler, step: int, n: int) -> Any:
        if step in walks:
            before(step)
            current.functions, current.records = walks[step].functions, walks[step].records
            current.begin()
        return next_batch(self, step, n)

    def last(self: StepSampler, *rest: Any) -> None:
        close_batch(self, *rest)
        current.end()

    keys = [*KEYS, f"max_steps={max(steps) + 1}", f"output_dir={folder / 'run'}"]
    StepSampler.next_batch, StepSampler.close_batch = first, last  # type: ignore[method-assign]
    threading.setprofile(current.see)  # before the engine's thread is made
    try:
        train(load_config(None, keys), view=PlainView(max(steps) + 1, io.StringIO()))
    finally:
        current.end()
        threading.setprofile(None)  # type: ignore[arg-type]
        StepSampler.next_batch, StepSampler.close_batch = next_batch, close_batch  # type: ignore[method-assign]
    return {step: seen.summary() for step, seen in walks.items()}


def lines(step: int, seen: dict[str, Any]) -> list[str]:
    """The same as a table: packages with their modules, then the records with how many were made."""
    packages: dict[str, list[str]] = {}
    for name in seen["entered"]:
        package, _, module = name.rpartition("/")
        packages.setdefault(package or "(top level)", []).append(module.removesuffix(".py"))
    rows = [f"{package:<16} {len(modules):>3}  {' '.join(modules)}" for package, modules in sorted(packages.items())]
    made = [f"{name:<24} {count:>6}" for name, count in seen["made"].items()]
    title = f"step {step}: {seen['modules']} modules, {seen['functions']} functions, {seen['records']} records"
    return [title, "", *rows, "", *made]


def main(words: Sequence[str] | None = None) -> int:
    """Print the walk."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--step", type=int, default=2, metavar="N", help="which step is profiled (2)")
    asked = parser.parse_args(words)
    if asked.step < 2:
        parser.error(f"--step {asked.step}: step 1 imports and caches what no later step does; give 2 or more")
    with tempfile.TemporaryDirectory() as folder:
        seen = walk(Path(folder), [asked.step])[asked.step]
    print(json.dumps({"step": asked.step} | seen) if asked.json else "\n".join(lines(asked.step, seen)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
