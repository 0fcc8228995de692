"""The loop: every planned step is executed, logged, judged and saved when it should be, and in that order."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from surefoot import loop
from surefoot.config import Config
from surefoot.errors import InvariantError, NumericsError, SurefootError
from surefoot.loop import Hooks, Run
from surefoot.protocols import EvalResult, LearnerFacts, ParameterUpdates, StepReport
from surefoot.records import LENGTH, STOP, Group, Rollout, Task, TrainSample, Turn
from surefoot.runtime.task_queue import MemoryTaskQueue, StepSampler
from surefoot.storage.files import commit_folder

TASKS = [Task(id=f"t{i}", prompt="?") for i in range(6)]
MOVED = ParameterUpdates(total=3, with_gradient=3, moved=3, still=())
CODEC = SimpleNamespace(stop_ids=frozenset({2}), pad_token_id=0, vocab_size=50)


class Diary(list[tuple[Any, ...]]):
    """What happened, in order."""

    def of(self, kind: str) -> list[Any]:
        return [entry[1] if len(entry) == 2 else entry[1:] for entry in self if entry[0] == kind]


class FakeRuntime:
    """Plays groups whose siblings differ; every rollout carries the version that was published last."""

    probe_baseline: list[list[float]] | None = None

    def __init__(self, diary: Diary, rewards: Callable[[int, int], float | None], finish: str) -> None:
        self.diary, self.rewards, self.finish, self.version = diary, rewards, finish, -1

    def collect(self, tasks: Sequence[Task], step: int, first: int = 0, **_: Any) -> list[Group]:
        self.diary.append(("collect", step))
        return [self._group(task, f"train/{step}/{i}", step) for i, task in enumerate(tasks)]

    def _group(self, task: Task, name: str, step: int) -> Group:
        rollouts = []
        for i in range(4):
            tokens = (10 + i, 10 + step % 30, 2) if self.finish == STOP else (10 + i, 10 + step % 30, 9)
            turn = Turn((4, 9, 5), tokens, (-1.0,) * 3, self.version, finish_reason=self.finish)
            reward = self.rewards(step, i)
            rollouts.append(
                Rollout(task.id, name, i, (turn,), reward=reward, failure="down" if reward is None else None)
            )
        return Group(task, name, tuple(rollouts))

    def publish(self, weights: Any, version: int) -> Mapping[str, float]:
        self.diary.append(("publish", version))
        self.version = version
        return {"timing/publish": 0.0}

    def evaluate(self, tasks: Sequence[Task], step: int) -> EvalResult:
        self.diary.append(("evaluate", step, self.version))
        return EvalResult(len(tasks), 0.5, 0.25, 0.1, 3.0, 0.0, 0, {})

    def close(self) -> None:
        self.diary.append(("close", 0))


class FakeLearner:
    """Applies every step but those in `refuse` (counted from 1)."""

    def __init__(self, diary: Diary, refuse: Sequence[int] = (), updates: ParameterUpdates | None = MOVED) -> None:
        self.diary, self.refuse, self.updates = diary, refuse, updates
        self.version, self.calls, self.checked_tokens, self.changed_entries = 0, 0, 0, 0
        self.seen: list[Sequence[TrainSample]] = []

    @property
    def facts(self) -> LearnerFacts:
        return LearnerFacts(self.version, self.updates, self.checked_tokens, changed_entries=self.changed_entries)

    def published(self) -> tuple[dict[str, Any], int]:
        return {}, self.version

    def learn(self, samples: Sequence[TrainSample], *, iteration: int = 0) -> StepReport:
        self.calls += 1
        self.diary.append(("learn", self.calls, iteration))
        self.seen.append(samples)
        applied = self.calls not in self.refuse
        self.version += applied
        self.changed_entries += 3 * applied
        return StepReport({"loss": 0.5, "grad_norm": 1.0} if applied else {"learning_rate": 0.1}, self.version, applied)


def make(
    *, refuse: Sequence[int] = (), updates: ParameterUpdates | None = MOVED, heldout: Sequence[Task] = TASKS[:2], finish: str = STOP,
    rewards: Callable[[int, int], float | None] = lambda step, i: float(i % 2), **keys: Any,
) -> tuple[Run, Diary]:  # fmt: skip
    settings: dict[str, Any] = {"model": "m", "tasks": "t", "max_steps": 6, "tasks_per_step": 2, "num_generations": 4}
    config = Config(**(settings | keys))
    assert list(config.problems()) == []
    diary = Diary()
    hooks = Hooks(
        log=lambda step, metrics: diary.append(("log", step, metrics)),
        evaluated=lambda step, metrics: diary.append(("evaluated", step, metrics)),
        warn=lambda what, remedy: diary.append(("warn", what, remedy)),
        save_rollouts=lambda step, groups: diary.append(("keep", step)),
        step_refused=lambda step, samples, suspects: diary.append(("refused", step)),
        save=lambda step: diary.append(("save", step)),
    )
    learner: Any = FakeLearner(diary, refuse, updates)
    runtime: Any = FakeRuntime(diary, rewards, finish)
    run = Run(
        config=config, runtime=runtime, learner=learner, codec=CODEC, heldout=heldout, hooks=hooks,
        queue=StepSampler(MemoryTaskQueue(lambda n: TASKS[:n]), runtime, config),
    )  # fmt: skip
    return run, diary


def played(**keys: Any) -> tuple[Run, Diary]:
    run, diary = make(**keys)
    loop.train(run)
    return run, diary


def logged(diary: Diary) -> dict[int, dict[str, float]]:
    return dict(diary.of("log"))


# -- every planned step ---------------------------------------------------------------------------


@pytest.mark.config_key("max_steps")
@pytest.mark.parametrize("steps", [1, 6])
def test_every_planned_step_is_executed_once(steps: int) -> None:
    run, diary = played(max_steps=steps)
    assert run.step == run.learner.facts.version == steps
    assert diary.of("collect") == list(range(1, steps + 1))
    assert [number for number, _ in diary.of("learn")] == list(range(1, steps + 1))


def test_one_step_is_collect_learn_publish_log_judge_save_in_that_order() -> None:
    _, diary = played(max_steps=1, eval_on_start=False, save_steps=1)
    assert [entry[0] for entry in diary] == [
        "publish",
        "collect",
        "learn",
        "publish",
        "keep",
        "log",
        "evaluate",
        "evaluated",
        "save",
    ]


def test_rollouts_come_from_the_version_that_is_trained_next() -> None:
    """The first publish makes the engine serve version 0; each later one follows its step."""
    run, diary = played(max_steps=3)
    assert diary.of("publish") == [0, 1, 2, 3]
    assert [{s.trainer_version for s in samples} for samples in run.learner.seen] == [{0}, {1}, {2}]  # type: ignore[attr-defined]


@pytest.mark.config_key("tasks_per_step", "num_generations")
def test_everything_that_was_checked_is_counted() -> None:
    run, _ = played(max_steps=3)
    assert run.checked == {"groups": 6, "samples": 24, "advantages": 6}


@pytest.mark.config_key("num_iterations")
def test_iterations_are_steps_on_the_same_samples_and_only_the_last_is_published() -> None:
    run, diary = played(max_steps=6, num_iterations=3, save_steps=2)
    assert run.step == 6
    assert diary.of("collect") == [1, 4]
    assert diary.of("learn") == [(1, 0), (2, 1), (3, 2), (4, 0), (5, 1), (6, 2)]
    assert run.learner.seen[0] is run.learner.seen[2]  # type: ignore[attr-defined]
    assert diary.of("publish") == [0, 3, 6]
    assert sorted(logged(diary)) == [1, 2, 3, 4, 5, 6]
    assert diary.of("save") == [2, 4, 6]


@pytest.mark.config_key("partial_groups")
def test_what_nobody_could_grade_reaches_no_learner() -> None:
    run, diary = played(max_steps=2, rewards=lambda step, i: None if step == 1 and i == 0 else float(i % 2))
    assert [len(samples) for samples in run.learner.seen] == [0, 8], "both groups of step 1 lost a sibling"  # type: ignore[attr-defined]
    assert logged(diary)[1]["failures/down"] == 2.0
    survivors, _ = played(max_steps=1, partial_groups="train", rewards=lambda step, i: None if i == 0 else float(i % 2))
    assert [len(samples) for samples in survivors.learner.seen] == [6]  # type: ignore[attr-defined]


# -- cadences -------------------------------------------------------------------------------------


@pytest.mark.config_key("logging_steps")
def test_metrics_are_written_on_their_cadence_at_the_first_and_at_the_last_step() -> None:
    _, diary = played(max_steps=7, logging_steps=3)
    assert sorted(logged(diary)) == [1, 3, 6, 7]
    assert diary.of("keep") == [1, 2, 3, 4, 5, 6, 7], "rollouts are kept at every step"


@pytest.mark.config_key("save_rollouts")
def test_rollouts_are_kept_unless_that_is_turned_off() -> None:
    assert played(save_rollouts=False)[1].of("keep") == []


@pytest.mark.config_key("eval_steps", "eval_on_start")
@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        ({"eval_steps": 2}, [0, 2, 4, 6]),
        ({"eval_steps": 4}, [0, 4, 6]),
        ({"eval_steps": 0}, [0, 6]),
        ({"eval_steps": 4, "eval_on_start": False}, [4, 6]),
        ({"eval_steps": 6, "num_iterations": 2}, [0, 6]),
        ({"eval_steps": 10}, [0, 6]),
    ],
    ids=str,
)
def test_held_out_tasks_are_answered_on_their_cadence_and_always_at_the_end(
    keys: dict[str, Any], steps: list[int]
) -> None:
    run, diary = played(**keys)
    assert [step for step, _ in diary.of("evaluate")] == steps
    assert [step for step, _ in diary.of("evaluated")] == steps
    assert all(version == step for step, version in diary.of("evaluate")), "answered with the weights of that step"
    assert run.last_eval["eval_accuracy"] == 0.25


def test_no_evaluation_that_was_asked_for_is_left_out_between_iterations() -> None:
    """Steps 3 and 9 fall between two passes over the same rollouts: evaluate there too, or refuse the pair."""
    keys: dict[str, Any] = {"max_steps": 10, "num_iterations": 2, "eval_steps": 3, "eval_on_start": False}
    if not list(Config(model="m", tasks="t", **keys).problems()):
        _, diary = played(**keys)
        assert len([step for step, _ in diary.of("evaluate") if step < 10]) == 3


def test_without_held_out_tasks_nobody_evaluates() -> None:
    run, diary = played(heldout=())
    assert diary.of("evaluate") == []
    assert run.last_eval == {}


@pytest.mark.config_key("save_steps")
@pytest.mark.parametrize(("every", "steps"), [(0, []), (2, [2, 4, 6]), (4, [4])])
def test_weights_are_saved_on_their_cadence(every: int, steps: list[int]) -> None:
    assert played(save_steps=every, save_best=False)[1].of("save") == steps


@pytest.mark.config_key("save_minutes")
def test_a_save_that_the_clock_asks_for_comes_between_two_steps() -> None:
    run, diary = make(save_best=False)
    run.hooks.save_is_due = lambda: run.step in (2, 5)
    loop.train(run)
    assert diary.of("save") == [2, 5]
    assert [kind for kind, *_ in diary if kind in ("learn", "save")].index("save") == 2, "after the second step"


def test_every_logged_step_has_its_version_times_and_rewards() -> None:
    _, diary = played(max_steps=2)
    for step, metrics in logged(diary).items():
        assert metrics["version"] == step
        assert metrics["reward"] == 0.5
        assert metrics["steps_refused"] == 0.0
        assert {"loss", "timing/collect", "timing/learn", "timing/publish", "step_time", "tokens_per_second"} <= set(
            metrics
        )
    assert ("census/moved" in logged(diary)[1], "census/moved" in logged(diary)[2]) == (True, False)


def test_a_steps_time_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that ticks once per look: the second pass over the same rollouts collected nothing."""
    now = iter(range(10_000))
    monkeypatch.setattr("surefoot.loop_state.time.perf_counter", lambda: float(next(now)))
    _, diary = played(max_steps=4, num_iterations=4, heldout=())
    times = [metrics["timing/learn"] for metrics in logged(diary).values()]
    assert len(set(times)) == 1, f"every pass cost the same, and was said to cost {times}"


