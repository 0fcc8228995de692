"""What a guard thinks after one evaluation: numbers to log, and the error that a strict stop raises."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.errors import CollapseStopError


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
