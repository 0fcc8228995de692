"""Do our tests watch the wiring? Small wrong edits of config, run, guards, loop, queue and verdict, one at a time.

    python scripts/mutants.py --write                  goes on with the 300, two hours at most; `make mutants`
    python scripts/mutants.py --write --minutes 30     the same, in half an hour; `make mutants MINUTES=30`
    python scripts/mutants.py --near 20                per mutant only as many of the nearest tests as take 20 s
    python scripts/mutants.py --again                  tries survivors once more: there are new tests for them
    python scripts/mutants.py --only src/surefoot/guards/verdict.py --count 40 --seed 7

Every mutant is planted in a copy of the tree (`.cache/mutants`) and met with the tests that our own `pytest --affected`
chooses for it, the nearest and cheapest first, until one is red. The copy records once what each test depends on, file
by file, and then again what has changed. Killed: a test was red, or pytest itself ended, and the same tests are green
without the mutant. Survived: all of them were green, or no test was chosen. What was not over after `--limit` seconds
counts as survived: nobody saw it end.

What was found is kept at once, mutant by mutant, in `.cache/mutants/found.jsonl`, and with `--write` in
`docs/mutants.json`: the next call goes on with what is not there. A result counts for as long as the function that it
is about is the same to the letter. What survived the nearest tests alone is tried again by a call without `--near`.

Below 95 % killed, or with some of them not tried yet, the exit code is 1. A survivor is not bad by itself (some edits
change nothing that anybody promised); its reason is written into `docs/mutants.json` by hand, and stays there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from mutant_copy import GREEN, Copy, Outcome, Recorded
from mutation import Mutant, sample

from surefoot.system.git import git_call

ROOT = Path(__file__).resolve().parents[1]
WIRING = ("config", "run", "guards", "loop.py", "loop_state.py", "evaluation.py", "runtime/task_queue.py")
"""Below src/surefoot: where a wrong edit disconnects a promise; verdicts are in `guards` and `run`."""
TESTS = ("tests/unit", "tests/silent", "tests/parity", "tests/runs", "tests/faults")
WORDS_OF_WIRING = (
    "surefoot.guards",
    "surefoot.config",
    "surefoot.run",
    "surefoot.loop",
    "task_queue",
    "surefoot.train",
)
SEED = 18
NEEDED = 0.95
BEGIN, END = "<!-- mutants -->", "<!-- /mutants -->"
Found = dict[str, Any]
"""What became of one mutant: mutant, around, killed, how, chosen, ran, commit."""


def wiring(root: Path, only: Sequence[str]) -> list[Path]:
    """The files that mutants are drawn from."""
    places = [root / name for name in only] if only else [root / "src" / "surefoot" / name for name in WIRING]
    if missing := [str(place) for place in places if not place.exists()]:
        raise SystemExit(f"no such file or folder: {', '.join(missing)}")
    return [path for place in places for path in (sorted(place.rglob("*.py")) if place.is_dir() else [place])]


def files_of_tests(root: Path, places: Sequence[str]) -> list[str]:
    """The test files below these places, first those that speak of the wiring, the quickest first.

    So a short call records what matters most for its time.
    """
    files = [
        path for place in places
        for path in (sorted((root / place).rglob("test_*.py")) if (root / place).is_dir() else [root / place])
    ]  # fmt: skip
    speaks = {path: sum(path.read_text(encoding="utf-8").count(word) for word in WORDS_OF_WIRING) for path in files}
    seconds = _seconds_of_files(root)
    order = sorted(files, key=lambda path: (speaks[path] == 0, seconds[path], path))
    return [path.relative_to(root).as_posix() for path in order]


def _seconds_of_files(root: Path) -> Counter[Path]:
    """What the long tests of each file took when they were last measured."""
    times, found = root / "tests" / "times.json", Counter[Path]()
    for test, seconds in json.loads(times.read_text(encoding="utf-8"))["long"].items() if times.exists() else ():
        found[times.parent / test.partition("::")[0]] += seconds
    return found


# -- what was found before --------------------------------------------------------------------------


def key(mutant: Mutant) -> tuple[str, str]:
    """What a result is about."""
    return mutant.name, mutant.around


def known(files: Iterable[Path]) -> dict[tuple[str, str], Found]:
    """Every result in these files, later ones instead of earlier ones; a torn last line is a call that was cut off."""
    found: dict[tuple[str, str], Found] = {}
    for file in files:
        if not file.exists():
            continue
        text = file.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        rows = map(json.loads, whole.splitlines()) if file.suffix == ".jsonl" else json.loads(text)["tried"]
        found |= {(row["mutant"], row["around"]): row for row in rows}
    return found


def is_open(mutant: Mutant, found: dict[tuple[str, str], Found], args: argparse.Namespace) -> bool:
    """Whether this mutant has to be tried now."""
    row = found.get(key(mutant))
    if row is None:
        return True
    if row["killed"] or args.again:
        return not row["killed"]
    partly = row["how"] != GREEN and row["chosen"] > row["ran"]
    return bool(partly and args.near is None and not row.get("reason"))


def row_of(outcome: Outcome, commit: str) -> Found:
    """One line of what is kept."""
    name, around = key(outcome.mutant)
    return {
        "mutant": name, "around": around, "killed": outcome.killed, "how": outcome.how, "chosen": outcome.chosen,
        "ran": outcome.ran, "commit": commit,
    }  # fmt: skip


# -- trying -----------------------------------------------------------------------------------------


def try_all(
    copies: Sequence[Copy], planned: Sequence[Mutant], tests: Recorded, until: float, args: argparse.Namespace,
    keep: Path, commit: str,
) -> int:  # fmt: skip
    """Every one of these mutants, one at a time in each copy, until the time is over; kept as they come."""
    free: SimpleQueue[Copy] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def one(mutant: Mutant) -> bool:
        if time.monotonic() > until:
            return False
        copy = free.get()
        try:
            outcome = copy.try_out(mutant, args.limit, tests, args.near)
        finally:
            free.put(copy)
        with keep.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row_of(outcome, commit), ensure_ascii=False) + "\n")
        said = "killed  " if outcome.killed else "SURVIVED"
        print(f"{said} {outcome.seconds:5.0f} s  {mutant.name}  [{outcome.how}]", flush=True)
        return True

    with ThreadPoolExecutor(len(copies)) as pool:
        return sum(pool.map(one, planned))


# -- what is kept, and the page ---------------------------------------------------------------------


def report(planned: Sequence[Mutant], found: dict[tuple[str, str], Found], seed: int, tests: str) -> dict[str, Any]:
    """Every result about the planned ones, in their order."""
    tried = [found[key(mutant)] for mutant in planned if key(mutant) in found]
    return {"seed": seed, "date": date.today().isoformat(), "planned": len(planned), "tests": tests, "tried": tried}


def summary(kept: dict[str, Any]) -> str:
    """One line: how many were killed, of how many that were tried, of how many that were planned."""
    tried, killed = len(kept["tried"]), sum(row["killed"] for row in kept["tried"])
    share = f"{killed / tried:.1%}" if tried else "none tried"
    commits = sorted({row["commit"] for row in kept["tried"]})
    whole = "all" if tried == kept["planned"] else f"{tried} of the {kept['planned']}"
    return (
        f"{killed} of {tried} killed ({share}; {NEEDED:.0%} wanted); {whole} were tried; seed {kept['seed']}, "
        f"{kept['date']}, commit{'s' if len(commits) > 1 else ''} {', '.join(commits) or '-'}"
    )


def text_of(kept: dict[str, Any]) -> str:
    """The record as JSON with one line per mutant, so that a change of it can be read."""
    head = json.dumps({**kept, "tried": []}, ensure_ascii=False, indent=1).removesuffix("[]\n}")
    return head + "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in kept["tried"]) + "\n]}\n"


def write(root: Path, kept: dict[str, Any]) -> None:
    """The record, and the part of the page that is made from it."""
    (root / "docs" / "mutants.json").write_text(text_of(kept), encoding="utf-8")
    page = root / "docs" / "mutants.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(before + BEGIN + "\n" + table(kept) + "\n" + END + rest.partition(END)[2], encoding="utf-8")


def table(kept: dict[str, Any]) -> str:
    """The page's part: the one line, what could be asked, and every survivor."""
    left = [row for row in kept["tried"] if not row["killed"]]
    rows = [(row["mutant"], row["how"], row.get("reason") or "not explained yet") for row in left]
    cells = ["| " + " | ".join(text.replace("|", "\\|").replace("<", "&lt;") for text in row) + " |" for row in rows]
    listed = ["", "| survivor | how | reason |", "|---|---|---|", *cells] if cells else []
    return "\n".join([f"{summary(kept)}. {kept['tests']}", *listed])


