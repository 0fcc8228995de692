"""A guard's state as plain JSON, and back: what does not fit is refused before anything is changed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from surefoot.errors import ConfigError, StateError
from surefoot.guards.collapse_rules import RULES, Limits
from surefoot.guards.collapse_settings import checked_limits

FORMAT = 1
TIGHTENED = ("kl_hard_stop", "max_proxy_real_gap")
"""Limits that calibration may have changed since the guard was made."""
_FIRED = {"rule": str, "reason": str, "fired_step": int}
T = TypeVar("T")


def dump(limits: Limits, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts, lists, numbers, text and None; the caller's objects are copied."""
    return {"format": FORMAT, "limits": _plain(limits), **{name: _plain(part) for name, part in parts.items()}}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def restore(state: Any, limits: Limits, fresh: Mapping[str, Any], status: type[T]) -> dict[str, Any]:
    """The parts of `dump`, rebuilt; `fresh` holds new parts whose shape the stored ones must have."""
    wanted = {"format", "limits", *fresh, "fired", "status"}
    if not isinstance(state, Mapping) or set(state) != wanted:
        raise _refused(f"it does not consist of {', '.join(sorted(wanted))}")
    if state["format"] != FORMAT:
        raise _refused(f"its format is {state['format']!r}, not {FORMAT}")
    rebuilt: dict[str, Any] = {name: _like(part, state[name], name) for name, part in fresh.items()}
    fired = _fired(state["fired"])
    last = None if state["status"] is None else _status(state["status"], status)
    if (fired is not None) != (last is not None and getattr(last, "fire", False)):
        raise _refused("its latch and its last status disagree about whether it fired")
    return rebuilt | {"limits": _limits(state["limits"], limits), "fired": fired, "status": last}


def adopted(state: Any, limits: Limits, names: Sequence[str]) -> Limits:
    """The limits with those of the stored settings that `names` lists; each is checked like one that is given."""
    stored = state.get("limits") if isinstance(state, Mapping) else None
    if not names or not isinstance(stored, Mapping):
        return limits
    wanted = _plain(limits) | {name: stored[name] for name in names if name in stored}
    try:
        return checked_limits(**wanted)
    except ConfigError as error:
        raise _refused(error.what) from error


def _limits(stored: Any, limits: Limits) -> Limits:
    mine = _plain(limits)
    if not isinstance(stored, Mapping) or set(stored) != set(mine):
        raise _refused("its limits are not those of this version")
    changed = {name: stored[name] for name in mine if stored[name] != mine[name]}
    other = [name for name in changed if name not in TIGHTENED or not _positive(stored[name], mine[name])]
    if other:
        raise _refused(
            "the settings differ: " + ", ".join(f"{n} was {stored[n]!r}, now {mine[n]!r}" for n in sorted(other))
        )
    tighter = {name: value for name, value in changed.items() if value < mine[name]}
    return dataclasses.replace(limits, **tighter)


def _positive(*values: Any) -> bool:
    return all(isinstance(v, int | float) and not isinstance(v, bool) and 0 <= v < math.inf for v in values)


def _like(fresh: Any, stored: Any, where: str) -> Any:
    """`stored` in the shape of `fresh`: the same names, and numbers where it has numbers."""
    if dataclasses.is_dataclass(fresh) and not isinstance(fresh, type):
        names = [f.name for f in dataclasses.fields(fresh)]
        if not isinstance(stored, Mapping) or set(stored) != set(names):
            raise _refused(f"{where} does not hold {', '.join(names)}")
        return dataclasses.replace(fresh, **{n: _like(getattr(fresh, n), stored[n], f"{where}.{n}") for n in names})
    if isinstance(fresh, dict) and fresh:
        if not isinstance(stored, Mapping) or set(stored) != set(fresh):
            raise _refused(f"{where} does not hold {', '.join(fresh)}")
        return {name: _like(part, stored[name], f"{where}.{name}") for name, part in fresh.items()}
    if isinstance(fresh, dict):  # counts per rule, which begin empty
        if not isinstance(stored, Mapping) or not set(stored) <= set(RULES):
            raise _refused(f"{where} names a rule that does not exist")
        return {name: _leaf(0, value, f"{where}.{name}") for name, value in stored.items()}
    if isinstance(fresh, list):
        if not isinstance(stored, list):
            raise _refused(f"{where} is not a list")
        return [_leaf(0.0, value, where) for value in stored]
    return _leaf(fresh, stored, where)


def _leaf(fresh: Any, stored: Any, where: str) -> Any:
    if isinstance(fresh, bool):
        fits = isinstance(stored, bool)
    elif isinstance(fresh, int):
        fits = isinstance(stored, int) and not isinstance(stored, bool) and stored >= 0
    else:  # a float, or None where a number is not known yet
        number = isinstance(stored, int | float) and not isinstance(stored, bool) and math.isfinite(stored)
        fits = number or (fresh is None and stored is None)
    if not fits:
        raise _refused(f"{where} is {stored!r}")
    return stored


def _fired(stored: Any) -> dict[str, Any] | None:
    if stored is None:
        return None
    if not isinstance(stored, Mapping) or {n: type(v) for n, v in stored.items()} != _FIRED:
        raise _refused(f"fired is {stored!r}")
    return dict(stored)


def _status(stored: Any, status: type[T]) -> T:
    names = {f.name for f in dataclasses.fields(status)}  # type: ignore[arg-type]
    if not isinstance(stored, Mapping) or set(stored) != names:
        raise _refused("status does not hold what a status holds")
    bad = [n for n, v in stored.items() if isinstance(v, float) and not math.isfinite(v)]
    if bad:
        raise _refused(f"status.{bad[0]} is {stored[bad[0]]!r}")
    return status(**{name: tuple(v) if isinstance(v, list) else v for name, v in stored.items()})


def _refused(what: str) -> StateError:
    return StateError(
        f"the stored state of the guard is refused: {what}",
        "a guard that goes on from a wrong state would judge a run that never was",
        "resume with the settings and the version it was saved with, or start with a fresh guard",
    )
