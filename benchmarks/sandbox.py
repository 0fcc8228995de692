"""The sandbox: what containment adds to the start of a program, and what grading a piece of code costs.

    python benchmarks/sandbox.py [--pairs 40]

The same command once in the sandbox and once as a plain child process, one right after the other, in alternating order,
both from a process that holds a gigabyte, as a trainer does. The number is the median of the differences, with its
interval. The limit is what the kernel alone takes: a process that is cloned into the same seven namespaces and leaves.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from method import Journal, Pair, Sample, alternate, dirt, usable
from plugin_startup import interval
from report import Row, common_arguments, publish

from surefoot.sandbox import host, walls
from surefoot.sandbox.code_tests import grade_code
from surefoot.sandbox.sandbox import Sandbox, available

LIMIT_S, ENOUGH = 0.015, 9
BALLAST = 2**30
NOTE = (
    "median and 95 % interval of the differences of alternating pairs; same command, same output; the parent holds "
    "1 GiB. The limit is a clone into the same namespaces that exits at once, waited for"
)
COMMANDS = {
    "a small program": ["/bin/echo", "42"],
    "Python": [host.python(), "-S", "-c", "print(42)"],
}


def timed(side: str, function: Callable[[], tuple[int | None, str]]) -> Sample:
    """One run; exit code and output prove that it did its work."""
    started = time.perf_counter()
    code, stdout = function()
    return Sample(side, time.perf_counter() - started, {"exit": code, "stdout": stdout})


def contained(sandbox: Sandbox, argv: Sequence[str]) -> tuple[int | None, str]:
    outcome = sandbox.run(argv)
    return outcome.exit_code, outcome.stdout


def plain(argv: Sequence[str]) -> tuple[int | None, str]:
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


def kernel_alone(times: int = 20) -> float:
    """Seconds of a clone into the namespaces, from a small process of its own, without anything inside."""
    program = (
        "import os, sys, time\nfrom surefoot.sandbox import walls as k\nfound = []\n"
        f"for _ in range({times}):\n"
        "    started = time.perf_counter()\n    pid = k.clone(sum(k.NEW_NAMESPACES.values()) | k.NEW_CGROUP)\n"
        "    if pid == 0:\n        os._exit(0)\n    os.waitpid(pid, 0)\n"
        "    found.append(time.perf_counter() - started)\n"
        "print(sorted(found)[len(found) // 2])"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(walls.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout)


def judged(cell: str, pairs: Sequence[Pair], limit_s: float, *, allow_dirty: bool) -> Row:
    """The row; the goal is reached when the median is, on pairs that count."""
    used, goal = usable(pairs, allow_dirty=allow_dirty), f"<= {LIMIT_S * 1000:.0f} ms more"
    if len(used) < ENOUGH:
        said = f"not measured: {len(used)} of {len(pairs)} pairs are clean, {ENOUGH} are needed"
        return Row("sandbox start", cell, said, goal=goal, met=False, note=NOTE)
    low, middle, high = (1000 * value for value in interval([pair.ours.seconds - pair.peer.seconds for pair in used]))
    bare = statistics.median(pair.peer.seconds for pair in used) * 1000
    return Row(
        "sandbox start", cell, f"{middle:.1f} ms more ({low:.1f} to {high:.1f})", peer=f"without {bare:.1f} ms",
        ratio=dirt(pairs, allow_dirty=allow_dirty).strip() or "-", goal=goal, met=middle <= LIMIT_S * 1000,
        limit=f"{limit_s * 1000:.1f} ms", note=NOTE,
    )  # fmt: skip


def grading(sandbox: Sandbox, times: int) -> Row:
    """One verdict on a small function: two sandboxes, two interpreters."""
    code, tests, found = "def add(a, b): return a + b", ["assert add(1, 2) == 3"] * 10, []
    for _ in range(times):
        started = time.perf_counter()
        if grade_code(code, tests, sandbox).passed is not True:
            raise RuntimeError("the right answer did not pass")
        found.append(time.perf_counter() - started)
    said = f"{statistics.median(found) * 1000:.0f} ms a verdict"
    return Row("sandbox start", "grading 10 asserts", said, note="code and tests in a sandbox each; no goal was set")


def main() -> int:
    """Alternate, subtract, compare with the goal."""
    parser = common_arguments(__doc__, pairs=40)
    args = parser.parse_args()
    if not available().usable:
        row = Row("sandbox start", "-", f"not measured: {available().missing}", goal="a sandbox", met=False)
        return publish([row], args.rows)
    journal, sandbox = Journal("sandbox", {"arguments": vars(args), "commands": COMMANDS}), Sandbox()
    ballast = bytearray(os.urandom(2**20)) * (BALLAST // 2**20)
    limit_s, rows = kernel_alone(), []
    for cell, argv in COMMANDS.items():
        for _ in range(3):  # warm-up: the keeper, the disk cache
            contained(sandbox, argv), plain(argv)
        pairs = alternate(
            lambda argv=argv: timed("sandbox", lambda: contained(sandbox, argv)),  # type: ignore[misc]
            lambda argv=argv: timed("plain", lambda: plain(argv)),  # type: ignore[misc]
            pairs=args.pairs or 40, redo=0 if args.allow_dirty else None, record=journal.pair(cell),
        )  # fmt: skip
        rows.append(judged(cell, pairs, limit_s, allow_dirty=args.allow_dirty))
    rows.append(grading(sandbox, 5))
    del ballast
    return publish(rows, args.rows)


if __name__ == "__main__":
    sys.exit(main())
