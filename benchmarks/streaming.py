"""Tasks by the million: what do 1,000 and 1,000,000 tasks cost in memory, at the start, and at a resume?

    python benchmarks/streaming.py [--sizes 1000,10000,100000,1000000] [--pairs 5] [--cache FOLDER]

Every figure comes from a fresh process (`side_streaming.py`). Memory is resident size after 1,000 draws. A resume opens
everything again and deals 8 tasks from 90 % on. The peers: every line in a list; a `datasets.Dataset` with a shuffled
index; a streamed `IterableDataset` with `skip` and with `load_state_dict`. The streamed peers deal in file order, which
is their faster case; ours and the first two shuffle everything. What is prepared once is told in its own row.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from load import LoadProbe
from method import Journal, Sample, alternate, compare, dirt, medians
from report import Row, common_arguments, goal_met, publish
from side_streaming import BATCH, DRAWS, row

SIDE = Path(__file__).parent / "side_streaming.py"
PEERS = ("list", "map", "iterable", "state")
STREAMED = ("iterable", "state")
MEMORY_GOAL, RESUME_GOAL_S, PEER_GOAL, SLOPE_GOAL = 1.1, 0.050, 10.0, 0.1
NOTE = (
    f"fresh process per figure; rows of about 330 bytes; RSS after {DRAWS} draws; a resume opens everything and deals "
    f"{BATCH} tasks from 90 % on. Imports, the index and Arrow files are not counted and told apart. Streamed peers "
    "deal in file order, which is faster for them. Limit: one seek and one parse per task, without an index or a check."
)


def make_file(folder: Path, count: int) -> Path:
    path = folder / f"tasks{count}.jsonl"
    if not path.exists():
        temporary = path.with_suffix(".tmp")
        with temporary.open("w") as file:
            file.writelines(json.dumps(row(i)) + "\n" for i in range(count))
        temporary.rename(path)
    return path


def play(side: str, folder: Path, count: int, what: str = "all") -> dict[str, Any]:
    """One process; what it measured."""
    environment = dict(
        os.environ, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=str(folder / "hf"), TQDM_DISABLE="1"
    )
    path = make_file(folder, count)
    argv = [sys.executable, str(SIDE), side, str(path), str(count), str(folder), what]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise RuntimeError(f"{side} at {count} ended with {done.returncode}:\n{done.stdout}{done.stderr}"[-3000:])
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def mb(value: float) -> str:
    return f"{value / 1e6:.1f} MB"


def ms(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def slope(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Exponent of a power law through the points."""
    xs, ys = [math.log(size) for size in sizes], [math.log(value) for value in values]
    middle_x, middle_y = statistics.mean(xs), statistics.mean(ys)
    spread = sum((x - middle_x) ** 2 for x in xs)
    return sum((x - middle_x) * (y - middle_y) for x, y in zip(xs, ys, strict=True)) / spread if spread else 0.0


def build_row(side: str, folder: Path, count: int, journal: Journal) -> Row:
    probe = LoadProbe()
    mark = probe.mark()
    result = play(side, folder, count, "build")
    load = probe.since(mark)
    journal.write("build", {"cell": side, "load": load, **result})
    per_task = result["build_s"] / count * 1e6
    dirty = f", dirty: others used {load.share:.0%}" if load.dirty else ""
    return Row(
        "streaming",
        f"prepare {count:,} once, {side}",
        f"{ms(result['build_s'])} ({per_task:.0f} us a task){dirty}",
        note=NOTE,
    )


def measured(
    side: str, folder: Path, sizes: Sequence[int], repeats: int, journal: Journal
) -> dict[int, dict[str, float]]:
    """Medians of every figure by size; sizes take turns, so that a slow minute hits all of them."""
    probe = LoadProbe()
    samples: dict[int, list[dict[str, Any]]] = {size: [] for size in sizes}
    for turn in range(repeats):
        for size in sizes if turn % 2 == 0 else reversed(sizes):
            mark = probe.mark()
            samples[size].append(play(side, folder, size))
            journal.write("figures", {"cell": side, "load": probe.since(mark), **samples[size][-1]})
    names = ("first_s", "draws_s", "rss", "resume_s")
    return {
        size: {name: statistics.median(one[name] for one in many) for name in names} for size, many in samples.items()
    }


