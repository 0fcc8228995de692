"""One rollout's side of a cassette: a toolbox that records the real one, and one that replays a recording.

Promises   what a tool said is kept before anybody acts on it; a replay answers a call only if number, tool and
           arguments are the recorded ones; going over to the real tools first brings them to the same state.

Read next: `cassette.py`, which chooses the recording.
"""

from __future__ import annotations

import difflib
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from surefoot.envs.sources.cassette_file import CassetteFile, Place
from surefoot.errors import ToolError, ToolFailedError
from surefoot.protocols import ToolAnswer, Toolbox, Toolkit
from surefoot.records import Task

if TYPE_CHECKING:
    from surefoot.envs.sources.cassette import CassetteToolkit

DRIFT = "cassette_drift"
"""Failure reason: the real tools did not answer as they did when the cassette was recorded."""


@dataclass
class Take:
    """One recording of one rollout: where its lines are."""

    life: int
    """Which session recorded it."""
    open: Place
    calls: list[Place] = field(default_factory=list)
    reward: Place | None = None
    closed: bool = False


class Recorder:
    """`protocols.Toolbox` that keeps what the real one says."""

    def __init__(self, file: CassetteFile, life: int, inner: Toolkit, task: Task, rollout: str, seed: int) -> None:
        self._file, self._rollout, self._calls = file, rollout, 0
        self._lock = threading.Lock()
        self._closed = False
        about = {"kind": "open", "life": life, "rollout": rollout, "task": task.id, "seed": seed}
        try:
            self._inner = inner.open(task, rollout, seed)
        except ToolFailedError as error:
            take = file.append({**about, "failed": list(error.args)})
            file.append({"kind": "close", "take": take})
            raise
        self.opening = self._inner.opening
        try:
            self._take = file.append({**about, "opening": self.opening})
        except BaseException:
            self._inner.close()
            raise

    def call(self, name: str, arguments: Mapping[str, Any], deadline_s: float) -> ToolAnswer:
        """Ask the real tool, and keep what it says before anybody acts on it."""
        with self._lock:
            number, self._calls = self._calls, self._calls + 1
        about = {"kind": "call", "take": self._take, "call": number, "name": name, "arguments": canonical(arguments)}
        try:
            answer = self._inner.call(name, arguments, deadline_s)
        except ToolFailedError as error:
            self._file.append({**about, "failed": list(error.args)})
            raise
        self._file.append({**about, "text": answer.text, "outcome": answer.outcome})
        return answer

    def reward(self) -> float | None:
        """What the real world says, kept."""
        try:
            value = self._inner.reward()
        except ToolFailedError as error:
            self._file.append({"kind": "reward", "take": self._take, "failed": list(error.args)})
            raise
        self._file.append({"kind": "reward", "take": self._take, "value": value})
        return value

    def close(self) -> None:
        """The recording is whole."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._inner.close()
        self._file.append({"kind": "close", "take": self._take})


class Replayer:
    """`protocols.Toolbox` that says what was recorded; after a miss, if that is allowed, what the real tools say."""

    def __init__(self, cassette: CassetteToolkit, take: Take | None, task: Task, rollout: str, seed: int) -> None:
        self._cassette, self._task, self._rollout, self._seed = cassette, task, rollout, seed
        self._said: list[dict[str, Any]] = []
        self._live: Toolbox | None = None
        self._lock = threading.RLock()
        self.opening: str | None = None
        read = cassette.file.record_at
        self._calls = [] if take is None else [read(place) for place in take.calls]
        self._by_number = {call["call"]: call for call in self._calls}
        self._reward = None if take is None or take.reward is None else read(take.reward)
        record = None if take is None else read(take.open)
        if record is None:
            self._miss("its tools were never opened", [])
            self.opening = self._go_live().opening
        elif (record["task"], record["seed"]) != (task.id, seed):
            self._other_rollout(record)
        else:
            cassette.count(hit=True)
            self.opening = _given(record).get("opening")

    def call(self, name: str, arguments: Mapping[str, Any], deadline_s: float) -> ToolAnswer:
        """The recorded answer to this very call."""
        with self._lock:
            if self._live is not None:
                return self._live.call(name, arguments, deadline_s)
            number, asked = len(self._said), canonical(arguments)
            record = self._by_number.get(number)
            if record is not None and (record["name"], record["arguments"]) == (name, asked):
                self._cassette.count(hit=True)
                self._said.append(record)
                return ToolAnswer(_given(record)["text"], record["outcome"])
            self._miss(f"call {number} is {name} {_short(asked)}", self._calls[number:] or self._calls, name, asked)
            return self._go_live(deadline_s).call(name, arguments, deadline_s)

    def reward(self) -> float | None:
        """The recorded reward."""
        with self._lock:
            if self._live is not None:
                return self._live.reward()
            if self._reward is not None and len(self._said) == len(self._calls):
                self._cassette.count(hit=True)
                value: float | None = _given(self._reward)["value"]
                return value
            self._miss(f"its reward was asked after {len(self._said)} of {len(self._calls)} recorded calls", [])
            return self._go_live().reward()

    def close(self) -> None:
        """Let go of the real tools, if it came to that."""
        with self._lock:
            if self._live is not None:
                self._live.close()

    def _go_live(self, deadline_s: float = 60.0) -> Toolbox:
        """Real tools, brought to where the recording has led: what was asked so far is asked again."""
        self._live = self._cassette.inner().open(self._task, self._rollout, self._seed)
        for record in self._said:
            answer = self._live.call(record["name"], json.loads(record["arguments"]), deadline_s)
            recorded = str(record.get("text"))
            if (answer.text, answer.outcome) != (recorded, record.get("outcome")):
                raise ToolFailedError(
                    f"{self._rollout}: {record['name']} answered {_short(answer.text)}, not {_short(recorded)}",
                    "the world is not in the state that the recording led to, so what follows means nothing",
                    "record again, or replay with miss = fail",
                    DRIFT,
                )
        return self._live

    def _miss(self, what: str, near: Sequence[Mapping[str, Any]], name: str = "", asked: str = "") -> None:
        self._cassette.count(hit=False)
        if self._cassette.miss == "live":
            return
        best = max(near, key=lambda r: _likeness(r, name, asked), default=None)
        hint = (
            "" if best is None else f"; the nearest is call {best['call']}: {best['name']} {_short(best['arguments'])}"
        )
        raise ToolError(
            f"the cassette {self._cassette.file.path} does not hold this: in {self._rollout} {what}{hint}",
            "the run has left the recorded one, and no answer is not an empty answer",
            "record again, replay with the same config and seed, or allow live answers on a miss",
        )

    def _other_rollout(self, record: Mapping[str, Any]) -> None:
        raise ToolError(
            f"{self._rollout} is task {self._task.id} with seed {self._seed}; recorded was {record['task']} "
            f"with seed {record['seed']}",
            "the answers of another task's tools are not this one's",
            "replay with the tasks, config and seed of the recorded run",
        )


def canonical(arguments: Mapping[str, Any]) -> str:
    """Arguments as one text, whatever the order of their names.

    Example:
        >>> canonical({"b": 1, "a": [1.0, "x"]})
        '{"a":[1.0,"x"],"b":1}'
    """
    return json.dumps(arguments, sort_keys=True, separators=(",", ":"))


def _given(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """What was recorded; a failure fails again."""
    if "failed" in record:
        raise ToolFailedError(*record["failed"])
    return record


def _likeness(record: Mapping[str, Any], name: str, asked: str) -> float:
    same = 1.0 if record["name"] == name else 0.0
    return same + difflib.SequenceMatcher(None, record["arguments"][:500], asked[:500]).ratio()


def _short(text: str) -> str:
    return text if len(text) <= 200 else text[:197] + "..."
