"""Start-up of the pytest plugin: what every session pays for having it loaded.

    python benchmarks/plugin_startup.py [--pairs 15]

Two fresh pytest processes in an empty project, one with `-p surefoot.harness.plugin`, one without, one right after
the other, in alternating order. The number is the median of the differences, with its interval. Other plugins are
not loaded, so that their start-up does not hide ours. CPU time is measured beside wall time: a busy machine
stretches the latter.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from method import Journal, Pair, Sample, alternate, dirt, usable
from report import Row, common_arguments, publish

LIMIT_S, ENOUGH = 0.050, 9
SOURCE = Path(__file__).parents[1] / "src"
NOTE = (
    "median and 95 % interval of the differences of alternating pairs of fresh processes in an empty project; "
    "exit 5, nothing written"
)


def session(name: str, words: list[str], folder: Path) -> Sample:
    """One pytest process that finds no test, which is exit 5, and must leave the folder empty."""
    path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 5 or any(folder.iterdir()):
        raise RuntimeError(
            f"pytest ended with {done.returncode}, not 5, or left files: {done.stdout}{done.stderr}"[-2000:]
        )
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Sample(name, seconds, {"tests": 0}, {"cpu_seconds": cpu})


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Median with its 95 % interval, by order statistics: no assumption about the noise."""
    ordered, count = sorted(values), len(values)
    below = max(0, int(count / 2 - 0.98 * count**0.5))
    return ordered[below], statistics.median(ordered), ordered[count - 1 - below]


def judged(pairs: Sequence[Pair], *, allow_dirty: bool) -> Row:
    """The row; the goal is reached when the upper end of the interval is below the limit, on pairs that count."""
    used, goal = usable(pairs, allow_dirty=allow_dirty), f"< {LIMIT_S * 1000:.0f} ms"
    if len(used) < ENOUGH:
        said = f"not measured: {len(used)} of {len(pairs)} pairs are clean, {ENOUGH} are needed"
        return Row("start-up", "pytest plugin", said, goal=goal, met=False, note=NOTE)
    wall = interval([pair.ours.seconds - pair.peer.seconds for pair in used])
    cpu = interval([pair.ours.facts["cpu_seconds"] - pair.peer.facts["cpu_seconds"] for pair in used])
    bare = statistics.median(pair.peer.seconds for pair in used)
    return Row(
        "start-up", "pytest plugin", f"{_ms(wall)} wall, {_ms(cpu)} CPU", peer=f"pytest alone {bare * 1000:.0f} ms",
        ratio=dirt(pairs, allow_dirty=allow_dirty).strip() or "-", goal=goal, met=wall[2] < LIMIT_S, note=NOTE,
    )  # fmt: skip


def _ms(found: tuple[float, float, float]) -> str:
    low, middle, high = (value * 1000 for value in found)
    return f"{middle:.0f} ms ({low:.0f} to {high:.0f})"


def main() -> int:
    """Alternate, subtract, compare with the limit."""
    parser = common_arguments(__doc__, pairs=15)
    args = parser.parse_args()
    journal = Journal("plugin_startup", {"arguments": vars(args)})
    with tempfile.TemporaryDirectory(prefix="surefoot-bench-") as name:
        folder, plugin = Path(name), ["-p", "surefoot.harness.plugin"]
        for words in (plugin, []):  # warm-up: byte code, disk cache
            session("warm-up", words, folder)
        pairs = alternate(
            lambda: session("with", plugin, folder), lambda: session("without", [], folder), pairs=args.pairs or 15,
            redo=0 if args.allow_dirty else None, record=journal.pair("plugin"),
        )  # fmt: skip
    row = judged(pairs, allow_dirty=args.allow_dirty)
    return publish([row], args.rows)


if __name__ == "__main__":
    sys.exit(main())
