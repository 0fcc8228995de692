"""Keep freed memory for the next step instead of giving it back to the system.

Every step allocates the same activations again. By default the C library returns large blocks at
once, and the next step pays for fresh, zeroed pages: about a tenth of a training step on a CPU.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # the names of glibc's mallopt
_BIGGEST_HEAP_BLOCK = 32 * 2**20  # glibc takes no more
_KEEP = 2**31 - 1
_GROW_BY = 128 * 2**20


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed; False where there is no glibc. Changes speed, never a number."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    wishes = ((_MMAP_THRESHOLD, _BIGGEST_HEAP_BLOCK), (_TRIM_THRESHOLD, _KEEP), (_TOP_PAD, _GROW_BY))
    accepted = [mallopt(name, value) for name, value in wishes]
    return accepted == [1, 1, 1]
