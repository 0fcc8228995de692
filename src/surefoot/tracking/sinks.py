"""Where numbers go beside `metrics.jsonl`: TensorBoard, W&B. They may fail; training does not notice.

Owns       one side process per sink, each with a bounded queue.
Promises   `log` returns at once whatever a sink does (hang, raise, exit, crash, fill its disk); rows that do not fit
           are dropped and counted; trouble is said once, and again in the summary; closing takes `CLOSE_S` at most.
Never      reads or writes metrics.jsonl: that file is complete without any of this.

A sink of its own process each, so that a W&B that hangs costs TensorBoard nothing.

Read next: `sink_link.py`, one queue; `sink_process.py`, the other end of it.
"""

from __future__ import annotations

import importlib.util
import json
import select
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from surefoot.errors import ConfigError
from surefoot.safe_text import redact_values
from surefoot.tracking.sink_link import SinkLink

QUEUE_ROWS = 1000
CLOSE_S = 2.0
_PIP = {"tensorboard": "pip install 'surefoot[tensorboard]'", "wandb": "pip install wandb"}

Warn = Callable[[str, str], None]
"""What is wrong, and what to do about it."""


def check_sinks(names: Iterable[str]) -> None:
    """Refuse a sink whose package is not installed, before anything starts; nothing is imported."""
    for name in names:
        found = importlib.util.find_spec(name) if name in _PIP else None
        if found is None or found.origin is None:  # W&B leaves folders of its own name about, which are no package
            raise ConfigError(
                f"report_to names {name!r}, and that package is not installed"
                if name in _PIP
                else f"report_to names {name!r}, which is not a sink",
                "numbers that go nowhere are noticed too late",
                f"{_PIP[name]}, or leave it out" if name in _PIP else f"choose from: {', '.join(_PIP)}",
            )


class Sinks:
    """The sinks of one run.

    Example:
        >>> with Sinks([], Path("."), "run", {}, warn=print) as sinks:
        ...     sinks.log(1, {"loss": 0.5})
        >>> sinks.facts()
        {}
    """

    def __init__(
        self, names: Iterable[str], run_folder: Path, run_name: str, config: Mapping[str, Any], warn: Warn,
        *, queue_rows: int = QUEUE_ROWS, close_s: float = CLOSE_S,
    ) -> None:  # fmt: skip
        """Start one process per name; they warm up by themselves.

        Args:
            run_folder: their files and logs go below it.
            config: shown by sinks that can; JSON-able, and redacted here.
            warn: told of a sink's first error, its first dropped row and its untimely end, once each.
        """
        self._warn, self._close_s, self._closed = warn, close_s, False
        self._said: set[tuple[str, str]] = set()
        self._folder = run_folder
        setup = {"folder": str(run_folder.absolute()), "run": run_name, "config": redact_values(config)}
        self._links = [SinkLink(name, setup, queue_rows) for name in dict.fromkeys(names)]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand one row to every sink; never waits, never raises because of a sink."""
        if not self._links or self._closed:
            return
        row = json.dumps({"step": step, "metrics": dict(metrics)}).encode("ascii") + b"\n"
        for link in self._links:
            link.offer(row)
            self._tell(link)

    def close(self) -> None:
        """Give all sinks together `close_s` seconds to take what is waiting, then end them; safe to call twice."""
        if self._closed:
            return
        self._closed = True
        give_up = time.monotonic() + self._close_s
        try:
            for link in self._links:
                link.say_goodbye()
            self._drain(give_up)
        finally:
            for link in self._links:
                link.end()
                self._tell(link)

    def facts(self) -> dict[str, dict[str, Any]]:
        """Per sink: rows logged, written, dropped and refused with an error, the first error, and an untimely end."""
        return {
            link.name: {
                "logged": link.logged,
                "written": link.written,
                "dropped": link.dropped,
                "errors": link.errors,
                "first_error": link.first_error,
                "ended": link.ended,
            }
            for link in self._links
        }

    def summary(self) -> list[str]:
        """One line per sink, for the end of a run."""
        return [f"{link.name:<18} {_fate(link)}" for link in self._links]

    def __enter__(self) -> Sinks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _drain(self, give_up: float) -> None:
        while (left := give_up - time.monotonic()) > 0:
            waits, busy = select.poll(), False
            for link in self._links:
                link.move()
                for descriptor, event in link.awaited():
                    waits.register(descriptor, event)
                    busy = True
            if not busy:
                return
            waits.poll(left * 1000)

    def _tell(self, link: SinkLink) -> None:
        if link.first_error is not None:
            self._once(link, "error", f"{link.name} failed: {link.first_error}")
        if link.ended is not None:
            self._once(link, "ended", f"{link.name} gets no more rows: {link.ended}")
        elif link.dropped:
            self._once(link, "dropped", f"{link.name} does not keep up: rows are dropped, from row {link.logged} on")

    def _once(self, link: SinkLink, kind: str, text: str) -> None:
        if (link.name, kind) not in self._said:
            self._said.add((link.name, kind))
            log = self._folder / "logs" / f"{link.name}.log"
            self._warn(text, f"nothing is lost: metrics.jsonl has every row; what {link.name} printed is in {log}")


def _fate(link: SinkLink) -> str:
    if link.written == link.logged:
        return f"{link.written} rows written"
    parts = [f"{link.written} of {link.logged} rows written", f"{link.dropped} dropped", f"{link.errors} errors"]
    why = link.first_error or link.ended
    return ", ".join(parts) + (f" ({why})" if why else "")
