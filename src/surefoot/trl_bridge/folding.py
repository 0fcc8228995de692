"""One fold of the guard, told by the first rank and followed by the others.

Owns       what a fold rests on (`Readings`), what came of it (`Told`), and what is remembered between folds (`Memory`).
Promises   the evaluation runs on the first rank only, once per fold, and not at all without a usable reward; all ranks
           fold the same numbers and act on the same status; a guard that stays blind is an error after a while.
Never      reads a trainer: callers hand in numbers.

    Readings --first rank: evaluate, update--> Told --broadcast--> every rank: follow, act
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from surefoot.errors import CollapseStopError, InputError
from surefoot.trl_bridge import ranks

BLIND_FOLDS = 25
"""Folds in a row without a reward after which a guard that sees nothing is an error."""


@dataclass(frozen=True)
class Readings:
    """What the trainer's own log says at one step."""

    step: int
    reward: float | None
    kl: float | None = None
    extras: Mapping[str, float] = field(default_factory=dict)
    """Further numbers that the guard's rules ask for, by the names that `update` gives them."""


@dataclass(frozen=True)
class Told:
    """What the first rank says about one fold; the same on every rank."""

    status: Any = None
    """The guard's status; None when there was nothing to fold."""
    folded: Mapping[str, Any] | None = None
    """The arguments of the guard's update; None when it was not advanced."""
    blind: str = ""
    """Why there was nothing to fold."""
    seconds: float = 0.0


@dataclass
class Memory:
    """What lasts between folds."""

    seen_step: int | None = None
    """The last step at which a fold was due: there is one chance per optimiser step."""
    last_reward: float | None = None
    blind: int = 0
    warned: set[str] = field(default_factory=set)
    fired: Any = None
    """The status that stopped the run; latched."""
    saved: set[int] = field(default_factory=set)
    """Steps with a checkpoint of this run: an output folder may hold those of others."""

    def is_new(self, step: int) -> bool:
        """Whether `step` has not had its fold yet; it has from now on."""
        if step == self.seen_step:
            return False
        self.seen_step = step
        return True

    def warn_once(self, text: str) -> None:
        """A warning that is worth saying once per run."""
        if text not in self.warned:
            self.warned.add(text)
            warnings.warn(text, UserWarning, stacklevel=3)


def fold(guard: Any, readings: Readings, evaluate: Callable[[], float], memory: Memory) -> Told:
    """Fold once, on all ranks alike.

    Args:
        evaluate: measures the held-out quality; called on the first rank only, and only when it is needed.
    """
    told = ranks.from_first(lambda: _on_first_rank(guard, readings, evaluate))
    if told.blind:
        _count_blind(told.blind, readings.step, memory)
        return told
    memory.blind = 0
    if ranks.rank() != 0 and told.folded is not None:
        guard.update(**told.folded)  # the copy keeps up, for its own last_status and its checkpoint
    for rule in getattr(told.status, "unfed", ()):
        memory.warn_once(
            f"the guard's rule {rule!r} is on and has never been given a number"
            + (": TRL logs no KL while its beta is 0" if rule == "kl" else "")
        )
    if told.status.fire:
        memory.fired = told.status
    return told


def _on_first_rank(guard: Any, readings: Readings, evaluate: Callable[[], float]) -> Told:
    if guard.should_halt():
        return Told(status=guard.last_status)
    if readings.reward is None:
        return Told(blind="no reward has been logged")
    if not math.isfinite(readings.reward):
        return Told(blind=f"the reward is {readings.reward}")
    began = time.perf_counter()
    heldout = evaluate()
    seconds = time.perf_counter() - began
    numbers = {"step": readings.step, "reward": readings.reward, "heldout": heldout, "kl": readings.kl}
    numbers |= readings.extras
    status = guard.update(**numbers) or guard.last_status  # somebody's own guard may return nothing
    return Told(status=status, folded=numbers, seconds=seconds)


def _count_blind(why: str, step: int, memory: Memory) -> None:
    memory.blind += 1
    memory.warn_once(f"step {step}: {why}; the guard skips this fold")
    if memory.blind >= BLIND_FOLDS:
        raise InputError(
            f"step {step}: {why}, for {memory.blind} folds in a row",
            "a guard that sees no reward guards nothing",
            "let the reward functions return a number for some rollout, or train without the guard",
        )


def stop_error(status: Any) -> CollapseStopError:
    """The error of a strict stop."""
    if hasattr(status, "as_error"):
        return status.as_error()  # type: ignore[no-any-return]
    return CollapseStopError(  # somebody's own guard
        f"step {getattr(status, 'step', '?')}: {getattr(status, 'reason', 'the guard fired')}",
        "the reward no longer stands for what you want",
        "go back to a checkpoint from before the decline, and repair the reward",
        status,
    )


def metrics_of(told: Told) -> dict[str, float]:
    """The numbers to log about one fold."""
    status = told.status
    if hasattr(status, "as_metrics"):
        found: dict[str, float] = dict(status.as_metrics())
    else:
        names = ("proxy_real_gap", "kl_ema")
        found = {
            f"killswitch/{name}": getattr(status, name) for name in names if getattr(status, name, None) is not None
        }
        found["killswitch/fire"] = float(bool(status.fire))
    return found | {"killswitch/eval_seconds": told.seconds}


RULE_INPUTS = {
    "entropy_collapse": ("entropy", "entropy"),
    "length_explosion": ("length", "completions/mean_length"),
    "length_collapse": ("length", "completions/mean_length"),
    "reward_saturated": ("reward_std", "reward_std"),
}
"""Rule -> (argument of `update`, TRL's metric)."""


def extras_for(guard: Any, read: Callable[[str], float | None]) -> dict[str, float]:
    """What the guard's optional rules ask for, as far as the trainer logs it; `read` looks up a metric."""
    rules = getattr(getattr(guard, "limits", None), "rules", ())
    wanted = {argument: metric for rule, (argument, metric) in RULE_INPUTS.items() if rule in rules}
    found = {argument: read(metric) for argument, metric in wanted.items()}
    return {argument: value for argument, value in found.items() if value is not None and math.isfinite(value)}
