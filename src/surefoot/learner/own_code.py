"""A loss and an advantage estimator of the user's own: loaded, and held to the invariants of ours before they are used.

Promises   whatever is returned here has passed every check of `maths.own_checks`, in the process that will use it.
Never      runs before reward workers are forked: such a file may import torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from surefoot.config.own_code import OwnCode, load_own
from surefoot.maths.advantages import ESTIMATORS, Estimator
from surefoot.maths.losses import LossKind, LossSettings
from surefoot.maths.own_checks import estimator_breach, loss_breach

_ESTIMATORS: dict[str, Estimator] = {}
"""Those that were checked, by `file.py:name`."""


def own_loss(spec: str, **settings: Any) -> LossSettings:
    """Settings with the loss that a file holds: a function of `LossInputs`, or a `LossKind`.

    Args:
        settings: the others of this run; the loss is checked under exactly these.
    """
    own = load_own("loss_type", spec)
    if isinstance(own.thing, LossKind):
        replace(own, thing=own.thing.objective).expect_call("inputs")
        kind = own.thing
    else:
        own.expect_call("inputs")
        kind = LossKind(objective=own.thing, caps_ratio=True)
    made = LossSettings(loss_type=spec, own=kind, **settings)
    _hold_to_invariants(own, made)
    return made


def _hold_to_invariants(own: OwnCode, settings: LossSettings) -> None:
    try:
        breach = loss_breach(settings)
    except Exception as error:
        raise own.raised(error, "on made-up rows, before step 1") from error
    if breach is not None:
        raise own.refused(*breach)


def use_estimator(spec: str) -> None:
    """Load the estimator that a file holds, check it, and have `estimator_of` give it from here on."""
    own = load_own("scale_rewards", spec)
    own.expect_call("rewards", "batch_std")
    try:
        breach = estimator_breach(own.thing)
    except Exception as error:
        raise own.raised(error, "on made-up rewards, before step 1") from error
    if breach is not None:
        raise own.refused(*breach)
    _ESTIMATORS[spec] = own.thing


def estimator_of(scale: str) -> str | Estimator:
    """What `compute_advantages` takes for a value of `scale_rewards`."""
    if scale not in ESTIMATORS and scale not in _ESTIMATORS:
        use_estimator(scale)
    return _ESTIMATORS.get(scale, scale)
