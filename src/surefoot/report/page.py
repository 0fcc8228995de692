"""`report.html`: one static page about a run, for the person who made it and everybody it is shown to.

Owns       the page's order: verdict, headline numbers, curves, a step on the clock, losses, rollouts, config.
Promises   works from a file, without network or script; every text is escaped; a part that cannot be drawn says so and
           costs no other part; a few megabytes at most; nothing but a typed error comes out of `write_report`.
Never      judges: the verdict is verdict.json's.

Read next: `data.py`, what is read, and which curves there are.
"""

from __future__ import annotations

import datetime
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.errors import StorageError
from surefoot.protocols import count_text
from surefoot.report.data import RunData, absent, card, charts, read_run, steps_on_the_clock, tolerance
from surefoot.report.markup import esc, foreign, local, page, section, table
from surefoot.system.text import counted, duration, number, redact, size
from surefoot.tracking.live import replace_file
from surefoot.tracking.process_logs import attempts_of, hosts_of

# -- A few whole rollouts: the best, the worst and some by chance, of the last step and of the first
# Promises   prompt and completion are told apart; a rollout without a verdict is shown as such, never as reward 0.


Rollout = Mapping[str, Any]


def rollouts(kept: Sequence[tuple[int, Sequence[Rollout]]]) -> str:
    """All that are chosen, the last step first."""
    cards = []
    for place, (step, rows) in enumerate(reversed(kept)):
        chosen = list(choose(rows, step, more=place == 0))
        if chosen:
            shown = "".join(_card(why, row) for why, row in chosen)
            cards.append(f'<h3>Step {step}</h3><div class="rollouts">{shown}</div>')
    return "".join(cards) or '<p class="none">No rollout was kept.</p>'


def choose(rows: Sequence[Rollout], step: int, *, more: bool = True) -> Iterator[tuple[str, Rollout]]:
    """(why, rollout); the same ones whenever the report is written again."""
    left = [row for row in rows if isinstance(row.get("text"), str)]
    graded = [row for row in left if _reward(row) is not None]
    failed = [row for row in left if _reward(row) is None]
    chance = random.Random(step)
    picks: list[tuple[str, Rollout]] = []
    if graded and more:
        best = max(graded, key=lambda row: _reward(row) or 0.0)
        worst = min(graded, key=lambda row: _reward(row) or 0.0)
        picks = [("best reward", best)] if worst is best else [("best reward", best), ("worst reward", worst)]
    if failed:
        picks.append(("no verdict", chance.choice(failed)))
    taken = {id(row) for _, row in picks}
    others = [row for row in left if id(row) not in taken]
    picks += [("by chance", row) for row in chance.sample(others, min(2, len(others)))]
    yield from picks


def _card(why: str, row: Rollout) -> str:
    reward = _reward(row)
    facts = [f"reward {number(reward)}" if reward is not None else f"no verdict: {row.get('failure') or 'unknown'}"]
    facts += [f"{name} {_reward_part(value)}" for name, value in _parts(row)]
    for label, name in (
        ("task", "task"),
        ("rollout", "rollout"),
        ("version", "version"),
    ):
        if row.get(name) is not None:
            facts.append(f"{label} {row[name]}")
    if how := row.get("ended") or row.get("finish_reason"):  # of a rollout with tools; of its only turn
        facts.append("answered" if how == "answered" else f"ended by {how}")
    tokens, turns = row.get("completion_ids"), row.get("turns")
    if isinstance(tokens, list):
        facts.append(counted(len(tokens), "token"))
    if isinstance(turns, list):
        facts.append(counted(len(turns), "turn"))
    chips = "".join(f"<span>{esc(fact, 120)}</span>" for fact in facts)
    prompt = row.get("prompt")
    shown = foreign(prompt) if isinstance(prompt, str) else esc(prompt, 4000)
    return (
        f'<article class="rollout"><p class="chips"><b>{esc(why)}</b>{chips}</p>'
        f'<div class="said prompt"><h4>prompt</h4><pre dir="ltr">{shown}</pre></div>'
        f"{_said(row)}</article>"
    )


