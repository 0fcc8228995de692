"""Does it learn, every time, in time: the built-in run through the real command, five seeds.

    python benchmarks/learning.py [--seeds 0,1,2,3,4]

For each seed `surefoot train` runs in a fresh process and is judged by what it left behind: `metrics.jsonl` and
`verdict.json`. Held-out accuracy must reach 0.85 within 120 s of training on two cores; training time is the whole
loop, evaluations included, without loading. The first seed runs twice: every metric must come out bit for bit the same,
times and rates aside.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from load import Load, LoadProbe
from method import Journal
from report import Row, common_arguments, publish

from surefoot.tracking.metrics import lookup, read_metrics

GOAL_ACCURACY, GOAL_SECONDS = 0.85, 120.0
TIMES_AND_RATES = ("s", "tokens/s")
"""Units of what may differ between two equal runs."""
NOTE = (
    "the built-in run through `surefoot train`; seconds are the whole training loop with its evaluations; "
    f"goal: held-out accuracy >= {GOAL_ACCURACY} within {GOAL_SECONDS:.0f} s, every seed."
)


@dataclass(frozen=True)
class Outcome:
    """What one run left behind."""

    seed: int
    status: str
    start: float
    """Held-out accuracy before step 1."""
    final: float
    seconds: float
    reached_s: float | None
    """Seconds of training steps until an evaluation first showed the goal; None when none did."""
    steps: int
    load: Load
    rows: Sequence[dict[str, float]]

    @property
    def met(self) -> bool:
        """Learned, and in time."""
        return self.status == "PASS" and self.final >= GOAL_ACCURACY and self.seconds <= GOAL_SECONDS


def train(seed: int, folder: Path, words: Sequence[str]) -> Outcome:
    """One run through the real command."""
    argv = [sys.executable, "-m", "surefoot", "train", f"seed={seed}", f"output_dir={folder}", *words]
    probe = LoadProbe()
    mark = probe.mark()
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    load = probe.since(mark)
    if done.returncode not in (0, 1):  # 1 is a verdict too: it learned too little
        raise RuntimeError(f"seed {seed} ended with {done.returncode}:\n{done.stdout}{done.stderr}"[-3000:])
    return read_outcome(seed, folder, load)


def read_outcome(seed: int, folder: Path, load: Load) -> Outcome:
    """From the run folder alone."""
    rows = read_metrics(folder / "metrics.jsonl")
    verdict = json.loads((folder / "verdict.json").read_text())
    evaluated = [row for row in rows if "eval_accuracy" in row]
    if not evaluated:
        raise RuntimeError(f"seed {seed}: no evaluation in {folder}")
    return Outcome(
        seed, verdict["status"], evaluated[0]["eval_accuracy"], evaluated[-1]["eval_accuracy"], verdict["seconds"],
        time_to_goal(rows), verdict["executed_steps"], load, rows,
    )  # fmt: skip


def time_to_goal(rows: Sequence[dict[str, float]]) -> float | None:
    """Seconds of steps and evaluations until the goal was first seen."""
    seconds = 0.0
    for row in rows:
        seconds += row.get("step_time", 0.0) + row.get("timing/eval", 0.0)
        if row.get("eval_accuracy", -math.inf) >= GOAL_ACCURACY:
            return seconds
    return None


def differences(a: Sequence[dict[str, float]], b: Sequence[dict[str, float]]) -> list[str]:
    """Names of metrics that are not bit-equal in every row; times and rates are not asked."""
    if len(a) != len(b):
        return [f"{len(a)} rows against {len(b)}"]
    found: dict[str, None] = {}
    for left, right in zip(a, b, strict=True):
        for name in sorted({*left, *right}):
            if not _is_time_or_rate(name) and left.get(name) != right.get(name):
                found.setdefault(f"{name} at step {left['step']:g}")
    return list(found)


def _is_time_or_rate(name: str) -> bool:
    metric = lookup(name)
    return metric is not None and metric.unit in TIMES_AND_RATES


def row_of(outcome: Outcome) -> Row:
    """One seed's line."""
    reached = "never" if outcome.reached_s is None else f"after {outcome.reached_s:.0f} s"
    busy = f", others used {outcome.load.share:.0%}" if outcome.load.dirty else ""
    gain = f"{outcome.start:.3f} -> {outcome.final:.3f}"
    return Row(
        "learning", f"seed {outcome.seed}", f"{gain} in {outcome.seconds:.0f} s{busy}",
        goal=f">= {GOAL_ACCURACY}, {GOAL_SECONDS:.0f} s", met=outcome.met,
        limit=f"{outcome.steps} steps; {GOAL_ACCURACY} {reached}", note=NOTE,
    )  # fmt: skip


def twin_row(first: Outcome, second: Outcome) -> Row:
    """Two runs of one seed, compared number by number."""
    apart = differences(first.rows, second.rows)
    compared = sum(not _is_time_or_rate(name) for row in first.rows for name in row)
    said = f"{compared} numbers equal" if not apart else f"differ: {', '.join(apart[:3])}"
    return Row("learning", f"seed {first.seed} twice", said, goal="bit-equal", met=not apart, note=NOTE)


def main() -> int:
    """Every seed, the twin, then the table."""
    parser = common_arguments(__doc__, pairs=1)
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("words", nargs="*", help="overrides for a smoke test, such as max_steps=2")
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    words = [f"threads={args.threads}", *args.words]
    journal = Journal("learning", {"arguments": vars(args)})
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="surefoot-bench-") as scratch:
        for i, seed in enumerate([*seeds, seeds[0]]):
            outcomes.append(train(seed, Path(scratch) / f"run_{i}", words))
            journal.write("outcome", vars(outcomes[-1]))
            print(*row_of(outcomes[-1]).cells(), sep="  ", flush=True)
    rows = [row_of(outcome) for outcome in outcomes[:-1]]
    return publish([*rows, twin_row(outcomes[0], outcomes[-1])], args.rows)


if __name__ == "__main__":
    sys.exit(main())
