"""Recording around a pytest session: starts the recorder, lets children find it, collects what all of them saw.

Owns       the session's folder, two environment variables, and the recorder of this process.
Promises   `stop` leaves the environment as it was; a log that ends in half a line is reported, never skipped.

Read next: `child/surefoot_affected/recorder.py`, what a fact is.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot_harness.affected.tree import NOT_OURS

if TYPE_CHECKING:
    from surefoot_harness.affected.child.surefoot_affected.recorder import Fact, Recorder

CHILD = Path(__file__).with_name("child")
OUTSIDE = 0
"""The number of "no test": collection, and what happens between tests."""

TORN = "a process it started left half a record"

_current: SessionRecording | None = None


class SessionRecording:
    """One recorded session; made by `start_recording`."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.early = set(sys.modules)  # imported before anything was recorded
        self.folder = Path(tempfile.mkdtemp(prefix="surefoot-affected-"))
        atexit.register(_clean_up, self.folder, os.getpid())  # pytest may end before a session begins
        (self.folder / "settings.json").write_text(json.dumps({"root": str(self.root), "not_ours": sorted(NOT_OURS)}))
        (self.folder / "now").write_bytes(bytes(8))
        self._module, self._engine = _recorder_modules()
        self._before = {name: os.environ.get(name) for name in (self._module.VARIABLE, "PYTHONPATH")}
        self._tell_children()
        self.recorder: Recorder = self._module.Recorder(str(self.folder), child=False)
        self.recorder.begin(OUTSIDE)
        self._module.start(self.recorder)

    def _tell_children(self) -> None:
        for name, mine in ((self._module.VARIABLE, str(self.folder)), ("PYTHONPATH", str(CHILD))):
            others = [each for each in (self._before[name] or "").split(os.pathsep) if each and each != mine]
            os.environ[name] = os.pathsep.join([mine, *others])

    def begin(self, number: int) -> None:
        """Facts from here on belong to test `number`; every block is reported anew."""
        self.recorder.begin(number)
        self._engine.rearm(self.recorder)

    def end(self) -> None:
        """The test is over; says so if something pushed the recorder aside meanwhile."""
        if not self._engine.intact(self.recorder):
            self.recorder.note(("x", "it put another profiler in the recorder's place"))
        self.begin(OUTSIDE)

    def collect(self) -> dict[int, set[Fact]]:
        """Everything seen so far, here and in all children, by test number."""
        facts = {number: set(seen) for number, seen in self.recorder.facts.items()}
        for log in sorted(self.folder.glob("log-*")):
            for number, fact in _read_log(log):
                facts.setdefault(number, set()).add(fact)
        return facts

    def stop(self) -> None:
        """End recording and put the environment back."""
        global _current
        self._module.stop(self.recorder)
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(self.folder, ignore_errors=True)
        _current = None


def _clean_up(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # a forked child runs this too
        shutil.rmtree(folder, ignore_errors=True)


def _recorder_modules() -> tuple[Any, Any]:
    """The recorder and its engine: those this process already runs as a recorded child, or our own."""
    running = sys.modules.get("surefoot_affected.recorder")
    if running is not None:
        return running, sys.modules["surefoot_affected.engines"].engine()
    from surefoot_harness.affected.child.surefoot_affected import engines, recorder

    return recorder, engines.engine()


def _read_log(log: Path) -> list[tuple[int, Fact]]:
    """Facts of one child. Half a line at the end taints every test that the child took part in."""
    found: list[tuple[int, Fact]] = []
    lines = log.read_bytes().split(b"\n")
    for line in lines[:-1]:
        number, *fact = json.loads(line)
        found.append((number, tuple(fact)))
    if len({number for number, _ in found}) == 1:  # what it imported died with it: no later test can profit
        found = [(number, ("s", *fact[1:]) if fact[0] == "b" else fact) for number, fact in found]
    if lines[-1]:
        found += [(number, ("x", TORN)) for number in {number for number, _ in found} or {OUTSIDE}]
    return found


def start_recording(root: str | Path) -> SessionRecording:
    """The recording of this process: started now, or the one that runs already for the same root."""
    global _current
    if _current is None or _current.root != Path(root).resolve():
        _current = SessionRecording(Path(root))
    return _current
