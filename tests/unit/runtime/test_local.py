"""One process: weights arrive or the run stops, evaluation looks on without touching anything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from codec_kit import OneTokenPrompts
from local_kit import publisher_here
from silent_kit import make_engine, make_learner, make_runtime, tiny_net, weights_of

from surefoot.engines.scripted import ScriptedEngine
from surefoot.engines.serving import EngineLoop
from surefoot.errors import EngineError, InvariantError, NumericsError, RewardError
from surefoot.maths.checksums import checksums
from surefoot.protocols import Completion, Grade, Request, Scored
from surefoot.records import Rollout, Task
from surefoot.runtime.local import LocalRuntime
from surefoot.runtime.requests import Sampling
from surefoot.runtime.rollout import RolloutCollector
from surefoot.runtime.weights import run_here

WEIGHTS = {"w": torch.tensor([1.0])}
TASKS = [Task(id=f"t{i}", prompt="?") for i in range(5)]


class FakeCodec(OneTokenPrompts):
    def decode(self, token_ids: Sequence[int]) -> str:
        return "-".join(map(str, token_ids))


class FakeEnvironment:
    def __init__(self, rule: Callable[[Rollout], Grade]) -> None:
        self.rule, self.closed = rule, False

    def grade(self, tasks: Sequence[Task], rollouts: Sequence[Rollout]) -> list[Grade]:
        return [self.rule(r) for r in rollouts]

    def explain_failures(self) -> str:
        return ""

    def close(self) -> None:
        self.closed = True


def runtime(
    rule: Callable[[Rollout], Grade] = lambda r: Grade(float(r.index), {}, None, correct=float(r.index > 1)), *,
    engine: ScriptedEngine | None = None, max_failures: float = 0.0,
) -> LocalRuntime:  # fmt: skip
    prompts = {task.id: (4, 9 + i, 5) for i, task in enumerate(TASKS)}
    engine = engine or ScriptedEngine(lambda request: [7, 2])
    collector = RolloutCollector(
        engine, FakeEnvironment(rule), FakeCodec(), prompts, seed=0, token_count=50
    )  # fmt: skip
    train, evaluation = Sampling(4, 1.0, 6, 40), Sampling(3, 0.5, 6, 40)
    return LocalRuntime(engine, collector, train=train, evaluation=evaluation, max_failures=max_failures)


def failing(every: int) -> Callable[[Rollout], Grade]:
    """Rollout 0 of every `every`-th task gets no verdict."""
    return lambda r: (
        Grade(None, {}, "f:timeout")
        if r.index == 0 and int(r.task_id[1:]) % every == 0
        else Grade(float(r.index), {}, None, 1.0)
    )


# -- publish --------------------------------------------------------------------------------------


def test_a_version_counts_only_when_the_engine_says_it_serves_it() -> None:
    class Deaf(ScriptedEngine):
        def load_weights(self, weights: Any, version: int) -> None:
            pass

    with pytest.raises(EngineError, match="published version 3, the engine serves 0"):
        runtime(engine=Deaf(lambda request: [2])).publish(WEIGHTS, 3)


def test_publishing_hands_over_and_takes_its_time() -> None:
    local = runtime()
    assert set(local.publish(WEIGHTS, 3)) == {"timing/publish", "sync/replicas"}
    assert local.engine.version == local.publisher.version == 3


class Model:
    """Weights that are one number, an engine that speaks with them, and a learner that has them."""

    def __init__(self) -> None:
        self.weights = {"w": torch.tensor([1.0])}
        self.engine = Speaking()

    def score(self, texts: Sequence[Scored], *, temperature: float) -> list[tuple[float, ...]]:
        return [spoken(float(self.weights["w"]), text) for text in texts]

    def runtime(self, **keys: Any) -> LocalRuntime:
        plain = runtime(engine=self.engine)
        return LocalRuntime(
            self.engine, plain.collector, train=plain.train, evaluation=plain.evaluation, max_failures=0.0,
            publisher=publisher_here(plain, self.score), **keys,
        )  # fmt: skip


def spoken(weight: float, text: Scored) -> tuple[float, ...]:
    return tuple(-weight - 0.01 * sum(text[0]) - 0.1 * i for i in range(len(text[1])))


class Speaking(ScriptedEngine):
    def __init__(self) -> None:
        super().__init__(lambda request: [7] * request.max_new_tokens)
        self.held: Any = {}

    def load_weights(self, weights: Any, version: int) -> None:
        super().load_weights(weights, version)
        self.held = weights

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        said = super().generate(requests)
        weight = float(self.held["w"])
        return [
            replace(c, logprobs=spoken(weight, (r.prompt_ids, c.token_ids)))
            for r, c in zip(requests, said, strict=True)
        ]


def test_with_the_learners_opinion_every_version_is_proven_and_the_proof_is_timed() -> None:
    model = Model()
    local = model.runtime()
    first = local.publish(model.weights, 0)
    assert set(first) == {"timing/publish", "timing/pack", "timing/proof", "sync/probe_gap", "sync/replicas"}
    model.weights["w"] += 0.5
    assert local.publish(model.weights, 1)["sync/probe_move"] == pytest.approx(0.5)


def test_a_restored_baseline_is_what_the_publish_after_the_next_is_measured_from() -> None:
    """A resume between two passes: its first publish only brings the engine back, and the weights moved before it."""
    model = Model()
    whole = model.runtime()
    whole.publish(model.weights, 0)
    saved = whole.probe_baseline
    model.weights["w"] += 0.5  # the first pass over the batch; here the run is interrupted
    resumed = model.runtime()
    resumed.probe_baseline = saved
    assert "sync/probe_move" not in resumed.publish(model.weights, 1)
    assert resumed.probe_baseline == saved
    model.weights["w"] += 0.25
    moved = [local.publish(model.weights, 2)["sync/probe_move"] for local in (whole, resumed)]
    assert moved == [pytest.approx(0.75)] * 2
    assert resumed.probe_baseline == whole.probe_baseline != saved


def test_an_engine_that_speaks_with_other_weights_is_refused_before_it_is_asked_for_a_rollout() -> None:
    model = Model()
    local = model.runtime()
    local.publish({name: value.clone() for name, value in model.weights.items()}, 0)
    kept = model.engine.held
    model.weights["w"] += 0.5
    model.engine.load_weights = lambda weights, version: ScriptedEngine.load_weights(model.engine, kept, version)  # type: ignore[method-assign]
    with pytest.raises(NumericsError, match=r"the engine does not serve version 1: .* It answers as version 0 did"):
        local.publish(model.weights, 1)


def test_the_engine_gets_the_learners_own_tensors_and_copies_them_where_it_has_to() -> None:
    model = Model()
    model.runtime().publish(model.weights, 0)
    assert model.engine.held["w"] is model.weights["w"]


# -- an engine that has tensors of its own: the two phases and every checksum, as between processes ----------------


def copying(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Any], None] = lambda copies: None) -> Any:
    """`publish(version)` to a real engine that serves copies; `spoil` is given the copies before they are summed up."""
    net, real = tiny_net(), EngineLoop._own
    loop = EngineLoop(make_engine(net), copy_weights=True)

    def own(self: EngineLoop, weights: Any) -> Any:
        copies = real(self, weights)
        spoil(copies)
        return copies

    monkeypatch.setattr(EngineLoop, "_own", own)
    plain = make_runtime(loop)
    learner = make_learner(net)
    local = LocalRuntime(
        loop, plain.collector, train=plain.train, evaluation=plain.evaluation, max_failures=0.0,
        publisher=publisher_here(plain, learner.score), shares_tensors=False,
    )  # fmt: skip
    return local, weights_of(net)


def test_a_copy_is_summed_up_on_both_sides_and_served(monkeypatch: pytest.MonkeyPatch) -> None:
    local, weights = copying(monkeypatch)
    try:
        found = local.publish(weights, 3)
        assert {"timing/publish", "timing/proof", "sync/probe_gap"} <= set(found)
        assert local.engine.version == local.publisher.version == 3
    finally:
        local.close()


def _one_bit(copies: Any) -> None:
    """The smallest change that there is, of one number: no canary can see it."""
    copies["model.norm.weight"].view(torch.int32)[0] ^= 1


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_one_bit, r"1 of \d+ tensors differ, first model.norm.weight"),
        (lambda copies: copies.pop("model.norm.weight"), r"1 of \d+ tensors are missing"),
    ],
    ids=["one bit", "one tensor less"],
)
def test_planted_copy_that_is_not_what_was_sent_is_refused_before_it_is_served(
    spoil: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, weights = copying(monkeypatch, spoil)
    try:
        with pytest.raises(EngineError, match=f"the engine does not hold version 3: {said}"):
            local.publish(weights, 3)
        assert local.engine.version == 0, "nobody commits what was not compared"
    finally:
        local.close()


def test_without_the_comparison_one_bit_would_go_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cut wire: it is the publisher of all runtimes that sees it, and nothing else here does."""
    monkeypatch.setattr("surefoot.runtime.weights.compare_checksums", lambda *_: None)
    local, weights = copying(monkeypatch, _one_bit)
    try:
        assert local.publish(weights, 3)["sync/replicas"] == 1.0
    finally:
        local.close()


