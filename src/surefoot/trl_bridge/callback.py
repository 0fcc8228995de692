"""The guard for a trainer that stays as it is: any Hugging Face `Trainer`, or an unmodified `GRPOTrainer`.

Owns       folding at the trainer's own log events, and stopping it through its control flags.
Promises   at most one fold per logged step, and none for a log without a reward; a strict stop lets the trainer save a
           checkpoint first, writes verdict.json beside it, then raises `CollapseStopError`; a soft stop keeps asking.
Never      needs the trainer: the numbers come from its log, the model from the event.

    on_log --> fold --fired--> should_save, should_training_stop --> on_save (or the next event) --> raise

Read next: `guard.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from surefoot.trl_bridge import guard
from surefoot.trl_bridge.errors import refused
from surefoot.trl_bridge.evaluation import heldout_value
from surefoot.trl_bridge.guard import (
    FoldState,
    Readings,
    extras_for,
    fold,
    load_guard,
    metrics_of,
    noted,
    record_verdict,
    save_guard,
    stop_error,
)


class GuardCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not followed by the type checker
    """Stops a training whose held-out quality falls while the reward rises.

    Args:
        heldout_guard: a `surefoot.guards.HeldOutGuard`.
        heldout_eval_fn: measures the model on held-out tasks, no arguments, returns a float, larger is better.
        strict_killswitch: True raises `CollapseStopError`; False ends the training as if it were finished.
        reward_key: the entry of the log that holds the training reward.
        kl_key: the entry that holds the KL to the initial policy; it may be absent.
        heldout_eval_timeout: seconds after which an evaluation is an error; None waits for ever.
    """

    def __init__(
        self,
        heldout_guard: Any,
        heldout_eval_fn: Callable[[], float],
        strict_killswitch: bool = True,
        *,
        reward_key: str = "reward",
        kl_key: str = "kl",
        heldout_eval_timeout: float | None = None,
    ) -> None:
        if heldout_guard is None or not callable(heldout_eval_fn):
            raise refused("heldout_guard and heldout_eval_fn are both needed", "a callback without them does nothing")
        self.heldout_guard, self.heldout_eval_fn = heldout_guard, heldout_eval_fn
        self.strict_killswitch, self.timeout = strict_killswitch, heldout_eval_timeout
        self.reward_key, self.kl_key = reward_key, kl_key
        self._memory = FoldState()
        self._waiting = False
        self._limit: Any = None
        self._trouble: BaseException | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A resumed run goes on with the guard of its checkpoint."""
        if state.global_step > 0 and self.heldout_guard.last_status is None:
            checkpoint = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            load_guard(self.heldout_guard, checkpoint)
            self._memory.saved |= guard.steps_until(checkpoint)
            self._memory.fired = self.heldout_guard.last_status if self.heldout_guard.should_halt() else None
            self._insist(control)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Fold what was logged."""
        self._insist(control)
        if self._memory.fired is not None or not logs or self.reward_key not in logs:
            return  # an evaluation's log, or the summary at the end
        if not self._memory.is_new(state.global_step):
            return
        told = fold(self.heldout_guard, self._readings(state, logs), self._measure(state, kwargs), self._memory)
        if told.blind:
            return
        self._record(state, logs, metrics_of(told))
        if told.status.fire:
            control.should_training_stop = True
            control.should_save = True
            self._waiting = True
            self._limit, args.save_total_limit = getattr(args, "save_total_limit", None), None

    def _readings(self, state: Any, logs: Mapping[str, Any]) -> Readings:
        def read(name: str) -> float | None:
            # A key whose value is None is TRL's way to log a NaN.
            return None if name not in logs else float("nan") if logs[name] is None else float(logs[name])

        extras = extras_for(self.heldout_guard, read)
        return Readings(int(state.global_step), read(self.reward_key), read(self.kl_key), extras)

    def _measure(self, state: Any, event: Mapping[str, Any]) -> Callable[[], float]:
        model = event.get("model")
        return lambda: heldout_value(self.heldout_eval_fn, state.global_step, (model,), self.timeout)

    def _record(self, state: Any, logs: dict[str, Any], metrics: Mapping[str, float]) -> None:
        """Into the trainer's history, and into the record that later callbacks print."""
        logs.update(metrics)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(metrics)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask again for the checkpoint of the stop."""
        control.should_save = control.should_save or self._waiting

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The checkpoint is there: the guard's state goes into it, and a strict stop can happen."""
        save_guard(self.heldout_guard, Path(args.output_dir) / f"checkpoint-{state.global_step}")
        self._memory.saved.add(state.global_step)
        self._conclude(args, control)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """No further step after a stop."""
        self._conclude(args, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last chance to say it."""
        self._conclude(args, control)

    def _conclude(self, args: Any, control: Any) -> None:
        if self._waiting:
            self._waiting = False
            args.save_total_limit = self._limit
            own, strict = self._memory.saved, self.strict_killswitch
            folder, fired = Path(args.output_dir), self._memory.fired
            self._trouble = record_verdict(folder, fired, self.heldout_guard, strict=strict, own=own)
            if self._trouble is not None and not strict:
                warnings.warn(f"the guard stops the run; not saved: {self._trouble}", UserWarning, stacklevel=3)
        self._insist(control)

    def _insist(self, control: Any) -> None:
        if self._memory.fired is None or self._waiting:
            return
        control.should_training_stop = True
        if self.strict_killswitch:
            guard.exit_with_own_code()
            raise noted(stop_error(self._memory.fired), self.heldout_guard, self._trouble) from self._trouble
