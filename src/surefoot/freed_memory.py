"""Keep freed memory for the next step instead of giving it back to the system.

Every step allocates the same activations again. By default the C library returns large blocks at
once, and the next step pays for fresh, zeroed pages: about a tenth of a training step on a CPU. After two
steps nothing fresh is needed; how much the second needs is luck (where the heap happened to begin).
A process forked from a run inherits that wish, where it is wrong: each thread that a reward starts
would reserve tens of MiB, and its worker would be taken for one that leaks.
"""

from __future__ import annotations

import ctypes
import sys

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
