"""Decoding: tokens per second of the embedded engine against Hugging Face `generate`, in one process.

    python benchmarks/decode.py [--batches 1,8,32,64,32d] [--tokens 64] [--pairs N]

The same weights (ours are handed the other's parameters), float32, the same prompts, exactly as many new tokens for
every row on both sides, temperature 1. Batches are groups of 8 siblings, as in training; "32d" is 32 different
prompts, where nothing can be shared. Time is from prompts to tokens, prefill included. Before anything is timed both
sides decode greedily and must produce the same ids, a tie between two tokens aside.

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


def main() -> int:
    """Every batch size, then the table."""
    parser = common_arguments(__doc__, pairs=7)
    parser.add_argument("--batches", default=",".join(BATCHES))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    top = measure_ceilings(args.threads)
    print(f"ceilings: {top}", flush=True)
    bench = load_bench(args.model, args.tokens)
    journal = Journal("decode", {"arguments": vars(args), "ceilings": top})
    return publish(measured(args.batches, lambda name: run_batch(name, bench, args, journal, top)), args.rows)


if __name__ == "__main__":
    sys.exit(main())
