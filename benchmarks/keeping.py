"""Keeping: what journal, ledger, fsync, hashing and checkpoints cost a real run, as a share of its steps.

    python benchmarks/keeping.py [--steps 60] [--smollm2-steps 6]
    python benchmarks/keeping.py --gpu --figure keeping.json      P23: SmolLM2-135M's shape on CUDA, random weights

Everything is in one run: `timing/keep` is the time that the loop spends on the disk (drawing a batch, journaling it,
settling it, saving), `step_time` the rest of a step. A checkpoint is written between two steps and counted in the step
after it, so the last step of a run has to be one more than the last save. Three shares come out of that:

    without checkpoints     of the steps that follow no save
    with checkpoints        the same, and one checkpoint every `save_minutes` (10 by default): what a long run pays
    as it was run           with a checkpoint every few steps, so that there are some to measure

The goal is on the second. The runs with SmolLM2 on a CPU save at their end only: without checkpoints, and they say so.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

from load import Load, LoadProbe
from method import Journal
from report import Row, common_arguments, publish

from surefoot.config import Config
from surefoot.tracking.metrics import read_metrics

ROOT = Path(__file__).parents[1]
SAVE_S = 60 * float(Config.model_fields["save_minutes"].default)
KEPT = "journal, ledger, fsync, hashes and checkpoints on a GPU"
NOTE = (
    "seconds that the loop spends on journal, ledger, fsync, hashing and checkpoints, per second of training, in one "
    f"run through `surefoot train`; with checkpoints means one every {SAVE_S / 60:g} minutes, the default."
)


@dataclass(frozen=True)
class Shares:
    """What keeping cost, over the time of the steps."""

    plain: float
    with_checkpoints: float
    as_run: float
    worst: float
    saves: tuple[float, ...]
    """Seconds of each checkpoint."""
    steps: int
    seconds: float


def shares(rows: Sequence[dict[str, float]], save_steps: int) -> Shares:
    """From the training lines of one run; a step that follows a save pays for it."""
    paying = [row for row in rows if save_steps and row["step"] > 1 and (row["step"] - 1) % save_steps == 0]
    others = [row for row in rows if row not in paying]
    usual = median(row["timing/keep"] for row in others)
    saves = tuple(max(0.0, row["timing/keep"] - usual) for row in paying)
    seconds = sum(row["step_time"] for row in rows)
    plain = sum(row["timing/keep"] for row in others) / sum(row["step_time"] for row in others)
    return Shares(
        plain, plain + (mean(saves) if saves else 0.0) / SAVE_S, sum(row["timing/keep"] for row in rows) / seconds,
        max(row["timing/keep"] / row["step_time"] for row in rows), saves, len(rows), seconds,
    )  # fmt: skip


def train(words: Sequence[str], folder: Path, cwd: Path = ROOT) -> tuple[list[dict[str, float]], Load]:
    """One run through the real command: its training lines, and who else used the machine."""
    argv = [sys.executable, "-m", "surefoot", "train", *words, f"output_dir={folder}"]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    probe = LoadProbe()
    mark = probe.mark()
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False, cwd=cwd, env={**os.environ, "PYTHONPATH": path}
    )
    load = probe.since(mark)
    if done.returncode not in (0, 1):  # 1 is a verdict too: it learned too little
        raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"[-3000:])
    return [row for row in read_metrics(folder / "metrics.jsonl") if "step_time" in row], load


@dataclass(frozen=True)
class Cell:
    """One run to measure."""

    name: str
    words: Sequence[str]
    goal: float
    save_steps: int = 0
    cwd: Path = ROOT


def measure(cell: Cell, folder: Path, journal: Journal, *, allow_dirty: bool) -> tuple[Row, Shares, Load]:
    """One line; a run on a busy machine reaches no goal unless that is allowed."""
    rows, load = train(cell.words, folder, cell.cwd)
    found = shares(rows, cell.save_steps)
    journal.write("run_of", {"cell": cell.name, "words": list(cell.words), "rows": rows, "load": load})
    busy = f", others used {load.share:.0%}" if load.dirty else ""
    saved = f"{found.with_checkpoints:.2%} with checkpoints" if found.saves else "no checkpoint in it"
    met = found.with_checkpoints <= cell.goal and (allow_dirty or not load.dirty)
    row = Row(
        "keeping", cell.name, f"{found.plain:.2%} of {found.seconds:.0f} s, {saved}{busy}", goal=f"<= {cell.goal:.0%}",
        met=met, limit=f"worst of {found.steps} steps {found.worst:.1%}", note=NOTE,
    )  # fmt: skip
    return row, found, load


# -- SmolLM2-135M's shape, without its weights ----------------------------------------------------------


class Shape(NamedTuple):
    """A model's dimensions, for made-up weights."""

    kind: str
    """Of `transformers`: its configuration class."""
    vocab: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head: int


SHAPES = {
    "135m": Shape("LlamaConfig", 49_152, 30, 576, 1536, 9, 3, 64),
    "0.5b": Shape("Qwen3Config", 151_936, 28, 1024, 3072, 16, 8, 128),
    "tiny": Shape("Qwen3Config", 512, 2, 32, 64, 4, 2, 8),
}
"""SmolLM2-135M's, Qwen3-0.6B's, and one that a processor steps in no time."""