# -- what is not finite ---------------------------------------------------------------------------


@pytest.mark.config_key("max_nonfinite_steps")
@pytest.mark.parametrize("limit", [1, 3])
def test_refused_steps_in_a_row_end_the_run_at_the_limit(limit: int) -> None:
    run, diary = make(refuse=range(2, 9), max_nonfinite_steps=limit)
    with pytest.raises(NumericsError, match=f"{limit} steps in a row"):
        loop.train(run)
    assert run.step == 1 + limit
    assert diary.of("refused") == list(range(2, 2 + limit)), "every refused batch was dumped, the last one too"


def test_refused_steps_that_are_not_in_a_row_are_counted_and_survived() -> None:
    run, diary = played(refuse=(1, 3, 5), max_nonfinite_steps=2)
    assert (run.step, run.learner.facts.version) == (6, 3)
    assert diary.of("refused") == [1, 3, 5]
    assert [m["steps_refused"] for m in logged(diary).values()] == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
    assert "loss" not in logged(diary)[1], "a loss that was not finite is left out, not 0"


# -- malformed groups -----------------------------------------------------------------------------


def test_a_malformed_group_stops_the_run_before_the_learner_sees_it() -> None:
    run, diary = make(finish=STOP)
    run.codec = SimpleNamespace(stop_ids=frozenset({3}), pad_token_id=0, vocab_size=50)
    with pytest.raises(InvariantError, match="says stop but ends on 2"):
        loop.train(run)
    assert diary.of("learn") == []


