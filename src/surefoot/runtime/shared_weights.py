"""Weights in memory that several processes of one machine share: written once, read where they lie.

Owns       two slots of memory, each large enough for all tensors, and who may write into which.
Promises   one copy per tensor and version; a slot that somebody reads is never written into; what is read is the
           version that was asked for, or an error; whatever dies, its locks die with it and the memory is found again.
Never      leaves a name behind after `close`.

    learner --write(version)--> slot 0 or 1 --Staged (names and places, no data)--> engine --attach--> views

The writer holds a shared lock on both slots as long as it lives, and an exclusive one while it writes; a reader holds
a shared one as long as any view of it exists.

Read next: `shared_weights.py`, the files behind it; `weights.py`, which hands `StagedWeights` to the engines.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import secrets
import stat
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from surefoot.errors import EngineError, StateError, StorageError
from surefoot.maths.checksums import checksums
from surefoot.system.process import start_ticks

# -- Files in memory that belong to one process and are found again when it dies ------------------
# Owns       how such a file is named, made, opened, locked and removed.
# Promises   names are random, files are new, 0600 and ours; memory is there before it is promised; a file is swept only
# when its maker is dead and nobody holds a lock on it.
#
# The maker holds a shared lock as long as it lives; so does every reader. Locks belong to open files: the kernel lets
# go
# of them when a process ends, however it ends.


FOLDER = Path("/dev/shm")  # noqa: S108 - names are random, files are created exclusively and 0600
_NAME = re.compile(r"surefoot-weights-(\d+)-(\d+)-[0-9a-f]{16}-[01]")


def new_segment_names() -> list[str]:
    """Names for two segments of this process."""
    token = secrets.token_hex(8)
    return [f"surefoot-weights-{os.getpid()}-{_started_at(os.getpid())}-{token}-{number}" for number in (0, 1)]


def is_segment_name(name: str) -> bool:
    """Whether a segment of ours could be called so."""
    return _NAME.fullmatch(name) is not None


def make_segment(path: Path, size: int) -> tuple[int, mmap.mmap]:
    """A new segment with a shared lock on it: descriptor and memory. OSError when there is no room."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        os.posix_fallocate(descriptor, 0, size)  # now, as an error: a page missing later would kill the process
        return descriptor, mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    except BaseException:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        raise


def open_segment(path: Path, size: int) -> tuple[int, mmap.mmap]:
    """An existing segment with a shared lock on it; its memory is private: what is written there, nobody else sees.

    Raises:
        BlockingIOError: its maker is writing.
        OSError: it is gone, too short, or not ours.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_size < size:
            raise OSError(0, f"it has {facts.st_size} bytes of {size} and belongs to user {facts.st_uid}")
        return descriptor, mmap.mmap(descriptor, facts.st_size, access=mmap.ACCESS_COPY)
    except BaseException:
        os.close(descriptor)
        raise


def remove_segment(paths: list[Path], maker: int) -> None:
    """Remove these names, if this is the process that made them: a forked child inherits the clean-up."""
    if os.getpid() == maker:
        for path in paths:
            path.unlink(missing_ok=True)


def sweep_segments(folder: Path = FOLDER) -> list[str]:
    """Remove segments of this user whose maker is dead and that nobody reads; their names."""
    swept = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match is None or _started_at(int(match[1])) == int(match[2]):
            continue
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # somebody else's, or just gone
        # A maker in another process namespace has no number here, or another one's; its lock says that it lives.
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            swept.append(path.name)
        os.close(descriptor)
    return swept


def segment_readers(descriptor: int) -> list[int]:
    """Processes that hold a lock on this segment beside us, as far as the kernel tells."""
    inode = os.fstat(descriptor).st_ino
    try:
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    held = [line.split() for line in lines if "FLOCK" in line]
    return sorted({int(words[4]) for words in held if words[5].endswith(f":{inode}")} - {os.getpid(), -1})


def _started_at(pid: int) -> int:
    """When a process began, in the kernel's ticks: with its number it names one process for ever. 0: there is none."""
    return start_ticks(pid) or 0


# -- Weights in memory that several processes of one machine share: written once, read where they lie


_HEADER = 4096
"""Bytes before the first tensor: the stamp of what was written last."""
_ALIGN = 64
_STAMP = 32
"""Random bytes as text; zeros while a write is under way."""


