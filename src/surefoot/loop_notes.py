"""What a person should hear after step 1, each with a remedy: most runs that learn nothing show it there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from surefoot.config import Config

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
