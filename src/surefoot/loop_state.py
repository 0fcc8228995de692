"""What the loop is handed, and what it remembers: `Run`, its `Hooks` and its `StepClock`.

Read next: `loop.py`, which goes through the steps.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from surefoot.config import Config
from surefoot.config.schedule import Answered, Cadence, answered_tasks, cadence_of
from surefoot.data.curriculum import SuccessCurriculum
from surefoot.errors import RewardError, StateError, SurefootError
from surefoot.guards import invariants
from surefoot.guards.auto_settings import derived
from surefoot.guards.collapse import HeldOutGuard
from surefoot.guards.invariants import DiversityGuard
from surefoot.guards.noise import proportion_se
from surefoot.protocols import Codec, EvalResult, Learner, ParameterUpdates, Runtime, StepReport, TaskQueue
from surefoot.records import Group, Task, TrainSample
from surefoot.rewards.grading import EvalSet

# -- What is derived from the steps: warnings for a person, arguments for the guard ----------------
# `step_one_warnings`  each with a remedy: most runs that learn nothing show it in their first step
# `ToolAlarms`         tools that are never called, or whose calls fail
# `GuardInputs`        the steps between two evaluations, as arguments of `HeldOutGuard.update`


MANY_TRUNCATED = 0.5


def step_one_warnings(
    metrics: Mapping[str, float], updates: ParameterUpdates | None, config: Config
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
    if updates is None or updates.moved == 0:
        yield (
            "no parameter changed in step 1",
            f"check learning_rate (now {config.learning_rate:g}) and the rewards above",
        )
    elif updates.still:
        yield (
            f"{len(updates.still)} of {updates.total} parameter tensors did not move, first {updates.still[0]}",
            "expected for frozen parts only; otherwise they are cut off from the loss",
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
    """Averages the training reward between two evaluations and builds the arguments of `HeldOutGuard.update`.

    The reward of an evaluation is the mean training reward of the steps since the one before. The evaluation before
    the first step has none yet: it waits for step 1, whose rollouts the same weights sampled, and is paired with that.
    """

    rewards: list[float] = field(default_factory=list)
    first: MetricsView = field(default_factory=dict)
    """The first step of the run that had a reward."""
    last: MetricsView = field(default_factory=dict)
    waiting: MetricsView | None = None
    """The evaluation before the first step, until the guard is told of it."""

    def step(self, metrics: MetricsView) -> None:
        """Take in one optimiser step."""
        self.last = metrics
        if "reward" in metrics:
            self.rewards.append(metrics["reward"])
            self.first = self.first or metrics

    def for_evaluation(self, step: int, evaluation: MetricsView, metric: str) -> list[tuple[int, dict[str, float]]]:
        """(step, arguments of `HeldOutGuard.update`) in order; none when no reward came since the last evaluation."""
        if step == 0:
            self.waiting = evaluation
        if not self.rewards:
            return []
        reward = sum(self.rewards) / len(self.rewards)
        updates = [(step, _guard_arguments(evaluation, metric, reward, self.last))]
        if self.waiting is not None:
            updates.insert(0, (0, _guard_arguments(self.waiting, metric, self.first["reward"], self.first)))
        self.rewards, self.waiting = [], None
        return updates


def _guard_arguments(evaluation: MetricsView, metric: str, reward: float, seen: MetricsView) -> dict[str, float]:
    heldout = evaluation.get(metric)
    if heldout is None:
        raise RewardError(
            f"an evaluation has no {metric}",
            "the guard cannot watch what nobody measured",
            'mend eval_metric, or set guard.metric = "eval_reward" or guard.mode = "off"',
        )
    arguments = {"reward": reward, "heldout": heldout}
    if (error := _noise(evaluation, metric, heldout)) is not None:
        arguments["heldout_se"] = error
    return arguments | {name: seen[source] for name, source in SEEN.items() if source in seen}


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


# -- What the loop is handed, and what it remembers ------------------------------------------------


Metrics = dict[str, float]


def _no_phase(name: str) -> AbstractContextManager[object]:
    return nullcontext()


@dataclass
class Hooks:
    """What the loop calls when something happened: files, screens, tests."""

    log: Callable[[int, Metrics], None]
    evaluated: Callable[[int, Metrics], None]
    warn: Callable[[str, str], None]
    save_rollouts: Callable[[int, Sequence[Group]], None]
    """The groups of a step, with everything that was sampled."""
    step_refused: Callable[[int, Sequence[TrainSample], Sequence[str]], None]
    """A step that was not applied: its samples, and which of them are to blame."""
    save: Callable[[int], None]
    """Everything that is needed to go on after this step, durably; between two steps, and the first call counts."""
    save_is_due: Callable[[], bool] = lambda: False
    """Whether the clock asks for a save."""
    stop: Callable[[], bool] = lambda: False
    phase: Callable[[str], AbstractContextManager[object]] = _no_phase
    """Entered for every part of a step, by name: collect, learn, publish, evaluate, save."""
    published: Callable[[int], None] = lambda version: None
    """Engines serve this version from now on, with proof."""
    step_finished: Callable[[int], None] = lambda step: None
    """Nothing more belongs to this step: it was logged, evaluated and saved."""
    save_answers: Callable[[int, Mapping[str, EvalResult]], None] = lambda step, results: None
    """Every answer of an evaluation, by the name of its set."""
    extra_metrics: Callable[[], Metrics] = dict
    """Further metrics of the step, such as how old its batch is; called once per step, before it is logged."""


@dataclass
class StepClock:
    """Where the wall time goes: that of one step, for its line of metrics, and that of the whole run."""

    began: float | None = None
    """When this process began with the run, on the performance counter; left out, with its first step."""
    seconds_before: float = 0.0
    """Wall time of a resumed run up to the step it goes on from."""
    eval_seconds: float = 0.0
    """Spent on evaluations, by the whole run."""
    _started: float = 0.0
    _spent: dict[str, float] = field(default_factory=dict)
    """Seconds since the last line of metrics, by name: `collect`, `learn`, and `keep` for journal, ledger, saving."""

    @property
    def seconds(self) -> float:
        """The wall time of this run, start-up included: what screen, verdict, report and status show."""
        return self.seconds_before + (0.0 if self.began is None else time.perf_counter() - self.began)

    def start_run(self) -> None:
        """From here on the run's time is counted, unless it is already."""
        self.began = self.began or time.perf_counter()

    def start_step(self) -> None:
        """From here on it is another step's time."""
        self._started = time.perf_counter()

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Count what the block takes, however it ends."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - started)

    def add(self, name: str, seconds: float) -> None:
        """Count seconds that were measured elsewhere."""
        self._spent[name] = self._spent.get(name, 0.0) + seconds

    def line(self, tokens: float) -> Metrics:
        """The times of this step, which sampled so many tokens; counting begins anew."""
        seconds, spent = time.perf_counter() - self._started, self._spent
        self._spent = {}
        times = {f"timing/{name}": spent.get(name, 0.0) for name in ("collect", "learn", "keep")}
        return times | {"step_time": seconds, "tokens_per_second": tokens / max(seconds, 1e-9)}


