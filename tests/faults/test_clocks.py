"""The clock on the wall may jump by an hour, either way, at any moment: nothing times out, nothing changes its order.

Durations and deadlines are measured on the monotonic clock, which nobody can set. The first half reads the source: who
looks at the wall at all is listed here, with what for. The second half trains while the wall clock jumps at every look,
and holds the run against one under a good clock, bit for bit.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from figures import Record, note
from kill_kit import ROOT
from kill_runs import PLAIN, Bench, Case, differences, facts

PACKAGES = (ROOT / "src" / "surefoot", ROOT / "harness" / "src" / "surefoot_harness")
HOUR = 3600.0

# -- who looks at the wall ------------------------------------------------------------------------

WALL = {
    "time.time", "time.time_ns", "time.localtime", "time.gmtime", "time.ctime", "time.asctime", "time.strftime",
    "time.clock_gettime", "time.clock_gettime_ns", "time.CLOCK_REALTIME", "datetime.datetime.now",
    "datetime.datetime.utcnow", "datetime.datetime.today", "datetime.date.today", "os.path.getmtime",
    "os.path.getctime", "os.path.getatime",
}  # fmt: skip
"""Called, or only named: a deadline may be given its clock as an argument."""
FILE_TIMES = {"st_mtime", "st_ctime", "st_atime", "st_mtime_ns", "st_ctime_ns", "st_atime_ns"}
"""What the wall clock said when a file was changed, whatever the object."""

SHOWN: dict[str, tuple[int, str]] = {
    "data/on_disk/index.py": (1, "whether a file is another one than before: equal or not, never earlier or later"),
    "data/on_disk/dataset.py": (1, "the same"),
    "demo/hack.py": (1, "names the folder of a demo"),
    "affected/hooks.py": (1, "the session's start, held against file times below"),
    "affected/remember.py": (
        1, "file times are wall times: a second look for edits during a session, after that by content"
    ),
    "baseline.py": (2, "written into a baseline for people"),
    "bisect/evidence.py": (
        3, "names a folder and a file; whether a file is another one than before: equal or not, never earlier or later"
    ),
    "suites/plan.py": (1, "written into results for people"),
    "suites/verdicts.py": (2, "names a folder, and is written into it"),
    "tracker/results.py": (1, "names a session; its duration is measured elsewhere"),
    "worker_coverage_child.py": (1, "written into a trace for people"),
    "worker_coverage.py": (1, "names a folder"),
    "storage/lock.py": (1, "since when the lock is held, in a message; who is alive is asked of the system"),
    "storage/run_folder.py": (2, "names a run folder, counted on if taken; in environment.json for people"),
    "tracking/process_logs.py": (1, "a part of a name: whose count a line is"),
    "report/page.py": (1, "says when the page was written"),
    "tracking/live.py": (3, "says when a run began and when it was last heard of, to people on other machines"),
    "tracking/sink_process.py": (2, "TensorBoard's own field; a panel may be out of order, the run is not"),
}  # fmt: skip
"""File: how many looks, and what for. None of them is a duration, a deadline, or an order that training depends on."""


def looks(tree: ast.Module) -> list[str]:
    """Every place of a module that reads the wall clock, or names something that does."""
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            aliases |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    names = [dotted(node, aliases) for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute)]
    return [name for name in names if name in WALL or name.rpartition(".")[2] in FILE_TIMES]


def dotted(node: ast.expr, aliases: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return aliases.get(node.id, node.id)
    return f"{dotted(node.value, aliases)}.{node.attr}" if isinstance(node, ast.Attribute) else "?"


def test_the_wall_clock_is_only_looked_at_to_show_it() -> None:
    files = [(path, str(path.relative_to(package))) for package in PACKAGES for path in sorted(package.rglob("*.py"))]
    found = [(name, len(looks(ast.parse(path.read_text())))) for path, name in files]
    assert {name: n for name, n in found if n} == {name: n for name, (n, _) in SHOWN.items()}, (
        "a duration or a deadline takes time.monotonic(); a look that only shows the time is listed here, with what for"
    )


@pytest.mark.parametrize(
    "text",
    [
        "import time\ndeadline = time.time() + 5",
        "import time as t\nbegan = t.time_ns()",
        "from time import time as clock\nwait(clock)",
        "import datetime\nd = datetime.datetime.now(datetime.UTC)",
        "from datetime import datetime as when\nd = when.utcnow()",
        "import datetime as dt\nd = dt.date.today()",
        "newest = max(folder.iterdir(), key=lambda p: p.stat().st_mtime)",
        "import os\nnewest = max(paths, key=os.path.getmtime)",
        "def wait(clock=__import__('time').time): ...\nimport time\nwait(time.time)",
    ],
)
def test_planted_look_at_the_wall_is_found(text: str) -> None:
    assert looks(ast.parse(text)) != []


def test_the_monotonic_clock_is_nobodys_business() -> None:
    text = "import time\na = time.monotonic() + time.perf_counter()\ntime.sleep(1)\nself.time = row.time\nnow = x.now()"
    assert looks(ast.parse(text)) == []


# -- a run under a clock that jumps ---------------------------------------------------------------

RUNNER = """
import datetime, itertools, os, sys, time
from types import SimpleNamespace