def test_a_sampler_that_repeats_itself_stops_the_run() -> None:
    run, diary = make()
    real = run.runtime.collect

    def copies(tasks: Sequence[Task], step: int, first: int = 0, **_: Any) -> list[Group]:
        return [
            Group(
                g.task, g.id, tuple(dataclasses.replace(g.rollouts[0], index=i, turns=(long_turn(),)) for i in range(4))
            )
            for g in real(tasks, step)
        ]

    run.runtime.collect = copies  # type: ignore[method-assign]
    with pytest.raises(InvariantError, match="4 of 4 siblings are identical"):
        loop.train(run)
    assert diary.of("learn") == []


def long_turn() -> Turn:
    return Turn((4, 9, 5), (9,) * 20, (-3.0,) * 20, 0, finish_reason=LENGTH)


# -- what a person hears after step 1 ---------------------------------------------------------------


def test_a_healthy_first_step_warns_of_nothing() -> None:
    assert played(max_steps=2)[1].of("warn") == []


def test_warnings_come_after_step_one_and_only_then() -> None:
    _, diary = played(max_steps=4, finish=LENGTH, rewards=lambda step, i: 1.0, updates=None, logging_steps=3)
    assert len(diary.of("warn")) == 3, "truncated, equal rewards, nothing moved"
    kinds = [entry[0] for entry in diary]
    assert kinds.index("log") < kinds.index("warn") < len(kinds) - 1 - kinds[::-1].index("learn")