def test_what_an_engine_reads_back_is_compared_too() -> None:
    class Reading(ScriptedEngine):
        def prepare(self, weights: Any, version: int) -> dict[str, int]:
            self.held = checksums(weights)
            return self.held

        def commit(self, version: int) -> dict[str, int]:
            self.load_weights({}, version)
            return {name: value + 1 for name, value in self.held.items()}

    plain = runtime(engine=Reading(lambda request: [2]))
    local = LocalRuntime(
        plain.engine, plain.collector, train=plain.train, evaluation=plain.evaluation, max_failures=0.0,
        shares_tensors=False,
    )  # fmt: skip
    with pytest.raises(EngineError, match="1 of 1 tensors differ, first w"):
        local.publish(WEIGHTS, 1)


def test_a_sync_in_one_process_needs_no_event_loop_and_minds_none() -> None:
    async def in_a_notebook() -> set[str]:
        return set(runtime().publish(WEIGHTS, 1))

    assert asyncio.run(in_a_notebook()) == {"timing/publish", "sync/replicas"}


def test_a_sync_in_one_process_that_would_wait_is_refused() -> None:
    waited = asyncio.sleep(0)
    with pytest.raises(InvariantError, match="waited for something"):
        run_here(waited)


# -- collect --------------------------------------------------------------------------------------


