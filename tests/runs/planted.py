"""The real command with one bug planted in it: `python -m tests.runs.planted NAME train ...`.

Run it from the root of the repository. What follows NAME is what follows `surefoot` on a command line,
and the exit code is the command's own. The bugs:

    mask_shift_left             the loss mask stands one position too early: each row's last token is not trained
    mask_shift_right            one position too late: the first token is not trained, and padding is
    flip_advantages_after_checks  advantages change sign between the invariants and the loss
    shuffle_rewards             rewards are dealt out anew over all rollouts of a step, so no check can see it
    forget_the_guard            nobody tells the guard of an evaluation
    skip_publish                from the second version on, loading reports success and the engine keeps its weights

A bug is planted after the reward workers are forked: planting needs torch, and forking comes before it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

Plant = Callable[[], None]


def mask_shift_left() -> None:
    """The mask of every batch, one position to the left."""
    _shift_mask(-1)


def mask_shift_right() -> None:
    """The mask of every batch, one position to the right."""
    _shift_mask(1)


def _shift_mask(by: int) -> None:
    from surefoot.maths import packing
    from surefoot.policy import learner

    real = packing.make_batch

    def shifted(samples: Any, **keys: Any) -> Any:
        batch, stats = real(samples, **keys)
        if samples[0].item_id.startswith("probe/"):
            return batch, stats  # what proves a sync is scored, not trained
        mask = batch.mask.roll(by, dims=1)
        mask[:, 0 if by > 0 else -1] = False
        return replace(batch, mask=mask), stats

    packing.make_batch = learner.make_batch = shifted  # type: ignore[attr-defined]


def flip_advantages_after_checks() -> None:
    """The loss gets minus the advantages that were checked."""
    from surefoot.policy import learner

    real = learner.policy_loss  # type: ignore[attr-defined]

    def flipped(logp: Any, old_logp: Any, advantages: Any, mask: Any, **keys: Any) -> Any:
        return real(logp, old_logp, -advantages, mask, **keys)

    learner.policy_loss = flipped  # type: ignore[attr-defined]


def shuffle_rewards() -> None:
    """Training rewards are permuted over the whole step before anybody sees them; evaluation is left alone."""
    from surefoot.envs.single_turn import SingleTurnEnvironment

    real = SingleTurnEnvironment.grade
    dice = random.Random(0)

    def grade(self: SingleTurnEnvironment, tasks: Sequence[Any], rollouts: Sequence[Any]) -> list[Any]:
        grades = real(self, tasks, rollouts)
        if not rollouts or not rollouts[0].group.startswith("train/"):
            return grades
        drawn = dice.sample(grades, len(grades))
        return [replace(d, correct=g.correct) for d, g in zip(drawn, grades, strict=True)]

    SingleTurnEnvironment.grade = grade  # type: ignore[method-assign]


def skip_publish() -> None:
    """Version 0 arrives, as a copy; every later version is only a number."""
    from surefoot.engines.embedded import EmbeddedEngine

    real = EmbeddedEngine.load_weights

    def load_weights(self: EmbeddedEngine, weights: Mapping[str, Any], version: int) -> None:
        if self._version is None:  # copied, since an engine reads the learner's tensors in place
            real(self, {name: tensor.detach().clone() for name, tensor in weights.items()}, version)
        self._version = version

    EmbeddedEngine.load_weights = load_weights  # type: ignore[method-assign]


def forget_the_guard() -> None:
    """The one call that tells it is gone."""
    from surefoot import loop

    loop.fold = lambda run: {}  # type: ignore[attr-defined]


PLANTS: dict[str, Plant] = {
    plant.__name__: plant
    for plant in (
        mask_shift_left, mask_shift_right, flip_advantages_after_checks, shuffle_rewards, skip_publish,
        forget_the_guard,
    )
}  # fmt: skip


def plant_after_fork(plant: Plant) -> None:
    """Plant when the reward pool of the run has started."""
    from surefoot.envs.rewards.reward_pool import RewardPool

    real = RewardPool.start

    def start(self: RewardPool) -> RewardPool:
        started = real(self)
        plant()
        return started

    RewardPool.start = start  # type: ignore[method-assign]


def main(words: Sequence[str]) -> None:
    """Plant the named bug, then hand the other words to the real command."""
    if not words or words[0] not in PLANTS:
        sys.exit(f"usage: python -m tests.runs.planted NAME train ...; NAME is one of {', '.join(PLANTS)}")
    plant_after_fork(PLANTS[words[0]])
    from surefoot.cli import main as command

    sys.argv = ["surefoot", *words[1:]]
    command()


if __name__ == "__main__":
    main(sys.argv[1:])