# -- inside a run folder ----------------------------------------------------------------------------


class SilentView:
    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


def session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Run], None], *, words: Sequence[str] = (),
    heldout: Sequence[Task] = (), saving: Callable[[int], None] = lambda step: None,
) -> Path:  # fmt: skip
    """`surefoot train` up to the loop, with fakes for everything that is heavy; `saving` sees every save begin."""
    from surefoot.config.load import load_config
    from surefoot.run import session as module

    run, _ = make(max_steps=2)
    spoil(run)
    parts = SimpleNamespace(
        runtime=run.runtime,
        learner=run.learner,
        codec=run.codec,
        train=TASKS,
        heldout=heldout,
        ahead=None,
        eval_sets=(),
    )
    parts.policy = SimpleNamespace(model=None, tokenizer=None)
    monkeypatch.setattr(module, "_start", lambda around, **_: module._make_run(around, parts))
    monkeypatch.setattr(module, "RewardPool", lambda *args, **kwargs: SilentView())
    out = tmp_path / "run"

    def save(target: Path, *, step: int, extra: Any) -> None:
        saving(step)
        temporary = target.with_name(f".step_{step}.partial")
        temporary.mkdir()
        commit_folder(temporary, target, {"step": step})

    parts.learner.save = save
    sizes = ["tasks_per_step=2", "num_generations=4", "reward_workers=1", "probe_reward_tasks=0"]
    loaded = load_config(None, [f"output_dir={out}", *sizes, *(words or ["max_steps=2"])])
    with contextlib.suppress(SurefootError, OSError):
        module.train(loaded, view=SilentView())
    return out / "verdict.json"


def test_a_run_that_went_well_leaves_a_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = session(tmp_path, monkeypatch, lambda run: None)
    assert json.loads(path.read_text())["status"] == "PASS"


