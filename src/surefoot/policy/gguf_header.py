"""What a GGUF file says about its model, read from its first bytes: no weights, no package.

Promises   a file that is not what it claims to be is a `ModelError`; a length that the file cannot have is never read.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, BinaryIO

from surefoot.errors import ModelError

_PLAIN = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The fields of the header (a list as its length), and the number of parameters."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if file.read(4) != b"GGUF":
                raise ValueError("it does not begin with GGUF")
            _, tensors, fields = (_number(file, kind) for kind in ("I", "Q", "Q"))
            found = {_text(file, size): _value(file, int(_number(file, "I")), size) for _ in range(int(fields))}
            return found, sum(_tensor(file, size) for _ in range(int(tensors)))
    except (OSError, ValueError, KeyError, struct.error, UnicodeDecodeError) as error:
        raise ModelError(
            f"{path} is no GGUF file: {error}", "its header names the model's shape", "restore it"
        ) from error


def _number(file: BinaryIO, kind: str) -> Any:
    width = struct.calcsize(f"<{kind}")
    return struct.unpack(f"<{kind}", file.read(width))[0]


def _text(file: BinaryIO, size: int) -> str:
    length = int(_number(file, "Q"))
    if length > size:
        raise ValueError(f"a text of {length} bytes in a file of {size}")
    return file.read(length).decode("utf-8")


def _value(file: BinaryIO, kind: int, size: int) -> Any:
    if kind == _TEXT:
        return _text(file, size)
    if kind != _LIST:
        return _number(file, _PLAIN[kind])
    inner, count = int(_number(file, "I")), int(_number(file, "Q"))
    if count > size:
        raise ValueError(f"a list of {count} entries in a file of {size} bytes")
    if inner in _PLAIN:
        file.seek(count * struct.calcsize(f"<{_PLAIN[inner]}"), 1)
    else:
        for _ in range(count):
            _value(file, inner, size)
    return count


def _tensor(file: BinaryIO, size: int) -> int:
    _text(file, size)
    shape = [int(_number(file, "Q")) for _ in range(int(_number(file, "I")))]
    _number(file, "I")
    _number(file, "Q")
    return math.prod(shape)
