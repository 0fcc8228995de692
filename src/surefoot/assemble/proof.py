"""What an engine has to prove after every weight update, for the model and the tasks of this run."""

from __future__ import annotations

from surefoot.assemble.learning import canary_tolerance
from surefoot.assemble.prepare import Prepared
from surefoot.config import Config
from surefoot.runtime.probes import LaterScore, Score, make_probes
from surefoot.runtime.weights import Publisher


def make_publisher(config: Config, ready: Prepared, score: Score | LaterScore) -> Publisher:
    """Asks engines questions made of this run's own prompts, at its own temperature.

    Args:
        score: the learner's log-probabilities of given tokens.
    """
    prompts = [ready.prompts[task.id] for task in ready.train[:64]]
    probes = make_probes(
        prompts, temperature=config.temperature, max_width=ready.engine_width,
        max_completion_length=config.max_completion_length,
    )  # fmt: skip
    return Publisher(probes, score, tolerance=canary_tolerance(config))
