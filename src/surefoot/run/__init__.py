"""Config becomes objects; the only place that wires.

`inputs` reads what the user brought, without torch; `build` makes the moving parts; `session`
runs them inside a run folder; `evaluate` looks at a finished run again.
"""

from __future__ import annotations

from surefoot.run.session import Outcome, resume, train

__all__ = ["Outcome", "evaluate", "resume", "train"]


def __getattr__(name: str) -> object:
    if name == "evaluate":
        from surefoot.run.evaluate import evaluate

        return evaluate
    raise AttributeError(name)