def scaling_rows(found: dict[int, dict[str, float]], floor: dict[int, dict[str, float]]) -> list[Row]:
    """Flat, flat, flat, flat."""
    sizes = list(found)
    small, large = sizes[0], sizes[-1]
    growth = found[large]["rss"] / found[small]["rss"]
    rows = [
        Row(
            "streaming", f"memory, {large:,} against {small:,} tasks",
            f"{growth:.3f}x ({', '.join(mb(found[size]['rss']) for size in sizes)})",
            goal=f"<= {MEMORY_GOAL}x", met=growth <= MEMORY_GOAL, limit="1x", note=NOTE,
        ),
        Row(
            "streaming", f"resume at 90 % of {large:,}", ms(found[large]["resume_s"]),
            goal=f"< {RESUME_GOAL_S * 1000:.0f} ms", met=found[large]["resume_s"] < RESUME_GOAL_S,
            limit=ms(floor[large]["resume_s"]), note=NOTE,
        ),
    ]  # fmt: skip
    for name, words in (("first_s", "first task"), ("draws_s", f"{DRAWS} tasks"), ("resume_s", "resume at 90 %")):
        values = [found[size][name] for size in sizes]
        exponent = slope(sizes, values)
        rows.append(Row(
            "streaming", f"{words}, {small:,} to {large:,} tasks",
            f"exponent {exponent:+.3f} ({', '.join(map(ms, values))})", goal=f"exponent <= {SLOPE_GOAL}",
            met=exponent <= SLOPE_GOAL, limit=", ".join(ms(floor[size][name]) for size in sizes), note=NOTE,
        ))  # fmt: skip
    return rows


def peer_row(peer: str, folder: Path, count: int, pairs: int, args: Namespace, journal: Journal) -> list[Row]:
    """Resume, ours against one peer, in pairs; and both memories beside it."""
    memory: dict[str, list[float]] = {"ours": [], peer: []}

    def sample(side: str) -> Sample:
        result = play(side, folder, count)
        memory[side].append(result["rss"])
        return Sample(side, result["resume_s"], result["work"], result)

    done = alternate(
        lambda: sample("ours"), lambda: sample(peer), pairs=pairs, redo=0 if args.allow_dirty else None,
        record=journal.pair(f"{peer}/{count}"),
    )  # fmt: skip
    ours, theirs = medians(done, allow_dirty=args.allow_dirty)
    ratio = compare(done, allow_dirty=args.allow_dirty)
    goal = peer in STREAMED and count >= 100_000
    mine, other = (statistics.median(memory[side]) for side in ("ours", peer))
    return [
        Row(
            "streaming", f"resume at 90 % of {count:,} against {peer}", ms(ours), ms(theirs),
            f"{ratio}{dirt(done, allow_dirty=args.allow_dirty)}", f">= {PEER_GOAL:.0f}x" if goal else "-",
            goal_met(ratio, PEER_GOAL) if goal else None, note=NOTE,
        ),
        Row("streaming", f"memory at {count:,} against {peer}", mb(mine), mb(other), f"{other / mine:.1f}x", note=NOTE),
    ]  # fmt: skip


def shuffle_row(folder: Path, count: int, journal: Journal) -> Row:
    found = {side: play(side, folder, count, "shuffle") for side in ("ours", "iterable")}
    journal.write("shuffle", found)
    ours, peer = found["ours"]["disorder"], found["iterable"]["disorder"]
    return Row(
        "streaming", f"shuffle of {count:,}: distance from file order", f"{ours:.3f}", f"buffer of 1,000: {peer:.3f}",
        goal="0.97 to 1.03, nothing twice",
        met=abs(ours - 1) <= 0.03 and found["ours"]["distinct"] == min(count, 20_000), limit="1", note=NOTE,
    )  # fmt: skip


def main() -> int:
    parser = common_arguments(__doc__, pairs=5)
    parser.add_argument("--sizes", default="1000,10000,100000,1000000")
    parser.add_argument("--repeats", type=int, default=5, help="processes per figure of our own curve")
    parser.add_argument("--cache", type=Path, help="keep task files and what was prepared here")
    parser.add_argument("--peers", default=",".join(PEERS))
    args = parser.parse_args()
    sizes = [int(word) for word in args.sizes.split(",")]
    peers = [name for name in args.peers.split(",") if name]
    journal = Journal("streaming", {"sizes": sizes, "repeats": args.repeats, "peers": peers, "draws": DRAWS})
    rows: list[Row] = []

    def add(*more: Row) -> None:
        for one in more:
            rows.append(one)
            print(" | ".join(one.cells()), flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        folder = args.cache or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for size in sizes:
            play("floor", folder, size, "build")
            add(build_row("ours", folder, size, journal))
        floor = measured("floor", folder, sizes, 1, journal)
        add(*scaling_rows(measured("ours", folder, sizes, args.repeats, journal), floor))
        add(shuffle_row(folder, sizes[-1], journal))
        for peer in peers:
            if peer in ("map", "state"):
                add(build_row(peer, folder, sizes[-1], journal))
            slow = peer in ("list", *STREAMED) and sizes[-1] >= 1_000_000
            add(*peer_row(peer, folder, sizes[-1], args.pairs or (3 if slow else 5), args, journal))
    return publish(rows, args.rows)


if __name__ == "__main__":
    raise SystemExit(main())
