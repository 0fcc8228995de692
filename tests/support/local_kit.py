"""The publisher of a runtime in this process, with probes made of the runtime's own prompts."""

from __future__ import annotations

from surefoot.runtime.local import TOLERANCE, LocalRuntime
from surefoot.runtime.weights import Publisher, Score, make_probes


def publisher_here(local: LocalRuntime, score: Score) -> Publisher:
    """As `run.build` makes it for a run without processes of its own."""
    probes = make_probes(
        local.collector.prompts.values(), temperature=local.train.temperature, max_width=local.train.max_width,
        max_completion_length=local.train.max_completion_length,
    )  # fmt: skip
    return Publisher(probes, score, tolerance=TOLERANCE, deadline_s=None)
