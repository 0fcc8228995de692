"""From tasks to scored groups: every fact on the record, and no reward for what failed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import pytest

from surefoot.engines.scripted import ScriptedEngine
from surefoot.errors import EngineError, ShapeError, TaskError
from surefoot.protocols import Completion, Grade, Request
from surefoot.records import LENGTH, STOP, Rollout, Task
from surefoot.runtime.requests import Sampling
from surefoot.runtime.rollout import NONFINITE_LOGPROB, UNDECODABLE, RolloutCollector

TASKS = [Task(id=f"t{i}", prompt="?") for i in range(3)]
PROMPTS = {"t0": (4, 9, 5), "t1": (4, 8, 8, 5), "t2": (4,) * 30}
SAMPLING = Sampling(num_generations=4, temperature=0.7, max_completion_length=6, max_width=40)


class FakeCodec:
    stop_ids = frozenset({2, 3})
    pad_token_id = 0
    vocab_size = 50

    def encode_prompt(self, messages: Sequence[object]) -> tuple[int, ...]:
        raise AssertionError("prompts were encoded before the run")

    def decode(self, token_ids: Sequence[int]) -> str:
        return "-".join(map(str, token_ids))


class FakeEnvironment:
    """Grades by the text it is shown; remembers what it was asked."""

    def __init__(self, grade: Callable[[Rollout], Grade] | None = None) -> None:
        self.rule = grade or (lambda r: Grade(float(len(r.text)), {"length": float(len(r.text))}, None, correct=1.0))
        self.asked: list[tuple[str, Rollout]] = []

    def grade(self, tasks: Sequence[Task], rollouts: Sequence[Rollout]) -> list[Grade]:
        self.asked += [(t.id, r) for t, r in zip(tasks, rollouts, strict=True)]
        return [self.rule(r) for r in rollouts]

    def close(self) -> None:
        pass


def collector(
    engine: ScriptedEngine | None = None,
    environment: FakeEnvironment | None = None,
    *,
    seed: int = 0,
    token_count: int = 45,
) -> RolloutCollector:
    engine = engine or ScriptedEngine(lambda request: [10 + int(request.id.split("/")[-1]), 2])
    return RolloutCollector(
        engine,
        environment or FakeEnvironment(),
        FakeCodec(),
        PROMPTS,
        seed=seed,
        token_count=token_count,
    )


def asked(purpose: str = "train", step: int = 1, seed: int = 0) -> list[Request]:
    engine = ScriptedEngine(lambda request: [2])
    collector(engine, seed=seed).run_rollouts(TASKS, SAMPLING, purpose=purpose, step=step)
    return engine.requests


# -- what is asked --------------------------------------------------------------------------


def test_every_rollout_has_a_seed_of_its_own_over_steps_purposes_and_runs() -> None:
    seeds = [
        request.seed
        for purpose, step, seed in [
            ("train", 1, 0),
            ("train", 2, 0),
            ("eval", 1, 0),
            ("preflight", 1, 0),
            ("train", 1, 1),
        ]
        for request in asked(purpose, step, seed)
    ]
    assert len(seeds) == 5 * 12
    assert len(set(seeds)) == len(seeds)
    assert [r.seed for r in asked()] == [r.seed for r in asked()], "and it is the same one next time"


def test_a_rollouts_seed_does_not_depend_on_the_other_tasks_of_its_step() -> None:
    engine = ScriptedEngine(lambda request: [2])
    collector(engine).run_rollouts([TASKS[2], TASKS[1]], SAMPLING, purpose="train", step=1)
    together = {(r.prompt_ids, r.seed) for r in asked()}
    assert {(r.prompt_ids, r.seed) for r in engine.requests} <= together


def test_the_engine_is_asked_with_tokens_encoded_before_and_the_sampling_given() -> None:
    requests = asked()
    assert [r.prompt_ids for r in requests] == [PROMPTS[f"t{i // 4}"] for i in range(12)]
    assert {(r.temperature, r.stop_ids) for r in requests} == {(0.7, frozenset({2, 3}))}
    assert [r.max_new_tokens for r in requests[::4]] == [6, 6, 6]
    tight = dataclasses.replace(SAMPLING, max_width=33)
    engine = ScriptedEngine(lambda request: [2])
    collector(engine).run_rollouts([TASKS[0], TASKS[2]], tight, purpose="train", step=1)
    assert [r.max_new_tokens for r in engine.requests[::4]] == [6, 3], "the context leaves only 3 for the long prompt"
    assert len({r.id for r in requests}) == 12


def test_a_task_that_was_never_encoded_is_refused() -> None:
    with pytest.raises(TaskError, match="stranger was never encoded"):
        collector().run_rollouts([Task(id="stranger", prompt="?")], SAMPLING, purpose="train", step=1)


# -- what comes back --------------------------------------------------------------------------


def test_groups_hold_their_own_siblings_in_order_with_grades() -> None:
    environment = FakeEnvironment(lambda r: Grade(float(r.index), {"p": 0.5}, None, correct=float(r.index == 3)))
    played = collector(environment=environment).run_rollouts(TASKS, SAMPLING, purpose="train", step=7)
    assert [p.group.task.id for p in played] == ["t0", "t1", "t2"]
    assert [p.group.id for p in played] == ["train/7/0", "train/7/1", "train/7/2"]
    for p in played:
        assert p.group.rewards == (0.0, 1.0, 2.0, 3.0)
        assert p.correct == (0.0, 0.0, 0.0, 1.0)
        assert [r.turns[0].completion_ids for r in p.group.rollouts] == [(10 + i, 2) for i in range(4)]
        assert {r.turns[0].prompt_ids for r in p.group.rollouts} == {PROMPTS[p.group.task.id]}
        assert p.group.rollouts[1].text == "11-2"
        assert p.group.rollouts[0].reward_parts == {"p": 0.5}
    assert [task for task, _ in environment.asked] == ["t0"] * 4 + ["t1"] * 4 + ["t2"] * 4
    assert all(task == r.task_id for task, r in environment.asked)


def test_the_version_on_a_turn_is_the_engines_at_the_first_token() -> None:
    engine = ScriptedEngine(lambda request: [2], on_generate=lambda e: e.load_weights({}, 6))
    engine.load_weights({}, 5)
    rollout = collector(engine).run_rollouts(TASKS[:1], SAMPLING, purpose="train", step=1)[0].group.rollouts[0]
    assert (rollout.version, rollout.turns[0].version_end, rollout.turns[0].mixed) == (5, 6, True)


@pytest.mark.parametrize(("tokens", "reason"), [([9, 3], STOP), ([9] * 6, LENGTH)])
def test_finish_reason_and_logprobs_are_the_engines(tokens: list[int], reason: str) -> None:
    engine = ScriptedEngine(lambda request: tokens, logprob=-0.125)
    turn = collector(engine).run_rollouts(TASKS[:1], SAMPLING, purpose="train", step=1)[0].group.rollouts[0].turns[0]
    assert (turn.finish_reason, turn.logprobs) == (reason, (-0.125,) * len(tokens))


# -- what fails -------------------------------------------------------------------------------


def test_a_token_that_no_text_has_is_a_failure_whatever_the_grader_says() -> None:
    """Row 45 exists in the model, not in the tokenizer; its text is empty, and empty might be graded 0 or 1."""
    engine = ScriptedEngine(lambda request: [45 if request.id.endswith("/1") else 44, 2])
    environment = FakeEnvironment(lambda r: Grade(1.0, {}, None))
    group = collector(engine, environment).run_rollouts(TASKS[:1], SAMPLING, purpose="train", step=1)[0].group
    assert group.rewards == (1.0, None, 1.0, 1.0)
    assert [r.failure for r in group.rollouts] == [None, UNDECODABLE, None, None]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 0.5, 2e-6], ids=str)
@pytest.mark.parametrize("position", [0, 1])
def test_a_logprob_that_is_none_costs_its_own_rollout_and_nobody_elses(value: float, position: int) -> None:
    def change(answers: list[Completion]) -> list[Completion]:
        logprobs = tuple(value if i == position else -1.0 for i in range(2))
        return [answers[0], dataclasses.replace(answers[1], logprobs=logprobs), *answers[2:]]

    environment = FakeEnvironment(lambda r: Grade(1.0, {"p": 1.0}, None, correct=1.0))
    played = collector(_Wrong(change), environment).run_rollouts(TASKS[:1], SAMPLING, purpose="train", step=1)[0]
    assert played.group.rewards == (1.0, None, 1.0, 1.0)
    assert [r.failure for r in played.group.rollouts] == [None, NONFINITE_LOGPROB, None, None]
    assert played.group.rollouts[1].turns == (), "nothing that is not finite travels on"
    assert played.group.rollouts[1].reward_parts == {}
    assert str(played.group.rollouts[1]) == "task=t0/group=train/1/0/rollout=1"


@pytest.mark.parametrize("value", [0.0, 1e-7, -80.0, -1e30])
def test_a_logprob_of_a_certain_or_a_hopeless_token_is_one(value: float) -> None:
    """Rounding may lift a certain token a little above 0; a hopeless one is only very unlikely."""
    engine = ScriptedEngine(lambda request: [9, 2], logprob=value)
    group = collector(engine).run_rollouts(TASKS[:1], SAMPLING, purpose="train", step=1)[0].group
    assert [r.failure for r in group.rollouts] == [None] * 4


def test_a_grader_without_a_verdict_leaves_a_reason_and_no_reward() -> None:
    environment = FakeEnvironment(lambda r: Grade(None, {"p": None}, "p:timeout") if r.index else Grade(1.0, {}))
    group = collector(environment=environment).run_rollouts(TASKS[:1], SAMPLING, purpose="train", step=1)[0].group
    assert group.rewards == (1.0, None, None, None)
    assert {r.failure for r in group.rollouts[1:]} == {"p:timeout"}


def test_a_grade_that_is_not_a_number_is_refused() -> None:
    environment = FakeEnvironment(lambda r: Grade(float("nan"), {}))
    with pytest.raises(ShapeError, match="reward nan"):
        collector(environment=environment).run_rollouts(TASKS[:1], SAMPLING, purpose="train", step=1)


class _Wrong(ScriptedEngine):
    def __init__(self, change: Callable[[list[Completion]], list[Completion]]) -> None:
        super().__init__(lambda request: [9, 2])
        self.change = change

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        return self.change(super().generate(requests))


@pytest.mark.parametrize(
    "change",
    [lambda c: c[:-1], lambda c: [*c, c[0]], lambda c: [c[1], c[0], *c[2:]], lambda c: [], lambda c: [c[0]] * len(c)],
    ids=["one lost", "one too many", "swapped", "none", "one for all"],
)
def test_answers_that_do_not_match_the_questions_are_refused(change: Callable[..., list[Completion]]) -> None:
    with pytest.raises(EngineError, match="asked 12 completions"):
        collector(_Wrong(change)).run_rollouts(TASKS, SAMPLING, purpose="train", step=1)


@pytest.mark.parametrize("tokens", [(), (9,) * 7], ids=["empty", "overlong"])
def test_an_answer_of_impossible_length_is_refused(tokens: tuple[int, ...]) -> None:
    def change(answers: list[Completion]) -> list[Completion]:
        return [dataclasses.replace(answers[0], token_ids=tokens, logprobs=(-1.0,) * len(tokens)), *answers[1:]]

    with pytest.raises(EngineError, match=f"{len(tokens)} tokens"):
        collector(_Wrong(change)).run_rollouts(TASKS, SAMPLING, purpose="train", step=1)


def test_an_answer_with_missing_logprobs_is_refused() -> None:
    def change(answers: list[Completion]) -> list[Completion]:
        return [dataclasses.replace(answers[0], logprobs=(-1.0,)), *answers[1:]]

    with pytest.raises(ShapeError, match="2 tokens but 1 logprobs"):
        collector(_Wrong(change)).run_rollouts(TASKS, SAMPLING, purpose="train", step=1)


@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_grader_that_loses_or_invents_a_grade_is_refused(wrong: int) -> None:
    class Short(FakeEnvironment):
        def grade(self, tasks: Sequence[Task], rollouts: Sequence[Rollout]) -> list[Grade]:
            grades = super().grade(tasks, rollouts)
            return grades[:-1] if wrong < 0 else [*grades, grades[0]]

    with pytest.raises(ValueError, match=r"grade|zip"):
        collector(environment=Short()).run_rollouts(TASKS, SAMPLING, purpose="train", step=1)