@dataclass
class Run:
    """Everything one training run is made of, and how far it got."""

    config: Config
    runtime: Runtime
    learner: Learner
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
    updates_logged: bool = False
    """Whether the metrics have said how many parameter tensors changed."""
    lost: Metrics = field(default_factory=dict)
    """Rollouts of this step that cannot be trained on, by reason."""
    guard: HeldOutGuard | None = None
    eval_sets: Sequence[EvalSet] = ()
    """Evaluation sets of the user's own, beside or instead of `heldout`."""
    heldout_metric: str = "eval_accuracy"
    """What the guard watches, and by which the best weights are chosen."""
    guard_inputs: GuardInputs = field(default_factory=GuardInputs)
    tool_alarms: ToolAlarms = field(default_factory=ToolAlarms)
    successes: SuccessCurriculum | None = None
    """How often each task was solved, where that decides which one comes next."""
    best: tuple[int, float] | None = None
    """Step and held-out number of the best evaluation that was better than the one before training."""
    at_start: float | None = None
    """The same number before the first step; None when it was not measured."""
    scores_at_start: list[float | None] = field(default_factory=list)
    """The same number of each held-out task before the first step, in their order; empty when not measured."""
    scores: list[float | None] = field(default_factory=list)
    """That of each held-out task in the newest evaluation."""
    differing: int = 0
    """Groups so far whose rewards were not all equal."""
    datasets: Mapping[str, str] = field(default_factory=dict)
    """Data set -> its word in metrics; empty when all tasks belong to one."""
    ends: frozenset[int] = frozenset()
    """Steps that were the last one before the run was made longer: logged and evaluated as such."""
    clock: StepClock = field(default_factory=StepClock)

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
    def informative_groups(self) -> int | None:
        """With dynamic sampling, how many groups with rewards that differ a step trains on; None without."""
        return self.config.tasks_per_step if self.config.dynamic_sampling_batches else None

    @property
    def evaluation_due(self) -> bool:
        """Whether the weights after this step are to be evaluated, and were not; only after a batch's last pass."""
        if self.last_eval_step == self.step or self.step % self.config.num_iterations:
            return False
        return self.step in self.ends or self.cadence.due(self.step)

    @property
    def sync_due(self) -> bool:
        """Whether the engines get the weights after this step: on the cadence, and before every evaluation."""
        return self.step % self.config.weight_sync_steps == 0 or self.evaluation_due

    def check_groups(self, groups: Sequence[Group]) -> None:
        """Refuse malformed groups and a sampler that repeats itself; count what was checked."""
        vocab_size, stop_ids = self.codec.vocab_size, self.codec.stop_ids
        self.checked["groups"] += invariants.check_groups(groups, vocab_size=vocab_size, stop_ids=stop_ids)
        self.diversity.check(groups)

    def check_samples(self, samples: Sequence[TrainSample], groups: Sequence[Group]) -> None:
        """Refuse samples that are not those of the groups, or advantages that do not add up; count what was checked."""
        self.checked["samples"] += invariants.check_samples(samples, groups)
        self.checked["advantages"] += invariants.check_advantages(samples)

    def count_step(self, *, applied: bool) -> None:
        """One more optimiser step was executed; versions, steps and refusals have to add up."""
        self.step += 1
        self.refused_in_a_row = 0 if applied else self.refused_in_a_row + 1
        self.refused_steps += not applied
        invariants.check_steps(self.step, self.learner.facts.version, self.refused_steps)


