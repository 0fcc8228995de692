"""What every runtime asks of the groups that come back, whoever played them.

Owns       collect, evaluate and preflight on top of "play these tasks": how many failures are too many, what a
           constant or fickle baseline reward means, and what held-out answers add up to.
Promises   evaluation draws from streams of its own, so looking on changes nothing; a constant baseline reward is
           refused, and with `audit` one that does not give the same answer twice.
Never      knows where an engine runs.

Read next: `local.py` and `runtime/ray/runtime.py`, which bring the runner.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from surefoot.errors import RewardError, ToolError
from surefoot.maths.pass_at_k import mean_pass_at
from surefoot.protocols import Environment, EvalResult, Grade, GroupFinished, Weights
from surefoot.records import LENGTH, REPETITION, Group, Rollout, Task
from surefoot.rewards.grading import purpose_of
from surefoot.runtime.requests import RolloutResult, Sampling
from surefoot.runtime.rollout import NONFINITE_LOGPROB, UNDECODABLE
from surefoot.runtime.weights import WeightProbe

# -- Too many rollouts have no verdict: whose doing it is, and what to do about it ----------------
# Owns       the families of reasons: a grader's (`function:reason`), the sampler's, the context's, and the tools' own.
# Promises   a dead tool server is a `ToolError` with what it did, and never sends anybody to the reward function; where
# tools and graders both failed, the error is of the side with more failures, and names the remedy of each.
# Never      decides how many are too many: `base.py` does.


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


def no_verdict_error(
    rollouts: Sequence[Rollout], what: str, why: str, fix: str, detail: str
) -> RewardError | ToolError:
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


# -- Before step 1: does every data set of a mixture have rewards that differ? --------------------
# Owns       how many baseline completions a data set gets before it is called constant, and the refusal.
# Promises   a data set is refused only after `LEAST` completions of its own; one whose rewards differ costs nothing
# more;
# further completions come from random streams of their own.
# Never      looks at a run with one data set: there the look at everything is the look at it.


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


# -- What every runtime asks of the groups that come back, whoever played them --------------------


class BatchRunner(Protocol):
    """Runs rollouts of many tasks and waits for all: a collector in this process, or a pool of replicas."""

    @property
    def environment(self) -> Environment:
        """Graders in this process, to ask once more or for an explanation."""

    def run_rollouts(
        self, tasks: Sequence[Task], sampling: Sampling, *, purpose: str, step: int,
        positions: Sequence[int] | None = None, finished: GroupFinished | None = None,
    ) -> list[RolloutResult]:  # fmt: skip
        """One scored group per task, in order.

        Args:
            positions: of the tasks in their step; from 0 on when left out.
            finished: told of every group as soon as it is graded, in whatever thread.
        """


class BaseRuntime:
    """The part of `protocols.Runtime` that is the same everywhere."""

    def __init__(self, runner: BatchRunner, *, train: Sampling, evaluation: Sampling, max_failures: float) -> None:
        self.runner, self.train, self.evaluation = runner, train, evaluation
        self.max_failures = max_failures
        self.canary: WeightProbe | None = None

    @property
    def probe_baseline(self) -> list[list[float]] | None:
        """The learner's log-probabilities of the fixed probe tokens at the last publish; None without a probe."""
        return None if self.canary is None else self.canary.probe_baseline

    @probe_baseline.setter
    def probe_baseline(self, found: list[list[float]] | None) -> None:
        if self.canary is not None:
            self.canary.restore_baseline(found)

    def publish(self, weights: Weights, version: int) -> Mapping[str, float]:
        """Move version `version` to every engine and prove arrival; returns metrics."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop engines and workers."""
        raise NotImplementedError

    def collect(
        self, tasks: Sequence[Task], step: int, first: int = 0, *, played: Mapping[int, Group] = MappingProxyType({}),
        finished: GroupFinished | None = None,
    ) -> list[Group]:  # fmt: skip
        """One scored group per task; stops when more rollouts lack a verdict than allowed.

        Args:
            first: position in the step of the first task.
            played: groups that exist already, by position: not played again, and judged with the others.
            finished: told of every other group as soon as it is graded.
        """
        missing = {place: task for place, task in enumerate(tasks, first) if place not in played}
        if missing:
            new = self.runner.run_rollouts(
                list(missing.values()), self.train, purpose="train", step=step, positions=list(missing),
                finished=finished,
            )  # fmt: skip
            played = {**played, **{place: p.group for place, p in zip(missing, new, strict=True)}}
        groups = [played[place] for place in range(first, first + len(tasks))]
        self.check_failures([r for g in groups for r in g.rollouts], f"step {step}")
        return groups

    def evaluate(self, tasks: Sequence[Task], step: int, name: str | None = None) -> EvalResult:
        """Answer held-out tasks. The same streams every time, so that two evaluations differ by the weights alone.

        Args:
            name: of the evaluation set that these tasks are; its own judges are asked.
        """
        played = self.runner.run_rollouts(tasks, self.evaluation, purpose=purpose_of(name), step=0)
        rollouts = [r for p in played for r in p.group.rollouts]
        self.check_failures(rollouts, f"the evaluation at step {step}{'' if name is None else f' of {name}'}")
        return _eval_result(played, rollouts, self.evaluation.num_generations)

    def preflight(
        self, tasks: Sequence[Task], *, audit: bool = False, look: Callable[[list[Group]], None] | None = None,
        datasets: Mapping[str, Sequence[Task]] = MappingProxyType({}), allow: Collection[str] = (),
    ) -> list[Group]:  # fmt: skip
        """Baseline completions, graded: refuses a reward that is the same for all of them, or for all of a data set.

        Args:
            audit: grade them twice, and refuse a reward whose two answers differ.
            look: shown what was played before anything is refused.
            datasets: tasks of each data set to ask further where it looks constant; empty when there is one data set.
            allow: data sets that may earn the same throughout.
        """
        played = self.runner.run_rollouts(tasks, self.train, purpose="preflight", step=0)
        groups = [p.group for p in played]
        if look is not None:
            look(groups)
        rollouts = [r for g in groups for r in g.rollouts]
        self.check_failures(rollouts, "the preflight")
        if audit:
            self._audit(played)
        rewards = {r.reward for r in rollouts if r.reward is not None}
        if not rewards:
            raise no_verdict_error(
                rollouts, f"none of {len(rollouts)} baseline completions got a verdict",
                "nobody could say what is right", "preflight_tasks = 0 trains anyway",
                self.runner.environment.explain_failures(),
            )  # fmt: skip
        if len(rewards) == 1:
            raise RewardError(
                f"all {len(rollouts)} baseline completions on {len(tasks)} tasks got reward {rewards.pop():g}; "
                f"one of them: {rollouts[0].text[:120]!r}",
                "equal rewards give no gradient: the format, the grader or the difficulty is off",
                "look at the completion above and at the reward function; preflight_tasks = 0 trains anyway",
            )
        return [*groups, *check_datasets(groups, datasets, allow, self._further_baseline)]

    def _further_baseline(self, tasks: Sequence[Task], turn: int) -> list[Group]:
        groups = [p.group for p in self.runner.run_rollouts(tasks, self.train, purpose="preflight", step=turn)]
        self.check_failures([r for g in groups for r in g.rollouts], "the preflight")
        return groups

    def _audit(self, played: Sequence[RolloutResult]) -> None:
        """Grade the same rollouts once more; a grader that changes its mind is refused by name."""
        first = [(p.group.task, r, c) for p in played for r, c in zip(p.group.rollouts, p.correct, strict=True)]
        # What failed before grading keeps its failure; everything else is shown as if for the first time.
        fresh = [r if _failed_before_grading(r) else r.graded(None, {}, None) for _, r, _ in first]
        again = self.runner.environment.grade([task for task, _, _ in first], fresh)
        changes = [
            (task, rollout, change)
            for (task, rollout, correct), second in zip(first, again, strict=True)
            for change in _changes(rollout, correct, second)
        ]
        if changes:
            task, rollout, (name, one, two) = changes[0]
            raise RewardError(
                f"{name} gave {_shown(one)} and then {_shown(two)} to the same completion of task {task.id} "
                f"({len(changes)} such changes in {len(first)} rollouts); the completion: {rollout.text[:120]!r}",
                "a reward that changes its mind is noise in every advantage, and no run with it can be repeated",
                "draw from a generator seeded by the input, such as random.Random(completion), and keep no state "
                "between calls; audit_rewards = false trains anyway",
            )

    def check_failures(self, rollouts: Sequence[Rollout], when: str) -> None:
        """Refuse to go on when more rollouts lack a verdict than allowed; loops are not counted here."""
        failed = sum(r.reward is None and r.failure != REPETITION for r in rollouts)
        if failed <= self.max_failures * len(rollouts):
            return
        raise too_many_failures(rollouts, when, self.max_failures, self.runner.environment.explain_failures())


