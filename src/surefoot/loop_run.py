"""What the loop is handed, and what it remembers: `Run` and its `Hooks`.

Read next: `loop.py`, which goes through the steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from surefoot.config import Config
from surefoot.data.success_curriculum import SuccessCurriculum
from surefoot.guards.collapse import HeldOutGuard
from surefoot.guards.diversity import DiversityGuard
from surefoot.loop_notes import Between, ToolAlarms
from surefoot.protocols import Books, Codec, Runtime
from surefoot.records import Group, Task, TrainSample

if TYPE_CHECKING:
    from surefoot.policy.learner import GRPOLearner

Metrics = dict[str, float]


def _no_phase(name: str) -> AbstractContextManager[object]:
    return nullcontext()


@dataclass
class Hooks:
    """Where the loop's facts go: files, screens, tests."""

    log: Callable[[int, Metrics], None]
    evaluated: Callable[[int, Metrics], None]
    warn: Callable[[str, str], None]
    keep_groups: Callable[[int, Sequence[Group]], None]
    refused: Callable[[int, Sequence[TrainSample], Sequence[str]], None]
    """A step that was not applied: its samples, and which of them are to blame."""
    save: Callable[[int], None]
    """Everything that is needed to go on after this step, durably; between two steps, and the first call counts."""
    due: Callable[[], bool] = lambda: False
    """Whether the clock asks for a save."""
    stop: Callable[[], bool] = lambda: False
    phase: Callable[[str], AbstractContextManager[object]] = _no_phase
    """Entered for every piece of a step, by name: collect, learn, publish, evaluate, save."""
    published: Callable[[int], None] = lambda version: None
    """Engines serve this version from now on, with proof."""
    finished: Callable[[int], None] = lambda step: None
    """Nothing more belongs to this step: it was logged, looked at and saved."""
    gauges: Callable[[], Metrics] = dict
    """What others have to say of the step's batch, such as how old it is; asked once per step, before it is logged."""


@dataclass
class Run:
    """Everything one training run is made of, and how far it got."""

    config: Config
    runtime: Runtime
    learner: GRPOLearner
    codec: Codec
    books: Books
    heldout: Sequence[Task]
    hooks: Hooks
    diversity: DiversityGuard = field(default_factory=DiversityGuard)
    step: int = 0
    last_eval: Metrics = field(default_factory=dict)
    last_eval_step: int = -1
    last_metrics: Metrics = field(default_factory=dict)
    checked: dict[str, int] = field(default_factory=lambda: {"groups": 0, "samples": 0, "advantages": 0})
    refused_in_a_row: int = 0
    census_logged: bool = False
    landmarks: list[list[float]] | None = None
    """What the learner thought of the canary's fixed tokens when the engines were last given weights."""
    lost: Metrics = field(default_factory=dict)
    """Rollouts of this step that cannot be trained on, by reason."""
    guard: HeldOutGuard | None = None
    heldout_metric: str = "eval_accuracy"
    """What the guard watches, and by which the best weights are chosen."""
    between: Between = field(default_factory=Between)
    tool_alarms: ToolAlarms = field(default_factory=ToolAlarms)
    successes: SuccessCurriculum | None = None
    """How often each task was solved, where that decides which one comes next."""
    best: tuple[int, float] | None = None
    """Step and held-out number of the best evaluation after step 0."""
    at_start: float | None = None
    """The same number before the first step; None when nobody looked."""
    began: float | None = None
    """When this life of the run began, on the performance counter."""
    seconds_before: float = 0.0
    """What earlier lives of a resumed run took, up to the step it goes on from."""
    eval_seconds: float = 0.0
    keep_seconds: float = 0.0
    """Spent on journal, ledger and checkpoints since the last line of metrics."""

    @property
    def seconds(self) -> float:
        """How long this run has taken."""
        return self.seconds_before + (0.0 if self.began is None else time.perf_counter() - self.began)
