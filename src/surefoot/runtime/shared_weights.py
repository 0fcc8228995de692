"""Weights in memory that several processes of one machine share: written once, read where they lie.

Owns       two slots of memory, each large enough for all tensors, and who may write into which.
Promises   one copy per tensor and version; a slot that somebody reads is never written into; what is read is the
           version that was asked for, or an error; whatever dies, its locks die with it and the memory is found again.
Never      leaves a name behind after `close`.

    learner --write(version)--> slot 0 or 1 --Staged (names and places, no data)--> engine --attach--> views

The writer holds a shared lock on both slots as long as it lives, and an exclusive one while it writes; a reader holds
a shared one as long as any view of it exists.

Read next: `segments.py`, the files behind it; `weights.py`, which hands `Staged` to the engines.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from surefoot.errors import EngineError, StateError, StorageError
from surefoot.maths.checksums import checksums
from surefoot.runtime import segments
from surefoot.runtime.segments import FOLDER, sweep

__all__ = ["FOLDER", "Place", "SharedWeights", "Specs", "Staged", "attach", "specs_of", "sweep"]

_HEADER = 4096
"""Bytes before the first tensor: the stamp of what was written last."""
_ALIGN = 64
_STAMP = 32
"""Random bytes as text; zeros while a write is under way."""


@dataclass(frozen=True)
class Place:
    """Where one tensor lies in a slot."""

    offset: int
    shape: tuple[int, ...]
    dtype: str
    """As torch writes it, without the prefix: `float32`."""

    @property
    def count(self) -> int:
        """Elements."""
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.count * _dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Staged:
    """One written version, as it is told to other processes: no data, only where it lies.

    Example:
        A version of two tensors: `Staged("surefoot-weights-71-…-0", "/dev/shm", 6, "9f…", {"w": Place(4096, …)}, {…})`.
    """

    segment: str
    folder: str
    version: int
    stamp: str
    places: Mapping[str, Place]
    sums: Mapping[str, int]
    """The writer's checksums of what it was given."""
    checksum_s: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(place.nbytes for place in self.places.values())


Specs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of every tensor, by name."""


def specs_of(weights: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What `SharedWeights.create` needs to know of these tensors."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in weights.items()}


@dataclass
class _Slot:
    """One half of the double buffer, at the writer's side."""

    path: Path
    descriptor: int
    memory: mmap.mmap
    views: dict[str, Tensor]


