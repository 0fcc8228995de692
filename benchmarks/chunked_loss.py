"""How much memory the chunked scoring saves: peak RSS of fresh processes, plain against chunked.

    python benchmarks/chunked_loss.py [--pairs 3] [--chunk-tokens N] [--threads 2]

Both sides score 8 x 512 tokens over a vocabulary of 49152 in float32, take a loss, and run backward. Each
sample is a fresh process; the sides alternate (A B B A ...). "Extra" is the peak RSS above the moment when
hidden states and head exist, less the size of the head's gradient on both sides (the plain peak comes before
that gradient exists, so this errs against us). No ratio is printed unless loss and gradients agree; the share
of the machine that others used is printed beside the times. Raw samples: benchmarks/results/chunked_loss.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROWS, WIDTH, HIDDEN, VOCABULARY = 8, 512, 576, 49152
GOAL = 10.0
RESULTS = Path(__file__).parent / "results" / "chunked_loss.jsonl"


def rss(field: str) -> int:
    """Bytes: `VmRSS` now, `VmHWM` the highest so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def reset_peak() -> None:
    """Make the current RSS the peak, so that only what follows counts."""
    Path("/proc/self/clear_refs").write_text("5")


def measure(side: str, chunk_tokens: int, threads: int) -> dict[str, Any]:
    """One side in this process: extra peak bytes, seconds, and fingerprints of loss and gradients."""
    import torch

    from surefoot.maths.logprobs import score_tokens, score_tokens_chunked

    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, HIDDEN, generator=generator).requires_grad_()
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
    with torch.no_grad():
        head.weight.copy_(0.05 * torch.randn(head.weight.shape, generator=generator))
    ids = torch.randint(0, VOCABULARY, (ROWS, WIDTH), generator=generator)
    pull = torch.randn(ROWS, WIDTH, generator=generator)
    (head(hidden[:1, :8]).sum() * 0).backward()  # libraries loaded
    for leaf in (hidden, head.weight):
        leaf.grad = None
    reset_peak()
    base, start = rss("VmRSS"), time.perf_counter()
    if side == "plain":
        logprobs = score_tokens(head(hidden), ids).logprobs
    else:
        logprobs = score_tokens_chunked(hidden, head.weight, ids, chunk_tokens=chunk_tokens).logprobs
    loss = (logprobs * pull).sum() / pull.numel()
    torch.autograd.backward(loss)
    seconds, peak = time.perf_counter() - start, rss("VmHWM")
    prints: dict[str, list[float]] = {}
    for name, leaf in (("hidden", hidden), ("weight", head.weight)):
        if leaf.grad is None:
            raise RuntimeError(f"{name} has no gradient")
        flat = leaf.grad.flatten().double()
        prints[name] = [flat.norm().item(), *flat[:: len(flat) // 64].tolist()]
    return {
        "side": side,
        "extra_bytes": peak - base - head.weight.nbytes,
        "seconds": seconds,
        "loss": loss.item(),
        "gradients": prints,
    }


def agree(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Largest difference of loss and gradients, relative to the gradient's largest sampled entry."""
    worst = abs(a["loss"] - b["loss"]) / max(1e-12, abs(a["loss"]))
    for name, left in a["gradients"].items():
        right = b["gradients"][name]
        worst = max(worst, abs(left[0] - right[0]) / left[0])
        scale = max(map(abs, left[1:]))
        worst = max(worst, *(abs(x - y) / scale for x, y in zip(left[1:], right[1:], strict=True)))
    return worst


def cpu_seconds() -> tuple[float, float]:
    """Busy seconds of the whole machine, and of this process's finished children."""
    busy = [int(x) for x in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (sum(busy[:3]) + sum(busy[5:7])) / os.sysconf("SC_CLK_TCK"), children.ru_utime + children.ru_stime


def fresh(side: str, chunk_tokens: int, threads: int) -> dict[str, Any]:
    argv = [sys.executable, __file__, "--side", side, "--chunk-tokens", str(chunk_tokens), "--threads", str(threads)]
    done = subprocess.run(argv, check=True, capture_output=True, text=True)
    sample: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return sample


def main() -> int:
    from surefoot.maths.logprobs import CHUNK_TOKENS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--chunk-tokens", type=int, default=CHUNK_TOKENS)
    parser.add_argument("--side", choices=["plain", "chunked"], help="measure one side in this process")
    args = parser.parse_args()
    if args.side:
        print(json.dumps(measure(args.side, args.chunk_tokens, args.threads)))
        return 0

    memory, speed, worst = [], [], 0.0
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a") as log:
        for pair in range(args.pairs):
            order = ["plain", "chunked"] if pair % 2 == 0 else ["chunked", "plain"]
            busy, own = cpu_seconds()
            got = {side: fresh(side, args.chunk_tokens, args.threads) for side in order}
            now_busy, now_own = cpu_seconds()
            foreign = max(0.0, 1 - (now_own - own) / (now_busy - busy))
            about = {"pair": pair, "chunk_tokens": args.chunk_tokens, "threads": args.threads, "foreign_share": foreign}
            for side in order:
                log.write(json.dumps(about | got[side]) + "\n")
            worst = max(worst, agree(got["plain"], got["chunked"]))
            memory.append(got["plain"]["extra_bytes"] / max(1, got["chunked"]["extra_bytes"]))
            speed.append(got["chunked"]["seconds"] / got["plain"]["seconds"])
            sides = "   ".join(f"{s}: {got[s]['extra_bytes'] / 2**20:7.0f} MiB {got[s]['seconds']:6.2f} s" for s in got)
            print(f"pair {pair}   {sides}   foreign CPU {foreign:.0%}{'' if foreign <= 0.02 else ' (times dirty)'}")
    return verdict(memory, speed, worst)


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f}x (min {min(ratios):.2f}, max {max(ratios):.2f})"


def verdict(memory: list[float], speed: list[float], worst: float) -> int:
    print(f"difference of loss and gradients, relative: {worst:.1e} (at most 1e-4 in float32)")
    if not worst <= 1e-4:
        print("the two sides do not compute the same thing: no ratio")
        return 1
    one_hidden = ROWS * WIDTH * HIDDEN * 4
    logits = ROWS * WIDTH * VOCABULARY * 4
    print(f"memory: plain needs {spread(memory)} the extra peak of chunked; goal {GOAL:.0f}x")
    print(f"time:   chunked takes {spread(speed)} as long; 4 matrix products against 3 allow 1.33x")
    sizes = f"three logits tensors ({3 * logits >> 20} MiB) over a hidden gradient ({one_hidden >> 20} MiB)"
    print(f"limit:  {3 * logits / one_hidden:.0f}x, {sizes}")
    return 0 if min(memory) >= GOAL else 1


if __name__ == "__main__":
    raise SystemExit(main())
