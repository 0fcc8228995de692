"""The bytes of a journal: how a record is framed, and what a damaged frame means.

    header   8 magic | u32 version | 16 id | u32 CRC-32 of these                                  32 bytes
    frame    4 magic | u32 length | u64 number | u64 synced | u32 CRC of the payload | u32 CRC of the head    32 bytes
    payload  `length` bytes of JSON in ASCII; an empty one is a seal, written when a journal is closed

All numbers are little-endian; both CRCs of a frame start from the header's, so a frame of another journal does not
pass. `number` counts frames from 1 and shows what is missing, doubled or moved. `synced` is how far the file was known
to be on the disk when the frame was written: a whole frame whose `synced` lies behind a damaged place proves that the
damage is no torn write. JSON in ASCII never contains the magic's first byte, so a reader finds the next frame by
looking for it.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from surefoot.errors import StateError

HEADER_MAGIC = b"\x89SFJ\r\n\x1a\n"
FRAME_MAGIC = b"\xf5SFR"
VERSION = 1
ID_BYTES = 16
MAX_PAYLOAD = 64 << 20
"""The largest record, in bytes. A longer length in a file is a damaged one, not a request for memory."""

_HEADER = struct.Struct(f"<8sI{ID_BYTES}sI")
_HEAD = struct.Struct("<4sIQQII")
_HEAD_BODY = struct.Struct("<4sIQQI")
HEADER_BYTES = _HEADER.size
HEAD_BYTES = _HEAD.size


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


_ENCODER = json.JSONEncoder(allow_nan=False, sort_keys=True, separators=(",", ":"))
_DECODER = json.JSONDecoder(parse_constant=_no_constant)


class Head(NamedTuple):
    """The first 32 bytes of a frame, checked."""

    length: int
    number: int
    synced: int
    payload_crc: int


@dataclass(frozen=True, slots=True)
class Header:
    """Which journal this is: 16 random bytes, and the seed of every CRC in it."""

    id: bytes

    @property
    def seed(self) -> int:
        """Where the CRCs of this journal begin."""
        return zlib.crc32(self.pack()[:-4])

    def pack(self) -> bytes:
        """The first bytes of the file."""
        body = _HEADER.pack(HEADER_MAGIC, VERSION, self.id, 0)[:-4]
        return body + struct.pack("<I", zlib.crc32(body))

    @classmethod
    def unpack(cls, data: bytes, name: str) -> Header:
        """Read a header; anything that is not one is a `StateError`. Never taken for an empty journal."""
        if len(data) < HEADER_BYTES:
            _not_a_journal(name, f"it has {len(data)} bytes, and the header alone has {HEADER_BYTES}")
        magic, version, identity, crc = _HEADER.unpack(data[:HEADER_BYTES])
        if magic != HEADER_MAGIC:
            _not_a_journal(name, "it does not begin as one")
        if crc != zlib.crc32(data[: HEADER_BYTES - 4]):
            _not_a_journal(name, "its header is damaged")
        if version != VERSION:
            _not_a_journal(name, f"it has format {version}, and this version reads format {VERSION}")
        return cls(identity)


def pack_frame(payload: bytes, *, number: int, synced: int, seed: int) -> bytes:
    """Head and payload of one frame."""
    body = _HEAD_BODY.pack(FRAME_MAGIC, len(payload), number, synced, zlib.crc32(payload, seed))
    return body + struct.pack("<I", zlib.crc32(body, seed)) + payload


def unpack_head(data: bytes, seed: int) -> Head | None:
    """The head at the beginning of `data`; None if there is no whole one."""
    if len(data) < HEAD_BYTES:
        return None
    magic, length, number, synced, payload_crc, head_crc = _HEAD.unpack(data[:HEAD_BYTES])
    if magic != FRAME_MAGIC or head_crc != zlib.crc32(data[: HEAD_BYTES - 4], seed):
        return None
    return Head(length, number, synced, payload_crc)


def payload_fits(payload: bytes, head: Head, seed: int) -> bool:
    """Whether these are the bytes that the head was written for."""
    return len(payload) == head.length and zlib.crc32(payload, seed) == head.payload_crc


def encode(record: Mapping[str, Any]) -> bytes:
    """A record as canonical JSON in ASCII; what JSON has no word for, and what is too large, is a `StateError`."""
    try:
        payload = _ENCODER.encode(record).encode("ascii")
    except (ValueError, TypeError, RecursionError) as error:
        raise StateError(
            f"a record cannot be written to the journal: {str(error)[:200]}",
            "a journal holds JSON, so that what is read back is what was written",
            "write finite numbers, texts, lists and objects with text keys",
        ) from error
    if len(payload) > MAX_PAYLOAD:
        raise StateError(
            f"a record has {len(payload)} bytes, and a journal takes at most {MAX_PAYLOAD}",
            "a reader has to be able to tell a large record from a damaged length",
            "split it into several records",
        )
    return payload


def decode(payload: bytes, where: str) -> dict[str, Any]:
    """The record back; a payload that is not a JSON object is a `StateError`."""
    try:
        record = _DECODER.decode(payload.decode("ascii"))
    except (ValueError, RecursionError) as error:  # also what is not ASCII
        raise StateError(
            f"{where} is not JSON: {str(error)[:200]}", "its CRC is right, so it was written by something else",
            "use the journal of this run as it was written",
        ) from error  # fmt: skip
    if not isinstance(record, dict):
        raise StateError(
            f"{where} is not a JSON object", "its CRC is right, so it was written by something else",
            "use the journal of this run as it was written",
        )  # fmt: skip
    return record


def _not_a_journal(name: str, why: str) -> NoReturn:
    raise StateError(
        f"{name} is not a journal that can be read", f"{why}; it is not taken for a new one",
        "bring it back from a copy, or resume from a folder whose journal is whole",
    )  # fmt: skip
