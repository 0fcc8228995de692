"""Seconds per training step, end to end: surefoot against TRL's GRPOTrainer on this CPU.

    python benchmarks/end_to_end.py [--cells 1x32,4x64] [--pairs N] [--cache FOLDER]
    python benchmarks/end_to_end.py --gpu [--against TREE/src] [--cells 16x128:135m,8x256:0.5b]

SmolLM2-135M in float32 on both sides, the same tasks in the same order, 8 generations per task, exactly 32 or 64 new
tokens (nobody may stop early), the same reward function, AdamW with the same numbers, loss dapo, beta 0, temperature 1,
no gradient checkpointing, the same threads. Each side is a process of its own and runs its own whole loop: ours
`surefoot.loop.train`, theirs `GRPOTrainer.train`; between two steps it waits for its turn.

A step is everything from one step's start to the next one's: sampling, rewards, loss, backward, optimiser, handing the
new weights to the sampler, bookkeeping. The first steps are warm-up and stand in a column of their own.

With `--gpu`: CUDA, bfloat16, made-up weights of a model's shape. The peer is then surefoot too: the same tree with
`cuda_kernels = false`, or the tree whose `src` is named.

TRL on a CPU is not TRL's home ground, and its vLLM mode is not used here: read every ratio with "on this CPU".
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ceilings import Ceilings, measure_ceilings, measure_gpu_ceilings
from method import RESULTS, Journal, Sample, alternate, compare, dirt, medians
from report import Row, common_arguments, goal_met, measured, publish
from sides import Side

GOAL = 3.0
GENERATIONS = 8
LEARNING_RATE = 1e-6
WARMUP = 2
CELLS = {"1x32": 7, "1x64": 7, "4x32": 5, "4x64": 3}
"""tasks x new tokens: clean pairs. The slow cells have fewer; the table says how many."""
GPU_CELLS = ("16x128:135m", "8x256:0.5b")
"""tasks x new tokens: the shape."""
GPU_NOTE = (
    "made-up weights of SmolLM2-135M's shape and of a Qwen3 shape with 0.6 billion parameters, bf16 over float32 "
    "masters, prompts of 48 tokens, exactly as many new ones for every row, on one GPU; seconds per step, medians. The "
    "peer is surefoot too: see the cell. Limit as on a CPU, by a measured copy and a measured bf16 GEMM; keys and "
    "values are not in it."
)

NOTE = (
    "SmolLM2-135M fp32, seconds per step on this CPU, medians. TRL 1.16 as its guide tunes it for one device without "
    "vLLM: whole batch at once (no accumulation, hence no second scoring pass), gradient checkpointing off, sdpa, "
    "fused AdamW, logging and saving off. Limit: prefill and training operations / measured GEMM, decode by the larger "
    "of weight bytes / measured bandwidth and operations / GEMM, optimiser bytes / bandwidth."
)


@dataclass(frozen=True)
class Cell:
    """One shape of the comparison."""

    tasks: int
    tokens: int

    @classmethod
    def of(cls, name: str) -> Cell:
        """From "4x64"."""
        tasks, tokens = name.partition(":")[0].split("x")
        return cls(int(tasks), int(tokens))

    @property
    def rollouts(self) -> int:
        """Completions per step."""
        return self.tasks * GENERATIONS


def reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """A cheap mark that differs from text to text, so that no group is without a gradient."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [zlib.crc32(text.encode()) % 1000 / 1000 for text in texts]


def fingerprint(prompts: Sequence[Sequence[int]]) -> str:
    """Of the prompts' token ids, in order."""
    return hashlib.sha256(json.dumps([list(p) for p in prompts]).encode()).hexdigest()[:16]


def first_row(model: Any) -> list[float]:
    """A few weights, to see that a step reached them."""
    row: list[float] = next(model.parameters()).detach()[0, :16].tolist()
    return row


def prepare(cache: Path, model: str, count: int) -> tuple[Path, Path]:
    """The model as a Hugging Face folder and the tasks as a file, made once per cache."""
    folder, tasks = cache / model.replace("/", "_"), cache / f"tasks_{count}.json"
    cache.mkdir(parents=True, exist_ok=True)
    if not (folder / "config.json").is_file():
        from surefoot.learner.model import load_policy

        policy = load_policy(model, base=Path.cwd(), device="cpu", dtype="float32")
        policy.model.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
    if not tasks.is_file():
        import reasoning_gym

        made = reasoning_gym.create_dataset("basic_arithmetic", seed=0, size=count)
        tasks.write_text(json.dumps([entry["question"] for entry in made]))
    return folder, tasks


