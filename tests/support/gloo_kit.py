"""Ranks that talk by gloo: as threads of this process, for what needs a group and no default one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
PATIENCE = timedelta(seconds=20)


class GlooExchange:
    """One rank of a group, as `maths.vocabulary_shards.Exchange`."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def sum(self, values: Tensor) -> None:
        """Over the ranks, in place."""
        self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> None:
        """Over the ranks, in place."""
        self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Tensor, how: Any) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = how
        self.group.allreduce([values], options).wait()


def on_ranks(size: int, body: Callable[[int, GlooExchange], T]) -> list[T]:
    """What `body(rank, exchange)` returns on each of `size` ranks; gloo talks over loopback, as between processes."""
    store = dist.HashStore()

    def rank(number: int) -> T:
        return body(number, GlooExchange(dist.ProcessGroupGloo(store, number, size, PATIENCE)))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))
