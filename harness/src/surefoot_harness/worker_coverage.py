"""Coverage of a command and every Python process below it, with a flag when some of it was lost.

Owns       what the data of all runs in a folder mean together.
Promises   runs add up; a process that ran measured code and did not say goodbye makes the number a lower bound, and
           the report says so; nothing measured is a `StateError`, never 0 % or 100 %.
Never      calls a number exact when a worker may have run more.

Read next: `worker_coverage.py`, which runs the command.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot_harness.errors import ConfigError, StateError
from surefoot_harness.files import make_unseen, read_json, write_json
from surefoot_harness.own_command import own_name
from surefoot_harness.scrub import scrub
from surefoot_harness.system.process import Child, is_alive
from surefoot_harness.system.signals import Deadline
from surefoot_harness.tables import table
from surefoot_harness.worker_coverage_child import FOLDER

if TYPE_CHECKING:
    from coverage import CoverageData


# -- Runs a command so that every Python process below it is measured, and reads the records they leave
# Owns       the data folder: one sub-folder per run, in it one record and one data file per process.
# Promises   the exit code is the command's own; a process that did not say goodbye is known by its record.
# Never      imports coverage or what it measures.
#
# run -> sitecustomize -> worker_coverage_child (in each process) -> records


_BOOTSTRAP = '''"""Starts the measurement of this interpreter, then makes way for the sitecustomize it hides."""
import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
spec = importlib.util.spec_from_file_location("_surefoot_cover", os.path.join(HERE, "_surefoot_cover.py"))
child = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = child
spec.loader.exec_module(child)
if os.environ.get(child.FOLDER) == {folder!r}:
    child.start(child.Path({folder!r}))

kept = list(sys.path)
sys.path[:] = [place for place in sys.path if os.path.abspath(place) != HERE]
del sys.modules["sitecustomize"]
try:
    import sitecustomize
except ModuleNotFoundError as error:
    if error.name != "sitecustomize":
        raise
    sys.modules["sitecustomize"] = sys.modules[__name__] = type(sys)("sitecustomize")
finally:
    sys.path[:] = kept
'''


@dataclass(frozen=True)
class ProcessCoverage:
    """What one process left: whether it ran measured code, whether it ended with a save, what it could not see."""

    name: str
    argv: str
    touched: bool
    ended: bool
    has_data: bool
    blind: tuple[str, ...] = ()

    @property
    def lost(self) -> bool:
        """Whether it ran measured code and left nothing, though it could have."""
        return self.touched and not self.has_data and not self.blind


def run(command: Sequence[str], data: Path, sources: Sequence[Path], fresh: bool = False, save_every: float = 0) -> int:
    """Run `command` measured; its own exit code, 128 + n for signal n, 127 when it cannot be started."""
    require_coverage()
    if not command:
        raise ConfigError(
            "no command was given", "there is nothing to measure", f"{own_name()} cover run -- python -m pytest"
        )
    if not (math.isfinite(save_every) and save_every >= 0):
        raise ConfigError(f"--save-every is {save_every}", "it counts seconds", "give 0 for never, or 0.2")
    roots = [_folder(source) for source in sources]
    if fresh:
        _erase(data)
    folder = _new_run(data, roots, list(command), save_every)
    code = _run_to_the_end(command, _environment(folder))
    _let_workers_finish(folder)
    print(f"surefoot cover: {_summary(folder)}; next: {own_name()} cover report", file=sys.stderr)
    return code


def processes(folder: Path) -> Iterator[ProcessCoverage]:
    """The processes of one run, from their records; a torn last line is a process that was killed while writing it."""
    for path in sorted(folder.glob("*.jsonl")):
        facts = [fact for fact in map(_fact, path.read_bytes().split(b"\n")) if fact]
        hello = next((fact for fact in facts if fact["event"] == "hello"), {})
        events = {fact["event"] for fact in facts}
        yield ProcessCoverage(
            name=path.stem,
            argv=scrub(" ".join(hello.get("argv", [path.stem]))),
            touched="touched" in events or bool(hello.get("inherited")),
            ended="end" in events,
            has_data=path.with_suffix(".cov").exists(),
            blind=tuple(str(fact["why"]) for fact in facts if fact["event"] in ("blind", "unseen")),
        )


def require_coverage() -> None:
    """Refuse to go on without the coverage package."""
    try:
        found = importlib.util.find_spec("coverage")
    except ValueError:  # a stand-in without a spec is no package
        found = None
    if found is None:
        raise ConfigError(
            "coverage is not installed", "it counts the lines that ran", "python -m pip install 'coverage>=7.10'"
        )


def _fact(line: bytes) -> dict[str, Any] | None:
    try:
        fact = json.loads(line)
    except ValueError:
        return None
    return fact if isinstance(fact, dict) and "event" in fact else None


def _summary(folder: Path) -> str:
    seen = list(processes(folder))
    open_ends = sum(process.touched and not process.ended for process in seen)
    return f"{len(seen)} Python processes" + (f", {open_ends} of them ended without a last save" if open_ends else "")


def _folder(source: Path) -> Path:
    if not source.is_dir():
        raise ConfigError(
            f"--source {source} is not a folder", "it says which files count", "give folders, as --source src"
        )
    return source.resolve()


def _new_run(data: Path, roots: list[Path], command: list[str], save_every: float) -> Path:
    if data.parent.name == ".surefoot":
        make_unseen(data.parent)
    data.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"run-{time.strftime('%Y%m%d-%H%M%S')}-", dir=data.resolve()))
    if os.pathsep in str(folder):
        folder.rmdir()
        raise ConfigError(
            f"{data.resolve()} contains {os.pathsep!r}", "PYTHONPATH splits there", "use --data elsewhere"
        )
    settings = {
        "roots": [str(root) for root in roots],
        "include": [f"{_pattern(root)}/*" for root in roots],
        "omit": ["*/site-packages/*", f"{_pattern(data.resolve())}/*"],
        "data": str(data.resolve()),
        "branch": True,
        "save_every": save_every,
        "program": command[0],
    }
    (folder / "start").mkdir()
    # A copy: the run goes on as it began even if a test of it replaces or removes the installed surefoot.
    shutil.copyfile(Path(__file__).with_name("worker_coverage_child.py"), folder / "start" / "_surefoot_cover.py")
    (folder / "start" / "sitecustomize.py").write_text(_BOOTSTRAP.format(folder=str(folder)), encoding="utf-8")
    write_json(folder / "settings.json", settings)
    return folder


def _pattern(path: Path) -> str:
    """`path` where coverage wants a pattern: "?" for characters with a meaning; the report drops what is too much."""
    return re.sub(r"[\[\]*?\\]", "?", str(path)).rstrip("/")


def _environment(folder: Path) -> dict[str, str]:
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(folder / "start"), *([before] if before else [])])
    return {**os.environ, "PYTHONPATH": path, FOLDER: str(folder)}


def _erase(data: Path) -> None:
    for settings in data.glob("run-*/settings.json"):
        shutil.rmtree(settings.parent)


def _run_to_the_end(command: Sequence[str], environ: dict[str, str]) -> int:
    try:
        child = Child.start(command, session=False, env=environ)
    except OSError as error:
        print(f"surefoot cover: {command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        return 127
    # An interrupt from the keyboard reaches the command too; whoever signals only us means the command.
    kept = {
        number: signal.signal(number, lambda got, _: child.send(got, group=False))
        for number in (signal.SIGTERM, signal.SIGHUP)
    }
    kept[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code = child.wait()
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        child.release()  # its workers may still be saving
    return code if code >= 0 else 128 - code


def _let_workers_finish(folder: Path, limit: float = 5.0) -> None:
    """Wait for processes that outlive the command by a moment, as Ray's do: they may still be saving."""
    deadline = Deadline(limit)
    while not deadline.expired:
        waiting = [p for p in processes(folder) if p.touched and not p.ended]
        if not any(is_alive(int(process.name.split("-")[0])) for process in waiting):
            return
        time.sleep(0.05)


# -- Coverage of a command and every Python process below it, with a flag when some of it was lost


_SKIPPED = {"site-packages", "node_modules", "__pycache__"}


@dataclass(frozen=True)
class CoverageReport:
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


def report(data: Path) -> CoverageReport:
    """Everything the runs in `data` saw, added up."""
    require_coverage()
    folders = sorted(path.parent for path in data.glob("run-*/settings.json"))
    if not folders:
        raise StateError(f"there is no run in {data}", "nothing was measured", f"{own_name()} cover run -- COMMAND")
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
    return CoverageReport(
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


__all__ = ["CoverageReport", "meets", "processes", "report", "run"]
