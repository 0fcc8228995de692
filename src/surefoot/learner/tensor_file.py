"""One safetensors file: written once, hashed while it is written, looked through before it is read.

Promises   what is written is on the disk when `write_tensors` returns; a file that is read had its header checked
           first: length, names, dtypes, shapes, and offsets that cover the file exactly, without gap or overlap.
Never      allocates for a tensor that the caller did not expect.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from surefoot.storage.files import ManifestEntry, parse_json, refusal
from surefoot.system.files import open_plain

HEADER_BYTES = 16 << 20
BLOCK = 4 << 20
"""Bytes that are written and hashed at a time."""
AHEAD = 64
"""Blocks that may wait for the hash; with weights on a GPU each is host memory."""
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
ITEM_BYTES = {name: dtype.itemsize for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class Spec:
    """What a tensor must be before there is any memory for it."""

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Spec:
        """The description of a live tensor.

        Example:
            >>> Spec.of(torch.zeros(2, 3))
            Spec(dtype='F32', shape=(2, 3))
        """
        return cls(DTYPES[tensor.dtype], tuple(tensor.shape))

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> ManifestEntry:
    """A new file with these tensors, synced; returns its size and SHA-256, taken from memory, not from the disk."""
    ordered = _ordered(tensors)
    header = _header({name: Spec.of(tensor) for name, tensor in ordered})
    digest, waiting, size = hashlib.sha256(), deque[Future[None]](), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb", buffering=BLOCK // 4) as file, ThreadPoolExecutor(1) as hasher:
        for block in _blocks(header, [tensor for _, tensor in ordered]):
            waiting.append(hasher.submit(digest.update, block))  # both let go of the interpreter: two cores work
            file.write(block)
            size += len(block)
            if len(waiting) > AHEAD:
                waiting.popleft().result()
        file.flush()
        os.fsync(file.fileno())
    return ManifestEntry(size, digest.hexdigest())


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself; of one in shards all of it, gathered from all ranks, which have to ask at the same time."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def take_part(tensors: Mapping[str, Tensor]) -> None:
    """What a rank does while another one writes these: gives its shards, one tensor after the other."""
    for _, tensor in _ordered(tensors):
        whole(tensor)


def _ordered(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    return sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))  # keeps offsets aligned


def read_header(path: Path) -> dict[str, Spec]:
    """Names, dtypes and shapes in a file whose header is sound; anything else is a `StateError`."""
    try:
        with open_plain(path) as file:
            total = os.fstat(file.fileno()).st_size
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
            if not 2 <= length <= min(HEADER_BYTES, total - 8):
                raise refusal(path, f"a header of {length} bytes cannot be right in a file of {total}")
            record = parse_json(path, file.read(length))
    except OSError as error:
        raise refusal(path, f"it cannot be read ({error.strerror or error})") from error
    _check_metadata(path, record.pop("__metadata__", {}))
    spans = {name: _span(path, name, value) for name, value in record.items()}
    _check_cover(path, sorted((begin, end, name) for name, (_, begin, end) in spans.items()), total - 8 - length)
    return {name: spec for name, (spec, _, _) in spans.items()}


def check_fits(path: Path, found: Mapping[str, Spec], expected: Mapping[str, Spec]) -> None:
    """Refuse, by name, a missing or extra tensor, another shape, another dtype."""
    missing, extra = sorted(expected.keys() - found), sorted(found.keys() - expected)
    if missing:
        raise refusal(path, f"{len(missing)} of {len(expected)} tensors are missing, first {missing[0][:200]!r}")
    if extra:
        raise refusal(path, f"{len(extra)} tensors have no place in this model, first {extra[0][:200]!r}")
    for name, spec in expected.items():
        if found[name] != spec:
            raise refusal(path, f"{name} is {found[name]}, this model has {spec}")


def read_tensors(
    path: Path, expected: Mapping[str, Spec], rows: Callable[[int], slice] | None = None
) -> dict[str, Tensor]:
    """The tensors of a file, if they are exactly the expected ones.

    Args:
        rows: of the length of a tensor's first dimension, which of it are wanted; None reads them whole.
    """
    check_fits(path, read_header(path), expected)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {
                name: file.get_tensor(name)
                if rows is None or not spec.shape
                else file.get_slice(name)[rows(spec.shape[0])]
                for name, spec in expected.items()
            }
    except (SafetensorError, OSError) as error:
        raise refusal(path, f"safetensors cannot read it ({error})") from error


def _header(specs: Mapping[str, Spec]) -> bytes:
    record: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, spec in specs.items():
        begin, end = end, end + spec.size
        record[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
    text = json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _blocks(header: bytes, tensors: list[Tensor]) -> Iterator[memoryview]:
    yield memoryview(header)
    for tensor in tensors:
        flat = whole(tensor.detach()).contiguous().reshape(-1).view(torch.uint8)
        for piece in flat.split(BLOCK):
            yield memoryview(piece.cpu().numpy())


def _check_metadata(path: Path, value: Any) -> None:
    if not isinstance(value, dict) or not all(isinstance(word, str) for word in value.values()):
        raise refusal(path, "its metadata is not a table of words")


def _span(path: Path, name: str, value: Any) -> tuple[Spec, int, int]:
    """One entry of the header: what the tensor is, and from where to where it lies."""
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise refusal(path, f"its header entry {name[:200]!r} is not a dtype, a shape and offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise refusal(path, f"{name[:200]!r} has the dtype {str(dtype)[:20]!r}, which we do not write")
    if not _whole_numbers(shape) or len(shape) > 16:
        raise refusal(path, f"{name[:200]!r} has a shape that is none")
    if not _whole_numbers(offsets) or len(offsets) != 2:
        raise refusal(path, f"{name[:200]!r} has offsets that are none")
    spec = Spec(dtype, tuple(shape))
    if offsets[1] - offsets[0] != spec.size:
        raise refusal(path, f"{name[:200]!r} is {spec}, yet lies from byte {offsets[0]} to {offsets[1]}")
    return spec, offsets[0], offsets[1]


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number < 1 << 53 for number in value)


def _check_cover(path: Path, spans: list[tuple[int, int, str]], data: int) -> None:
    """One tensor begins where the last one ended, and the last one ends with the file."""
    at = 0
    for begin, end, name in spans:
        if begin != at:
            raise refusal(path, f"{name[:200]!r} begins at byte {begin}, the tensor before it ends at {at}")
        at = end
    if at != data:
        raise refusal(path, f"its tensors take {at} bytes, the file holds {data}")
