"""A GPU's figures, cell by cell: a step, learning, decoding, the loss, a shared prefix, sampling ahead, whole runs.

    python benchmarks/gpu_step.py --out gpu.jsonl --table gpu.md [--cells step,learn,decode] [--seconds 540]
    python benchmarks/gpu_step.py --out tiny.jsonl --tiny      every cell's code, on a CPU, with the smallest sizes
    python benchmarks/gpu_step.py --write gpu.jsonl [...]      samples into docs/, their table into docs/benchmarks.md
    python benchmarks/gpu_step.py --check                      exit 1 unless that table says what those samples say

Each cell is a process of its own with a time limit of its own: one that fails, hangs or runs out of memory takes no
other along, and every sample is on the disk as soon as it was taken. A cell that was stopped has a row with the samples
it got. Files are appended to: two calls with other cells make one table. Sides of a cell work in turns. TRL's side runs
where TRL can be imported; a peer that is not there is a remark, not a gap.

Made-up weights of SmolLM2-135M's shape and of a Qwen3 shape with 0.6 billion parameters ("0.5b"), bf16 over float32
masters, prompts of 48 tokens, 8 siblings each. TRL without vLLM, with float32 weights under autocast, as ours has
masters, or with bf16 weights; the faster one counts. Its continuous batching is not among them: it takes most of a
GPU's memory, and the sides share one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SAMPLES, PAGE = Path("docs/gpu_samples.jsonl"), Path("docs/benchmarks.md")
KEPT = ("run", "device", "sample", "side_failed", "note", "end")
"""Kinds of lines that go into docs/: what the table is made of."""
BEGIN, END = "<!-- gpu results: begin -->", "<!-- gpu results: end -->"
HEAD = ("what", "ours", "peer", "peer / ours", "goal", "reached", "limit", "samples")
MIN_PAIRS = 3
LEAST_S, ENDING_S = 20, 3
"""No cell is begun with less time left; what ending one takes."""


@dataclass(frozen=True)
class Asked:
    """What a cell is asked, and how long it may take."""

    what: str
    limit_s: float
    goal: str = "-"
    most_s: float | None = None
    """Seconds of ours that reach the goal."""
    ratio: float | None = None
    """Peer over ours that reaches the goal; with `most_s` both count."""
    most_gib: float | None = None


CELLS = {
    "step": Asked("GRPO step, 128 x 128 tokens, 135m", 120, ">= 8x TRL, <= 0.45 s", 0.45, 8.0),
    "learn": Asked("learning, 16,384 tokens, 135m", 60, "<= 0.12 s, <= half the plain step's memory", 0.12),
    "step05": Asked("GRPO step, 64 x 256 tokens, 0.5b", 150, ">= 6x TRL, <= 25 GiB", None, 6.0, 25.0),
    "loss": Asked("loss and logprobs, 16,384 x 151,936, bf16", 45, ">= 20x less memory than plain, >= 1.0x Liger"),
    "prefix": Asked("step with a shared prefix, P=1024 R=128 G=8", 60, ">= 90 % of the limit"),
    "learn05": Asked("learning, 64 x 256 tokens, 0.5b", 75, "<= 0.33 s, <= half the plain step's memory", 0.33),
    "decode": Asked("decoding, 135m", 75, "see the rows"),
    "ahead": Asked("built-in run, sampling ahead, a step", 90, ">= 1.0x of sync", None, 1.0),
    "builtin": Asked("the built-in run, 200 steps", 90, ">= 4x of two CPU cores"),
    "builtin_cpu": Asked("the built-in run, 200 steps, on two CPU cores", 150),
    "profile": Asked("no row: where a step of the learner spends its time", 45),
    "full": Asked("every weight trained, 64 x 64 tokens, 0.5b", 75),
    "lora": Asked("LoRA r=16, 64 x 64 tokens, 0.5b", 75),
    "full_checkpointed": Asked("every weight, gradient checkpointing, 64 x 64 tokens, 0.5b", 75),
    "lora_checkpointed": Asked("LoRA r=16, gradient checkpointing, 64 x 64 tokens, 0.5b", 75),
    "step05long": Asked("GRPO step, 256 x 512 tokens, 0.5b", 240, ">= 8x TRL", None, 8.0),
}
ROWLESS = ("builtin_cpu", "profile")
PEERS = ("trl", "transformers", "liger-kernel", "triton")
MODES = ("full", "lora", "full_checkpointed", "lora_checkpointed")
DECODE_GOALS = {64: 25_000, 128: 60_000, 1024: 130_000}
Line = Mapping[str, Any]
Found = Sequence[Line]


# -- running ---------------------------------------------------------------------------------------------


def surroundings() -> dict[str, str]:
    """The environment of a cell: this tree's packages, wherever it was started."""
    paths = [str(ROOT / "src"), str(ROOT / "harness/src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}


def run_cell(name: str, args: argparse.Namespace, limit_s: float) -> str:
    """One cell in its own process and session; how it ended, in words."""
    from surefoot.system.process import Child

    argv = [sys.executable, __file__, "--cell", name, "--out", str(args.out), "--device", args.device]
    argv += ["--threads", str(args.threads), "--samples", str(args.samples), *(["--tiny"] if args.tiny else [])]
    argv += ["--logs", str(args.logs), "--worlds", str(args.worlds)]
    log = args.logs / f"{name}.log"
    with (
        log.open("w", encoding="utf-8") as file,
        Child.start(argv, stdout=file, stderr=subprocess.STDOUT, env=surroundings(), cwd=ROOT) as child,
    ):
        code = child.wait(limit_s)
    if code == 0:
        return "done"
    if code is None:
        return f"stopped at its limit of {limit_s:.0f} s"
    tail = " | ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-6:])
    return f"failed with status {code}: {tail}"[:1500]


def run_all(args: argparse.Namespace) -> bool:
    """Every cell that there is time for; whether all of them came to their end."""
    end, whole = time.monotonic() + args.seconds, True
    write(
        args.out, {"kind": "run", "cells": args.cells, "tiny": args.tiny, "device": args.device, **about(args.commit)}
    )
    for name in args.cells:
        begun, how = time.monotonic(), "not begun: no time was left"
        if end - begun >= LEAST_S:
            how = run_cell(name, args, min(end - begun - ENDING_S, CELLS[name].limit_s))
        taken = time.monotonic() - begun
        whole = whole and how == "done"
        write(args.out, {"kind": "end", "cell": name, "how": how, "seconds": taken})
        print(f"{name}: {how} ({taken:.0f} s)", flush=True)
        if args.table is not None:
            args.table.write_text(markdown(read(args.out)) + "\n", encoding="utf-8")
    return whole


def about(commit: str | None) -> dict[str, Any]:
    """Date, commit and versions; what cannot be told is said to be unknown."""
    told: dict[str, Any] = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "commit": commit}
    try:
        from method import describe_machine

        told["machine"] = describe_machine()
        told["commit"] = (told["machine"]["git"] or {}).get("commit") or commit
    except Exception as error:  # noqa: BLE001 - figures of a machine that cannot be described are still figures
        told["machine"] = f"unknown: {type(error).__name__}: {error}"
    return told


def write(path: Path, values: Mapping[str, Any]) -> None:
    """Append a line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(values, default=str) + "\n")


# -- reading ---------------------------------------------------------------------------------------------


def read(path: Path) -> list[dict[str, Any]]:
    """Whole lines only: a cell that was killed may have left half of one."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def samples_of(lines: Found, cell: str, side: str | None = None, **facts: Any) -> list[Line]:
    """The samples of a cell, of one side, with these facts."""
    return [
        line for line in lines
        if line["kind"] == "sample" and line["cell"] == cell and side in (None, line["side"])
        and all(line["facts"].get(name) == value for name, value in facts.items())
    ]  # fmt: skip


def values(found: Found) -> list[float]:
    """Of samples."""
    return [float(line["value"]) for line in found]


def spread(found: Sequence[float], unit: str) -> str:
    """`0.431 s (0.420 to 0.440)`; `-` for nothing."""
    if not found:
        return "-"
    digits = 0 if unit == "tokens/s" else 3 if max(found) < 10 else 1
    middle, low, high = (f"{value:,.{digits}f}" for value in (statistics.median(found), min(found), max(found)))
    return f"{middle} {unit}" + (f" ({low} to {high})" if len(found) > 1 else "")


def peers(lines: Found, cell: str) -> list[str]:
    """Sides beside ours, in order of appearance."""
    return list(dict.fromkeys(str(line["side"]) for line in samples_of(lines, cell) if line["side"] != "ours"))


def fastest(lines: Found, cell: str) -> str | None:
    """The peer with the smallest median; of TRL's settings that is the one that counts."""
    return min(
        peers(lines, cell), key=lambda name: statistics.median(values(samples_of(lines, cell, name))), default=None
    )


def compared(mine: Sequence[float], theirs: Sequence[float]) -> tuple[float | None, str]:
    """Peer over ours: the median of paired ratios with its interval, or why there is none."""
    from method import bootstrap_interval

    pairs = [b / a for a, b in zip(mine, theirs, strict=False)]
    if not pairs:
        return None, "-"
    middle = statistics.median(pairs)
    if len(pairs) < MIN_PAIRS:
        return middle, f"{middle:.2f}x (n={len(pairs)}: no interval)"
    low, high = bootstrap_interval(pairs)
    if low <= 1 <= high:
        return None, f"interval crosses 1 [{low:.2f}, {high:.2f}]"
    return middle, f"{middle:.2f}x [{low:.2f}, {high:.2f}] n={len(pairs)}"


def same_work(mine: Found, theirs: Found) -> str | None:
    """What the two sides did differently; None when their proofs agree, or there is none to compare."""
    for one, two in zip(mine, theirs, strict=False):
        left, right = one["facts"].get("work", {}), two["facts"].get("work", {})
        for name in sorted({*left} & {*right} - {"weights_moved", "prompts"}):
            if left[name] != right[name]:
                return f"{name}: {left[name]} against {right[name]}"
    return None


Row = tuple[str, ...]


def row(what: str, ours: str, peer: str, ratio: str, goal: str, met: bool | None, limit: str, count: int) -> Row:
    """One line; a goal that nothing was measured for is not reached."""
    return (what, ours, peer, ratio, goal, {True: "yes", False: "**no**", None: "-"}[met], limit, str(count))


def seconds_row(lines: Found, cell: str) -> list[Row]:
    """Ours against its fastest peer, both in seconds, with peaks where they were taken."""
    asked, mine = CELLS[cell], samples_of(lines, cell, "ours")
    name = fastest(lines, cell)
    theirs = samples_of(lines, cell, name) if name else []
    ratio, said = compared(values(mine), values(theirs))
    if different := same_work(mine, theirs):
        ratio, said = None, f"no ratio: {different}"
    ours_gib, their_gib = (
        max((line["facts"].get("peak_gib") or 0.0 for line in of), default=0.0) for of in (mine, theirs)
    )
    checks = [bool(mine)]
    if asked.most_s is not None and mine:
        checks.append(statistics.median(values(mine)) <= asked.most_s)
    if asked.ratio is not None:
        wanted = cell == "ahead" or (name or "").startswith("TRL")
        checks.append(wanted and ratio is not None and ratio >= asked.ratio)
    if asked.most_gib is not None:
        checks.append(ours_gib <= asked.most_gib)
    if cell.startswith("learn") and their_gib:
        checks.append(ours_gib <= their_gib / 2)
    ours = spread(values(mine), "s") + peak_of(mine)
    peer = "-" if name is None else f"{name}: {spread(values(theirs), 's')}{peak_of(theirs)}"
    return [row(asked.what, ours, peer, said, asked.goal, all(checks), "-", len(mine))]


def prefix_row(lines: Found, cell: str) -> list[Row]:
    """The gain, and the share of what arithmetic allows."""
    mine, theirs = (samples_of(lines, cell, name) for name in ("ours", "no prompt shared"))
    limit = mine[0]["facts"]["limit"] if mine else 0.0
    ratio, said = compared(values(mine), values(theirs))
    met = ratio is not None and ratio >= 0.9 * limit
    share = f"{limit:.2f}x" + ("" if ratio is None else f", {ratio / limit:.0%} reached")
    asked = CELLS[cell]
    parts = spread(values(mine), "s"), f"no prompt shared: {spread(values(theirs), 's')}"
    return [row(asked.what, *parts, said, asked.goal, met, share, len(mine))]


def loss_rows(lines: Found, cell: str) -> list[Row]:
    """Memory against the plain loss, time against Liger."""
    mine, asked, found = samples_of(lines, cell, "ours"), CELLS[cell], []
    for peer, goal, key in (("plain", ">= 20x less", "extra_bytes"), ("Liger", ">= 1.0x", "")):
        theirs = samples_of(lines, cell, peer)
        if key:
            left, right = ([float(line["facts"][key]) for line in of] for of in (mine, theirs))
            gain = statistics.median(right) / statistics.median(left) if left and right and min(left) > 0 else None
            words = [f"{statistics.median(of) / 2**20:,.0f} MiB" if of else "-" for of in (left, right)]
            what, said, met = (
                "extra memory",
                "-" if gain is None else f"{gain:.1f}x less",
                gain is not None and gain >= 20,
            )
        else:
            gain, said = compared(values(mine), values(theirs))
            words = [spread(values(mine), "s"), spread(values(theirs), "s")]
            what, met = "time", (gain is not None and gain >= 1) if theirs else None
        found.append(row(f"{asked.what}: {what}", words[0], f"{peer}: {words[1]}", said, goal, met, "-", len(mine)))
    theirs = samples_of(lines, cell, "plain")
    _, said = compared(values(mine), values(theirs))
    speed = spread(values(mine), "s"), f"plain: {spread(values(theirs), 's')}"
    return [*found, row(f"{asked.what}: time", *speed, said, "-", None, "0.75x: four products for three", len(mine))]


def decode_rows(lines: Found, cell: str) -> list[Row]:
    """One for each number of rows."""
    found = []
    for rows_ in sorted({int(line["facts"]["rows"]) for line in samples_of(lines, cell)}):
        mine, theirs = (samples_of(lines, cell, name, rows=rows_) for name in ("ours", "generate"))
        slower = [1 / value for value in values(theirs)]
        _, said = compared([1 / value for value in values(mine)], slower)
        goal = DECODE_GOALS.get(rows_)
        met = None if goal is None else bool(mine) and statistics.median(values(mine)) >= goal
        parts = spread(values(mine), "tokens/s"), f"transformers: {spread(values(theirs), 'tokens/s')}"
        goal_said = "-" if goal is None else f">= {goal:,} tokens/s"
        found.append(row(f"{CELLS[cell].what}, {rows_} rows", *parts, said, goal_said, met, "-", len(mine)))
    return found


def mode_rows(lines: Found, cell: str) -> list[Row]:
    """Tokens per second of a whole step and its peak; with LoRA, what merging and publishing takes, too."""
    name, asked = fastest(lines, cell), CELLS[cell]
    mine, theirs = samples_of(lines, cell, "ours"), samples_of(lines, cell, name) if name else []
    different = same_work(mine, theirs)
    said = f"no ratio: {different}" if different else compared(values(mine), values(theirs))[1]

    def told(of: Found) -> str:
        speeds = [line["facts"]["work"]["sampled_tokens"] / line["value"] for line in of]
        return spread(speeds, "tokens/s") + peak_of(of)

    found = [row(asked.what, told(mine), f"{name}: {told(theirs)}" if name else "-", said, "-", None, "-", len(mine))]
    if cell != "lora":
        return found
    merged, plain = (
        [
            (line["facts"].get("timing/merge") or 0.0) + line["facts"]["timing/publish"]
            for line in samples_of(lines, *of)
        ]
        for of in (("lora", "ours"), ("full", "ours"))
    )
    parts = spread(merged, "s"), f"every weight: {spread(plain, 's')}"
    return [
        *found,
        row("merging and publishing an adapter", *parts, compared(merged, plain)[1], "-", None, "-", len(merged)),
    ]


def peak_of(found: Found) -> str:
    """The highest peak of these samples, where one was taken."""
    most = max((line["facts"].get("peak_gib") or 0.0 for line in found), default=0.0)
    return f", {most:.1f} GiB" if most else ""


def builtin_rows(lines: Found, cell: str) -> list[Row]:
    """The GPU's run against that on two cores of the same machine, when both were made."""
    mine = samples_of(lines, "builtin")
    theirs, asked = samples_of(lines, "builtin_cpu"), CELLS["builtin"]
    gain = statistics.median(values(theirs)) / statistics.median(values(mine)) if mine and theirs else None
    learned = ", ".join(f"{line['facts']['accuracy']:.2f}" for line in mine if "accuracy" in line["facts"])
    ours = spread(values(mine), "s") + (f", held-out {learned}" if learned else "")
    said = "-" if gain is None else f"{gain:.2f}x"
    met = None if gain is None else gain >= 4
    return [
        row(asked.what, ours, f"two CPU cores: {spread(values(theirs), 's')}", said, asked.goal, met, "-", len(mine))
    ]


MAKERS: dict[str, Callable[[Found, str], list[Row]]] = {
    "prefix": prefix_row, "loss": loss_rows, "decode": decode_rows, "builtin": builtin_rows,
    **dict.fromkeys(ROWLESS, lambda lines, cell: []), **dict.fromkeys(MODES, mode_rows),
}  # fmt: skip


def rows_of(lines: Found, *, every: bool = False) -> tuple[list[Row], list[str]]:
    """Rows of every cell that was begun, and remarks: what failed, what was stopped, what is not installed.

    Args:
        every: a cell that was never begun has a row that says so.
    """
    begun = {str(line["cell"]) for line in lines if "cell" in line}
    begun |= {"builtin"} if "builtin_cpu" in begun else set()
    made = []
    for cell, asked in CELLS.items():
        if cell in begun:
            made += MAKERS.get(cell, seconds_row)(lines, cell)
        elif every and cell not in ROWLESS:
            made.append(row(asked.what, "not measured yet", "-", "-", asked.goal, None, "-", 0))
    remarks = [
        f"{line['cell']}: {line.get('side', '')} {line.get('detail') or line.get('how')}".replace(":  ", ": ")
        for line in lines
        if line["kind"] in ("side_failed", "note") or (line["kind"] == "end" and line["how"] != "done")
    ]
    return made, list(dict.fromkeys(remark.splitlines()[0][:300] for remark in remarks))


def markdown(lines: Found, *, every: bool = False) -> str:
    """The table, what it was measured on above it, remarks below it."""
    made, remarks = rows_of(lines, every=every)
    table = [HEAD, ("---",) * len(HEAD), *made]
    body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in table]
    return "\n".join([head_of(lines), "", *body, *(["", *(f"- {remark}" for remark in remarks)] if remarks else [])])