def write_world(folder: Path, *, layers: int = 0, tasks: int = 400, shape: str = "135m", words: int = 48) -> None:
    """A model folder of that shape with random weights, a tokenizer of as many words, tasks and a reward.

    Args:
        layers: fewer than the shape has, for a trial.
        words: of each prompt; a word is a token.
    """
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    one = SHAPES[shape]
    entries = [f"w{n}" for n in range(one.vocab - 3)]
    vocabulary = {name: number for number, name in enumerate(["<pad>", "<unk>", "<end>", *entries])}
    kernel = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    kernel.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<end>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=kernel, **special).save_pretrained(folder / "model")
    config = getattr(transformers, one.kind)(
        hidden_size=one.hidden, intermediate_size=one.intermediate, num_attention_heads=one.heads,
        num_key_value_heads=one.kv_heads, head_dim=one.head, vocab_size=one.vocab,
        num_hidden_layers=layers or one.layers, max_position_embeddings=2048, rope_theta=100_000.0,
        tie_word_embeddings=True, pad_token_id=0, bos_token_id=None, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    dice = random.Random(0)
    lines = [{"id": f"t{n}", "prompt": " ".join(dice.choices(entries, k=words))} for n in range(tasks)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "reward.py").write_text(
        "import zlib\n\n\ndef grade(prompts, completions, **columns):\n"
        "    return [zlib.crc32(text.encode()) % 1000 / 1000 for text in completions]\n"
    )


def shape_cell(args: Any, folder: Path) -> Cell:
    """The run with it; one step more than the last save."""
    write_world(folder, layers=args.layers)
    name = f"SmolLM2-135M's shape on {args.device}" + (f", {args.layers} layers" if args.layers != 30 else "")
    keys = {
        "model": "model", "tasks": "tasks.jsonl", "reward_funcs": "[\"reward.py:grade\"]", "device": args.device,
        "tasks_per_step": args.shape_tasks, "num_generations": 8, "max_completion_length": args.shape_tokens,
        "max_steps": args.shape_steps + 1, "save_steps": args.shape_saves, "eval_steps": 0, "eval_on_start": "false",
        "save_best": "false", "preflight_tasks": 0, "guard.mode": "off", "learning_rate": "1e-5",
    }  # fmt: skip
    words = [f"{key}={value}" for key, value in keys.items()]
    return Cell(name, words, 0.02, save_steps=args.shape_saves, cwd=folder)


def machine(device: str) -> str:
    """What it ran on, in words."""
    if device != "cuda":
        return "no GPU"
    import torch

    return str(torch.cuda.get_device_name())


def figure(cell: Cell, found: Shares, load: Load, busy: float, args: Any) -> dict[str, Any]:
    """A row for docs/figures.json (`scripts/reliability_table.py --add`); `busy` is the load before it began."""
    told = (
        f"{found.with_checkpoints:.2%} of the step time, {cell.goal:.0%} promised: {found.plain:.2%} in every step, "
        f"and a checkpoint of {mean(found.saves):.2f} s ({len(found.saves)} measured) every {SAVE_S / 60:g} min; "
        f"worst step {found.worst:.1%}; others used {load.share:.0%} of the cores"
    )
    sizes = (
        f"{args.shape_tasks} tasks x 8 answers x {args.shape_tokens} tokens, {found.seconds / found.steps:.1f} s a step"
    )
    return {
        "figure": "P23", "what": f"{KEPT}: share of the step time", "times": found.steps, "seeds": [0, 0], "tests": [],
        "bad": int(found.with_checkpoints > cell.goal), "run": "benchmarks/keeping.py",
        "date": date.today().isoformat(), "seconds": None, "cores": os.cpu_count(), "load": busy,
        "notes": [told, f"{cell.name}, {machine(args.device)}; {sizes}"],
    }  # fmt: skip


def arguments() -> Any:
    """What was typed."""
    parser = common_arguments(__doc__, pairs=1)
    parser.add_argument("--steps", type=int, default=60, help="steps of the built-in run")
    parser.add_argument("--smollm2-steps", type=int, default=6, help="steps with SmolLM2-135M; 0 leaves it out")
    parser.add_argument("--gpu", action="store_true", help="only the run with its shape, on CUDA")
    parser.add_argument("--figure", type=Path, help="with --gpu: write the row for docs/figures.json here")
    parser.add_argument("--device", default="cuda", help="cpu tries the same run without a GPU; it makes no figure")
    for name, value in (("steps", 30), ("saves", 10), ("tasks", 8), ("tokens", 256)):
        parser.add_argument(f"--shape-{name}", type=int, default=value, help=f"{name} of that run")
    parser.add_argument("--layers", type=int, default=30, help="fewer for a trial")
    args = parser.parse_args()
    if args.figure and (not args.gpu or args.device != "cuda" or args.layers != 30):
        parser.error("--figure needs --gpu with CUDA and all 30 layers: P23 is about a GPU")
    return args


def main() -> int:
    """Measure and print."""
    args = arguments()
    journal = Journal("keeping", {"steps": args.steps, "smollm2_steps": args.smollm2_steps, "gpu": args.gpu})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.gpu:
            busy, cell = round(os.getloadavg()[0], 2), shape_cell(args, folder)
            row, found, load = measure(cell, folder / "run", journal, allow_dirty=args.allow_dirty)
            line = json.dumps(figure(cell, found, load, busy, args), sort_keys=True)
            print(f"figure: {line}", flush=True)
            if args.figure:
                args.figure.write_text(line + "\n", encoding="utf-8")
            return publish([row], args.rows)
        cells = [Cell("built-in run", [f"max_steps={args.steps}", "save_steps=20"], 0.10, save_steps=20)]
        if args.smollm2_steps:
            words = ["configs/smollm2.toml", f"max_steps={args.smollm2_steps}", "eval_steps=0", "eval_on_start=false"]
            cells.append(Cell("SmolLM2-135M", words, 0.02))
        rows = [
            measure(cell, folder / cell.name.replace(" ", "_"), journal, allow_dirty=args.allow_dirty)[0]
            for cell in cells
        ]
    return publish(rows, args.rows)


if __name__ == "__main__":
    sys.exit(main())
