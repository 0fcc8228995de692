"""The guard inside the loop: told once per evaluation, of what was measured and nothing else, and obeyed at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from surefoot import evaluation, loop
from surefoot.config import Config
from surefoot.config.schedule import Answered
from surefoot.errors import CollapseStopError, RewardError, StateError
from surefoot.guards.arming import guard_lines
from surefoot.guards.collapse import HeldOutGuard
from surefoot.guards.noise import proportion_se
from surefoot.guards.verdict import LearningEvidence, best_facts, judge_run, way_out
from surefoot.loop import Hooks, Run
from surefoot.loop_state import GuardInputs
from surefoot.protocols import EvalResult, LearnerFacts, ParameterUpdates, StepReport
from surefoot.records import STOP, Group, Rollout, Task, Turn, Verdict
from surefoot.runtime.task_queue import MemoryTaskQueue, StepSampler
from surefoot.storage.run_folder import RunFolder
from surefoot.tracking.metrics import lookup

TASKS = [Task(id=f"t{i}", prompt="?") for i in range(2)]
EAGER: dict[str, Any] = {"min_steps": 3, "decline_patience": 2, "ema_alpha": 0.5, "margin_se": 1.0}


class FakeRun:
    """A run whose two curves are given: reward by step (None: nobody could grade), held-out accuracy by step."""

    def __init__(
        self, reward: Callable[[int], float | None], heldout: Callable[[int], float | None], *, mode: str = "strict",
        **keys: Any,
    ) -> None:  # fmt: skip
        self.reward, self.heldout, self.diary, self.told = reward, heldout, [], []
        self.version = 0
        self.metrics: dict[str, float] = {"loss": 0.5, "kl": 0.125, "scored_entropy": 0.75}
        settings: dict[str, Any] = {
            "model": "m", "tasks": "t", "max_steps": 12, "eval_steps": 2, "tasks_per_step": 1, "num_generations": 2,
            "guard": {"mode": mode},
        }  # fmt: skip
        mine: Any = self
        hooks = Hooks(
            log=lambda step, metrics: None,
            evaluated=lambda step, metrics: self.note("evaluated", step, metrics),
            warn=lambda what, remedy: self.note("warn", what),
            save_rollouts=lambda step, groups: None,
            step_refused=lambda step, samples, suspects: None,
            save=lambda step: self.note("save", step),
        )
        config = Config(**(settings | keys))
        self.run = Run(
            config=config, runtime=mine, learner=mine,
            queue=StepSampler(MemoryTaskQueue(lambda n: TASKS[:n]), mine, config),
            codec=SimpleNamespace(stop_ids=frozenset({2}), pad_token_id=0, vocab_size=50), heldout=TASKS, hooks=hooks,
            guard=None if mode == "off" else HeldOutGuard(**EAGER),
        )  # fmt: skip
        if self.run.guard is not None:
            real = self.run.guard.update

            def spy(step: int, **numbers: float) -> Any:
                self.told.append((step, numbers))
                return real(step, **numbers)

            self.run.guard.update = spy  # type: ignore[method-assign,assignment]

    probe_baseline = None

    def note(self, *entry: Any) -> None:
        self.diary.append(entry)

    def of(self, kind: str) -> list[Any]:
        return [entry[1:] for entry in self.diary if entry[0] == kind]

    def collect(self, tasks: Sequence[Task], step: int, first: int = 0, **_: Any) -> list[Group]:
        mean = self.reward(step)
        rewards = [None, None] if mean is None else [mean - 0.25, mean + 0.25]
        rollouts = []
        for i, reward in enumerate(rewards):
            turn = Turn((4, 5), (10 + i, 10 + step % 30, 2), (-1.0,) * 3, self.version, finish_reason=STOP)
            failure = "down" if reward is None else None
            rollouts.append(Rollout(tasks[0].id, f"g{step}", i, (turn,), reward=reward, failure=failure))
        return [Group(tasks[0], f"g{step}", tuple(rollouts))]

    def publish(self, weights: Any, version: int) -> Mapping[str, float]:
        return {}

    @property
    def facts(self) -> LearnerFacts:
        return LearnerFacts(self.version, ParameterUpdates(1, 1, 1, ()))

    def published(self) -> tuple[dict[str, Any], int]:
        return {}, self.version

    def learn(self, samples: Any, *, iteration: int = 0) -> StepReport:
        self.version += 1
        return StepReport(self.metrics, self.version, applied=True)

    def evaluate(self, tasks: Sequence[Task], step: int) -> EvalResult:
        share = self.heldout(step)
        return EvalResult(400, 0.5, share, 0.1, 3.0, 0.0, 0, {}, right=None if share is None else round(400 * share))


def rising(step: int) -> float:
    return 0.3 + 0.04 * step


def falling(step: int) -> float:
    return 0.8 - 0.06 * step


def hacked(**keys: Any) -> FakeRun:
    """The reward rises and held-out falls from the first step on."""
    return FakeRun(rising, falling, **keys)


def stopped(fake: FakeRun) -> CollapseStopError:
    with pytest.raises(CollapseStopError) as caught:
        loop.train(fake.run)
    return caught.value


# -- obeyed ---------------------------------------------------------------------------------------


def test_a_fired_strict_guard_logs_saves_and_then_ends_the_run() -> None:
    fake = hacked()
    error = stopped(fake)
    assert fake.run.step == 4, "the third evaluation is the first at which it may fire, and it did"
    assert error.exit_code == 79
    assert error.status is not None
    assert (error.status.rule, error.status.fired_step) == ("decline", 4)
    assert "held-out" in error.what
    kinds = [(entry[0], entry[1]) for entry in fake.diary]
    assert kinds[-2:] == [("evaluated", 4), ("save", 4)], "written before the weights, and both before the end"


def test_a_fired_soft_guard_saves_and_ends_the_run_without_an_error() -> None:
    fake = hacked(mode="soft")
    loop.train(fake.run)
    assert fake.run.step == 4
    assert loop.guard_fired(fake.run)
    assert set(fake.of("save")[1:]) == {(4,)}, "after the best one at step 2, those that it was stopped with"


def test_without_a_guard_the_same_run_goes_to_its_end() -> None:
    fake = hacked(mode="off")
    loop.train(fake.run)
    assert fake.run.step == 12
    assert not [name for _, metrics in fake.of("evaluated") for name in metrics if name.startswith("killswitch/")]


def test_a_run_whose_curves_rise_together_is_left_alone() -> None:
    fake = FakeRun(rising, rising)
    loop.train(fake.run)
    assert fake.run.step == 12
    assert {step for (step,) in fake.of("save")} == {2, 4, 6, 8, 10, 12}, "each one was the best so far"


def test_firing_at_the_very_last_evaluation_still_counts() -> None:
    strict, gentle = hacked(max_steps=4), hacked(max_steps=4, mode="soft")
    assert stopped(strict).status is not None
    loop.train(gentle.run)
    assert loop.guard_fired(gentle.run)


def test_a_stop_request_does_not_hide_a_collapse() -> None:
    fake = hacked(mode="soft")
    fake.run.hooks.stop = lambda: fake.run.step >= 4
    loop.train(fake.run)
    assert loop.guard_fired(fake.run)


# -- told -----------------------------------------------------------------------------------------


def test_each_evaluation_is_folded_once_with_the_mean_reward_since_the_one_before() -> None:
    fake = FakeRun(rising, rising, max_steps=6)
    loop.train(fake.run)
    assert [step for step, _ in fake.told] == [0, 2, 4, 6]
    rewards = [numbers["reward"] for _, numbers in fake.told]
    first = rising(1)
    assert rewards == pytest.approx([first, (rising(1) + rising(2)) / 2, (rising(3) + rising(4)) / 2, 0.3 + 0.04 * 5.5])
    assert [numbers["heldout"] for _, numbers in fake.told] == [rising(step) for step in (0, 2, 4, 6)]


def test_the_evaluation_before_the_first_step_waits_for_the_reward_that_the_same_weights_earn() -> None:
    fake = FakeRun(rising, rising, max_steps=2)
    loop.evaluate(fake.run)
    assert fake.told == [], "no training reward exists yet, and none is invented"
    assert fake.of("evaluated")[0][1].keys().isdisjoint({"killswitch/fire", "killswitch/eval_share"})


def test_without_an_evaluation_at_the_start_nothing_is_folded_for_it() -> None:
    fake = FakeRun(rising, rising, max_steps=4, eval_on_start=False)
    loop.train(fake.run)
    assert [step for step, _ in fake.told] == [2, 4]


def test_the_newest_step_tells_the_rest_and_what_was_not_measured_is_left_out() -> None:
    fake = FakeRun(rising, rising, max_steps=2)
    loop.train(fake.run)
    assert fake.told[-1][1] == {
        "reward": pytest.approx((rising(1) + rising(2)) / 2), "heldout": rising(2), "length": 3.0, "reward_std": 0.25,
        "heldout_se": proportion_se(rising(2), 400), "kl": 0.125, "entropy": 0.75,
    }  # fmt: skip
    bare = FakeRun(rising, rising, max_steps=2)
    bare.metrics = {"loss": 0.5}
    loop.train(bare.run)
    assert bare.told[-1][1].keys() == {"reward", "heldout", "heldout_se", "length", "reward_std"}


def test_steps_without_any_reward_are_not_a_reward_of_zero() -> None:
    fake = FakeRun(lambda step: None if step <= 4 else 0.5, rising, max_steps=6)
    loop.train(fake.run)
    assert [step for step, _ in fake.told] == [0, 6], "2 and 4 had no reward; the start waited for the first there was"
    assert [numbers["reward"] for _, numbers in fake.told] == [0.5, 0.5]
    assert [what for (what,) in fake.of("warn") if "no reward since the last evaluation" in what] == [
        "step 2: no reward since the last evaluation",
        "step 4: no reward since the last evaluation",
    ]


def test_an_evaluation_without_the_watched_metric_is_an_error_and_not_a_pass() -> None:
    fake = FakeRun(rising, lambda step: rising(step) if step < 4 else None)
    with pytest.raises(RewardError, match="no eval_accuracy"):
        loop.train(fake.run)
    assert [step for step, _ in fake.told] == [0, 2]


def test_an_accuracy_outside_0_and_1_has_no_binomial_error() -> None:
    inputs = GuardInputs()
    inputs.step({"reward": 0.5})
    ((_, numbers),) = inputs.for_evaluation(2, {"eval_accuracy": 3.0, "eval_n": 10.0}, "eval_accuracy")
    assert numbers == {"reward": 0.5, "heldout": 3.0}


def test_the_evaluation_line_carries_the_guards_numbers_and_what_looking_on_costs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A clock that ticks once per look, so that the share is a count of looks."""
    ticks = iter(range(10_000))
    monkeypatch.setattr("surefoot.loop_state.time.perf_counter", lambda: float(next(ticks)))
    fake = FakeRun(rising, rising, max_steps=4)
    loop.train(fake.run)
    first, second, third = (metrics for _, metrics in fake.of("evaluated"))
    assert not any(name.startswith("killswitch/") for name in first)
    for metrics in (second, third):
        mine = {name for name in metrics if name.startswith("killswitch/")}
        assert {"killswitch/fire", "killswitch/heldout_ema", "killswitch/kl_ema", "killswitch/eval_share"} <= mine
        assert all(lookup(name) is not None for name in metrics)
    assert 0.0 < third["killswitch/eval_share"] < second["killswitch/eval_share"] < 1.0


