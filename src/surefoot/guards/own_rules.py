"""Guard rules of the user's own, named in `guard.rules` beside ours: `rule(curves)` gives a reason to stop, or None.

Promises   a rule that raises, changes the curves or gives anything else is refused on made-up evaluations, before
           step 1.
Never      counts as armed: how often a rule of ours is wrong was measured, how often these are nobody knows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from surefoot.config.choices import is_own
from surefoot.config.own_code import OwnCode, load_own
from surefoot.guards.collapse import HeldOutGuard
from surefoot.guards.collapse_rules import Curves

MADE_UP = 40
"""Evaluations of each made-up run."""


def own_rules(names: Iterable[str]) -> dict[str, Callable[[Curves], str | None]]:
    """Those of these names that are the user's own, loaded and tried, by file name and function."""
    found: dict[str, Callable[[Curves], str | None]] = {}
    for name in names:
        if is_own(name):
            own = load_own("guard.rules", name)
            own.expect_call("curves")
            rule = partial(_asked, own)
            _try_out(rule)
            found[f"{Path(own.path).name}:{own.name}"] = rule
    return found


def _asked(own: OwnCode, curves: Curves) -> str | None:
    """What the rule says of a copy of the curves."""
    shown = copy.deepcopy(curves)
    try:
        reason = own.thing(shown)
    except Exception as error:
        raise own.raised(error, f"after {curves.heldout.count} evaluations") from error
    if reason is not None and (not isinstance(reason, str) or not reason.strip()):
        raise own.refused(
            f"it gave {reason!r} after {curves.heldout.count} evaluations", "a run that is stopped says why",
            "return a sentence to stop the run, and None to let it go on",
        )  # fmt: skip
    if shown != curves:
        raise own.refused(
            "it changes the curves", "other rules judge by them", "compute from them, and keep nothing in them"
        )
    return reason


def _try_out(rule: Callable[[Curves], str | None]) -> None:
    """Ask it of a run that goes well and of one that collapses, with all numbers and with the fewest."""
    for way in (1.0, -1.0):
        for numbers in ({}, {"kl": 0.1, "entropy": 1.0, "length": 20.0, "reward_std": 0.1}):
            guard = HeldOutGuard(own={"made_up": rule})
            for step in range(MADE_UP):
                guard.update(step, 0.3 + 0.01 * step, 0.3 + 0.007 * step * way, **numbers)