real, real_ns, steady = time.time, time.time_ns, time.monotonic
offsets = itertools.cycle([float(word) for word in os.environ["OFFSETS"].split()])
seen = open("looked at the wall", "w")

def jump():
    seen.write("."); seen.flush()
    return next(offsets)

class Jumping(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(real() + jump(), tz)

time.time = lambda: real() + jump()
time.time_ns = lambda: real_ns() + int(jump() * 10**9)
datetime.datetime = Jumping

if os.environ.get("PLANTED"):  # a deadline that somebody measured on the wall
    import surefoot.rewards.pool as pool
    ahead = itertools.accumulate(map(abs, offsets))  # only forward: time that runs back is refused by the records
    pool.time = SimpleNamespace(monotonic=lambda: steady() + next(ahead), sleep=time.sleep)

from surefoot.cli import main
main()
"""
"""`surefoot` in a process of its own, with a wall clock that is off by the next of OFFSETS at every look."""


def train(folder: Path, *words: str, offsets: str, **env: str) -> subprocess.CompletedProcess[str]:
    (folder / "runner.py").write_text(RUNNER)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "NO_COLOR": "1", "OFFSETS": offsets} | env
    argv = [sys.executable, "runner.py", "train", *words]
    return subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def plain(bench: Bench) -> Path:
    """The run under a good clock."""
    folder = bench.folder(PLAIN)
    ended = bench.train(folder)
    assert ended.code == 0, ended.said
    return folder


def test_a_run_is_the_same_when_the_clock_jumps_an_hour_at_every_look(
    bench: Bench, plain: Path, record_property: Record
) -> None:
    folder = bench.folder(PLAIN)
    ended = train(folder, "run.toml", offsets=f"0 {HOUR} {-HOUR}", TZ="Pacific/Kiritimati")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (folder / "looked at the wall").stat().st_size > 0, "nobody looked: the test shows nothing"
    assert differences(facts(plain / "run"), facts(folder / "run")) == []
    assert checkpoints(folder) == checkpoints(plain), "an hour that never was asks for no save"
    note(record_property, "P22", "run whose wall clock jumps an hour at every look: the same bits", 1)


@pytest.mark.nightly  # seconds of a whole run; its neighbours show the same every day
def test_a_run_that_was_killed_goes_on_the_same_an_hour_before_it_began(bench: Bench, plain: Path) -> None:
    """The lock, the journal and the newest checkpoint all seem to be from the future, and in the wrong order."""
    folder = bench.killed(PLAIN, "loop.before_log=kill@5").folder
    saved = sorted((folder / "run" / "checkpoints").iterdir(), key=lambda path: int(path.name.removeprefix("step_")))
    assert len(saved) >= 2, "one checkpoint has no order"
    now = (folder / "run.toml").stat().st_mtime
    for age, checkpoint in enumerate(saved):
        for path in [checkpoint, *checkpoint.rglob("*")]:
            os.utime(path, (now - age * HOUR, now - age * HOUR))  # the newest step has the oldest files
    ended = train(folder, "--resume", "run", offsets=f"{-HOUR}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert differences(facts(plain / "run"), facts(folder / "run")) == []
    assert f"step {int(saved[-1].name.removeprefix('step_'))}" in ended.stdout, "it went on from the newest step"


@pytest.mark.nightly  # seconds of a whole run; its neighbours show the same every day
def test_planted_deadline_on_the_wall_is_caught(bench: Bench) -> None:
    """Teeth: rewards that have an hour less than nothing to answer, whenever the clock jumps."""
    folder = bench.folder(Case("wall", {"max_steps": 2}))
    ended = train(folder, "run.toml", offsets=f"0 {HOUR} {-HOUR}", PLANTED="1")
    assert ended.returncode == 4, f"no reward timed out:\n{ended.stdout}{ended.stderr}"
    assert "timeout" in ended.stdout + ended.stderr


def test_a_name_from_a_clock_that_went_back_is_never_taken_twice(tmp_path: Path) -> None:
    """The same second comes again when the clock is set back: the second run gets a folder of its own."""
    import datetime

    from surefoot.storage.run_folder import RunFolder

    moment = datetime.datetime(2026, 10, 25, 1, 30, tzinfo=datetime.UTC)
    later = [moment, moment + datetime.timedelta(hours=1), moment, moment - datetime.timedelta(hours=1), moment]
    roots = [RunFolder.create(None, "x", tmp_path, now=now).root for now in later]
    assert len(set(roots)) == len(roots)