# -- the best weights -----------------------------------------------------------------------------


def test_the_best_weights_are_kept() -> None:
    heldout = {0: 0.3, 2: 0.2, 4: 0.5, 6: 0.4, 8: 0.5, 10: 0.6, 12: 0.1}
    fake = FakeRun(rising, lambda step: heldout[step], mode="off")
    loop.train(fake.run)
    assert fake.of("save") == [(4,), (10,)], "an equal value does not replace, nor does one below the start"
    assert (fake.run.best, fake.run.at_start) == ((10, 0.6), 0.3)


@pytest.mark.config_key("save_best")
def test_no_weights_are_the_best_that_are_no_better_than_what_the_run_began_with() -> None:
    heldout = {0: 0.6, 2: 0.3, 4: 0.5, 6: 0.4, 8: 0.5, 10: 0.6, 12: 0.1}
    fake = FakeRun(rising, lambda step: heldout[step], mode="off")
    loop.train(fake.run)
    assert fake.of("save") == []
    assert (fake.run.best, fake.run.at_start) == (None, 0.6)
    unseen = FakeRun(rising, lambda step: heldout[step], mode="off", eval_on_start=False)
    loop.train(unseen.run)
    assert unseen.run.best == (10, 0.6), "nobody knows what it began with"


def test_a_best_that_could_not_be_saved_ends_the_run() -> None:
    fake = FakeRun(rising, rising, mode="off")

    def full(step: int) -> None:
        if step > 2:
            raise OSError(28, "No space left on device")

    fake.run.hooks.save = full
    with pytest.raises(OSError, match="No space"):
        loop.train(fake.run)
    assert fake.run.step == 4


