"""The guard's settings for a run: what `[guard]` says, and for "auto" what suits the number of planned evaluations.

Owns       which settings go with how many evaluations.
Promises   a number that was written is used as it is; "auto" depends on the number of planned evaluations alone.

A run with eight evaluations cannot wait for ten, nor for three in a row. The fewer there are, the shorter the averages
and the patience; and the fewer there are, the fewer chances noise has, so that the margin may be narrower. Each row
was chosen so that a level accuracy, at any level and with 10 to 200 answers, is stopped in well under 1 % of the runs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from surefoot.config import Config
from surefoot.config.choices import is_own


class AutoSettingsRow(NamedTuple):
    """Settings for runs of up to `evaluations` evaluations."""

    evaluations: float
    min_evals: int
    decline_patience: int
    ema_alpha: float
    margin_se: float


ROWS = (
    AutoSettingsRow(6, 4, 1, 0.4, 2.6),
    AutoSettingsRow(9, 4, 1, 0.4, 2.9),
    AutoSettingsRow(13, 4, 2, 0.3, 2.7),
    AutoSettingsRow(21, 4, 2, 0.2, 2.9),
    AutoSettingsRow(30, 5, 2, 0.2, 3.3),
    AutoSettingsRow(60, 5, 2, 0.2, 3.6),
    AutoSettingsRow(200, 10, 3, 0.1, 4.2),  # what `HeldOutGuard` itself takes when nothing is said
    AutoSettingsRow(float("inf"), 10, 3, 0.1, 5.0),
)
UNTOLD, FEW, MANY = 0.4, 13, 60
"""Wider by this where noise has to be read off the curve. With few evaluations Student's widening does that already,
and the settings for many were chosen without a standard error."""
AUTO = ("min_evals", "decline_patience", "ema_alpha", "margin_se")
"""Keys of `[guard]` that may be "auto"."""


def row_for(evaluations: int) -> AutoSettingsRow:
    """The settings that suit a run of so many evaluations."""
    return next(row for row in ROWS if evaluations <= row.evaluations)


def tells_se(metric: str) -> bool:
    """Whether the guard is told the standard error of this held-out curve: it is for a share of right answers."""
    return metric.endswith("accuracy")


def guard_settings(config: Config, evaluations: int, metric: str) -> dict[str, Any]:
    """Arguments of `HeldOutGuard` for this run.

    Args:
        evaluations: how many are planned, the one before the first step included.
        metric: the held-out curve that it watches.
    """
    keys, row = config.guard, row_for(evaluations)
    if not tells_se(metric) and FEW < evaluations <= MANY:
        row = row._replace(margin_se=row.margin_se + UNTOLD)
    ours = None if keys.rules is None else tuple(name for name in keys.rules if not is_own(name))
    chosen = {name: getattr(row if getattr(keys, name) == "auto" else keys, name) for name in AUTO}
    return {
        "min_steps": chosen.pop("min_evals"), **chosen, "kl_hard_stop": keys.kl_hard_stop,
        "max_proxy_real_gap": keys.max_proxy_real_gap, "rules": ours, "min_drop": keys.min_drop,
        "min_entropy_ratio": keys.min_entropy_ratio, "max_length_ratio": keys.max_length_ratio,
        "saturation_patience": keys.saturation_patience,
    }  # fmt: skip


def written(config: Config) -> list[str]:
    """Those of the "auto" keys that have a number of their own."""
    return [f"guard.{name}" for name in AUTO if getattr(config.guard, name) != "auto"]


def derived(config: Config) -> tuple[str, ...]:
    """Arguments of `HeldOutGuard` that "auto" derives: a run that goes on keeps those that it began with."""
    names = {"min_evals": "min_steps"}
    return tuple(names.get(name, name) for name in AUTO if getattr(config.guard, name) == "auto")
