"""Refuse the malformed, stop the collapsing: what must hold for every group, sample, batch and run.

`HeldOutGuard`, `GuardStatus` and `CollapseStopError` load on first use, and `invariants` only where it is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surefoot.errors import CollapseStopError
    from surefoot.guards.collapse import GuardStatus, HeldOutGuard

__all__ = ["CollapseStopError", "GuardStatus", "HeldOutGuard"]


def __getattr__(name: str) -> Any:
    if name == "CollapseStopError":
        from surefoot.errors import CollapseStopError

        return CollapseStopError
    if name in ("GuardStatus", "HeldOutGuard"):
        from surefoot.guards import collapse

        return getattr(collapse, name)
    raise AttributeError(f"module 'surefoot.guards' has no attribute {name!r}")
