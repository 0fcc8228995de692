"""When engines get new weights, and what waiting for groups costs: as work, not as bookkeeping."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from surefoot import loop
from surefoot.config import Config
from surefoot.loop import Hooks, Run
from surefoot.protocols import EvalResult, LearnerFacts, StepBatch, StepReport
from surefoot.records import Group, Rollout, Task, Turn
from surefoot.runtime.task_queue import MemoryTaskQueue, StepSampler

TASK = Task(id="t", prompt="?")


class Runtime:
    """Says what it was asked; evaluates whatever was published last."""

    probe_baseline = None

    def __init__(self, diary: list[tuple[Any, ...]]) -> None:
        self.diary, self.version = diary, -1

    def publish(self, weights: Any, version: int) -> dict[str, float]:
        self.version = version
        self.diary.append(("publish", version))
        return {}

    def evaluate(self, tasks: Any, step: int) -> EvalResult:
        self.diary.append(("evaluate", step, self.version))
        return EvalResult(1, 0.5, 0.5, 0.1, 2.0, 0.0, 0, {})

    def close(self) -> None: ...


class Queue:
    """One task a step, its group at hand."""

    def next_batch(self, step: int, n: int) -> StepBatch:
        return StepBatch(step, (TASK,), (group(step),))

    def record_rollouts(self, batch: StepBatch) -> None: ...

    def close_batch(self, batch: StepBatch, step: int, drop_reasons: Sequence[str | None]) -> None: ...


def group(step: int) -> Group:
    name = f"train/{step}/0"
    turns = [Turn((4, 5), (7 + i, 2), (-1.0, -1.0), 0, finish_reason="stop") for i in range(2)]
    return Group(TASK, name, tuple(Rollout(TASK.id, name, i, (t,), reward=float(i)) for i, t in enumerate(turns)))


def trained(queue: Any = None, hooks: dict[str, Any] | None = None, **keys: Any) -> list[tuple[Any, ...]]:
    diary: list[tuple[Any, ...]] = []
    config = Config(**{"model": "m", "tasks": "t", "max_steps": 6, "tasks_per_step": 1, "num_generations": 2} | keys)
    learner: Any = SimpleNamespace(facts=LearnerFacts())
    learner.published = lambda: ({}, learner.facts.version)

    def learn(samples: Any, iteration: int = 0) -> StepReport:
        learner.facts = LearnerFacts(learner.facts.version + 1)
        return StepReport({"loss": 0.1}, learner.facts.version, True)

    learner.learn = learn
    nothing = {"step_refused": lambda *_: None, "save_rollouts": lambda *_: None, "evaluated": lambda *_: None}
    said = Hooks(
        log=lambda step, metrics: diary.append(("log", step, metrics)), warn=lambda *_: None, save=lambda step: None,
        **(nothing | (hooks or {})),
    )  # fmt: skip
    codec = SimpleNamespace(stop_ids=frozenset({2}), pad_token_id=0, vocab_size=50)
    run = Run(
        config=config, runtime=Runtime(diary), learner=learner, codec=codec, queue=queue or Queue(), heldout=[TASK],
        hooks=said,
    )  # fmt: skip
    loop.train(run)
    return diary


def of(diary: list[tuple[Any, ...]], kind: str) -> list[Any]:
    return [entry[1:] if len(entry) > 2 else entry[1] for entry in diary if entry[0] == kind]


@pytest.mark.config_key("weight_sync_steps")
@pytest.mark.parametrize(("every", "published"), [(1, [0, 1, 2, 3, 4, 5, 6]), (2, [0, 2, 4, 6]), (3, [0, 3, 6])])
def test_engines_get_weights_on_their_cadence(every: int, published: list[int]) -> None:
    assert of(trained(weight_sync_steps=every), "publish") == published


@pytest.mark.parametrize(("every", "steps"), [(4, 6), (5, 7), (4, 3)])
def test_no_evaluation_looks_at_weights_that_were_not_synced(every: int, steps: int) -> None:
    """The last step is judged although it is on nobody's cadence."""
    diary = trained(weight_sync_steps=every, max_steps=steps)
    assert of(diary, "evaluate") == [(0, 0), (steps, steps)]
    assert of(diary, "publish") == [0, *range(every, steps, every), steps]


def test_a_sync_happens_between_two_batches_never_between_two_passes() -> None:
    assert of(trained(weight_sync_steps=4, num_iterations=2, max_steps=8), "publish") == [0, 4, 8]


def test_whoever_asks_hears_of_every_version_after_it_was_proved() -> None:
    heard: list[int] = []
    diary = trained(hooks={"published": heard.append}, weight_sync_steps=2)
    assert heard == of(diary, "publish")


def test_what_others_say_of_a_batch_is_logged_with_its_step() -> None:
    ages = iter(range(9))
    logged = dict(of(trained(hooks={"extra_metrics": lambda: {"async/staleness_max": float(next(ages))}}), "log"))
    assert [logged[step]["async/staleness_max"] for step in range(1, 7)] == [0, 1, 2, 3, 4, 5]


def test_waiting_for_groups_is_collecting_and_reading_the_queue_is_keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that moves while tasks are drawn and while rollouts run: which of it is in which figure."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def takes(seconds: float, answer: Any) -> Any:
        now[0] += seconds
        return answer

    runtime: Any = SimpleNamespace(collect=lambda tasks, step, *_, **__: takes(4.0, [group(step)]))
    config = Config(model="m", tasks="t", tasks_per_step=1, num_generations=2)
    in_step = StepSampler(MemoryTaskQueue(lambda n: takes(8.0, [TASK])), runtime, config)
    ahead = Queue()
    ahead.next_batch = lambda step, n: takes(8.0, StepBatch(step, (TASK,), (group(step),)))  # type: ignore[method-assign]

    def timed(queue: Any) -> tuple[float, float]:
        metrics: Any = dict(of(trained(queue, max_steps=1), "log"))[1]
        return metrics["timing/keep"], metrics["timing/collect"]

    assert timed(ahead) == (0.0, 8.0)
    assert timed(in_step) == (8.0, 12.0)
