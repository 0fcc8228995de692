"""The peak of memory, predicted and measured: whole models and adapters of three sizes, each in a process of its own.

    python benchmarks/memory_cells.py --out DIR            the six settings that the formula is held to, and two more
    python benchmarks/memory_cells.py --out DIR --cells full-135M,lora-135M
    python benchmarks/memory_cells.py --tiny --out DIR     every line of it on a CPU, in seconds

Random weights in bfloat16, the engine in the same process, two steps of 16 tasks x 8 generations, prompts of 128 tokens
and completions of 384, all of full length. One JSON line for each cell goes to DIR/cells.jsonl as soon as it is known:
what was predicted from sizes alone, before the process began, what torch's allocator held at most, and by which part.

Exit 0: every cell was measured. 1: one was not, or time was over.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from surefoot.learner.footprint import ModelShape, Work, predict
from surefoot.run.memory_profile import count_adapter, count_parameters, run_cell

SHAPES = {
    "135M": ModelShape(0, 30, 576, 1536, 9, 3, 64, 49_152),
    "0.6B": ModelShape(0, 28, 1024, 3072, 16, 8, 128, 151_936, qk_norm=True),
    "1.7B": ModelShape(0, 28, 2048, 6144, 16, 8, 128, 151_936, qk_norm=True),
}
"""SmolLM2-135M, Qwen3-0.6B and Qwen3-1.7B."""
WORK = Work(device="cuda", width=2, groups=16, siblings=8, prompt=128, completion=384, rows=128, fused=True)
RANK = 16
CELLS_AT_ONCE = 3
"""On one GPU: torch's allocator counts each process for itself, and 139 GiB are enough for three."""
ALL_S, CELL_S, TINY_S = 145.0, 100.0, 600.0
MORE = ("full-0.6B-checkpointed-8bit", "full-1.7B-long")
"""Chosen once the formula was fixed, and measured once."""


@dataclass(frozen=True)
class Cell:
    """One setting."""

    name: str
    shape: ModelShape
    work: Work
    rank: int | None = None


def cells() -> list[Cell]:
    """The six, and the two."""
    found = []
    for size, shape in SHAPES.items():
        found.append(Cell(f"full-{size}", shape, WORK))
        found.append(Cell(f"lora-{size}", shape, replace(WORK, fused=False), RANK))
    checkpointed = replace(WORK, recomputes=True, optim="adamw_8bit", reference=True)
    long = replace(WORK, groups=4, siblings=16, rows=64, prompt=512, completion=1024)
    return [*found, Cell(MORE[0], SHAPES["0.6B"], checkpointed), Cell(MORE[1], SHAPES["1.7B"], long)]


def tiny(cell: Cell) -> Cell:
    """The same on a CPU, of a size that nobody waits for."""
    shape = replace(cell.shape, layers=2, hidden=64, intermediate=128, heads=4, kv_heads=2, head_dim=16, vocab=512)
    work = replace(cell.work, device="cpu", groups=2, siblings=2, rows=4, prompt=8, completion=16, fused=False)
    return replace(cell, shape=shape, work=work, rank=None if cell.rank is None else 2)


def measured(cell: Cell, left_s: float) -> dict[str, Any]:
    """One line: the prediction, then what was found."""
    shape = replace(cell.shape, parameters=count_parameters(cell.shape))
    work = cell.work if cell.rank is None else replace(cell.work, **count_adapter(shape, cell.rank))
    before = predict(shape, work)
    began = time.monotonic()
    found = run_cell(shape, work, cell.rank, timeout_s=max(1.0, min(CELL_S, left_s)))
    line = {"cell": cell.name, "predicted": before.peak, "moment": before.moment, "parts": asdict(before), **found}
    line["shape"], line["work"], line["seconds"] = asdict(shape), asdict(work), round(time.monotonic() - began, 1)
    if "peak" in found:
        line["ratio"] = before.peak / found["peak"]
    return line


def main() -> int:
    """Measure the cells, write the lines, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--cells", default="", metavar="NAMES", help="names of cells, separated by commas")
    parser.add_argument("--tiny", action="store_true", help="small models on the CPU")
    args = parser.parse_args()
    named = [name for name in args.cells.split(",") if name]
    chosen = [cell for cell in cells() if not named or cell.name in named]
    if unknown := set(named) - {cell.name for cell in chosen}:
        parser.error(f"no cell {', '.join(sorted(unknown))}; there are {', '.join(cell.name for cell in cells())}")
    args.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + (TINY_S if args.tiny else ALL_S)
    missing = 0
    with (
        ThreadPoolExecutor(1 if args.tiny else CELLS_AT_ONCE) as pool,
        (args.out / "cells.jsonl").open("a", encoding="utf-8") as file,
    ):
        work = [tiny(cell) for cell in chosen] if args.tiny else chosen
        for line in pool.map(lambda cell: measured(cell, until - time.monotonic()), work):
            file.write(json.dumps(line) + "\n")
            file.flush()
            missing += "peak" not in line
            told = f"{line['peak'] / 2**30:9.3f} GiB  x{line['ratio']:.3f}" if "peak" in line else line["error"][-300:]
            print(f"{line['cell']:30} predicted {line['predicted'] / 2**30:9.3f} GiB  measured {told}", flush=True)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