def test_an_invariant_broken_in_step_one_leaves_a_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 1 has begun: rollouts were drawn and refused. That must not vanish with the folder."""

    def spoil(run: Run) -> None:
        run.codec = SimpleNamespace(stop_ids=frozenset({3}), pad_token_id=0, vocab_size=50)

    path = session(tmp_path, monkeypatch, spoil)
    assert path.exists(), "the run folder was thrown away"
    assert json.loads(path.read_text())["status"] == "FAIL"


def test_a_run_that_a_full_disk_ended_leaves_a_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(run: Run) -> None:
        real = run.learner.learn

        def learn(samples: Any, *, iteration: int = 0) -> StepReport:
            if run.learner.facts.version == 1:
                raise OSError(28, "No space left on device")
            return real(samples, iteration=iteration)

        run.learner.learn = learn  # type: ignore[method-assign]

    path = session(tmp_path, monkeypatch, spoil)
    assert path.exists(), "the run ended without a verdict"
    assert json.loads(path.read_text())["status"] == "ERROR"


@pytest.mark.parametrize("midway", [True, False], ids=["inside a step", "between two steps"])
def test_only_whole_steps_are_saved_by_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, midway: bool) -> None:
    """An interrupt inside a step may find half the parameters updated; those must not look like a checkpoint."""

    def spoil(run: Run) -> None:
        def stop(*args: Any, **keys: Any) -> Any:
            raise loop.StopRequested("here")

        if midway:
            run.learner.learn = stop  # type: ignore[method-assign]
        else:
            run.runtime.collect = stop  # type: ignore[method-assign]

    path = session(tmp_path, monkeypatch, spoil)
    assert json.loads(path.read_text())["status"] == "INCOMPLETE"
    assert [p.name for p in (path.parent / "checkpoints").iterdir()] == ([] if midway else ["step_0"])


CURVES = ["max_steps=6", "eval_steps=1", "guard.min_evals=3", "guard.ema_alpha=0.5", "guard.margin_se=1"]


def heldout_curve(accuracy: Callable[[int], float]) -> Callable[[Run], None]:
    """Evaluations that say this, whatever the weights."""

    def spoil(run: Run) -> None:
        run.runtime.evaluate = lambda tasks, step: EvalResult(400, 0.5, accuracy(step), 0.1, 3.0, 0.0, 0, {})  # type: ignore[method-assign]
        run.runtime.rewards = lambda step, i: float(i % 2) + 0.1 * step  # type: ignore[attr-defined]

    return spoil


def test_the_former_best_goes_only_after_the_better_one_and_not_when_the_cadence_wants_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[int, list[str]] = {}

    def saving(step: int) -> None:
        seen[step] = sorted(p.name for p in (tmp_path / "run/checkpoints").iterdir())

    path = session(
        tmp_path, monkeypatch, heldout_curve(lambda step: 0.1 * step), words=[*CURVES, "save_steps=2"],
        heldout=TASKS[:2], saving=saving,
    )  # fmt: skip
    assert json.loads(path.read_text())["best"]["step"] == 6
    assert seen[4] == ["step_2", "step_3"], "the best so far is there while a better one is written"
    assert seen[5] == ["step_2", "step_3", "step_4"]
    assert seen[6] == ["step_2", "step_4", "step_5"], "two newer ones were good: the third went"
    left = sorted(p.name for p in (path.parent / "checkpoints").iterdir())
    assert left == ["step_2", "step_4", "step_5", "step_6"], "the cadence, the newest two, the best"


def test_a_collapse_whose_weights_could_not_be_saved_is_still_a_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saving(step: int) -> None:
        if step > 1:
            raise OSError(28, "No space left on device")

    path = session(
        tmp_path, monkeypatch, heldout_curve(lambda step: 0.9 - 0.2 * step), words=CURVES, heldout=TASKS[:2],
        saving=saving,
    )  # fmt: skip
    verdict = json.loads(path.read_text())
    assert verdict["status"] == "FAIL"
    assert verdict["guard"]["fired"] is True
    assert "No space left" in verdict["reasons"][0]
    assert verdict["reasons"][1] == verdict["guard"]["reason"]


# -- one account of steps -----------------------------------------------------------------------


def test_refused_steps_are_counted_over_the_whole_run() -> None:
    run, _ = played(refuse=(2, 4), max_steps=6)
    assert (run.step, run.learner.facts.version, run.refused_steps) == (6, 4, 2)


@pytest.mark.parametrize("extra", [1, -1], ids=["applied twice", "not applied"])
def test_planted_version_that_leaves_the_step_is_refused(extra: int) -> None:
    run, _ = make()
    real = run.learner.learn

    def learn(samples: Sequence[TrainSample], *, iteration: int = 0) -> StepReport:
        report = real(samples, iteration=iteration)
        if run.step == 2:
            run.learner.version += extra  # type: ignore[attr-defined]
        return report

    run.learner.learn = learn  # type: ignore[method-assign]
    with pytest.raises(InvariantError, match=f"after step 3 the learner has version {3 + extra}, and 0 steps were"):
        loop.train(run)
