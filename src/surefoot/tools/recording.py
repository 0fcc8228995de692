"""One rollout's side of a cassette: a toolbox that records the real one, and one that replays a recording.

Promises   what a tool said is kept before anybody acts on it; a replay answers a call only if number, tool and
           arguments are the recorded ones; going over to the real tools first brings them to the same state.

Read next: `recording.py`, which chooses the recording.
"""

from __future__ import annotations

import difflib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.errors import ConfigError, StateError, ToolError, ToolFailedError
from surefoot.protocols import ToolAnswer, Toolbox, Toolkit, ToolSpec
from surefoot.records import Task
from surefoot.system.files import sha256_of
from surefoot.tools.recording_file import RecordingFile, RecordPlace

DRIFT = "cassette_drift"
"""Failure reason: the real tools did not answer as they did when the cassette was recorded."""


@dataclass
class RecordedRollout:
    """One recording of one rollout: where its records are."""

    life: int
    """Which session recorded it."""
    open: RecordPlace
    calls: list[RecordPlace] = field(default_factory=list)
    reward: RecordPlace | None = None
    closed: bool = False


class RecordingTools:
    """`protocols.Toolbox` that keeps what the real one says."""

    def __init__(self, file: RecordingFile, life: int, inner: Toolkit, task: Task, rollout: str, seed: int) -> None:
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


class ReplayTools:
    """`protocols.Toolbox` that says what was recorded; after a miss, if that is allowed, what the real tools say."""

    def __init__(
        self, cassette: RecordingToolkit, take: RecordedRollout | None, task: Task, rollout: str, seed: int
    ) -> None:
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


# -- Record and replay: every answer that every rollout got from its tools ------------------------
# Owns       what is kept of a rollout (opening, calls, answers, failures, reward), and how it is found again: by the
# name
# of the rollout, the number of the call, the tool and its arguments.
# Promises   a replay gives what was recorded, to the letter, failures included, and starts nothing; a call that was not
# recorded ends the run and names the nearest one, or is asked of the real tools and counted, as was chosen;
# tools that changed since are refused; of a rollout that was played again after a crash the last whole
# recording counts.
# Never      guesses. Nothing is hidden in a cassette: it holds what the model read, secrets of tools included, and is
# readable for its owner alone.