# -- said before, and left behind -------------------------------------------------------------------


@pytest.mark.config_key("eval_steps")
@pytest.mark.parametrize(
    "keys",
    [
        {}, {"eval_on_start": False}, {"eval_steps": 5}, {"eval_steps": 0}, {"eval_steps": 50},
        {"heldout_fraction": 0.0}, {"eval_steps": "auto"}, {"eval_steps": "auto", "num_iterations": 2},
        {"eval_steps": "auto", "tasks_per_step": 2, "num_generations": 16}, {"eval_steps": "auto", "max_steps": 13},
    ],
    ids=str,
)  # fmt: skip
def test_the_plan_counts_the_evaluations_that_the_loop_makes(keys: dict[str, Any]) -> None:
    fake = FakeRun(rising, rising, mode="off", **({"eval_steps": 0} | keys if "heldout_fraction" in keys else keys))
    fake.run.heldout = () if "heldout_fraction" in keys else TASKS
    loop.train(fake.run)
    cadence = fake.run.cadence
    assert cadence.count == len(fake.of("evaluated"))
    assert list(cadence.steps()) == [step for step, _ in fake.of("evaluated")]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"guard": {"mode": "off"}}, "guard     off"),
        ({"heldout_fraction": 0.0}, "guard     inactive: nothing is held out"),
        ({"eval_steps": 0}, "guard     strict, but not armed: 2 evaluations are planned"),
        ({"eval_steps": 5}, "stops with exit code 79, from evaluation 4 of 21 on"),
        ({"eval_steps": 5, "guard": {"min_evals": 10}}, "stops with exit code 79, from evaluation 10 of 21 on"),
        ({"eval_steps": 5, "guard": {"mode": "soft"}}, "ends with verdict FAIL"),
    ],
    ids=str,
)
def test_the_plan_says_what_the_guard_will_do(keys: dict[str, Any], said: str) -> None:
    assert said in guard_lines(Config(model="m", tasks="t", **keys), heldout=Answered(200), metric="eval_accuracy")[0]


