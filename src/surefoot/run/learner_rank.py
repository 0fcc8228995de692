"""The process of one further rank of the learner: loads the model, meets the others, follows rank 0.

Promises   ends when the driver does, by SIGKILL too; what it prints goes to its log; an error of ours arrives at the
           driver with its type, what, why and fix.
Never      samples, saves or decides anything by itself.

Read next: `runtime/learner_ranks.py`, who leads.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.system.process import die_with_parent

if TYPE_CHECKING:
    from surefoot.runtime.specs import LearnerSpec


def main() -> int:
    """Follow until rank 0 leaves."""
    die_with_parent(os.getppid())
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what a library prints is no answer
    from surefoot.runtime.learner_ranks import FollowingRank, follow

    rank = FollowingRank(recipe_of)
    follow(rank, sys.stdin.buffer, answers.write)
    return int(rank.failed)


def recipe_of(index: int, config_json: str, base: str, logs: str) -> LearnerSpec:
    """What this rank's model and learner are made of, by the run's config; its own log is open already."""
    from surefoot.config import Config
    from surefoot.run.build import learner_spec
    from surefoot.run.model import set_determinism

    config = Config.model_validate_json(config_json)
    print(
        f"rank {index} of {config.runtime.learner_ranks} begins as process {os.getpid()}", file=sys.stderr, flush=True
    )
    set_determinism(config)
    return replace(learner_spec(config, Path(base), ()), gpu=index)


if __name__ == "__main__":
    sys.exit(main())
