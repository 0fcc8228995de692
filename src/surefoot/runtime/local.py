"""One process: the engine and the learner take turns.

Promises   evaluation draws from streams of its own, so looking on changes nothing; a version
           counts only after the engine itself reports it; a constant baseline reward is refused.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

from surefoot.errors import EngineError, RewardError
from surefoot.protocols import EvalResult, Weights
from surefoot.records import LENGTH, Group, Rollout, Task
from surefoot.runtime.rollout import UNDECODABLE, Played, RolloutCollector, Sampling


class LocalRuntime:
    """`protocols.Runtime` without a process boundary."""

    def __init__(
        self, collector: RolloutCollector, *, train: Sampling, evaluation: Sampling, max_failures: float
    ) -> None:
        self.collector, self.train, self.evaluation = collector, train, evaluation
        self.max_failures = max_failures

    def collect(self, tasks: Sequence[Task], step: int) -> list[Group]:
        """Play one group per task, scored; stops when more rollouts lack a verdict than allowed."""
        groups = [p.group for p in self.collector.play(tasks, self.train, purpose="train", step=step)]
        self._check_failures([r for g in groups for r in g.rollouts], f"step {step}")
        return groups

    def publish(self, weights: Weights, version: int) -> Mapping[str, float]:
        """Hand the engine these weights and hear it say their version."""
        started = time.perf_counter()
        self.collector.engine.load_weights(weights, version)
        if self.collector.engine.version != version:
            raise EngineError(
                f"published version {version}, the engine serves {self.collector.engine.version}",
                "the next rollouts would come from old weights under a new name",
                "see the engine's log",
            )
        return {"timing/publish": time.perf_counter() - started}

    def evaluate(self, tasks: Sequence[Task], step: int) -> EvalResult:
        """Answer held-out tasks. The same streams every time, so that two evaluations differ by the weights alone."""
        played = self.collector.play(tasks, self.evaluation, purpose="eval", step=0)
        rollouts = [r for p in played for r in p.group.rollouts]
        self._check_failures(rollouts, f"the evaluation at step {step}")
        return _eval_result(played, rollouts)

    def preflight(self, tasks: Sequence[Task]) -> list[Group]:
        """Baseline completions, graded: refuses a reward that is the same for all of them."""
        groups = [p.group for p in self.collector.play(tasks, self.train, purpose="preflight", step=0)]
        rollouts = [r for g in groups for r in g.rollouts]
        self._check_failures(rollouts, "the preflight")
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

    def close(self) -> None:
        """Stop engine and reward workers."""
        self.collector.engine.close()
        self.collector.environment.close()

    def _check_failures(self, rollouts: Sequence[Rollout], when: str) -> None:
        failed = [r for r in rollouts if r.reward is None]
        if len(failed) <= self.max_failures * len(rollouts):
            return
        kinds = sorted({r.failure or "no_verdict" for r in failed})
        detail = self.collector.environment.explain_failures()
        raise RewardError(
            f"{len(failed)} of {len(rollouts)} rollouts in {when} got no verdict ({', '.join(kinds)}); "
            f"max_reward_failures allows {self.max_failures:g}{detail}",
            "a failed grader is not a wrong answer; training on zeros instead would be silent damage",
            "use a model whose rows all have a token, or raise max_reward_failures (a share)"
            if kinds == [UNDECODABLE]
            else "mend the reward function, or raise max_reward_failures (a share)",
        )


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
    accuracy = math.fsum(correct) / len(correct) if correct else None
    # Binomial, floored: with every answer right the plain formula would claim certainty.
    stderr = (
        None if accuracy is None else math.sqrt(max(accuracy * (1 - accuracy), 1 / (4 * len(correct))) / len(correct))
    )
    return EvalResult(
        n=len(rewards), reward=math.fsum(rewards) / len(rewards), accuracy=accuracy, stderr=stderr,
        mean_length=sum(r.sampled_tokens for r in rollouts) / len(rollouts),
        clipped_ratio=sum(r.finish_reason == LENGTH for r in rollouts) / len(rollouts),
        failures=len(rollouts) - len(rewards),
    )  # fmt: skip
