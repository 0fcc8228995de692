"""Check cost: CPU time of one hostile expression, and of a plain one over a long series.

    python benchmarks/check_cost.py [--runs 5] [--fuzzed 10000]

The expressions are those of tests/faults/test_hostile_checks.py: known escapes, deep nesting, 10 MB of text, and fuzzed
ones. Each is read and judged `runs` times; its cost is the fastest of them, because the slower ones also hold what the
machine did meanwhile. Work is bounded by counts, which the tests assert; this says what the counts cost here.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from method import Journal
from report import Row, publish

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support")]
GOAL_S = 0.010
POINTS = 100_000
NOTE = (
    f"CPU time of this process to read and judge one expression over 22 points, fastest of the runs; the goal "
    f"({GOAL_S * 1000:.0f} ms) is for the slowest of all expressions. The long series has {POINTS} points."
)


def cost(metrics: object, expression: str, runs: int) -> float:
    """CPU seconds of one expression: refused, FAIL or PASS, all the same here."""
    from surefoot.errors import ConfigError
    from surefoot.harness.checks import run_checks

    best = float("inf")
    for _ in range(runs):
        started = time.process_time()
        with contextlib.suppress(ConfigError):
            run_checks(metrics, [expression])  # type: ignore[arg-type]
        best = min(best, time.process_time() - started)
    return best


def families(fuzzed: int) -> dict[str, Sequence[str]]:
    """The hostile expressions by kind."""
    from test_hostile_checks import ESCAPES, HUGE
    from test_hostile_checks import fuzzed as fuzz

    stream = random.Random(31337)
    deep = [text for name, text in HUGE.items() if not name.startswith("10")]
    large = [text for name, text in HUGE.items() if name.startswith("10")]
    heavy = [
        "max([data['x'][str(1 + 0 * s)] for s in range(150)]) < 0",
        "max([abs(abs(abs(s))) for s in range(2900)]) < 0",
        "max({k: v for k, v in data['x'].items() if " + " and ".join(["v > 0"] * 150) + "}) < 0",
        " + ".join(["percentile(data['x'], 50)"] * 80) + " < 0",
        "1" + "+1" * 490 + " < 0",
    ]
    return {
        "known escapes": ESCAPES,
        "deep or long": deep,
        "10^5 nested, 10 MB": large,
        "at the work limit": heavy,
        f"{fuzzed} fuzzed": [fuzz(stream) for _ in range(fuzzed)],
    }


def hostile_rows(runs: int, fuzzed: int, journal: Journal) -> list[Row]:
    """One row for each kind, by its slowest expression."""
    from test_hostile_checks import METRICS

    rows = []
    for name, expressions in families(fuzzed).items():
        costs = {text: cost(METRICS, text, runs) for text in expressions}
        worst = max(costs, key=lambda text: costs[text])
        journal.write("cost", {"family": name, "seconds": sorted(costs.values()), "worst": worst[:200]})
        words = f"{costs[worst] * 1e3:.2f} ms of {len(costs)}"
        rows.append(Row("check cost", name, words, goal="<= 10 ms", met=costs[worst] <= GOAL_S, note=NOTE))
    return rows


def plain_row(runs: int, journal: Journal) -> Row:
    """A usual check over a long series: no goal, but good to know."""
    from surefoot.harness.series import Metrics, Series

    metrics = Metrics({"x": Series("x", {step: 1.0 / step for step in range(1, POINTS + 1)})})
    seconds = cost(metrics, "mean(data['x'], -6, -1) < 1 and median(data['x']) < 1", runs)
    journal.write("cost", {"family": "plain", "seconds": [seconds]})
    return Row("check cost", f"plain, {POINTS} points", f"{seconds * 1e3:.1f} ms", note=NOTE)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="how often each expression is judged")
    parser.add_argument("--fuzzed", type=int, default=10_000, help="how many fuzzed expressions")
    parser.add_argument("--rows", type=Path, help="also append the table's rows to this file, as JSON lines")
    args = parser.parse_args()
    journal = Journal("check_cost", {"runs": args.runs, "fuzzed": args.fuzzed})
    rows = [*hostile_rows(args.runs, args.fuzzed, journal), plain_row(args.runs, journal)]
    return publish(rows, args.rows)


if __name__ == "__main__":
    sys.exit(main())
