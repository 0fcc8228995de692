"""Stop the run that is hurting the model: held-out quality falls while the reward rises.

Owns       the verdict on a pair of curves, and the fact that it was given: a guard that fired stays fired.
Promises   a fold takes floats and gives a status, in constant time; a refused number leaves the guard as it was; the
           state is plain JSON and a resumed guard goes on exactly where it was; calibration only tightens.
Never      evaluates, logs, stops a process, or imports torch. Who calls it does.

    update(step, reward, heldout, kl) --> curves --> rules --> GuardStatus
                                                       |
                                                       +-- fired once --> should_halt() is True for good

Read next: `collapse_rules.py`, what counts as a collapse; `noise.py`, what counts as noise; `collapse_rules.py`, how
often it is wrong.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from surefoot.errors import CollapseStopError, ConfigError, InputError, StateError
from surefoot.guards.collapse_rules import (
    RULES,
    CollapseLimits,
    Curves,
    breached,
    checked_limits,
    decline_margin,
    describe,
    finite,
    make_curves,
    number_or_none,
    whole,
)
from surefoot.guards.noise import ROUNDING
from surefoot.system.text import sparkline

# -- Two curves in text, for the moment when a run is stopped -------------------------------------


MOST = 512
"""Points that are kept; beyond it neighbours are averaged and each point stands for twice as many values."""


@dataclass
class ThinnedCurve:
    """A series of any length in at most `MOST` points."""

    points: list[float] = field(default_factory=list)
    stride: int = 1
    pending: float = 0.0
    waiting: int = 0
    first: float = 0.0
    last: float = 0.0
    low: float = 0.0
    high: float = 0.0

    def add(self, value: float) -> None:
        """Append one value."""
        empty = not self.points and not self.waiting
        self.first, self.last = value if empty else self.first, value
        self.low, self.high = (value, value) if empty else (min(self.low, value), max(self.high, value))
        self.pending += (value - self.pending) / (self.waiting + 1)
        self.waiting += 1
        if self.waiting == self.stride:
            self.points.append(self.pending)
            self.pending, self.waiting = 0.0, 0
        if len(self.points) == MOST:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [left + (right - left) / 2 for left, right in pairs]
            self.stride *= 2

    def line(self, name: str, width: int) -> str:
        """`held-out  0.810 ▇█▆▃▁ 0.220  (0.220 to 0.830)`: first value, picture, last value, range."""
        values = _squeezed([*self.points, self.pending] if self.waiting else self.points, width)
        span = f"({self.low:.3f} to {self.high:.3f})"
        return f"{name:<9} {self.first:>6.3f} {sparkline(values, width)} {self.last:<6.3f} {span}"


def _squeezed(values: Sequence[float], width: int) -> list[float]:
    count = min(width, len(values))
    cuts = [len(values) * i // count for i in range(count + 1)] if count else [0]
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(cuts)]


# -- What a guard thinks after one evaluation: numbers to log, and the error that a strict stop raises


@dataclass(frozen=True)
class GuardStatus:
    """What the guard thinks after one fold.

    Example:
        >>> from surefoot.guards import HeldOutGuard
        >>> guard = HeldOutGuard(min_steps=3, decline_patience=3, ema_alpha=0.5)
        >>> for t in range(4):
        ...     status = guard.update(step=t, reward=0.30 + 0.03 * t, heldout=0.28 - 0.05 * t)
        >>> status.fire, status.rule, status.step, round(status.proxy_real_gap, 2)
        (True, 'decline', 3, 0.17)
    """

    fire: bool
    reason: str
    """Why it fired, in one sentence; empty while it has not."""
    rule: str
    """The rule that fired first; empty while none has."""
    step: int
    folds: int
    reward: float
    heldout: float
    reward_ema: float
    heldout_ema: float
    proxy_real_gap: float
    """Reward gain minus held-out gain since the first fold, both smoothed."""
    kl_ema: float | None
    """None until the first KL was given."""
    streak: int
    """Folds in a row in which the held-out average fell and the reward average rose."""
    noise: float
    """Estimated standard error of one held-out evaluation."""
    margin: float | None
    """How far the held-out average has to fall below its best; None while the noise is unknown."""
    drop: float
    """How far it lies below its best now."""
    best_heldout: float
    best_step: int
    fired_step: int | None
    """The step at which it fired; None while it has not."""
    unfed: tuple[str, ...] = ()
    """Rules that are on and have never been given the number they need."""

    def as_metrics(self) -> dict[str, float]:
        """The numbers to log; what is not defined is left out."""
        named = {
            "fire": float(self.fire),
            "heldout": self.heldout,
            "heldout_ema": self.heldout_ema,
            "reward_ema": self.reward_ema,
            "proxy_real_gap": self.proxy_real_gap,
            "kl_ema": self.kl_ema,
            "streak": float(self.streak),
        }
        return {f"killswitch/{name}": value for name, value in named.items() if value is not None}

    def as_error(self) -> CollapseStopError:
        """The error that a strict stop raises."""
        return CollapseStopError(
            f"step {self.fired_step if self.fired_step is not None else self.step}: {self.reason or 'no rule fired'}",
            "the reward no longer stands for what you want; every further step moves the model away from it",
            f"take the checkpoint of step {self.best_step} or the last before it, look at rollouts with a high reward, "
            "and repair the reward",
            self,
        )


# -- A guard's state as plain JSON, and back: what does not fit is refused before anything is changed


FORMAT = 1
TIGHTENED = ("kl_hard_stop", "max_proxy_real_gap")
"""Limits that calibration may have changed since the guard was made."""
_FIRED = {"rule": str, "reason": str, "fired_step": int}
T = TypeVar("T")


def dump(limits: CollapseLimits, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts, lists, numbers, text and None; the caller's objects are copied."""
    return {"format": FORMAT, "limits": _plain(limits), **{name: _plain(part) for name, part in parts.items()}}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


