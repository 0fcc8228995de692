"""What the loop is handed, and what it remembers: `Run` and its `Hooks`.

Read next: `loop.py`, which goes through the steps.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from surefoot.config import Config
from surefoot.config.schedule import Answered, Cadence, answered_tasks, cadence_of
from surefoot.data.curriculum import SuccessCurriculum
from surefoot.errors import RewardError, StateError, SurefootError
from surefoot.guards.auto_settings import derived
from surefoot.guards.collapse import HeldOutGuard
from surefoot.guards.invariants import DiversityGuard
from surefoot.guards.noise import proportion_se
from surefoot.protocols import Codec, EvalResult, Runtime, TaskQueue
from surefoot.records import Group, Task, TrainSample
from surefoot.rewards.rules import EvalSet

if TYPE_CHECKING:
    from surefoot.learner.grpo import GRPOLearner
    from surefoot.learner.updates import ParameterUpdates


# -- What the loop passes on: to a person after step 1, to the guard at every evaluation ----------
# `step_one_warnings`  each with a remedy: most runs that learn nothing show it in their first step
# `ToolAlarms`         tools that nobody calls, or whose calls fail
# `GuardInputs`            what the steps between two evaluations showed, in the guard's own words


MANY_TRUNCATED = 0.5


def step_one_warnings(
    metrics: Mapping[str, float], census: ParameterUpdates | None, config: Config
) -> Iterator[tuple[str, str]]:
    """(what, remedy) pairs."""
    clipped = metrics.get("completions/clipped_ratio", 0.0)
    if clipped > MANY_TRUNCATED:
        yield (
            f"{clipped:.0%} of completions were cut at max_completion_length = {config.max_completion_length}",
            "raise max_completion_length, or make the prompt ask for a shorter answer",
        )
    if metrics.get("frac_reward_zero_std") == 1.0:
        yield (
            "in every group all rewards were equal, so this step had no gradient",
            "easier or harder tasks, more num_generations, or a finer reward",
        )
    if census is None or census.moved == 0:
        yield (
            "no parameter changed in step 1",
            f"check learning_rate (now {config.learning_rate:g}) and the rewards above",
        )
    elif census.still:
        yield (
            f"{len(census.still)} of {census.total} parameter tensors did not move, first {census.still[0]}",
            "expected for frozen parts only; otherwise they are cut off from the loss",
        )


def cannot_fill(groups: Sequence[Group], wanting: int, batches: int) -> RewardError:
    """Dynamic sampling gave up: what it drew, and what it found."""
    rewards = Counter(
        f"{group.rewards[0]:g}" for group in groups if len(set(group.rewards)) == 1 and None not in group.rewards
    )
    same = ", ".join(f"{count} with reward {reward} throughout" for reward, count in rewards.most_common(3))
    return RewardError(
        f"{len(groups)} groups in {batches} batches were drawn for one step, and {wanting} more with rewards that "
        f"differ are wanted: {same or 'the others failed'}",
        "a group of equal rewards has no gradient",
        "use tasks that are neither solved nor hopeless, raise num_generations or dynamic_sampling_batches",
    )


def no_metric(each: EvalSet) -> RewardError:
    """An evaluation set has a metric, and it judged none of its answers."""
    return RewardError(
        f"eval_sets.{each.name}: its metric gave no verdict on any of the answers to {len(each.tasks)} tasks",
        "a metric that fails, or abstains every time, measures nothing",
        f'mend it (logs/rewards.log has what it printed), or set eval_sets.{each.name}.metric = "none"',
    )


PATIENCE = 5
"""Steps before a person is told: with few calls, luck needs time."""
MANY_FAILED_CALLS = 0.5


@dataclass
class ToolAlarms:
    """Notices tools that are there and of no use; each is said once in a run, resumed or not.

    Failing calls are counted over the whole run, and beside it step by step, so that tools which break late in a long
    run are noticed too. A step without calls counts for neither.
    """

    idle: int = 0
    """Steps in a row in which no rollout called a tool."""
    failing: int = 0
    """Steps whose calls mostly failed, less those whose calls mostly did not; never below 0."""
    asked: int = 0
    """Steps of the run in which tools were called."""
    calls: int = 0
    failed: int = 0
    """Calls of the run, and those of them that were refused or answered with an error."""
    said: list[str] = field(default_factory=list)

    def step(self, metrics: Mapping[str, float], groups: Sequence[Group]) -> Iterator[tuple[str, str]]:
        """(what, remedy) pairs for this step; nothing for runs without tools."""
        if "tools/called_share" not in metrics:
            return
        self.idle = 0 if metrics["tools/called_share"] > 0 else self.idle + 1
        if self.idle >= PATIENCE and self._first("idle"):
            yield (
                f"no rollout has called a tool for {self.idle} steps",
                "show the tools in the prompt (tools.in_prompt, system_prompt) or in example tasks, or train without",
            )
        self._count(groups)
        many = self.asked >= PATIENCE and self.failed > MANY_FAILED_CALLS * self.calls
        if (many or self.failing >= PATIENCE) and self._first("failed"):
            yield (
                f"tool calls keep failing: {self.failed} of {self.calls} in this run were refused or answered with an "
                f"error ({self.failed / self.calls:.0%})" + ("" if many else ", in the last steps most of them"),
                "look at calls in RUN/rollouts: wrong names or arguments, or a tool that does not work",
            )

    def _count(self, groups: Sequence[Group]) -> None:
        outcomes = [call.outcome for g in groups for r in g.rollouts for turn in r.turns for call in turn.calls]
        if not outcomes:
            return
        failed = sum(outcome != "ok" for outcome in outcomes)
        self.asked, self.calls, self.failed = self.asked + 1, self.calls + len(outcomes), self.failed + failed
        mostly = failed > MANY_FAILED_CALLS * len(outcomes)
        self.failing = self.failing + 1 if mostly else max(0, self.failing - 1)

    def _first(self, what: str) -> bool:
        if what in self.said:
            return False
        self.said.append(what)
        return True


MetricsView = Mapping[str, float]
SEEN = {"kl": "kl", "entropy": "scored_entropy", "length": "completions/mean_length", "reward_std": "reward_std"}
"""What the guard calls it -> the metric of the newest step that it is; one that was not measured is left out."""


@dataclass
class GuardInputs:
    """Remembers the steps since the last evaluation, and turns an evaluation into what the guard folds.

    The reward of an evaluation is the mean training reward of the steps since the one before. The evaluation before
    the first step has none yet: it waits for step 1, whose rollouts the same weights wrote, and is folded with that.
    """

    rewards: list[float] = field(default_factory=list)
    first: MetricsView = field(default_factory=dict)
    """The first step of the run that had a reward."""
    last: MetricsView = field(default_factory=dict)
    waiting: MetricsView | None = None
    """The evaluation before the first step, until it is folded."""

    def step(self, metrics: MetricsView) -> None:
        """Take in one optimiser step."""
        self.last = metrics
        if "reward" in metrics:
            self.rewards.append(metrics["reward"])
            self.first = self.first or metrics

    def folds(self, step: int, evaluation: MetricsView, metric: str) -> list[tuple[int, dict[str, float]]]:
        """(step, arguments of `HeldOutGuard.update`) in order; none when no reward came since the last evaluation."""
        if step == 0:
            self.waiting = evaluation
        if not self.rewards:
            return []
        reward = sum(self.rewards) / len(self.rewards)
        told = [(step, _guard_arguments(evaluation, metric, reward, self.last))]
        if self.waiting is not None:
            told.insert(0, (0, _guard_arguments(self.waiting, metric, self.first["reward"], self.first)))
        self.rewards, self.waiting = [], None
        return told


def _guard_arguments(evaluation: MetricsView, metric: str, reward: float, seen: MetricsView) -> dict[str, float]:
    heldout = evaluation.get(metric)
    if heldout is None:
        raise RewardError(
            f"an evaluation has no {metric}",
            "the guard cannot watch what nobody measured",
            'mend eval_metric, or set guard.metric = "eval_reward" or guard.mode = "off"',
        )
    told = {"reward": reward, "heldout": heldout}
    if (error := _noise(evaluation, metric, heldout)) is not None:
        told["heldout_se"] = error
    return told | {name: seen[source] for name, source in SEEN.items() if source in seen}


def _noise(evaluation: MetricsView, metric: str, heldout: float) -> float | None:
    """Standard error of the held-out value; None when the guard has to find it from how the values scatter.

    One answer per task, right or wrong: a share. Otherwise it is what the evaluation itself measured: partial credit
    scatters less than a coin, and several answers to one task tell less than as many tasks.
    """
    if not metric.endswith("accuracy"):
        return None
    prefix = metric.removesuffix("accuracy")
    if f"{prefix}right" in evaluation and f"{prefix}pass@1" not in evaluation:
        return proportion_se(heldout, int(evaluation[f"{prefix}n"]))
    return evaluation.get(f"{metric}_stderr") or None


# -- What the loop is handed, and what it remembers: `Run` and its `Hooks` ------------------------


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
    queue: TaskQueue
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
    between: GuardInputs = field(default_factory=GuardInputs)
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


# -- How far a run has got, as plain data: what a checkpoint holds beside the learner's own state -
# Owns       the list of what the loop remembers from step to step.
# Promises   every field of `loop.Run` is either here or made anew from the config; a field in neither set is refused at
# the first save, so that no resume loses it in silence.
# Never      changes a run before everything in the data was found to fit.


PLAIN = (
    "step", "last_eval", "last_eval_step", "last_metrics", "checked", "refused_in_a_row", "census_logged", "lost",
    "landmarks", "at_start", "eval_seconds", "refused_steps", "scores_at_start", "scores", "differing",
)  # fmt: skip
CAPTURED = frozenset({*PLAIN, "diversity", "guard", "between", "best", "seconds_before", "successes", "tool_alarms"})
DERIVED = frozenset(
    {"config", "runtime", "learner", "codec", "queue", "heldout", "hooks", "heldout_metric", "began", "keep_seconds",
     "ends", "eval_sets", "datasets"}
)  # fmt: skip
KEYS = CAPTURED | {"journal"}


def run_state(run: Run, journal: str) -> dict[str, Any]:
    """Everything the loop needs to go on after this step.

    Args:
        journal: the id of the journal that this state belongs to.
    """
    if lost := {f.name for f in dataclasses.fields(run)} - CAPTURED - DERIVED:
        raise StateError(
            f"a run has {', '.join(sorted(lost))}, which no checkpoint holds", "a resumed run would go on without it",
            "add it to surefoot.loop_state: CAPTURED with its form, or DERIVED",
        )  # fmt: skip
    state = {name: getattr(run, name) for name in PLAIN}
    if run.successes is not None:
        state["successes"] = run.successes.state_dict()
    return state | {
        "diversity": run.diversity.state_dict(),
        "guard": None if run.guard is None else run.guard.state_dict(),
        "between": dataclasses.asdict(run.between),
        "tool_alarms": dataclasses.asdict(run.tool_alarms),
        "best": None if run.best is None else list(run.best),
        "seconds_before": run.seconds,
        "journal": journal,
    }


def restore_run(run: Run, state: Mapping[str, Any], journal: str) -> None:
    """Go on where `run_state` was taken; a state of another run, or of another form, is a `StateError`."""
    expected = KEYS if run.successes is not None else KEYS - {"successes"}
    if state.keys() != expected:
        raise _misfit(f"keys {sorted(state.keys() ^ expected)[:5]} are missing or unknown")
    if state["journal"] != journal:
        raise _misfit(f"it belongs to journal {state['journal']!r}, this run has {journal!r}")
    if (state["guard"] is None) != (run.guard is None):
        raise _misfit("it was saved with a guard, or without one, and this run is not")
    try:
        fresh, alarms = GuardInputs(**state["between"]), ToolAlarms(**state["tool_alarms"])
        best = None if state["best"] is None else (int(state["best"][0]), float(state["best"][1]))
        if run.guard is not None:
            run.guard.load_state_dict(state["guard"], adopt=derived(run.config))
        if run.successes is not None:
            run.successes.load_state_dict(state["successes"])
        run.diversity.load_state_dict(state["diversity"])
    except (TypeError, ValueError, KeyError, AttributeError, SurefootError) as error:
        raise _misfit(str(error)) from error
    for name in PLAIN:
        setattr(run, name, state[name])
    run.tool_alarms = alarms
    run.between, run.best, run.seconds_before = fresh, best, float(state["seconds_before"])


def _misfit(reason: str) -> StateError:
    return StateError(
        f"the saved state of the run does not fit: {reason}"[:600],
        "going on from it would not be the run that was saved",
        "resume the run folder as it was saved, or start a new run",
    )
