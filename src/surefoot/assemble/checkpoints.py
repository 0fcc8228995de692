"""Checkpoints of a run, written and read where its learner lives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from surefoot.policy.checkpoint_read import load_training_checkpoint
from surefoot.policy.learner import GRPOLearner
from surefoot.policy.training_state import save_training_checkpoint


class Checkpoints(Protocol):
    """Saving and going back, for a learner in this process or elsewhere."""

    def save(self, folder: Path, *, step: int, extra: Mapping[str, Any]) -> None:
        """Weights, tokenizer, training state and `extra` as one folder; complete or absent."""

    def load(self, folder: Path) -> Mapping[str, Any]:
        """Bring the learner to this checkpoint; returns what was given as `extra`."""


class LocalCheckpoints:
    """For a learner in this process."""

    def __init__(self, learner: GRPOLearner, tokenizer: Any) -> None:
        self._learner, self._tokenizer = learner, tokenizer

    def save(self, folder: Path, *, step: int, extra: Mapping[str, Any]) -> None:
        """See `Checkpoints.save`."""
        save_training_checkpoint(self._learner, self._tokenizer, folder, step=step, extra=extra)

    def load(self, folder: Path) -> Mapping[str, Any]:
        """See `Checkpoints.load`."""
        return load_training_checkpoint(self._learner, folder).extra
