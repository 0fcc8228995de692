"""Every benchmark in order, one table at the end: what `make bench` runs.

    python benchmarks/run.py [--only startup,decode] [--quick] [--minutes 55] [--write docs/benchmarks.md]

Each benchmark is a process of its own and prints as it goes. Exit status 0 when every goal was reached, 1 when one was
missed or a benchmark failed; a failure is a row of the table, not a gap in it. `--quick` only shows that everything
runs: tiny sizes, no verdict worth reading. With `--minutes` none of it goes on after them: what had no time is a row
that says so, and counts as not reached. Ratios of a tree without changes go into `history.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chunked_loss import GOAL as MEMORY_GOAL
from chunked_loss import HIDDEN, VOCABULARY, agree
from history import HISTORY, of_rows
from load import LIMIT, Load, LoadProbe
from method import RESULTS, Pair, Sample, compare, describe_machine, dirt, medians
from report import Row, as_markdown, as_text, goal_met, read_rows, write_between_marks

from surefoot_harness.ratios import append_ratios
from surefoot_harness.system.process import Child

HERE = Path(__file__).parent
ORDER = (
    "startup", "plugin_startup", "check_cost", "guard_rates", "bisect_noise", "affected", "chunked_loss", "decode",
    "end_to_end", "durability", "keeping", "sinks", "routing", "weight_sync", "merge",
    "overlap", "long_tail", "tool_rollouts", "mcp_calls", "sandbox", "streaming",
    "near_duplicates", "learning",
)  # fmt: skip
QUICK = {
    "startup": ["--runs", "3", "--pairs", "3", "--allow-dirty"],
    "plugin_startup": ["--pairs", "3", "--allow-dirty"],
    "check_cost": ["--runs", "1", "--fuzzed", "200"],
    "guard_rates": ["--runs", "400"],
    "bisect_noise": ["--histories", "20", "--only", "given"],
    "affected": ["--mutants", "5", "--pairs", "1", "--no-testmon", "--no-replay"],
    "chunked_loss": ["--pairs", "1"],
    "decode": ["--batches", "1", "--tokens", "4", "--pairs", "3", "--allow-dirty"],
    "end_to_end": ["--cells", "1x2", "--pairs", "3", "--allow-dirty"],
    "durability": ["--millions", "40", "--pairs", "3", "--allow-dirty"],
    "keeping": ["--steps", "2", "--smollm2-steps", "0", "--allow-dirty"],
    "sinks": ["--allow-dirty"],
    "routing": ["--quick"],
    "weight_sync": ["--millions", "40", "--pairs", "3", "--allow-dirty"],
    "merge": ["--tiny", "--pairs", "3", "--allow-dirty"],
    "overlap": ["--quick"],
    "long_tail": ["--quick"],
    "tool_rollouts": ["--quick"],
    "mcp_calls": ["--quick"],
    "sandbox": ["--pairs", "9", "--allow-dirty"],
    "streaming": [
        "--sizes",
        "1000,10000",
        "--repeats",
        "1",
        "--pairs",
        "3",
        "--peers",
        "iterable",
        "--allow-dirty",
    ],
    "near_duplicates": ["--sizes", "1000", "--runs", "1"],
    "learning": ["--seeds", "0", "max_steps=2"],
}
FULL = {"chunked_loss": ["--pairs", "7"]}
CHUNKED_NOTE = (
    "extra peak RSS of a fresh process that scores 8 x 512 tokens over a vocabulary of 49152 with gradients, fp32, "
    "above the moment when inputs and gradient buffers exist; plain builds the logits. Loss and gradients agree to "
    "1e-4. "
    "Limit: three logits tensors over one hidden gradient; four matrix products against three."
)
AGREEMENT = 1e-4


def run_one(name: str, options: list[str], scratch: Path, seconds: float = math.inf) -> list[Row]:
    """One benchmark in its own process; its rows, or one row that says how it failed, or had no time."""
    rows = scratch / f"{name}.jsonl"
    hand_over = [] if name == "chunked_loss" else ["--rows", str(rows)]
    print(f"\n== {name} ==", flush=True)
    before = _line_count(RESULTS / "chunked_loss.jsonl")
    status = ended([sys.executable, str(HERE / f"{name}.py"), *hand_over, *options], seconds)
    if status is None:
        return [no_time(name)]
    if name == "chunked_loss":
        return chunked_rows(before, status)
    if not rows.is_file():
        return [Row(name, "-", f"failed with status {status}", goal="runs", met=False)]
    return read_rows(rows)


def ended(command: list[str], seconds: float) -> int | None:
    """The exit status; None when the time was over first, and then nothing of it is left."""
    if seconds <= 0:
        return None
    with Child.start(command) as child:  # leaving the block ends it, and whatever it started
        return child.wait(None if math.isinf(seconds) else seconds)


def no_time(name: str) -> Row:
    """A gap of the table that is seen."""
    return Row(name, "-", "the minutes were over", goal="runs", met=False)


def keep(rows: Sequence[Row], load: float, machine: Mapping[str, Any], history: Path) -> str:
    """Write the ratios of one benchmark into the history, where they speak for a commit; what was done, in words.

    Args:
        machine: as it was before the first benchmark: the history itself is a file of the tree.
    """
    git = machine["git"]
    if not git["commit"] or git["dirty"] is not False:
        return "not in the history: the tree differs from its commit"
    words, day = f"{machine['cpus']} x {machine['cpu']}", time.strftime("%Y-%m-%d")
    new = of_rows(rows, date=day, commit=git["commit"][:10], machine=words, load=round(load, 4))
    return f"{append_ratios(history, new)} lines more in {history.name}"


def chunked_rows(skip: int, status: int) -> list[Row]:
    """The table's rows from the raw samples that chunked_loss.py just appended."""
    path = RESULTS / "chunked_loss.jsonl"
    samples = [json.loads(line) for line in path.read_text().splitlines()[skip:]] if path.is_file() else []
    sides = {side: [s for s in samples if s["side"] == side] for side in ("chunked", "plain")}
    couples = list(zip(sides["chunked"], sides["plain"], strict=False))
    if not couples or len(samples) != 2 * len(couples):
        return [Row("chunked loss", "-", f"failed with status {status}", goal="runs", met=False)]
    apart = max(agree(plain, chunked) for chunked, plain in couples)
    if apart > AGREEMENT:
        return [Row("chunked loss", "-", f"the sides differ by {apart:.1e}", goal="same work", met=False)]
    return [_chunked_row("extra_bytes", couples), _chunked_row("seconds", couples)]


