"""Keys that shape a run as a whole: its length, its cadence, what it leaves behind, and how it is judged."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from surefoot.errors import ConfigError, NumericsError, PartialGroupError, RewardError
from surefoot.loop import Run, learn, prepare
from surefoot.protocols import LearnerFacts, StepReport

Ran = Callable[..., Any]


@pytest.mark.config_key("max_steps", "logging_steps", "save_steps", "save_rollouts", "eval_steps", "eval_on_start")
def test_cadences_decide_what_the_folder_holds(ran: Ran) -> None:
    plain = ran(max_steps=4)
    assert plain.logged == [1, 2, 3, 4]
    assert plain.evaluated == [0, 4]
    assert plain.names("checkpoints") == ["step_4"]
    kept = [f"step_{step}.jsonl" for step in (1, 2, 3, 4)]
    assert plain.names("rollouts") == ["eval_000000.jsonl", "eval_000004.jsonl", *kept]
    other = ran(max_steps=5, logging_steps=3, save_steps=2, save_rollouts=False, eval_steps=2, eval_on_start=False)
    assert other.logged == [1, 3, 5], "the first and the last step are always there"
    assert other.evaluated == [2, 4, 5]
    assert other.names("checkpoints") == ["step_2", "step_4", "step_5"]
    assert other.names("rollouts") == []


@pytest.mark.config_key("output_dir", "run_name")
def test_a_run_lies_where_it_was_told_or_under_its_name(ran: Ran, tmp_path: Path) -> None:
    assert ran(output_dir="here/there", heldout_fraction=0.0).root == tmp_path / "here" / "there"
    unnamed = ran(output_dir=None, run_name="mine", heldout_fraction=0.0).root
    assert unnamed.parent == tmp_path / "runs"
    assert re.fullmatch(r"\d{8}-\d{6}-mine", unnamed.name)


@pytest.mark.config_key("tasks_per_step", "num_generations")
def test_a_step_holds_tasks_times_generations(ran: Ran) -> None:
    rollouts = ran(tasks_per_step=3, num_generations=2, heldout_fraction=0.0).rollouts(1)
    assert len({r["task"] for r in rollouts}) == 3
    assert len(rollouts) == 6


@pytest.mark.config_key("num_iterations")
def test_iterations_train_again_on_the_same_rollouts(ran: Ran) -> None:
    once, twice = ran(max_steps=2, heldout_fraction=0.0), ran(max_steps=2, num_iterations=2, heldout_fraction=0.0)
    assert once.rollouts(1) != once.rollouts(2)
    assert twice.rollouts(1) == twice.rollouts(2)
    assert [row["version"] for row in twice.metrics] == [1, 2]


@pytest.mark.config_key("target_metric", "target_value")
def test_the_target_decides_the_verdict(ran: Ran) -> None:
    keys = dict(tasks_per_step=6)  # of so many groups one has rewards that differ
    free = ran(**keys)
    reached = ran(**keys, target_metric="eval_completions/mean_length", target_value=1.0)
    missed = ran(**keys, target_metric="eval_completions/mean_length", target_value=100.0)
    unknown = ran(**keys, target_metric="eval_happiness", target_value=0.0)
    assert [r.verdict["status"] for r in (free, reached, missed, unknown)] == ["PASS", "PASS", "FAIL", "FAIL"]
    assert [r.exit_code for r in (free, reached, missed, unknown)] == [0, 0, 1, 1]


# -- rewards in their processes -------------------------------------------------------------------

PROCESSES = """
import os, time

def which(completions, **_):
    return [float(os.getpid()) for _ in completions]

def slow(completions, **_):
    time.sleep(0.3)
    return [float(i) for i, _ in enumerate(completions)]
"""


@pytest.mark.config_key("reward_workers")
def test_rewards_are_computed_by_the_asked_number_of_processes(ran: Ran, rewards: Any) -> None:
    """Two groups are two calls, and a free worker is never left idle while one waits."""
    rewards(PROCESSES)
    for number in (1, 2):
        run = ran(reward_workers=number, reward_funcs=["r.py:which"], heldout_fraction=0.0, eval_metric="none")
        assert len({r["reward"] for r in run.rollouts(1)}) == number


KEYED = """
import os
def keyed(completions, **_):
    return [float(len(os.environ.get("JUDGE_API_KEY", ""))) for _ in completions]