def test_a_collapse_outweighs_every_other_fact_of_the_verdict() -> None:
    nothing = LearningEvidence(0.0, groups=0, differing=0, changed_entries=0, metric="a", change=None, measured=False)
    judged = judge_run(
        planned=10, executed=10, target=("a", 0.5), metrics={"a": 1.0}, collapse="held-out fell", evidence=nothing
    )
    assert judged.status is Verdict.FAIL
    assert judged.reasons == ("the guard stopped the run after 10 of 10 steps: held-out fell",)


@pytest.mark.parametrize(
    ("best", "at_start", "kept", "said"),
    [
        ((4, 0.5), 0.2, True, "the best weights are in /r/checkpoints/step_4; "),
        ((4, 0.5), None, True, "the best weights are in /r/checkpoints/step_4; "),
        (None, 0.9, True, "no step was better than the model it began with, m; "),
        ((4, 0.5), 0.2, False, "read the rollouts"),
        (None, None, False, "read the rollouts"),
    ],
    ids=str,
)
def test_the_way_out_names_the_weights_that_are_really_better(
    best: tuple[int, float] | None, at_start: float | None, kept: bool, said: str
) -> None:
    found = best_facts(best, "eval_accuracy", at_start=at_start, kept=kept)
    assert way_out(found, "m", Path("/r")).startswith(said)
    assert way_out(None, "m", Path("/r")).startswith("read the rollouts")


