"""What others see of a run while it goes on: `status.json`, what it does right now, and `timeline.jsonl`, who did what.

Owns       both files and their fields; whether a run is RUNNING, STALE, STOPPED or FINISHED.
Promises   a reader sees a whole file; a writer that fails never stops the run, and says so once; a number that is not
           finite is left out, never turned into 0. Of the timeline: memory is bounded whatever the run does, and what
           was left out is counted; any thread may add; a span that is still open when its step ends is still found in
           it; without a listener a span costs less than a microsecond.
Never      believes the file about life and death: that is the lock's word (`alive`), since a killed run cannot say.

    Board.facts  ->  StatusWriter (a thread of the run)  ->  RUN/status.json  ->  read_status  ->  surefoot status

    with span("learn", track="learner"): ...      one piece of work, here and now
    add("group", "worker-3", begin, end)          one that somebody else did, on this machine's monotonic clock
    timeline.step_done(7)                         everything since the last call was step 7

Read next: `report/console.py` and `report/data.py`, which show them.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from surefoot.errors import StateError, StorageError
from surefoot.system.files import TooLongError, atomic_write, read_plain
from surefoot.system.signals import last_heartbeat
from surefoot.system.text import printable, python_call
from surefoot.tracking.metrics import headlines

# -- A small file that readers see whole: the old one or the new one, never half of either ---------
# For what is written again and again while a run lives. It is not synced: after a power cut the last second may be
# missing, and nobody resumes from it. What a run resumes from goes through the store.


def replace_file(path: Path, data: bytes) -> None:
    """Put `data` at `path` in one step, 0600; what the disk refuses is a `StorageError`, and leaves nothing behind."""
    try:
        atomic_write(path, data, durable=False)
    except OSError as error:
        raise StorageError(
            f"{path} could not be written: {error.strerror or error}",
            "the disk or the folder's rights refused it",
            "free some space, or choose a folder that you may write to",
        ) from error


def read_bounded(path: Path, limit: int) -> bytes | None:
    """The file's bytes; None when there is none. A longer one than `limit`, a link or a pipe is a `StateError`."""
    try:
        return read_plain(path, limit)
    except FileNotFoundError:
        return None
    except TooLongError:
        raise StateError(
            f"{path} has more than {limit} bytes", "a run does not write it that long", "check what is in it"
        ) from None
    except OSError as error:
        raise StateError(
            f"{path} cannot be read: {error.strerror or error}", "it is part of the run", "check the run folder"
        ) from error


# -- What the run is doing right now, written about once a second, read by anybody -----------------


STATUS_FILE = "status.json"
EVERY_S = 1.0
PATIENCE_S = 5.0
SILENT_S = 15.0
"""A run that lives and has not written for so long is stale: halted by a signal, swapped out, or its disk hangs."""
MAX_BYTES = 4_000_000
MAX_ITEMS = 2000
_KEPT = {
    "reward": "reward",
    "async/queue": "queue",
    "async/in_flight": "in_flight",
    "async/staleness_mean": "staleness_mean",
    "async/staleness_max": "staleness_max",
    "tokens_per_second": "tokens_per_s",
}
"""Metrics of a step that are part of the status, and their names in it."""

_ALSO = {"groups_per_second": "groups_per_s", "tokens_per_second": "tokens_per_s"}

Facts = Mapping[str, Any]


class RunCondition(StrEnum):
    """How a run stands."""

    RUNNING = "RUNNING"
    STALE = "STALE"
    STOPPED = "STOPPED"
    FINISHED = "FINISHED"


