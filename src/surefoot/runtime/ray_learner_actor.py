"""The learner's process: the policy, its optimiser, and the memory that engines read its weights from.

Owns       the one thread that touches them.
Promises   what is staged is the version that was asked for, and stays as it is while the learner goes on; checkpoints
           are written and read here, on a disk that the driver sees too.

Read next: `ray_learner.py`, the driver's end.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from surefoot.errors import InvariantError
from surefoot.protocols import Scored, StepReport
from surefoot.records import TrainSample
from surefoot.runtime.parcels import Facts, PolicyFacts, opened
from surefoot.runtime.ray_actors import Host
from surefoot.runtime.recipes import LearnerRecipe, ProcessRecipe

if TYPE_CHECKING:
    from surefoot.policy.checkpoint_read import Loaded
    from surefoot.policy.learner import GRPOLearner
    from surefoot.policy.load import Policy

T = TypeVar("T")


class LearnerHost(Host):
    """The policy and its optimiser; one thread touches them."""

    def __init__(self, name: str, process: ProcessRecipe, recipe: LearnerRecipe) -> None:
        super().__init__(name, process)
        self.recipe = recipe
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="learner")
        self.policy: Policy
        self.learner: GRPOLearner
        self._shared: Any = None

    async def setup(self) -> tuple[dict[str, Any], PolicyFacts]:
        """Load the model."""
        return await self.whereabouts(), await self._do(self._build)

    def _build(self) -> PolicyFacts:
        self.process.set_torch()
        self.policy, self.learner = self.recipe.build()
        policy = self.policy
        self.ready()
        shape = json.loads(policy.model.config.to_json_string(use_diff=False))
        return PolicyFacts(policy.name, policy.tokenizer, policy.stop_ids, policy.spec, shape)

    async def _do(self, work: Callable[[], T]) -> T:
        self.in_flight += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self.in_flight -= 1

    async def facts(self) -> Facts:
        """What the loop asks the learner between two steps."""
        return await self._do(lambda: Facts.of(self.learner))

    async def learn(self, samples: Sequence[TrainSample], iteration: int) -> tuple[StepReport, Facts]:
        """One optimiser step."""
        return await self._do(lambda: (self.learner.learn(samples, iteration=iteration), Facts.of(self.learner)))

    async def score(self, texts: Sequence[Scored], temperature: float) -> list[tuple[float, ...]]:
        """Log-probabilities under the current weights."""
        return await self._do(lambda: self.learner.score(texts, temperature=temperature))

    async def stage(self, version: int) -> Any:
        """The current weights where engines on this machine can read them, while the learner goes on."""
        return await self._do(lambda: self._stage(version))

    def _stage(self, version: int) -> Any:
        from surefoot.runtime.shared_weights import SharedWeights, specs_of

        if version != self.learner.version:
            raise InvariantError(
                f"version {version} is to be published, and the learner has version {self.learner.version}",
                "weights would be served under another version's name", "publish learner.version",
            )  # fmt: skip
        weights = self.learner.weights()
        if self._shared is None:
            self._shared = SharedWeights.create(specs_of(weights))
        return self._shared.write(weights, version)

    async def ship(self, staged: Any) -> dict[str, Any]:
        """What was staged, by value, for engines elsewhere; not the current weights, which may have moved on."""
        return await asyncio.to_thread(lambda: {name: w.clone() for name, w in opened(staged).items()})

    async def save(self, folder: Path, step: int, extra: Mapping[str, Any]) -> Facts:
        """A whole checkpoint, on the disk that this process and the driver share."""
        from surefoot.policy.training_state import save_training_checkpoint

        def save() -> Facts:
            save_training_checkpoint(self.learner, self.policy.tokenizer, folder, step=step, extra=extra)
            return Facts.of(self.learner)

        return await self._do(save)

    async def load(self, folder: Path) -> tuple[Loaded, Facts]:
        """Go back to a checkpoint."""
        from surefoot.policy.checkpoint_read import load_training_checkpoint

        return await self._do(lambda: (load_training_checkpoint(self.learner, folder), Facts.of(self.learner)))

    async def inspect(self, look: Callable[[Any, Any], T]) -> T:
        """What `look(policy, learner)` returns, here where they are."""
        return await self._do(lambda: look(self.policy, self.learner))

    async def close(self) -> None:
        """Unlink shared memory."""
        if self._shared is not None:
            await self._do(self._shared.close)
