"""Plain tables: aligned, and never cut, so a log holds every word.

On a terminal the last column wraps to the window; elsewhere a row is one line, however long.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> str:
    """A titled table as text.

    Args:
        rows: one sequence of cells per row, as many as `columns`; line breaks in cells become spaces.
        width: wrap the last column to this many characters; None never wraps.

    Example:
        >>> print(table("Metric Checks", ["Status", "Check"], [["PASS", "min(x) > 0"]]))
        Metric Checks
        Status  Check
        ------  ----------
        PASS    min(x) > 0
    """
    cells = [[" ".join(str(cell).split()) for cell in row] for row in rows]
    sizes = [max(len(name), *(len(row[i]) for row in cells), 0) for i, name in enumerate(columns)]
    left = sum(sizes[:-1]) + 2 * (len(columns) - 1)
    if width is not None:
        sizes[-1] = max(min(sizes[-1], width - left), 20)
    lines = [title, _line(columns, sizes), _line(["-" * size for size in sizes], sizes)]
    for row in cells:
        first, *rest = (textwrap.wrap(row[-1], sizes[-1]) or [""]) if width is not None else [row[-1]]
        lines.append(_line([*row[:-1], first], sizes))
        lines += [" " * left + more for more in rest]
    return "\n".join(lines)


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is, or None when it is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _line(cells: Sequence[str], sizes: Sequence[int]) -> str:
    return "  ".join(cell.ljust(size) for cell, size in zip(cells, sizes, strict=True)).rstrip()