class StatusBoard:
    """What a run says of itself: told by its hooks, asked by the writer's thread.

    Example:
        >>> board = Board(max_steps=10)
        >>> board.step(3, {"reward": 0.5, "version": 3.0})
        >>> {name: board.facts()[name] for name in ("step", "max_steps", "version", "reward")}
        {'step': 3, 'max_steps': 10, 'version': 3, 'reward': 0.5}
    """

    def __init__(self, *, max_steps: int) -> None:
        self._facts: dict[str, Any] = {"step": 0, "max_steps": max_steps}
        self._sources: list[Callable[[], Facts]] = []
        self._members: dict[str, Any] = {}
        self._asking = threading.Lock()
        self._steps: deque[tuple[float, float]] = deque(maxlen=20)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One optimiser step was made."""
        told: dict[str, Any] = {new: metrics[name] for name, new in _KEPT.items() if name in metrics}
        if "version" in metrics:
            told["version"] = int(metrics["version"])
        self._steps.append((time.monotonic(), metrics.get("groups/scored", 0.0)))
        self._facts = self._facts | {"step": step} | told | self._pace()  # one assignment: readers see all or nothing

    def resumed(self, step: int, seconds_before: float) -> None:
        """The run goes on from this step, which took so long before the resume."""
        self.step(step, {})
        self._facts = self._facts | {"seconds_before": seconds_before}

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Held-out tasks were answered."""
        names = ("eval_accuracy", "eval_reward", "eval_right", "eval_n", *headlines(metrics))
        found = {name: metrics[name] for name in names if name in metrics}
        self._facts = self._facts | found | {"eval_step": step}

    @contextmanager
    def asking(self, source: Callable[[], Facts]) -> Iterator[None]:
        """Inside this, `source` is asked too, such as a pool's `status`; what it says goes over what steps said."""
        self._sources.append(source)
        try:
            yield
        finally:
            self._sources.remove(source)
            if self._asking.acquire(timeout=PATIENCE_S):  # whoever is being asked right now may answer first
                self._asking.release()
            self._facts = self._facts | self._members  # who was there, and how often replaced, is worth keeping

    def facts(self) -> dict[str, Any]:
        """Everything known now."""
        whole = dict(self._facts)
        with self._asking:
            for source in list(self._sources):
                whole |= {_ALSO.get(name, name): value for name, value in source().items() if value is not None}
        self._members |= {name: whole[name] for name in ("replicas", "workers") if name in whole}
        return whole

    def _pace(self) -> dict[str, float]:
        if len(self._steps) < 2:
            return {}
        seconds = max(self._steps[-1][0] - self._steps[0][0], 1e-9)
        groups = sum(count for _, count in list(self._steps)[1:])
        return {"groups_per_s": groups / seconds, "steps_per_s": (len(self._steps) - 1) / seconds}