def head_of(lines: Found) -> str:
    """When, on what, with which versions."""
    runs = [line for line in lines if line["kind"] == "run"]
    if not runs:
        return "By `benchmarks/gpu_step.py`. Nothing of it was measured yet: no GPU was to be had."
    devices = dict.fromkeys(f"{line['name']}, torch {line['torch']}" for line in lines if line["kind"] == "device")
    commits = dict.fromkeys(str(line.get("commit") or "unknown")[:7] for line in runs)
    dates = ", ".join(dict.fromkeys(line["date"] for line in runs))
    machines = [line["machine"] for line in runs if isinstance(line.get("machine"), dict)]
    found = dict.fromkeys(f"{n} {m['versions'][n]}" for m in machines for n in PEERS if m["versions"].get(n))
    tiny = "**Tiny sizes: these figures mean nothing.** " if any(line.get("tiny") for line in runs) else ""
    return (
        f"{tiny}Measured {dates} on {', '.join(['; '.join(devices) or 'no GPU', *found])}, commit "
        f"{', '.join(commits)}, by `benchmarks/gpu_step.py`; medians, smallest and largest in brackets; TRL without "
        "vLLM, the faster of its two settings."
    )


# -- the page --------------------------------------------------------------------------------------------


def page_with(page: str, lines: Found) -> str:
    """The page with the table of these lines between its marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE} has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{markdown(lines, every=True)}\n{END}{after}"


def take_in(files: Sequence[Path], root: Path = ROOT) -> None:
    """Put what was measured into docs/, and its table onto the page; a cell that was measured again is replaced."""
    new = [line for file in files for line in read(file) if line["kind"] in KEPT]
    if any(line.get("tiny") for line in new):
        raise SystemExit("these are tiny sizes: figures that mean nothing stand on no page")
    again = {line["cell"] for line in new if "cell" in line}
    old = read(root / SAMPLES) if (root / SAMPLES).is_file() else []
    lines = [line for line in old if line.get("cell") not in again] + new
    text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines)
    (root / SAMPLES).write_text(text, encoding="utf-8")
    page = root / PAGE
    page.write_text(page_with(page.read_text(encoding="utf-8"), lines), encoding="utf-8")


def is_current(root: Path = ROOT) -> bool:
    """Whether the page says what the samples say."""
    page = (root / PAGE).read_text(encoding="utf-8")
    return page == page_with(page, read(root / SAMPLES))


def arguments() -> argparse.Namespace:
    """What was typed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default=",".join(CELLS), help=f"comma-separated, in this order: {', '.join(CELLS)}")
    parser.add_argument("--out", type=Path, help="samples as JSON lines, appended to")
    parser.add_argument("--table", type=Path, help="a file for the table")
    parser.add_argument("--write", type=Path, nargs="*", metavar="FILE", help="measure nothing: these into docs/")
    parser.add_argument("--check", action="store_true", help="measure nothing: is the page current?")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes on a CPU: does every cell run?")
    parser.add_argument("--device", help="cuda; with --tiny cpu")
    parser.add_argument("--seconds", type=float, default=540, help="for all cells together")
    parser.add_argument("--samples", type=int, default=5, help="of each side")
    parser.add_argument("--commit", help="where git cannot say it")
    parser.add_argument("--logs", type=Path, help="folder of what the cells say; beside --out without it")
    parser.add_argument("--worlds", type=Path, help="folder of made-up models; a temporary one without it")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cell", choices=CELLS, help=argparse.SUPPRESS)  # in a cell's own process
    args = parser.parse_args()
    args.device = args.device or ("cpu" if args.tiny else "cuda")
    if args.out is None:
        if args.write is None and not args.check:
            parser.error("say --out FILE, --write or --check")
        return args
    args.out = args.results = args.out.resolve()
    args.logs = (args.logs or args.out.with_name(f"{args.out.stem}_logs")).resolve()
    args.cells = args.cells.split(",")
    if unknown := sorted(set(args.cells) - set(CELLS)):
        parser.error(f"no cell is called {unknown[0]}; there are {', '.join(CELLS)}")
    return args


def main() -> int:
    """Run the cells, or write the table; 0 when every cell came to its end, whatever its figures."""
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "harness/src")]
    args = arguments()
    if args.cell:
        import gpu_cells

        gpu_cells.run_cell(args)
        return 0
    if args.out is None:
        if args.write is not None:
            take_in(args.write)
        return 0 if is_current() else 1
    for folder in (args.out.parent, args.logs):
        folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        args.worlds = args.worlds or Path(folder)
        whole = run_all(args)
    print("\n" + markdown(read(args.out)))
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
