"""What a reward function is told beside columns: only where it asks, the same in every process, and how long it took."""

from __future__ import annotations

import time
from typing import Any

import pytest

from surefoot.errors import RewardError
from surefoot.rewards.functions import (
    COMPLETION_IDS,
    TRAINER_STATE,
    TrainerState,
    asks_for,
    exact_answer,
    refuse_unusable,
)
from surefoot.rewards.grading import GradingRules
from surefoot.rewards.pool import RewardJob, RewardPool
from surefoot.rewards.verifiers.multi import MultiVerifier
from surefoot.rewards.workers import RewardCall, read_call, write_call
from surefoot.system.user_code import load_function

JOB = RewardJob(
    ["?", "?"], ["a", "b"], {"answer": ["a", "b"]}, completion_ids=[(1, 2, 3), (4,)],
    progress={"global_step": 7, "max_steps": 20},
)  # fmt: skip


def test_a_function_gets_what_it_names_and_everything_if_it_takes_everything() -> None:
    def neither(completions: Any) -> list[float]:
        return [0.0] * len(completions)

    def tokens(completion_ids: Any) -> list[float]:
        return [float(sum(ids)) for ids in completion_ids]

    def state(completions: Any, trainer_state: Any, answer: Any) -> list[float]:
        return [trainer_state.global_step / trainer_state.max_steps] * len(answer)

    def everything(**columns: Any) -> list[float]:
        assert sorted(columns) == ["answer", "completion_ids", "completions", "prompts", "trainer_state"]
        return [float(type(columns["trainer_state"]) is TrainerState)] * 2

    functions = {f.__name__: f for f in (neither, tokens, state, everything, exact_answer)}
    with RewardPool(functions, workers=1) as pool:
        found = pool.score([JOB])
    assert [{name: mark.value for name, mark in marks.items()} for marks in found] == [
        {"neither": 0.0, "tokens": 6.0, "state": 0.35, "everything": 1.0, "exact_answer": 1.0},
        {"neither": 0.0, "tokens": 4.0, "state": 0.35, "everything": 1.0, "exact_answer": 1.0},
    ]


def test_tokens_are_not_sent_to_those_that_do_not_need_them() -> None:
    pool = RewardPool({"plain": lambda completions: [], "exact": exact_answer, "all": lambda **_: []})
    pool._jobs = [JOB]
    from surefoot.rewards.pool import _PendingReward

    sent = {name: read_call(pool._payload(_PendingReward(name, 0, (0, 1)))) for name in pool.functions}
    assert [name for name, call in sent.items() if COMPLETION_IDS in call.columns] == ["all"]
    assert [name for name, call in sent.items() if call.progress is not None] == ["all"]
    assert not asks_for(MultiVerifier(isolate=False).as_reward, TRAINER_STATE), (
        "it reads every column as one of the task"
    )


def test_progress_travels_as_numbers_and_anything_else_is_refused() -> None:
    call = RewardCall("f", ["?"], ["a"], {}, {"global_step": 3, "max_steps": 9})
    assert read_call(write_call(call)) == call
    for odd in (b'{"global_step": "3"}', b"[3]"):
        frame = write_call(call).replace(b'{"global_step":3,"max_steps":9}', odd)
        with pytest.raises(ValueError, match="not the progress"):
            read_call(frame)


def test_a_field_that_nobody_is_told_says_which_ones_there_are() -> None:
    with pytest.raises(AttributeError, match=r"no 'epoch' here.*global_step and max_steps"):
        _ = TrainerState(1, 2).epoch


def test_time_is_that_of_the_calls_those_that_failed_included() -> None:
    def slow(completions: list[str]) -> list[float]:
        time.sleep(0.03)
        if "b" in completions:
            raise ValueError("b")
        return [1.0] * len(completions)

    with RewardPool({"slow": slow}, workers=1) as pool:
        began = time.monotonic()
        good, bad = (marks["slow"] for marks in pool.score([JOB]))
        took = time.monotonic() - began
    assert (good.value, bad.reason) == (1.0, "raised")
    for mark in (good, bad):
        assert mark.seconds is not None
        assert 2 * 0.03 <= mark.seconds <= took, "the group's call and its own"


@pytest.mark.parametrize("name", ["log_extra", "log_metric", "environments"])
def test_an_argument_of_trls_that_nobody_passes_is_refused_unless_it_may_be_left_out(name: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"def needs(completions, {name}): ...\ndef may(completions, {name}=None): ...", scope)
    with pytest.raises(RewardError, match=f"reward function needs needs {name}"):
        refuse_unusable(scope["needs"])
    refuse_unusable(scope["may"])
    refuse_unusable(exact_answer)


def test_a_model_by_name_is_told_from_a_file_without_a_function(tmp_path: Any) -> None:
    with pytest.raises(RewardError, match="looks like the name of a model") as refused:
        load_function("org/reward-model", tmp_path)
    assert "docs/rewards.md" in refused.value.fix
    with pytest.raises(RewardError, match="does not name a file and a function"):
        load_function("mine.py", tmp_path)


def test_the_rules_of_a_run_reach_graders_here_and_in_workers_elsewhere(tmp_path: Any) -> None:
    """The wire that a fleet's workers are built by; a run on this machine is watched in tests/runs/test_judging.py."""
    from surefoot.config import Config
    from surefoot.run.build import worker_spec
    from surefoot.run.inputs import read_inputs

    config = Config(model="pebble", tasks="builtin:sums", max_steps=7, repetition="invalid", repetition_cost=2.0)
    inputs = read_inputs(config, tmp_path)
    codec = type("Codec", (), {"token_count": 10})()
    worker = worker_spec(config, inputs, codec, None).environment(RewardPool(inputs.functions), None).graders
    assert worker.rules == inputs.rules == GradingRules(7, "invalid", 2.0)
