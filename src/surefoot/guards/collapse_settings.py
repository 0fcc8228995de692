"""What a guard accepts: every setting and every number is checked before it changes anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from surefoot.errors import ConfigError, InputError
from surefoot.guards.collapse_rules import RULES, Limits

LIMIT_OF = {"kl": "kl_hard_stop", "gap": "max_proxy_real_gap"}
"""Rules that are on when their limit is given."""
STRONGEST_MARGIN = 20.0
LARGEST = 1e100
"""Beyond it differences overflow, and one value would blind the guard for good."""


def checked_limits(*, rules: Sequence[str] | None, **settings: Any) -> Limits:
    """The settings as `Limits`; all that is wrong with them is said at once.

    Raises:
        ConfigError: a value or a rule is refused (also a ValueError).
    """
    problems = [*_problems(settings), *([] if rules is None else _rule_problems(rules, settings))]
    if problems:
        raise ConfigError(
            "HeldOutGuard refused: " + "; ".join(problems),
            "a guard with a setting that means nothing looks like a guard and stops nothing",
            "correct the values above; docs/guards.md explains each",
        )
    given = [name for name, limit in LIMIT_OF.items() if settings[limit] is not None]
    return Limits(rules=tuple(rules) if rules is not None else ("decline", *sorted(given)), **settings)


def _problems(settings: dict[str, Any]) -> list[str]:
    found = []
    for name in ("min_steps", "decline_patience", "saturation_patience"):
        if not _is_whole(settings[name]) or settings[name] < 1:
            found.append(f"{name} = {settings[name]!r} is not a whole number of at least 1")
    ranges = {
        "ema_alpha": (0.0, 1.0, "above 0 and at most 1", False),
        "margin_se": (0.0, STRONGEST_MARGIN, f"between 0 and {STRONGEST_MARGIN:g}", True),
        "min_drop": (0.0, math.inf, "at least 0", True),
        "kl_hard_stop": (0.0, math.inf, "at least 0", True),
        "max_proxy_real_gap": (0.0, math.inf, "at least 0", True),
        "min_entropy_ratio": (0.0, 1.0, "above 0 and at most 1", False),
        "max_length_ratio": (1.0, math.inf, "above 1", False),
    }
    for name, (low, high, words, closed) in ranges.items():
        value = settings[name]
        if value is None and name in LIMIT_OF.values():
            continue
        inside = is_number(value) and math.isfinite(value) and low <= value <= high and (closed or value > low)
        if not inside:
            found.append(f"{name} = {value!r} is not a number {words}")
    return found


def _rule_problems(rules: Sequence[str], settings: dict[str, Any]) -> list[str]:
    if isinstance(rules, str) or not rules:
        return [f"rules = {rules!r} is not a list of at least one name (known: {', '.join(RULES)})"]
    found = [f"unknown rule {name!r} (known: {', '.join(RULES)})" for name in rules if name not in RULES]
    if len(set(rules)) != len(rules):
        found.append(f"rules = {list(rules)} names one twice")
    if "kl" in rules and settings["kl_hard_stop"] is None:
        found.append("the rule kl needs kl_hard_stop")
    for name, limit in LIMIT_OF.items():
        if name not in rules and settings[limit] is not None:
            found.append(f"{limit} is given and rules does not name {name}")
    return found


def finite(name: str, value: Any, *, least: float = -math.inf) -> float:
    """A finite number of at least `least`, as a float.

    Raises:
        InputError: it is not (also a ValueError).
    """
    if is_number(value) and least <= float(value) and abs(float(value)) < LARGEST:  # NaN is neither
        return float(value)
    wanted = "a finite number" if least == -math.inf else f"a finite number of at least {least:g}"
    raise InputError(
        f"{name} is {value!r}, not {wanted}",
        "a guard that averages it in would be blind from here on",
        f"skip this evaluation or repair what measures {name}; the guard has not changed",
    )


def is_number(value: Any) -> bool:
    """Whether it can be compared as a float: numbers and one-element arrays, but no booleans and no text."""
    if isinstance(value, bool | str | bytes) or value is None:
        return False
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def whole(name: str, value: Any) -> int:
    """A whole number of at least 0.

    Raises:
        InputError: it is not.
    """
    if _is_whole(value) and value >= 0:
        return int(value)
    raise InputError(
        f"{name} is {value!r}, not a whole number of at least 0",
        "a verdict has to name the step it belongs to",
        "pass the optimiser step",
    )


def number_or_none(name: str, value: Any) -> float | None:
    """A float that may be infinite or not a number, or None."""
    if value is None or is_number(value):
        return None if value is None else float(value)
    raise InputError(f"{name} is {value!r}, not a number", "it cannot be averaged", f"pass {name} as a float, or None")