class RecordingToolkit:
    """`protocols.Toolkit` that records another one, or stands for it.

    Args:
        inner: the real tools, or what starts them; in a replay they are asked only for what was not recorded.
        miss: what becomes of a call that was not recorded: `fail` ends the run, `live` asks the real tools.
    """

    def __init__(
        self, inner: Toolkit | Callable[[], Toolkit] | None, path: Path, *, mode: str = "record", miss: str = "fail"
    ) -> None:
        if mode not in ("record", "replay") or miss not in ("fail", "live"):
            raise ConfigError(
                f"mode is {mode!r} and miss is {miss!r}", "a cassette has two of each", "use record or replay"
            )
        self.mode, self.miss = mode, miss
        self._inner, self._start = _told_apart(inner)
        self._lock = threading.RLock()
        self.misses = self.replayed = 0
        """Calls, openings and rewards that were not in the cassette; and those that were."""
        self._opened: dict[str, int] = {}
        try:
            self.file = RecordingFile(path, header=_header(self.inner()) if mode == "record" else None)
            try:
                self._takes = self._begin()
            except BaseException:
                self.file.close()
                raise
        except BaseException:
            if self._inner is not None:
                self._inner.close()
            raise

    @property
    def specs(self) -> Sequence[ToolSpec]:
        """As they were recorded."""
        return [ToolSpec(name, about, json.loads(words)) for name, about, words in self.file.header["specs"]]

    @property
    def routes(self) -> Mapping[str, Sequence[str]]:
        """Tools of each environment, when tasks choose between several."""
        return dict(self.file.header["routes"])

    @property
    def pins(self) -> Mapping[str, str]:
        """Digests of what the real servers offer, if there are any and they run."""
        return dict(getattr(self._inner, "pins", {}))

    def open(self, task: Task, rollout: str, seed: int) -> Toolbox:
        """A recorder around the real tools, or a recording."""
        if self.mode == "record":
            return RecordingTools(self.file, self._life, self.inner(), task, rollout, seed)
        return ReplayTools(self, self._take(rollout), task, rollout, seed)

    def inner(self) -> Toolkit:
        """The real tools, started if need be; in a replay they have to be the recorded ones."""
        with self._lock:
            if self._inner is None:
                if self._start is None:
                    why = "it was opened without any"
                    raise ToolError("a cassette has no real tools to ask", why, "use miss = fail")
                self._inner = self._start()
                if self.mode == "replay":
                    self._same_tools(_header(self._inner))
            return self._inner

    def sync(self) -> None:
        """Everything recorded so far is on the disk when this returns."""
        self.file.sync()

    def close(self) -> None:
        """End the real tools, if they run, and close the file."""
        try:
            if self._inner is not None:
                self._inner.close()
        finally:
            self.file.close()

    def count(self, *, hit: bool) -> None:
        """One more question that was, or was not, in the cassette."""
        with self._lock:
            self.replayed += hit
            self.misses += not hit

    def _begin(self) -> dict[str, list[RecordedRollout]]:
        """Check the tools and every line; a recording goes on as another life."""
        if self._inner is not None:
            self._same_tools(_header(self._inner))
        takes = self._index()
        if self.mode == "record":
            self.file.append({"kind": "life", "life": self._life})
        return takes

    def _take(self, rollout: str) -> RecordedRollout | None:
        """The next recording of this rollout: its tools may have been opened more than once."""
        with self._lock:
            number = self._opened.get(rollout, 0)
            self._opened[rollout] = number + 1
        takes = self._takes.get(rollout, [])
        return takes[number] if number < len(takes) else None

    def _index(self) -> dict[str, list[RecordedRollout]]:
        """Rollout -> its recordings in the session that counts: the last that has a whole one, or the last."""
        by_number: dict[int, RecordedRollout] = {}
        by_rollout: dict[str, list[RecordedRollout]] = {}
        self._life = 0
        for place, record in self.file.records():
            kind = record["kind"]
            if kind == "life":
                self._life = record["life"] + 1
            elif kind == "open":
                take = by_number[place.number] = RecordedRollout(record["life"], place)
                by_rollout.setdefault(record["rollout"], []).append(take)
            elif kind == "call":
                by_number[record["take"]].calls.append(place)
            elif kind == "reward":
                by_number[record["take"]].reward = place
            else:
                by_number[record["take"]].closed = True
        return {rollout: _counting(takes) for rollout, takes in by_rollout.items()}

    def _same_tools(self, header: Mapping[str, Any]) -> None:
        recorded = self.file.header
        if header["sha256"] == recorded["sha256"]:
            return
        changed = _changed(recorded["specs"], header["specs"])
        raise StateError(
            f"{self.file.path} was recorded with other tools: {changed}",
            "an answer of one tool does not stand for an answer of another",
            "record to a new file, or bring back the tools",
        )


def _told_apart(inner: Any) -> tuple[Toolkit | None, Callable[[], Toolkit] | None]:
    """Tools that run already, or what starts them."""
    return (inner, None) if inner is None or hasattr(inner, "specs") else (None, inner)


def _header(inner: Toolkit) -> dict[str, Any]:
    # A schema as text: the order of its words is part of what the model is shown.
    specs = [[spec.name, spec.description, json.dumps(dict(spec.parameters))] for spec in inner.specs]
    routes = {kind: list(names) for kind, names in getattr(inner, "routes", {}).items()}
    digest = sha256_of(json.dumps([specs, routes], sort_keys=True))
    return {"specs": specs, "routes": routes, "sha256": digest}


def _changed(old: Sequence[Sequence[Any]], new: Sequence[Sequence[Any]]) -> str:
    before, after = ({json.dumps(spec, sort_keys=True): spec[0] for spec in specs} for specs in (old, new))
    names = {before[key] for key in before.keys() - after.keys()} | {after[key] for key in after.keys() - before.keys()}
    return ", ".join(sorted(names)[:5]) or "their order, or which task has which"


def _counting(takes: Sequence[RecordedRollout]) -> list[RecordedRollout]:
    lives = [take.life for take in takes if take.closed] or [take.life for take in takes]
    return [take for take in takes if take.life == max(lives)]
