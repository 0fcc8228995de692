"""Everything by which others see a run while it goes on and after: `status.json`, `timeline.jsonl`, `report.html`.

Owns       the three, from `with monitor:` to the end of the block; one place where a run plugs them in.
Promises   nothing here stops or slows a run: what cannot be written becomes one warning.

    with RunMonitor(folder, max_steps=100, warn=view.warn) as monitor:
        phase = monitor.phase(stop.part)            pieces of a step become spans
        with monitor.asking(runtime.status): ...    the replicas or the sampler are asked once a second
        monitor.step(7, metrics)                    after each step; `evaluated` after each evaluation
        monitor.finished(7)                         the step is over, its evaluation and checkpoint included
    monitor.report()                                after the verdict
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from surefoot.errors import SurefootError
from surefoot.tracking import live
from surefoot.tracking.live import Facts, StatusBoard, StatusWriter, Timeline

Phase = Callable[[str], AbstractContextManager[object]]


class RunMonitor:
    """One run, seen from outside. Enter it after everything that forks: it has a thread."""

    def __init__(self, folder: Path, *, max_steps: int, warn: Callable[[str, str], None]) -> None:
        """`warn` gets what went wrong, and a remedy."""
        self.folder, self._warn = folder, warn
        self.board = StatusBoard(max_steps=max_steps)
        self.timeline = Timeline(folder / live.TIMELINE_FILE)
        self.writer = StatusWriter(folder / live.STATUS_FILE, self.board.facts, warn=warn)
        self._inside = ExitStack()

    def __enter__(self) -> RunMonitor:
        self._inside.enter_context(self.timeline.listening())
        self._inside.enter_context(self.writer)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inside.close()
        if self.timeline.problem is not None:
            self._warn(f"the timeline was not kept: {self.timeline.problem}", "the report will lack it")

    def asking(self, source: Callable[[], Facts]) -> AbstractContextManager[None]:
        """Inside this, `source` is asked at every writing; when it is left, nobody asks any more."""
        return self.board.asking(source)

    def phase(self, inner: Phase) -> Phase:
        """The loop's phases, each also a span on the track `loop`."""

        @contextmanager
        def both(name: str) -> Iterator[None]:
            with self.timeline.span(name), inner(name):
                yield

        return both

    def resumed(self, step: int, seconds_before: float = 0.0) -> None:
        """The run goes on from here; what came before the resume took so long."""
        self.board.resumed(step, seconds_before)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One optimiser step was logged."""
        self.board.step(step, metrics)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Held-out tasks were answered."""
        self.board.evaluated(step, metrics)

    def finished(self, step: int) -> None:
        """Nothing more belongs to this step."""
        self.timeline.step_done(step)

    def report(self) -> Path | None:
        """Write the page; None, with a warning, where that is not possible."""
        return report_or_warn(self.folder, self._warn)


def report_or_warn(folder: Path, warn: Callable[[str, str], None]) -> Path | None:
    """Write `report.html` of this run; what is in its way ends nothing."""
    from surefoot.report.page import write_report

    try:
        return write_report(folder)
    except SurefootError as error:
        warn(f"the report was not written: {error.what}", f"try: surefoot report {folder}")
        return None
