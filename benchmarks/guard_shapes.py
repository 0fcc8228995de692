"""Simulated runs for `guard_rates.py`: healthy ones, and the ways in which a run goes bad.

A run is 200 evaluations. Both curves have their own normal noise of one deviation, drawn between 0.005 and 0.05 on a
logarithmic scale. In a healthy run reward and held-out follow the same line. In a bad run something begins at an
evaluation between 20 and 100, grows for 40 evaluations until it has cost `cost` noise deviations, and stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

FOLDS, RAMP = 200, 40
LEAST_NOISE, MOST_NOISE = 0.005, 0.05
EARLIEST, LATEST = 20, 100
HEALTHY = ("flat", "rising", "plateaued", "noisy-saturated")
BAD = {
    "decline": "decline",
    "decline, reward saturated": "decline",
    "gap only": "gap",
    "both falling": "both_falling",
    "entropy collapse": "entropy_collapse",
    "length explosion": "length_explosion",
    "length collapse": "length_collapse",
    "reward saturated": "reward_saturated",
}
"""Shapes, with the rule that is meant to see each."""

Array = np.ndarray


@dataclass
class Runs:
    """Many runs of one shape: arrays of (runs, FOLDS), the noise of each run, and where it went bad."""

    shape: str
    reward: Array
    heldout: Array
    noise: Array
    onset: Array | None = None
    extras: dict[str, Array] = field(default_factory=dict)

    def rows(self) -> Iterator[tuple[list[float], list[float], dict[str, list[float]]]]:
        """One run after the other, as plain lists: reward, held-out, the rest by name."""
        for i in range(len(self.reward)):
            yield self.reward[i].tolist(), self.heldout[i].tolist(), {k: v[i].tolist() for k, v in self.extras.items()}


def noise_levels(count: int, rng: np.random.Generator) -> Array:
    """(count, 1) deviations, even on a logarithmic scale."""
    return np.exp(rng.uniform(np.log(LEAST_NOISE), np.log(MOST_NOISE), (count, 1)))


def healthy(shape: str, count: int, rng: np.random.Generator) -> Runs:
    """Runs in which nothing is wrong."""
    t = np.arange(FOLDS) / FOLDS
    line = {
        "flat": np.full(FOLDS, 0.5),
        "rising": 0.2 + 0.6 * t,
        "plateaued": 0.2 + 0.6 * -np.expm1(-6.0 * t),
        "noisy-saturated": 0.4 + 0.6 * -np.expm1(-8.0 * t),
    }[shape]
    noise = noise_levels(count, rng)
    reward, heldout = (line + noise * rng.standard_normal((count, FOLDS)) for _ in range(2))
    if shape == "noisy-saturated":
        reward = np.minimum(reward, 1.0)
    return Runs(shape, reward, heldout, noise[:, 0], extras=calm_extras(count, rng))


def calm_extras(count: int, rng: np.random.Generator) -> dict[str, Array]:
    """Entropy that halves, lengths that grow by half, a spread of rewards that stays above zero; each noisy."""
    t = np.arange(FOLDS) / FOLDS
    wobble = [1.0 + 0.1 * rng.standard_normal((count, FOLDS)) for _ in range(3)]
    return {
        "entropy": (1.0 - 0.5 * t) * wobble[0],
        "length": np.maximum((200.0 + 100.0 * t) * wobble[1], 0.0),
        "reward_std": np.maximum((0.3 - 0.2 * t) * wobble[2], 1e-3),
    }


def bad(shape: str, count: int, rng: np.random.Generator, *, cost: float = 6.0) -> Runs:
    """Runs that go bad."""
    noise = noise_levels(count, rng)
    onset = rng.integers(EARLIEST, LATEST + 1, (count, 1))
    grown = np.clip((np.arange(FOLDS) - onset) / RAMP, 0.0, 1.0)
    damage = cost * noise * grown
    sign = {"decline": (1, -1), "decline, reward saturated": (0, -1), "gap only": (1, 0), "both falling": (-1, -1)}
    up, down = sign.get(shape, (0, 0))
    reward = 0.5 + up * damage + noise * rng.standard_normal((count, FOLDS))
    heldout = 0.5 + down * damage + noise * rng.standard_normal((count, FOLDS))
    extras = calm_extras(count, rng)
    if shape == "entropy collapse":
        extras["entropy"] *= 0.01**grown
    elif shape == "length explosion":
        extras["length"] *= 10.0**grown
    elif shape == "length collapse":
        extras["length"] *= 0.02**grown
    elif "reward saturated" in shape:
        stuck = np.arange(FOLDS) >= onset
        reward = np.where(stuck, 1.0, np.minimum(reward, 1.0))
        extras["reward_std"] = np.where(stuck, 0.0, extras["reward_std"])
    return Runs(shape, reward, heldout, noise[:, 0], onset[:, 0], extras)
