"""Which task next: loading, holding out, dealing. Read `sources.py` first, then `tasks.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surefoot.data.heldout import HeldoutLeakError, HeldoutSplit

__all__ = ["HeldoutLeakError", "HeldoutSplit"]


def __getattr__(name: str) -> Any:
    if name in __all__:  # on first use: who only deals tasks does not load the search for near-duplicates
        from surefoot.data import heldout

        return getattr(heldout, name)
    raise AttributeError(f"module 'surefoot.data' has no attribute {name!r}")