class StatusWriter:
    """A thread that keeps `path` up to date from `start` (or `with`) until `close`.

    Start it after everything that forks: a fork of a process with threads is not safe.
    """

    def __init__(
        self, path: Path, sources: Callable[[], Facts], *, every_s: float = EVERY_S,
        warn: Callable[[str, str], None] | None = None,
    ) -> None:  # fmt: skip
        """`warn` is told once, with a remedy, when the status cannot be gathered or written."""
        self.path, self._sources, self._every_s, self._warn = path, sources, every_s, warn
        self._started = time.time()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._facts: dict[str, Any] = {}
        self.problem: str | None = None
        """The last thing that went wrong, if anything did."""

    def start(self) -> None:
        """Write once, then go on in the background."""
        self.write()
        self._thread = threading.Thread(target=self._go_on, name="status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write once more, then stop; safe to call twice. Before what the sources ask is closed."""
        if self._thread is None:
            return
        self._over.set()
        self._thread.join(timeout=PATIENCE_S)  # a source that hangs does not hold up the end of a run
        self._thread = None
        self.write(ended=True)

    def write(self, *, ended: bool = False) -> None:
        """Write the file now. Never raises: a run does not end because nobody can look at it."""
        try:
            text = json.dumps(self._record(ended), allow_nan=False)
            replace_file(self.path, text.encode("utf-8") + b"\n")
        except (StorageError, ValueError, TypeError, RecursionError) as error:
            self._say(str(getattr(error, "what", error)))

    def __enter__(self) -> StatusWriter:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _go_on(self) -> None:
        while not self._over.wait(self._every_s):
            self.write()
        self.write()  # the last step is part of the story; asked here, where a source that hangs holds up nobody

    def _record(self, ended: bool) -> dict[str, Any]:
        last, now = last_heartbeat(), time.time()
        record: dict[str, Any] = {"pid": os.getpid(), "started": self._started, "updated": now, "ended": ended}
        record |= {"phase": last.stage, "quiet_s": max(0.0, time.monotonic() - last.moment)}
        if ended:  # whoever was asked may be gone by now: what was last known is what was true
            return record | self._facts
        try:
            self._facts = dict(plain(self._sources()))
        except Exception as error:  # noqa: BLE001 - the sources are other people's; the file and the warning say it
            self._say(f"{type(error).__name__}: {error}")
            return record | self._facts | {"problem": printable(f"{type(error).__name__}: {error}")[:500]}
        return record | self._facts

    def _say(self, what: str) -> None:
        first, self.problem = self.problem is None, what
        if first and self._warn is not None:
            self._warn(f"the run's status cannot be kept: {printable(what)[:300]}", "the run goes on; see status.json")


@dataclass(frozen=True, slots=True)
class Status:
    """One look at a run."""

    state: RunCondition
    detail: str
    """One line: the verdict, how long it has been silent, or how to go on."""
    facts: Facts
    """The fields of status.json; empty when there is none."""
    verdict: Facts
    """verdict.json; empty while the run goes on."""

    def as_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            "state": str(self.state),
            "detail": self.detail,
            "status": dict(self.facts),
            "verdict": dict(self.verdict),
        }


def read_status(run: Path, *, alive: bool | None, now: float | None = None) -> Status:
    """Look at a run folder.

    Args:
        alive: whether the process that holds the run's lock is alive; None when that cannot be known from here, such
            as for a run on another machine: then the age of status.json has to do.
    """
    if not (run / "config.toml").is_file():
        raise StateError(
            f"{run} is not a run folder",
            "it has no config.toml" if run.is_dir() else "it is a file" if run.exists() else "it does not exist",
            "give the folder that `surefoot train` named",
        )
    facts, verdict = plain(_object(run / STATUS_FILE)), plain(_object(run / "verdict.json"))
    silent = None if "updated" not in facts else max(0.0, (now or time.time()) - _number(facts["updated"], 0.0))
    fresh = silent is not None and silent <= SILENT_S and facts.get("ended") is not True
    if alive or (alive is None and fresh):
        return _living(facts, silent, fresh)
    if verdict and verdict.get("status") != "INCOMPLETE":
        reasons = verdict.get("reasons")
        why = f"; {reasons[0]}" if isinstance(reasons, list) and reasons else ""
        return Status(RunCondition.FINISHED, f"{verdict.get('status')}{why}", facts, verdict)
    how = "stopped on request" if verdict else "the process is gone"
    return Status(RunCondition.STOPPED, f"{how}; go on with: {_way_on(run)}", facts, verdict)


def _way_on(run: Path) -> str:
    """A command, or a call where the run was given something in Python."""
    try:
        given = _object(run / "environment.json").get("from_python")
    except StateError:  # how it stands can be told all the same
        given = None
    if not isinstance(given, list) or not given:
        return f"surefoot train --resume {run}"
    return python_call("resume", run, [printable(str(argument))[:200] for argument in given[:10]])


def _living(facts: Facts, silent: float | None, fresh: bool) -> Status:
    if silent is None:
        return Status(RunCondition.RUNNING, "it has written no status yet", facts, {})
    if fresh or facts.get("ended") is True:
        return Status(RunCondition.RUNNING, f"{facts.get('phase', 'at work')}", facts, {})
    return Status(RunCondition.STALE, f"its process is alive and has been silent for {silent:.0f} s", facts, {})


