"""Start-up: what a person waits for `--help`, for a config error and for the list of keys.

    python benchmarks/startup.py [--runs 15]

Each run is a fresh process. The proof that torch stays outside comes from the interpreter itself (`-X importtime`
lists every module that was imported). The limit is an interpreter that does nothing.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from load import LoadProbe
from method import Journal, Pair, Sample, alternate, compare, dirt, medians
from report import Row, common_arguments, publish

LIMIT_S = 0.300
HEAVY = ("torch", "transformers", "numpy")
BAD_CONFIG = 'model = "pebble"\ntasks = "builtin:sums"\nlerning_rate = 1e-4\n'
NOTE = (
    f"wall time of a fresh process, min / median; the goal ({LIMIT_S * 1000:.0f} ms) is for the median, on a machine "
    "whose disk cache is warm. The limit is `python -c pass` in the same run."
)


@dataclass(frozen=True)
class Command:
    """One thing to type, and how it has to end."""

    name: str
    words: tuple[str, ...]
    status: int


def commands(folder: Path) -> list[Command]:
    """What is measured."""
    bad = folder / "bad.toml"
    bad.write_text(BAD_CONFIG)
    return [
        Command("--help", ("--help",), 0),
        Command("train bad.toml", ("train", str(bad)), 2),
        Command("config", ("config",), 0),
    ]


def run(argv: Sequence[str], status: int) -> float:
    """Seconds of one process, which must end as expected."""
    started = time.perf_counter()
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    if done.returncode != status:
        raise RuntimeError(
            f"{list(argv)} ended with {done.returncode}, not {status}:\n{done.stdout}{done.stderr}"[-2000:]
        )
    return seconds


def imported_modules(command: Command) -> set[str]:
    """Top-level packages that the command imported, as the interpreter lists them."""
    argv = [sys.executable, "-X", "importtime", "-m", "surefoot", *command.words]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    names = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in lines}
    if "surefoot" not in names:
        raise RuntimeError(f"the interpreter's list of imports is not there; status {done.returncode}")
    return names


def measure(command: Command, runs: int, floor: float, journal: Journal) -> Row:
    """Times and imports of one command."""
    argv = [sys.executable, "-m", "surefoot", *command.words]
    run(argv, command.status)  # warm-up: byte code, disk cache
    probe = LoadProbe()
    mark = probe.mark()
    seconds = [run(argv, command.status) for _ in range(runs)]
    load = probe.since(mark)
    heavy = sorted(imported_modules(command) & set(HEAVY))
    journal.write("times", {"cell": command.name, "seconds": seconds, "load": load, "heavy_imports": heavy})
    median = statistics.median(seconds)
    imports = f"imports {', '.join(heavy)}" if heavy else "no torch"
    busy = f", others used {load.share:.0%}" if load.dirty else ""
    return Row(
        "start-up", command.name, f"{min(seconds) * 1000:.0f} / {median * 1000:.0f} ms, {imports}{busy}",
        goal=f"< {LIMIT_S * 1000:.0f} ms, no torch", met=median < LIMIT_S and "torch" not in heavy,
        limit=f"{floor * 1000:.0f} ms", note=NOTE,
    )  # fmt: skip


def against_trl(args: argparse.Namespace, journal: Journal) -> Row:
    """`surefoot --help` against `trl --help`."""
    peer = shutil.which("trl", path=str(Path(sys.executable).parent))
    if peer is None:
        return Row(
            "start-up", "--help against TRL", "-", note="trl is not installed beside this interpreter: no comparison"
        )
    sides = {"surefoot": [sys.executable, "-m", "surefoot", "--help"], "trl": [peer, "--help"]}

    def sample(name: str) -> Sample:
        return Sample(name, run(sides[name], 0), {"answered": "--help"})

    for name in sides:
        sample(name)
    pairs: list[Pair] = alternate(
        lambda: sample("surefoot"), lambda: sample("trl"), pairs=args.pairs or 7,
        redo=0 if args.allow_dirty else None, record=journal.pair("--help"),
    )  # fmt: skip
    mine, theirs = medians(pairs, allow_dirty=args.allow_dirty)
    ratio = compare(pairs, allow_dirty=args.allow_dirty)
    return Row(
        "start-up", "--help against TRL", f"{mine * 1000:.0f} ms", f"trl {theirs * 1000:.0f} ms",
        f"{ratio}{dirt(pairs, allow_dirty=args.allow_dirty)}", note=NOTE,
    )  # fmt: skip


def main() -> int:
    """Every command, then the comparison, then the table."""
    parser = common_arguments(__doc__, pairs=7)
    parser.add_argument("--runs", type=int, default=15)
    args = parser.parse_args()
    journal = Journal("startup", {"arguments": vars(args), "bad_config": BAD_CONFIG})
    nothing = [sys.executable, "-c", "pass"]
    floor = min(run(nothing, 0) for _ in range(args.runs))
    with tempfile.TemporaryDirectory(prefix="surefoot-bench-") as folder:
        rows = [measure(command, args.runs, floor, journal) for command in commands(Path(folder))]
    rows.append(against_trl(args, journal))
    return publish(rows, args.rows)


if __name__ == "__main__":
    sys.exit(main())
