"""The memory of this process: what is freed is kept for the next step; and how much a reward's process may take.

Every step allocates the same activations again. By default the C library returns large blocks at
once, and the next step pays for fresh, zeroed pages: about a tenth of a training step on a CPU. After two
steps nothing fresh is needed; how much the second needs is luck (where the heap happened to begin).
A process forked from a run inherits that wish, where it is wrong: each thread that a reward starts
would reserve tens of MiB, and its worker would be taken for one that leaks.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType

import psutil

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # the names of glibc's mallopt
_BIGGEST_HEAP_BLOCK = 32 * 2**20  # glibc takes no more
_USUAL = 128 * 2**10  # what glibc begins with
_KEEP = 2**31 - 1
_GROW_BY = 128 * 2**20


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed; False where there is no glibc. Changes speed, never a number."""
    return _tell_glibc(_BIGGEST_HEAP_BLOCK, _KEEP, _GROW_BY)


def return_freed_memory() -> bool:
    """The opposite, for a process forked from a run: what was kept goes at once. False where there is no glibc."""
    if not _tell_glibc(_USUAL, _USUAL, _USUAL):
        return False
    ctypes.CDLL(None).malloc_trim(0)
    return True


def _tell_glibc(mmap_threshold: int, trim_threshold: int, top_pad: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wishes = ((_MMAP_THRESHOLD, mmap_threshold), (_TRIM_THRESHOLD, trim_threshold), (_TOP_PAD, top_pad))
    accepted = [mallopt(name, value) for name, value in wishes]
    return accepted == [1, 1, 1]


# -- Python's search for cycles: half a million objects of libraries are no news ------------------

_process_is_ours = False


def own_this_process() -> None:
    """A command says that nobody else's objects live here: what its libraries consist of is never searched again."""
    global _process_is_ours
    _process_is_ours = True


@contextmanager
def importing() -> Iterator[None]:
    """No search for cycles while libraries are imported: a quarter of that time goes there, for a few MB of garbage.

    In a process of our own these objects are set aside for good: each search over all of them stops a run for a
    quarter of a second, about four times in a hundred steps. What holds a model's weights is not made inside: it would
    stay for ever if it were garbage.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if _process_is_ours:
            gc.freeze()
        if was:
            gc.enable()


# -- How much memory a reward may take: counted, limited, and told apart from what it started with
# Owns       the two halves of the cap. Inside a worker, a limit on its data makes one huge allocation a
# MemoryError with a line number. Outside, the nursery adds up what a worker and all its
# descendants really hold, shared mappings too.
# Promises   memory that a worker shares with the driver since its birth is never held against it.
# Never      ends a process; `rewards/workers.py` does.
#
# Both halves need Linux (/proc); elsewhere there is no cap. Pages that nobody has mapped (a file in
# /dev/shm) are not seen. Resident sizes are read twenty times a second for every worker, so they come from /proc (10 us
# where psutil takes 30); what psutil does not know (data, the start of the stack) is read beside them.


MIB = 2**20
_RESERVED = 2**30
"""Thread stacks and allocator arenas are reserved and hardly used: they may not make a modest reward fail."""
_GROWN_UP = 2**31
"""A worker that has grown by this much is replaced after its call, cap or no cap."""


class OwnMemory:
    """What this process has taken since now. As a context it lets no more be reserved than the cap allows.

    Example:
        >>> with OwnMemory(64):
        ...     len(bytearray(8 * MIB))
        8388608
    """

    def __init__(self, cap_mb: int) -> None:
        self._resident, self._data = resident_bytes(os.getpid()), data_bytes()
        self.cap_mb = cap_mb if sys.platform == "linux" else 0
        self._cap = self.cap_mb * MIB
        self._before = resource.getrlimit(resource.RLIMIT_DATA)

    def __enter__(self) -> OwnMemory:
        if self._cap:
            self._before = soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
            ours = self._data + self._cap + _RESERVED
            limits = [each for each in (soft, hard, ours) if each != resource.RLIM_INFINITY]
            resource.setrlimit(resource.RLIMIT_DATA, (min(limits), hard))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._cap:
            # Lifted before the answer is written: a full process must still be able to say that it is full.
            resource.setrlimit(resource.RLIMIT_DATA, self._before)

    def is_heavy(self) -> bool:
        """Whether so much was kept that a fresh process is better than waiting for the cap."""
        grown = max(resident_bytes(os.getpid()) - self._resident, data_bytes() - self._data)
        return grown > min(_GROWN_UP, self._cap // 2 or _GROWN_UP)


def excess_mb(pids: Iterable[int], cap_mb: int, started_with: int) -> int | None:
    """MiB that these processes hold beyond what they were born with, when that is more than the cap; else None.

    Resident sizes are quick to read and count a page once per process. Only when they exceed the cap is each
    page divided among those who share it, which is exact and slow.

    Args:
        started_with: bytes that the first of them shared with us, who forked it, at its birth.
    """
    members = list(pids)
    if sum(map(resident_bytes, members)) <= cap_mb * MIB:
        return None
    if len(members) == 1:
        taken = resident_bytes(members[0]) - started_with
    else:
        taken = sum(map(_proportional_bytes, members)) - _inherited(members, started_with)
    return taken // MIB if taken > cap_mb * MIB else None


def _inherited(members: Iterable[int], started_with: int) -> int:
    """The part of our own memory that is on their account: as much of each shared page as is on ours.

    A process that runs another program has nothing of ours; it is known by its stack, which begins elsewhere.
    """
    ours = os.getpid()
    forked = sum(_start_of_stack(pid) == _start_of_stack(ours) for pid in members)
    return min(started_with, forked * _proportional_bytes(ours))


def available_bytes() -> int | None:
    """What this machine could still give; None where it does not say."""
    try:
        return int(psutil.virtual_memory().available)
    except (OSError, psutil.Error):
        return None


def peak_resident_bytes() -> int:
    """The most that this process ever held, since its program began."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def resident_bytes(pid: int) -> int:
    """Memory that a process has in RAM; 0 when it has ended, or where there is no /proc."""
    return _statm(pid, 1)


def data_bytes() -> int:
    """Private memory of this process that could be written to: what RLIMIT_DATA counts, and the stack."""
    return _statm(os.getpid(), 5)


def _statm(pid: int, column: int) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[column]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def _start_of_stack(pid: int) -> bytes:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[25]
    except (OSError, IndexError):
        return b""


def _proportional_bytes(pid: int) -> int:
    """Memory in RAM, each page divided by the number of processes that have it."""
    try:
        return int(getattr(psutil.Process(pid).memory_full_info(), "pss", 0))
    except psutil.Error:
        return 0
