"""Reward from facts about calls: the same outcome earns the same, and no text changes it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.errors import RewardError
from surefoot.rewards.functions import WEIGHTS, component_reward, components, weighs_environment_reward


def said(text: str = "x") -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def tool(name: str = "search", outcome: str = "ok", text: str = "found") -> dict[str, Any]:
    return {"role": "tool", "name": name, "content": text, "outcome": outcome}


def exact(completions: list[Any], answer: list[str], **_: Any) -> list[float | None]:
    return [
        None if gold is None else float(talk[-1]["content"] == gold)
        for talk, gold in zip(completions, answer, strict=True)
    ]


REWARD = component_reward(exact)


def total(talk: list[dict[str, Any]], tools: list[str] | None = None, answer: str | None = "42") -> float | None:
    extra = {} if tools is None else {"extra_info": [{"tools": tools}]}
    return REWARD(prompts=["?"], completions=[talk], answer=[answer], **extra)[0]


def test_a_perfect_rollout_earns_everything_and_an_idle_one_little() -> None:
    assert total([said(), tool(), said("42")], ["search"]) == pytest.approx(1.0)
    idle = [[], [said("")], [said(" \n")], [tool("open"), said("")]]
    assert [total(talk, ["search"], answer="42") for talk in idle[1:]] == [0.0, 0.0, 0.0]
    assert components(idle[0], solved=0.0) == dict.fromkeys(WEIGHTS, 0.0)
    for tools in (["search"], None):
        assert total([said("43")], tools) == pytest.approx(0.05), "a wrong answer, and no call"
        assert total([said(), tool("open"), tool("open"), said("43")], tools) == pytest.approx(0.05), "pointless calls"
    assert total([said(), tool(), said("43")], ["search"]) == pytest.approx(0.1), "an expected call is some progress"
    assert sum(WEIGHTS.values()) == pytest.approx(1.0)


def test_the_same_calls_spread_over_more_turns_earn_the_same() -> None:
    short = [said(), tool(), tool("open"), tool("open"), said("42")]
    long = [said(), tool(), said(), said(), tool("open"), said(), said(), tool("open"), said(), said("42")]
    assert total(short, ["search", "open"]) == total(long, ["search", "open"])


@given(st.text(max_size=200), st.text(max_size=200))
def test_no_wording_changes_the_reward(thought: str, found: str) -> None:
    plain = [said(), tool(), said("42")]
    stuffed = [said(thought), tool(text=found), said("42")]
    assert total(plain, ["search"]) == total(stuffed, ["search"])


@given(
    st.lists(st.sampled_from([said(), tool(), tool(outcome="error"), tool(outcome="refused"), tool("open")]), max_size=12),
    st.floats(0, 1), st.lists(st.sampled_from(["search", "open"]), max_size=2, unique=True),
)  # fmt: skip
def test_every_part_lies_between_0_and_1(talk: list[dict[str, Any]], solved: float, expected: list[str]) -> None:
    parts = components(talk, solved=solved, expected=expected)
    assert set(parts) == set(WEIGHTS)
    assert all(0.0 <= value <= 1.0 for value in parts.values())


def test_waste_errors_and_open_ends_cost() -> None:
    good = components([said(), tool(), said("42")], solved=1.0, expected=["search"])
    wasted = components([said(), *[tool()] * 4, said("42")], solved=1.0, expected=["search"])
    stuck = components([said(), tool(outcome="error")], solved=0.0, expected=["search"])
    mended = components([said(), tool(outcome="error"), said(), tool(), said("42")], solved=1.0, expected=["search"])
    assert wasted["efficiency"] < good["efficiency"]
    assert (stuck["recovery"], stuck["response"], stuck["progress"]) == (0.0, 0.0, 0.0)
    assert (mended["recovery"], mended["progress"]) == (1.0, 1.0)


def test_a_task_that_nobody_could_judge_has_no_reward() -> None:
    assert total([said("42")], answer=None) is None


@pytest.mark.parametrize("weights", [{}, {"charm": 1.0}, {"completion": -0.1}, {"completion": 0.9, "state": 0.2}])
def test_weights_that_make_no_sense_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(RewardError, match="component weights"):
        component_reward(exact, weights)


def test_the_state_is_what_the_world_says_and_the_metric_where_it_says_nothing() -> None:
    def reward(**columns: Any) -> float | None:
        return REWARD(prompts=["?"], completions=[[said("43")]], answer=["42"], **columns)[0]

    assert reward() == reward(environment_reward=[None]) == pytest.approx(0.05)
    assert reward(environment_reward=[1.0]) == pytest.approx(0.15)
    solved = component_reward(exact, {"state": 1.0})
    assert solved(prompts=["?"], completions=[[said("42")]], answer=["42"], environment_reward=[0.25]) == [0.25]


def test_the_metric_gets_what_it_names() -> None:
    def strict(completions: list[Any], answer: list[str]) -> list[float | None]:
        return [float(talk[-1]["content"] == gold) for talk, gold in zip(completions, answer, strict=True)]

    reward = component_reward(strict)
    assert reward(prompts=["?"], completions=[[said("42")]], answer=["42"], kind=["times"])[0] == pytest.approx(1.0)
    assert reward.__name__ == "components"
    assert weighs_environment_reward({"components": reward}, {"components": 1.0})
    assert not weighs_environment_reward({"components": reward}, {"components": 0.0})
    assert not weighs_environment_reward({"c": component_reward(exact, {"completion": 1.0})}, {"c": 1.0})


def test_the_parts_that_a_config_may_weigh_are_these() -> None:
    from typing import get_args

    from surefoot.config import Component

    assert get_args(Component) == tuple(WEIGHTS)
