"""Numbers and strange text made readable: what reaches a terminal goes through here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from surefoot.system.text import printable

__all__ = ["counted", "duration", "number", "printable", "python_call", "shown_path", "size"]


def number(value: float) -> str:
    """Four significant digits for the screen; the log keeps them all."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:.4g}"
    return f"{value:.1e}"


def duration(seconds: float) -> str:
    """`45s`, `3m 05s`, `2h 10m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


def size(count: float) -> str:
    """Bytes in the largest unit that keeps a digit before the point."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def counted(count: int, thing: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{count} {thing}{'' if count == 1 else 's'}"


def python_call(function: str, run: Path, arguments: Sequence[str]) -> str:
    """What to write in Python about a run: `surefoot.evaluate("runs/1", tasks=rows)`."""
    return f"surefoot.{function}({', '.join([json.dumps(str(run), ensure_ascii=False), *arguments])})"


def shown_path(path: Path) -> str:
    """Relative to the current folder where it lies inside it."""
    try:
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
