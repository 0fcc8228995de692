"""Durability: how close a whole, hashed, synced checkpoint comes to what the disk can do.

    python benchmarks/durability.py [--pairs 6] [--folder DIR] [--millions 135]

Ours is `save_training_checkpoint`: safetensors, SHA-256 of every file, fsync of files and folders, manifest, rename.
The peer is the disk itself: the same number of bytes, written from memory into one file and synced once. Both write to
the same folder, in turns; what they wrote is deleted outside the clock. Two cells: weights alone, and weights with
AdamW's two moments.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from method import MIN_PAIRS, Journal, Pair, Sample, alternate, dirt, timed, usable
from report import Row, common_arguments, publish

GOAL = 0.80
BLOCK = 4 << 20
NOTE = (
    "MB/s (10^6 bytes) from first byte to last fsync; the peer writes as many bytes into one file and syncs it. "
    "The ratio is our rate over the disk's, from the total seconds of all pairs: a disk answers in bursts (a write "
    "that follows one of the same kind takes over its blocks), so single pairs say little."
)


class NoTokenizer:
    """A checkpoint without tokenizer files: they are kilobytes, and need a hub."""

    def save_pretrained(self, folder: Path) -> None:
        """Nothing to write."""


def make_learner(millions: int, *, moments: bool) -> Any:
    """A learner of SmolLM2-135M's shape, or cut to fewer layers, with numbers in it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    from surefoot.learner.grpo import GRPOLearner, LearnerSettings
    from surefoot.maths.losses import LossSettings

    logging.disable_progress_bar()
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3,
        num_hidden_layers=max(1, round((millions - 28.3) / 3.54)), tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        net = LlamaForCausalLM(config)
    net = net.to_empty(device="cpu").float().eval()
    net.tie_weights()
    for number, parameter in enumerate(net.parameters()):
        parameter.data.uniform_(-0.1, 0.1, generator=torch.Generator().manual_seed(number))
    settings = LearnerSettings(LossSettings(), 1e-5, 10, 9, 1.0, 0)
    learner = GRPOLearner(net, settings)
    if moments:
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        learner.optimiser.step()
        learner.optimiser.zero_grad(set_to_none=True)
    return learner


def ours(learner: Any, folder: Path) -> Sample:
    """One checkpoint."""
    from surefoot.learner.checkpoint import save_training_checkpoint

    target = folder / "step_1"

    def save() -> dict[str, int]:
        save_training_checkpoint(learner, NoTokenizer(), target, step=1)
        return {}

    sample = timed("surefoot", save)
    size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
    shutil.rmtree(target)
    os.sync()  # the deletion is not to be paid by the next one
    return Sample(sample.side, sample.seconds, {"megabytes": round(size / 1e6)}, {"bytes": size})


def plain(source: memoryview, folder: Path) -> Sample:
    """The same bytes, one file, one fsync."""
    target = folder / "plain.bin"

    def write() -> dict[str, int]:
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            for at in range(0, len(source), BLOCK):
                file.write(source[at : at + BLOCK])
            os.fsync(file.fileno())
        return {"megabytes": round(len(source) / 1e6)}

    sample = timed("disk", write)
    target.unlink()
    os.sync()
    return sample


def source_bytes(learner: Any) -> memoryview:
    """As many bytes as a checkpoint of this learner has, from memory that is there already."""
    import torch

    from surefoot.learner.checkpoint import capture

    state = capture(learner)
    tensors = [*state.weights.values(), *(value for kept in state.moments.values() for value in kept.values())]
    flat = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors])
    return memoryview(flat.numpy())


def measure(name: str, learner: Any, folder: Path, args: Any, journal: Journal) -> Row:
    """One row."""
    source = source_bytes(learner)
    pairs = alternate(
        lambda: ours(learner, folder), lambda: plain(source, folder), pairs=args.pairs or 6,
        redo=0 if args.allow_dirty else None, record=journal.pair(name),
    )  # fmt: skip
    return as_row(name, pairs, len(source) / 1e6, allow_dirty=args.allow_dirty)


def as_row(name: str, pairs: list[Pair], megabytes: float, *, allow_dirty: bool) -> Row:
    """Rates, and our rate over the disk's; without enough clean pairs there is no ratio and no goal is reached."""
    used = usable(pairs, allow_dirty=allow_dirty)
    shown = used or pairs
    sides = [sum(pair.ours.seconds for pair in shown), sum(pair.peer.seconds for pair in shown)]
    words = [f"{megabytes * len(shown) / seconds:.0f} MB/s" for seconds in sides]
    if len(used) < MIN_PAIRS:
        why = f"no ratio: {len(used)} usable of {len(pairs)} pairs" + dirt(pairs, allow_dirty=allow_dirty)
        return Row("durability", name, words[0], words[1], why, f">= {GOAL:.2f}x", False, note=NOTE)
    low, high = interval(used)
    ratio = f"{total_ratio(used):.2f}x [{low:.2f}, {high:.2f}] n={len(used)}" + dirt(pairs, allow_dirty=allow_dirty)
    return Row("durability", name, words[0], words[1], ratio, f">= {GOAL:.2f}x", total_ratio(used) >= GOAL, note=NOTE)


def total_ratio(pairs: Sequence[Pair]) -> float:
    """Our rate over the disk's, over all pairs together."""
    return sum(pair.peer.seconds for pair in pairs) / sum(pair.ours.seconds for pair in pairs)


def interval(pairs: Sequence[Pair], *, draws: int = 10_000) -> tuple[float, float]:
    """95 % percentile interval of that, from resampling whole pairs."""
    stream = random.Random(0)
    found = sorted(total_ratio(stream.choices(pairs, k=len(pairs))) for _ in range(draws))
    return found[int(0.025 * draws)], found[math.ceil(0.975 * draws) - 1]


def main() -> int:
    """Measure and print."""
    parser = common_arguments(__doc__, pairs=6)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder without it")
    parser.add_argument("--millions", type=int, default=135, help="parameters, in millions")
    args = parser.parse_args()
    journal = Journal("durability", {"pairs": args.pairs, "millions": args.millions, "block": BLOCK})
    rows = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for moments in (False, True):
            learner = make_learner(args.millions, moments=moments)
            count = sum(parameter.numel() for parameter in learner.net.parameters())
            name = f"{count / 1e6:.0f} M fp32, {'weights and moments' if moments else 'weights'}"
            rows.append(measure(name, learner, Path(folder), args, journal))
    return publish(rows, args.rows)


if __name__ == "__main__":
    sys.exit(main())
