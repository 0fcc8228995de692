"""Coverage of a command and every Python process below it, with a flag when some of it was lost.

Owns       what the data of all runs in a folder mean together.
Promises   runs add up; a process that ran measured code and did not say goodbye makes the number a lower bound, and
           the report says so; nothing measured is a `StateError`, never 0 % or 100 %.
Never      calls a number exact when a worker may have run more.

Read next: `worker_coverage_run.py`, which runs the command.
"""

from __future__ import annotations

import math
import os
import sqlite3
import sys
import tempfile
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.errors import ConfigError, StateError
from surefoot.harness.files import read_json
from surefoot.harness.tables import table
from surefoot.harness.worker_coverage_run import processes, require_coverage, run

if TYPE_CHECKING:
    from coverage import CoverageData

__all__ = ["Report", "meets", "processes", "report", "run"]
_SKIPPED = {"site-packages", "node_modules", "__pycache__"}


@dataclass(frozen=True)
class Report:
    """Coverage over all runs in a data folder.

    Example:
        percent 83.1 and `lost` with one entry prints
        "coverage >= 83.1 %, lower bound: 1 worker left no data"
    """

    percent: float
    files: list[tuple[str, int, int, float]]  # name, statements, missing statements, percent
    runs: int
    processes: int
    lost: list[str] = field(default_factory=list)  # ran measured code, left nothing
    cut_short: list[str] = field(default_factory=list)  # saved on the way, ended by force
    blind: list[str] = field(default_factory=list)  # could not be measured, and why
    notes: list[str] = field(default_factory=list)

    @property
    def lower_bound(self) -> bool:
        """Whether more may have run than was seen."""
        return bool(self.lost or self.cut_short or self.blind)

    @property
    def line(self) -> str:
        """The result in one line; rounded down, so that it never says more than is known."""
        shown = f"{math.floor(self.percent * 10) / 10:.1f} %"
        if not self.lower_bound:
            return f"coverage {shown}"
        parts = [
            _several(len(self.lost), "worker", "left no data"),
            _several(len(self.cut_short), "worker", "ended by force after the last save"),
            _several(len(self.blind), "process", "could not be measured"),
        ]
        return f"coverage >= {shown}, lower bound: {', '.join(filter(None, parts))}"

    def as_json(self) -> dict[str, Any]:
        """The same for machines."""
        named = [dict(zip(("file", "statements", "missing", "percent"), row, strict=True)) for row in self.files]
        plain = {
            name: getattr(self, name)
            for name in "percent lower_bound runs processes lost cut_short blind notes".split()
        }
        return {**plain, "files": named}

    def text(self) -> str:
        """A table of files, the reasons for a lower bound, and the line."""
        rows = [
            [name, str(total), str(gone), f"{math.floor(part * 10) / 10:.1f} %"]
            for name, total, gone, part in self.files
        ]
        reasons = [f"left no data: {name}" for name in self.lost]
        reasons += [f"ended by force: {name}" for name in self.cut_short]
        reasons += [f"not measured: {why} ({number} times)" for why, number in Counter(self.blind).items()]
        head = table("Coverage", ["File", "Statements", "Missing", "Covered"], rows)
        return "\n".join([head, "", *(f"warning: {text}" for text in [*reasons, *self.notes]), self.line])


def report(data: Path) -> Report:
    """Everything the runs in `data` saw, added up."""
    require_coverage()
    folders = sorted(path.parent for path in data.glob("run-*/settings.json"))
    if not folders:
        raise StateError(f"there is no run in {data}", "nothing was measured", "surefoot cover run -- COMMAND")
    roots = [root for folder in folders for root in _roots(folder)]
    measured, damaged = _added_up(folders)
    seen = [replace(one, has_data=one.has_data and one.name not in damaged) for f in folders for one in processes(f)]
    ran = {name for name in measured.measured_files() if _is_below(name, roots)}
    if not ran:
        raise StateError(
            f"no code below {', '.join(str(root) for root in roots)} was seen to run in {len(seen)} Python processes"
            + "".join(f"; left no data: {process.argv}" for process in seen if process.lost)
            + "".join(f"; {why}" for process in seen for why in process.blind),
            "no lines are no evidence, neither for 0 % nor for 100 %",
            "check --source, and that the command starts a Python that has coverage installed",
        )
    gone = sorted(name for name in ran if not Path(name).is_file())
    counted = (ran - set(gone)) | {str(path) for root in roots for path in _python_files(root)}
    percent, files, notes = _judge(measured, sorted(counted))
    if gone:
        notes.append(f"{len(gone)} measured files are gone and not counted: {', '.join(gone[:3])}")
    return Report(
        percent=percent,
        files=files,
        runs=len(folders),
        processes=len(seen),
        lost=[process.argv for process in seen if process.lost],
        cut_short=[process.argv for process in seen if process.touched and process.has_data and not process.ended],
        blind=[why for p in seen for why in p.blind],
        notes=notes,
    )


def meets(percent: float, fail_under: float | None) -> bool:
    """Whether `percent` reaches the limit; a lower bound that does is enough, since the truth is not smaller."""
    if fail_under is None:
        return True
    if not 0 <= fail_under <= 100:
        raise ConfigError(f"--fail-under is {fail_under}", "coverage lies between 0 and 100", "give a number in there")
    return percent >= fail_under


def _is_below(name: str, roots: list[Path]) -> bool:
    return any(Path(name).is_relative_to(root) for root in roots)


def _added_up(folders: list[Path]) -> tuple[CoverageData, set[str]]:
    from coverage import CoverageData, CoverageException

    total = CoverageData(no_disk=True)
    damaged = set()
    for path in sorted(path for folder in folders for path in folder.glob("*.cov")):
        one = CoverageData(no_disk=True)
        try:
            one.loads(path.read_bytes())
        except (CoverageException, sqlite3.Error, zlib.error, ValueError, OSError) as error:
            damaged.add(path.stem)
            print(f"surefoot cover: {path} cannot be read: {error}", file=sys.stderr)
            continue
        total.update(one)
    return total, damaged


def _roots(folder: Path) -> list[Path]:
    settings = read_json(folder / "settings.json")
    roots = settings.get("roots") if isinstance(settings, dict) else None
    if not isinstance(roots, list) or not all(isinstance(root, str) for root in roots):
        raise StateError(f"{folder}/settings.json names no folders", "it says what was measured", "remove that run")
    return [Path(root) for root in roots]


def _judge(measured: CoverageData, counted: list[str]) -> tuple[float, list[tuple[str, int, int, float]], list[str]]:
    from coverage import Coverage

    judge = Coverage(data_file=None, config_file=False, branch=True, messages=False)
    judge.set_option("report:ignore_errors", True)  # what cannot be parsed is named in the notes
    judge.get_data().update(measured)
    judge.get_data().touch_files(counted)  # a file that never ran counts, with nothing covered
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        out = Path(place) / "coverage.json"
        judge.json_report(morfs=counted, outfile=str(out))
        result = read_json(out)
    files = [
        (name, one["summary"]["num_statements"], one["summary"]["missing_lines"], one["summary"]["percent_covered"])
        for name, one in sorted(result["files"].items())
    ]
    return float(result["totals"]["percent_covered"]), files, [str(warning.message) for warning in caught]


def _python_files(root: Path) -> Iterator[Path]:
    for folder, inner, names in os.walk(root):
        inner[:] = sorted(name for name in inner if not name.startswith(".") and name not in _SKIPPED)
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _several(number: int, noun: str, what: str) -> str:
    many = noun + ("es" if noun.endswith("s") else "s")
    return f"{number} {noun if number == 1 else many} {what}" if number else ""
