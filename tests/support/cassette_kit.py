"""Tools without a world, for cassettes: they say how often they were asked, and fail when told to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.errors import ToolFailedError
from surefoot.protocols import ToolAnswer, ToolSpec
from surefoot.records import Task
from surefoot.tools.recording import RecordingToolkit

TASK = Task(id="t", prompt="?")
SCHEMA = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}}
CALL = tuple[str, dict[str, Any]]


class Box:
    """Says how often it was asked; fails when told to."""

    def __init__(self, kit: Kit, rollout: str) -> None:
        self._kit, self._rollout, self._asked = kit, rollout, 0
        self.opening: str | None = f"opening of {rollout}"

    def call(self, name: str, arguments: Mapping[str, Any], deadline_s: float) -> ToolAnswer:
        self._asked += 1
        self._kit.asked.append((self._rollout, name, dict(arguments)))
        if arguments.get("a") == 666:
            raise ToolFailedError("it burns", "a fire", "water", "fire")
        outcome = "error" if arguments.get("a") == 404 else "ok"
        return ToolAnswer(f"{self._kit.word} {self._rollout} {self._asked} {arguments.get('z')}", outcome)

    def reward(self) -> float | None:
        if self._kit.word == "silent":
            return None
        return self._asked + 0.1

    def close(self) -> None:
        self._kit.closed += 1


class Kit:
    """`Toolkit` without a world."""

    def __init__(self, word: str = "said", names: tuple[str, ...] = ("ask", "tell"), broken: int = 0) -> None:
        self.word, self.names, self.broken = word, names, broken
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self.closed, self.ended = 0, False

    @property
    def specs(self) -> list[ToolSpec]:
        return [ToolSpec(name, f"{name} it", SCHEMA) for name in self.names]

    def open(self, task: Task, rollout: str, seed: int) -> Box:
        if self.broken:
            self.broken -= 1
            raise ToolFailedError("no room", "full", "wait", "full")
        return Box(self, rollout)

    def close(self) -> None:
        self.ended = True


def never() -> Kit:
    raise AssertionError("a replay starts nothing")


Told = list[Any]


def play(kit: RecordingToolkit, rollout: str, calls: list[CALL], seed: int = 1, task: Task = TASK) -> Told:
    """Everything that one rollout is told, failures included."""
    told: Told = []
    try:
        box = kit.open(task, rollout, seed)
    except ToolFailedError as error:
        return [str(error), error.reason]
    told.append(box.opening)
    try:
        for name, arguments in calls:
            answer = box.call(name, arguments, 5)
            told.append((answer.text, answer.outcome))
        told.append(box.reward())
    except ToolFailedError as error:
        told += [str(error), error.reason]
    finally:
        box.close()
    return told
