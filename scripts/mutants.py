"""Do our tests watch the wiring? Small wrong edits of config, run, guards, loop, queue and verdict, one at a time.

    python scripts/mutants.py                          300 mutants, today's seed, two hours at most; `make mutants`
    python scripts/mutants.py --count 40 --seed 7      fewer, and which ones
    python scripts/mutants.py --only src/surefoot/guards/verdict.py
    python scripts/mutants.py --write                  also docs/mutants.json and the table of docs/mutants.md

Every mutant is planted in a copy of the tree and met with the tests that our own `pytest --affected` chooses for it,
those that depend on least first, until one is red. The copy records once what each test depends on: that needs one
whole green run of the day's tests. Killed: a test was red, or nothing could be collected. Survived: all chosen tests
were green, or no test was chosen. What was not over after `--limit` seconds counts as survived: nobody saw it end.

Below 95 % killed the exit code is 1. A survivor is not bad by itself (some edits change nothing that anybody promised);
its reason is written into `docs/mutants.json` by hand, and stays there as long as the same edit survives.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from mutation import Mutant, sample

from surefoot.system.git import git_call

ROOT = Path(__file__).resolve().parents[1]
WIRING = ("config", "run", "guards", "loop.py", "loop_state.py", "evaluation.py", "runtime/task_queue.py")
"""Below src/surefoot: where a wrong edit disconnects a promise; verdicts are in `guards` and `run`."""
TESTS = ("tests/unit", "tests/silent", "tests/parity", "tests/runs", "tests/faults")
STATE = Path(".surefoot", "affected.json")
NEEDED = 0.95
BEGIN, END = "<!-- mutants -->", "<!-- /mutants -->"


class Outcome(NamedTuple):
    """What became of one mutant."""

    mutant: Mutant
    killed: bool
    how: str
    """The test that was red, or why it survived."""
    chosen: int
    """How many tests `--affected` chose."""
    seconds: float


class Copy:
    """A copy of the tree with what its tests depend on; one mutant at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def of(cls, source: Path, folder: Path) -> Copy:
        """What git tracks in `source`, and its record of dependencies if there is one."""
        for name in filter(None, _git(source, "ls-files", "-z").split("\0")):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source / name, target, follow_symlinks=False)
        if (source / STATE).exists():
            (folder / STATE).parent.mkdir(exist_ok=True)
            shutil.copy2(source / STATE, folder / STATE)
        return cls(folder)

    def python(self, *words: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
        """Python in the copy, with the copy's own package first."""
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, self.packages())), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            [sys.executable, *words], cwd=self.root, env=env, capture_output=True, text=True, check=False,
            timeout=timeout,
        )  # fmt: skip

    def packages(self) -> list[Path]:
        """Where our own packages lie in this copy."""
        return [path for path in (self.root / "src", self.root / "harness" / "src") if path.is_dir()]

    def record(self, tests: Sequence[str]) -> None:
        """One whole green run of the day's tests, recorded; a red one is refused: every mutant would look killed."""
        ran = self.python(
            "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-m", "not nightly", "--affected", *tests
        )
        if ran.returncode != 0 or not (self.root / STATE).exists():
            raise SystemExit(f"the tests are not green before any change:\n{ran.stdout[-3000:]}{ran.stderr[-1000:]}")

    def try_out(self, mutant: Mutant, limit_s: float) -> Outcome:
        """Plant, choose, run until red, and take it back."""
        path, began = self.root / mutant.path, time.monotonic()
        before = path.read_text(encoding="utf-8")
        path.write_text(mutant.applied(before), encoding="utf-8")
        try:
            chosen = self._chosen()
            killed, how = self._judged(chosen, limit_s) if chosen else (False, "no test depends on it")
        finally:
            path.write_text(before, encoding="utf-8")
        return Outcome(mutant, killed, how, len(chosen), time.monotonic() - began)

    def _chosen(self) -> list[str]:
        """The tests that depend on what changed, those that depend on least first."""
        asked = self.python("scripts/mutants.py", "--choose")
        if asked.returncode != 0:
            raise SystemExit(f"nobody can say which tests are affected:\n{asked.stderr[-3000:]}")
        return list(json.loads(asked.stdout))

    def _judged(self, chosen: Sequence[str], limit_s: float) -> tuple[bool, str]:
        with tempfile.NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as names:
            names.write("".join(f"{name}\n" for name in chosen))
            names.flush()
            words = ("-x", "-q", "--no-header", "-m", "not nightly", f"@{names.name}")
            try:
                ran = self.python("-m", "pytest", *words, timeout=limit_s)
            except subprocess.TimeoutExpired:
                return False, f"no verdict within {limit_s:.0f} s"
        if ran.returncode == 0:
            return False, "every chosen test was green"
        red = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        return True, red[0].split(" - ")[0][:160] if red else f"pytest ended with {ran.returncode}"


def choose(root: Path) -> list[str]:
    """Which tests `pytest --affected` would run in `root` now, those that depend on least first."""
    from surefoot_harness.affected.records import ProjectView, load
    from surefoot_harness.affected.select import Judge
    from surefoot_harness.affected.tree import Tree

    state, notice = load(root)
    if notice is not None or not state.tests:
        raise SystemExit(f"no record of what the tests depend on: {notice or 'record it first'}")
    judge = Judge(state, ProjectView(Tree(root, state.known()), state.roots, state.edges), state.environment)
    affected = [test for test in state.tests if judge.is_affected(test)]
    return sorted(affected, key=lambda test: (len(state.tests[test].keys) * max(state.tests[test].seconds, 0.05), test))


