"""Torch on one thread: the number of threads is part of a float's last bits, and the machine is shared."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """As many threads afterwards as before. Torch is imported here, and not before it is needed."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
