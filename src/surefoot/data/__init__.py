"""Which task next: loading, holding out, dealing. Read `sources.py` first, then `tasks.py`.

For more tasks than fit into memory read `on_disk/dataset.py` and `on_disk/stream.py`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surefoot.data.curriculum import CurriculumSampler, SuccessCurriculum
    from surefoot.data.heldout import HeldoutLeakError, HeldoutSplit
    from surefoot.data.loader import TaskBatcher, TaskDataLoader
    from surefoot.data.lru import LRUCache
    from surefoot.data.on_disk.dataset import StreamingDataset
    from surefoot.data.on_disk.stream import LargeTaskStream

__all__ = [
    "CurriculumSampler",
    "HeldoutLeakError",
    "HeldoutSplit",
    "LRUCache",
    "LargeTaskStream",
    "StreamingDataset",
    "SuccessCurriculum",
    "TaskBatcher",
    "TaskDataLoader",
]


_HOMES = {
    "CurriculumSampler": "curriculum",
    "HeldoutLeakError": "heldout",
    "HeldoutSplit": "heldout",
    "LRUCache": "lru",
    "LargeTaskStream": "on_disk.stream",
    "StreamingDataset": "on_disk.dataset",
    "SuccessCurriculum": "curriculum",
    "TaskBatcher": "loader",
    "TaskDataLoader": "loader",
}


def __getattr__(name: str) -> Any:  # on first use: a run that only takes tasks in order loads nothing else
    if name not in _HOMES:
        raise AttributeError(f"module 'surefoot.data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"surefoot.data.{_HOMES[name]}"), name)
