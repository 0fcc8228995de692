"""What the loop passes on: to a person after step 1, to the guard at every evaluation.

`step_one_warnings`  each with a remedy: most runs that learn nothing show it in their first step
`ToolAlarms`         tools that nobody calls, or whose calls fail
`Between`            what the steps between two evaluations showed, in the guard's own words
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from surefoot.config import Config
from surefoot.envs.judges import EvalSet
from surefoot.errors import RewardError
from surefoot.guards.noise import proportion_se
from surefoot.records import Group

if TYPE_CHECKING:
    from surefoot.policy.census import Census

MANY_TRUNCATED = 0.5


def step_one_warnings(metrics: Mapping[str, float], census: Census | None, config: Config) -> Iterator[tuple[str, str]]:
    """(what, remedy) pairs."""
    clipped = metrics.get("completions/clipped_ratio", 0.0)
    if clipped > MANY_TRUNCATED:
        yield (
            f"{clipped:.0%} of completions were cut at max_completion_length = {config.max_completion_length}",
            "raise max_completion_length, or make the prompt ask for a shorter answer",
        )
    if metrics.get("frac_reward_zero_std") == 1.0:
        yield (
            "in every group all rewards were equal, so this step had no gradient",
            "easier or harder tasks, more num_generations, or a finer reward",
        )
    if census is None or census.moved == 0:
        yield (
            "no parameter changed in step 1",
            f"check learning_rate (now {config.learning_rate:g}) and the rewards above",
        )
    elif census.still:
        yield (
            f"{len(census.still)} of {census.total} parameter tensors did not move, first {census.still[0]}",
            "expected for frozen parts only; otherwise they are cut off from the loss",
        )


def cannot_fill(groups: Sequence[Group], wanting: int, batches: int) -> RewardError:
    """Dynamic sampling gave up: what it drew, and what it found."""
    rewards = Counter(
        f"{group.rewards[0]:g}" for group in groups if len(set(group.rewards)) == 1 and None not in group.rewards
    )
    same = ", ".join(f"{count} with reward {reward} throughout" for reward, count in rewards.most_common(3))
    return RewardError(
        f"{len(groups)} groups in {batches} batches were drawn for one step, and {wanting} more with rewards that "
        f"differ are wanted: {same or 'the others failed'}",
        "a group of equal rewards has no gradient",
        "use tasks that are neither solved nor hopeless, raise num_generations or dynamic_sampling_batches",
    )


def no_metric(each: EvalSet) -> RewardError:
    """An evaluation set has a metric, and it judged none of its answers."""
    return RewardError(
        f"eval_sets.{each.name}: its metric gave no verdict on any of the answers to {len(each.tasks)} tasks",
        "a metric that fails, or abstains every time, measures nothing",
        f'mend it (logs/rewards.log has what it printed), or set eval_sets.{each.name}.metric = "none"',
    )


PATIENCE = 5
"""Steps before a person is told: with few calls, luck needs time."""
MANY_FAILED_CALLS = 0.5


@dataclass
class ToolAlarms:
    """Notices tools that are there and of no use; each is said once in a run, resumed or not.

    Failing calls are counted over the whole run, and beside it step by step, so that tools which break late in a long
    run are noticed too. A step without calls counts for neither.
    """

    idle: int = 0
    """Steps in a row in which no rollout called a tool."""
    failing: int = 0
    """Steps whose calls mostly failed, less those whose calls mostly did not; never below 0."""
    asked: int = 0
    """Steps of the run in which tools were called."""
    calls: int = 0
    failed: int = 0
    """Calls of the run, and those of them that were refused or answered with an error."""
    said: list[str] = field(default_factory=list)

    def step(self, metrics: Mapping[str, float], groups: Sequence[Group]) -> Iterator[tuple[str, str]]:
        """(what, remedy) pairs for this step; nothing for runs without tools."""
        if "tools/called_share" not in metrics:
            return
        self.idle = 0 if metrics["tools/called_share"] > 0 else self.idle + 1
        if self.idle >= PATIENCE and self._first("idle"):
            yield (
                f"no rollout has called a tool for {self.idle} steps",
                "show the tools in the prompt (tools.in_prompt, system_prompt) or in example tasks, or train without",
            )
        self._count(groups)
        many = self.asked >= PATIENCE and self.failed > MANY_FAILED_CALLS * self.calls
        if (many or self.failing >= PATIENCE) and self._first("failed"):
            yield (
                f"tool calls keep failing: {self.failed} of {self.calls} in this run were refused or answered with an "
                f"error ({self.failed / self.calls:.0%})" + ("" if many else ", in the last steps most of them"),
                "look at calls in RUN/rollouts: wrong names or arguments, or a tool that does not work",
            )

    def _count(self, groups: Sequence[Group]) -> None:
        outcomes = [call.outcome for g in groups for r in g.rollouts for turn in r.turns for call in turn.calls]
        if not outcomes:
            return
        failed = sum(outcome != "ok" for outcome in outcomes)
        self.asked, self.calls, self.failed = self.asked + 1, self.calls + len(outcomes), self.failed + failed
        mostly = failed > MANY_FAILED_CALLS * len(outcomes)
        self.failing = self.failing + 1 if mostly else max(0, self.failing - 1)

    def _first(self, what: str) -> bool:
        if what in self.said:
            return False
        self.said.append(what)
        return True


Metrics = Mapping[str, float]
SEEN = {"kl": "kl", "entropy": "entropy", "length": "completions/mean_length", "reward_std": "reward_std"}
"""What the guard calls it -> the metric of the newest step that it is; one that was not measured is left out."""


@dataclass
class Between:
    """Remembers the steps since the last evaluation, and turns an evaluation into what the guard folds.

    The reward of an evaluation is the mean training reward of the steps since the one before. The evaluation before
    the first step has none yet: it waits for step 1, whose rollouts the same weights wrote, and is folded with that.
    """

    rewards: list[float] = field(default_factory=list)
    first: Metrics = field(default_factory=dict)
    """The first step of the run that had a reward."""
    last: Metrics = field(default_factory=dict)
    waiting: Metrics | None = None
    """The evaluation before the first step, until it is folded."""

    def step(self, metrics: Metrics) -> None:
        """Take in one optimiser step."""
        self.last = metrics
        if "reward" in metrics:
            self.rewards.append(metrics["reward"])
            self.first = self.first or metrics

    def folds(self, step: int, evaluation: Metrics, metric: str) -> list[tuple[int, dict[str, float]]]:
        """(step, arguments of `HeldOutGuard.update`) in order; none when no reward came since the last evaluation."""
        if step == 0:
            self.waiting = evaluation
        if not self.rewards:
            return []
        reward = sum(self.rewards) / len(self.rewards)
        told = [(step, _told(evaluation, metric, reward, self.last))]
        if self.waiting is not None:
            told.insert(0, (0, _told(self.waiting, metric, self.first["reward"], self.first)))
        self.rewards, self.waiting = [], None
        return told


def _told(evaluation: Metrics, metric: str, reward: float, seen: Metrics) -> dict[str, float]:
    heldout = evaluation.get(metric)
    if heldout is None:
        raise RewardError(
            f"an evaluation has no {metric}",
            "the guard cannot watch what nobody measured",
            'mend eval_metric, or set guard.metric = "eval_reward" or guard.mode = "off"',
        )
    told = {"reward": reward, "heldout": heldout}
    if (error := _noise(evaluation, metric, heldout)) is not None:
        told["heldout_se"] = error
    return told | {name: seen[source] for name, source in SEEN.items() if source in seen}


def _noise(evaluation: Metrics, metric: str, heldout: float) -> float | None:
    """Standard error of the held-out value; None when the guard has to find it from how the values scatter.

    One answer per task, right or wrong: a share. Otherwise it is what the evaluation itself measured: partial credit
    scatters less than a coin, and several answers to one task tell less than as many tasks.
    """
    if not metric.endswith("accuracy"):
        return None
    prefix = metric.removesuffix("accuracy")
    if f"{prefix}right" in evaluation and f"{prefix}pass@1" not in evaluation:
        return proportion_se(heldout, int(evaluation[f"{prefix}n"]))
    return evaluation.get(f"{metric}_stderr") or None
