"""How function starts are seen: `sys.monitoring` where there is one (Python 3.12), else a profile function.

Both tell a recorder each block once for each test. In the pytest process a block that has been noted costs nothing more
until the next test; in a child, which learns of a new test only by looking, each start costs one look.
"""

from __future__ import annotations

import sys
import threading
from types import CodeType, FrameType
from typing import Any, Protocol

from .recorder import Fact, Recorder, on_every_event

_NAME = "surefoot affected"
_monitoring: Any = getattr(sys, "monitoring", None)  # Python 3.12 and newer


class Engine(Protocol):
    """What the recorder asks for."""

    def start(self, recorder: Recorder) -> None:
        """Begin to report function starts to `recorder`."""

    def stop(self, recorder: Recorder) -> None:
        """Stop reporting to `recorder`."""

    def rearm(self, recorder: Recorder) -> None:
        """A test begins: report every block again."""

    def became_child(self, recorder: Recorder) -> None:
        """The process was forked; the recorder writes to a log now."""

    def wake(self) -> None:
        """Code of the project is about to run in this process."""

    def intact(self, recorder: Recorder) -> bool:
        """Whether nothing took the engine's place meanwhile, so that what it saw is complete."""


# -- Python 3.12 and newer ----------------------------------------------------------------
class Monitoring:
    """Two tools for each recorder: one discovers code once and for ever, one watches the project's code only.

    The second is armed code by code, so a new test re-arms the few functions that the last one ran, not the world.
    """

    def __init__(self) -> None:
        self._tools: dict[int, tuple[int, int]] = {}
        self._armed: dict[int, list[CodeType]] = {}

    def start(self, recorder: Recorder) -> None:
        """Begin to report to `recorder`."""
        events = _monitoring.events
        finder, watcher = self._take_tools()
        self._tools[id(recorder)], self._armed[id(recorder)] = (finder, watcher), []
        self._connect(recorder)
        _monitoring.set_events(finder, events.PY_START | events.PY_RESUME)

    def _take_tools(self) -> tuple[int, int]:
        free = [number for number in (4, 3, 2, 5) if _monitoring.get_tool(number) is None]
        if len(free) < 2:
            raise RuntimeError(
                "no free sys.monitoring tool: other tools hold them; run without them or without --affected"
            )
        for number in free[:2]:
            _monitoring.use_tool_id(number, _NAME)
        return free[0], free[1]

    def _connect(self, recorder: Recorder) -> None:
        finder, watcher = self._tools[id(recorder)]
        events = _monitoring.events
        local = events.PY_START | events.PY_RESUME
        seen, done = self._armed[id(recorder)], _monitoring.DISABLE
        blocks: dict[int, tuple[CodeType, Fact]] = {}  # by identity: equal code of two files is equal, alas

        def discover(code: CodeType, offset: int) -> Any:
            fact = recorder.block(code)
            if fact is not None and id(code) not in blocks:
                blocks[id(code)] = (code, fact)
                recorder.note(fact)
                _monitoring.set_local_events(watcher, code, local)
            return done

        def watch(code: CodeType, offset: int) -> Any:
            if id(code) in blocks:
                recorder.note(blocks[id(code)][1])
                seen.append(code)
            return done

        def watch_always(code: CodeType, offset: int) -> Any:
            if id(code) in blocks:
                recorder.note(blocks[id(code)][1])

        for event in (events.PY_START, events.PY_RESUME):
            _monitoring.register_callback(finder, event, discover)
            _monitoring.register_callback(watcher, event, watch_always if recorder.child else watch)

    def rearm(self, recorder: Recorder) -> None:
        """Report every block again: a test begins."""
        _, watcher = self._tools[id(recorder)]
        events = _monitoring.events
        codes = self._armed[id(recorder)]
        for code in {id(each): each for each in codes}.values():
            _monitoring.set_local_events(watcher, code, 0)
            _monitoring.set_local_events(watcher, code, events.PY_START | events.PY_RESUME)
        codes.clear()

    def became_child(self, recorder: Recorder) -> None:
        """Report every start, for the forked process."""
        self._connect(recorder)
        _monitoring.restart_events()

    def wake(self) -> None:
        """Nothing to do: foreign code costs nothing here."""

    def intact(self, recorder: Recorder) -> bool:
        """Whether the engine is still in place."""
        return all(_monitoring.get_tool(tool) == _NAME for tool in self._tools[id(recorder)])

    def stop(self, recorder: Recorder) -> None:
        """Stop reporting to `recorder`."""
        self._armed.pop(id(recorder))
        for tool in self._tools.pop(id(recorder)):
            _monitoring.set_events(tool, 0)
            _monitoring.free_tool_id(tool)


# -- Python 3.11 --------------------------------------------------------------------------
class Profiling:
    """One profile function for all threads. It shares the process with coverage and debuggers, which trace instead.

    A child sleeps until code of the project comes to life in it: the helpers of Ray import half the world and run none
    of it. Threads cannot be given a profile function from outside, so new ones get it from the start, and the others at
    the first announcement of any kind that they make after the engine woke.
    """

    def __init__(self) -> None:
        self._recorders: list[Recorder] = []
        self._awake = False
        self.function: Any = None

    def start(self, recorder: Recorder) -> None:
        """Begin to report to `recorder`."""
        self._recorders.append(recorder)
        self._awake = self._awake or not recorder.child
        self._install()

    def stop(self, recorder: Recorder) -> None:
        """Stop reporting to `recorder`."""
        self._recorders.remove(recorder)
        self._install()

    def rearm(self, recorder: Recorder) -> None:
        """Report every block again: a test begins."""
        if not self.intact(recorder):
            self._install()

    def became_child(self, recorder: Recorder) -> None:
        """Report every start, for the forked process."""
        self._install()

    def wake(self) -> None:
        """Look from now on."""
        if not self._awake:
            self._awake = True
            self._install()
            on_every_event.append(self._join_in)

    def _join_in(self) -> None:
        if sys.getprofile() is None and self.function is not None:
            sys.setprofile(self.function)

    def intact(self, recorder: Recorder) -> bool:
        """Whether the engine is still in place."""
        return sys.getprofile() is self.function

    def _install(self) -> None:
        self.function = _profile_function(list(self._recorders)) if self._recorders else None
        threading.setprofile(self.function)
        if self._awake:
            sys.setprofile(self.function)


def _profile_function(recorders: list[Recorder]) -> Any:
    facts: dict[int, tuple[CodeType, list[tuple[Recorder, Fact]]]] = {}

    def look(code: CodeType) -> tuple[CodeType, list[tuple[Recorder, Fact]]]:
        found = [(recorder, recorder.block(code)) for recorder in recorders]
        facts[id(code)] = known = (code, [(recorder, fact) for recorder, fact in found if fact is not None])
        return known

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            code = frame.f_code
            for recorder, fact in (facts.get(id(code)) or look(code))[1]:
                if recorder.child or fact not in recorder.seen:
                    recorder.note(fact)

    return profile


_engine: Engine | None = None


def engine() -> Engine:
    """The engine of this process."""
    global _engine
    if _engine is None:
        _engine = Monitoring() if sys.version_info >= (3, 12) else Profiling()
    return _engine
