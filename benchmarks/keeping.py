"""Keeping: what journal, ledger, fsync, hashing and checkpoints cost a real run, as a share of its steps.

    python benchmarks/keeping.py [--steps 60] [--smollm2-steps 6]

Both sides are in one run: `timing/keep` is the time that the loop spends on the disk (drawing a batch, journaling it,
settling it, saving), `step_time` the whole step. The built-in run saves every 20 steps and at its best evaluations; the
run with SmolLM2-135M saves at its end only, which is not counted: `durability.py` measures a checkpoint by itself.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from load import Load, LoadProbe
from method import Journal
from report import Row, common_arguments, publish

from surefoot.tracking.log import read_metrics

ROOT = Path(__file__).parents[1]
NOTE = (
    "seconds that the loop spends on journal, ledger, fsync, hashing and checkpoints, per second of training, in one "
    "run through `surefoot train`; the worst step is the one with the largest share."
)


def train(words: Sequence[str], folder: Path) -> tuple[list[dict[str, float]], Load]:
    """One run through the real command: its training lines, and who else used the machine."""
    argv = [sys.executable, "-m", "surefoot", "train", *words, f"output_dir={folder}"]
    probe = LoadProbe()
    mark = probe.mark()
    done = subprocess.run(argv, capture_output=True, text=True, check=False, cwd=ROOT)
    load = probe.since(mark)
    if done.returncode not in (0, 1):  # 1 is a verdict too: it learned too little
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"[-3000:])
    return [row for row in read_metrics(folder / "metrics.jsonl") if "step_time" in row], load


def share(rows: Sequence[dict[str, float]]) -> tuple[float, float]:
    """Time on the disk over time in steps: of all of them together, and of the worst."""
    single = [row["timing/keep"] / row["step_time"] for row in rows]
    return sum(row["timing/keep"] for row in rows) / sum(row["step_time"] for row in rows), max(single)


def measure(cell: str, words: Sequence[str], goal: float, folder: Path, journal: Journal, *, allow_dirty: bool) -> Row:
    """One line; a run on a busy machine reaches no goal unless that is allowed."""
    rows, load = train(words, folder)
    whole, worst = share(rows)
    journal.write("run_of", {"cell": cell, "words": list(words), "rows": rows, "load": load})
    busy = f", others used {load.share:.0%}" if load.dirty else ""
    met = whole <= goal and (allow_dirty or not load.dirty)
    return Row(
        "keeping", cell, f"{whole:.2%} of {sum(row['step_time'] for row in rows):.0f} s{busy}", goal=f"<= {goal:.0%}",
        met=met, limit=f"worst of {len(rows)} steps {worst:.1%}", note=NOTE,
    )  # fmt: skip


def main() -> int:
    """Measure and print."""
    parser = common_arguments(__doc__, pairs=1)
    parser.add_argument("--steps", type=int, default=60, help="steps of the built-in run")
    parser.add_argument("--smollm2-steps", type=int, default=6, help="steps with SmolLM2-135M; 0 leaves it out")
    args = parser.parse_args()
    journal = Journal("keeping", {"steps": args.steps, "smollm2_steps": args.smollm2_steps})
    cells = [("built-in run", [f"max_steps={args.steps}", "save_steps=20"], 0.10)]
    if args.smollm2_steps:
        words = ["configs/smollm2.toml", f"max_steps={args.smollm2_steps}", "eval_steps=0", "eval_on_start=false"]
        cells.append(("SmolLM2-135M", words, 0.02))
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            measure(cell, words, goal, Path(folder) / cell.replace(" ", "_"), journal, allow_dirty=args.allow_dirty)
            for cell, words, goal in cells
        ]
    return publish(rows, args.rows)


if __name__ == "__main__":
    sys.exit(main())
