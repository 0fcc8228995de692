"""Overlap under tool latency: how much of generating, learning and waiting for tools happens at the same time?

    python benchmarks/overlap.py [--quick] [--steps 10] [--pairs 7]

Stream, books, ledger and journal are the product's own, in real time; what they drive only takes time: a generator that
is busy 100 ms per batch, a learner that is busy 100 ms per batch, and a tool that each group waits for, for 0, 50 or
500 ms. Devices that are elsewhere look like this from the driver. The peer is our own synchronous mode: all groups of a
step are asked for at once and waited for, then learned from.

Ideal is the largest of what one device has to do per step, and of what the age limit allows: a batch is under way for
generator, tool and learner together, and 1 + max_staleness batches may be under way at once.

The last row is the built-in model through the real command, on this machine's own cores: there is no second device to
fill, so no gain is expected.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from method import Journal, Sample, alternate, compare, dirt, medians
from report import Row, common_arguments, publish
from stream_kit import Crew, Trained, ahead, config_of, in_turns

BATCH, SLOTS = 8, 4
GENERATE = LEARN = 0.2
"""Seconds per batch."""
TOOLS, STALENESS = (0.0, 0.05, 0.5), (0, 1, 2)
GOAL = 0.95
ROOT = Path(__file__).parents[1]
NOTE = (
    f"real time, real stream, ledger, journal and fsync; {BATCH} groups per step on {SLOTS} generators, {GENERATE:g} s "
    f"of generating and {LEARN:g} s of learning per step, each on a device elsewhere (it sleeps). Ours: seconds per "
    "step, and the ideal over it: the largest of generating, learning, and (generating + tool + learning) / "
    "(1 + max_staleness), for that many batches may be under way from being asked for to their update. The first and "
    "the last step, which have nothing to overlap with, are left out on both sides. With max_staleness = 0 nothing "
    "overlaps."
)


def ideal(tool: float, staleness: int) -> float:
    """Seconds per step, if everything that may overlap does."""
    return max(GENERATE, LEARN, (GENERATE + tool + LEARN) / (1 + staleness))


async def learn() -> None:
    """The learner's time."""
    await asyncio.sleep(LEARN)


def side(name: str, steps: int, tool: float, staleness: int) -> Callable[[], Sample]:
    """One run of one side; its time is that of the steps in the middle."""
    story: Callable[..., Coroutine[Any, Any, Trained]] = ahead if name == "ours" else in_turns
    config = config_of(tasks=BATCH, steps=steps, staleness=staleness if name == "ours" else 0)

    def run() -> Sample:
        async def begin() -> Trained:
            crew = Crew(SLOTS, [GENERATE * SLOTS / BATCH] * (BATCH * steps), tool=tool)
            return await story(Path(folder), config, crew, learn)

        with tempfile.TemporaryDirectory() as folder:
            done = asyncio.run(begin())
        middle = done.at[-2] - done.at[0]
        return Sample(name, middle, {"groups": len(done.positions), "steps": steps}, {"wasted": done.wasted})

    return run


def cell(tool: float, staleness: int, steps: int, pairs: int, journal: Journal, *, allow_dirty: bool) -> Row:
    """One latency and one staleness."""
    name = f"tool {1000 * tool:.0f} ms, max_staleness = {staleness}"
    found = alternate(
        side("ours", steps, tool, staleness), side("in turns", steps, tool, staleness), pairs=pairs,
        redo=0 if allow_dirty else None, record=journal.pair(name),
    )  # fmt: skip
    ours, peer = (seconds / (steps - 2) for seconds in medians(found, allow_dirty=allow_dirty))
    best = ideal(tool, staleness)
    print(f"{name}: {ours:.3f} s per step, in turns {peer:.3f}, ideal {best:.3f}", flush=True)
    return Row(
        "overlap", name, f"{ours:.3f} s, {best / ours:.0%} of ideal", f"{peer:.3f} s",
        f"{compare(found, allow_dirty=allow_dirty)}{dirt(found, allow_dirty=allow_dirty)}",
        f">= {GOAL:.0%} of ideal", best / ours >= GOAL, f"{best:.3f} s, {peer / best:.2f}x", NOTE,
    )  # fmt: skip


def built_in(steps: int, pairs: int, journal: Journal, *, allow_dirty: bool) -> Row:
    """The built-in model through the real command."""

    def run(name: str, words: list[str]) -> Callable[[], Sample]:
        def go() -> Sample:
            with tempfile.TemporaryDirectory() as folder:
                argv = [sys.executable, "-m", "surefoot", "train", f"max_steps={steps}", "eval_on_start=false", *words]
                argv.append(f"output_dir={folder}/run")
                done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT)
                if done.returncode not in (0, 1):
                    raise RuntimeError(f"{name} ended with {done.returncode}: {done.stderr[-2000:]}")
                lines = [json.loads(line) for line in (Path(folder) / "run/metrics.jsonl").read_text().splitlines()]
            middle = [row["step_time"] for row in lines if "loss" in row][1:-1]
            return Sample(name, sum(middle), {"steps": steps}, {"median step": statistics.median(middle)})

        return go

    more = ["max_staleness=1", "importance_sampling_correction=true"]
    found = alternate(
        run("ours", more), run("in turns", ["importance_sampling_correction=true"]), pairs=pairs,
        redo=0 if allow_dirty else None, record=journal.pair("built-in"),
    )  # fmt: skip
    ours, peer = (seconds / (steps - 2) for seconds in medians(found, allow_dirty=allow_dirty))
    return Row(
        "overlap", "built-in model, this machine's cores, max_staleness = 1", f"{ours:.3f} s", f"{peer:.3f} s",
        f"{compare(found, allow_dirty=allow_dirty)}{dirt(found, allow_dirty=allow_dirty)}", limit="about 1: one device",
        note=NOTE,
    )  # fmt: skip


def main() -> int:
    """Measure and print."""
    parser = common_arguments(__doc__, pairs=7)
    parser.add_argument("--steps", type=int, default=10, help="steps of every run")
    parser.add_argument("--built-in-steps", type=int, default=20, help="steps of the real run; 0 leaves it out")
    parser.add_argument("--tools", default=",".join(f"{1000 * t:.0f}" for t in TOOLS), help="milliseconds of a tool")
    parser.add_argument("--quick", action="store_true", help="does it run? one pair, few steps")
    args = parser.parse_args()
    pairs, steps = (1, 5) if args.quick else (args.pairs or 7, args.steps)
    built = 0 if args.quick else args.built_in_steps
    dirty, tools = args.allow_dirty or args.quick, [float(one) / 1000 for one in args.tools.split(",")]
    journal = Journal("overlap", {"pairs": pairs, "steps": steps, "batch": BATCH, "generate": GENERATE, "learn": LEARN})
    rows = [cell(t, s, steps, pairs, journal, allow_dirty=dirty) for t in tools for s in STALENESS]
    if built:
        rows.append(built_in(built, min(pairs, 5), journal, allow_dirty=dirty))
    return publish(rows, args.rows)


if __name__ == "__main__":
    raise SystemExit(main())
