"""Which task next: loading, holding out, dealing. Read `sources.py` first, then `tasks.py`.

For more tasks than fit into memory read `streaming.py` and `large_stream.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surefoot.data.batcher import TaskBatcher
    from surefoot.data.curriculum import CurriculumSampler
    from surefoot.data.heldout import HeldoutLeakError, HeldoutSplit
    from surefoot.data.large.large_stream import LargeTaskStream
    from surefoot.data.large.lru import LRUCache
    from surefoot.data.large.streaming import StreamingDataset
    from surefoot.data.loader import TaskDataLoader
    from surefoot.data.success_curriculum import SuccessCurriculum

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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'surefoot.data' has no attribute {name!r}")
    if name in ("HeldoutLeakError", "HeldoutSplit"):
        # on first use: who only deals tasks does not load the search for near-duplicates
        from surefoot.data import heldout

        return getattr(heldout, name)
    from surefoot.data import batcher, curriculum, loader, success_curriculum
    from surefoot.data.large import large_stream, lru, streaming

    homes = (batcher, curriculum, large_stream, loader, lru, streaming, success_curriculum)
    return next(vars(home)[name] for home in homes if name in vars(home))
