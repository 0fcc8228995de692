"""One rank decides, all ranks do the same thing.

Promises   a value or an error that the first rank made is the value or the error of every rank; nobody raises alone,
           since the others would wait for it in the next collective call until a timeout.
Never      starts a process group. Without one, or with one process, everything here is a plain call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from surefoot.errors import SurefootError

T = TypeVar("T")


def world_size() -> int:
    """Processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process among them."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def from_first(make: Callable[[], T]) -> T:
    """What `make` returns or raises on the first rank, on every rank."""
    if world_size() == 1:
        return make()
    box: list[Any] = [None, None]
    if rank() == 0:
        box = _boxed(make)
    dist.broadcast_object_list(box, src=0)
    value, error = box
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


def _boxed(make: Callable[[], Any]) -> list[Any]:
    """[value, None] or [None, error]; the error is one of ours, so that it survives the way to the other ranks."""
    try:
        return [make(), None]
    except SurefootError as error:
        return [None, error]
    except Exception as error:  # noqa: BLE001 - raised again by `from_first`, on every rank
        what = f"the first rank failed: {type(error).__name__}: {error}"
        wrapped = SurefootError(what, "every rank has to stop with it", "see the first rank's own traceback")
        wrapped.__cause__ = error
        return [None, wrapped]


def summed(values: Sequence[float]) -> list[float]:
    """Each number added up over all ranks; every rank gets the same sums, in the same order of addition."""
    if world_size() == 1:
        return list(values)
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, list(values))
    return [sum(column) for column in zip(*gathered, strict=True)]