def test_where_no_step_was_better_the_best_is_step_0_and_no_checkpoint() -> None:
    found = best_facts(None, "eval_accuracy", at_start=0.9, kept=True)
    assert found == {
        "step": 0, "metric": "eval_accuracy", "value": 0.9, "checkpoint": None, "before_training": 0.9,
    }  # fmt: skip
    assert best_facts(None, "eval_accuracy", at_start=0.9, kept=True, measured=False) is None, "no step was looked at"


@pytest.mark.parametrize(
    "verdict",
    [
        None,
        "{",
        "[]",
        '{"best": null}',
        '{"best": {"checkpoint": null}}',
        '{"best": {"checkpoint": "checkpoints/step_9"}}',
        '{"best": {"checkpoint": "../elsewhere"}}',
        '{"best": {"checkpoint": "checkpoints"}}',
    ],
)
def test_the_best_checkpoint_is_the_one_that_the_verdict_names_or_an_error(tmp_path: Path, verdict: str | None) -> None:
    folder = RunFolder.create(tmp_path / "run", "run", tmp_path)
    for step in (2, 4):
        folder.checkpoint(step).mkdir()
    (tmp_path / "elsewhere").mkdir()
    folder.write_verdict(Verdict.PASS, [], {"best": best_facts((2, 0.5), "eval_accuracy", at_start=None, kept=True)})
    assert folder.best_checkpoint() == folder.checkpoint(2)
    folder.verdict.unlink() if verdict is None else folder.verdict.write_text(verdict)
    with pytest.raises(StateError, match="names no best checkpoint"):
        folder.best_checkpoint()


def test_a_run_in_which_no_step_was_better_than_the_start_says_which_weights_to_take(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "run", tmp_path)
    folder.checkpoint(2).mkdir()
    folder.write_verdict(Verdict.FAIL, [], {"best": best_facts(None, "eval_accuracy", at_start=0.5, kept=False)})
    with pytest.raises(StateError, match=r"no step of .* was better than the model it began with") as caught:
        folder.best_checkpoint()
    assert caught.value.fix.startswith("use the model it began with")
    assert "step_2" in caught.value.fix


# -- planted bugs ---------------------------------------------------------------------------------


def check() -> None:
    """What the first test claims, for the planted bugs to break."""
    fake = hacked()
    with pytest.raises(CollapseStopError):
        loop.train(fake.run)


def test_the_check_that_the_planted_bugs_break_is_green() -> None:
    check()


def test_planted_missing_call_site_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "update_guard", lambda run: {})
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check()


def test_planted_proxy_as_held_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = GuardInputs.for_evaluation

    def proxy(self: GuardInputs, *args: Any) -> Any:
        return [(step, numbers | {"heldout": numbers["reward"]}) for step, numbers in real(self, *args)]

    monkeypatch.setattr(GuardInputs, "for_evaluation", proxy)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check()


def test_planted_guard_that_never_latches_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeldOutGuard, "should_halt", lambda self: False)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        check()
