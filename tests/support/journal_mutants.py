"""Mutated journals: what a reader gets of a file to which something has happened.

    python tests/support/journal_mutants.py --count 100000 --seed 1

Nothing may be believed that was not written, and no refusal may be without a type.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

from forgetful_disk import ForgetfulFile

from surefoot.errors import SurefootError
from surefoot.storage.files import Journal
from surefoot.system import journal as frames


def mutate(rng: random.Random, data: bytes) -> bytes:
    """One of the things that happen to files."""
    at, to = sorted(rng.randrange(frames.HEADER_BYTES, len(data) + 1) for _ in range(2))
    piece = data[at:to]
    ways = [
        lambda: data[:at] + bytes(b ^ rng.choice([0, 0, 1, 128, 255]) for b in piece) + data[to:],
        lambda: data[:at] + data[to:],
        lambda: data[:to] + piece + data[to:],
        lambda: data[:at] + bytes(len(piece)) + data[to:],
        lambda: data[:at] + rng.randbytes(rng.randint(1, 80)) + data[at:],
        lambda: data[:to] + data[at:to][::-1] + data[to:],
        lambda: data[:at] + frames.FRAME_MAGIC + data[at:],
        lambda: data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
    ]
    return rng.choice(ways)()


def accepted(data: bytes, rng: random.Random) -> list[dict[str, Any]] | None:
    """What a reader gets; None for a typed refusal. Anything else escapes."""
    try:
        return [entry.record for entry in Journal(ForgetfulFile(rng, data)).records()]
    except SurefootError:
        return None


def mutations(seed: int, count: int) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]]:
    """What was written, and what a reader gets of a mutated copy."""
    rng = random.Random(seed)
    for _ in range(count):
        file = ForgetfulFile(rng, frames.Header(rng.randbytes(16)).pack())
        written = [{"i": i, "pad": "p" * rng.randrange(60)} for i in range(rng.randint(1, 6))]
        with Journal(file) as journal:
            for record in written:
                journal.append(record, durable=rng.random() < 0.7)
        yield written, accepted(mutate(rng, bytes(file.visible)), rng)


def main() -> int:
    """Count what was refused and what was believed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    words = parser.parse_args()
    began, refused, believed = time.perf_counter(), 0, 0
    for number, (written, got) in enumerate(mutations(words.seed, words.count)):
        refused += got is None
        if got is not None and got != written[: len(got)]:
            believed += 1
            print(f"mutation {number} of seed {words.seed} was believed", file=sys.stderr)
    cut = words.count - refused - believed
    print(f"{words.count:,} mutated journals: {refused:,} refused, {cut:,} read as a beginning of what was written, "
          f"{believed} believed, {time.perf_counter() - began:.0f} s")  # fmt: skip
    return 1 if believed else 0


if __name__ == "__main__":
    sys.exit(main())