def test_collecting_plays_one_group_per_task_with_training_settings() -> None:
    local = runtime()
    groups = local.collect(TASKS[:2], 4)
    assert [(g.task.id, g.id, len(g.rollouts)) for g in groups] == [("t0", "train/4/0", 4), ("t1", "train/4/1", 4)]
    assert {r.temperature for r in asked(local)} == {1.0}


def asked(local: LocalRuntime) -> list[Request]:
    engine = local.engine
    assert isinstance(engine, ScriptedEngine)
    return engine.requests


@pytest.mark.config_key("max_reward_failures")
def test_more_failures_than_allowed_stop_the_run_with_their_reasons() -> None:
    with pytest.raises(RewardError, match=r"3 of 20 rollouts in step 6 got no verdict \(f:timeout\).*allows 0\.1"):
        runtime(failing(2), max_failures=0.1).collect(TASKS, 6)
    groups = runtime(failing(2), max_failures=0.15).collect(TASKS, 6)
    assert sum(r is None for g in groups for r in g.rewards) == 3, "allowed failures stay failures"


def test_by_default_one_failure_is_too_many() -> None:
    with pytest.raises(RewardError, match="1 of 20"):
        runtime(failing(5)).collect(TASKS, 1)


# -- evaluate -------------------------------------------------------------------------------------


def test_evaluation_uses_the_same_streams_every_time_whatever_the_step() -> None:
    local = runtime()
    first = local.evaluate(TASKS, 0)
    seen = list(asked(local))
    local.collect(TASKS, 1)
    del asked(local)[:]
    assert local.evaluate(TASKS, 17) == first
    assert asked(local) == seen
    assert {r.temperature for r in seen} == {0.5}


def test_evaluation_shares_no_stream_with_training() -> None:
    local = runtime()
    local.evaluate(TASKS, 0)
    evaluation = {r.seed for r in asked(local)}
    del asked(local)[:]
    for step in range(3):
        local.collect(TASKS, step)
    assert not evaluation & {r.seed for r in asked(local)}


def test_the_task_metric_is_kept_apart_from_the_reward() -> None:
    result = runtime().evaluate(TASKS, 0)
    assert result.n == 15
    assert result.reward == pytest.approx(1.0), "the mean of 0, 1, 2"
    assert result.accuracy == pytest.approx(1 / 3)
    assert result.stderr == pytest.approx((1 / 3 * 2 / 3 / 15) ** 0.5)
    assert (result.mean_length, result.clipped_ratio, result.failures) == (2.0, 0.0, 0)


def test_tasks_without_a_metric_have_no_accuracy() -> None:
    result = runtime(lambda r: Grade(float(r.index), {})).evaluate(TASKS, 0)
    assert (result.accuracy, result.stderr) == (None, None)
    assert "eval_accuracy" not in result.metrics()
    assert result.metrics()["eval_reward"] == 1.0


def test_answers_nobody_could_grade_are_left_out_of_every_mean() -> None:
    result = runtime(failing(2), max_failures=0.5).evaluate(TASKS, 0)
    assert (result.n, result.failures) == (12, 3)
    assert result.accuracy == 1.0
    assert result.reward == pytest.approx((3 * 3 + 2 * 3) / 12)


