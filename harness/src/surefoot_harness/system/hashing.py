"""SHA-256 of text, bytes, pieces and files: the one place that knows how they become digits.

Promises   the same on every platform and in every process. What goes into a hash, and in which form, is the caller's:
           digests lie in run folders, so a form that changes is another format.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import BinaryIO

BLOCK = 1 << 20


def sha256_of(data: str | bytes | Iterable[bytes], *, errors: str = "strict") -> str:
    """64 hexadecimal digits: of text as UTF-8, of bytes, or of pieces one after the other with nothing between them.

    Args:
        errors: how text is encoded that is not Unicode; "strict" refuses it.

    Example:
        >>> sha256_of("ab") == sha256_of([b"a", b"b"])
        True
    """
    if isinstance(data, str | bytes):
        return hashlib.sha256(_bytes(data, errors)).hexdigest()
    digest = hashlib.sha256()
    for piece in data:
        digest.update(piece)
    return digest.hexdigest()


def sha256_of_sized(pieces: Iterable[bytes]) -> str:
    """Of pieces, each after its length in 8 bytes: `ab, c` and `a, bc` differ."""
    return sha256_of(part for piece in pieces for part in (len(piece).to_bytes(8, "little"), piece))


def sha256_of_file(file: BinaryIO, most: int | None = None) -> str:
    """Of what is left of an open file, or of its next `most` bytes."""
    return sha256_of(iter(lambda: file.read(BLOCK), b"") if most is None else _blocks(file, most))


def sha256_bytes(data: str | bytes, *, errors: str = "strict") -> bytes:
    """The 32 bytes themselves: an order that depends on nothing but the text."""
    return hashlib.sha256(_bytes(data, errors)).digest()


def sha256_number(data: str | bytes, *, size: int = 8, errors: str = "strict") -> int:
    """The first `size` bytes as a whole number, the highest first.

    Example:
        >>> sha256_number("a", size=1) == int(sha256_of("a")[:2], 16)
        True
    """
    return int.from_bytes(sha256_bytes(data, errors=errors)[:size], "big")


def _bytes(data: str | bytes, errors: str) -> bytes:
    return data.encode("utf-8", errors) if isinstance(data, str) else data


def _blocks(file: BinaryIO, left: int) -> Iterator[bytes]:
    while left and (block := file.read(min(BLOCK, left))):
        yield block
        left -= len(block)
