"""What one step's groups look like in numbers: rewards, lengths, failures. Undefined is left out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from surefoot.records import LENGTH, REPETITION, REPETITION_COST, STOP, Group, Rollout


def batch_metrics(groups: Sequence[Group], words: Mapping[str, str], *, loops: bool) -> dict[str, float]:
    """Everything that is logged of one step's groups, as a whole and by data set.

    Args:
        words: data set -> its word in metrics; empty when all tasks belong to one.
        loops: whether this run looks for rollouts that repeat themselves.
    """
    return group_metrics(groups) | dataset_metrics(groups, words) | (looping_share(groups) if loops else {})


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of everything that was collected, before anything is filtered."""
    rollouts = [r for g in groups for r in g.rollouts if r.turns]
    metrics = _lengths(rollouts)
    metrics |= _rewards(groups)
    failures = Counter(r.failure for g in groups for r in g.rollouts if r.failure is not None)
    metrics |= {f"failures/{reason}": float(count) for reason, count in failures.items()}
    metrics |= _tools(rollouts) | _grading(groups)
    metrics["num_tokens"] = float(sum(r.sampled_tokens for r in rollouts))
    metrics["groups/mixed_version"] = float(sum(any(t.mixed for t in r.turns) for r in rollouts))
    return metrics


def looping_share(groups: Sequence[Group]) -> dict[str, float]:
    """Share of the rollouts that go round in circles; for runs that look for it."""
    rollouts = [r for g in groups for r in g.rollouts if r.turns]
    marked = [r.failure == REPETITION or REPETITION_COST in r.reward_parts for r in rollouts]
    return {"completions/looping_share": _mean(marked)} if marked else {}


def dataset_metrics(groups: Sequence[Group], words: Mapping[str, str]) -> dict[str, float]:
    """The same for each data set of a mixture that has groups in this step.

    Args:
        words: data set -> its word in metrics; others are left out.
    """
    metrics: dict[str, float] = {}
    for name, word in words.items():
        own = [group for group in groups if group.task.dataset == name]
        found = _rewards(own) | _lengths([r for g in own for r in g.rollouts if r.turns])
        metrics |= {f"datasets/{word}/{short}": found[full] for full, short in _BY_DATASET.items() if full in found}
    return metrics


_BY_DATASET = {
    "reward": "reward", "frac_reward_zero_std": "frac_reward_zero_std", "completions/mean_length": "mean_length",
    "completions/clipped_ratio": "clipped_ratio",
}  # fmt: skip


def _grading(groups: Sequence[Group]) -> dict[str, float]:
    """How long judging one group took, function by function; siblings share their calls."""
    spent: dict[str, list[float]] = {}
    for group in groups:
        for name in sorted({name for r in group.rollouts for name in r.grading_seconds}):
            spent.setdefault(name, []).append(max(r.grading_seconds.get(name, 0.0) for r in group.rollouts))
    metrics = {f"timing/reward/{name}/mean": _mean(seconds) for name, seconds in spent.items()}
    return metrics | {f"timing/reward/{name}/max": max(seconds) for name, seconds in spent.items()}


def _rewards(groups: Sequence[Group]) -> dict[str, float]:
    scored = [[r for r in g.rewards if r is not None] for g in groups]
    scored = [rewards for rewards in scored if rewards]
    if not scored:
        return {}
    every = [r for rewards in scored for r in rewards]
    best, worst = max(every), min(every)
    constant = [rewards[0] for rewards in scored if len(set(rewards)) == 1]
    metrics = {
        "reward": _mean(every),
        "reward_std": _mean([_std(rewards) for rewards in scored]),
        "frac_reward_zero_std": len(constant) / len(scored),
        "groups/scored": float(len(scored)),
    }
    if best != worst:  # with one value for everybody, nobody can say whether it means right or wrong
        metrics["groups/all_correct"] = float(sum(c == best for c in constant))
        metrics["groups/all_wrong"] = float(sum(c == worst for c in constant))
    for name in sorted({n for g in groups for r in g.rollouts for n in r.reward_parts}):
        parts = [r.reward_parts.get(name) for g in groups for r in g.rollouts]
        values = [p for p in parts if p is not None]
        if values:
            metrics |= {f"rewards/{name}/mean": _mean(values), f"rewards/{name}/std": _std(values)}
    return metrics


def _tools(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Of rollouts that had tools; nothing when none had any."""
    with_tools = [r for r in rollouts if r.ended]
    if not with_tools:
        return {}
    calls = [call for r in with_tools for turn in r.turns for call in turn.calls]
    metrics = {
        "num_turns/mean": _mean([len(r.turns) for r in with_tools]),
        "num_turns/max": float(max(len(r.turns) for r in with_tools)),
        "tools/call_frequency": len(calls) / len(with_tools),
        "tools/called_share": _mean([any(turn.calls for turn in r.turns) for r in with_tools]),
        "tools/rerendered_tokens": float(sum(r.rerendered_tokens for r in with_tools)),
        "tools/reply_tokens": _mean([_reply_tokens(r) for r in with_tools]),
    }
    if calls:
        metrics["tools/failure_frequency"] = _mean([call.outcome != "ok" for call in calls])
    for why, count in Counter(r.ended for r in with_tools).items():
        metrics[f"tools/ended/{why}"] = count / len(with_tools)
    for name, count in Counter(call.name or "unreadable" for call in calls if call.outcome != "refused").items():
        metrics[f"tools/calls/{name}"] = count / len(with_tools)
    return metrics


def _reply_tokens(rollout: Rollout) -> int:
    """Tokens that the policy read from tools, headers included."""
    own = len(rollout.turns[0].prompt_ids) + sum(len(turn.completion_ids) for turn in rollout.turns[:-1])
    return len(rollout.turns[-1].prompt_ids) - own


def _lengths(rollouts: Sequence[Rollout]) -> dict[str, float]:
    if not rollouts:
        return {}
    lengths = [r.sampled_tokens for r in rollouts]
    ended = [r.sampled_tokens for r in rollouts if r.finish_reason == STOP]
    metrics = {
        "completions/mean_length": _mean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": sum(r.finish_reason == LENGTH for r in rollouts) / len(rollouts),
    }
    if ended:
        metrics["completions/mean_terminated_length"] = _mean(ended)
    return metrics


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _std(values: Sequence[float]) -> float:
    """Population standard deviation; exactly 0 for equal values, whatever they are."""
    if len(set(values)) == 1:
        return 0.0
    centre = _mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / len(values))
