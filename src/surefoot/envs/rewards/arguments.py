"""Which arguments a reward function is handed beside the columns of its task, in TRL's names.

Owns       `completion_ids` and `trainer_state`: who gets them, and what the second one knows.
Promises   both are facts of the rollouts alone, so that a resumed or repeated run hands over the same; what TRL passes
           and we do not is refused by name before anything is sampled.
Never      imports transformers: a reward worker that has it by fork is larger and slower to start.

Read next: `reward_worker.py`, which makes the call.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.envs.rewards.marks import RewardFunction
from surefoot.errors import RewardError

COMPLETION_IDS, TRAINER_STATE = "completion_ids", "trainer_state"
RESERVED = ("prompts", "completions", COMPLETION_IDS, TRAINER_STATE)
"""Names of arguments that are not columns; a column of that name could not be handed over."""
_NOT_PASSED = {
    "log_extra": "put what you want to see into the reward's own print: RUN/logs/rewards.log keeps it",
    "log_metric": "make it a reward function of its own with weight 0 in reward_weights: its mean is logged",
    "environments": "let the environment's own get_reward judge; messages and outcomes of calls are in completions",
}
"""What TRL passes and we do not, and what to do instead."""


@dataclass(frozen=True)
class TrainerState:
    """How far the run is, as far as reward functions may know: two of the fields of transformers' `TrainerState`.

    Example:
        >>> TrainerState(global_step=3, max_steps=10).global_step
        3
    """

    global_step: int
    """Optimiser steps behind the weights that wrote these completions."""
    max_steps: int
    """Optimiser steps of the whole run; 0 where nothing is trained."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer_state has no {name!r} here: a reward function is told global_step and max_steps")


def parameters_of(function: RewardFunction) -> Sequence[inspect.Parameter] | None:
    """Parameters of a function, in order; None for callables written in C that do not say."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def asks_for(function: RewardFunction, name: str) -> bool:
    """Whether the function is handed `name`: it names it, or takes everything (`**columns`), as TRL passes it.

    Scorers of our own take everything and need neither, so they get what they name: tokens are not sent for nothing.

    Example:
        >>> [asks_for(f, TRAINER_STATE) for f in (lambda completions, trainer_state: [], lambda completions: [])]
        [True, False]
    """
    parameters = parameters_of(function)
    if parameters is None:
        return False
    if any(p.name == name for p in parameters):
        return True
    ours = (getattr(function, "__module__", None) or "").partition(".")[0] == "surefoot"
    return not ours and any(p.kind is p.VAR_KEYWORD for p in parameters)


def refuse_unusable(function: Any) -> None:
    """Raise if this is a model, or needs an argument of TRL's that nobody here passes."""
    if any(base.__name__ == "Module" and base.__module__.startswith("torch.nn") for base in type(function).__mro__):
        raise RewardError(
            f"reward_funcs holds a {type(function).__name__}, which is a model",
            "rewards are computed by functions, in processes of their own",
            "write a function that asks the model and returns one number per completion (docs/rewards.md)",
        )
    for parameter in parameters_of(function) or ():
        if parameter.name in _NOT_PASSED and parameter.default is parameter.empty and parameter.kind in _BY_NAME:
            raise RewardError(
                f"reward function {getattr(function, '__name__', function)!s} needs {parameter.name}",
                "TRL passes it and we do not (docs/rewards.md lists what is passed)",
                _NOT_PASSED[parameter.name],
            )


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
