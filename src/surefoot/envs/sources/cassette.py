"""Record and replay: every answer that every rollout got from its tools.

Owns       what is kept of a rollout (opening, calls, answers, failures, reward), and how it is found again: by the name
           of the rollout, the number of the call, the tool and its arguments.
Promises   a replay gives what was recorded, to the letter, failures included, and starts nothing; a call that was not
           recorded ends the run and names the nearest one, or is asked of the real tools and counted, as was chosen;
           tools that changed since are refused; of a rollout that was played again after a crash the last whole
           recording counts.
Never      guesses. Nothing is hidden in a cassette: it holds what the model read, secrets of tools included, and is
           readable for its owner alone.

Read next: `cassette_boxes.py`, one rollout's recording; `cassette_file.py`, the lines.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.envs.sources.cassette_boxes import Recorder, Replayer, Take
from surefoot.envs.sources.cassette_file import CassetteFile
from surefoot.errors import ConfigError, StateError, ToolError
from surefoot.protocols import Toolbox, Toolkit, ToolSpec
from surefoot.records import Task


class CassetteToolkit:
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
            self.file = CassetteFile(path, header=_header(self.inner()) if mode == "record" else None)
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
            return Recorder(self.file, self._life, self.inner(), task, rollout, seed)
        return Replayer(self, self._take(rollout), task, rollout, seed)

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

    def _begin(self) -> dict[str, list[Take]]:
        """Check the tools and every line; a recording goes on as another life."""
        if self._inner is not None:
            self._same_tools(_header(self._inner))
        takes = self._index()
        if self.mode == "record":
            self.file.append({"kind": "life", "life": self._life})
        return takes

    def _take(self, rollout: str) -> Take | None:
        """The next recording of this rollout: its tools may have been opened more than once."""
        with self._lock:
            number = self._opened.get(rollout, 0)
            self._opened[rollout] = number + 1
        takes = self._takes.get(rollout, [])
        return takes[number] if number < len(takes) else None

    def _index(self) -> dict[str, list[Take]]:
        """Rollout -> its recordings in the session that counts: the last that has a whole one, or the last."""
        by_number: dict[int, Take] = {}
        by_rollout: dict[str, list[Take]] = {}
        self._life = 0
        for place, record in self.file.lines():
            kind = record["kind"]
            if kind == "life":
                self._life = record["life"] + 1
            elif kind == "open":
                take = by_number[place.number] = Take(record["life"], place)
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
    digest = hashlib.sha256(json.dumps([specs, routes], sort_keys=True).encode()).hexdigest()
    return {"specs": specs, "routes": routes, "sha256": digest}


def _changed(old: Sequence[Sequence[Any]], new: Sequence[Sequence[Any]]) -> str:
    before, after = ({json.dumps(spec, sort_keys=True): spec[0] for spec in specs} for specs in (old, new))
    names = {before[key] for key in before.keys() - after.keys()} | {after[key] for key in after.keys() - before.keys()}
    return ", ".join(sorted(names)[:5]) or "their order, or which task has which"


def _counting(takes: Sequence[Take]) -> list[Take]:
    lives = [take.life for take in takes if take.closed] or [take.life for take in takes]
    return [take for take in takes if take.life == max(lives)]
