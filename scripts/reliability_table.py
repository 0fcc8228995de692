"""The figures of docs/reliability.md, made from docs/figures.json, never typed.

    python scripts/reliability_table.py                  rewrite the page
    python scripts/reliability_table.py --merge faults   first take what .reports/faults*.xml noted into the file
    python scripts/reliability_table.py --add FILE       the same for rows from another machine, one JSON object a line;
                                                         --commit says of which commit, where they do not
    python scripts/reliability_table.py --check          exit 1 unless the page says what the file says, no row too old
    python scripts/reliability_table.py --forget-stale   rows that are too old become `not measured yet`

`--whole` with `--merge` says that whole test files were run: what they no longer note is gone from the file. `--times`
adds how long a whole run took, P24. `--surroundings` prints what belongs beside a report, for the Makefile.

Missing reports, reports without a figure, and a page without marks are errors: no evidence is not good news. A test
that failed is counted in its row, or in a row of its own when it had not come to noting its figure, and the exit code
is 1. A promise without a figure has a row that says so, with the command that measures it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import figure_rows as figures
from figure_rows import ROOT, FiguresError, Row

BEGIN, END = "<!-- figures -->", "<!-- /figures -->"
HEAD = ("figure", "what was tried", "times", "failures", "took", "run", "commit", "on", "notes")
TIMES = {
    "make test": ("test",),
    "make faults": ("faults", "faults_alone"),
}
"""The reports that a whole run of each target leaves."""
KEPT = "journal, ledger, fsync, hashes and checkpoints on a GPU"
MEASURED_BY = {
    KEPT: "python benchmarks/keeping.py --gpu --figure keeping.json",
    "`make test`": "make test, then make faults or make nightly, which publish it",
    "`make nightly`": "make nightly",
}
PROMISES = (
    ("P1", "kill -9 at random instants", "kills"),
    ("P1", "kill -9 at a failpoint", "every_failpoint"),
    ("P2", "", "async_kills async_simulator ray_kills"),
    ("P3", "", "store_simulator"),
    ("P4", "", "group_kills"),
    ("P5", "", "resume_steps"),
    ("P6", "", "disk_faults every_failpoint"),
    ("P7", "", "mutants"),
    ("P8", "engine or worker killed every 5 s: its successor is ready", "ray_chaos"),
    ("P8", "the same for ten minutes", "ray_chaos"),
    ("P9", "only engine killed", "ray_kills"),
    ("P9", "stuck in a stage", "stalls"),
    ("P9", "engine of an asynchronous run hangs", "async_kills"),
    ("P10", "", "kills descendants ray_kills"),
    ("P11", "asked to stop in a chosen phase", "stop_signals"),
    ("P11", "asked to stop at a random instant", "stop_signals"),
    ("P11", "SIGTERM to an asynchronous run", "async_kills"),
    ("P12", "", "numerics"),
    ("P13", "", "reward_kinds reward_memory"),
    ("P14", "", "bad_servers"),
    ("P15", "", "sandbox_probes"),
    ("P16", "", "grader_cheats"),
    ("P17", "", "lying_syncs"),
    ("P18", "one-character typo of a key", "config_typos"),
    ("P18", "typo of a key: refused by the command", "config_typos"),
    ("P19", "", "hostile_checks"),
    ("P20", "", "secrets"),
    ("P21", "", ""),
    ("P22", "", "clocks"),
    ("P23", KEPT, ""),
    ("P24", "`make test`", ""),
    ("P24", "`make nightly`", ""),
)
"""What has to have a row: the promise, how the row's text begins (any, when empty), and the tests that measure it."""
SHORT = {
    "P2": "the kills of P1 while sampling runs ahead, and on Ray",
    "P3": "no item lost, none trained twice",
    "P4": "finished rollouts lost by a crash: none",
    "P5": "resume at every step of three epochs",
    "P6": "a fault at every call of a save",
    "P7": "changed checkpoints and records",
    "P10": "driver killed: nothing lives 5 s later",
    "P12": "numbers that are not finite",
    "P13": "bad rewards",
    "P14": "bad MCP servers",
    "P15": "probes of the sandbox",
    "P16": "cheats of a grader",
    "P17": "lying weight syncs",
    "P19": "hostile expressions",
    "P20": "planted secrets",
    "P21": "calls in the package that run data",
    "P22": "clock jumps",
}
"""What stands in the place of a row that could have any text."""


