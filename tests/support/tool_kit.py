"""Rollouts with tools and without a model: pebble's real tokenizer and template, an engine that says what it is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import surefoot
from surefoot.engines.scripted import ScriptedEngine
from surefoot.learner.chat import ChatCodec
from surefoot.protocols import Grade, Request, ToolAnswer, ToolSpec
from surefoot.records import Rollout, Task
from surefoot.runtime.requests import RolloutResult, Sampling
from surefoot.runtime.rollout import RolloutCollector
from surefoot.tools.session import ToolEnvironment, ToolLimits

PEBBLE = Path(surefoot.__file__).parent / "assets" / "pebble"
TASK = Task(id="t", prompt="6*7=", columns={"answer": "42"})
SAMPLING = Sampling(num_generations=2, temperature=1.0, max_completion_length=200, max_width=4000)


def call(name: str = "tool", **arguments: Any) -> str:
    import json

    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(PEBBLE)


def codec(max_reply_tokens: int = 64) -> ChatCodec:
    known = tokenizer()
    return ChatCodec(known, frozenset({known.eos_token_id}), len(known), max_reply_tokens=max_reply_tokens)


class Box:
    """A toolbox that answers with a function and remembers."""

    def __init__(self, answer: Callable[..., Any], opening: str | None = None, own: float | None = None) -> None:
        self._answer, self.opening, self.own = answer, opening, own
        self.asked: list[tuple[str, Mapping[str, Any]]] = []
        self.closed = 0

    def call(self, name: str, arguments: Mapping[str, Any], deadline_s: float) -> ToolAnswer:
        self.asked.append((name, arguments))
        said = self._answer(name, arguments)
        return said if isinstance(said, ToolAnswer) else ToolAnswer(str(said))

    def reward(self) -> float | None:
        return self.own

    def close(self) -> None:
        self.closed += 1


class Kit:
    """A toolkit of such boxes, one per rollout."""

    specs = (ToolSpec("tool", "a tool", {"type": "object"}),)
    routes: Mapping[str, Sequence[str]] = {}

    def __init__(self, make: Callable[[str], Box]) -> None:
        self.make, self.boxes, self.closed = make, {}, 0  # type: ignore[var-annotated]
        self.seeds: dict[str, int] = {}

    def open(self, task: Task, rollout: str, seed: int) -> Box:
        self.seeds[rollout] = seed
        box = self.make(rollout)
        self.boxes[rollout] = box
        return box

    def close(self) -> None:
        self.closed += 1


class Graders:
    """Grades by a rule; stands for reward functions."""

    weights = {"rule": 1.0}

    def __init__(self, rule: Callable[[Rollout], float | None] = lambda rollout: 1.0) -> None:
        self.rule = rule

    def grade(self, tasks: Sequence[Task], rollouts: Sequence[Rollout]) -> list[Grade]:
        return [
            Grade(None, {}, r.failure) if r.failure else Grade(self.rule(r), {"rule": self.rule(r)}) for r in rollouts
        ]

    def explain_failures(self) -> str:
        return ""

    def close(self) -> None:
        pass


def speaker(says: Callable[[Request, str], str]) -> ScriptedEngine:
    """An engine that says what `says(request, context as text)` returns, with the end token behind it."""
    known = tokenizer()

    def script(request: Request) -> list[int]:
        text = says(request, known.decode(list(request.prompt_ids)))
        return [*known(text, add_special_tokens=False).input_ids, known.eos_token_id][: request.max_new_tokens]

    return ScriptedEngine(script)


def collector_of(engine: Any, environment: ToolEnvironment, made: ChatCodec, tasks: Sequence[Task]) -> RolloutCollector:
    """Runs rollouts of these tasks with the environment's tools."""
    prompts = {task.id: made.encode_prompt(task.messages()) for task in tasks}
    return RolloutCollector(
        engine,
        environment,
        made,
        prompts,
        seed=0,
        token_count=made.token_count,
        tools=environment,
        tool_threads=4,
    )


def play(
    says: Callable[[Request, str], str], kit: Kit, *, limits: ToolLimits | None = None, graders: Graders | None = None,
    sampling: Sampling = SAMPLING, reply_tokens: int = 64, engine: Any = None, tasks: Sequence[Task] = (TASK,),
    clock: Callable[[], float] = lambda: 0.0,
) -> list[RolloutResult]:  # fmt: skip
    made = codec(reply_tokens)
    environment = ToolEnvironment(graders or Graders(), kit, limits or ToolLimits(max_turns=4), clock)  # type: ignore[arg-type]
    collector = collector_of(engine or speaker(says), environment, made, tasks)
    return collector.run_rollouts(list(tasks), sampling, purpose="train", step=1)
