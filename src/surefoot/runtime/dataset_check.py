"""Before step 1: does every data set of a mixture have rewards that differ?

Owns       how many baseline completions a data set gets before it is called constant, and the refusal.
Promises   a data set is refused only after `LEAST` completions of its own; one whose rewards differ costs nothing more;
           further completions come from random streams of their own.
Never      looks at a run with one data set: there the look at everything is the look at it.

Read next: `judging.py`, which asks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from surefoot.errors import RewardError
from surefoot.records import Group, Rollout, Task

LEAST = 64
"""Baseline completions of one data set before equal rewards mean anything."""

PlayMore = Callable[[Sequence[Task], int], list[Group]]
"""(tasks, round from 1 on): further baseline groups; the same task in another round gives other completions."""


def check_datasets(
    groups: Sequence[Group], datasets: Mapping[str, Sequence[Task]], allowed: Collection[str], play: PlayMore
) -> list[Group]:
    """Further groups of data sets that look constant; those that still do are refused by name.

    Args:
        groups: what was played already.
        datasets: name -> tasks that may be played.
        allowed: data sets that may earn the same throughout.
    """
    watched = {name: tasks for name, tasks in datasets.items() if name not in allowed}
    further: list[Group] = []
    for turn in range(1, LEAST + 1):
        seen = [*groups, *further]
        wanted = [task for name, tasks in watched.items() for task in _missing(seen, name, tasks)]
        if not wanted:
            break
        further += play(wanted, turn)
    constant = {name: found for name in watched if _constant(found := _rollouts([*groups, *further], name))}
    if constant:
        raise _refusal(constant)
    return further


def _missing(seen: Sequence[Group], name: str, tasks: Sequence[Task]) -> list[Task]:
    """What is played next of a data set that looks constant and has too few completions: new tasks first."""
    played = [group.task.id for group in seen if group.task.dataset == name]
    rollouts = _rollouts(seen, name)
    if len(rollouts) >= LEAST or not _constant(rollouts):
        return []
    size = max(len(group.rollouts) for group in seen)
    needed = -(-(LEAST - len(rollouts)) // size)
    return sorted(tasks, key=lambda task: played.count(task.id))[:needed]


def _rollouts(groups: Sequence[Group], name: str) -> list[Rollout]:
    return [rollout for group in groups if group.task.dataset == name for rollout in group.rollouts]


def _constant(rollouts: Sequence[Rollout]) -> bool:
    """One reward, or no verdict, for all."""
    return len({rollout.reward for rollout in rollouts if rollout.reward is not None}) < 2


def _refusal(constant: Mapping[str, Sequence[Rollout]]) -> RewardError:
    name, rollouts = next(iter(constant.items()))
    rewards = {rollout.reward for rollout in rollouts if rollout.reward is not None}
    earned = f"got reward {rewards.pop():g}" if rewards else "got no verdict"
    others = f", and so it is for {', '.join(map(repr, list(constant)[1:]))}" if len(constant) > 1 else ""
    tasks = len({rollout.task_id for rollout in rollouts})
    allow = ", ".join(f'"{each}"' for each in constant)
    return RewardError(
        f"data set {name!r}: all {len(rollouts)} baseline completions on {tasks} tasks {earned}, while others earned "
        f"something else{others}; one of them: {rollouts[0].text[:120]!r}",
        "equal rewards give no gradient: the format, the grader or the difficulty of this data set is off, and the "
        "mean over all data sets hides it",
        f"look at the completion above and at what judges this data set; preflight_allow = [{allow}] trains anyway",
    )
