"""Too many rollouts have no verdict: whose doing it is, and what to do about it.

Owns       the families of reasons: a grader's (`function:reason`), the sampler's, the context's, and the tools' own.
Promises   a dead tool server is a `ToolError` with what it did, and never sends anybody to the reward function; where
           tools and graders both failed, the error is of the side with more failures, and names the remedy of each.
Never      decides how many are too many: `judging.py` does.

Read next: `judging.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from surefoot.errors import RewardError, ToolError
from surefoot.records import REPETITION, Rollout
from surefoot.runtime.answers import NONFINITE_LOGPROB, UNDECODABLE

NO_ROOM, NO_VERDICT = "no_room", "no_verdict"
_REMEDIES = {
    UNDECODABLE: "use a model whose rows all have a token",
    NONFINITE_LOGPROB: "look at the model: its sampler gave numbers that are no log-probabilities",
    NO_ROOM: "use shorter prompts, or a model with a longer context",
    REPETITION: 'look at a turn that repeats itself; repetition = "penalise" judges it all the same',
}
"""By failure: what to do about those that no grader and no tool is to blame for."""
_GRADER = "mend the reward function"
_TOOLS = "mend the tools: what they did is above, and a server's last words are in RUN/logs"


def from_tools(failure: str | None) -> bool:
    """Whether tools, their server or their world are the reason: it is one word, and none of the sampler's.

    Example:
        >>> from_tools("tool_crashed"), from_tools("score:raised"), from_tools("undecodable_token")
        (True, False, False)
    """
    return failure is not None and ":" not in failure and failure not in (*_REMEDIES, NO_VERDICT)


def too_many_failures(
    rollouts: Sequence[Rollout], when: str, allowed: float, detail: str
) -> RewardError | ToolError:  # fmt: skip
    """The error for a set of rollouts of which too many have no verdict.

    Args:
        allowed: the share that may fail.
        detail: lines about what failed, as `Environment.explain_failures` gives them.
    """
    kinds = Counter(r.failure or NO_VERDICT for r in rollouts if r.reward is None and r.failure != REPETITION)
    failed, tools = kinds.total(), sum(count for kind, count in kinds.items() if from_tools(kind))
    what = (
        f"{failed} of {len(rollouts)} rollouts in {when} got no verdict ({', '.join(sorted(kinds))}); "
        f"max_reward_failures allows {allowed:g}{detail}"
    )
    fix = f"{'; '.join(_remedies(kinds))}, or raise max_reward_failures (a share)"
    if 2 * tools >= failed:
        why = (
            "a tool that failed under a rollout says nothing about the model; training on zeros would be silent damage"
        )
        return ToolError(what, why, fix)
    why = "a failed grader is not a wrong answer; training on zeros instead would be silent damage"
    return RewardError(what, why, fix)


def nobody_judged(rollouts: Sequence[Rollout], what: str, why: str, fix: str, detail: str) -> RewardError | ToolError:
    """The error for rollouts of which not one has a verdict.

    Args:
        fix: what else may be done, beside mending who failed.
    """
    kinds = Counter(r.failure or NO_VERDICT for r in rollouts)
    tools = sum(count for kind, count in kinds.items() if from_tools(kind))
    kind = ToolError if 2 * tools >= len(rollouts) else RewardError
    return kind(
        f"{what} ({', '.join(sorted(kinds))}){detail}", why, "; ".join([*_remedies(kinds), *filter(None, [fix])])
    )


def _remedies(kinds: Counter[str]) -> list[str]:
    """One for each family that failed, the most frequent first."""
    told = (_TOOLS if from_tools(kind) else _REMEDIES.get(kind, _GRADER) for kind, _ in kinds.most_common())
    return list(dict.fromkeys(told))
