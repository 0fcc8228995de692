"""Runs a command so that every Python process below it is measured, and reads the records they leave.

Owns       the data folder: one sub-folder per run, in it one record and one data file per process.
Promises   the exit code is the command's own; a process that did not say goodbye is known by its record.
Never      imports coverage or what it measures.

    run -> sitecustomize -> worker_coverage_child (in each process) -> records

Read next: `worker_coverage_child.py`, which runs inside the processes, and `worker_coverage.py`, which adds up.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.errors import ConfigError
from surefoot.harness.files import make_unseen, write_json
from surefoot.harness.scrub import scrub
from surefoot.harness.worker_coverage_child import FOLDER

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
class Seen:
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
            "no command was given", "there is nothing to measure", "surefoot cover run -- python -m pytest"
        )
    if not (math.isfinite(save_every) and save_every >= 0):
        raise ConfigError(f"--save-every is {save_every}", "it counts seconds", "give 0 for never, or 0.2")
    roots = [_folder(source) for source in sources]
    if fresh:
        _erase(data)
    folder = _new_run(data, roots, list(command), save_every)
    code = _run_to_the_end(command, _environment(folder))
    _let_workers_finish(folder)
    print(f"surefoot cover: {_summary(folder)}; next: surefoot cover report", file=sys.stderr)
    return code


def processes(folder: Path) -> Iterator[Seen]:
    """The processes of one run, from their records; a torn last line is a process that was killed while writing it."""
    for path in sorted(folder.glob("*.jsonl")):
        facts = [fact for fact in map(_fact, path.read_bytes().split(b"\n")) if fact]
        hello = next((fact for fact in facts if fact["event"] == "hello"), {})
        events = {fact["event"] for fact in facts}
        yield Seen(
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
        child = subprocess.Popen(list(command), env=environ)
    except OSError as error:
        print(f"surefoot cover: {command[0]} cannot be started: {error.strerror}", file=sys.stderr)
        return 127
    # An interrupt from the keyboard reaches the command too; whoever signals only us means the command.
    kept = {
        number: signal.signal(number, lambda got, _: child.send_signal(got))
        for number in (signal.SIGTERM, signal.SIGHUP)
    }
    kept[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code = child.wait()
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _let_workers_finish(folder: Path, limit: float = 5.0) -> None:
    """Wait for processes that outlive the command by a moment, as Ray's do: they may still be saving."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        waiting = [p for p in processes(folder) if p.touched and not p.ended]
        if not any(_is_alive(int(process.name.split("-")[0])) for process in waiting):
            return
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"
