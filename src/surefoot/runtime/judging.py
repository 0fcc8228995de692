"""What every runtime asks of the groups that come back, whoever played them.

Owns       collect, evaluate and preflight on top of "play these tasks": how many failures are too many, what a
           constant or fickle baseline reward means, and what held-out answers add up to.
Promises   evaluation draws from streams of its own, so looking on changes nothing; a constant baseline reward is
           refused, and with `audit` one that does not give the same answer twice.
Never      knows where an engine runs.

Read next: `local.py` and `ray_runtime.py`, which bring the players.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol

from surefoot.errors import RewardError
from surefoot.protocols import Environment, EvalResult, Grade
from surefoot.records import LENGTH, Group, Rollout, Task
from surefoot.runtime.answers import NONFINITE_LOGPROB, UNDECODABLE
from surefoot.runtime.orders import Played, Sampling
from surefoot.runtime.probes import Canary

_REMEDIES = {
    UNDECODABLE: "use a model whose rows all have a token",
    NONFINITE_LOGPROB: "look at the model: its sampler gave numbers that are no log-probabilities",
}
"""By failure, when it is the only kind: what to do about it."""


class Players(Protocol):
    """Whoever plays groups: a collector in this process, or a fleet."""

    @property
    def environment(self) -> Environment:
        """Graders in this process, to ask once more or for an explanation."""

    def play(
        self, tasks: Sequence[Task], sampling: Sampling, *, purpose: str, step: int, first: int = 0
    ) -> list[Played]:
        """One scored group per task, in order; `first` is the position of the first one in its step."""


class JudgingRuntime:
    """The part of `protocols.Runtime` that is the same everywhere."""

    def __init__(self, players: Players, *, train: Sampling, evaluation: Sampling, max_failures: float) -> None:
        self.players, self.train, self.evaluation = players, train, evaluation
        self.max_failures = max_failures
        self.canary: Canary | None = None

    @property
    def landmarks(self) -> list[list[float]] | None:
        """What the learner thought of the canary's fixed tokens at the last publish; None when nobody asked."""
        return None if self.canary is None else self.canary.landmarks

    @landmarks.setter
    def landmarks(self, found: list[list[float]] | None) -> None:
        if self.canary is not None:
            self.canary.landmarks = found

    def collect(self, tasks: Sequence[Task], step: int, first: int = 0) -> list[Group]:
        """Play one group per task, scored; stops when more rollouts lack a verdict than allowed."""
        groups = [p.group for p in self.players.play(tasks, self.train, purpose="train", step=step, first=first)]
        self.check_failures([r for g in groups for r in g.rollouts], f"step {step}")
        return groups

    def evaluate(self, tasks: Sequence[Task], step: int) -> EvalResult:
        """Answer held-out tasks. The same streams every time, so that two evaluations differ by the weights alone."""
        played = self.players.play(tasks, self.evaluation, purpose="eval", step=0)
        rollouts = [r for p in played for r in p.group.rollouts]
        self.check_failures(rollouts, f"the evaluation at step {step}")
        return _eval_result(played, rollouts)

    def preflight(self, tasks: Sequence[Task], *, audit: bool = False) -> list[Group]:
        """Baseline completions, graded: refuses a reward that is the same for all of them.

        Args:
            audit: grade them twice, and refuse a reward whose two answers differ.
        """
        played = self.players.play(tasks, self.train, purpose="preflight", step=0)
        groups = [p.group for p in played]
        rollouts = [r for g in groups for r in g.rollouts]
        self.check_failures(rollouts, "the preflight")
        if audit:
            self._audit(played)
        rewards = {r.reward for r in rollouts if r.reward is not None}
        if not rewards:
            raise RewardError(
                f"none of {len(rollouts)} baseline completions got a verdict",
                "nobody could say what is right",
                "mend the reward function; preflight_tasks = 0 trains anyway",
            )
        if len(rewards) == 1:
            raise RewardError(
                f"all {len(rollouts)} baseline completions on {len(tasks)} tasks got reward {rewards.pop():g}; "
                f"one of them: {rollouts[0].text[:120]!r}",
                "equal rewards give no gradient: the format, the grader or the difficulty is off",
                "look at the completion above and at the reward function; preflight_tasks = 0 trains anyway",
            )
        return groups

    def _audit(self, played: Sequence[Played]) -> None:
        """Grade the same rollouts once more; a grader that changes its mind is refused by name."""
        first = [(p.group.task, r, c) for p in played for r, c in zip(p.group.rollouts, p.correct, strict=True)]
        # What failed before grading keeps its failure; everything else is shown as if for the first time.
        fresh = [r if _failed_before_grading(r) else r.graded(None, {}, None) for _, r, _ in first]
        again = self.players.environment.grade([task for task, _, _ in first], fresh)
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
        """Refuse to go on when more rollouts lack a verdict than allowed."""
        failed = [r for r in rollouts if r.reward is None]
        if len(failed) <= self.max_failures * len(rollouts):
            return
        kinds = sorted({r.failure or "no_verdict" for r in failed})
        detail = self.players.environment.explain_failures()
        raise RewardError(
            f"{len(failed)} of {len(rollouts)} rollouts in {when} got no verdict ({', '.join(kinds)}); "
            f"max_reward_failures allows {self.max_failures:g}{detail}",
            "a failed grader is not a wrong answer; training on zeros instead would be silent damage",
            f"{_REMEDIES.get(kinds[0] if len(kinds) == 1 else '', 'mend the reward function')}, "
            "or raise max_reward_failures (a share)",
        )


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


def _eval_result(played: Sequence[Played], rollouts: Sequence[Rollout]) -> EvalResult:
    rewards = [r.reward for r in rollouts if r.reward is not None]
    if not rewards:
        raise RewardError("no held-out answer got a verdict", "nothing to judge by", "mend the reward function")
    correct = [
        c
        for p in played
        for c, r in zip(p.correct, p.group.rollouts, strict=True)
        if c is not None and r.reward is not None
    ]
    answered = [r for r in rollouts if r.turns]
    accuracy = math.fsum(correct) / len(correct) if correct else None
    # Binomial, floored: with every answer right the plain formula would claim certainty.
    stderr = (
        None if accuracy is None else math.sqrt(max(accuracy * (1 - accuracy), 1 / (4 * len(correct))) / len(correct))
    )
    return EvalResult(
        n=len(rewards), reward=math.fsum(rewards) / len(rewards), accuracy=accuracy, stderr=stderr,
        mean_length=sum(r.sampled_tokens for r in answered) / len(answered),
        clipped_ratio=sum(r.finish_reason == LENGTH for r in answered) / len(answered),
        failures=len(rollouts) - len(rewards),
    )  # fmt: skip