def sample_from(side: Side) -> Sample:
    """One step of a side; what it says about its work becomes the proof."""
    said = side.step()
    return Sample(side.name, said.pop("seconds"), said["work"], {k: v for k, v in said.items() if k != "work"})


def run_cell(name: str, args: argparse.Namespace, paths: tuple[Path, Path], journal: Journal, top: Ceilings) -> Row:
    """Both sides of one cell, warmed up, alternating."""
    shape = [name, "--model", str(paths[0]), "--tasks", str(paths[1]), "--threads", str(args.threads)]
    shape += ["--continuous-batching"] if args.peer_continuous_batching else []
    here = Path(__file__).parent
    with (
        Side("surefoot", [str(here / "side_ours.py"), *shape], RESULTS / "end_to_end_ours.log") as ours,
        Side("trl", [str(here / "side_trl.py"), *shape], RESULTS / "end_to_end_trl.log") as peer,
    ):
        for side in (ours, peer):
            journal.write("side", {"cell": name, "side": side.name, "ready_s": side.ready_s, "setting": side.setting})
        first = {side.name: _warm_up(side, name, journal) for side in (ours, peer)}
        pairs = alternate(
            lambda: sample_from(ours), lambda: sample_from(peer),
            pairs=args.pairs or CELLS.get(name, 3), redo=0 if args.allow_dirty else None, record=journal.pair(name),
        )  # fmt: skip
    ratio = compare(pairs, allow_dirty=args.allow_dirty)
    journal.write("ratio", {"cell": name, "ratio": str(ratio), "first_step": first})
    mine, theirs = medians(pairs, allow_dirty=args.allow_dirty)
    cell, limit = Cell.of(name), limit_of(Cell.of(name), top, pairs[0].ours.facts)
    return Row(
        "end to end", f"{cell.tasks} task(s), {cell.tokens} tokens", f"{mine:.2f} s (first {first['surefoot']:.1f})",
        f"TRL {theirs:.2f} s (first {first['trl']:.1f})", f"{ratio}{dirt(pairs, allow_dirty=args.allow_dirty)}",
        f">= {GOAL:g}x", goal_met(ratio, GOAL), f"{limit:.2f} s, {limit / mine:.0%} reached", NOTE,
    )  # fmt: skip


def run_gpu_cell(name: str, args: argparse.Namespace, folder: Path, journal: Journal, top: Ceilings) -> Row:
    """Both sides of one cell on a GPU: two trees, or the fast and the plain path of one."""
    from keeping import write_world

    world = folder / name.partition(":")[2]
    if not world.is_dir():
        write_world(world, layers=args.layers, shape=world.name, tasks=64)
        lines = (world / "tasks.jsonl").read_text(encoding="utf-8").splitlines()
        (world / "tasks.json").write_text(json.dumps([json.loads(line)["prompt"] for line in lines]))
    here, label = Path(__file__).parent, "before" if args.against else "cuda_kernels = false"
    shape = [str(here / "side_ours.py"), name, "--model", str(world / "model"), "--tasks", str(world / "tasks.json")]
    shape += ["--threads", str(args.threads), "--device", args.device]
    path = os.pathsep.join([str(args.against), os.environ.get("PYTHONPATH", "")])
    with (
        Side("surefoot", shape, RESULTS / "end_to_end_gpu_ours.log") as ours,
        Side(
            label, [*shape, *([] if args.against else ["--plain"])], RESULTS / "end_to_end_gpu_peer.log",
            {"PYTHONPATH": path} if args.against else None,
        ) as peer,
    ):  # fmt: skip
        first = {side.name: _warm_up(side, name, journal) for side in (ours, peer)}
        pairs = alternate(
            lambda: sample_from(ours), lambda: sample_from(peer), pairs=args.pairs or 5,
            redo=0 if args.allow_dirty else None, record=journal.pair(name),
        )  # fmt: skip
    ratio = compare(pairs, allow_dirty=args.allow_dirty)
    mine, theirs = medians(pairs, allow_dirty=args.allow_dirty)
    facts, old = pairs[-1].ours.facts, pairs[-1].peer.facts
    journal.write("ratio", {"cell": name, "ratio": str(ratio), "first_step": first})
    for side in (facts, old):
        print(name, {key: value for key, value in side.items() if "timing" in key or "peak" in key}, flush=True)
    limit = limit_of(Cell.of(name), top, facts)
    return Row(
        "end to end, GPU", f"{Cell.of(name).rollouts} x {Cell.of(name).tokens} tokens, {world.name}",
        f"{mine:.3f} s, {facts['peak_gib']:.1f} GiB (first {first['surefoot']:.1f})",
        f"{label} {theirs:.3f} s, {old['peak_gib']:.1f} GiB", f"{ratio}{dirt(pairs, allow_dirty=args.allow_dirty)}",
        limit=f"{limit:.3f} s, {limit / mine:.0%} reached", note=GPU_NOTE,
    )  # fmt: skip


