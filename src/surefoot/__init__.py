"""surefoot: GRPO you can trust. Trains language models, and proves that the training did what it said.

surefoot.train(...)      train, as `surefoot train` does; keys of a config file are arguments
surefoot.prepare(...)    the same run, step by step: `run.step()`, `run.evaluate()`, `run.save()`, with callbacks
surefoot.resume(...)     go on with a run that was interrupted, or make one longer
surefoot.evaluate(...)   answer tasks with a run's weights or any model's
surefoot.Config          every key with its default: `surefoot.Config.model_fields`
surefoot.errors          what these raise: each error says what, why and how to repair it
surefoot.Outcome         what `train` and `resume` return
surefoot.Evaluation      what `evaluate` returns

See `surefoot.run.api` for the arguments.
"""

from __future__ import annotations

import typing as _typing

from surefoot import moved_names as _moved_names

if _typing.TYPE_CHECKING:
    from surefoot import errors
    from surefoot.config import Config
    from surefoot.run.api import evaluate, prepare, resume, train
    from surefoot.run.evaluate import Evaluation
    from surefoot.run.outcome import Outcome
    from surefoot.run.stepping import Callback, TrainingRun

_moved_names.install()

__version__ = "0.1.0"
__all__ = [
    "Callback", "Config", "Evaluation", "Outcome", "TrainingRun", "__version__", "errors", "evaluate", "prepare",
    "resume", "train",
]  # fmt: skip


def __getattr__(name: str) -> _typing.Any:  # heavy parts load on first use, so that `import surefoot` stays light
    if name in ("train", "prepare", "resume", "evaluate", "Outcome", "Evaluation", "Callback", "TrainingRun"):
        from surefoot.run import api

        return getattr(api, name)
    if name == "Config":
        from surefoot.config import Config

        return Config
    if name == "errors":
        import surefoot.errors as found  # `from surefoot import errors` would ask here again

        return found
    raise AttributeError(f"module 'surefoot' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What a user calls; submodules are found by importing them."""
    return sorted(__all__)
