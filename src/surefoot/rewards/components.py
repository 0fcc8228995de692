"""One reward from several facts about a rollout with tools: solved, efficient, recovered, and so on.

Owns       the parts, their weights and their sum in [0, 1].
Promises   the same outcome earns the same, in two turns or in eight; every part is a fact about calls and outcomes, so
           no wording, length or number of words changes it; how something was done counts as far as it was solved, so
           with the default weights doing nothing earns 0 and a wrong answer 0.05, with any pointless calls; a task
           that nobody could judge has no reward.

    completion .40  the task is solved                     response .05  it ended with an answer
    reasoning  .15  share of calls that could be made *    recovery .10  an error was followed by a call that worked *
    efficiency .15  no more calls than the task needs *    state    .10  the world's own reward, or solved
    progress   .05  share of the expected tools that worked        * times how far it is solved

Read next: `rewards/verifiers/multi.py`, which says whether a task is solved.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.errors import RewardError

WEIGHTS: Mapping[str, float] = {
    "completion": 0.4, "reasoning": 0.15, "efficiency": 0.15, "recovery": 0.1, "progress": 0.05, "state": 0.1,
    "response": 0.05,
}  # fmt: skip
ENVIRONMENT_REWARD = "environment_reward"
"""The argument by which reward functions are told what each rollout's own world says of it."""
Verify = Callable[..., Sequence[float | None]]
Talk = Sequence[Mapping[str, Any]]
"""A completion with tools: messages of the roles assistant and tool; a tool message has a name and an outcome."""


def components(
    talk: Talk, *, solved: float, expected: Sequence[str] = (), environment_reward: float | None = None
) -> dict[str, float]:
    """Every part of one rollout, each in [0, 1].

    Args:
        solved: the task metric.
        expected: tools that the task needs; empty when it does not say.
        world: what the rollout's own world says; None when it has no opinion.
    """
    calls = [(str(m.get("name") or ""), str(m.get("outcome", "ok"))) for m in talk if m.get("role") == "tool"]
    made = [outcome for _, outcome in calls if outcome != "refused"]
    worked = [name for name, outcome in calls if outcome == "ok"]
    need = len(expected) if expected else min(1, len(calls))
    right = _within(solved)
    return {
        "completion": right,
        "reasoning": right * (len(made) / len(calls) if calls else 1.0),
        "efficiency": right * (1.0 if len(calls) <= need else max(0.0, 1.0 - (len(calls) - need) / (need + 4))),
        "recovery": right * _recovered([outcome for _, outcome in calls]),
        "progress": sum(name in worked for name in expected) / len(expected) if expected else right,
        "state": _within(solved if environment_reward is None else environment_reward),
        "response": float(_answered(talk)),
    }


@dataclass(frozen=True)
class ComponentReward:
    """A reward function in TRL's form: the weighted sum of the parts. Made by `component_reward`."""

    verify: Verify
    weights: Mapping[str, float]
    __name__ = "components"

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """(G,) a number in [0, 1] each, or None where nobody could say whether the task is solved."""
        solved = self.verify(**_taken(self.verify, {"prompts": prompts, "completions": completions, **columns}))
        expected = [expected_tools(info) for info in columns.get("extra_info", [None] * len(completions))]
        environment_rewards = columns.get(ENVIRONMENT_REWARD, [None] * len(completions))
        return [
            None if right is None else self._total(_talk(said), right, tools, environment_reward)
            for said, right, tools, environment_reward in zip(
                completions, solved, expected, environment_rewards, strict=True
            )
        ]

    def _total(self, talk: Talk, solved: float, expected: Sequence[str], environment_reward: float | None) -> float:
        parts = components(talk, solved=solved, expected=expected, environment_reward=environment_reward)
        return _within(sum(weight * parts[name] for name, weight in self.weights.items()))


def component_reward(verify: Verify, weights: Mapping[str, float] = WEIGHTS) -> ComponentReward:
    """The weighted sum of the parts as a reward function, given who says whether a task is solved.

    Args:
        verify: a reward function that says so, such as `verifiers.verifier_reward` or `grading.exact_answer`.
        weights: of the parts that count; those that are left out count for nothing.
    """
    if set(weights) - set(WEIGHTS) or not weights or min(weights.values()) < 0 or sum(weights.values()) > 1 + 1e-9:
        raise RewardError(
            f"component weights are {dict(weights)}",
            f"they are for {', '.join(WEIGHTS)}, none negative, and add up to 1 at most",
            "correct them",
        )
    return ComponentReward(verify, dict(weights))


def weighs_environment_reward(functions: Mapping[str, Any], weights: Mapping[str, float]) -> bool:
    """Whether a function that counts has the world's own reward among its parts: it is then not added once more."""
    counting = [functions.get(name) for name, weight in weights.items() if weight]
    return any(isinstance(each, ComponentReward) and each.weights.get("state", 0.0) > 0 for each in counting)


def expected_tools(extra_info: Any) -> Sequence[str]:
    """Tools that a task needs, by its column `extra_info`; empty when it does not say."""
    named = extra_info.get("tools") if isinstance(extra_info, Mapping) else None
    return [name for name in named if isinstance(name, str)] if isinstance(named, list | tuple) else []


def _taken(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments that the function takes: all, unless it names what it wants."""
    parameters = inspect.signature(function).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return given
    return {each.name: given[each.name] for each in parameters if each.name in given}


def _talk(completion: Any) -> Talk:
    return [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion


def _answered(talk: Talk) -> bool:
    """Whether the last word is the policy's, and not empty."""
    return bool(talk) and talk[-1].get("role") == "assistant" and bool(str(talk[-1].get("content") or "").strip())


def _recovered(outcomes: Sequence[str]) -> float:
    """1 when nothing went wrong, or something worked after the last thing that did."""
    wrong = [place for place, outcome in enumerate(outcomes) if outcome != "ok"]
    return float(not wrong or "ok" in outcomes[wrong[-1] + 1 :])


def _within(value: float) -> float:
    return min(1.0, max(0.0, float(value)))
