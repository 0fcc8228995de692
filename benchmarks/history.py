"""`history.jsonl`: every measured ratio by cell and commit; `surefoot trend benchmarks/history.jsonl` shows it.

    python benchmarks/history.py append ROWS.jsonl --commit HASH --date 2026-11-19 --machine "2 cores" [--load 0.01]
    python benchmarks/history.py published docs/benchmarks.md [--append]

`append` takes what a benchmark wrote with `--rows`; `run.py` does it by itself for a tree without changes. `published`
prints the lines that the first table of the documentation comes to: a row counts where it holds one ratio with its
interval, and its date and commit. The form of a line is `surefoot_harness.ratios`'.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from report import Row, read_rows

from surefoot_harness.errors import SurefootError
from surefoot_harness.ratios import HIGHER, LOWER, RatioRow, append_ratios, checked_ratio

HISTORY = Path(__file__).parent / "history.jsonl"
COLUMNS = ["what", "ours against", "ratio", "goal", "reached", "where", "on"]
NUMBER = r"(\d+(?:\.\d+)?)"
MEASURED = re.compile(rf"{NUMBER}x \[{NUMBER}, {NUMBER}\] n=\d+.*")
"""`str(method.Ratio)`, with whatever is said of dirty pairs: the peer over ours, so higher is better."""
ONE_RATIO = re.compile(rf"x?{NUMBER}x?(?: [a-z ]+)? [\[(]{NUMBER}(?:, | to ){NUMBER}[\])]")
"""What a published row has to hold, and nothing else."""
QUANTITY = re.compile(r"([\d,]+(?:\.\d+)?) ?(tok/s|s|ms|x)\b.*")


def of_rows(rows: Iterable[Row], *, date: str, commit: str, machine: str, load: float | None) -> list[RatioRow]:
    """A line for each row that holds a ratio with its interval; the others have nothing to compare."""
    found = []
    for row in rows:
        if match := MEASURED.fullmatch(row.ratio):
            ratio, low, high = map(float, match.groups())
            cell = f"{row.benchmark}, {row.cell}"
            found.append(
                RatioRow(date, commit, cell, peer_of(row), machine, ratio, low, high, HIGHER, limit_share(row), load)
            )
    return [checked_ratio(asdict(row)) for row in found]


def peer_of(row: Row) -> str:
    """The peer's name without its figure."""
    return re.sub(rf"\s*{NUMBER}[\d,.]*\s*(tok/s|ms|s|MB/s|MiB|GB/s)?.*", "", row.peer).strip() or row.benchmark


def limit_share(row: Row) -> float | None:
    """How much of its limit a row reached, where both are in one unit; a rate is below its limit, a time above."""
    ours, limit = QUANTITY.fullmatch(row.ours), QUANTITY.fullmatch(row.limit)
    if not ours or not limit or ours[2] != limit[2] or ours[2] == "x":
        return None
    mine, most = (float(match[1].replace(",", "")) for match in (ours, limit))
    return round(mine / most if ours[2] == "tok/s" else most / mine, 4)


def published(text: str) -> Iterator[RatioRow]:
    """The lines of the documentation's first table, as it stands."""
    lines = iter(text.splitlines())
    for line in lines:
        if _cells(line) == COLUMNS:
            break
    next(lines, None)
    for line in lines:
        if not line.startswith("|"):
            return
        what, against, ratio, goal, reached, where, on = _cells(line)
        match, day = ONE_RATIO.fullmatch(ratio), re.fullmatch(r"(\d{4}-\d\d-\d\d) ([0-9a-f]{7,40})", on)
        if match and day:
            value, low, high = map(float, match.groups())
            better = LOWER if goal.startswith("<= x") or (reached == "slower" and value > 1) else HIGHER
            row = RatioRow(day[1], day[2], what, against, where, value, low, high, better)
            yield checked_ratio(asdict(row))


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def main(words: Sequence[str] | None = None) -> int:
    """Print or append; exit status 0, or that of the error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    new = commands.add_parser("append", help="lines from a file that --rows wrote")
    new.add_argument("rows", type=Path)
    for name in ("commit", "date", "machine"):
        new.add_argument(f"--{name}", required=True)
    new.add_argument("--load", type=float, help="share of the machine that others used, 0 to 1")
    old = commands.add_parser("published", help="the lines of the documentation's first table")
    old.add_argument("page", type=Path)
    old.add_argument("--append", action="store_true", help="those that are not there yet")
    for each in (new, old):
        each.add_argument("--history", type=Path, default=HISTORY)
    args = parser.parse_args(words)
    try:
        if args.command == "append":
            rows = of_rows(
                read_rows(args.rows), date=args.date, commit=args.commit, machine=args.machine, load=args.load
            )
            print(f"{append_ratios(args.history, rows)} lines more in {args.history}")
            return 0
        lines = [
            json.dumps(asdict(row), ensure_ascii=False) for row in published(args.page.read_text(encoding="utf-8"))
        ]
        if args.append:
            there = set(args.history.read_text(encoding="utf-8").splitlines()) if args.history.exists() else set()
            new_rows = [checked_ratio(json.loads(line)) for line in lines if line not in there]
            print(f"{append_ratios(args.history, new_rows)} lines more in {args.history}")
        else:
            print("\n".join(lines))
    except (SurefootError, ValueError, OSError) as error:
        print(f"history.py: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
