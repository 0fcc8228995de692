"""Near-duplicates: CPU time of the comparison that every run makes of its two sides before it starts.

    python benchmarks/near_duplicates.py [--sizes 1000,10000,100000] [--runs 3]

Tasks of 35 words over 5,000 words, a tenth of them held out, every fiftieth training task nearly a held-out one; with
and without a target, in memory and in a file on the disk, first start and second. The cost is the fastest of the runs.
The share of planted twins that was found has to be everything.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from method import Journal
from report import Row, publish

from surefoot.data.heldout import Twins, is_heldout, keep_apart, split_heldout
from surefoot.data.on_disk.dataset import StreamingDataset
from surefoot.data.on_disk.stream import keep_apart_on_disk
from surefoot.records import Task

GOAL_TASKS, GOAL_S = 10_000, 2.0
EVALUATED = 200
NOTE = (
    "CPU time of one process to compare all training tasks with the held-out ones (on the disk: with the 200 that are "
    "evaluated), fastest of the runs; 35 words a task, every fiftieth training task a planted twin, all of them found."
)


def rows(count: int, *, target: bool) -> list[dict[str, Any]]:
    """Prose; every fiftieth training task repeats a held-out one with a word more."""
    dice = random.Random(0)
    words = ["".join(dice.choices("abcdefghijklmnopqrstuvwxyz", k=3 + i % 7)) for i in range(5000)]
    made: list[dict[str, Any]] = []
    held: list[dict[str, Any]] = []
    for i in range(count):
        row: dict[str, Any] = {"id": str(i), "prompt": " ".join(dice.choices(words, k=35))}
        row |= {"answer": words[i % 5000]} if target else {}
        if is_heldout(row["id"], 0.1):
            held.append(row)
        elif i % 50 == 0 and held:
            row |= held[-1] | {"id": row["id"], "prompt": held[-1]["prompt"] + " indeed"}
        made.append(row)
    return made


def fastest(runs: int, once: Callable[[], Twins]) -> tuple[float, Twins]:
    """CPU seconds, and what was found."""
    costs = []
    for _ in range(runs):
        started = time.process_time()
        found = once()
        costs.append(time.process_time() - started)
    return min(costs), found


def measure(count: int, runs: int, journal: Journal, *, target: bool) -> list[Row]:
    """In memory, on the disk, and on the disk once more."""
    made, kind = rows(count, target=target), f"{count:,} tasks, {'with' if target else 'no'} target"
    tasks = [Task(id=r["id"], prompt=r["prompt"], columns={k: r[k] for k in ("answer",) if k in r}) for r in made]
    train, heldout = split_heldout(tasks, 0.1)
    planted = sum(task.prompt.endswith(" indeed") for task in train)
    seconds, found = fastest(runs, lambda: keep_apart(train, heldout, "drop")[1])
    assert len(found.found) == planted, f"{len(found.found)} of {planted} twins were found"
    met = seconds <= GOAL_S if count == GOAL_TASKS else None
    out = [_row(kind, seconds, f"<= {GOAL_S:g} s" if met is not None else "-", met)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tasks.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in made))
        data = StreamingDataset(path)
        sides = data.sides(0.1)
        few = sides[1].smallest(EVALUATED)
        first, _ = fastest(1, lambda: keep_apart_on_disk(data, *sides, few, "drop")[1])
        second, again = fastest(runs, lambda: keep_apart_on_disk(data, *sides, few, "drop")[1])
    assert again.known, "the second start remembers"
    journal.write("cost", {"cell": kind, "memory": seconds, "disk": first, "disk again": second})
    return [*out, _row(f"{kind}, on the disk", first), _row(f"{kind}, on the disk again", second)]


def _row(cell: str, seconds: float, goal: str = "-", met: bool | None = None) -> Row:
    return Row("near-duplicates", cell, f"{seconds:.2f} s", goal=goal, met=met, note=NOTE)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1000,10000,100000", help="numbers of tasks")
    parser.add_argument("--runs", type=int, default=3, help="how often each comparison is made")
    parser.add_argument("--rows", type=Path, help="also append the table's rows to this file, as JSON lines")
    args = parser.parse_args()
    sizes = [int(size) for size in args.sizes.split(",")]
    journal = Journal("near_duplicates", {"sizes": sizes, "runs": args.runs})
    cells = [measure(size, args.runs, journal, target=target) for size in sizes for target in (True, False)]
    return publish([row for cell in cells for row in cell], args.rows)


if __name__ == "__main__":
    sys.exit(main())
