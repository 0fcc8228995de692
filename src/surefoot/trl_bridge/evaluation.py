"""Call the user's held-out evaluation without disturbing the training around it.

Owns       eval mode, gradient mode and random streams around a foreign function; what its answer may be.
Promises   module modes and the random streams of python, numpy and torch (CPU and CUDA) are put back exactly, also when
           the function raises; every failure is a `HeldOutEvalError` that names the step.
Never      guesses: NaN, None, text and truth values are refused, not converted.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from surefoot.trl_bridge.errors import HeldOutEvalError

EvalFn = Callable[[], float]


def heldout_value(eval_fn: EvalFn, step: int, models: tuple[Any, ...] = (), timeout: float | None = None) -> float:
    """One evaluation: a finite float, or a `HeldOutEvalError`.

    Args:
        models: put into eval mode meanwhile; what is no torch module is passed over.
        timeout: seconds to wait for the function; None waits for ever.
    """
    with undisturbed(*models):
        try:
            value = eval_fn() if timeout is None else _within(timeout, eval_fn, step)
        except HeldOutEvalError:
            raise
        except Exception as error:
            raise HeldOutEvalError(
                f"step {step}: the held-out evaluation raised {type(error).__name__}: {error}",
                "without it nobody sees whether the reward still means anything",
                "repair heldout_eval_fn; its own traceback is above this one",
            ) from error
    return _checked(value, step)


@contextmanager
def undisturbed(*models: Any) -> Iterator[None]:
    """Models in eval mode, no gradients; modes and random streams as before, however it ends."""
    streams = _random_streams()
    try:
        with eval_mode(*models), torch.no_grad():
            yield
    finally:
        _restore(streams)


@contextmanager
def eval_mode(*models: Any) -> Iterator[None]:
    """Eval mode for a while. Each submodule gets its own mode back: some may have been in eval mode on purpose."""
    modules = [module for model in models if isinstance(model, nn.Module) for module in model.modules()]
    modes = [(module, module.training) for module in modules]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training


def _random_streams() -> dict[str, Any]:
    streams: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        streams["cuda"] = torch.cuda.get_rng_state_all()
    return streams


def _restore(streams: dict[str, Any]) -> None:
    random.setstate(streams["python"])
    np.random.set_state(streams["numpy"])
    torch.set_rng_state(streams["torch"])
    if "cuda" in streams:
        torch.cuda.set_rng_state_all(streams["cuda"])


def _within(seconds: float, eval_fn: EvalFn, step: int) -> Any:
    """The function's answer, if it comes in time.

    It runs in a thread of its own: a function that hangs in C code cannot be interrupted, only left behind. The thread
    is a daemon, so that the process can still end.
    """
    future: Future[Any] = Future()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            with torch.no_grad():  # gradient mode belongs to a thread
                future.set_result(eval_fn())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            future.set_exception(error)

    threading.Thread(target=run, name="heldout-eval", daemon=True).start()
    try:
        return future.result(timeout=seconds)
    except TimeoutError as error:
        if future.done():  # the function's own TimeoutError
            raise
        raise HeldOutEvalError(
            f"step {step}: the held-out evaluation took longer than {seconds:g} s",
            "a run that waits for its evaluation trains nothing and looks alive",
            "make heldout_eval_fn faster, or raise heldout_eval_timeout",
        ) from error


def _checked(value: Any, step: int) -> float:
    is_flag = isinstance(value, bool | np.bool_) or getattr(value, "dtype", None) is torch.bool
    if value is not None and not is_flag and not isinstance(value, str | bytes):
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise HeldOutEvalError(
        f"step {step}: heldout_eval_fn returned {value!r} ({type(value).__name__}), not a finite number",
        "a missing or broken measurement is no measurement; the guard was not advanced",
        "return the held-out metric as one finite float, larger is better",
    )