def _said(row: Rollout) -> str:
    """One completion, or turn after turn with what tools answered; masks are told in words: trained or not."""
    turns = row.get("turns")
    if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
        return _block("completion", "completion", row["text"])
    parts = []
    for number_, turn in enumerate(turns, 1):
        tokens = turn.get("completion_ids")
        trained = f", {counted(len(tokens), 'token')}, trained" if isinstance(tokens, list) else ""
        parts.append(_block("completion", f"turn {number_}{trained}", turn.get("text", "")))
        calls = turn.get("calls")
        after = turns[number_]["read_ids"] if number_ < len(turns) and "read_ids" in turns[number_] else None
        read = f"; {counted(len(after), 'token')} read, masked" if isinstance(after, list) else ""
        for call in calls if isinstance(calls, list) else []:
            if isinstance(call, Mapping):
                title = f"{call.get('name') or 'unreadable call'} ({call.get('outcome')}){read}"
                parts.append(_block("tool", title, call.get("answer", "")))
    return "".join(parts)


def _block(kind: str, title: str, text: object) -> str:
    shown = foreign(text) if isinstance(text, str) else esc(text, 4000)
    if isinstance(text, str) and not text.strip():
        shown = f'<span class="none">({"empty" if not text else "white space only"})</span>{shown}'
    return f'<div class="said {kind}"><h4>{esc(title, 160)}</h4><pre dir="ltr">{shown}</pre></div>'


def _parts(row: Rollout) -> list[tuple[str, Any]]:
    parts = row.get("reward_parts")
    return list(parts.items())[:12] if isinstance(parts, Mapping) and len(parts) > 1 else []


def _reward_part(value: object) -> str:
    return number(value) if isinstance(value, int | float) else "no verdict"


def _reward(row: Rollout) -> float | None:
    value = row.get("reward")
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


# -- The report's words and tables: verdict, headline numbers, what was lost, weight syncs, config


_LOST = ("failures/", "dropped/", "replay/dropped/")
_SYNC = (
    ("sync/probe_move", "smallest move of the probes", min),
    ("sync/replicas", "engines, at most", max),
    ("sync/bytes", "bytes per sync, at most", max),
    ("timing/publish", "seconds to publish, at most", max),
    ("timing/proof", "seconds to prove, at most", max),
    ("timing/checksum", "seconds of checksums, at most", max),
)


def head(data: RunData) -> str:
    """Name, verdict, reasons."""
    status = str(data.verdict.get("status", ""))
    known = status in ("PASS", "FAIL", "ERROR", "INCOMPLETE", "SKIP")
    badge = (
        f'<div class="verdict {status}">{status}</div>'
        if known
        else '<div class="verdict none-yet">no verdict yet</div>'
    )
    reasons = data.verdict.get("reasons")
    items = (
        "".join(f"<li>{esc(local(reason), 2000)}</li>" for reason in reasons[:20]) if isinstance(reasons, list) else ""
    )
    model, tasks = data.config.get("model", "?"), data.config.get("tasks", "?")
    return (
        f'<header><div><div class="over">surefoot run report</div><h1>{esc(data.root.resolve().name)}</h1>'
        f'<div class="over">{esc(local(model))} on {esc(local(tasks))}</div></div>{badge}</header>'
        f'<ul class="reasons">{items}</ul>'
    )


def tiles(data: RunData) -> str:
    """The numbers a person asks for first."""
    cells = "".join(
        f'<div class="tile"><b>{esc(value)}</b><span>{esc(label)}</span></div>' for label, value in _headline(data)
    )
    return f'<div class="tiles">{cells}</div>'


def _headline(data: RunData) -> Iterator[tuple[str, str]]:
    yield from _heldout(data)
    sets = [(name, name.removeprefix("eval/").replace("/", " ")) for name in data.sets()]
    for name, label in (*sets[:4], ("reward", "training reward")):
        if points := data.series(name):
            yield label, _journey([f"{value:.3g}" for _, value in points])
    planned = data.verdict.get("planned_steps", data.config.get("max_steps", "?"))
    done = data.verdict.get("executed_steps", f"{data.train[-1]['step']:.0f}" if data.train else 0)
    yield "steps", f"{done} of {planned}"
    if isinstance(seconds := data.verdict.get("seconds"), int | float):
        yield "wall time", duration(seconds)
    if tokens := math.fsum(value for _, value in data.series("num_tokens")):
        yield "tokens sampled" + (" (estimated)" if data.every > 1 else ""), _count(tokens * data.every)
    gaps = data.series("sync/probe_gap")
    if gaps:
        yield f"weight syncs proven; largest gap {number(max(y for _, y in gaps))}", f"{len(gaps) * data.every}"


