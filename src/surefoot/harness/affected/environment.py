"""What every test depends on without saying so: the Python, the platform, the installed distributions."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping

from surefoot.harness.affected.blocks import digest


def environment() -> dict[str, str]:
    """Name to value; a change of any reruns everything."""
    installed = sorted({name.lower() for place in sys.path for name in _distributions(place)})
    return {
        "python": platform.python_version(),
        "implementation": sys.implementation.name,
        "platform": f"{sys.platform} {platform.machine()}",
        "distributions": digest("\n".join(installed)),
    }


def _distributions(place: str) -> list[str]:
    """Names of the metadata folders in one place of the search path: each carries the name and the version."""
    try:
        return [name for name in os.listdir(place or ".") if name.endswith((".dist-info", ".egg-info"))]
    except OSError:
        return []  # a zip file, or a folder that is not there


def difference(before: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """One sentence about what changed, or None."""
    for name, value in now.items():
        if before.get(name) != value:
            if name == "distributions":
                return "the installed distributions changed"
            return f"{name} changed from {before.get(name)} to {value}"
    return None
