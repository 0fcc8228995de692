"""Decoding: tokens per second of the embedded engine against Hugging Face `generate`, in one process.

    python benchmarks/decode.py [--batches 1,8,32,64,32d] [--tokens 64] [--pairs N]
    python benchmarks/decode.py --gpu [--batches 64,128,1024] [--tokens 128]

The same weights (ours are handed the other's parameters), float32, the same prompts, exactly as many new tokens for
every row on both sides, temperature 1. Batches are groups of 8 siblings, as in training; "32d" is 32 different
prompts, where nothing can be shared. Time is from prompts to tokens, prefill included. Before anything is timed both
sides decode greedily and must produce the same ids, a tie between two tokens aside.

With `--gpu`: CUDA, bfloat16, made-up weights of SmolLM2-135M's shape, prompts of 48 tokens, the engine with captured
graphs against the slow engine of the same tree. Before anything is timed both decode greedily in float32 and must say
the same.

Ours also returns the logprob of every token it draws; `generate` is not asked to.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ceilings import Ceilings, measure_ceilings
from method import DifferentWorkError, Journal, Sample, alternate, compare, dirt, medians, timed
from report import Row, common_arguments, goal_met, measured, publish

GOALS = {"32": 2.0}
BATCHES = {"1": 7, "8": 7, "32": 7, "64": 3, "32d": 3}
"""Batch: clean pairs. The slow ones have fewer; the table says how many."""
SIBLINGS = 8
TIE = 1e-3
"""Two logits closer than this may be ordered either way by two correct float32 programs."""

NOTE = (
    "SmolLM2-135M fp32, tokens per second on this CPU, prefill included, medians; peer: transformers `generate`, "
    "sdpa, dynamic cache, left-padded batch. Limit: the larger of weight bytes / measured bandwidth and operations / "
    "measured GEMM for every decode step, prefill not counted."
)

GPU_BATCHES = ("64", "128", "1024")
GPU_GOALS = {"64": 25_000, "128": 60_000, "1024": 130_000}
"""Rows: tokens per second, logprobs included."""
GPU_NOTE = (
    "made-up weights of SmolLM2-135M's shape in bf16, prompts of 48 tokens, 8 siblings each, 128 new tokens for every "
    "row, prefill and logprobs included, tokens per second on one GPU, medians; peer: the slow engine of the same tree."
)
SHAPE = {
    "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
    "vocab_size": 49152, "max_position_embeddings": 2048,
}  # fmt: skip

Prompts = list[tuple[int, ...]]
Ids = list[list[int]]


@dataclass(frozen=True)
class Bench:
    """A model and the questions."""

    policy: Any
    prompts: Prompts
    tokens: int

    def batch(self, name: str) -> Prompts:
        """`name` rows in groups of siblings; with a "d", all different."""
        rows = int(name.removesuffix("d"))
        share = 1 if name.endswith("d") else SIBLINGS
        return [self.prompts[i // share] for i in range(rows)]


def load_bench(model: str, tokens: int) -> Bench:
    """The model in float32, and arithmetic questions through its chat template."""
    import reasoning_gym

    from surefoot.learner.chat import ChatCodec
    from surefoot.learner.model import load_policy

    policy = load_policy(model, base=Path.cwd(), device="cpu", dtype="float32")
    codec = ChatCodec(policy.tokenizer, policy.stop_ids, policy.spec.vocab)
    made = reasoning_gym.create_dataset("basic_arithmetic", seed=0, size=64)
    return Bench(policy, [codec.encode_prompt([{"role": "user", "content": e["question"]}]) for e in made], tokens)


def our_decoder(bench: Bench, prompts: Prompts) -> Callable[[float, int], Ids]:
    """Temperature and seed to completions, by the embedded engine."""
    from surefoot.engines.embedded import EmbeddedEngine
    from surefoot.protocols import Request

    width = max(map(len, prompts)) + bench.tokens
    engine = EmbeddedEngine(bench.policy.spec, rows=len(prompts), max_width=width)
    engine.load_weights(dict(bench.policy.model.named_parameters()), 0)

    def decode(temperature: float, seed: int) -> Ids:
        requests = [
            Request(str(i), prompt, bench.tokens, temperature, frozenset(), seed * 1000 + i)
            for i, prompt in enumerate(prompts)
        ]
        return [list(c.token_ids) for c in engine.generate(requests)]

    return decode


def peer_decoder(bench: Bench, prompts: Prompts) -> Callable[[float, int], Ids]:
    """The same by `generate`."""
    import torch
    from transformers import GenerationConfig

    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    model = bench.policy.model
    model.generation_config = GenerationConfig()  # what the model's folder asks for must not bend the comparison

    def decode(temperature: float, seed: int) -> Ids:
        torch.manual_seed(seed)
        chance = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        config = GenerationConfig(
            max_new_tokens=bench.tokens, eos_token_id=None, pad_token_id=0,
            **(chance if temperature > 0 else {"do_sample": False}),
        )  # fmt: skip
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, generation_config=config)
        completions: Ids = out[:, width:].tolist()
        return completions

    return decode


def check_greedy(bench: Bench, prompts: Prompts, ours: Ids, peer: Ids) -> int:
    """Rows that are equal; a row that differs must part at a tie."""
    equal = 0
    for prompt, left, right in zip(prompts, ours, peer, strict=True):
        if left == right:
            equal += 1
            continue
        at = next(i for i, (a, b) in enumerate(zip(left, right, strict=True)) if a != b)
        gap = logit_gap(bench.policy.model, [*prompt, *left[:at]], left[at], right[at])
        if gap > TIE:
            raise DifferentWorkError(f"greedy ids differ at token {at} where the logits differ by {gap:.4f}: no ratio")
    return equal


def logit_gap(model: Any, prefix: Sequence[int], a: int, b: int) -> float:
    """How far apart two candidates for the next token are."""
    import torch

    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([list(prefix)])).logits[0, -1]
    return abs(float(logits[a] - logits[b]))


def run_batch(name: str, bench: Bench, args: argparse.Namespace, journal: Journal, top: Ceilings) -> Row:
    """One batch size: proof, warm-up, pairs."""
    prompts = bench.batch(name)
    ours, peer = our_decoder(bench, prompts), peer_decoder(bench, prompts)
    equal = check_greedy(bench, prompts, ours(0.0, 0), peer(0.0, 0))  # also the warm-up
    journal.write("proof", {"cell": name, "rows": len(prompts), "greedy_rows_equal": equal, "rest": "parted at a tie"})

    def side(label: str, decode: Callable[[float, int], Ids]) -> Callable[[], Sample]:
        return lambda: timed(label, lambda: {"tokens": [len(row) for row in decode(1.0, 1)], "rows": len(prompts)})

    pairs = alternate(
        side("embedded", ours), side("generate", peer), pairs=args.pairs or BATCHES.get(name, 3),
        redo=0 if args.allow_dirty else None, record=journal.pair(name),
    )  # fmt: skip
    ratio = compare(pairs, allow_dirty=args.allow_dirty)
    journal.write("ratio", {"cell": name, "ratio": str(ratio)})
    mine, theirs = (len(prompts) * bench.tokens / s for s in medians(pairs, allow_dirty=args.allow_dirty))
    parameters = sum(p.numel() for p in bench.policy.model.parameters())
    limit = len(prompts) / top.decode_step(parameters, len(prompts))
    goal = GOALS.get(name)
    return Row(
        "decode", f"batch {name.replace('d', ', all different')}", f"{mine:.0f} tok/s", f"HF {theirs:.0f} tok/s",
        f"{ratio}{dirt(pairs, allow_dirty=args.allow_dirty)}", f">= {goal:g}x" if goal else "-",
        goal_met(ratio, goal) if goal else None, f"{limit:.0f} tok/s, {mine / limit:.0%} reached", NOTE,
    )  # fmt: skip


def run_gpu_batch(name: str, nets: dict[str, Any], spec: Any, args: argparse.Namespace, journal: Journal) -> Row:
    """One number of rows: proof in float32, warm-up, pairs in bfloat16."""
    import torch

    from surefoot.engines.embedded import EmbeddedEngine
    from surefoot.engines.graphs import GraphedEngine
    from surefoot.protocols import Request

    rows = int(name)
    prompts = [tuple(3 + (977 * (i // SIBLINGS) + 31 * k) % 49_000 for k in range(48)) for i in range(rows)]

    def decoder(kind: type[EmbeddedEngine], dtype: str) -> Callable[[float, int], Ids]:
        engine = kind(
            spec,
            rows=rows,
            max_width=48 + args.tokens,
            device=args.device,
            dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[dtype],
        )
        engine.load_weights(nets[dtype], 0)

        def decode(temperature: float, seed: int) -> Ids:
            asked = [
                Request(str(i), prompt, args.tokens, temperature, frozenset(), seed * 10_000 + i)
                for i, prompt in enumerate(prompts)
            ]
            return [list(c.token_ids) for c in engine.generate(asked)]

        return decode

    exact = [decoder(kind, "fp32")(0.0, 0) for kind in (GraphedEngine, EmbeddedEngine)]
    equal = sum(one == two for one, two in zip(*exact, strict=True))
    journal.write("proof", {"cell": name, "rows": rows, "greedy_rows_equal_in_float32": equal})
    if equal < 0.95 * rows:
        raise DifferentWorkError(f"{equal} of {rows} greedy rows are equal in float32: no ratio")
    ours, peer = decoder(GraphedEngine, "bf16"), decoder(EmbeddedEngine, "bf16")
    for warm in (ours, peer):
        warm(1.0, 0)

    def side(label: str, decode: Callable[[float, int], Ids]) -> Callable[[], Sample]:
        return lambda: timed(label, lambda: {"tokens": [len(row) for row in decode(1.0, 1)], "rows": rows})

    pairs = alternate(
        side("graphs", ours), side("slow", peer), pairs=args.pairs or 3, redo=0 if args.allow_dirty else None,
        record=journal.pair(name),
    )  # fmt: skip
    ratio = compare(pairs, allow_dirty=args.allow_dirty)
    mine, theirs = (rows * args.tokens / s for s in medians(pairs, allow_dirty=args.allow_dirty))
    goal = GPU_GOALS.get(name)
    return Row(
        "decode, GPU", f"{name} rows", f"{mine:.0f} tok/s", f"slow engine {theirs:.0f} tok/s",
        f"{ratio}{dirt(pairs, allow_dirty=args.allow_dirty)}", f">= {goal} tok/s" if goal else "-",
        mine >= goal if goal else None, note=GPU_NOTE,
    )  # fmt: skip


def gpu(args: argparse.Namespace) -> int:
    """Every number of rows on a GPU, then the table."""
    from surefoot.learner.model import made_up_net

    net, spec = made_up_net(SHAPE, args.layers, args.device, "float32")
    plain = {name: value.detach() for name, value in net.named_parameters()}
    nets = {"fp32": plain, "bf16": {name: value.bfloat16() for name, value in plain.items()}}
    journal = Journal("decode_gpu", {"arguments": vars(args)})
    rows = []
    for name in (args.batches or ",".join(GPU_BATCHES)).split(","):
        rows.append(run_gpu_batch(name, nets, spec, args, journal))
        print(*rows[-1].cells(), sep="  ", flush=True)
    return publish(rows, args.rows)


def main() -> int:
    """Every batch size, then the table."""
    parser = common_arguments(__doc__, pairs=7)
    parser.add_argument("--batches")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--gpu", action="store_true", help="captured graphs against the slow engine, on a GPU")
    parser.add_argument(
        "--device", default="cuda", help="with --gpu: cpu tries the same without one, and shows nothing"
    )
    parser.add_argument("--layers", type=int, default=30, help="with --gpu: fewer for a trial")
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    args.tokens = args.tokens or (128 if args.gpu else 64)
    if args.gpu:
        return gpu(args)
    top = measure_ceilings(args.threads)
    print(f"ceilings: {top}", flush=True)
    bench = load_bench(args.model, args.tokens)
    journal = Journal("decode", {"arguments": vars(args), "ceilings": top})
    return publish(
        measured(args.batches or ",".join(BATCHES), lambda name: run_batch(name, bench, args, journal, top)), args.rows
    )


if __name__ == "__main__":
    sys.exit(main())
