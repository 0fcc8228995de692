"""One or more contained programs, watched to their end: what they print, what they take, when they must stop.

Owns       the pipes, the deadline, and the verdict on why a program ended.
Promises   returns only when the program and all that it started are gone; no more than the cap is ever kept of what it
           prints; memory is counted over all its processes together.
Never      starts anything; `sandbox_link.py` does.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from surefoot.envs.rewards.memory_cap import excess_mb
from surefoot.envs.sandboxes.sandbox_link import Born, Reports
from surefoot.errors import ToolError, ToolFailedError

_WEIGH_S = 0.05
_GRACE_S = 10.0
"""How long a killed sandbox may take to be gone: the kernel has to free what it held."""


@dataclass
class Watched:
    """One program under watch."""

    born: Born
    stdin: memoryview
    feed: int | None
    """Write end of its stdin."""
    outputs: dict[int, bytearray]
    """Read ends of what it prints, and what arrived."""
    deadline: float
    memory_mb: int
    output_bytes: int
    reports: Reports = field(default_factory=Reports)
    report: dict[str, Any] | None = None
    killed: str | None = None
    cut: bool = False
    gone: bool = False
    weighed_at: float = 0.0
    printed: list[bytearray] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.printed = list(self.outputs.values())

    def kill(self, why: str) -> None:
        """End it and all that it started; the first reason stands."""
        if self.killed is None and not self.gone:
            self.killed = why
            self.deadline = time.monotonic() + _GRACE_S
            self.born.kill()

    def check(self, now: float) -> None:
        """Deadline and memory."""
        if now >= self.deadline and not self.gone:
            if self.killed is not None:
                raise _failed(f"a killed sandbox was still there after {_GRACE_S:g} s", "sandbox_stuck")
            self.kill("deadline")
        elif self.killed is None and not self.gone and now >= self.weighed_at + _WEIGH_S:
            self.weighed_at = now
            inside = self.born.members()
            if inside and excess_mb(inside, self.memory_mb, 0) is not None:
                self.kill("memory")

    def close(self) -> None:
        """Give every descriptor back."""
        self.born.close()
        for descriptor in [*self.outputs, *([] if self.feed is None else [self.feed])]:
            os.close(descriptor)


def attend(watched: Sequence[Watched]) -> None:
    """Watch until the first is done; the others, which only serve it, are ended with it."""
    try:
        selector = selectors.DefaultSelector()
    except OSError as error:
        raise _failed(f"a sandbox cannot be watched: {error.strerror}", "sandbox_failed") from error
    with selector:
        for each in watched:
            _register(selector, each)
        while not all(each.gone for each in watched):
            for key, _ in selector.select(_pause(watched)):
                each, handle = key.data
                handle(selector, each, key.fd)
            now = time.monotonic()
            for each in watched:
                each.check(now)
            if watched[0].gone:
                for each in watched[1:]:
                    each.kill("no longer needed")


def _pause(watched: Sequence[Watched]) -> float:
    nearest = min((each.deadline for each in watched if not each.gone), default=time.monotonic() + _WEIGH_S)
    return max(0.0, min(_WEIGH_S, nearest - time.monotonic()))


def _register(selector: selectors.BaseSelector, each: Watched) -> None:
    each.born.link.setblocking(False)
    selector.register(each.born.link, selectors.EVENT_READ, (each, _hear))
    selector.register(each.born.pidfd, selectors.EVENT_READ, (each, _bury))
    for output in each.outputs:
        selector.register(output, selectors.EVENT_READ, (each, _read))
    if each.feed is not None:
        selector.register(each.feed, selectors.EVENT_WRITE, (each, _feed))


def _hear(selector: selectors.BaseSelector, each: Watched, descriptor: int) -> None:
    """What init reports; its first word is the ending."""
    said = each.reports.read(each.born.link)
    if each.reports.ended and descriptor in selector.get_map():
        selector.unregister(descriptor)
    each.report = each.report or next(iter(said), None)  # none: that is said later


def _bury(selector: selectors.BaseSelector, each: Watched, descriptor: int) -> None:
    """Init is gone, and with it everybody who could report or print: what is in the pipes now is all there will be.

    Their end is not waited for. Another thread of ours may have forked meanwhile, and its child holds copies.
    """
    selector.unregister(descriptor)
    _hear(selector, each, each.born.link.fileno())
    each.report = each.report or each.born.last_word()
    each.born.kill()
    _stop_feeding(selector, each)
    for output in list(each.outputs):
        with contextlib.suppress(BlockingIOError):
            while output in each.outputs:
                _read(selector, each, output)
        _stop_reading(selector, each, output)
    each.gone = True


def _read(selector: selectors.BaseSelector, each: Watched, descriptor: int) -> None:
    if descriptor not in each.outputs:
        return  # closed by an earlier event of the same moment
    kept, data = each.outputs[descriptor], os.read(descriptor, 2**16)
    room = each.output_bytes - len(kept)
    kept += data[:room]
    if len(data) > room:
        each.cut = True
        each.kill("output")
    if not data or len(data) > room:
        _stop_reading(selector, each, descriptor)


def _stop_reading(selector: selectors.BaseSelector, each: Watched, descriptor: int) -> None:
    if descriptor in each.outputs:
        selector.unregister(descriptor)
        os.close(descriptor)
        del each.outputs[descriptor]


def _feed(selector: selectors.BaseSelector, each: Watched, descriptor: int) -> None:
    if each.feed is None:
        return
    try:
        each.stdin = each.stdin[os.write(descriptor, each.stdin[: 2**16]) :]
    except BlockingIOError:
        return
    except BrokenPipeError:  # it does not want to hear more
        each.stdin = memoryview(b"")
    if not each.stdin:
        _stop_feeding(selector, each)


def _stop_feeding(selector: selectors.BaseSelector, each: Watched) -> None:
    if each.feed is not None:
        selector.unregister(each.feed)
        os.close(each.feed)
        each.feed = None


def exit_code(each: Watched) -> int | None:
    """The program's own exit code; None when it was we who ended it. Refuses an ending that nobody reported."""
    if each.killed is not None:
        return None
    if each.report is None:
        raise _failed("a sandbox ended without a report: something outside it killed it", "sandbox_failed")
    if "failed" in each.report:
        if each.report.get("program"):
            raise ToolError(
                f"{each.report['failed']} (inside the sandbox)",
                "the sandbox shows /usr, the running Python and what `read_only` names; nothing else exists there",
                "give the whole path of a program that is there, or name its folder in `read_only`",
            )
        raise _failed(f"a sandbox could not be built: {each.report['failed']}", "sandbox_failed")
    return int(each.report["exit"])


def _failed(what: str, reason: str) -> ToolFailedError:
    return ToolFailedError(
        what,
        "a program without a complete sandbox is not run, and an ending that nobody saw is no result",
        "run `python -m surefoot.envs.sandbox`: it says what this host can contain",
        reason=reason,
    )