# -- the page -----------------------------------------------------------------------------------------


def table(rows: Iterable[Row]) -> str:
    """The text between the marks."""
    kept = list(rows)
    lines = [(row["figure"], row["what"], cells(row)) for row in kept]
    lines += [
        (figure, what, [figure, what, *[""] * 3, "not measured yet", "", "", f"`{how}`"])
        for figure, what, how in lacking(kept)
    ]
    lines.sort(key=lambda line: (figures.number_of(line[0]), line[0], line[1]))
    text = [HEAD, tuple("---" for _ in HEAD), *(line[2] for line in lines)]
    return "\n".join("| " + " | ".join(_cell(one) for one in line) + " |" for line in text)


def lacking(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Promises without a figure: number, text, and the command that measures them."""
    found = []
    for figure, begins, tests in PROMISES:
        if not any(row["figure"] == figure and row["what"].startswith(begins) for row in rows):
            how = MEASURED_BY.get(begins or figure, f'make faults KILLS="{tests}"')
            found.append((figure, begins or SHORT[figure], how))
    return found


def cells(row: Row) -> list[str]:
    """One line of the table, in the order of `HEAD`."""
    times = "" if row["times"] is None else f"{row['times']:,}"
    machine = "" if row["cores"] is None else f"{row['cores']} cores"
    machine += "" if row["load"] is None else f", load {row['load']:g} before"
    seeds = "" if row["seeds"] is None else "seeds {} to {}".format(*row["seeds"])
    notes = "; ".join(part for part in [*row["notes"], seeds, machine] if part)
    commit = row["commit"] + (" with changes" if row["changed"] else "")
    return [row["figure"], row["what"], times, f"{row['bad']:,}", took(row), row["run"], commit, row["date"], notes]


def took(row: Row) -> str:
    """Times in words."""
    if (found := row["seconds"]) is None:
        return ""
    limit = "" if found["limit"] is None else f", {_span(found['limit'])} promised"
    if found["n"] == 1:
        return _span(found["max"]) + limit
    return f"{_span(found['p50'])} median, {_span(found['p99'])} p99, {_span(found['max'])} longest{limit}"


def _span(seconds: float) -> str:
    if seconds >= 600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:g} s" if seconds >= 0.1 else f"{1000 * seconds:g} ms"


def _cell(text: str) -> str:
    plain = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return plain.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def split_page(page: Path) -> tuple[str, str, str]:
    """What stands before, between and after the marks."""
    try:
        text = page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FiguresError(f"{page} cannot be read: {error}") from error
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise FiguresError(f"{page} needs {BEGIN} and, after it, {END}, once each")
    before, _, rest = text.partition(BEGIN)
    old, _, after = rest.partition(END)
    return before, old.strip(), after


# -- the command --------------------------------------------------------------------------------------


def check(rows: Sequence[Row], args: argparse.Namespace) -> str:
    """Raise unless page and file agree and every row is young enough; what else is to be said."""
    if not rows:
        raise FiguresError(
            f"{args.file.name} holds no figure: no evidence is not good news; run make test, then --merge side"
        )
    if split_page(args.page)[1] != table(rows):
        raise FiguresError(
            f"the table in {args.page.name} is not what {args.file.name} says; run scripts/reliability_table.py"
        )
    if why := figures.why_no_history(args.root):
        return f"; ages not looked at: {why}"
    if old := figures.stale(rows, lambda commit: figures.age_of(args.root, commit)):
        row, age = max(old, key=lambda one: one[1])
        names = sorted({row["figure"] for row, _ in old}, key=figures.number_of)
        raise FiguresError(
            f"{len(old)} figures ({', '.join(names)}) are more than {figures.MAX_AGE} commits of the main line old: "
            f"{row['what']!r} is from {row['commit']}, {age} commits ago\n"
            f"  fix: {figures.remedy(row for row, _ in old)}; or --forget-stale, and the page says `not measured yet`"
        )
    return ""


def measured(args: argparse.Namespace) -> list[Row]:
    """The new rows that the arguments speak of."""
    if args.add:
        return added(args.add, args.root, args.commit)
    rows = figures.rows_of(args.reports, args.merge)
    runs = [run for run in TIMES if run in args.times]
    found = [row for run in runs if (row := figures.time_row(args.reports, run, TIMES[run])) is not None]
    return [*rows, *found]


def added(path: Path, root: Path, commit: str | None) -> list[Row]:
    """Rows that another program wrote, one JSON object a line; which commit they are of is said, never guessed."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise FiguresError(f"{path} cannot be read: {error}") from error
    if not lines:
        raise FiguresError(f"{path} holds no figure")
    if commit is None and any("commit" not in line for line in lines):
        raise FiguresError(f"{path} does not say of which commit its figures are: say it with --commit")
    if commit is not None:
        commit = figures.spelled_commit(root, commit)
    around = figures.surroundings(root) | ({} if commit is None else {"commit": commit, "changed": False})
    return [figures.checked(around | line) for line in lines]


def write(rows: Sequence[Row], args: argparse.Namespace) -> None:
    """File and page."""
    before, _, after = split_page(args.page)
    args.file.write_text(figures.as_text(rows), encoding="utf-8")
    args.page.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}", encoding="utf-8")


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """What was typed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="write nothing; exit 1 unless all is in order")
    what.add_argument("--merge", nargs="+", metavar="NAME", help="reports whose names begin so")
    what.add_argument("--add", type=Path, metavar="FILE", help="rows from elsewhere")
    parser.add_argument("--commit", help="with --add: the commit that was measured")
    what.add_argument("--forget-stale", action="store_true", help="rows that are too old go")
    what.add_argument("--surroundings", action="store_true", help="print commit, cores and load")
    parser.add_argument("--whole", action="store_true", help="whole test files were run")
    parser.add_argument("--times", nargs="*", default=[], metavar="TARGET", help=f"of {', '.join(TIMES)}")
    parser.add_argument("--reports", type=Path, default=ROOT / ".reports")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "reliability.md")
    parser.add_argument("--file", type=Path, default=ROOT / "docs" / "figures.json")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository whose commits are counted")
    return parser.parse_args(argv)


def act(args: argparse.Namespace) -> tuple[list[Row], str]:
    """Do what was asked; the rows as they are now, and what else is to be said."""
    rows = figures.read_file(args.file)
    if args.check:
        return rows, check(rows, args)
    if args.merge or args.add:
        whole = figures.files_run(args.reports, args.merge) if args.merge and args.whole else ()
        rows = figures.merged(rows, measured(args), whole)
    elif args.forget_stale:
        old = [row for row, _ in figures.stale(rows, lambda commit: figures.age_of(args.root, commit))]
        rows = [row for row in rows if row not in old]
    write(rows, args)
    return rows, ""


def main(argv: Sequence[str] | None = None) -> int:
    """0: written, or in order; 1: not so, failures among the figures, or no evidence."""
    args = arguments(argv)
    try:
        if args.surroundings:
            print(json.dumps(figures.surroundings(args.root)))
            return 0
        rows, more = act(args)
    except FiguresError as error:
        print(f"reliability_table: {error}", file=sys.stderr)
        return 1
    bad = sum(row["bad"] for row in rows)
    print(f"{len(rows)} figures, {sum(row['times'] or 0 for row in rows):,} trials, {bad} failures{more}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
