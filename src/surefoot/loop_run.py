"""What the loop is handed, and what it remembers: `Run` and its `Hooks`.

Read next: `loop.py`, which goes through the steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from surefoot.config import Config
from surefoot.data.success_curriculum import SuccessCurriculum
from surefoot.envs.judges import EvalSet
from surefoot.eval_cadence import Answered, Cadence, answered_tasks, cadence_of
from surefoot.guards.collapse import HeldOutGuard
from surefoot.guards.diversity import DiversityGuard
from surefoot.loop_notes import Between, ToolAlarms
from surefoot.protocols import Books, Codec, EvalResult, Runtime
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
    keep_answers: Callable[[int, Mapping[str, EvalResult]], None] = lambda step, results: None
    """Every answer of an evaluation, by the name of its set."""
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
    refused_steps: int = 0
    """Steps of the whole run that a number which is not finite kept from the weights."""
    census_logged: bool = False
    landmarks: list[list[float]] | None = None
    """What the learner thought of the canary's fixed tokens when the engines were last given weights."""
    lost: Metrics = field(default_factory=dict)
    """Rollouts of this step that cannot be trained on, by reason."""
    guard: HeldOutGuard | None = None
    eval_sets: Sequence[EvalSet] = ()
    """Evaluation sets of the user's own, beside or instead of `heldout`."""
    heldout_metric: str = "eval_accuracy"
    """What the guard watches, and by which the best weights are chosen."""
    between: Between = field(default_factory=Between)
    tool_alarms: ToolAlarms = field(default_factory=ToolAlarms)
    successes: SuccessCurriculum | None = None
    """How often each task was solved, where that decides which one comes next."""
    best: tuple[int, float] | None = None
    """Step and held-out number of the best evaluation that was better than the one before training."""
    at_start: float | None = None
    """The same number before the first step; None when nobody looked."""
    scores_at_start: list[float | None] = field(default_factory=list)
    """The same number of each held-out task before the first step, in their order; empty when nobody looked."""
    scores: list[float | None] = field(default_factory=list)
    """That of each held-out task in the newest evaluation."""
    differing: int = 0
    """Groups so far whose rewards were not all equal."""
    datasets: Mapping[str, str] = field(default_factory=dict)
    """Data set -> its word in metrics; empty when all tasks belong to one."""
    ends: frozenset[int] = frozenset()
    """Steps that were the last one before the run was made longer: logged and looked at as such."""
    began: float | None = None
    """When this life of the run began, on the performance counter; left out, with its first step."""
    seconds_before: float = 0.0
    """What earlier lives of a resumed run took, up to the step it goes on from."""
    eval_seconds: float = 0.0
    keep_seconds: float = 0.0
    """Spent on journal, ledger and checkpoints since the last line of metrics."""

    @property
    def cadence(self) -> Cadence:
        """When held-out tasks are answered; from the config and their number, so that a resume has the same."""
        return cadence_of(self.config, self.answered)

    @property
    def answered(self) -> Answered:
        """Tasks of one evaluation."""
        return answered_tasks(
            self.heldout_metric, len(self.heldout), {each.name: len(each.tasks) for each in self.eval_sets}
        )

    @property
    def seconds(self) -> float:
        """The wall time of this run, start-up included: what screen, verdict, report and status show."""
        return self.seconds_before + (0.0 if self.began is None else time.perf_counter() - self.began)
