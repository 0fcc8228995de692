"""The audit of the preflight: every rollout is graded twice, and a grader that changes its mind is refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from codec_kit import OneTokenPrompts

from surefoot.engines.scripted import ScriptedEngine
from surefoot.errors import RewardError
from surefoot.records import Task
from surefoot.rewards.grading import SingleTurnEnvironment
from surefoot.rewards.pool import RewardPool
from surefoot.runtime.local import LocalRuntime
from surefoot.runtime.requests import Sampling
from surefoot.runtime.rollout import RolloutCollector

TASKS = [Task(id=f"t{i}", prompt="?") for i in range(3)]


class LetterCodec(OneTokenPrompts):
    """Token n is the n-th letter; ids from 20 on have no token."""

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(97 + token) for token in token_ids)


def preflight(
    reward: Callable[..., Any], *, audit: bool, failures: float = 0.0, odd: bool = False, **more: Any
) -> None:
    """The preflight of a run with this reward (and others), workers and all; `odd` lets one rollout choose no token."""
    functions = {"reward": reward, **more}
    engine = ScriptedEngine(lambda r: [30, 2] if odd and r.id.endswith("0/1") else [3 + int(r.id[-1]), 5, 2])
    with RewardPool(functions, workers=2) as pool:
        environment = SingleTurnEnvironment(pool, dict.fromkeys(functions, 1.0), "metric" if more else None)
        prompts = {task.id: (4, 9) for task in TASKS}
        collector = RolloutCollector(engine, environment, LetterCodec(), prompts, seed=0, token_count=20)
        sampling = Sampling(4, 1.0, 6, 40)
        runtime = LocalRuntime(engine, collector, train=sampling, evaluation=sampling, max_failures=failures)
        runtime.preflight(TASKS, audit=audit)


def by_chance(completions: list[str], **_: Any) -> list[float]:
    return [random.random() for _ in completions]


def by_content(completions: list[str], **_: Any) -> list[float]:
    return [random.Random(text).random() for text in completions]


@pytest.mark.config_key("audit_rewards")
def test_a_reward_that_draws_by_chance_is_refused_by_name_and_only_by_the_audit() -> None:
    preflight(by_chance, audit=False)
    with pytest.raises(
        RewardError, match=r"^reward function reward gave 0.* and then 0.* completion of task t0 "
    ) as caught:
        preflight(by_chance, audit=True)
    assert caught.value.exit_code == 4
    assert "12 such changes in 12 rollouts" in caught.value.what
    assert "random.Random(completion)" in caught.value.fix


def test_a_reward_seeded_by_its_input_passes_the_audit() -> None:
    preflight(by_content, audit=True)


def test_a_reward_that_counts_its_calls_is_refused_and_both_values_are_shown() -> None:
    calls: list[int] = []

    def tired(completions: list[str], **_: Any) -> list[float]:
        calls.append(1)
        return [1.0 / len(calls) + ord(text[0]) for text in completions]

    with pytest.raises(RewardError, match=r"gave \d+\.\d+ and then \d+\.\d+"):
        preflight(tired, audit=True)


def test_a_verdict_that_is_given_once_and_withheld_once_is_a_change() -> None:
    seen: list[str] = []

    def forgetful(completions: list[str], **_: Any) -> list[float | None]:
        known = len(seen) > 2
        seen.extend(completions)
        return [None if known and text[0] == "d" else float(ord(text[0])) for text in completions]

    with pytest.raises(RewardError, match=r"and then no verdict|gave no verdict and then"):
        preflight(forgetful, audit=True, failures=1.0)


def test_a_metric_that_changes_its_mind_is_refused_too() -> None:
    with pytest.raises(RewardError, match=r"^reward function metric|^the task metric"):
        preflight(by_content, audit=True, metric=by_chance)


def test_a_rollout_that_failed_before_grading_is_not_held_against_the_reward() -> None:
    preflight(by_content, audit=True, failures=0.5, odd=True)


def test_planted_bug_without_the_comparison_chance_goes_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surefoot.runtime.base._changes", lambda *_: iter(()))
    preflight(by_chance, audit=True)
