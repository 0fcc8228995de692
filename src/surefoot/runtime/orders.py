"""What is asked of whoever plays: one order is one group, and everything it takes to play it anywhere.

Owns       the form of an order, and the seed of every rollout in it.
Promises   an order that is played twice, by anybody, with the same weights, gives the same tokens from an engine of
           ours; it can be pickled and holds no more than one task.
"""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.protocols import Request
from surefoot.records import Group, Task
from surefoot.runtime.seeds import derive_seed


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn."""

    num_generations: int
    temperature: float
    max_completion_length: int
    max_width: int
    """Longest prompt plus completion that fits the context."""


@dataclass(frozen=True)
class Played:
    """A group with the task metric of each sibling beside it."""

    group: Group
    correct: tuple[float | None, ...]


@dataclass(frozen=True)
class Order:
    """One group to be played.

    Example:
        >>> task = Task(id="sums/1+1", prompt="1+1=")
        >>> order = Order(task, (1, 5), Sampling(2, 1.0, 8, 16), purpose="train", step=7, position=3)
        >>> order.group, [request.id for request in order.requests(0, frozenset({2}))]
        ('train/7/3', ['train/7/3/0', 'train/7/3/1'])
    """

    task: Task
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    purpose: str
    """train, eval or preflight: each has random streams of its own."""
    step: int
    """With `position` it names the visit: which step asks, or the serial number of the lease."""
    position: int

    @property
    def group(self) -> str:
        """Name of the group that comes out, unique in the run."""
        return f"{self.purpose}/{self.step}/{self.position}"

    def requests(self, seed: int, stop_ids: frozenset[int]) -> list[Request]:
        """One request per sibling.

        Args:
            seed: the run's.
        """
        sampling = self.sampling
        room = min(sampling.max_completion_length, sampling.max_width - len(self.prompt_ids))
        return [
            Request(
                id=f"{self.group}/{i}", prompt_ids=self.prompt_ids, max_new_tokens=room,
                temperature=sampling.temperature, stop_ids=stop_ids,
                seed=derive_seed(seed, self.purpose, self.step, self.task.id, i),
            )
            for i in range(sampling.num_generations)
        ]  # fmt: skip