def _changes(
    rollout: Rollout, correct: float | None, second: Grade
) -> Iterator[tuple[str, float | None, float | None]]:
    """(who, first, second) for every grader that judged this rollout differently the second time."""
    if _failed_before_grading(rollout):
        return
    for name in sorted({*rollout.reward_parts, *second.parts}):
        one, two = rollout.reward_parts.get(name), second.parts.get(name)
        if one != two:
            yield f"reward function {name}", one, two
    if correct != second.correct:
        yield "the task metric", correct, second.correct


def _failed_before_grading(rollout: Rollout) -> bool:
    """Reasons of graders are `function:reason`; engines and tools fail in one word."""
    return rollout.failure is not None and ":" not in rollout.failure


def _shown(value: float | None) -> str:
    return "no verdict" if value is None else repr(value)


SOLVED = 1.0
"""From here on the task metric counts an answer as right, for pass@k."""


def _eval_result(played: Sequence[RolloutResult], rollouts: Sequence[Rollout], answers: int) -> EvalResult:
    rewards = [r.reward for r in rollouts if r.reward is not None]
    if not rewards:
        raise no_verdict_error(rollouts, "no held-out answer got a verdict", "nothing to judge by", "", "")
    judged = [
        [c for c, r in zip(p.correct, p.group.rollouts, strict=True) if c is not None and r.reward is not None]
        for p in played
    ]
    correct = [c for each in judged for c in each]
    answered = [r for r in rollouts if r.turns]
    right = sum(c == 1.0 for c in correct) if len(correct) == len(rewards) and set(correct) <= {0.0, 1.0} else None
    return EvalResult(
        n=len(rewards), reward=math.fsum(rewards) / len(rewards), accuracy=_mean(correct), stderr=_stderr(judged),
        mean_length=sum(r.sampled_tokens for r in answered) / len(answered),
        clipped_ratio=sum(r.finish_reason == LENGTH for r in answered) / len(answered),
        failures=len(rollouts) - len(rewards), scores=_scores(played, judged), right=right,
        pass_at=mean_pass_at([[c >= SOLVED for c in each] for each in judged if each], answers) if correct else {},
        groups=tuple(p.group for p in played), correct=tuple(p.correct for p in played),
    )  # fmt: skip


def _scores(played: Sequence[RolloutResult], judged: Sequence[Sequence[float]]) -> dict[str, tuple[float | None, ...]]:
    """Each task's own mean, by metric: what one evaluation is compared with another by."""
    rewards = tuple(_mean([r.reward for r in p.group.rollouts if r.reward is not None]) for p in played)
    return {"reward": rewards, "accuracy": tuple(map(_mean, judged))}


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _stderr(judged: Sequence[Sequence[float]]) -> float | None:
    """Of the mean over all answers; None when there are too few to know.

    Answers to one task resemble each other: with several of them it is the tasks that are counted, not the answers.
    """
    tasks, values = [each for each in judged if each], [value for each in judged for value in each]
    mean, n = _mean(values), len(values)
    if mean is None:
        return None
    if set(values) <= {0.0, 1.0}:  # binomial, floored: with every answer right the formula would claim certainty
        variance = max(mean * (1 - mean), 1 / (4 * n)) / n
    elif n > 1:
        variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n
    else:
        return None
    if n > len(tasks) > 1:
        apart = math.fsum(math.fsum(v - mean for v in each) ** 2 for each in tasks)
        variance = max(variance, apart * len(tasks) / (len(tasks) - 1) / n**2)
    return math.sqrt(variance)
