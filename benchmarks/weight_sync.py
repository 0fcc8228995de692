"""Weight sync: what it takes to bring 135 M parameters to an engine, here and in another process, and to prove it.

    python benchmarks/weight_sync.py [--pairs 7] [--millions 135]

The weights are random numbers in SmolLM2-135M's shapes, 538 MB in float32. Rows: the pointer swap inside one process
(packing for decoding is paid later, by the first token, and printed beside it); the copy into shared memory against a
plain copy of the same bytes; checksums against reading the same bytes; and the whole way into another process, until
that process holds every tensor, against a gloo broadcast of one flat buffer and against torch.save and torch.load.
Neither of those proves anything, so our checksums are left out there; they have a row of their own.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ceilings import measure_ceilings
from durability import make_learner
from load import LoadProbe
from method import Journal, Ratio, Sample, alternate, bootstrap_interval, compare, dirt, medians, usable
from report import Row, common_arguments, publish

SWAP_MS = 1.0
COPY_GOAL = 0.80
STEP_SHARE = 0.05
STEP_TOKENS = 64 * 64
"""A small step: 64 rollouts of 64 tokens."""
NOTE = (
    "538 MB of float32 in SmolLM2-135M's 272 tensors. Copy and read bandwidth are measured in the same run. Both ends "
    "of the whole way hold the same tensors: their checksums are compared, outside the clock."
)


def swap_row(learner: Any, journal: Journal) -> Row:
    """Handing over weights inside one process."""
    from surefoot.engines.embedded import EmbeddedEngine
    from surefoot.learner.model import decoder_spec

    engine = EmbeddedEngine(decoder_spec(learner.net), rows=16, max_width=64)
    seconds = []
    for version in range(50):
        weights = learner.weights()
        started = time.perf_counter()
        engine.load_weights(weights, version)
        seconds.append(time.perf_counter() - started)
    engine.decoder.pack()
    journal.write("times", {"cell": "swap", "seconds": seconds, "pack": engine.pack_seconds})
    median = 1e3 * statistics.median(seconds[1:])  # the first finds the tensors; from then on they are known
    said = f"{median:.2f} ms (first {1e3 * seconds[0]:.2f}), packing later {1e3 * engine.pack_seconds:.0f} ms"
    return Row("weight sync", "in-process swap", said, goal=f"< {SWAP_MS:g} ms", met=median < SWAP_MS, note=NOTE)


def copy_row(weights: dict[str, Any], args: Any, journal: Journal) -> list[Row]:
    """Writing into shared memory against copying the same bytes, and checksums against reading them."""
    import torch

    from surefoot.runtime.shared_weights import SharedWeights, specs_of

    size = sum(tensor.nbytes for tensor in weights.values())
    flat = torch.cat([tensor.reshape(-1) for tensor in weights.values()])
    target = torch.empty_like(flat)
    summing = []
    with SharedWeights.create(specs_of(weights)) as shared:

        def ours() -> Sample:
            started = time.perf_counter()
            staged = shared.write(weights, 0)
            seconds = time.perf_counter() - started
            summing.append(staged.checksum_s)
            return Sample("shared memory", seconds - staged.checksum_s, {"bytes": staged.nbytes})

        def plain() -> Sample:
            started = time.perf_counter()
            target.copy_(flat)
            return Sample("copy", time.perf_counter() - started, {"bytes": flat.nbytes})

        for warm_up in (ours, plain, ours, plain):  # both slots and the target have their pages
            warm_up()
        pairs = alternate(ours, plain, pairs=args.pairs or 7, redo=0 if args.allow_dirty else None,
                          record=journal.pair("copy"))  # fmt: skip
    used = usable(pairs, allow_dirty=args.allow_dirty)
    words = [f"{size / seconds / 1e9:.1f} GB/s" for seconds in medians(pairs, allow_dirty=args.allow_dirty)]
    if len(used) < 3:
        ratio, met = f"no ratio: {len(used)} usable pairs", False
    else:
        ratios = [pair.ratio for pair in used]
        low, high = bootstrap_interval(ratios)
        ratio, met = (
            f"{statistics.median(ratios):.2f}x [{low:.2f}, {high:.2f}] n={len(used)}",
            (statistics.median(ratios) >= COPY_GOAL),
        )
    ratio += dirt(pairs, allow_dirty=args.allow_dirty)
    copied = Row("weight sync", "into shared memory", *words, ratio, f">= {COPY_GOAL:.2f}x", met, "1.00x", NOTE)
    return [copied, checksum_row(statistics.median(summing), size, args)]


def checksum_row(seconds: float, size: int, args: Any) -> Row:
    """What the proof by checksum costs of the fastest step that this machine could do."""
    ceilings = measure_ceilings(args.threads)
    step = ceilings.train_step(size // 4, STEP_TOKENS)
    share = seconds / step
    said = (
        f"{size / seconds / 1e9:.1f} GB/s, {1e3 * seconds:.0f} ms: {share:.1%} of a step of {step:.1f} s at the limit"
    )
    limit = f"{ceilings.read_bytes_s / 1e9:.1f} GB/s read"
    return Row("weight sync", "checksums", said, goal=f"<= {STEP_SHARE:.0%} of a step", met=share <= STEP_SHARE,
               limit=limit, note=NOTE)  # fmt: skip


# -- into another process -------------------------------------------------------------------------


def receiver(pipe: Connection, store: str, numel: int, threads: int) -> None:
    """The other process: takes what it is told to take, and answers with the sum of it when asked."""
    import torch
    import torch.distributed as dist

    from surefoot.maths.checksums import checksum
    from surefoot.runtime.shared_weights import attach

    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=1, world_size=2)
    flat = torch.zeros(numel)
    held: Any = None
    pipe.send("ready")
    while (told := pipe.recv()) is not None:
        kind, what = told
        if kind == "sum":
            tensors = [held] if isinstance(held, torch.Tensor) else [t.reshape(-1) for t in held.values()]
            pipe.send(checksum(torch.cat(tensors)))
            held = None
            gc.collect()
            continue
        if kind == "shared":
            held = attach(what)
        elif kind == "file":
            held = torch.load(what, weights_only=True, mmap=True)
        else:
            dist.broadcast(flat, 0)
            held = flat
        pipe.send("held")
    dist.destroy_process_group()


class Far:
    """Our end of the other process."""

    def __init__(self, weights: dict[str, Any], threads: int, folder: Path) -> None:
        import torch
        import torch.distributed as dist

        self.weights, self.folder = weights, folder
        self.flat = torch.cat([tensor.reshape(-1) for tensor in weights.values()])
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        store = str(folder / "store")
        self.process = context.Process(target=receiver, args=(theirs, store, self.flat.numel(), threads))
        self.process.start()
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=2)
        self.pipe.recv()

    def timed(self, side: str, send: Callable[[], None]) -> Sample:
        """Seconds until the other process holds every tensor, and what it holds."""
        started = time.perf_counter()
        send()
        self.pipe.recv()
        seconds = time.perf_counter() - started
        self.pipe.send(("sum", None))
        return Sample(side, seconds, {"checksum": self.pipe.recv(), "bytes": self.flat.nbytes})

    def broadcast(self) -> None:
        """The bare collective, once, over one buffer."""
        import torch.distributed as dist

        self.pipe.send(("gloo", None))
        dist.broadcast(self.flat, 0)

    def file(self) -> None:
        """torch.save into memory, torch.load by mapping it: as fast as this way can be."""
        import torch

        path = self.folder / "weights.pt"
        torch.save(self.weights, path)
        self.pipe.send(("file", str(path)))

    def close(self) -> None:
        """End the other process."""
        import torch.distributed as dist

        with suppress(BrokenPipeError):
            self.pipe.send(None)
        dist.destroy_process_group()
        self.process.join(30)


def far_rows(weights: dict[str, Any], args: Any, journal: Journal) -> list[Row]:
    """The whole way, without checksums, against two others."""
    from surefoot.runtime.shared_weights import SharedWeights, specs_of

    rows = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name, SharedWeights.create(specs_of(weights)) as shared:
        far = Far(weights, args.threads, Path(name))
        try:
            for peer, send in (("gloo broadcast", far.broadcast), ("torch.save + load", far.file)):

                def ours() -> Sample:
                    spent = []

                    def write_and_tell() -> None:
                        staged = shared.write(weights, 0)
                        spent.append(staged.checksum_s)
                        far.pipe.send(("shared", staged))

                    whole = far.timed("shared memory", write_and_tell)
                    facts = {"checksum_s": spent[0]}
                    return Sample(whole.side, whole.seconds - spent[0], whole.work, facts)

                def theirs(peer: str = peer, send: Callable[[], None] = send) -> Sample:
                    return far.timed(peer, send)

                ours(), theirs(), ours()
                pairs = alternate(ours, theirs, pairs=args.pairs or 7, redo=0 if args.allow_dirty else None,
                                  record=journal.pair(peer))  # fmt: skip
                ratio = compare(pairs, allow_dirty=args.allow_dirty)
                mine, other = (f"{1e3 * s:.0f} ms" for s in medians(pairs, allow_dirty=args.allow_dirty))
                said = f"{ratio}{dirt(pairs, allow_dirty=args.allow_dirty)}"
                met = isinstance(ratio, Ratio) and ratio.median >= 1
                cell = f"to another process, or {peer}"
                rows.append(Row("weight sync", cell, mine, other, said, ">= 1.00x", met, note=NOTE))
        finally:
            far.close()
    return rows


def main() -> int:
    """Every row."""
    import torch

    parser = common_arguments(__doc__, pairs=7)
    parser.add_argument("--millions", type=int, default=135, help="parameters, in millions")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    journal = Journal("weight_sync", {"arguments": vars(args)})
    probe = LoadProbe()
    mark = probe.mark()
    learner = make_learner(args.millions, moments=False)
    weights = {name: tensor.detach() for name, tensor in learner.weights().items()}
    rows = [swap_row(learner, journal), *copy_row(weights, args, journal), *far_rows(weights, args, journal)]
    journal.write("load", {"load": probe.since(mark)})
    return publish(rows, args.rows)


if __name__ == "__main__":
    sys.exit(main())
