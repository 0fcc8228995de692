"""TensorBoard event files as bytes: read record by record, replace text of equal length, keep the checksums right.

    record = length (8 bytes) | masked CRC of length (4) | data | masked CRC of data (4)

Promises   only records whose data changes get a new checksum, and only after their old one was right; a torn last
           record is left out and counted.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.errors import StateError

_POLYNOMIAL = 0x82F63B78


def _table() -> tuple[int, ...]:
    rows = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        rows.append(value)
    return tuple(rows)


_TABLE = _table()


def masked_crc(data: bytes) -> int:
    """CRC-32C of `data`, turned and shifted the way event files store it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Redacted:
    """An event file without the given words."""

    data: bytes
    replaced: int
    """How many occurrences were replaced."""
    torn: int
    """Bytes of an unfinished last record that were left out."""


def redact(data: bytes, words: Sequence[bytes], source: str) -> Redacted:
    """Replace every occurrence of `words`, in any case, by filler of equal length."""
    pattern = re.compile(b"|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)), re.IGNORECASE)
    kept: list[bytes] = []
    position = replaced = 0
    while position < len(data):
        if len(data) - position < 12:
            break
        length = _length(data, position, source)
        end = position + 12 + length + 4
        if end > len(data):
            break
        record = data[position:end]
        if words and pattern.search(record[12:-4]):
            record, number = _rewritten(record, pattern, f"{source} at byte {position}")
            replaced += number
        kept.append(record)
        position = end
    return Redacted(b"".join(kept), replaced, len(data) - position)


def filler(word: bytes) -> bytes:
    """As long as the word, and never the word itself."""
    return (b"y" if set(word.lower()) == {ord("x")} else b"x") * len(word)


def _length(data: bytes, position: int, source: str) -> int:
    header = data[position : position + 8]
    (length,) = struct.unpack("<Q", header)
    if masked_crc(header) != struct.unpack("<I", data[position + 8 : position + 12])[0]:
        raise StateError(
            f"{source} is not an event file: wrong checksum at byte {position}",
            "it cannot be redacted safely",
            "leave it out",
        )
    return int(length)


def _rewritten(record: bytes, pattern: re.Pattern[bytes], where: str) -> tuple[bytes, int]:
    body = record[12:-4]
    if masked_crc(body) != struct.unpack("<I", record[-4:])[0]:
        raise StateError(
            f"{where}: wrong checksum", "a damaged record would look whole afterwards", "leave the file out"
        )
    body, number = pattern.subn(lambda match: filler(match[0]), body)
    return record[:12] + body + struct.pack("<I", masked_crc(body)), number