def _chunked_row(key: str, couples: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> Row:
    """Memory does not depend on who else computes, so there every pair counts."""
    loads = [Load(a["foreign_share"], 0.0, a["foreign_share"] > LIMIT) for a, _ in couples]
    pairs = [Pair(i, Sample("chunked", a[key]), Sample("plain", b[key]), loads[i]) for i, (a, b) in enumerate(couples)]
    memory = key == "extra_bytes"
    limit = 3 * VOCABULARY / HIDDEN if memory else 3 / 4
    ratio = compare(pairs, allow_dirty=memory)
    mine, theirs = medians(pairs, allow_dirty=memory)
    words = [f"{value / 2**20:.0f} MiB" if memory else f"{value:.2f} s" for value in (mine, theirs)]
    return Row(
        "chunked loss", "extra memory" if memory else "time", words[0], f"plain {words[1]}",
        f"{ratio}{'' if memory else dirt(pairs)}", f">= {MEMORY_GOAL:g}x" if memory else "-",
        goal_met(ratio, MEMORY_GOAL) if memory else None, f"{limit:.4g}x", CHUNKED_NOTE,
    )  # fmt: skip


def heading(seconds: float, share: float) -> str:
    """What the figures were measured on."""
    machine = describe_machine()
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items() if version)
    return (
        f"{machine['cpus']} x {machine['cpu']}, Python {machine['python']}, {versions}; "
        f"the whole suite took {seconds / 60:.0f} minutes, others used {share:.1%} of the CPUs meanwhile."
    )


def _line_count(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.is_file() else 0


def main() -> int:
    """Run, print, and write where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(ORDER), help="comma-separated, run in the given order")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end after so many, whatever is under way")
    parser.add_argument("--history", type=Path, default=HISTORY, help="where ratios are kept, by commit")
    parser.add_argument("--cache", type=Path, help="where end_to_end keeps the converted model")
    parser.add_argument("--write", type=Path, help="put the table between the result marks of this document")
    args = parser.parse_args()
    if not args.minutes > 0:
        parser.error(f"--minutes {args.minutes:g} leaves no time for anything")
    names = args.only.split(",")
    unknown = sorted(set(names) - set(ORDER))
    if unknown:
        parser.error(f"no benchmark is called {unknown[0]}; there are {', '.join(ORDER)}")
    probe, started, machine = LoadProbe(), time.perf_counter(), describe_machine()
    mark, rows = probe.mark(), []
    with tempfile.TemporaryDirectory(prefix="surefoot-bench-") as scratch:
        for name in names:
            options = list(QUICK[name]) if args.quick else list(FULL.get(name, ()))
            options += ["--cache", str(args.cache)] if args.cache and name == "end_to_end" else []
            left = 60 * args.minutes - (time.perf_counter() - started)
            began = probe.mark()
            found = run_one(name, options, Path(scratch), left)
            load = probe.since(began)
            kept = "" if args.quick else f"; {keep(found, load.share, machine, args.history)}"
            print(f"{name} took {load.seconds / 60:.1f} minutes{kept}", flush=True)
            rows += found
    head = heading(time.perf_counter() - started, probe.since(mark).share)
    print(f"\n{head}\n\n{as_text(rows)}")
    if args.write:
        write_between_marks(args.write, f"{head}\n\n{as_markdown(rows)}")
    return 0 if all(row.met is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