def _warm_up(side: Side, cell: str, journal: Journal) -> float:
    """Steps that are not compared; returns the first one's seconds."""
    samples = [sample_from(side) for _ in range(WARMUP)]
    for sample in samples:
        journal.write("warm-up", {"cell": cell, "side": side.name, "seconds": sample.seconds})
    return samples[0].seconds


def limit_of(cell: Cell, top: Ceilings, facts: Mapping[str, Any]) -> float:
    """Seconds per step that arithmetic allows, with each prompt computed once per group."""
    parameters, prompt_tokens = int(facts["parameters"]), int(facts["prompt_tokens"])
    sampled = cell.rollouts * cell.tokens
    decode = cell.tokens * top.decode_step(parameters, cell.rollouts)
    return top.forward(parameters, prompt_tokens) + decode + top.train_step(parameters, prompt_tokens + sampled)


def side_arguments() -> argparse.Namespace:
    """What both sides are started with."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cell", type=Cell.of)
    parser.add_argument("--model", required=True)
    parser.add_argument("--tasks", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--plain", action="store_true", help="ours without the fused path; nothing in TRL")
    parser.add_argument("--continuous-batching", action="store_true", help="TRL's own; ours has no other way")
    parser.add_argument("--micro", type=int, default=0, help="rows of one of TRL's microbatches; 0: the whole step")
    parser.add_argument("--bf16-weights", action="store_true", help="TRL without float32 masters")
    parser.add_argument("--lora", type=int, default=0, help="rank of an adapter on every linear layer; 0: all weights")
    parser.add_argument("--checkpointing", action="store_true", help="activations are computed again")
    return parser.parse_args()


def gpu(args: argparse.Namespace, folder: Path) -> int:
    """Every cell on a GPU, then the table."""
    top = measure_gpu_ceilings() if args.device == "cuda" else measure_ceilings(args.threads)
    print(f"ceilings: {top}", flush=True)
    journal = Journal("end_to_end_gpu", {"arguments": vars(args), "warm_up_steps": WARMUP, "ceilings": top})
    rows = measured(args.cells or ",".join(GPU_CELLS), lambda name: run_gpu_cell(name, args, folder, journal, top))
    return publish(rows, args.rows)


def main() -> int:
    """Every cell, then the table."""
    parser = common_arguments(__doc__, pairs=7)
    parser.add_argument("--cells", help="tasks x new tokens, comma-separated")
    parser.add_argument("--gpu", action="store_true", help="made-up weights on a GPU, against surefoot itself")
    parser.add_argument("--layers", type=int, default=0, help="with --gpu: fewer for a trial")
    parser.add_argument("--against", type=Path, help="with --gpu: the src folder of another tree of this project")
    parser.add_argument(
        "--device", default="cuda", help="with --gpu: cpu tries the same without one, and shows nothing"
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cache", type=Path, help="where the converted model is kept; a temporary folder without it")
    parser.add_argument("--peer-continuous-batching", action="store_true", help="TRL's own batching engine")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="surefoot-bench-") as scratch:
        if args.gpu:
            return gpu(args, args.cache or Path(scratch))
        paths = prepare(args.cache or Path(scratch), args.model, count=400)
        top = measure_ceilings(args.threads)
        print(f"ceilings: {top}", flush=True)
        journal = Journal("end_to_end", {"arguments": vars(args), "warm_up_steps": WARMUP, "ceilings": top})
        rows = measured(args.cells or ",".join(CELLS), lambda name: run_cell(name, args, paths, journal, top))
    return publish(rows, args.rows)


if __name__ == "__main__":
    sys.exit(main())
