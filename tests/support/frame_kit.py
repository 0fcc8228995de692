"""A framed journal as the pieces that it is written in: its header, then each frame, the seal included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from surefoot.system.journal import HEAD_BYTES, HEADER_BYTES, Header, unpack_head


def pieces(data: bytes) -> list[bytes]:
    """`b"".join(pieces(data)) == data` for a whole journal."""
    seed, found, offset = Header.unpack(data, "a journal").seed, [data[:HEADER_BYTES]], HEADER_BYTES
    while offset < len(data):
        head = unpack_head(data[offset : offset + HEAD_BYTES], seed)
        assert head is not None, f"no frame at byte {offset}"
        found.append(data[offset : offset + HEAD_BYTES + head.length])
        offset += len(found[-1])
    return found


def payloads(path: Path) -> list[dict[str, Any]]:
    """The records of a whole journal, read without any of our readers."""
    return [json.loads(piece[HEAD_BYTES:]) for piece in pieces(path.read_bytes())[1:] if len(piece) > HEAD_BYTES]
