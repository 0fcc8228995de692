"""Keys that shape what is asked, by whom it is answered, and how it is graded: config in, moving parts out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.data.tasks import TaskStream
from surefoot.engines.embedded import EmbeddedEngine
from surefoot.errors import ConfigError, RewardError
from surefoot.records import Group
from surefoot.run.inputs import read_inputs

Build = Callable[..., Any]
OWN = [{"id": f"t{i}", "prompt": f"{10 + i}+{'1' * (1 + i % 3)}=", "answer": "7"} for i in range(60)]
"""Own tasks with prompts of three lengths."""


@pytest.fixture
def own_tasks(tmp_path: Path) -> str:
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in OWN))
    return "own.jsonl"


def collected(parts: Any, tasks: int = 2) -> list[Group]:
    groups: list[Group] = parts.runtime.collect(list(parts.train[:tasks]), 1)
    return groups


def tokens(groups: list[Group]) -> list[tuple[int, ...]]:
    return [turn.completion_ids for group in groups for rollout in group.rollouts for turn in rollout.turns]


# -- which tasks ------------------------------------------------------------------------------


@pytest.mark.config_key("num_tasks")
def test_a_generator_makes_as_many_tasks_as_asked(configure: Any) -> None:
    for number in (150, 300):
        loaded = configure(num_tasks=number, heldout_fraction=0.0)
        assert len(read_inputs(loaded.config, loaded.base).train) == number


@pytest.mark.config_key("tasks")
def test_the_named_tasks_are_the_ones_that_are_asked(configure: Any, own_tasks: str, rewards: Any) -> None:
    rewards("def f(completions, **_):\n    return [0.0 for _ in completions]\n")
    loaded = configure(tasks=own_tasks, reward_funcs=["r.py:f"])
    inputs = read_inputs(loaded.config, loaded.base)
    assert {t.id for t in (*inputs.train, *inputs.heldout)} == {row["id"] for row in OWN}


@pytest.mark.config_key("tasks")
def test_generated_tasks_are_scored_by_the_package_that_made_them(assembled: Build) -> None:
    pytest.importorskip("reasoning_gym", reason="the tasks extra is not installed")
    groups = collected(assembled(tasks="reasoning_gym:chain_sum", num_tasks=60))
    assert all(rollout.reward is not None for group in groups for rollout in group.rollouts)


@pytest.mark.config_key("heldout_fraction", "eval_tasks")
def test_a_larger_share_holds_more_out_and_eval_tasks_caps_how_many_are_asked(configure: Any) -> None:
    def sizes(**keys: Any) -> tuple[int, int]:
        loaded = configure(**keys)
        inputs = read_inputs(loaded.config, loaded.base)
        return len(inputs.train), len(inputs.heldout)

    none, some, more = (sizes(heldout_fraction=share, eval_tasks=200) for share in (0.0, 0.1, 0.5))
    assert none == (200, 0)
    assert sum(some) == sum(more) == 200
    assert 0 < some[1] < more[1]
    assert sizes(heldout_fraction=0.5, eval_tasks=5) == (more[0], 5)


@pytest.mark.config_key("seed")
def test_the_seed_decides_the_tasks_their_order_and_the_draws(assembled: Build, configure: Any) -> None:
    def order(seed: int) -> list[str]:
        loaded = configure(seed=seed)
        inputs = read_inputs(loaded.config, loaded.base)
        return [task.id for task in TaskStream(inputs.train, loaded.config.seed).take(10)]

    assert order(0) == order(0) != order(1)
    first, again, other = (tokens(collected(assembled(seed=s, tasks_per_step=1))) for s in (0, 0, 1))
    assert first == again != other


@pytest.mark.config_key("system_prompt")
def test_the_system_prompt_is_what_the_model_reads_first(assembled: Build) -> None:
    plain, told = assembled(), assembled(system_prompt="12")
    task = plain.train[0].id
    before, after = (parts.runtime.collector.prompts[task] for parts in (plain, told))
    assert len(after) > len(before)
    assert collected(told)[0].rollouts[0].turns[0].prompt_ids == after


@pytest.mark.config_key("max_prompt_length")
def test_tasks_with_longer_prompts_are_left_out_and_counted(assembled: Build, own_tasks: str, rewards: Any) -> None:
    rewards("def f(completions, **_):\n    return [0.0 for _ in completions]\n")
    keys = dict(tasks=own_tasks, reward_funcs=["r.py:f"], eval_tasks=60)
    everything = assembled(**keys)
    lengths = sorted({len(ids) for ids in everything.runtime.collector.prompts.values()})
    assert len(lengths) == 3
    short = assembled(**keys, max_prompt_length=lengths[0])
    assert everything.left_out == 0
    assert short.left_out == 40
    assert len(short.train) + len(short.heldout) == 20


# -- who answers, and how -----------------------------------------------------------------------


@pytest.mark.config_key("model", "dtype")
def test_the_named_model_is_loaded_in_the_asked_precision(assembled: Build, tmp_path: Path) -> None:
    shipped = assembled()
    shipped.policy.model.model.norm.weight.data.fill_(2.0)  # what nobody shipped
    shipped.policy.model.save_pretrained(tmp_path / "mine")
    shipped.policy.tokenizer.save_pretrained(tmp_path / "mine")
    # Only loaded: on some virtual machines a CPU that claims to know bfloat16 products dies of them.
    mine, again = assembled(published=False, model="mine", dtype="bfloat16"), assembled()
    assert (
        set(mine.policy.model.model.norm.weight.tolist()) == {2.0} != set(again.policy.model.model.norm.weight.tolist())
    )
    for parts, dtype in ((mine, torch.bfloat16), (again, torch.float32)):
        assert {p.dtype for p in parts.policy.model.parameters()} == {dtype}
        assert parts.runtime.engine.engine.decoder.cache.dtype == dtype, "engine and learner compute in the same"


@pytest.mark.config_key("device")
def test_the_policy_lives_where_it_was_told_and_nowhere_else(assembled: Build) -> None:
    assert assembled(device="cpu").learner.device.type == "cpu"
    absent = "mps" if not torch.backends.mps.is_available() else "cuda"
    with pytest.raises(ConfigError, match=f"device = {absent} is not present"):
        assembled(device=absent)


@pytest.mark.config_key("threads")
def test_torch_computes_with_the_asked_number_of_threads(assembled: Build) -> None:
    for number in (1, 2):
        assembled(threads=number)
        assert torch.get_num_threads() == number


@pytest.mark.config_key("engine.kind", "engine.rows")
def test_the_engine_is_the_named_kind_with_the_named_number_of_rows(assembled: Build, configure: Any) -> None:
    few, many = assembled(engine__kind="embedded", engine__rows=1), assembled(engine__rows=40)
    assert isinstance(few.runtime.engine.engine, EmbeddedEngine)
    assert (few.runtime.engine.engine.rows, many.runtime.engine.engine.rows) == (8, 40)
    with pytest.raises(ConfigError, match=r"engine\.kind"):
        configure(engine__kind="sglang")


@pytest.mark.config_key("tasks_per_step", "num_generations")
def test_without_rows_the_engine_seats_one_step(assembled: Build) -> None:
    small, large = assembled(), assembled(tasks_per_step=6, num_generations=8)
    assert (small.runtime.engine.engine.rows, large.runtime.engine.engine.rows) == (8, 48)


@pytest.mark.config_key("num_generations")
def test_every_group_has_the_asked_number_of_siblings(assembled: Build) -> None:
    assert [[len(g.rollouts) for g in collected(assembled(num_generations=n))] for n in (2, 5)] == [[2, 2], [5, 5]]


@pytest.mark.config_key("max_completion_length")
def test_no_completion_is_longer_than_asked_and_some_are_cut(assembled: Build) -> None:
    short, long = (tokens(collected(assembled(max_completion_length=n), 6)) for n in (2, 8))
    assert max(map(len, short)) == 2
    assert 2 < max(map(len, long)) <= 8


@pytest.mark.config_key("temperature")
def test_a_cold_policy_says_what_is_likely(assembled: Build) -> None:
    cold, hot = (collected(assembled(temperature=t), 4) for t in (0.05, 3.0))
    assert max(len(set(tokens([group]))) for group in cold) <= 2
    assert min(len(set(tokens([group]))) for group in hot) > 2


@pytest.mark.config_key("num_generations_eval", "eval_temperature")
def test_evaluation_has_its_own_count_and_temperature(assembled: Build) -> None:
    def answers(**keys: Any) -> list[list[tuple[int, ...]]]:
        parts = assembled(**keys)
        played = parts.runtime.collector.run_rollouts(parts.heldout, parts.runtime.evaluation, purpose="eval", step=0)
        return [tokens([p.group]) for p in played]

    assert {len(group) for group in answers()} == {1}
    warm, greedy = answers(num_generations_eval=6), answers(num_generations_eval=6, eval_temperature=0.0)
    assert {len(group) for group in warm + greedy} == {6}
    assert all(len(set(group)) == 1 for group in greedy)
    assert any(len(set(group)) > 1 for group in warm), "left out, the training temperature holds"
    trained = tokens(collected(assembled(num_generations_eval=6, eval_temperature=0.0)))
    assert len(set(trained)) > 2, "training goes on at its own"


# -- what counts as right -----------------------------------------------------------------------

TWO_REWARDS = """
def length(completions, **_):
    return [float(len(text)) for text in completions]