def evaluations(data: RunData) -> str:
    """Every evaluation set beside what is held out of the tasks: first, best and last, and how many answers."""
    rows: list[tuple[str, ...]] = []
    held = [name for name in ("eval_accuracy", "eval_reward") if data.series(name)][:1]
    for name in [*held, *data.sets()]:
        points = data.series(name)
        best_step, best = max(points, key=lambda point: point[1])
        prefix = name.removesuffix("accuracy").removesuffix("reward")
        answers = data.series(prefix + "n")
        tries = sorted(
            (each for each in data.evals[-1] if each.startswith(f"{prefix}pass@")),
            key=lambda each: int(each.rpartition("@")[2]),
        )
        many = ", ".join(f"{each.removeprefix(prefix)} {number(data.evals[-1][each])}" for each in tries)
        rows.append((
            name, number(points[0][1]), f"{number(best)} at step {best_step:.0f}", number(points[-1][1]),
            f"{answers[-1][1]:.0f}" if answers else "", many,
        ))  # fmt: skip
    if not data.sets() and not any(row[-1] for row in rows):
        return ""  # one number alone is on the tiles already
    shown = table(["metric", "first", "best", "last", "answers", "of several answers"], rows)
    return f'<div class="panel"><h3>Evaluations</h3>{shown}</div>'


def _heldout(data: RunData) -> Iterator[tuple[str, str]]:
    """First and last evaluation, as counts where the answers are few; one alone is shown as one, with its step."""
    rows = [row for row in data.evals if "eval_accuracy" in row]
    if not rows:
        return
    when = f"after step {rows[0]['step']:.0f}" if rows[0]["step"] else "before training"
    label = "held-out accuracy" if len(rows) > 1 else f"held-out accuracy, measured once, {when}"
    yield label, _journey([count_text(row) or f"{row['eval_accuracy']:.3g}" for row in rows])


def _journey(values: Sequence[str]) -> str:
    return " → ".join([values[0], *values[1:][-1:]])


def lost(data: RunData) -> str:
    """Everything that was not trained on, by reason; nothing lost is said too."""
    rows: list[tuple[str, str, str]] = []
    for name in sorted(name for prefix in _LOST for name in data.names(prefix)):
        points = data.series(name)
        last = name.startswith("replay/dropped/")  # a count of the whole file, not of one step
        total = points[-1][1] if last else math.fsum(value for _, value in points)
        if total:
            rows.append((name, f"{total:.0f}", f"{sum(1 for _, value in points if value)}"))
    of_sets = [f"eval/{name.split('/')[1]}/failures" for name in data.sets()]
    for name in ("steps_refused", "eval_failures", *of_sets):
        points = data.series(name)
        if total := math.fsum(value for _, value in points):
            rows.append((name, f"{total:.0f}", f"{sum(1 for _, value in points if value)}"))
    shown = table(["reason", "count", "in steps"], rows, numbers=2) if rows else '<p class="none">Nothing was lost.</p>'
    if rows and data.every > 1:
        shown += f'<p class="about">of every {data.every}-th step, the ones that were read</p>'
    return f'<div class="panel"><h3>What was left out</h3>{shown}{_ledger(data.verdict.get("ledger"))}</div>'


def _ledger(ledger: object) -> str:
    if not isinstance(ledger, Mapping):
        return ""
    rows = [
        (name, _sum(ledger.get(name)))
        for name in ("planned", "trained", "pending", "leased", "dropped", "requeued", "fenced", "lost")
    ]
    return "<h3>The ledger</h3>" + table(["visits to tasks", "count"], [row for row in rows if row[1] != ""], numbers=1)


def _sum(value: object) -> str:
    if isinstance(value, Mapping):
        reasons = ", ".join(f"{name} {count}" for name, count in list(value.items())[:8])
        return reasons or "0"
    return str(value) if isinstance(value, int) else ""


def syncs(data: RunData) -> str:
    """What was proven about the weights in the engines."""
    gaps, allowed = data.series("sync/probe_gap"), tolerance(data)
    rows: list[tuple[str, str]] = []
    if gaps:
        step, worst = max(gaps, key=lambda point: point[1])
        rows += [("syncs in this log", str(len(gaps))), ("largest gap", f"{number(worst)} nats, at step {step:.0f}")]
        inside = allowed is not None and worst <= allowed
        rows.append(
            ("tolerance", f"{number(allowed)} nats ({'held' if inside else 'NOT held'})" if allowed else "unknown")
        )
    for name, label, choose in _SYNC:
        if points := data.series(name):
            value = choose(y for _, y in points)
            rows.append((label, size(value) if name == "sync/bytes" else number(value)))
    rows.append(("replacements of engines and workers", _restarts(data.status)))
    note = "" if gaps else '<p class="about">No probe figures are in this log: nothing is claimed about its syncs.</p>'
    return f'<div class="panel"><h3>Weight syncs</h3>{table(["", ""], rows, numbers=1)}{note}</div>'


