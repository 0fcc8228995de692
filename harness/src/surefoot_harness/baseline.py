"""Stored runs to compare with: one JSON file for each baseline, written whole or not at all.

Owns       `surefoot-baselines/NAME.json`: the recorded points of some accepted runs, where they came from, and every
           loosening with its reason.
Promises   the same run is never stored twice (it would make the band too narrow); a loosened band has a reason; no
           path of this machine is written down.

Read next: `baseline.py`, how stored runs become a band.
"""

from __future__ import annotations

import functools
import json
import math
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot_harness.errors import ConfigError, StateError
from surefoot_harness.files import read_json, write_json
from surefoot_harness.own_command import own_name
from surefoot_harness.series import Metrics, Series, describe, is_number
from surefoot_harness.system.files import sha256_of
from surefoot_harness.system.git import GitError, head

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
            f"{own_name()} baseline add RUN --name {name}",
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
    return sha256_of(text)[:16]


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
    return sha256_of(config.read_bytes())[:12] if config.is_file() else None


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


# -- Bands from a few runs: where the next run should lie, wrong with a stated probability --------
# A prediction interval for one more run, from n summaries that scatter normally: mean ± t · s · sqrt(1 + 1/n), with
# Student's t for n - 1 degrees of freedom. With few runs t is large, so a thin baseline gives a wide band, not a
# confident one.


MIN_RUNS = 3
"""Fewer runs say next to nothing about how much runs scatter."""
SIDES = ("both", "low", "high")
_ROUNDING = 1e-9
"""Runs that agree bit for bit leave a band of width 0; the last digits of a sum may still differ."""


@dataclass(frozen=True, slots=True)
class Band:
    """Where the next run should lie."""

    low: float
    high: float
    runs: int
    alpha: float
    side: str

    def holds(self, value: float) -> bool:
        """Whether `value` lies inside, on the sides that are looked at."""
        slack = _ROUNDING * max(abs(self.low), abs(self.high), abs(value))
        inside_low = self.side == "high" or value >= self.low - slack
        inside_high = self.side == "low" or value <= self.high + slack
        return inside_low and inside_high

    def __str__(self) -> str:
        low = "anything" if self.side == "high" else f"{self.low:.6g}"
        high = "anything" if self.side == "low" else f"{self.high:.6g}"
        return f"{low} to {high} ({self.runs} runs, false alarm rate {self.alpha:g})"


def prediction_band(values: Sequence[float], alpha: float = 0.01, side: str = "both", factor: float = 1.0) -> Band:
    """The band for one more run.

    Args:
        values: one summary for each stored run, at least `MIN_RUNS`.
        alpha: the probability that a run like the stored ones falls outside.
        side: `both`, or only `low` (too small is bad) or `high`.
        factor: widens the band; 1 keeps the stated rate.

    Example:
        >>> band = prediction_band([0.50, 0.52, 0.54], alpha=0.05)
        >>> round(band.low, 3), round(band.high, 3)
        (0.421, 0.619)
    """
    if len(values) < MIN_RUNS or not all(math.isfinite(value) for value in values):
        raise ConfigError(
            f"a band from {len(values)} values", f"it needs at least {MIN_RUNS}, all finite", "store more runs"
        )
    if side not in SIDES or not 0 < alpha < 1:
        raise ConfigError(f"side {side!r}, alpha {alpha}", f"sides are {SIDES}, alpha is between 0 and 1", "correct it")
    count = len(values)
    tail = alpha / 2 if side == "both" else alpha
    width = t_quantile(tail, count - 1) * statistics.stdev(values) * math.sqrt(1 + 1 / count) * factor
    middle = statistics.fmean(values)
    return Band(middle - width, middle + width, count, alpha, side)


@functools.lru_cache(maxsize=256)  # a report asks for the same one again and again
def t_quantile(tail: float, freedom: int) -> float:
    """The t that Student's distribution exceeds with probability `tail`.

    Example:
        >>> round(t_quantile(0.025, 10), 4)
        2.2281
    """
    if not 0 < tail < 1 or freedom < 1:
        raise ConfigError(
            f"tail {tail}, {freedom} degrees of freedom", "no such quantile", "0 < tail < 1, freedom >= 1"
        )
    if tail > 0.5:
        return -t_quantile(1 - tail, freedom)
    low, high = 0.0, 1.0
    while t_tail(high, freedom) > tail:
        low, high = high, high * 2
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if t_tail(middle, freedom) > tail else (low, middle)
    return (low + high) / 2


def t_tail(t: float, freedom: int) -> float:
    """The probability that Student's t exceeds `t` (t >= 0)."""
    return 0.5 * _beta_ratio(freedom / (freedom + t * t), freedom / 2, 0.5)


def _beta_ratio(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function, by its continued fraction on the side where that converges."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(x, a, b) / a
    return 1 - front * _beta_fraction(1 - x, b, a) / b


def _beta_fraction(x: float, a: float, b: float) -> float:
    tiny = 1e-300
    c, d = 1.0, 1 / _away_from_zero(1 - (a + b) * x / (a + 1), tiny)
    value = d
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _away_from_zero(1 + term * d, tiny)
            c = _away_from_zero(1 + term / c, tiny)
            value *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return value


def _away_from_zero(value: float, tiny: float) -> float:
    return tiny if abs(value) < tiny else value