def test_every_task_has_a_score_of_its_own_in_the_order_of_the_tasks() -> None:
    result = runtime(lambda r: Grade(float(r.task_id[1:]) + r.index, {}, None, float(r.index > 1))).evaluate(TASKS, 0)
    assert result.scores["reward"] == (1.0, 2.0, 3.0, 4.0, 5.0), "the mean of three answers"
    assert result.scores["accuracy"] == pytest.approx((1 / 3,) * 5)
    graded = runtime(failing(2), max_failures=0.5).evaluate(TASKS, 0)
    assert graded.scores["reward"] == (1.5, 1.0, 1.5, 1.0, 1.5), "of those that got a verdict"
    lost = runtime(
        lambda r: Grade(None, {}, "f:down") if r.task_id == "t1" else Grade(1.0, {}, None, 1.0), max_failures=0.5
    )
    assert lost.evaluate(TASKS, 0).scores["accuracy"] == (1.0, None, 1.0, 1.0, 1.0)


def test_right_answers_are_counted_where_each_is_right_or_wrong_and_not_otherwise() -> None:
    result = runtime().evaluate(TASKS, 0)
    assert (result.right, result.metrics()["eval_right"]) == (5, 5.0)
    marks = runtime(lambda r: Grade(1.0, {}, None, r.index / 100)).evaluate(TASKS, 0)
    assert marks.right is None
    assert "eval_right" not in marks.metrics()
    assert marks.stderr == pytest.approx(0.00845 / 15**0.5, rel=1e-2), "of the marks, not of 15 coins"


def test_answers_that_repeat_each_other_are_not_taken_for_as_many_tasks() -> None:
    """Two of five tasks solved by all three of their answers: five coins were thrown, not fifteen."""
    alike = runtime(lambda r: Grade(1.0, {}, None, float(r.task_id in ("t0", "t1")))).evaluate(TASKS, 0)
    coins = (0.4 * 0.6 / 4) ** 0.5
    assert (alike.accuracy, alike.n) == (0.4, 15)
    assert alike.stderr == pytest.approx(coins)
    marks = runtime(lambda r: Grade(1.0, {}, None, 0.5 * (r.task_id in ("t0", "t1")))).evaluate(TASKS, 0)
    assert marks.stderr == pytest.approx(coins / 2)


def test_all_right_is_not_certain() -> None:
    stderr = runtime(lambda r: Grade(1.0, {}, None, 1.0)).evaluate(TASKS, 0).stderr
    assert stderr is not None
    assert stderr > 0


def test_an_evaluation_without_any_verdict_is_an_error_not_a_zero() -> None:
    with pytest.raises(RewardError, match="no held-out answer got a verdict"):
        runtime(lambda r: Grade(None, {}, "f:down"), max_failures=1.0).evaluate(TASKS, 0)


def test_failures_in_an_evaluation_are_limited_too() -> None:
    with pytest.raises(RewardError, match="the evaluation at step 30"):
        runtime(failing(2)).evaluate(TASKS, 30)


# -- preflight ------------------------------------------------------------------------------------


@pytest.mark.config_key("preflight_tasks")
@pytest.mark.parametrize("value", [0.0, 1.0, -2.5])
def test_a_constant_baseline_reward_is_refused_with_a_completion_to_look_at(value: float) -> None:
    with pytest.raises(RewardError, match=rf"all 20 baseline completions on 5 tasks got reward {value:g}.*'7-2'"):
        runtime(lambda r: Grade(value, {})).preflight(TASKS)


def test_one_different_reward_is_enough_to_start() -> None:
    rule = lambda r: Grade(float(r.task_id == "t3" and r.index == 2), {})  # noqa: E731
    assert len(runtime(rule).preflight(TASKS)) == 5


def test_the_preflight_uses_no_stream_of_training_or_evaluation() -> None:
    local = runtime()
    local.preflight(TASKS)
    local.collect(TASKS, 0)
    local.evaluate(TASKS, 0)
    seeds = [r.seed for r in asked(local)]
    assert len(set(seeds)) == len(seeds)


def test_a_baseline_that_nobody_could_grade_is_refused() -> None:
    with pytest.raises(RewardError):
        runtime(lambda r: Grade(None, {}, "f:down"), max_failures=1.0).preflight(TASKS)


def test_closing_ends_the_graders() -> None:
    local = runtime()
    local.close()
    assert local.collector.environment.closed  # type: ignore[attr-defined]