@dataclass(frozen=True)
class TensorLocation:
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
class StagedWeights:
    """One written version, as it is told to other processes: no data, only where it lies.

    Example:
        A version of two tensors:
        `StagedWeights("surefoot-weights-71-…-0", "/dev/shm", 6, "9f…", {"w": TensorLocation(4096, …)}, {…})`.
    """

    segment: str
    folder: str
    version: int
    stamp: str
    places: Mapping[str, TensorLocation]
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

    def __init__(self, slots: list[_Slot], places: Mapping[str, TensorLocation]) -> None:
        self._slots, self._places, self._next = slots, places, 0
        self._forget = weakref.finalize(self, remove_segment, [slot.path for slot in slots], os.getpid())

    @classmethod
    def create(cls, specs: Specs, folder: Path = FOLDER) -> SharedWeights:
        """Reserve memory for two versions; frees what dead writers left behind."""
        sweep_segments(folder)
        places, end = {}, _HEADER
        for name, (shape, dtype) in specs.items():
            place = TensorLocation(end, tuple(shape), str(dtype).removeprefix("torch."))
            places[name], end = place, -(-(end + place.nbytes) // _ALIGN) * _ALIGN
        paths = [folder / name for name in new_segment_names()]
        slots: list[_Slot] = []
        try:
            for path in paths:
                descriptor, memory = make_segment(path, end)
                slots.append(_Slot(path, descriptor, memory, _views(memory, places)))
        except OSError as error:
            _dispose(slots)
            raise StorageError(
                f"cannot reserve 2 x {end / 1e6:.0f} MB of shared memory in {folder}: {error.strerror}",
                "engines in other processes read the weights there",
                "give the machine or container more (docker run --shm-size=..., a larger /dev/shm)",
            ) from error
        return cls(slots, places)

    def write(self, weights: Mapping[str, Tensor], version: int) -> StagedWeights:
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
        return StagedWeights(slot.path.name, str(slot.path.parent), version, stamp, self._places, sums, spent)

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
            readers = ", ".join(map(str, segment_readers(slot.descriptor))) or "unknown"
            raise EngineError(
                f"version {version} cannot be written: {slot.path.name} is still read (process {readers})",
                "weights that change while they are read are no version at all",
                "let every engine take the newer version and drop the views of the older one",
            ) from None


def _dispose(slots: list[_Slot]) -> None:
    """Give both halves back to the system."""
    remove_segment([slot.path for slot in slots], os.getpid())
    for slot in slots:
        os.close(slot.descriptor)
    slots.clear()


def attach(staged: StagedWeights) -> dict[str, Tensor]:
    """The tensors of a staged version, where they lie; the slot is free again when the last of them is gone.

    They are private to the reader: what it writes into them, nobody else sees.
    """
    if not is_segment_name(staged.segment):
        raise EngineError(
            f"{staged.segment!r} is no segment of ours", "it could be any file", "hand on what write gave"
        )
    end = max((place.offset + place.nbytes for place in staged.places.values()), default=_HEADER)
    try:
        descriptor, memory = open_segment(Path(staged.folder) / staged.segment, end)
    except BlockingIOError:
        raise _gone(staged, "it is being written") from None
    except OSError as error:
        raise _gone(staged, error.strerror or "it cannot be opened") from error
    weakref.finalize(memory, os.close, descriptor)  # views keep the memory alive, and with it the lock
    if memory[:_STAMP] != staged.stamp.encode():
        raise _gone(staged, "another version was written over it")
    return _views(memory, staged.places)


def _views(memory: mmap.mmap, places: Mapping[str, TensorLocation]) -> dict[str, Tensor]:
    return {name: _view(memory, place) for name, place in places.items()}


def _view(memory: mmap.mmap, place: TensorLocation) -> Tensor:
    dtype = _dtype(place.dtype)
    if place.count == 0:  # a buffer of no bytes is refused
        return torch.empty(place.shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=place.count, offset=place.offset).view(place.shape)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise EngineError(f"{name!r} is no dtype", "the bytes could mean anything", "hand on what write gave")
    return dtype


def _gone(staged: StagedWeights, what: str) -> EngineError:
    return EngineError(
        f"version {staged.version} is not in shared memory {staged.segment} any more: {what}",
        "reading on would take whatever lies there for this version",
        "ask for the current version; is its writer still alive?",
    )


__all__ = [
    "FOLDER",
    "SharedWeights",
    "Specs",
    "StagedWeights",
    "TensorLocation",
    "attach",
    "specs_of",
    "sweep_segments",
]
