"""The report's words and tables: verdict, headline numbers, what was lost, weight syncs, config."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from surefoot.protocols import count_text
from surefoot.safe_text import redact
from surefoot.tracking.egress import attempts_of
from surefoot.tracking.report_charts import tolerance
from surefoot.tracking.report_data import RunData
from surefoot.tracking.report_text import esc, foreign, local, table
from surefoot.tracking.text import duration, number, size

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
    note = "" if gaps else '<p class="about">No canary figures are in this log: nothing is claimed about its syncs.</p>'
    return f'<div class="panel"><h3>Weight syncs</h3>{table(["", ""], rows, numbers=1)}{note}</div>'


def _restarts(status: Mapping[str, Any]) -> str:
    members = [each for kind in ("replicas", "workers") if isinstance(status.get(kind), list) for each in status[kind]]
    counts = [
        each["restarts"] for each in members if isinstance(each, Mapping) and isinstance(each.get("restarts"), int)
    ]
    return str(sum(counts)) if counts else "no fleet"


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
    denied = attempts_of(data.root / "logs")
    for name, reach in list(servers.items())[:100]:
        tried = f"; tried to reach the network {denied[name]} times, and was refused" if denied.get(name) else ""
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
