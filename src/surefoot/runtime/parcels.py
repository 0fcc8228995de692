"""What crosses between driver, learner and engines: facts about the learner, and weights by name or by value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surefoot.protocols import DecoderSpec

if TYPE_CHECKING:
    from surefoot.policy.census import Census
    from surefoot.policy.learner import GRPOLearner


@dataclass(frozen=True)
class Facts:
    """What the loop asks of a learner between two steps."""

    version: int
    census: Census | None
    checked_tokens: int
    splits: int
    changed_entries: int

    @classmethod
    def of(cls, learner: GRPOLearner) -> Facts:
        """As they are now."""
        return cls(learner.version, learner.census, learner.checked_tokens, learner.splits, learner.changed_entries)


@dataclass(frozen=True)
class PolicyFacts:
    """What the driver has to know of a model that lives elsewhere."""

    name: str
    tokenizer: Any
    stop_ids: frozenset[int]
    spec: DecoderSpec
    model_config: Mapping[str, Any]
    """`config.json` of the model, as a dictionary."""


def opened(parcel: Any) -> Mapping[str, Any]:
    """Weights by name, out of either form: views into shared memory, or the tensors themselves."""
    if isinstance(parcel, Mapping):
        return parcel
    from surefoot.runtime.shared_weights import attach

    return attach(parcel)
