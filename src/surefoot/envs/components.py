"""One reward from several facts about a rollout with tools: solved, efficient, recovered, and so on.

Owns       the parts, their weights and their sum in [0, 1].
Promises   the same outcome earns the same, in two turns or in eight; every part is a fact about calls and outcomes, so
           no wording, length or number of words changes it; a task that nobody could judge has no reward.

    completion .40  the task is solved                     response .05  it ended with an answer
    reasoning  .15  share of calls that could be made      recovery .10  an error was followed by a call that worked
    efficiency .15  no more calls than the task needs      state    .10  the world's own reward, or solved
    progress   .05  share of the expected tools that were used

Read next: `verifiers.py`, which says whether a task is solved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from surefoot.errors import RewardError

WEIGHTS: Mapping[str, float] = {
    "completion": 0.4, "reasoning": 0.15, "efficiency": 0.15, "recovery": 0.1, "progress": 0.05, "state": 0.1,
    "response": 0.05,
}  # fmt: skip
Talk = Sequence[Mapping[str, Any]]
"""A completion with tools: messages of the roles assistant and tool; a tool message has a name and an outcome."""


def components(
    talk: Talk, *, solved: float, expected: Sequence[str] = (), world: float | None = None
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
    return {
        "completion": _within(solved),
        "reasoning": len(made) / len(calls) if calls else _within(solved),
        "efficiency": 1.0 if len(calls) <= need else max(0.0, 1.0 - (len(calls) - need) / (need + 4)),
        "recovery": _recovered([outcome for _, outcome in calls]),
        "progress": sum(name in worked for name in expected) / len(expected) if expected else _within(solved),
        "state": _within(solved if world is None else world),
        "response": float(bool(talk) and talk[-1].get("role") == "assistant"),
    }


def component_reward(
    verify: Callable[..., Sequence[float | None]], weights: Mapping[str, float] = WEIGHTS
) -> Callable[..., list[float | None]]:
    """A reward function in TRL's form: the weighted sum, given who says whether a task is solved.

    Args:
        verify: a reward function that says so, such as `verifiers.verifier_reward` or `grading.exact_answer`.
    """
    if set(weights) - set(WEIGHTS) or not weights or min(weights.values()) < 0 or sum(weights.values()) > 1 + 1e-9:
        raise RewardError(
            f"component weights are {dict(weights)}",
            f"they are for {', '.join(WEIGHTS)}, none negative, and add up to 1 at most",
            "correct them",
        )

    def reward(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        solved = verify(prompts=prompts, completions=completions, **columns)
        expected = [(info or {}).get("tools", ()) for info in columns.get("extra_info", [None] * len(completions))]
        return [
            None if right is None else _total(components(talk, solved=right, expected=tools), weights)
            for talk, right, tools in zip(completions, solved, expected, strict=True)
        ]

    return reward


def _total(parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
    return _within(sum(weight * parts[name] for name, weight in weights.items()))


def _recovered(outcomes: Sequence[str]) -> float:
    """1 when nothing went wrong, or something worked after the last thing that did."""
    wrong = [place for place, outcome in enumerate(outcomes) if outcome != "ok"]
    return float(not wrong or "ok" in outcomes[wrong[-1] + 1 :])


def _within(value: float) -> float:
    return min(1.0, max(0.0, float(value)))
