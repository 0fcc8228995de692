"""`report.html`: one static page about a run, for the person who made it and everybody it is shown to.

Owns       the page's order: verdict, headline numbers, curves, a step on the clock, losses, rollouts, config.
Promises   works from a file, without network or script; every text is escaped; a part that cannot be drawn says so and
           costs no other part; a few megabytes at most; nothing but a typed error comes out of `write_report`.
Never      judges: the verdict is verdict.json's.

Read next: `report_data.py`, what is read; `report_charts.py`, which curves there are.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path

from surefoot.errors import StorageError
from surefoot.tracking import report_summary as summary
from surefoot.tracking.report_charts import absent, card, charts
from surefoot.tracking.report_data import RunData, read_run
from surefoot.tracking.report_page import page, section
from surefoot.tracking.report_rollouts import rollouts
from surefoot.tracking.report_text import esc, local
from surefoot.tracking.report_timeline import steps_on_the_clock
from surefoot.tracking.whole_file import replace_file

FILE = "report.html"
_ODD = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)
"""What odd data can make a part of the page raise."""


def write_report(run: Path, output: Path | None = None) -> Path:
    """Write the page, whole or not at all; returns where it is.

    Raises:
        StateError: `run` is not a run folder.
        StorageError: the disk refused it.
    """
    target = run / FILE if output is None else output
    if target.is_dir():
        raise StorageError(f"{target} is a folder", "the report is one file", "name a file, such as report.html")
    replace_file(target, render(read_run(run)).encode("utf-8", errors="backslashreplace"))
    return target


def render(data: RunData, *, now: datetime.datetime | None = None) -> str:
    """The page as text."""
    parts = [
        _part("verdict", summary.head, data),
        _part("headline", summary.tiles, data),
        _part("evaluations", summary.evaluations, data),
        section("Curves", _part("curves", _curves, data)),
        section("A step on the clock", '<div class="panel">' + _part("timeline", _clock, data) + "</div>"),
        section("What happened to the work", _pair(data, syncs=summary.syncs, losses=summary.lost)),
        section("Rollouts", _part("rollouts", lambda data: rollouts(data.rollouts), data)),
        section("What was run", _pair(data, config=summary.settings, machine=summary.machine)),
    ]
    if data.missing:
        parts.append(section("What is missing", _missing(data.missing)))
    moment = (now or datetime.datetime.now(datetime.UTC)).strftime("%Y-%m-%d %H:%M UTC")
    return page(
        f"{data.root.resolve().name}: surefoot report", parts, f"Written {moment} from {esc(data.root.resolve().name)}"
    )


def _part(name: str, make: Callable[[RunData], str], data: RunData) -> str:
    try:
        return make(data)
    except _ODD as error:
        data.missing.append(f"{name}: could not be drawn ({type(error).__name__}: {error})")
        return f'<p class="none">The {esc(name)} could not be drawn; see the end of the page.</p>'


def _pair(data: RunData, **parts: Callable[[RunData], str]) -> str:
    """Two panels side by side, where there is room."""
    return '<div class="two">' + "".join(_part(name, make, data) for name, make in parts.items()) + "</div>"


def _curves(data: RunData) -> str:
    found = charts(data)
    cards = "".join(card(chart) for chart in found) or '<p class="none">No number was logged.</p>'
    calm = (
        "Thin line: each step. Thick line: the mean of the steps around it. The horizontal axis counts optimiser steps."
    )
    gone = "".join(f"<li>{esc(why)}</li>" for why in absent(data))
    note = f"<details><summary>Curves that are not here, and why</summary><ul>{gone}</ul></details>" if gone else ""
    return f'<div class="charts">{cards}</div><p class="about">{calm}</p>{note}'


def _clock(data: RunData) -> str:
    return steps_on_the_clock(data.windows)


def _missing(missing: list[str]) -> str:
    items = "".join(f"<li>{esc(local(each))}</li>" for each in missing[:40])
    return f'<div class="missing"><ul>{items}</ul></div>'
