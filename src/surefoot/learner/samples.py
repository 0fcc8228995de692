"""Groups become samples: drop what cannot be compared, compute advantages, split into microbatches.

Promises   a rollout without a verdict is dropped under its reason, never scored; a group that
           lost siblings is treated as `partial_groups` says; every token keeps its provenance; every group that is
           not trained on has a reason.
Never      reads the configured group size as if it were the size of a group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from surefoot.config import MICROBATCH_TOKENS
from surefoot.errors import PartialGroupError, RewardError
from surefoot.learner.own_code import estimator_of
from surefoot.maths.advantages import compute_advantages
from surefoot.records import Group, Rollout, TrainSample


@dataclass(frozen=True)
class ComparableGroups:
    """Groups that can be compared, and why the others cannot."""

    groups: list[Group]
    dropped: Counter[str]
    """Rollouts by reason."""

    @property
    def differing(self) -> int:
        """How many of the groups have rewards that differ."""
        return len(informative(self.groups))


def drop_ungraded(groups: Sequence[Group], *, partial: str) -> ComparableGroups:
    """Leave out rollouts without a verdict, and what `partial` says of the groups they leave behind.

    Args:
        partial: "drop" the group, "train" on the survivors (at least two), or "refuse".
    """
    kept: list[Group] = []
    dropped: Counter[str] = Counter()
    for group in groups:
        scored = tuple(r for r in group.rollouts if r.reward is not None)
        lost = Counter(r.failure or "no_verdict" for r in group.rollouts if r.reward is None)
        dropped.update(lost)
        if not lost:
            kept.append(group)
        elif partial == "refuse":
            raise _refused(group, scored, lost)
        elif partial == "train" and len(scored) >= 2:
            kept.append(Group(group.task, group.id, scored))
        else:
            dropped["partial_group"] += len(scored)
    return ComparableGroups(kept, dropped)


def informative(groups: Sequence[Group]) -> list[Group]:
    """Those whose rewards differ: a group of equal rewards has no gradient."""
    return [group for group in groups if len(set(group.rewards)) > 1]


def select_training_groups(groups: Sequence[Group], *, partial: str, wanted: int | None) -> ComparableGroups:
    """The groups that are trained on.

    Args:
        partial: as `drop_ungraded` takes it.
        wanted: with dynamic sampling, the first so many groups whose rewards differ; None for all groups.
    """
    kept = drop_ungraded(groups, partial=partial)
    return kept if wanted is None else ComparableGroups(informative(kept.groups)[:wanted], kept.dropped)


def missing_groups(groups: Sequence[Group], *, partial: str, wanted: int | None) -> int:
    """How many groups with rewards that differ a step still lacks; 0 without dynamic sampling."""
    if wanted is None:
        return 0
    return max(0, wanted - drop_ungraded(groups, partial=partial).differing)


def cannot_fill(groups: Sequence[Group], missing: int, batches: int) -> RewardError:
    """Dynamic sampling gave up: what it sampled, and what it found."""
    rewards = Counter(
        f"{group.rewards[0]:g}" for group in groups if len(set(group.rewards)) == 1 and None not in group.rewards
    )
    same = ", ".join(f"{count} with reward {reward} throughout" for reward, count in rewards.most_common(3))
    return RewardError(
        f"{len(groups)} groups in {batches} batches were drawn for one step, and {missing} more with rewards that "
        f"differ are wanted: {same or 'the others failed'}",
        "a group of equal rewards has no gradient",
        "use tasks that are neither solved nor hopeless, raise num_generations or dynamic_sampling_batches",
    )


def drop_reasons(groups: Sequence[Group], samples: Sequence[TrainSample], *, refused: bool) -> list[str | None]:
    """Per group, None when it was trained on, else why not.

    Args:
        samples: what the learner was given.
        refused: no step on these samples was applied, because a number was not finite.
    """
    given = {sample.group for sample in samples}
    trained = "nonfinite_step" if refused else None
    return [trained if group.id in given else _drop_reason(group) for group in groups]


def _drop_reason(group: Group) -> str:
    reasons = sorted({r.failure or "no_verdict" for r in group.rollouts if r.reward is None})
    if not reasons:  # only dynamic sampling leaves out a group that is whole
        return "surplus" if informative([group]) else "equal_rewards"
    return reasons[0]


def _refused(group: Group, scored: Sequence[Rollout], lost: Counter[str]) -> PartialGroupError:
    reasons = ", ".join(f"{n} {reason}" for reason, n in lost.most_common())
    return PartialGroupError(
        f"group {group.id} of {group.task.id} has {len(scored)} of {len(group.rollouts)} rollouts ({reasons})",
        "an advantage over survivors rewards whatever did not fail",
        'repair the failures, or set partial_groups = "drop" or "train"',
    )


def to_samples(groups: Sequence[Group], *, scale: str) -> list[TrainSample]:
    """Samples with advantages; groups are told apart by the ids on them."""
    samples = [to_sample(r, group) for group in groups for r in group.rollouts]
    if not samples:
        return []
    estimate = estimator_of(scale)
    advantages = compute_advantages([s.reward for s in samples], [s.group for s in samples], scale=estimate)
    return [replace(s, advantage=a) for s, a in zip(samples, advantages.tolist(), strict=True)]


def to_sample(rollout: Rollout, group: Group) -> TrainSample:
    """One flat sequence; what stands between two turns was not sampled and carries no loss."""
    tokens: list[int] = []
    sampled: list[bool] = []
    logprobs: list[float] = []
    prompt = rollout.turns[0].prompt_ids
    for turn in rollout.turns:
        between = turn.prompt_ids[len(prompt) + len(tokens) :]
        tokens += [*between, *turn.completion_ids]
        sampled += [*[False] * len(between), *[True] * len(turn.completion_ids)]
        logprobs += [*[0.0] * len(between), *turn.logprobs]
    assert rollout.reward is not None, "drop_ungraded leaves only rollouts with a verdict"
    return TrainSample(
        item_id=rollout.task_id, trainer_version=rollout.version, group=rollout.group, index=rollout.index,
        prompt_ids=prompt, completion_ids=tuple(tokens), sampled=tuple(sampled), logprobs=tuple(logprobs),
        reward=rollout.reward, finish_reason=rollout.finish_reason, dataset=group.task.dataset,
    )  # fmt: skip


def split_microbatches(
    samples: list[TrainSample], size: int, splits: int = 0, *, together: int = 1, tokens: int = MICROBATCH_TOKENS
) -> Iterator[list[TrainSample]]:
    """Consecutive pieces of `size` rows; 0 adds whole groups up to a token budget.

    Args:
        tokens: the budget.
        splits: each piece is halved this many times, rounding up, because memory ran out.
        together: rows that belong together, such as the two of a pair; no split comes between them.
    """
    for piece in _pieces(samples, size, tokens):
        rows = -(-len(piece) // 2**splits)
        rows = -(-rows // together) * together
        yield from (piece[i : i + rows] for i in range(0, len(piece), rows))


def _pieces(samples: list[TrainSample], size: int, budget: int) -> Iterator[list[TrainSample]]:
    if size > 0:
        yield from (samples[i : i + size] for i in range(0, len(samples), size))
        return
    piece: list[TrainSample] = []
    tokens = 0
    groups = by_group(samples)
    if budget > MICROBATCH_TOKENS:  # large pieces are made alike: the largest says how much memory a step needs
        costs = [_cost(group) for group in groups]
        even = -(-sum(costs) // max(1, -(-sum(costs) // budget)))
        budget = min(budget, even + max(costs, default=1) - 1)
    for group in groups:
        cost = _cost(group)
        if piece and tokens + cost > budget:
            yield piece
            piece, tokens = [], 0
        piece, tokens = [*piece, *group], tokens + cost
    if piece:
        yield piece


def _cost(group: Sequence[TrainSample]) -> int:
    return len(group[0].prompt_ids) + sum(len(s.completion_ids) for s in group)


def by_group(samples: Sequence[TrainSample]) -> list[list[TrainSample]]:
    """Siblings together, groups and siblings in order of appearance."""
    groups: dict[str, list[TrainSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    return list(groups.values())
