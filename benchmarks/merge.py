"""Merge and publish: what an adapter's sync costs beside that of weights which are trained themselves.

    python benchmarks/merge.py [--pairs 7] [--millions 135] [--rank 16] [--cells plain,nf4] [--tiny]

Ours merges the adapter into every linear layer and writes the whole model into shared memory, checksums included; the
peer writes the very same tensors without merging anything: a full sync, as every weight being trained needs it. Both
leave the same checksums. `nf4` is a base in four bits, which is unpacked layer by layer for each merge. Random numbers
in SmolLM2-135M's shapes; `--tiny` is one layer, to see that it runs.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from durability import make_learner
from method import Journal, Sample, alternate, compare, dirt, medians, timed
from report import Row, common_arguments, measured, publish

NOTE = (
    "Ours merges an adapter on all linear layers and writes the model into shared memory with checksums; the peer "
    "writes the same tensors without a merge. There is no goal: the ratio is the price of training an adapter."
)


def make_adapter(net: Any, rank: int, quantization: str) -> Any:
    """An adapter beside that network, packed where it says so; its difference is 0, which costs a merge the same."""
    import torch

    from surefoot.learner.lora import Adapter, LoraSettings
    from surefoot.learner.quantised import quantise

    settings = LoraSettings(rank, 2.0 * rank, ("all-linear",), quantization=quantization)
    return Adapter(net, settings, quantised=None if quantization == "none" else quantise(net, (), torch.float32))


def work_of(staged: Any) -> Mapping[str, Any]:
    """What a version that was written holds."""
    return {"bytes": staged.nbytes, "sums": sum(staged.sums.values()) % 2**64}


def cell(args: Any, journal: Journal, name: str) -> Row:
    """One row."""
    from surefoot.runtime.shared_weights import SharedWeights, specs_of

    adapter = make_adapter(make_learner(args.millions, moments=False).net, args.rank, {"plain": "none"}.get(name, name))
    full = {key: value.detach().clone() for key, value in adapter.published(0).items()}
    versions = iter(range(1, 10_000))
    merging: list[float] = []
    with SharedWeights.create(specs_of(full)) as shared:

        def merge_and_write() -> Mapping[str, Any]:
            version = next(versions)
            merging.append(adapter.merge(version).seconds)
            return work_of(shared.write(adapter.published(version), version))

        def ours() -> Sample:
            return timed("merge and publish", merge_and_write)

        def theirs() -> Sample:
            return timed("full sync", lambda: work_of(shared.write(full, 0)))

        for warm_up in (ours, theirs, ours, theirs):  # both slots have their pages
            warm_up()
        merging.clear()
        redo = 0 if args.allow_dirty else None
        pairs = alternate(ours, theirs, pairs=args.pairs or 7, redo=redo, record=journal.pair(name))
    journal.write("times", {"cell": name, "merge_seconds": merging})
    mine, other = (f"{1e3 * seconds:.0f} ms" for seconds in medians(pairs, allow_dirty=args.allow_dirty))
    said = f"{compare(pairs, allow_dirty=args.allow_dirty)}{dirt(pairs, allow_dirty=args.allow_dirty)}"
    alone = f"{mine}, {1e3 * statistics.median(merging):.0f} ms of them the merge"
    return Row("merge", f"an adapter, base {name}, or a full sync", alone, other, said, note=NOTE)


def main() -> int:
    """Every cell."""
    import torch

    parser = common_arguments(__doc__, pairs=7)
    parser.add_argument("--millions", type=int, default=135, help="parameters, in millions")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--cells", default="plain,nf4")
    parser.add_argument("--tiny", action="store_true", help="one layer: does it run?")
    args = parser.parse_args()
    args.millions = 30 if args.tiny else args.millions
    torch.set_num_threads(args.threads)
    journal = Journal("merge", {"arguments": vars(args)})
    return publish(measured(args.cells, partial(cell, args, journal)), args.rows)


if __name__ == "__main__":
    sys.exit(main())
