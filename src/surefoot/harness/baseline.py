"""Stored runs to compare with: one JSON file for each baseline, written whole or not at all.

Owns       `surefoot-baselines/NAME.json`: the recorded points of some accepted runs, where they came from, and every
           loosening with its reason.
Promises   the same run is never stored twice (it would make the band too narrow); a loosened band has a reason; no
           path of this machine is written down.

Read next: `bands.py`, how stored runs become a band.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.errors import ConfigError, StateError
from surefoot.harness.files import read_json, write_json
from surefoot.harness.git import GitError, head
from surefoot.harness.series import Metrics, Series, describe, is_number

FOLDER = Path("surefoot-baselines")
DEFAULT_NAME = "main"
VERSION = 1
MAX_FACTOR = 100.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)


@dataclass(frozen=True)
class StoredRun:
    """One accepted run."""

    source: str
    """The name of the folder or file it was read from, without its path."""
    added: str
    commit: str | None
    config_hash: str | None
    digest: str
    """Of the recorded points: the same run has the same digest."""
    metrics: Metrics
    left_out: dict[str, str] = field(default_factory=dict)
    """Metrics that hold something other than finite numbers, and what."""


@dataclass(frozen=True)
class Baseline:
    """Some accepted runs and how their bands were loosened."""

    name: str
    runs: tuple[StoredRun, ...] = ()
    loosened: tuple[dict[str, Any], ...] = ()

    def factor(self, metric: str) -> tuple[float, str]:
        """How much wider the band of `metric` is, and the reason; (1, "") when it is not."""
        for entry in reversed(self.loosened):
            if entry["metric"] == metric:
                return float(entry["factor"]), str(entry["reason"])
        return 1.0, ""


@dataclass(frozen=True)
class Baselines:
    """Every baseline of a folder, and the one that is meant when none is named."""

    folder: Path
    default: str | None = None

    def get(self, name: str | None) -> Baseline | None:
        """The baseline `name`, or the default, or the only one there is; None when nothing is stored."""
        wanted = name or self.default
        if wanted is not None:
            path = baseline_path(self.folder, wanted)
            return load_baseline(self.folder, wanted) if path.exists() or wanted == self.default else None
        names = baseline_names(self.folder)
        if len(names) > 1:
            raise ConfigError(
                f"{self.folder} holds {len(names)} baselines: {', '.join(names)}",
                "which one is meant decides the verdict",
                'name it: --baseline NAME, or within_baseline(..., baseline="NAME")',
            )
        return load_baseline(self.folder, names[0]) if names else None


def baseline_path(folder: Path, name: str) -> Path:
    """Where a baseline lies; a name that could leave the folder is refused."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"baseline name {name[:60]!r}", "it becomes a file name", "letters, digits, . _ - only")
    return folder / f"{name}.json"


def baseline_names(folder: Path) -> list[str]:
    """The baselines of a folder, sorted."""
    return sorted(path.stem for path in folder.glob("*.json")) if folder.is_dir() else []


def add_run(source: Path, metrics: Metrics, *, folder: Path = FOLDER, name: str = DEFAULT_NAME) -> StoredRun:
    """Store one run in a baseline, which is made if need be."""
    path = baseline_path(folder, name)
    baseline = load_baseline(folder, name) if path.exists() else Baseline(name)
    run = _stored(source, metrics)
    twin = next((other for other in baseline.runs if other.digest == run.digest), None)
    if twin is not None:
        raise StateError(
            f"{run.source} is already in the baseline {name}, as {twin.source}",
            "the same run twice makes the band narrower than runs are",
            "add a run with another seed",
        )
    _save(folder, Baseline(name, (*baseline.runs, run), baseline.loosened))
    return run