def _restarts(status: Mapping[str, Any]) -> str:
    members = [each for kind in ("replicas", "workers") if isinstance(status.get(kind), list) for each in status[kind]]
    counts = [
        each["restarts"] for each in members if isinstance(each, Mapping) and isinstance(each.get("restarts"), int)
    ]
    return str(sum(counts)) if counts else "no replicas"


def settings(data: RunData) -> str:
    """What was asked for: the keys that are not at their default, then the whole file."""
    rows = list(_changed(data.config))
    shown = table(["key", "value"], rows) if rows else '<p class="none">Every key is at its default.</p>'
    text = foreign(local(redact(data.config_text)), 60_000)
    whole = (
        f"<details><summary>config.toml, every key (paths are cut to their ends)</summary><pre>{text}</pre></details>"
    )
    return f'<div class="panel"><h3>Config: what differs from the defaults</h3>{shown}{whole}</div>'


def machine(data: RunData) -> str:
    """Where it ran."""
    versions = data.environment.get("versions")
    rows = [
        (name, data.environment[name])
        for name in ("platform", "python", "device_name", "cpus", "memory_total_gb", "threads")
        if data.environment.get(name) is not None
    ]
    if data.environment.get("unsafe_code"):
        rows.insert(0, ("UNSAFE", "model-written code ran without a sandbox (tools.allow_unsafe)"))
    rows[:0] = [("sandbox", f"weaker: {line}") for line in _weaker(data.environment.get("sandbox"))]
    rows += _tool_servers(data)
    rows += list(versions.items())[:30] if isinstance(versions, Mapping) else []
    git = data.environment.get("git")
    if isinstance(git, Mapping) and git.get("commit"):
        rows.append(("git", f"{str(git.get('commit'))[:12]}{' with changes' if git.get('dirty') else ''}"))
    shown = table(["", ""], rows) if rows else '<p class="none">environment.json is not there.</p>'
    return f'<div class="panel"><h3>Machine and versions</h3>{shown}</div>'


def _weaker(sandbox: object) -> list[str]:
    """Walls that the host did not have; from a file, so it may be anything."""
    found = sandbox.get("weaker") if isinstance(sandbox, Mapping) else None
    return [str(line) for line in found[:10]] if isinstance(found, list) else []


def _tool_servers(data: RunData) -> Iterator[tuple[str, str]]:
    """What each tool server could reach, and how often it tried to reach more."""
    servers = data.environment.get("tool_servers")
    if not isinstance(servers, Mapping) or not servers:
        return
    denied, asked = attempts_of(data.root / "logs"), hosts_of(data.root / "logs")
    for name, reach in list(servers.items())[:100]:
        tried = f"; tried to reach the network {denied[name]} times, and was refused" if denied.get(name) else ""
        tried += f" (asked for {', '.join(asked[name][:10])})" if asked.get(name) else ""
        yield f"tool server {name}", local(f"{reach}{tried}")


def _changed(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    from surefoot.config import Config

    plain = Config(model="", tasks="").model_dump(mode="json")
    for name, value in config.items():
        default = plain.get(name)
        if isinstance(value, Mapping) and isinstance(default, Mapping):
            yield from ((f"{name}.{key}", local(each)) for key, each in value.items() if each != default.get(key))
        elif value != default and name != "output_dir":
            yield name, local(value)


def _count(value: float) -> str:
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.0f}"


# -- `report.html`: one static page about a run, for the person who made it and everybody it is shown to


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
        _part("verdict", head, data),
        _part("headline", tiles, data),
        _part("evaluations", evaluations, data),
        section("Curves", _part("curves", _curves, data)),
        section("A step on the clock", '<div class="panel">' + _part("timeline", _clock, data) + "</div>"),
        section("What happened to the work", _pair(data, syncs=syncs, losses=lost)),
        section("Rollouts", _part("rollouts", lambda data: rollouts(data.rollouts), data)),
        section("What was run", _pair(data, config=settings, machine=machine)),
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
