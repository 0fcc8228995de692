"""A copy of the tree in which `scripts/mutants.py` plants its edits, and what is known there of our tests.

`record` runs tests in the copy with our own `--affected`, file by file, and keeps what each depends on between calls:
what was recorded once is run again only when something it depends on has changed. `try_out` plants one mutant, asks
which of the recorded tests depend on it, and runs these until one is red: first those that ran the changed place
themselves, then those that ran something of its file, then the others, each the cheapest first. What was red is run
once more in the same way without the mutant: red there, too, it says nothing and is not asked again.

Never      calls a mutant killed by a test that was not green, in this copy and in this way of running it, without it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any, NamedTuple

from mutation import Mutant

if TYPE_CHECKING:
    from surefoot_harness.affected.records import AffectedState, ProjectView

STATE = Path(".surefoot", "affected.json")
SEEN = Path(".surefoot", "mutants_seen.json")
FILES_AT_ONCE = 6
BATCHES = (12, 60)
"""Tests in the first fork, and in the second: collecting hundreds costs more than running the few that see it."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
NOTHING_RAN = 5
"""What pytest ends with where all that it was asked for is left out."""
NO_REWRITE = "ignore::pytest.PytestAssertRewriteWarning"  # a warm process has loaded hypothesis before pytest looks


class Outcome(NamedTuple):
    """What became of one mutant."""

    mutant: Mutant
    killed: bool
    how: str
    """The test that was red, or why it survived."""
    chosen: int
    """How many tests `--affected` chose."""
    ran: int
    """How many of these were asked."""
    seconds: float


class Recorded(NamedTuple):
    """What the copy knows of the tests before any change."""

    tests: dict[str, float]
    """Green ones, with their seconds when they were recorded."""
    left_out: list[str]
    """Not green there, or changed since: nothing can be learned from them."""