def loosen(folder: Path, name: str, metric: str, factor: float, reason: str) -> Baseline:
    """Widen the band of one metric from now on; the reason is stored beside it."""
    if not reason.strip():
        raise ConfigError("no reason was given", "a loosened band needs a recorded reason", "--reason 'why'")
    if not math.isfinite(factor) or not 1 <= factor <= MAX_FACTOR:
        raise ConfigError(f"factor {factor}", "it widens the band", f"give a number from 1 to {MAX_FACTOR:g}")
    baseline = load_baseline(folder, name)
    known = sorted({metric_name for run in baseline.runs for metric_name in run.metrics})
    found = [series for run in baseline.runs if (series := run.metrics.resolve(metric)[0]) is not None]
    if not found:
        raise ConfigError(f"no run of {name} holds {metric!r}", f"known are {', '.join(known[:8])}", "name one of them")
    # By the name under which it is recorded, so that train/reward and reward are one band.
    entry = {"metric": found[0].name, "factor": factor, "reason": reason.strip(), "when": _now()}
    changed = Baseline(name, baseline.runs, (*baseline.loosened, entry))
    _save(folder, changed)
    return changed


def load_baseline(folder: Path, name: str) -> Baseline:
    """Read one baseline; missing, torn or foreign is a `StateError`."""
    path = baseline_path(folder, name)
    if not path.exists():
        known = ", ".join(baseline_names(folder)) or "none"
        raise StateError(
            f"there is no baseline {name} in {folder}",
            f"stored are: {known}",
            f"surefoot baseline add RUN --name {name}",
        )
    content = read_json(path)
    try:
        if content["version"] != VERSION:
            raise ValueError(f"version {content['version']}")
        runs = tuple(_run_from(entry) for entry in content["runs"])
        loosened = tuple({**entry, "factor": float(entry["factor"])} for entry in content["loosened"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateError(
            f"{path} is not a baseline: {error}", "a band from damaged runs is no band", "restore it, or store it anew"
        ) from error
    return Baseline(name, runs, loosened)


def _run_from(entry: dict[str, Any]) -> StoredRun:
    series = {}
    for name, points in entry["metrics"].items():
        pairs = {int(step): float(value) for step, value in zip(points["steps"], points["values"], strict=True)}
        series[str(name)] = Series(str(name), pairs)
    facts = {key: entry[key] for key in ("source", "added", "commit", "config_hash", "digest")}
    return StoredRun(**facts, metrics=Metrics(series), left_out=dict(entry["left_out"]))


def _stored(source: Path, metrics: Metrics) -> StoredRun:
    kept: dict[str, Series] = {}
    left_out: dict[str, str] = {}
    for name, series in metrics.items():
        bad = next(((step, value) for step, value in series.items() if not is_number(value)), None)
        if bad is None and len(series):
            kept[name] = series
        else:
            left_out[name] = "no recorded points" if bad is None else f"{describe(bad[1])} at step {bad[0]}"
    if not kept:
        raise StateError(
            f"{source.name} holds no metric of finite numbers", "nothing to compare with", "add another run"
        )
    folder = source if source.is_dir() else source.parent
    return StoredRun(
        source=source.resolve().name,
        added=_now(),
        commit=_commit(folder),
        config_hash=_config_hash(folder),
        digest=_digest(kept),
        metrics=Metrics(kept),
        left_out=left_out,
    )


def _digest(series: dict[str, Series]) -> str:
    text = json.dumps({name: [[s, float(v)] for s, v in series[name].items()] for name in sorted(series)})
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _commit(folder: Path) -> str | None:
    """What the run wrote down about itself, else the commit of the tree that it lies in."""
    record = folder / "environment.json"
    if record.is_file():
        git = read_json(record).get("git")
        if isinstance(git, dict) and isinstance(git.get("commit"), str):
            return str(git["commit"])
    try:
        return head(folder)
    except GitError:
        return None


def _config_hash(folder: Path) -> str | None:
    config = folder / "config.toml"
    return hashlib.sha256(config.read_bytes()).hexdigest()[:12] if config.is_file() else None


def _save(folder: Path, baseline: Baseline) -> None:
    runs = [
        {
            "source": run.source,
            "added": run.added,
            "commit": run.commit,
            "config_hash": run.config_hash,
            "digest": run.digest,
            "left_out": run.left_out,
            "metrics": {
                n: {"steps": list(s), "values": [float(v) for v in s.values()]} for n, s in run.metrics.items()
            },
        }
        for run in baseline.runs
    ]
    content = {"version": VERSION, "name": baseline.name, "loosened": list(baseline.loosened), "runs": runs}
    write_json(baseline_path(folder, baseline.name), content)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