class SharedWeights:
    """The writer's side: two slots, used in turns. Made by `create`; close it, or use it in a `with`."""

    def __init__(self, slots: list[_Slot], places: Mapping[str, Place]) -> None:
        self._slots, self._places, self._next = slots, places, 0
        self._forget = weakref.finalize(self, segments.remove, [slot.path for slot in slots], os.getpid())

    @classmethod
    def create(cls, specs: Specs, folder: Path = FOLDER) -> SharedWeights:
        """Reserve memory for two versions; frees what dead writers left behind."""
        sweep(folder)
        places, end = {}, _HEADER
        for name, (shape, dtype) in specs.items():
            place = Place(end, tuple(shape), str(dtype).removeprefix("torch."))
            places[name], end = place, -(-(end + place.nbytes) // _ALIGN) * _ALIGN
        paths = [folder / name for name in segments.new_names()]
        slots: list[_Slot] = []
        try:
            for path in paths:
                descriptor, memory = segments.make(path, end)
                slots.append(_Slot(path, descriptor, memory, _views(memory, places)))
        except OSError as error:
            _dispose(slots)
            raise StorageError(
                f"cannot reserve 2 x {end / 1e6:.0f} MB of shared memory in {folder}: {error.strerror}",
                "engines in other processes read the weights there",
                "give the machine or container more (docker run --shm-size=..., a larger /dev/shm)",
            ) from error
        return cls(slots, places)

    def write(self, weights: Mapping[str, Tensor], version: int) -> Staged:
        """Copy these tensors into the slot that nobody reads; refuses when there is none, and says who reads it."""
        if not self._forget.alive:
            raise StateError("these shared weights are closed", "their memory is gone", "create new ones")
        self._check(weights)
        slot = self._slots[self._next]
        started = time.perf_counter()
        sums = checksums(weights)
        spent = time.perf_counter() - started
        stamp = secrets.token_hex(_STAMP // 2)
        self._lock(slot, version)
        try:
            slot.memory[:_STAMP] = b"\0" * _STAMP  # whoever looks in from here on finds nothing
            with torch.no_grad():
                for name, view in slot.views.items():
                    view.copy_(weights[name])
            slot.memory[:_STAMP] = stamp.encode()
        finally:
            fcntl.flock(slot.descriptor, fcntl.LOCK_SH)
        self._next = 1 - self._next
        return Staged(slot.path.name, str(slot.path.parent), version, stamp, self._places, sums, spent)

    def close(self) -> None:
        """Remove both slots; readers keep what they have mapped. A second call does nothing."""
        if self._forget.detach() is None:
            return
        _dispose(self._slots)

    def __enter__(self) -> SharedWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, weights: Mapping[str, Tensor]) -> None:
        """Exactly the tensors that were announced, as they were announced."""
        given = {name: (shape, str(dtype).removeprefix("torch.")) for name, (shape, dtype) in specs_of(weights).items()}
        wanted = {name: (place.shape, place.dtype) for name, place in self._places.items()}
        if given != wanted:
            names = sorted(name for name in {*given, *wanted} if given.get(name) != wanted.get(name))
            raise EngineError(
                f"{len(names)} tensors are not what was announced, first {names[0]}: "
                f"{given.get(names[0], 'missing')} instead of {wanted.get(names[0], 'nothing')}",
                "a copy that fits by chance would be other weights under the right name",
                "hand over every parameter with its own shape and dtype",
            )

    def _lock(self, slot: _Slot, version: int) -> None:
        try:
            fcntl.flock(slot.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(slot.descriptor, fcntl.LOCK_SH)  # a failed upgrade loses the lock we had
            readers = ", ".join(map(str, segments.readers(slot.descriptor))) or "unknown"
            raise EngineError(
                f"version {version} cannot be written: {slot.path.name} is still read (process {readers})",
                "weights that change while they are read are no version at all",
                "let every engine take the newer version and drop the views of the older one",
            ) from None


def _dispose(slots: list[_Slot]) -> None:
    """Give both halves back to the system."""
    segments.remove([slot.path for slot in slots], os.getpid())
    for slot in slots:
        os.close(slot.descriptor)
    slots.clear()


def attach(staged: Staged) -> dict[str, Tensor]:
    """The tensors of a staged version, where they lie; the slot is free again when the last of them is gone.

    They are private to the reader: what it writes into them, nobody else sees.
    """
    if not segments.is_name(staged.segment):
        raise EngineError(
            f"{staged.segment!r} is no segment of ours", "it could be any file", "hand on what write gave"
        )
    end = max((place.offset + place.nbytes for place in staged.places.values()), default=_HEADER)
    try:
        descriptor, memory = segments.open_shared(Path(staged.folder) / staged.segment, end)
    except BlockingIOError:
        raise _gone(staged, "it is being written") from None
    except OSError as error:
        raise _gone(staged, error.strerror or "it cannot be opened") from error
    weakref.finalize(memory, os.close, descriptor)  # views keep the memory alive, and with it the lock
    if memory[:_STAMP] != staged.stamp.encode():
        raise _gone(staged, "another version was written over it")
    return _views(memory, staged.places)


def _views(memory: mmap.mmap, places: Mapping[str, Place]) -> dict[str, Tensor]:
    return {name: _view(memory, place) for name, place in places.items()}


def _view(memory: mmap.mmap, place: Place) -> Tensor:
    dtype = _dtype(place.dtype)
    if place.count == 0:  # a buffer of no bytes is refused
        return torch.empty(place.shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=place.count, offset=place.offset).view(place.shape)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise EngineError(f"{name!r} is no dtype", "the bytes could mean anything", "hand on what write gave")
    return dtype


def _gone(staged: Staged, what: str) -> EngineError:
    return EngineError(
        f"version {staged.version} is not in shared memory {staged.segment} any more: {what}",
        "reading on would take whatever lies there for this version",
        "ask for the current version; is its writer still alive?",
    )
