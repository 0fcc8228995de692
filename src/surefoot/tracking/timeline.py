"""Who did what, when: the spans of the last steps and of the slowest one.

Owns       `timeline.jsonl` in the run folder: one line per step that is kept, with every span that touches it.
Promises   memory is bounded whatever the run does, and what was left out is counted; any thread may add; a span that is
           still open when its step ends is still found in it; without a listener a span costs less than a microsecond.
Never      decides anything, or stops a run: a disk that refuses the file is noted in `problem`.

    with span("learn", track="learner"): ...      one piece of work, here and now
    add("group", "worker-3", begin, end)          one that somebody else did, on this machine's monotonic clock
    timeline.step_done(7)                         everything since the last call was step 7

Read next: `report/charts.py`, which draws it.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from surefoot.errors import StorageError
from surefoot.tracking.whole_file import replace_file

FILE = "timeline.jsonl"
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