"""


@pytest.mark.config_key("pass_env")
def test_a_reward_sees_the_variables_that_are_named_and_no_others(
    ran: Ran, rewards: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "a-key-of-15-abc")
    rewards(KEYED)
    keys = dict(reward_funcs=["r.py:keyed"], heldout_fraction=0.0, eval_metric="none")
    assert {r["reward"] for r in ran(**keys).rollouts(1)} == {0.0}
    assert {r["reward"] for r in ran(**keys, pass_env=["JUDGE_API_KEY"]).rollouts(1)} == {15.0}
    monkeypatch.delenv("JUDGE_API_KEY")
    with pytest.raises(ConfigError, match="pass_env names JUDGE_API_KEY, which is not set"):
        ran(**keys, pass_env=["JUDGE_API_KEY"])


@pytest.mark.config_key("reward_timeout_s")
def test_a_reward_that_takes_longer_than_allowed_is_no_verdict(ran: Ran, rewards: Any) -> None:
    rewards(PROCESSES)
    keys = dict(reward_funcs=["r.py:slow"], heldout_fraction=0.0, eval_metric="none", num_generations=2)
    assert {r["reward"] for r in ran(**keys, reward_timeout_s=120.0).rollouts(1)} == {0.0, 1.0}
    with pytest.raises(RewardError, match=r"4 of 4 rollouts in step 1 got no verdict \(slow:timeout\)"):
        ran(**keys, reward_timeout_s=0.05)


@pytest.mark.config_key("preflight_tasks")
def test_the_preflight_refuses_a_constant_reward_and_can_be_turned_off(ran: Ran, rewards: Any) -> None:
    rewards("def f(completions, **_):\n    return [0.5 for _ in completions]\n")
    keys = dict(reward_funcs=["r.py:f"], heldout_fraction=0.0, num_generations=2)
    with pytest.raises(RewardError, match=r"all 6 baseline completions on 3 tasks got reward 0\.5"):
        ran(**keys, preflight_tasks=3)
    unseen = ran(**keys, preflight_tasks=0)
    assert (unseen.verdict["status"], unseen.exit_code) == ("FAIL", 1), "no look ahead, and the same judge at the end"
    assert (
        unseen.verdict["reasons"][0]
        == "nothing was learned: all rewards were equal, in none of 2 groups did they differ"
    )


@pytest.mark.config_key("eval_metric")
def test_a_run_with_a_metric_of_its_own_can_be_evaluated_again(ran: Ran, rewards: Any) -> None:
    """The run folder lies elsewhere than the file that the config named, so the path must have been kept whole."""
    from surefoot.report.view import PlainView
    from surefoot.run.evaluate import evaluate

    rewards("def half(completions, **_):\n    return [0.5 for _ in completions]\n")
    run = ran(eval_metric="r.py:half")
    assert {row["eval_accuracy"] for row in run.metrics if "eval_n" in row} == {0.5}
    assert evaluate(run.root, None, PlainView(0))["eval_accuracy"] == 0.5


# -- one step of the loop -----------------------------------------------------------------------------


def run_of(configure: Any, learner: Any = None, **keys: Any) -> Run:
    """A run that can prepare and learn, and nothing else."""
    nobody: Any = None
    codec: Any = SimpleNamespace(vocab_size=61, stop_ids=frozenset({2}))
    hooks: Any = SimpleNamespace(step_refused=lambda step, samples, suspects: None, phase=lambda name: nullcontext())
    config = configure(**keys).config
    return Run(
        config=config, runtime=nobody, learner=learner, codec=codec, queue=nobody, heldout=(), hooks=hooks
    )  # fmt: skip


@pytest.mark.config_key("scale_rewards")
def test_rewards_are_scaled_as_asked(configure: Any, make_group: Any) -> None:
    """Groups of different spread, and a reward off the middle: no two ways of scaling agree on them."""
    groups = [make_group("a", [1.0, 0.0, 0.2, 0.9]), make_group("b", [10.0, 0.0, 0.0, 0.0])]
    ways = ("group", "batch", "rank", "none")
    advantages = {
        way: [round(s.advantage, 6) for s in prepare(run_of(configure, scale_rewards=way), groups)] for way in ways
    }
    assert len(set(map(tuple, advantages.values()))) == len(ways)
    assert advantages["none"][0] == pytest.approx(1.0 - 2.1 / 4)


@pytest.mark.config_key("partial_groups")
def test_a_group_that_lost_a_sibling_is_treated_as_asked(configure: Any, make_group: Any) -> None:
    groups = [make_group("a", [1.0, None, 0.0, 0.5]), make_group("b", [1.0, 0.0, 0.0, 0.0])]

    def kept(policy: str) -> Sequence[str]:
        return [s.item_id for s in prepare(run_of(configure, partial_groups=policy), groups)]

    assert kept("drop") == ["b"] * 4
    assert kept("train") == ["a"] * 3 + ["b"] * 4
    with pytest.raises(PartialGroupError):
        kept("refuse")


@pytest.mark.config_key("max_nonfinite_steps")
@pytest.mark.parametrize("allowed", [1, 4])
def test_so_many_refused_steps_in_a_row_end_the_run(allowed: int, configure: Any) -> None:
    learner = SimpleNamespace(learn=lambda samples, iteration: StepReport({}, 0, applied=False), facts=LearnerFacts())
    run = run_of(configure, learner, max_nonfinite_steps=allowed)
    for _ in range(allowed - 1):
        assert learn(run, [], 0)["steps_refused"] == 1.0
    with pytest.raises(NumericsError, match=f"{allowed} steps in a row"):
        learn(run, [], 0)