def one(completions, **_):
    return [1.0 for _ in completions]

def only_short(completions, **_):
    return [1.0 if len(text) < 3 else None for text in completions]
"""


@pytest.mark.config_key("reward_funcs", "reward_weights")
def test_the_reward_is_the_weighed_sum_of_the_named_functions(assembled: Build, rewards: Any) -> None:
    rewards(TWO_REWARDS)

    def first(**keys: Any) -> list[tuple[str, float | None]]:
        return [(r.text, r.reward) for g in collected(assembled(**keys)) for r in g.rollouts]

    assert all(reward in (0.0, 1.0) for _, reward in first()), "the tasks' own scorer"
    assert all(reward == len(text) for text, reward in first(reward_funcs=["r.py:length"]))
    both = dict(reward_funcs=["r.py:length", "r.py:one"])
    assert all(reward == len(text) + 1 for text, reward in first(**both))
    assert all(reward == 0.5 * len(text) - 2 for text, reward in first(**both, reward_weights=[0.5, -2.0]))


@pytest.mark.config_key("max_reward_failures")
def test_the_allowed_share_of_failures_decides_whether_a_step_is_refused(assembled: Build, rewards: Any) -> None:
    rewards(TWO_REWARDS)
    keys = dict(reward_funcs=["r.py:only_short"], max_completion_length=8)
    with pytest.raises(RewardError, match="max_reward_failures allows 0"):
        collected(assembled(**keys), 6)
    marks = {r.reward for g in collected(assembled(**keys, max_reward_failures=1.0), 6) for r in g.rollouts}
    assert None in marks
    assert 0.0 not in marks


@pytest.mark.config_key("eval_metric")
def test_the_metric_says_what_solved_means_apart_from_the_reward(assembled: Build, rewards: Any) -> None:
    rewards("def never(completions, **_):\n    return [0.0 for _ in completions]\n" + TWO_REWARDS)

    def accuracy(metric: str) -> tuple[float | None, float]:
        parts = assembled(eval_metric=metric, reward_funcs=["r.py:one"], eval_tasks=30, num_tasks=400)
        result = parts.runtime.evaluate(parts.heldout, 0)
        assert result.reward == 1.0
        return result.accuracy, result.n

    assert accuracy("none")[0] is None
    assert accuracy("r.py:never")[0] == 0.0
    assert accuracy("r.py:one")[0] == 1.0
    assert accuracy("auto") == accuracy("exact")
    assert 0.0 < (accuracy("exact")[0] or 0.0) < 1.0
