"""The class that the guarded trainer extends: TRL's, or a stand-in where TRL is not installed.

Promises   only an absent TRL is replaced. One that is installed and broken fails with its own error.
"""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.errors import ConfigError
from surefoot.maths.preference import PreferencePair
from surefoot.trl_bridge import guard as stopping
from surefoot.trl_bridge.auxiliary import (
    DEAD_STEPS,
    HintFn,
    ReplayChannel,
    ReplayPairs,
    SdpoChannel,
    checked_weight,
    hint_function,
    require_finite,
)
from surefoot.trl_bridge.errors import refused
from surefoot.trl_bridge.evaluation import heldout_value
from surefoot.trl_bridge.guard import (
    FoldState,
    Readings,
    extras_for,
    fold,
    load_guard,
    metrics_of,
    save_guard,
    steps_until,
)


def _missing() -> ConfigError:
    return ConfigError(
        "TRL is not installed",
        "GuardedGRPOTrainer is TRL's GRPOTrainer with a guard inside; there is nothing to put it into",
        "pip install 'surefoot[trl]', or use `surefoot train`, whose guard needs no TRL",
    )


class MissingGRPOTrainer:
    """Has the methods that the guarded trainer calls on its parent, and refuses every one of them."""

    state: Any
    args: Any
    control: Any
    _metrics: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise _missing()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Refused."""
        raise _missing()

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        raise _missing()

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        raise _missing()

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        raise _missing()

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        raise _missing()


if TYPE_CHECKING or importlib.util.find_spec("trl") is None:
    GRPOParent = MissingGRPOTrainer
else:
    from trl import GRPOTrainer as GRPOParent


# -- At which steps the guard folds: those at which the trainer logs ------------------------------


def fold_every(logging_steps: Any, max_steps: Any = None) -> int:
    """Steps from one fold to the next.

    A whole number counts steps. A number between 0 and 1 is that share of the run, rounded up, as in Hugging Face's
    `Trainer`; it needs `max_steps`.

    Example:
        >>> fold_every(10), fold_every(0.1, max_steps=35)
        (10, 4)
    """
    what = f"logging_steps = {logging_steps!r}"
    why = "the guard folds when the trainer logs, and this names no step"
    if isinstance(logging_steps, bool | str) or not _is_finite(logging_steps) or logging_steps <= 0:
        raise refused(f"{what} is not a number above 0", why, "use logging_steps=10, or any whole number")
    if logging_steps < 1:
        if not _is_finite(max_steps) or max_steps <= 0:
            raise refused(f"{what} is a share of an unknown number of steps", why, "set max_steps, or a whole number")
        share: float = max_steps * logging_steps
        return math.ceil(share)
    if logging_steps != int(logging_steps):
        raise refused(f"{what} is not whole", why, "use a whole number, or a share below 1")
    return int(logging_steps)


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except TypeError:
        return False


# -- TRL's GRPO trainer with a guard inside, and two optional loss channels -----------------------
# Owns       when the guard folds, what it is fed from TRL's metric store, and how a run is stopped.
# Promises   at most one fold per optimiser step; TRL's own metrics stay what they are, new ones have new names; a
# strict
# stop logs, saves a checkpoint and the verdict, then raises `CollapseStopError`, on every rank at the same
# step; a soft stop stays asked for, whoever clears the flag.
# Never      calls TRL's `log()` for an ordinary fold: it averages and clears the store of the step that is running.
#
# _compute_loss --> parent's loss --> + alpha_sdpo * sdpo + beta_replay * replay
# |
# +-- every logging_steps --> _maybe_update_killswitch --> evaluate --> fold --> log --> stop


class GuardedGRPOTrainer(GRPOParent):
    """`trl.GRPOTrainer` that stops when held-out quality falls while the reward rises.

    All other arguments go to TRL's trainer.

    Args:
        heldout_guard: a `surefoot.guards.HeldOutGuard`; None trains without one.
        heldout_eval_fn: measures the model on held-out tasks, no arguments, returns a float, larger is better. Runs in
            eval mode on the first rank, every `logging_steps` steps; other ranks wait for it.
        strict_killswitch: True raises `CollapseStopError`; False ends the training as if it were finished.
        heldout_eval_timeout: seconds after which an evaluation is an error; None waits for ever.
        alpha_sdpo: weight of the self-distillation loss; 0 switches it off.
        sdpo_hints: where its teachers' hints come from: a dataset column, or a function of the rows (`HintRow`).
        sdpo_mixing: 0 forward KL, 1 reverse KL, in between generalised Jensen-Shannon.
        sdpo_top_k: compare that many tokens, and all others as one; None compares every token.
        beta_replay: weight of the trace-replay loss; 0 switches it off.
        replay_pairs: what it replays, with references; see `score_pairs`.
        replay_per_batch: pairs per microbatch and process.
        replay_beta: how far the policy may move from the reference; small is far.
        replay_max_tokens: longest prompt with answer; longer pairs are dropped.
        channel_dead_steps: steps in a row without any contribution after which an enabled channel is an error.
    """

    # Class attributes, so that an instance that was never constructed has a guard that does nothing.
    heldout_guard: Any = None
    heldout_eval_fn: Callable[[], float] | None = None
    strict_killswitch: bool = True
    heldout_eval_timeout: float | None = None
    alpha_sdpo: float = 0.0
    beta_replay: float = 0.0
    _sdpo: SdpoChannel | None = None
    _replay: ReplayChannel | None = None

    def __init__(
        self,
        *args: Any,
        heldout_guard: Any = None,
        heldout_eval_fn: Callable[[], float] | None = None,
        strict_killswitch: bool = True,
        heldout_eval_timeout: float | None = None,
        alpha_sdpo: float = 0.0,
        sdpo_hints: str | HintFn | None = None,
        sdpo_mixing: float = 1.0,
        sdpo_top_k: int | None = None,
        beta_replay: float = 0.0,
        replay_pairs: Iterable[PreferencePair] | None = None,
        replay_per_batch: int = 2,
        replay_beta: float = 0.1,
        replay_max_tokens: int = 4096,
        channel_dead_steps: int = DEAD_STEPS,
        **kwargs: Any,
    ) -> None:
        _check_guard(heldout_guard, heldout_eval_fn, heldout_eval_timeout, kwargs.get("args"))
        self.heldout_guard, self.heldout_eval_fn = heldout_guard, heldout_eval_fn
        self.strict_killswitch, self.heldout_eval_timeout = strict_killswitch, heldout_eval_timeout
        self.alpha_sdpo = checked_weight("alpha_sdpo", alpha_sdpo)
        self.beta_replay = checked_weight("beta_replay", beta_replay)
        if channel_dead_steps < 1:
            raise refused(f"channel_dead_steps = {channel_dead_steps}", "it counts steps", "use 1 or more")
        if self.alpha_sdpo:
            hints = hint_function(sdpo_hints, getattr(kwargs.get("train_dataset"), "column_names", None))
            self._sdpo = SdpoChannel(hints, mixing=sdpo_mixing, top_k=sdpo_top_k, dead_steps=channel_dead_steps)
        if self.beta_replay:
            stock = ReplayPairs(
                replay_pairs, per_batch=replay_per_batch, beta=replay_beta, max_tokens=replay_max_tokens
            )
            self._replay = ReplayChannel(stock, dead_steps=channel_dead_steps)
        super().__init__(*args, **kwargs)  # last: a refused argument must not load a model first

    # -- the guard ------------------------------------------------------------------

    @property
    def _killswitch(self) -> FoldState:
        return self.__dict__.setdefault("_killswitch_memory", FoldState())  # type: ignore[no-any-return]

    def _maybe_update_killswitch(self) -> None:
        """Fold once, log, and stop if the guard fires. Without a guard nothing at all happens."""
        guard = self.heldout_guard
        if guard is None:
            return
        told = fold(guard, self._readings(), self._measure, self._killswitch)
        if told.blind:
            return
        if told.status.fire:
            stopping.stop(self, told)
            return
        store = self._metrics["train"]
        for name, value in metrics_of(told).items():
            store.setdefault(name, []).append(value)

    def _readings(self) -> Readings:
        reward = self._tail("reward")
        # TRL empties its store when it logs. What is trained on meanwhile is still the batch of the last reward.
        reward = self._killswitch.last_reward if reward is None else reward
        extras = extras_for(self.heldout_guard, self._tail)
        return Readings(int(self.state.global_step), reward, self._tail("kl"), extras)

    def _tail(self, name: str) -> float | None:
        """The newest value of a training metric. `get`: a lookup in TRL's defaultdict would invent an empty series."""
        series = self._metrics["train"].get(name)
        return float(series[-1]) if series else None

    def _measure(self) -> float:
        if self.heldout_eval_fn is None:
            raise refused("heldout_guard is set and heldout_eval_fn is None", "the guard has nothing to compare with")
        models = (getattr(self, "model", None), getattr(self, "model_wrapped", None))
        return heldout_value(self.heldout_eval_fn, self.state.global_step, models, self.heldout_eval_timeout)

    def _fold_is_due(self) -> bool:
        state, args = getattr(self, "state", None), getattr(self, "args", None)
        if state is None or args is None or not self._is_training():
            return False
        most = getattr(state, "max_steps", None) or getattr(args, "max_steps", None)
        if state.global_step % fold_every(args.logging_steps, most):
            return False
        # Under gradient accumulation the loss is computed several times at one step.
        return self._killswitch.is_new(state.global_step)

    def _is_training(self) -> bool:
        return getattr(getattr(self, "model", None), "training", True) is not False

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's log; the newest reward is noted first, since TRL empties its store here."""
        reward = self._tail("reward")
        self._killswitch.last_reward = self._killswitch.last_reward if reward is None else reward
        super().log(logs, start_time)

    # -- the losses -----------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        """The parent's loss, the channels on top, and the guard when it is due."""
        if self._killswitch.fired is not None:
            stopping.insist(self, self._killswitch.fired)
        loss = super()._compute_loss(model, inputs)
        if self.alpha_sdpo and self._is_training():
            loss = loss + self.alpha_sdpo * self._component("sdpo", self._compute_sdpo_loss(model, inputs))
        if self.beta_replay and self._is_training():
            loss = loss + self.beta_replay * self._component("replay", self._compute_trace_replay_loss(model, inputs))
        if self._fold_is_due():
            self._maybe_update_killswitch()
        return loss

    def _compute_sdpo_loss(self, model: Any, inputs: Any) -> Any:
        """Divergence of the model from itself with a hint in its context: this microbatch's share."""
        if self._sdpo is None:
            raise refused("alpha_sdpo was set after construction", "the channel has no hints")
        loss, live = self._sdpo.loss(self, model, inputs)
        self._note("sdpo/live_fraction", live)
        return loss

    def _compute_trace_replay_loss(self, model: Any, inputs: Any) -> Any:
        """Preference loss on the next recorded pairs: this microbatch's share."""
        if self._replay is None:
            raise refused("beta_replay was set after construction", "the channel has no pairs")
        loss, wins = self._replay.loss(self, model, inputs)
        self._note("replay/wins", wins)
        return loss

    def _component(self, name: str, loss: Any) -> Any:
        step = getattr(getattr(self, "state", None), "global_step", 0)
        # Shares of microbatches add up, TRL averages its store: times their number, the average is the step's loss.
        parts = getattr(self, "current_gradient_accumulation_steps", 1)
        mean = require_finite(name, loss, step)
        if mean:  # a microbatch without a live row has no loss; 0 would pull the average down
            self._note(f"{name}/loss", mean * parts)
        return loss

    def _note(self, name: str, value: float) -> None:
        store = getattr(self, "_metrics", None)
        if store is not None:
            store["train"].setdefault(name, []).append(value)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        """TRL's rollouts; with the self-distillation channel on, each with its teacher's prompt."""
        batch = super()._generate_and_score_completions(inputs)
        return self._sdpo.add_teachers(self, inputs, batch) if self._sdpo and self._is_training() else batch

    # -- checkpoints ----------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        self._killswitch.saved.add(self.state.global_step)
        save_guard(self.heldout_guard, stopping.output_folder(self, trial) / f"checkpoint-{self.state.global_step}")

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            load_guard(self.heldout_guard, Path(checkpoint))
            self._killswitch.saved |= steps_until(Path(checkpoint))
            if self.heldout_guard is not None and self.heldout_guard.should_halt():
                self._killswitch.fired = self.heldout_guard.last_status


def _check_guard(guard: Any, eval_fn: Any, timeout: Any, args: Any) -> None:
    if guard is not None and not callable(eval_fn):
        raise refused(
            f"heldout_guard is given and heldout_eval_fn is {eval_fn!r}",
            "the guard compares the reward with held-out quality; without it there is nothing to compare with",
            "pass heldout_eval_fn: a function without arguments that returns a float",
        )
    if guard is None and eval_fn is not None:
        warnings.warn("heldout_eval_fn is given without heldout_guard: it is never called", UserWarning, stacklevel=3)
    if timeout is not None and not timeout > 0:
        raise refused(f"heldout_eval_timeout = {timeout!r}", "it counts seconds", "use a number above 0, or None")
    if guard is not None and args is not None and not 0 < getattr(args, "logging_steps", 1) < 1:
        fold_every(getattr(args, "logging_steps", 1))  # a share of the run is checked once its length is known


__all__ = ["GRPOParent", "MissingGRPOTrainer"]