def commit_of(root: Path) -> str:
    """The commit, as figures spell it, and whether the tree differs from it in more than what is written here."""
    changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/mutants.*").strip()
    return _git(root, "rev-parse", "--short=10", "HEAD").strip() + (" with changes" if changed else "")


def _git(root: Path, *words: str) -> str:
    command, env = git_call(root, *words)
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--only", nargs="*", default=[], help="files or folders instead of the wiring")
    parser.add_argument("--tests", nargs="*", default=list(TESTS), help="where tests are chosen from")
    parser.add_argument("--minutes", type=float, default=120.0, help="after these no further mutant is begun")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for the tests of one mutant")
    parser.add_argument("--near", type=float, metavar="SECONDS", help="per mutant only the nearest tests, so long")
    parser.add_argument("--again", action="store_true", help="try every survivor once more")
    parser.add_argument("--copies", type=int, default=2, help="how many mutants at a time")
    parser.add_argument("--write", action="store_true", help="write docs/mutants.json and docs/mutants.md")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Plant, try, and say what survived."""
    args = arguments(words)
    began, cache = time.monotonic(), root / ".cache" / "mutants"
    until = began + 60 * args.minutes
    os.environ.setdefault("SUREFOOT_TEST_TURN", str(args.seed))  # the record and every try take the same turn
    planned = sample(root, wiring(root, args.only), args.count, args.seed)
    if not planned:
        raise SystemExit("nothing to change there: no evidence is not good news")
    cache.mkdir(parents=True, exist_ok=True)
    keep, record = cache / "found.jsonl", root / "docs" / "mutants.json"
    found = _with_reasons(known([record, keep]), known([record]))
    open_ones = [mutant for mutant in planned if is_open(mutant, found, args)]
    tests = json.loads(record.read_text(encoding="utf-8"))["tests"] if record.exists() else ""
    if open_ones:
        tests = _try_in_copies(root, cache, open_ones, args, began, until, keep)
        found = _with_reasons(known([record, keep]), known([record]))
    kept = report(planned, found, args.seed, tests)
    if not kept["tried"]:
        raise SystemExit("no mutant was tried: no evidence is not good news")
    if args.write:
        write(root, kept)
    print(summary(kept))
    killed = sum(row["killed"] for row in kept["tried"])
    return 0 if len(kept["tried"]) == len(planned) and killed >= NEEDED * len(planned) else 1


def _try_in_copies(
    root: Path, cache: Path, planned: Sequence[Mutant], args: argparse.Namespace, began: float, until: float, keep: Path
) -> str:
    """Record what is stale, then try; recording has half of the time at most. Returns what could be asked."""
    names = [name for name in _git(root, "ls-files", "-z").split("\0") if name and (root / name).exists()]
    files = files_of_tests(root, args.tests)
    with ExitStack() as stack:
        first = stack.enter_context(Copy.of(root, cache / "tree-0", names))
        whole = first.record(files, until - (until - began) / 2, args.copies)
        recorded = first.recorded()
        copies = [first]
        for number in range(1, args.copies):
            folder = cache / f"tree-{number}"
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(first.root, folder, symlinks=True)
            copies.append(stack.enter_context(Copy(folder)))
            copies[-1].recorded()
        for copy in copies:
            copy.warm()
        try_all(copies, planned, recorded, until, args, keep, commit_of(root))
    asked = {test.partition("::")[0] for test in recorded.tests}
    red = set(recorded.left_out).union(*(copy.unsound for copy in copies))
    left = f"; {len(red)} were not green without any change and decided nothing" if red else ""
    rest = "" if whole else ", the others have no record yet"
    return f"To be asked were {len(recorded.tests)} tests in {len(asked)} of {len(files)} files{rest}{left}."


def _with_reasons(
    found: dict[tuple[str, str], Found], before: dict[tuple[str, str], Found]
) -> dict[tuple[str, str], Found]:
    """A survivor's reason stays for as long as the same edit survives."""
    return {
        each: {**row, "reason": before[each]["reason"]}
        if not row["killed"] and before.get(each, {}).get("reason") else row
        for each, row in found.items()
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