def wiring(root: Path, only: Sequence[str]) -> list[Path]:
    """The files that mutants are drawn from."""
    places = [root / name for name in only] if only else [root / "src" / "surefoot" / name for name in WIRING]
    if missing := [str(place) for place in places if not place.exists()]:
        raise SystemExit(f"no such file or folder: {', '.join(missing)}")
    return [path for place in places for path in (sorted(place.rglob("*.py")) if place.is_dir() else [place])]


def tried(copies: Sequence[Copy], planned: Sequence[Mutant], args: argparse.Namespace) -> list[Outcome]:
    """Every mutant, one at a time in each copy, until the hours are over; said as they come."""
    free: SimpleQueue[Copy] = SimpleQueue()
    for copy in copies:
        free.put(copy)
    until = time.monotonic() + 3600 * args.hours

    def one(mutant: Mutant) -> Outcome | None:
        if time.monotonic() > until:
            return None
        copy = free.get()
        try:
            outcome = copy.try_out(mutant, args.limit)
        finally:
            free.put(copy)
        print(
            f"{'killed  ' if outcome.killed else 'SURVIVED'} {outcome.seconds:5.0f} s  {mutant.name}  [{outcome.how}]",
            flush=True,
        )
        return outcome

    with ThreadPoolExecutor(len(copies)) as pool:
        return [outcome for outcome in pool.map(one, planned) if outcome is not None]


def report(
    outcomes: Sequence[Outcome], args: argparse.Namespace, reasons: dict[str, str], commit: str
) -> dict[str, Any]:
    """What is kept: numbers, and every survivor with its reason."""
    survivors = [
        {"mutant": each.mutant.name, "how": each.how, "reason": reasons.get(each.mutant.name, "")}
        for each in outcomes if not each.killed
    ]  # fmt: skip
    return {
        "seed": args.seed, "date": date.today().isoformat(), "commit": commit, "planned": args.count,
        "tried": len(outcomes), "killed": sum(each.killed for each in outcomes), "survivors": survivors,
    }  # fmt: skip


def summary(found: dict[str, Any]) -> str:
    """One line: how many were killed, of how many."""
    share, cut = found["killed"] / found["tried"], found["planned"] - found["tried"]
    late = f", {cut} more not begun in time" if cut else ""
    return (
        f"{found['killed']} of {found['tried']} killed ({share:.1%}; {NEEDED:.0%} wanted), "
        f"seed {found['seed']}, commit {found['commit']}, {found['date']}{late}"
    )


def write(root: Path, found: dict[str, Any]) -> None:
    """The record, and the part of the page that is made from it."""
    text = json.dumps(found, indent=1, ensure_ascii=False) + "\n"
    (root / "docs" / "mutants.json").write_text(text, encoding="utf-8")
    page = root / "docs" / "mutants.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(before + BEGIN + "\n" + table(found) + "\n" + END + rest.partition(END)[2], encoding="utf-8")


def table(found: dict[str, Any]) -> str:
    """The page's part: the one line, and every survivor."""
    rows = [(each["mutant"], each["how"], each["reason"] or "not explained yet") for each in found["survivors"]]
    cells = ["| " + " | ".join(text.replace("|", "\\|").replace("<", "&lt;") for text in row) + " |" for row in rows]
    return "\n".join([f"{summary(found)}.", "", "| survivor | how | reason |", "|---|---|---|", *cells])


def commit_of(root: Path) -> str:
    """The commit, as figures spell it, and whether the tree differs from it."""
    changed = _git(root, "status", "--porcelain", "--untracked-files=no").strip()
    return _git(root, "rev-parse", "--short=10", "HEAD").strip() + (" with changes" if changed else "")


def _git(root: Path, *words: str) -> str:
    command, env = git_call(root, *words)
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def main(words: Sequence[str] | None = None) -> int:
    """Plant, try, and say what survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=date.today().toordinal())
    parser.add_argument("--only", nargs="*", default=[], help="files or folders instead of the wiring")
    parser.add_argument("--tests", nargs="*", default=list(TESTS), help="where tests are chosen from")
    parser.add_argument("--hours", type=float, default=2.0, help="after these no further mutant is begun")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for the tests of one mutant")
    parser.add_argument(
        "--recorded", action="store_true", help="the tree has a fresh record: do not run all tests first"
    )
    parser.add_argument("--write", action="store_true", help="write docs/mutants.json and docs/mutants.md")
    parser.add_argument("--choose", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.choose:
        print(json.dumps(choose(Path.cwd())))
        return 0
    os.environ.setdefault("SUREFOOT_TEST_TURN", str(args.seed))  # the record and every try take the same turn
    planned = sample(ROOT, wiring(ROOT, args.only), args.count, args.seed)
    if not planned:
        raise SystemExit("nothing to change there: no evidence is not good news")
    with tempfile.TemporaryDirectory(prefix="surefoot-mutants-") as folder:
        first = Copy.of(ROOT, Path(folder, "a"))
        if not args.recorded:
            first.record(args.tests)
        second = Path(folder, "b")
        shutil.copytree(first.root, second, symlinks=True)
        outcomes = tried([first, Copy(second)], planned, args)
    if not outcomes:
        raise SystemExit("no mutant was tried: no evidence is not good news")
    file = ROOT / "docs" / "mutants.json"
    known = json.loads(file.read_text(encoding="utf-8"))["survivors"] if file.exists() else []
    reasons = {each["mutant"]: each["reason"] for each in known if each["reason"]}
    found = report(outcomes, args, reasons, commit_of(ROOT))
    if args.write:
        write(ROOT, found)
    print(summary(found))
    return 0 if found["killed"] >= NEEDED * found["tried"] else 1


if __name__ == "__main__":
    sys.exit(main())