class Copy:
    """What git tracks of a tree, its tests' dependencies, and one mutant at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._forks: Forks | None = None
        self._chooser: subprocess.Popen[str] | None = None
        self._sound: set[str] = set()
        self.unsound: set[str] = set()
        """Tests that were red, run as mutants meet them, where there was no mutant."""

    @classmethod
    def of(cls, source: Path, folder: Path, names: Sequence[str]) -> Copy:
        """`names` of `source`, brought up to date in `folder`; what else lies there is gone, but for the records."""
        for path in [each for each in folder.rglob("*") if each.is_file() or each.is_symlink()]:
            inside = path.relative_to(folder).as_posix()
            if inside not in names and path.parent.name != ".surefoot":
                path.unlink()
        for name in names:
            target = folder / name
            if not target.exists() or target.is_symlink() or target.read_bytes() != (source / name).read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.unlink(missing_ok=True)
                shutil.copy2(source / name, target, follow_symlinks=False)
        if (source / STATE).exists() and not (folder / STATE).exists():
            (folder / STATE).parent.mkdir(exist_ok=True)
            shutil.copy2(source / STATE, folder / STATE)
        return cls(folder)

    def __enter__(self) -> Copy:
        return self

    def __exit__(self, *error: object) -> None:
        for process in (self._chooser, self._forks.server if self._forks else None):
            if process is not None:
                _end(process)

    def environment(self) -> dict[str, str]:
        """With the copy's own packages first, and what libraries read once, at their start."""
        packages = [str(path) for path in (self.root / "src", self.root / "harness" / "src") if path.is_dir()]
        return {**os.environ, **OFFLINE, "PYTHONPATH": os.pathsep.join(packages), "PYTHONDONTWRITEBYTECODE": "1"}

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Python in the copy, asked and answering line by line."""
        return subprocess.Popen(
            [sys.executable, *words], cwd=self.root, env=self.environment(), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    # -- what the tests depend on -----------------------------------------------------------------

    def record(self, files: Sequence[str], until: float, workers: int = 1) -> bool:
        """Run those of these test files whose record is missing or stale; whether all were done by then."""
        seen: dict[str, str] = self._seen()
        now = {file: _digest(self.root / file) for file in files}
        stale = {test.partition("::")[0] for test in self.choose(everything=True)}
        waiting = [file for file in files if seen.get(file) != now[file] or file in stale]
        for first in range(0, len(waiting), FILES_AT_ONCE):
            some, left = waiting[first : first + FILES_AT_ONCE], until - time.monotonic()
            if left <= 0:
                return False
            words = ["-q", "--no-header", "-m", "not nightly", "--affected", *some]
            spread = ["-n", str(workers), "--dist", "loadfile"] if workers > 1 else []
            code = self._plain([*spread, *words], left)
            if code is None:
                return False
            if code not in (0, 1, 5):
                raise SystemExit(f"pytest ended with {code} before any change, in {', '.join(some)}")
            seen |= {file: now[file] for file in some}
            (self.root / SEEN).parent.mkdir(exist_ok=True)
            (self.root / SEEN).write_text(json.dumps(seen), encoding="utf-8")
            print(f"recorded {len(waiting[: first + FILES_AT_ONCE])} of {len(waiting)} test files", flush=True)
        return True

    def recorded(self) -> Recorded:
        """Which tests can be asked; to be called before any mutant is planted."""
        answer = self._ask({"what": "recorded"})
        return Recorded(answer["green"], answer["left_out"])

    def choose(self, *, everything: bool = False) -> list[str]:
        """Which recorded tests `--affected` would run now, in the order in which they are asked: green ones alone,
        unless `everything`.
        """
        return list(self._ask({"what": "everything" if everything else "choose"}))

    def _seen(self) -> dict[str, str]:
        place = self.root / SEEN
        return json.loads(place.read_text(encoding="utf-8")) if place.exists() else {}

    def _plain(self, words: Sequence[str], limit_s: float, out: Path | None = None) -> int | None:
        """The exit code of `pytest WORDS` in an interpreter of its own; None where it was not over in time."""
        command = [sys.executable, "-m", "pytest", *words]
        with (out or Path(os.devnull)).open("w") as target:
            child = subprocess.Popen(
                command, cwd=self.root, env=self.environment(), stdin=subprocess.DEVNULL, stdout=target,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                return child.wait(limit_s)
            except subprocess.TimeoutExpired:
                _kill_with_children(child.pid)
                child.wait()
                return None

    def _ask(self, question: dict[str, Any]) -> Any:
        """One question to the process that knows the record: a new one after each recording."""
        if self._chooser is None or question["what"] != "choose":
            if self._chooser is not None:
                _end(self._chooser)
            self._chooser = self.start(str(Path(__file__).resolve()))
        assert self._chooser.stdin is not None, "its input is a pipe"
        assert self._chooser.stdout is not None, "its output is a pipe"
        self._chooser.stdin.write(json.dumps(question) + "\n")
        self._chooser.stdin.flush()
        answer = self._chooser.stdout.readline()
        if not answer:
            raise SystemExit("nobody can say which tests are affected: see above")
        return json.loads(answer)

    # -- one mutant ---------------------------------------------------------------------------------

    def warm(self) -> None:
        """From now on tests run in forks of a process that has other people's packages loaded."""
        self._forks = Forks(self.start(str(Path(__file__).with_name("mutant_forks.py"))))

    def try_out(self, mutant: Mutant, limit_s: float, known: Recorded, near_s: float | None = None) -> Outcome:
        """Plant, choose, run until red, and take it back."""
        began = time.monotonic()
        with self._planted(mutant):
            chosen = self.choose()
        asked = within(chosen, known.tests, near_s)
        if not chosen:
            killed, how = False, "no recorded test depends on it"
        else:
            killed, how = self._judged(mutant, asked, began + limit_s)
        if not killed and len(asked) < len(chosen) and how == GREEN:
            how = f"the first {len(asked)} of {len(chosen)} chosen tests were green"
        return Outcome(mutant, killed, how, len(chosen), len(asked), time.monotonic() - began)

    @contextlib.contextmanager
    def _planted(self, mutant: Mutant) -> Iterator[None]:
        path = self.root / mutant.path
        before = path.read_text(encoding="utf-8")
        path.write_text(mutant.applied(before), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(before, encoding="utf-8")

    def _judged(self, mutant: Mutant, asked: Sequence[str], until: float) -> tuple[bool, str]:
        """The cheapest few first, in batches: most mutants are seen by those."""
        rest, sizes = [test for test in asked if test not in self.unsound], list(BATCHES)
        while rest:
            some = rest[: sizes.pop(0) if sizes else len(rest)]
            with self._planted(mutant):
                code, said = self._asked(some, until)
            if code is None:
                return False, "no verdict in time"
            if code in (0, NOTHING_RAN):
                rest = rest[len(some) :]
                continue
            red, line = first_red(said, some)
            if self._is_sound(red, until):
                return True, line or f"pytest ended with {code}"
            rest = [test for test in rest if test not in self.unsound]
        return False, "no chosen test is green without it" if self.unsound.issuperset(asked) else GREEN

    def _is_sound(self, tests: Sequence[str], until: float) -> bool:
        """Whether these are green without a mutant; if not, none of them is asked again."""
        if not self._sound.issuperset(tests):
            code, _ = self._asked(tests, max(until, time.monotonic() + 60.0))
            (self._sound if code == 0 else self.unsound).update(tests)
        return self._sound.issuperset(tests)

    def _asked(self, tests: Sequence[str], until: float) -> tuple[int | None, str]:
        """The exit code of these tests, and what pytest said."""
        with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
            names, out = Path(folder, "names.txt"), Path(folder, "out.txt")
            names.write_text("".join(f"{name}\n" for name in tests), encoding="utf-8")
            words = ["-x", "-q", "--no-header", "-W", NO_REWRITE, "-m", "not nightly", f"@{names}"]
            left = max(until - time.monotonic(), 1.0)
            code = self._forks.run(words, out, left) if self._forks else self._plain(words, left, out)
            return code, out.read_text(encoding="utf-8", errors="replace")


GREEN = "every chosen test was green"


def within(chosen: Sequence[str], seconds: dict[str, float], near_s: float | None) -> list[str]:
    """All of them, or with `near_s` only the first ones that took so long together, and at least one."""
    total, kept = 0.0, list[str]()
    for test in chosen:
        total += seconds[test]
        if kept and near_s is not None and total > near_s:
            break
        kept.append(test)
    return kept


def first_red(said: str, asked: Sequence[str]) -> tuple[list[str], str]:
    """Which of the asked tests the first red line is about, and the line; all of them where there is no such line."""
    for line in said.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            about = line.partition(" ")[2]
            of_file = [test for test in asked if test.startswith(about.partition(" - ")[0] + "::")]
            named = [test for test in asked if about == test or about.startswith(f"{test} - ")]
            if named or of_file:
                return named[:1] or of_file, f"{line.split()[0]} {named[0] if named else about.partition(' - ')[0]}"[
                    :200
                ]
    return list(asked), ""


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


class Forks:
    """The other side of `mutant_forks.py`."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self.server = server
        self._answer()

    def _answer(self) -> dict[str, int]:
        assert self.server.stdout is not None, "its output is a pipe"
        line = self.server.stdout.readline()
        if not line:
            raise SystemExit("the process that runs tests in forks has ended: see above")
        answer: dict[str, int] = json.loads(line)
        return answer

    def run(self, words: Sequence[str], out: Path, limit_s: float) -> int | None:
        """The exit code of one fork; None where it was not over in time."""
        assert self.server.stdin is not None, "its input is a pipe"
        self.server.stdin.write(json.dumps({"words": list(words), "out": str(out)}) + "\n")
        self.server.stdin.flush()
        late: list[int] = []
        pid = self._answer()["pid"]
        timer = Timer(limit_s, lambda: (late.append(pid), _kill_with_children(pid)))
        timer.start()
        try:
            code = self._answer()["code"]
        finally:
            timer.cancel()
        return None if late else code


def _end(process: subprocess.Popen[str]) -> None:
    """It reads until its input closes; leaving a `Popen` closes its pipes and waits."""
    with process:
        pass


def _kill_with_children(pid: int) -> None:
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        for process in [first, *first.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


# -- in the copy: which tests are affected ----------------------------------------------------------


def answer_questions() -> None:
    """One question a line, until standard input closes. The record is read once; the files, for every question."""
    from surefoot_harness.affected.records import ProjectView, load
    from surefoot_harness.affected.select import Judge
    from surefoot_harness.affected.tree import Tree, environment

    root = Path.cwd()
    state, notice = load(root)
    if notice is not None:
        print(notice, file=sys.stderr)
    known, green = state.known(), None
    for line in sys.stdin:
        view = ProjectView(Tree(root, known), state.roots, state.edges)
        judge = Judge(state, view, environment())
        affected = {test for test in state.tests if judge.is_affected(test)}
        always = {test for test, record in state.tests.items() if record.always and record.outcome == "passed"}
        asked = json.loads(line)["what"]
        if asked == "everything":
            answer: Any = sorted(affected - always)
        elif asked == "recorded":
            passed = {test for test, record in state.tests.items() if record.outcome == "passed"}
            green = (passed - affected) | always
            answer = {
                "green": {test: state.tests[test].seconds for test in sorted(green)},
                "left_out": sorted(test for test in state.tests if state.tests[test].outcome == "failed"),
            }
        else:
            answer = nearest(state, view, affected & (green or set()))
        print(json.dumps(answer), flush=True)


def nearest(state: AffectedState, view: ProjectView, tests: set[str]) -> list[str]:
    """Those that ran what has changed, then those that ran something of that file, then the others."""
    changed = {n for n, key in enumerate(state.keys) if view.hash_of(key.kind, key.path, key.name) != key.hash}
    files = {state.keys[number].path for number in changed}

    def far(test: str) -> tuple[int, float, str]:
        record = state.tests[test]
        ran_it = not changed.isdisjoint(record.keys)
        beside = any(state.keys[number].path in files for number in record.keys)
        return 0 if ran_it else 1 if beside else 2, record.seconds, test

    return sorted(tests, key=far)


if __name__ == "__main__":
    answer_questions()
