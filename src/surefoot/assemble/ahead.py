"""Sampling while the learner learns: who plays, on which event loop, and the books for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from surefoot.assemble.engines import engine_rows
from surefoot.config import Config
from surefoot.protocols import Engine, ServingEngine
from surefoot.records import Task
from surefoot.runtime.crew import Crew
from surefoot.runtime.fleet_thread import FleetThread
from surefoot.runtime.judging import JudgingRuntime
from surefoot.runtime.local_crew import LocalCrew
from surefoot.runtime.orders import Order
from surefoot.runtime.rollout import RolloutCollector
from surefoot.runtime.stream import Stream
from surefoot.runtime.stream_books import StreamBooks

if TYPE_CHECKING:
    from surefoot.assemble.build import Parts
    from surefoot.assemble.surroundings import Surroundings


@dataclass(frozen=True)
class Ahead:
    """A crew and the thread that it lives in."""

    crew: Crew
    thread: FleetThread


def play_ahead_here(config: Config, engine: Engine, collector: RolloutCollector) -> Ahead:
    """A crew in this process."""
    assert hasattr(engine, "submit"), "make_engine gives one that many may ask"
    capacity = max(2, 2 * engine_rows(config) // config.num_generations)
    crew = LocalCrew(cast(ServingEngine, engine), collector, capacity=capacity)
    return Ahead(crew, FleetThread("surefoot-stream"))


def make_stream_books(around: Surroundings, parts: Parts, ahead: Ahead) -> StreamBooks:
    """Books that have groups played ahead of the learner."""
    config, keeper, runtime = around.config, around.keeper, parts.runtime
    assert isinstance(runtime, JudgingRuntime), "both runtimes judge"

    def order(task: Task, visit: int, position: int) -> Order:
        return Order(task, parts.prompts[task.id], runtime.train, "train", visit, position)

    stream = Stream(
        keeper.ledger, keeper.batches, parts.train, ahead.crew, order, config=config,
        trained=lambda: parts.learner.version, judge=runtime.check_failures, border=around.inputs.border,
    )  # fmt: skip
    return StreamBooks(stream, ahead.thread, stop=lambda: around.stop.asked)
