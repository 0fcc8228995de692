"""What makes a ratio believable: pairs, alternation, clean windows, the same work, an interval.

Owns       the order of measurement and the arithmetic of a comparison.
Promises   sides alternate A B B A ...; a pair measured while others used the machine is marked and done again; two
           sides that did not do the same work have no ratio; neither has an interval that crosses 1.
Never      subtracts a warm-up, drops a losing row, or throws a raw sample away.

Read next: `load.py`, who else used the machine; `report.py`, how rows are printed.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from load import Load, LoadProbe

RESULTS = Path(__file__).parent / "results"
PEERS = ("trl", "accelerate")
MIN_PAIRS = 3
"""With fewer clean pairs an interval says nothing."""


class DifferentWorkError(Exception):
    """The two sides did not do the same work: there is nothing to compare."""


@dataclass(frozen=True)
class Sample:
    """One measurement of one side."""

    side: str
    seconds: float
    work: Mapping[str, Any] = field(default_factory=dict)
    """What must be equal on both sides of a pair: token counts, hashes of inputs."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What is only recorded."""


@dataclass(frozen=True)
class Pair:
    """Both sides, measured one right after the other."""

    index: int
    ours: Sample
    peer: Sample
    load: Load

    @property
    def ratio(self) -> float:
        """How many times as long the peer took."""
        return self.peer.seconds / self.ours.seconds


@dataclass(frozen=True)
class Ratio:
    """Peer over ours: above 1 we are faster."""

    median: float
    low: float
    high: float
    pairs: int

    def __str__(self) -> str:
        return f"{self.median:.2f}x [{self.low:.2f}, {self.high:.2f}] n={self.pairs}"


@dataclass(frozen=True)
class NoRatio:
    """Why there is none."""

    reason: str

    def __str__(self) -> str:
        return self.reason


def timed(side: str, function: Callable[[], Mapping[str, Any]]) -> Sample:
    """Run `function`, which returns its proof of work, and take the wall time."""
    started = time.perf_counter()
    work = function()
    return Sample(side, time.perf_counter() - started, work)


def alternate(
    ours: Callable[[], Sample],
    peer: Callable[[], Sample],
    *,
    pairs: int,
    redo: int | None = None,
    probe: LoadProbe | None = None,
    record: Callable[[Pair], None] = lambda pair: None,
) -> list[Pair]:
    """Measure until `pairs` clean pairs exist, or `redo` dirty ones were done again.

    Args:
        redo: how many dirty pairs may be repeated; as many as `pairs` when left out, 0 takes what comes.
        record: called with each pair as soon as it exists, so that an interrupted run keeps its samples.

    Returns:
        every pair in order, dirty ones included.
    """
    probe = probe or LoadProbe()
    done: list[Pair] = []
    limit = pairs + (pairs if redo is None else redo)
    while len(done) < limit and sum(not pair.load.dirty for pair in done) < pairs:
        mark = probe.mark()
        first, second = (ours, peer) if len(done) % 2 == 0 else (peer, ours)
        one, two = first(), second()
        a, b = (one, two) if len(done) % 2 == 0 else (two, one)
        pair = Pair(len(done), a, b, probe.since(mark))
        record(pair)
        check_same_work(a, b)
        done.append(pair)
    return done


def check_same_work(a: Sample, b: Sample) -> None:
    """Refuse a pair whose proofs differ, or that proves nothing."""
    if not a.work or not b.work:
        raise DifferentWorkError(f"{a.side if not a.work else b.side} gave no proof of its work")
    for key in sorted({*a.work, *b.work}):
        left, right = a.work.get(key), b.work.get(key)
        if left != right:
            raise DifferentWorkError(f"{key}: {a.side} did {left!r}, {b.side} did {right!r}")


def usable(pairs: Sequence[Pair], *, allow_dirty: bool = False) -> list[Pair]:
    """The pairs that count."""
    return [pair for pair in pairs if allow_dirty or not pair.load.dirty]


def medians(pairs: Sequence[Pair], *, allow_dirty: bool = False) -> tuple[float, float]:
    """Median seconds of ours and of the peer, over the pairs that count; over all when none does."""
    used = usable(pairs, allow_dirty=allow_dirty) or pairs
    return statistics.median(p.ours.seconds for p in used), statistics.median(p.peer.seconds for p in used)


def dirt(pairs: Sequence[Pair], *, allow_dirty: bool = False) -> str:
    """A remark on pairs that others disturbed; empty when there were none."""
    dirty = sum(pair.load.dirty for pair in pairs)
    return f" ({dirty} dirty, {'used' if allow_dirty else 'left out'})" if dirty else ""


def compare(pairs: Sequence[Pair], *, allow_dirty: bool = False) -> Ratio | NoRatio:
    """The median of paired ratios with its interval, or the reason why none is printed."""
    used = usable(pairs, allow_dirty=allow_dirty)
    if len(used) < MIN_PAIRS:
        return NoRatio(f"no ratio: {len(used)} usable of {len(pairs)} pairs, {MIN_PAIRS} needed")
    ratios = [pair.ratio for pair in used]
    low, high = bootstrap_interval(ratios)
    if low <= 1 <= high:
        return NoRatio(f"no difference shown: interval crosses 1, n={len(ratios)}")
    return Ratio(statistics.median(ratios), low, high, len(ratios))


def bootstrap_interval(values: Sequence[float], *, draws: int = 10_000, seed: int = 0) -> tuple[float, float]:
    """95 % percentile interval of the median, from resampling whole pairs."""
    if not values or not all(math.isfinite(value) and value > 0 for value in values):
        raise ValueError(f"ratios must be positive and finite, got {list(values)}")
    stream = random.Random(seed)
    medians = sorted(statistics.median(stream.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[math.ceil(0.975 * draws) - 1]


class Journal:
    """Raw samples as JSON lines: one line that describes the run, then one line per measurement.

    Args:
        name: the benchmark; the file is `results/<name>.jsonl`, appended to.
        setting: exact configuration of both sides.
    """

    def __init__(self, name: str, setting: Mapping[str, Any], folder: Path = RESULTS) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{name}.jsonl"
        self.run = f"{name}-{time.strftime('%Y%m%dT%H%M%S')}"
        self.write("run", {"benchmark": name, "setting": dict(setting), "machine": describe_machine()})

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        """Append one line; it has left this process on return."""
        line = json.dumps({"kind": kind, "run": self.run, **values}, default=_plain)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def pair(self, cell: str) -> Callable[[Pair], None]:
        """A recorder for `alternate`."""
        return lambda pair: self.write("pair", {"cell": cell, **asdict(pair)})


def _plain(value: Any) -> Any:
    """What JSON does not know: records become objects, the rest text."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def describe_machine() -> dict[str, Any]:
    """Versions, commit, CPU model."""
    from surefoot.storage.run_folder import environment_record

    record = environment_record(cwd=Path(__file__).parent)
    record["versions"] |= {name: _version(name) for name in PEERS}
    return {"cpu": cpu_model(), **{key: record[key] for key in ("platform", "python", "cpus", "versions", "git")}}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_model() -> str:
    """The processor's own name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
