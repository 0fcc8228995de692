"""One half of a demo: the real `surefoot train` in a process of its own, and what it left behind.

Promises   the numbers come from the run folder, as anybody could read them; a run that left none is an error, never
           an empty curve; a stop request reaches the run, and the demo ends only after it.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.errors import StateError, StoppedError, SurefootError
from surefoot.store.run_folder import RunFolder
from surefoot.tracking.log import Row, kind_of, read_metrics

STOPPED = 75
CLOCKS = ("killswitch/", "timing/", "step_time", "tokens_per_second")
"""Names that may differ between a run that is guarded and one that is not: the guard's own, and what a clock made."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Half:
    """A finished run, read from its folder."""

    folder: Path
    code: int
    """Exit code of the command."""
    rows: tuple[Row, ...]
    """Every line of metrics.jsonl."""
    verdict: dict[str, Any]

    @property
    def reason(self) -> str:
        """The first one of its verdict; empty when there is none."""
        reasons = self.verdict.get("reasons")
        return str(reasons[0]) if isinstance(reasons, list) and reasons else ""

    @property
    def heldout(self) -> list[tuple[int, float]]:
        """(step, accuracy) of each evaluation."""
        return [(int(row["step"]), row["eval_accuracy"]) for row in self.rows if kind_of(row) == "eval"]

    @property
    def rewards(self) -> list[float]:
        """One per evaluation, as the guard sees it: the mean of the steps since the evaluation before."""
        means: list[float] = []
        since: list[float] = []
        for row in self.rows:
            if kind_of(row) == "train":
                since.append(row["reward"])
            elif since:
                means.append(sum(since) / len(since))
                since = []
        first = [row["reward"] for row in self.rows if kind_of(row) == "train"][:1]
        return first + means  # the evaluation before the first step goes with the rollouts of the same weights

    def numbers(self, until: int) -> list[Row]:
        """What must be equal in both halves: every number up to this step that no clock and no guard made."""
        return [
            {name: value for name, value in row.items() if not name.startswith(CLOCKS)}
            for row in self.rows
            if row["step"] <= until
        ]

    def rollouts(self, until: int) -> list[bytes]:
        """The rollouts of every step, byte for byte; one that is missing is an error."""
        return [(self.folder / f"rollouts/step_{step}.jsonl").read_bytes() for step in range(1, until + 1)]


def play(words: Sequence[str], folder: Path, say: Say) -> Half:
    """Run `surefoot train WORDS`, saying each evaluation, and read its folder.

    Raises:
        StoppedError: somebody asked it to stop.
        SurefootError: it ended without a verdict; what it said last is part of the message.
    """
    command = [sys.executable, "-P", "-m", "surefoot", "train", *words, f"output_dir={folder}"]
    log = folder.with_suffix(".log")
    with log.open("w", encoding="utf-8") as file:
        code = _follow(command, file.write, say)
    if code == STOPPED:
        raise StoppedError("the demo was stopped", "asked to stop", f"start it again; what it did is in {folder}")
    return read_half(folder, code, log)


def _follow(command: Sequence[str], keep: Callable[[str], object], say: Say) -> int:
    """Start it, keep every line it prints, say those of evaluations; its exit code, 75 when it was asked to stop."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True,
        encoding="utf-8", errors="replace", start_new_session=True,
    ) as child, _pass_on_stops(child) as asked:  # fmt: skip
        assert child.stdout is not None, "it was asked for a pipe"
        try:
            for line in child.stdout:
                keep(line)
                if line.startswith("step") and "held-out accuracy" in line:
                    say(line.rstrip("\n").partition("  answers")[0])
        except BaseException:  # nobody listens any more, or a disk is full: the run must not go on alone
            child.terminate()
            raise
        code = child.wait()
    return STOPPED if asked else code


@contextmanager
def _pass_on_stops(child: subprocess.Popen[str]) -> Iterator[list[int]]:
    """SIGINT and SIGTERM ask the run to stop, which it does after a whole step; a second one does not wait.

    The run has a session of its own: a terminal's Ctrl-C reaches it once, through here, and not twice.
    """
    asked: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        child.send_signal(signal.SIGKILL if asked else signal.SIGTERM)
        asked.append(number)

    try:
        before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: the caller owns the signals
        yield asked
        return
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def read_half(folder: Path, code: int, log: Path) -> Half:
    """The run folder as a `Half`."""
    try:
        verdict = json.loads(RunFolder.open(folder).verdict.read_text(encoding="utf-8"))
        rows = read_metrics(folder / "metrics.jsonl")
    except (SurefootError, OSError, ValueError) as error:
        raise StateError(
            f"the run ended with exit code {code} and left nothing to judge: {error}",
            "a demo without both runs shows nothing",
            f"read {log}",
        ) from error
    half = Half(folder, code, tuple(rows), verdict)
    if len(half.heldout) < 2 or not half.rewards:
        raise StateError(
            f"the run ended with exit code {code} after {len(half.heldout)} evaluation(s)",
            "a curve needs at least two points",
            f"read {log}",
        )
    return half
