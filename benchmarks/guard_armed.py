"""How many held-out tasks arm the guard, by evaluations and first value, and how often its "auto" settings are wrong.

    python benchmarks/guard_armed.py [--runs 1000] [--quick]

The same simulation that decides in a run (`surefoot.guards.arming`), over a grid. Exit status 1 if the settings that
"auto" gives for some number of evaluations stop more than 1 % of level runs of an accuracy.
"""

from __future__ import annotations

import argparse
import sys

from surefoot.config import Config
from surefoot.guards.arming import LEAST_SEEN, MOST_FALSE, RUNS, ArmingInputs, Question, falls_stopped, false_alarms

EVALUATIONS = (5, 6, 7, 8, 9, 10, 12, 13, 14, 16, 18, 21, 26, 30, 31, 45, 60)
QUICK = (6, 9, 13, 21)
TASKS = (5, 6, 8, 10, 12, 15, 18, 20, 25, 30, 35, 40, 45, 50, 60, 70, 80, 100, 125, 150, 200, 300, 400)
FIRST = (0.1, 0.2, 0.25, 0.3, 0.5, 0.8)
LEVELS, ANSWERS = (0.05, 0.1, 0.25, 0.5, 0.8, 0.95), (10, 20, 60, 200)


def question(evaluations: int, tasks: int, first: float) -> Question:
    """A run with an evaluation after each step but the first."""
    config = Config(model="m", tasks="t", max_steps=evaluations - 1, eval_steps=1, eval_tasks=tasks, tasks_per_step=8)
    return ArmingInputs("eval_accuracy", first).question(config, tasks)


def worst_alarms(evaluations: int, runs: int) -> tuple[float, float, int]:
    """The highest share of level runs that are stopped, the level, and the answers per evaluation."""
    return max((false_alarms(question(evaluations, n, p), runs), p, n) for p in LEVELS for n in ANSWERS)


def tasks_needed(evaluations: int, first: float, runs: int) -> int | None:
    """The first number of the grid with which enough falls are stopped."""
    for tasks in TASKS:
        if falls_stopped(question(evaluations, tasks, first), runs, LEAST_SEEN) >= LEAST_SEEN:
            return tasks
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=RUNS, help="simulated runs for each cell")
    parser.add_argument("--quick", action="store_true", help="four numbers of evaluations only")
    args = parser.parse_args()
    status = 0
    print("| evaluations | " + " | ".join(f"{p:g}" for p in FIRST) + " | false alarms at worst |")
    print("|" + "---|" * (len(FIRST) + 2))
    for evaluations in QUICK if args.quick else EVALUATIONS:
        share, level, answers = worst_alarms(evaluations, args.runs)
        cells = [str(tasks_needed(evaluations, p, args.runs) or "none") for p in FIRST]
        print(
            f"| {evaluations} | {' | '.join(cells)} | {100 * share:.1f} % (at {level:g}, {answers} answers) |",
            flush=True,
        )
        status |= share > MOST_FALSE
    return status


if __name__ == "__main__":
    sys.exit(main())