def plain(value: Any, depth: int = 0) -> Any:
    """As JSON data: numbers that are not finite are left out, text is made safe, what is too long is cut."""
    if isinstance(value, Mapping):
        pairs = ((printable(str(k))[:200], plain(v, depth + 1)) for k, v in list(value.items())[:MAX_ITEMS])
        return {name: each for name, each in pairs if each is not None} if depth < 6 else None
    if isinstance(value, list | tuple):
        return [plain(each, depth + 1) for each in value[:MAX_ITEMS]] if depth < 6 else None
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return value if abs(value) < 1e300 else None
    return printable(str(value))[:500]


def _object(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty when there is no file, `StateError` when it is anything else."""
    data = read_bounded(path, MAX_BYTES)
    if data is None:
        return {}
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise StateError(
            f"{path} is damaged: it holds no JSON object",
            "a run replaces this file as a whole, so it was changed by something else",
            f"remove it if the run is over; a living run writes {STATUS_FILE} anew within seconds",
        )
    return found


def _number(value: object, otherwise: float) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else otherwise


# -- Who did what, when: the spans of the last steps and of the slowest one ------------------------


TIMELINE_FILE = "timeline.jsonl"
KEEP_STEPS = 16
MAX_SPANS = 1000
"""Per step; a step of many replicas has more groups than anybody can look at."""
MAX_OF_TRACK = 64
OWN_TRACKS = frozenset({"loop", "learner", "the learner", "sync"})
"""The few that every step has: a crowd of workers does not crowd them out."""
SAVE_EVERY_S = 10.0


class Span(NamedTuple):
    """One piece of work: what, by whom, from when to when, in seconds since the timeline began."""

    name: str
    track: str
    start: float
    end: float


@dataclass(eq=False)
class Window:
    """One step: when it was, and what touched it."""

    step: int
    start: float
    end: float
    spans: list[Span] = field(default_factory=list)
    left_out: int = 0
    slowest: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    """Spans by track."""

    @property
    def seconds(self) -> float:
        """How long the step took."""
        return self.end - self.start

    def offer(self, span: Span) -> None:
        """Take the span if it touches this step, as long as there is room."""
        if not (span.start < self.end and span.end >= self.start):
            return
        room = len(self.spans) < MAX_SPANS or span.track in OWN_TRACKS
        if room and self.counts[span.track] < MAX_OF_TRACK:
            self.spans.append(span)
            self.counts[span.track] += 1
        else:
            self.left_out += 1

    def line(self) -> str:
        """As a line of `timeline.jsonl`; times to the microsecond."""
        spans = [[s.name, s.track, round(s.start, 6), round(s.end, 6)] for s in self.spans]
        whole: dict[str, Any] = {"step": self.step, "start": round(self.start, 6), "end": round(self.end, 6)}
        return json.dumps(whole | {"slowest": self.slowest, "left_out": self.left_out, "spans": spans})


class Timeline:
    """Collects spans; `listening` makes it the one that the module's `span` and `add` speak to.

    Example:
        >>> timeline = Timeline()
        >>> with timeline.span("learn", track="learner"):
        ...     pass
        >>> timeline.step_done(1)
        >>> [(w.step, [s.name for s in w.spans]) for w in timeline.windows()]
        [(1, ['learn'])]
    """

    def __init__(
        self, path: Path | None = None, *, keep: int = KEEP_STEPS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """With a `path`, the file is written every few seconds and at `close`."""
        self.path, self._clock, self._lock = path, clock, threading.Lock()
        self.problem: str | None = None
        """Why the file could not be written, if it could not."""
        self._origin = clock()
        self._saved = self._origin
        self._recent: deque[Window] = deque(maxlen=keep)
        self._slowest: Window | None = None
        self._steps = 0
        self._now = Window(-1, 0.0, float("inf"))

    @contextmanager
    def span(self, name: str, *, track: str = "loop") -> Iterator[None]:
        """Everything inside is one span, however it ends."""
        begin = self._clock()
        try:
            yield
        finally:
            self.add(name, track, begin, self._clock())

    def add(self, name: str, track: str, start: float, end: float) -> None:
        """A span that is over; moments of this machine's monotonic clock. It goes to every step that it touches."""
        span = Span(name, track, start - self._origin, max(start, end) - self._origin)
        with self._lock:
            self._now.offer(span)
            if span.start < self._now.start:  # it began in an earlier step; in most runs the last one only
                for window in self._kept():
                    window.offer(span)

    def step_done(self, step: int) -> None:
        """The step is over, its evaluation and checkpoint included; what comes now belongs to the next."""
        moment = self._clock() - self._origin
        with self._lock:
            done = self._now
            if self._steps == 0:  # what comes before the first piece of work is loading, not a step
                done.start = min((span.start for span in done.spans), default=0.0)
            done.step, done.end, self._steps = step, moment, self._steps + 1
            self._recent.append(done)
            # The first step pays for what the others find warm: it is no example of a slow one.
            if self._slowest is None or self._steps == 2 or done.seconds > self._slowest.seconds:
                self._slowest = done
            self._now = Window(-1, moment, float("inf"))
        if moment + self._origin - self._saved >= SAVE_EVERY_S:
            self.save()

    def windows(self) -> list[Window]:
        """The steps that are kept, oldest first; the slowest is marked."""
        with self._lock:
            kept = self._kept()
            for window in kept:
                window.slowest = window is self._slowest
            return sorted(kept, key=lambda window: window.start)

    def save(self) -> None:
        """Write the file, if there is one to write."""
        self._saved = self._clock()
        if self.path is None:
            return
        try:
            replace_file(self.path, "".join(w.line() + "\n" for w in self.windows()).encode("utf-8"))
            self.problem = None
        except StorageError as error:
            self.problem = error.what

    close = save

    @contextmanager
    def listening(self) -> Iterator[Timeline]:
        """From here on, and until the end of the block, the module's `span` and `add` speak to this one."""
        global _current
        before, _current = _current, self
        try:
            yield self
        finally:
            _current = before
            self.close()

    def _kept(self) -> list[Window]:
        last, slowest = list(self._recent), self._slowest
        return last if slowest is None or any(window is slowest for window in last) else [slowest, *last]


_current: Timeline | None = None
_SILENCE: AbstractContextManager[None] = nullcontext()


def span(name: str, *, track: str = "loop") -> AbstractContextManager[None]:
    """A span of the timeline that listens; nothing at all when none does."""
    return _SILENCE if _current is None else _current.span(name, track=track)


def add(name: str, track: str, start: float, end: float) -> None:
    """A finished span, for the timeline that listens; moments of `time.monotonic`."""
    if _current is not None:
        _current.add(name, track, start, end)


def read_timeline(data: bytes) -> tuple[list[Window], int]:
    """The steps of a `timeline.jsonl`, and how many of its lines could not be read."""
    windows, odd = [], 0
    for line in data.splitlines():
        try:
            windows.append(_window(json.loads(line)))
        except (ValueError, TypeError, KeyError, RecursionError):
            odd += 1
    return windows, odd


def _window(record: dict[str, Any]) -> Window:
    spans = [_span(row) for row in record["spans"][:MAX_SPANS]]
    start, end = float(record["start"]), float(record["end"])
    if not (0 <= start <= end < 1e12):
        raise ValueError("a step ends before it begins")
    return Window(int(record["step"]), start, end, spans, int(record["left_out"]), record["slowest"] is True)


def _span(row: Sequence[Any]) -> Span:
    name, track, start, end = row
    if not (-1e12 < float(start) <= float(end) < 1e12):
        raise ValueError("a span ends before it begins")
    return Span(str(name)[:200], str(track)[:200], float(start), float(end))
