"""Sort pairs of 64-bit numbers that do not fit into memory.

Promises   the pairs come back in order, each once; memory is that of one 64th of them once they are many; nothing is
           left on the disk.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

PAIR = struct.Struct("<QQ")
IN_MEMORY = 1 << 16
_BUCKETS = 64
_SHIFT = 58
"""The upper 6 of 64 bits name the bucket, so buckets follow one another in order. Keys are hashes: they spread."""


class DiskSort:
    """Collects (key, value), both below 2^64, and gives them back sorted.

    Args:
        folder: where the buckets lie while there are too many pairs for memory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pairs: list[tuple[int, int]] = []
        self._buckets: list[IO[bytes]] = []

    def add(self, key: int, value: int) -> None:
        """One more pair."""
        if self._buckets:
            self._buckets[key >> _SHIFT].write(PAIR.pack(key, value))
            return
        self._pairs.append((key, value))
        if len(self._pairs) > IN_MEMORY:
            self._buckets = [self._bucket() for _ in range(_BUCKETS)]
            pairs, self._pairs = self._pairs, []
            for pair in pairs:
                self.add(*pair)

    def _bucket(self) -> IO[bytes]:
        return tempfile.TemporaryFile(dir=self._folder)

    def sorted(self) -> Iterator[tuple[int, int]]:
        """All pairs in order; only once."""
        yield from sorted(self._pairs)
        for bucket in self._buckets:
            bucket.seek(0)
            yield from sorted(PAIR.iter_unpack(bucket.read()))
            bucket.close()

    def close(self) -> None:
        """Give the room back, also when nobody asked for the result."""
        self._pairs = []
        for bucket in self._buckets:
            bucket.close()
