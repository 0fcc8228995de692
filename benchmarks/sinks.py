"""Sinks: what `log` costs the training loop while the sink works, hangs, raises, or is dead.

    python benchmarks/sinks.py [--calls 10000]

The sink is a stand-in for W&B that does what its mode says, in a process of its own, as a real one would. The promise:
at most 1 % of a step. A step of the built-in run takes about 0.1 s, so the goal is 1 ms. Calls follow each other far
faster than any loop makes them; the worst one holds whatever else the machine was doing.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

from load import LoadProbe
from method import Journal
from report import Row, common_arguments, publish

from surefoot.tracking.sinks import Sinks

GOAL_S = 0.001
METRICS = {f"rewards/{i:02}/mean": i / 7 for i in range(60)}
MODES = {
    "works": "pass",
    "hangs": "threading.Event().wait()",
    "raises": "raise ConnectionError('refused')",
    "is dead": "os._exit(1)",
}
"""What the sink does with a row."""
STAND_IN = """
import os, threading
def init(**given): pass
def finish(): pass
def log(metrics, step): {body}
"""
NOTE = "time that one call of log() takes from the training loop, 60 metrics a row"


def timed(body: str, calls: int) -> tuple[list[float], dict[str, int]]:
    """Seconds of each call, and what became of the rows."""
    with tempfile.TemporaryDirectory(prefix="surefoot-bench-") as name:
        run = Path(name)
        (run / "logs").mkdir()
        (run / "wandb.py").write_text(STAND_IN.format(body=body))
        sys.path.insert(0, name)
        seconds = []
        with Sinks(["wandb"], run, "run", {}, warn=lambda *said: None) as sinks:
            for step in range(calls):
                began = time.perf_counter()
                sinks.log(step, METRICS)
                seconds.append(time.perf_counter() - began)
        sys.path.remove(name)
    facts = sinks.facts()["wandb"]
    return seconds, {fate: facts[fate] for fate in ("written", "dropped", "errors")}


def measure(name: str, calls: int, journal: Journal) -> Row:
    """One mode."""
    probe = LoadProbe()
    mark = probe.mark()
    seconds, fates = timed(MODES[name], calls)
    load = probe.since(mark)
    median, worst = statistics.median(seconds), max(seconds)
    journal.write("times", {"cell": name, "median": median, "worst": worst, "fates": fates, "load": load})
    busy = f", others used {load.share:.0%}" if load.dirty else ""
    rows = ", ".join(f"{count} {fate}" for fate, count in fates.items() if count)
    return Row(
        "sinks", f"log() while the sink {name}", f"{median * 1e6:.0f} us, worst {worst * 1e3:.1f} ms ({rows}){busy}",
        goal=f"<= {GOAL_S * 1e3:.0f} ms", met=median <= GOAL_S, note=NOTE,
    )  # fmt: skip


def main() -> int:
    """Every mode, one after the other."""
    parser = common_arguments(__doc__, pairs=0)
    parser.add_argument("--calls", type=int, default=10_000)
    args = parser.parse_args()
    journal = Journal("sinks", {"arguments": vars(args)})
    return publish([measure(name, args.calls, journal) for name in MODES], args.rows)


if __name__ == "__main__":
    sys.exit(main())