def step_metrics(run: Run, report: StepReport) -> Metrics:
    """What the learner says of its step; how many parameter tensors changed, until some have."""
    metrics = dict(report.metrics) | {"version": float(report.version), "steps_refused": float(not report.applied)}
    metrics |= {"memory/peak": float(report.memory_peak)} if report.memory_peak else {}
    for name, word in run.datasets.items():
        metrics[f"datasets/{word}/trained_rows"] = float(report.trained_rows.get(name, 0))
    updates = run.learner.facts.parameter_updates
    if updates is not None and not run.updates_logged:
        metrics |= updates.metrics()
        run.updates_logged = updates.moved > 0
    return metrics


def warnings_of(run: Run, metrics: Metrics, groups: Sequence[Group]) -> Iterator[tuple[str, str]]:
    """(what, remedy) pairs of the step that was just logged."""
    if run.step == 1:
        yield from step_one_warnings(metrics, run.learner.facts.parameter_updates, run.config)
    is_last_pass = run.step % run.config.num_iterations == 0  # the calls of a batch count once
    yield from run.tool_alarms.step(metrics, groups if is_last_pass else ())


def logging_due(config: Config, step: int, ends: Collection[int] = ()) -> bool:
    """Whether this step's numbers are written: on the cadence, and the first and the last always."""
    return step % config.logging_steps == 0 or step in (1, config.max_steps) or step in ends


# -- How far a run has got, as plain data: what a checkpoint holds beside the learner's own state -
# Owns       the list of what the loop remembers from step to step.
# Promises   every field of `loop.Run` is either here or made anew from the config; a field in neither set is refused at
# the first save, so that no resume loses it in silence.
# Never      changes a run before everything in the data was found to fit.


PLAIN = {
    name: name
    for name in (
        "step last_eval last_eval_step last_metrics checked refused_in_a_row lost at_start refused_steps "
        "scores_at_start scores differing"
    ).split()
} | {"updates_logged": "census_logged"}
"""Field of a run -> its key in a checkpoint, where the value is kept as it is."""
CAPTURED = frozenset({*PLAIN, "diversity", "guard", "guard_inputs", "best", "clock", "successes", "tool_alarms"})
DERIVED = frozenset(
    "config runtime learner codec queue heldout hooks heldout_metric ends eval_sets datasets".split()
)  # of the runtime, the probe baseline is captured
KEYS = frozenset(PLAIN.values()) | frozenset(
    "diversity guard between best seconds_before eval_seconds landmarks successes tool_alarms journal".split()
)


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
    state = {key: getattr(run, name) for name, key in PLAIN.items()}
    if run.successes is not None:
        state["successes"] = run.successes.state_dict()
    return state | {
        "diversity": run.diversity.state_dict(),
        "guard": None if run.guard is None else run.guard.state_dict(),
        "between": dataclasses.asdict(run.guard_inputs),
        "tool_alarms": dataclasses.asdict(run.tool_alarms),
        "best": None if run.best is None else list(run.best),
        "seconds_before": run.clock.seconds,
        "eval_seconds": run.clock.eval_seconds,
        "landmarks": run.runtime.probe_baseline,
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
        inputs, alarms = GuardInputs(**state["between"]), ToolAlarms(**state["tool_alarms"])
        before = float(state["seconds_before"])
        best = None if state["best"] is None else (int(state["best"][0]), float(state["best"][1]))
        if run.guard is not None:
            run.guard.load_state_dict(state["guard"], adopt=derived(run.config))
        if run.successes is not None:
            run.successes.load_state_dict(state["successes"])
        run.diversity.load_state_dict(state["diversity"])
    except (TypeError, ValueError, KeyError, AttributeError, SurefootError) as error:
        raise _misfit(str(error)) from error
    for name, key in PLAIN.items():
        setattr(run, name, state[key])
    run.tool_alarms, run.guard_inputs, run.best = alarms, inputs, best
    run.clock.seconds_before, run.clock.eval_seconds = before, state["eval_seconds"]
    if run.step % run.config.num_iterations:  # between two passes: a run that never stopped would not publish here
        run.runtime.probe_baseline = state["landmarks"]


def _misfit(reason: str) -> StateError:
    return StateError(
        f"the saved state of the run does not fit: {reason}"[:600],
        "going on from it would not be the run that was saved",
        "resume the run folder as it was saved, or start a new run",
    )
