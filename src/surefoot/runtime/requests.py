"""Rollout requests: one request is one group, and everything it takes to run it anywhere.

Owns       the form of a request, and the seed of every rollout in it.
Promises   a request that is run twice, anywhere, with the same weights, gives the same tokens from an engine of ours;
           it can be pickled and holds no more than one task.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from surefoot.errors import EngineError, TaskError
from surefoot.protocols import Completion, Request
from surefoot.records import Group, Task

# -- One seed for the run, one private stream per rollout: a pure function of names ---------------


def derive_seed(seed: int, *names: str | int) -> int:
    """A 63-bit seed for the stream with these names.

    Example:
        >>> derive_seed(0, "train", 1, "sums/1+1", 0) != derive_seed(0, "train", 1, "sums/1+1", 1)
        True
    """
    text = "\x1f".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


# -- A rollout request: one group, and everything it takes to run it anywhere --------------------


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn."""

    num_generations: int
    temperature: float
    max_completion_length: int
    max_width: int
    """Longest prompt plus completion that fits the context."""


@dataclass(frozen=True)
class RolloutResult:
    """A group with the task metric of each sibling beside it."""

    group: Group
    correct: tuple[float | None, ...]


@dataclass(frozen=True)
class RolloutRequest:
    """One group to be sampled and graded.

    Example:
        >>> task = Task(id="sums/1+1", prompt="1+1=")
        >>> request = RolloutRequest(task, (1, 5), Sampling(2, 1.0, 8, 16), purpose="train", step=7, position=3)
        >>> request.group, [each.id for each in request.requests(0, frozenset({2}))]
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


def request_for(
    task: Task, prompts: Mapping[str, tuple[int, ...]], sampling: Sampling, *, purpose: str, step: int, position: int
) -> RolloutRequest:
    """What has to be known to run one group anywhere.

    Args:
        prompts: token ids of every task's prompt, by task id; encoded once, before the run.
    """
    if task.id not in prompts:
        raise TaskError(f"task {task.id} was never encoded", "prompts become tokens once", "add it to the task set")
    return RolloutRequest(task, prompts[task.id], sampling, purpose, step, position)


# -- The seam between what decides which group is next and what runs it --------------------------


class RolloutRunner(Protocol):
    """Runs groups of rollouts, many at a time: threads of this process, or a pool of replicas."""

    @property
    def capacity(self) -> int:
        """Groups that can be in flight at once and still be worked on."""

    async def run(self, request: RolloutRequest) -> RolloutResult:
        """Run the rollouts of one group and grade them.

        May be cancelled at any moment, and then holds nothing. What asking again cannot repair is raised as a typed
        error; a lost engine or worker is replaced inside, and another one asked.
        """


# -- Who is asked for completions: an engine, or one rollout runner's own way to a shared one -----


class CompletionSource(Protocol):
    """As much of an engine as rollouts use."""

    def submit(self, requests: Sequence[Request]) -> Future[list[Completion]]:
        """Ask from any thread; the answers come in the requests' order. Cancelling the future withdraws them."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Ask, and wait."""


class CancellableEngine:
    """The requests of one group to an engine that others use too: all of them can be withdrawn at once.

    Args:
        submit: asks the engine, here or in another process; a future that is cancelled frees its rows.
    """

    def __init__(self, submit: Callable[[Sequence[Request]], Future[list[Completion]]]) -> None:
        self._submit = submit
        self._lock = threading.Lock()
        self._asked: set[Future[list[Completion]]] = set()
        self._cancelled = False

    def submit(self, requests: Sequence[Request]) -> Future[list[Completion]]:
        """Ask; refused once it was cancelled."""
        with self._lock:
            if self._cancelled:
                raise EngineError("the rollouts were cancelled", "nobody waits for them any more", "ask again")
            asked = self._submit(requests)
            self._asked.add(asked)
        asked.add_done_callback(self._forget)
        return asked

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Ask, and wait."""
        return self.submit(requests).result()

    def cancel(self) -> None:
        """Withdraw everything that was asked and is not answered; ask nothing more."""
        with self._lock:
            self._cancelled = True
            asked = list(self._asked)
        for future in asked:
            future.cancel()

    def _forget(self, asked: Future[list[Completion]]) -> None:
        with self._lock:
            self._asked.discard(asked)