def restore(state: Any, limits: CollapseLimits, fresh: Mapping[str, Any], status: type[T]) -> dict[str, Any]:
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


def adopted(state: Any, limits: CollapseLimits, names: Sequence[str]) -> CollapseLimits:
    """The limits with those of the stored settings that `names` lists; each is checked like one that is given."""
    stored = state.get("limits") if isinstance(state, Mapping) else None
    if not names or not isinstance(stored, Mapping):
        return limits
    wanted = _plain(limits) | {name: stored[name] for name in names if name in stored}
    try:
        return checked_limits(**wanted)
    except ConfigError as error:
        raise _refused(error.what) from error


def _limits(stored: Any, limits: CollapseLimits) -> CollapseLimits:
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


# -- Stop the run that is hurting the model: held-out quality falls while the reward rises --------


HEADROOM = 1.5
"""A calibrated limit leaves this much room above the worst of the healthy run."""
ENOUGH = 20
"""Evaluations of a healthy run that say something about a limit."""


class HeldOutGuard:
    """Folds one evaluation after the other and says when to stop.

    Args:
        min_steps: folds before any rule may fire.
        decline_patience: folds in a row that have to speak for a decline.
        ema_alpha: weight of the newest value in every moving average.
        kl_hard_stop: turns the rule `kl` on: highest average KL to the initial policy.
        max_proxy_real_gap: turns the rule `gap` on: how much more than held-out the reward may gain.
        rules: names of the rules that are on; without it `decline`, and the two above when their limit is given.
        margin_se: standard errors by which a fall has to exceed noise; 0 switches the margin off.
        min_drop: a fall below held-out's best that is smaller than this is of no interest, however certain.
        min_entropy_ratio: for `entropy_collapse`: share of the early entropy that has to be left.
        max_length_ratio: for the length rules: how many times longer or shorter than at first.
        saturation_patience: for `reward_saturated`: folds in a row without any spread.
        own: rules of the user's own by name, asked after `min_steps` folds: a reason to stop, or None.
    """

    def __init__(
        self,
        *,
        min_steps: int = 10,
        decline_patience: int = 3,
        ema_alpha: float = 0.1,
        kl_hard_stop: float | None = None,
        max_proxy_real_gap: float | None = None,
        rules: Sequence[str] | None = None,
        margin_se: float = 4.2,
        min_drop: float = 0.0,
        min_entropy_ratio: float = 0.1,
        max_length_ratio: float = 3.0,
        saturation_patience: int = 15,
        own: Mapping[str, Callable[[Curves], str | None]] | None = None,
    ) -> None:
        self.own = dict(own or {})
        self.limits = checked_limits(
            rules=rules,
            min_steps=min_steps,
            decline_patience=decline_patience,
            ema_alpha=ema_alpha,
            margin_se=margin_se,
            min_drop=min_drop,
            kl_hard_stop=kl_hard_stop,
            max_proxy_real_gap=max_proxy_real_gap,
            min_entropy_ratio=min_entropy_ratio,
            max_length_ratio=max_length_ratio,
            saturation_patience=saturation_patience,
        )
        self._curves: Curves = make_curves(self.limits)
        self._drawn = {"reward": ThinnedCurve(), "held-out": ThinnedCurve()}
        self._fired: dict[str, Any] | None = None
        self._status: GuardStatus | None = None

    @property
    def last_status(self) -> GuardStatus | None:
        """The status of the last fold; None before the first."""
        return self._status

    @property
    def first_heldout(self) -> float | None:
        """The held-out value of the first fold; None before it."""
        return self._curves.first_heldout if self._curves.heldout.count else None

    def should_halt(self) -> bool:
        """Whether it has ever fired. Asking changes nothing."""
        return self._fired is not None

    def update(
        self,
        step: int,
        reward: float,
        heldout: float,
        kl: float | None = None,
        *,
        heldout_se: float | None = None,
        entropy: float | None = None,
        length: float | None = None,
        reward_std: float | None = None,
    ) -> GuardStatus:
        """Fold one evaluation.

        Args:
            step: the optimiser step it belongs to.
            reward: mean training reward, the proxy.
            heldout: quality on held-out tasks, the real thing; larger is better.
            kl: KL to the initial policy; a value that is not finite counts as a breach.
            heldout_se: standard error of `heldout`, where it is known; see `noise.proportion_se`.
            entropy: mean token entropy.
            length: mean completion length.
            reward_std: spread of the rewards within the batch or its groups.

        Raises:
            InputError: a number is missing or not finite; the guard is left as it was.
        """
        step = whole("step", step)
        reward, heldout = finite("reward", reward), finite("heldout", heldout)
        kl = number_or_none("kl", kl)
        extras = {"heldout_se": heldout_se, "length": length, "reward_std": reward_std}
        extras = {name: finite(name, v, least=0.0) if v is not None else None for name, v in extras.items()}
        entropy = None if entropy is None else finite("entropy", entropy)
        self._fold(step, reward, heldout, extras["heldout_se"])
        self._fold_kl(kl)
        self._fold_others(reward, entropy, extras["length"], extras["reward_std"])
        self._drawn["reward"].add(reward)
        self._drawn["held-out"].add(heldout)
        self._status = self._judge(step, reward, heldout)
        return self._status

    def fires(self, reward: float, heldout: float, heldout_se: float | None = None) -> bool:
        """Fold one evaluation as `update` does, and say no more than whether it has ever fired.

        For simulations, which fold some ten thousand: numbers are not checked, and no picture and no status is kept.
        """
        curves = self._curves
        self._fold(curves.heldout.count, reward, heldout, heldout_se)
        self._fold_others(reward, None, None, None)
        if breached(curves, self.limits) and self._fired is None:
            self._fired = {"rule": "", "reason": "", "fired_step": curves.heldout.count}
        return self._fired is not None

    def _fold(self, step: int, reward: float, heldout: float, se: float | None) -> None:
        curves = self._curves
        if curves.heldout.count == 0:
            curves.first_reward, curves.first_heldout = reward, heldout
        curves.reward.fold(reward)
        curves.heldout.fold(heldout, se)
        if "gap" in self.limits.rules:
            curves.lead.fold(heldout - reward, se)
        if curves.heldout.best_count == curves.heldout.count:
            curves.reward_at_best, curves.best_step = curves.reward.ema, step
        curves.streak = curves.streak + 1 if curves.heldout.fell and curves.reward.rose else 0

    def _fold_kl(self, kl: float | None) -> None:
        curves = self._curves
        if kl is None:
            return
        if not math.isfinite(kl):
            curves.kl_nonfinite += 1
        elif curves.kl_ema is None:
            curves.kl_ema = kl
        else:
            curves.kl_ema += self.limits.ema_alpha * (kl - curves.kl_ema)

    def _fold_others(self, reward: float, entropy: float | None, length: float | None, std: float | None) -> None:
        curves = self._curves
        if entropy is not None:
            curves.entropy.fold(entropy)
        if length is not None:
            curves.length.fold(length)
        tiny = ROUNDING * max(1.0, abs(reward))
        curves.std_seen = curves.std_seen or std is not None
        flat = std <= tiny if std is not None else curves.last_reward == reward
        curves.saturated = flat and (curves.best_reward is None or reward >= curves.best_reward - tiny)
        curves.best_reward = reward if curves.best_reward is None else max(curves.best_reward, reward)
        curves.last_reward = reward

    def _judge(self, step: int, reward: float, heldout: float) -> GuardStatus:
        curves, limits = self._curves, self.limits
        level = curves.heldout
        found = {name: RULES[name].reason(curves, limits) for name in breached(curves, limits)}
        if self._fired is None and level.count >= limits.min_steps:
            found |= {name: reason for name, rule in self.own.items() if (reason := rule(curves)) is not None}
        if found and self._fired is None:
            self._fired = {"rule": next(iter(found)), "reason": "; ".join(found.values()), "fired_step": step}
        margin = decline_margin(curves, limits)
        unfed = () if level.count < limits.min_steps else tuple(r for r in limits.rules if not RULES[r].fed(curves))
        return GuardStatus(
            fire=self._fired is not None,
            **(self._fired or {"rule": "", "reason": "", "fired_step": None}),
            step=step,
            folds=level.count,
            reward=reward,
            heldout=heldout,
            reward_ema=curves.reward.ema,
            heldout_ema=level.ema,
            proxy_real_gap=curves.gap,
            kl_ema=curves.kl_ema,
            streak=curves.streak,
            noise=level.sd,
            margin=margin if math.isfinite(margin) else None,
            drop=level.drop,
            best_heldout=level.best,
            best_step=curves.best_step,
            unfed=unfed,
        )

    def calibrate(self, healthy: Iterable[Mapping[str, float]]) -> dict[str, float]:
        """Tighten the limits by a run that is known to be healthy; returns those that changed.

        Each row holds the keyword arguments of one `update`; a step is not needed. A limit becomes the worst of the
        healthy run with half as much again on top, if that is tighter than what is configured; it is never loosened.
        Only limits of rules that are on are touched.
        """
        twin = HeldOutGuard(**arguments_of(self.limits))
        worst_kl, worst_gap, folds = 0.0, 0.0, 0
        for folds, row in enumerate(healthy, start=1):
            status = twin.update(folds, **_row(row))
            worst_kl = max(worst_kl, status.kl_ema or 0.0)
            worst_gap = max(worst_gap, twin._curves.lead.drop)
        if twin._status is None or folds < ENOUGH or twin._status.fire:
            raise _unfit(folds, twin._status)
        found = {"kl_hard_stop": worst_kl, "max_proxy_real_gap": worst_gap}
        found = {name: HEADROOM * value for name, value in found.items() if value > 0.0}
        return self.tighten(found)

    def tighten(self, limits: Mapping[str, float]) -> dict[str, float]:
        """Take over those limits of an earlier calibration that are tighter than what is set; returns these."""
        tighter: dict[str, Any] = {
            name: value for name, value in limits.items() if value < (getattr(self.limits, name) or 0.0)
        }
        self.limits = replace(self.limits, **tighter)
        return tighter

    def describe(self) -> str:
        """The settings in words, with how often they are wrong and how long they take."""
        return describe(self.limits)

    def curves(self, width: int = 48) -> str:
        """Reward and held-out as two lines of text, over the whole run."""
        if width < 1:
            raise InputError(f"width is {width}", "a picture needs at least one column", "use for example width=48")
        return "\n".join(curve.line(name, width) for name, curve in self._drawn.items())

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, as plain JSON."""
        parts = {"curves": self._curves, "drawn": self._drawn, "fired": self._fired, "status": self._status}
        return dump(self.limits, parts)

    def load_state_dict(self, state: Mapping[str, Any], adopt: Sequence[str] = ()) -> None:
        """Go on where `state_dict` was taken; anything that does not fit is refused and nothing is changed.

        Args:
            adopt: settings that nobody wrote down but were derived: here the stored ones count.
        """
        fresh = {"curves": make_curves(self.limits), "drawn": {"reward": ThinnedCurve(), "held-out": ThinnedCurve()}}
        parts = restore(state, adopted(state, self.limits, adopt), fresh, GuardStatus)
        self.limits = parts["limits"]
        self._curves, self._drawn = parts["curves"], parts["drawn"]
        self._fired, self._status = parts["fired"], parts["status"]


def arguments_of(limits: CollapseLimits) -> dict[str, Any]:
    """What a guard with these limits is made with."""
    return {f.name: getattr(limits, f.name) for f in fields(limits)}


def _row(row: Mapping[str, float]) -> dict[str, Any]:
    optional = {"kl", "heldout_se", "entropy", "length", "reward_std", "step"}
    if not {"reward", "heldout"} <= set(row) <= {"reward", "heldout", *optional}:
        raise InputError(
            f"a row of the healthy run holds {', '.join(sorted(row)) or 'nothing'}",
            "calibration folds it like an evaluation",
            f"each row needs reward and heldout, and may have {', '.join(sorted(optional))}",
        )
    return {name: value for name, value in row.items() if name != "step"}


def _unfit(folds: int, status: GuardStatus | None) -> InputError:
    what = status.reason if status is not None and status.fire else f"it has {folds} evaluations"
    return InputError(
        f"this run cannot calibrate a guard: {what}",
        f"limits are taken from at least {ENOUGH} evaluations of a run on which the guard itself stays silent",
        "pass a longer healthy run, or look at why it is not healthy",
    )


__all__ = ["GuardStatus", "HeldOutGuard"]
