"""One number out of the metrics that a run left behind; an old, missing or non-finite one is no number."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from surefoot.errors import SurefootError
from surefoot.harness.bisect.suite_evidence import OUT_NAME, trials

Look = dict[str, tuple[int, int]]


class NoValueError(Exception):
    """The run left nothing that can be compared, for the reason in the message."""


@dataclass(frozen=True)
class Measure:
    """Which metric, where it lies, and how a series becomes one number."""

    metric: str
    stat: str
    at: Path | None
    """Where the run leaves its metrics; None is the folder given to it as SUREFOOT_BISECT_DIR."""
    inside: str | None = None
    """The same below SUREFOOT_BISECT_DIR, where it is looked for first: `suites/SUITE/RECIPE` of a suite."""

    def look(self, folder: Path) -> Look:
        """What lies there before the run, so that a leftover of another commit is not taken for a result."""
        return _look(self.at or folder)

    def _own(self, folder: Path) -> Path | None:
        """Where in the folder of this very run the numbers are; None when they are somewhere else."""
        if self.inside is not None:
            return folder / self.inside if (folder / self.inside).exists() else None
        recipes = trials(folder / OUT_NAME) if self.at is None else []
        if len(recipes) > 1:
            names = ", ".join(str(path.relative_to(folder)) for path in recipes)
            raise NoValueError(f"several recipes ran; name one with --metrics-at: {names}")
        return recipes[0] if recipes else None

    def value(self, folder: Path, before: Look | None) -> float:
        """The number of the run that has just ended."""
        from surefoot.harness.series import is_number
        from surefoot.harness.sources import load_metrics

        own = self._own(folder)
        where = own or self.at or folder
        if own is None and self.at is not None and _look(where) == before:
            raise NoValueError(f"{where.name} was not written by this run")
        try:
            metrics = load_metrics(where)
        except SurefootError as error:
            raise NoValueError(error.what) from error
        series, _ = metrics.resolve(self.metric)
        if not series:
            names = ", ".join(metrics.nearest_names(self.metric))
            raise NoValueError(f"{self.metric} was not logged; nearest: {names}")
        points = list(series.values())
        if not all(is_number(point) for point in points):
            raise NoValueError(f"{self.metric} is not a finite number everywhere")
        return _STATS[self.stat]([float(point) for point in points])


_STATS: dict[str, Callable[[list[float]], float]] = {
    "last": lambda values: values[-1],
    "mean": lambda values: math.fsum(values) / len(values),
    "median": statistics.median,
    "min": min,
    "max": max,
}


def _look(path: Path) -> Look:
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    found = {}
    for file in files:
        stat = file.stat()
        found[str(file)] = (stat.st_mtime_ns, stat.st_size)
    return found
