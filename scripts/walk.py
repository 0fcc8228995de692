"""How much of the building one step walks through: modules entered, functions called, records made.

    python scripts/walk.py [--json]      trains the built-in model for three steps, here, and looks at the second

A module is entered when one of its functions runs; a record is a dataclass or a named tuple of ours of which at least
one was made. Code that ran only in other processes (rewards) is not seen, nor is what ran only in step 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = str(ROOT / "src" / "surefoot") + os.sep
KEYS = "max_steps=3 tasks_per_step=4 eval_tasks=8 eval_steps=3 save_steps=0 num_tasks=400 preflight_tasks=0".split()


class Walk:
    """What was seen between `begin` and `end`."""

    def __init__(self) -> None:
        self.functions: Counter[str] = Counter()
        self.records: Counter[str] = Counter()

    def see(self, frame: FrameType, event: str, argument: Any) -> None:
        """A profile function: every call of a Python function comes here."""
        if event != "call":
            return
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE):
            module = code.co_filename.removeprefix(PACKAGE).removesuffix(".py").replace(os.sep, ".")
            self.functions[f"{module}:{code.co_qualname}"] += 1
        elif code.co_name in ("__init__", "__new__", "<lambda>") and code.co_filename.startswith("<"):
            made = frame.f_locals.get("self", frame.f_locals.get("_cls"))
            kind = made if isinstance(made, type) else type(made)
            if kind.__module__.startswith("surefoot."):
                self.records[kind.__qualname__] += 1

    def begin(self) -> None:
        """Look at every thread from here on."""
        threading.setprofile_all_threads(self.see) if hasattr(threading, "setprofile_all_threads") else None
        threading.setprofile(self.see)
        sys.setprofile(self.see)

    def end(self) -> None:
        """Look no more."""
        sys.setprofile(None)
        threading.setprofile(None)

    def told(self) -> dict[str, Any]:
        """Counts, and what was counted."""
        modules = sorted({name.partition(":")[0].removesuffix(".__init__") for name in self.functions})
        return {
            "modules": len(modules), "functions": len(self.functions), "records": len(self.records),
            "entered": modules, "made": dict(sorted(self.records.items())),
        }  # fmt: skip


def walk(folder: Path, keys: Sequence[str] = KEYS) -> dict[str, Any]:
    """Train three steps in this process and say what the second one walked through."""
    import io

    from surefoot import loop
    from surefoot.config.load import load_config
    from surefoot.report.view import PlainView
    from surefoot.run.session import train

    seen, real_batch, real_finish = Walk(), loop.next_batch, loop.finish_step

    def next_batch(run: Any, step: int) -> Any:
        if step == 2:
            seen.begin()
        return real_batch(run, step)

    def finish_step(run: Any) -> None:
        real_finish(run)
        if run.step == 2:
            seen.end()

    loop.next_batch, loop.finish_step = next_batch, finish_step
    try:
        train(load_config(None, [*keys, f"output_dir={folder / 'run'}"]), view=PlainView(3, io.StringIO()))
    finally:
        seen.end()
        loop.next_batch, loop.finish_step = real_batch, real_finish
    return seen.told()


def main(words: Sequence[str] | None = None) -> int:
    """Print the walk."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    asked = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        told = walk(Path(folder))
    if asked.json:
        print(json.dumps(told))
    else:
        print(f"one step: {told['modules']} modules, {told['functions']} functions, {told['records']} records")
        print("modules:", " ".join(told["entered"]))
        print("records:", " ".join(f"{name}({n})" for name, n in told["made"].items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
