"""An order over millions that nobody has to store: keyed permutations, and a random stream that is one number.

Owns       which position comes next, epoch after epoch.
Promises   every position exactly once per epoch; none twice in one take, also over an epoch's border; any position is
           reached in constant time and memory; the order is a function of (seed, epoch, n) alone, on every machine.
Never      stores an order of more than a thousand, uses a global random state, or Python's `hash()`.

    position --Feistel rounds over a x b >= n, walked until below n--> position'

The rounds are those of a generalised Feistel cipher (Black and Rogaway): each adds to one half a keyed hash of the
other, so each can be undone, so the whole is a permutation whatever the hash is.

Read next: `data/on_disk/stream.py`, which deals tasks in this order.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from surefoot.data.files import complexity_of
from surefoot.data.tasks import read_position, refuse_take
from surefoot.errors import ConfigError, TaskError
from surefoot.records import Task
from surefoot.system.files import sha256_bytes, sha256_number

ROUNDS = 8
SMALL = 1024
"""Up to here the order is sorted by hash and kept: rounds over so few values cannot reach every order equally."""


class Permutation:
    """One shuffled order of 0 .. n-1, by (seed, epoch).

    Example:
        >>> sorted(map(Permutation(5, seed=0, epoch=0), range(5)))
        [0, 1, 2, 3, 4]
    """

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        if n < 1:
            raise ConfigError(f"a permutation of {n}", "there is nothing to order", "bring at least one task")
        self.n = n
        self._a = math.isqrt(n - 1) + 1
        self._b = -(-n // self._a)
        self._keys = [sha256_bytes(f"{seed}/{epoch}/{n}/{turn}") for turn in range(ROUNDS)]
        self._sorted = sorted(range(n), key=lambda value: _mix(value, self._keys[0])) if n <= SMALL else None

    def __call__(self, position: int) -> int:
        """Where `position` is mapped to."""
        if not 0 <= position < self.n:
            raise IndexError(f"position {position} of {self.n}")
        if self._sorted is not None:
            return self._sorted[position]
        value = self._rounds(position)
        while value >= self.n:  # outside, go on: the cycle leads back inside, and nobody else arrives there
            value = self._rounds(value)
        return value

    def _rounds(self, value: int) -> int:
        left, right = divmod(value, self._b)
        for turn, key in enumerate(self._keys):
            if turn % 2:
                right = (right + _mix(left, key)) % self._b
            else:
                left = (left + _mix(right, key)) % self._a
        return left * self._b + right


def _mix(value: int, key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(value.to_bytes(8, "little"), digest_size=8, key=key).digest(), "little")


class CountedRandom:
    """A random stream whose whole state is how often it was asked.

    Example:
        >>> one, two = CountedRandom(0, "levels"), CountedRandom(0, "levels", asked=1)
        >>> _ = one.uniform()
        >>> one.uniform() == two.uniform()
        True
    """

    def __init__(self, seed: int, name: str, asked: int = 0) -> None:
        self.seed, self.name, self.asked = seed, name, asked

    def uniform(self) -> float:
        """The next number in [0, 1)."""
        number = sha256_number(f"{self.seed}/{self.name}/{self.asked}")
        self.asked += 1
        return (number >> 11) / 2**53  # 53 bits: the division cannot round up to 1


class IndexStream:
    """Deals 0 .. n-1 without end, one permutation per epoch.

    A take that crosses an epoch's border empties the old epoch first. What it already holds is then moved back in the
    new one, behind what this take still needs: nothing comes twice in the take, nothing is missing from the epoch.
    Only the few positions touched by that are kept; the rest of the order is computed.

    Args:
        identity: names what is dealt, so that a state of something else can be refused.
    """

    def __init__(self, n: int, seed: int, identity: str = "") -> None:
        self.n, self._seed, self._identity = n, seed, identity
        self._epoch = self._position = self._needed = 0
        self._held: tuple[int, ...] = ()
        self._arrange()

    @property
    def epoch(self) -> int:
        """The pass that the last dealt position belongs to, from 0."""
        return self._epoch

    @property
    def position(self) -> int:
        """How many of this epoch were dealt."""
        return self._position

    def take(self, n: int) -> list[int]:
        """(n,) the next ones, all different."""
        refuse_take(n, self.n)
        taken = self._draw(n)
        if len(taken) < n:
            self.next_epoch(held=taken, needed=n - len(taken))
            taken += self._draw(n - len(taken))
        return taken

    def rest(self, n: int) -> list[int]:
        """Up to n of what is left of this epoch; none when it is over."""
        return self._draw(n)

    def next_epoch(self, held: Sequence[int] = (), needed: int = 0) -> None:
        """Begin the next pass, whatever is left of this one.

        Args:
            held: what somebody holds already; none of it is among the first `needed` of the new epoch.
        """
        if len(set(held)) + needed > self.n:
            raise TaskError(
                f"{needed} tasks beside {len(set(held))} others were asked for and there are {self.n}",
                "one step would visit a task twice and count it as two", "lower tasks_per_step, or bring more tasks",
            )  # fmt: skip
        self._epoch, self._position = self._epoch + 1, 0
        self._held, self._needed = tuple(dict.fromkeys(held)), needed
        self._arrange()

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly here, as plain JSON data; its size does not depend on n."""
        return {
            "seed": self._seed, "epoch": self._epoch, "position": self._position, "held": list(self._held),
            "needed": self._needed, "size": self.n, "tasks": self._identity,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; a state of other tasks or another seed is refused."""
        found = read_position(state, self.state_dict(), self.n, lambda x: type(x) is int and 0 <= x < self.n)
        self._epoch, self._position, self._needed, self._held = found
        self._arrange()

    def _draw(self, n: int) -> list[int]:
        start = self._position
        self._position = min(start + n, self.n)
        head = self._head
        return [head[at] if at < len(head) else self._order(at) for at in range(start, self._position)]

    def _arrange(self) -> None:
        """The epoch's order; its head holds what the take over the border needs, then what it brought along."""
        self._order = Permutation(self.n, self._seed, self._epoch)
        held = set(self._held)
        first: list[int] = []
        moved_back: list[int] = []
        for at in range(self.n):
            if len(first) == self._needed:
                break
            value = self._order(at)
            (moved_back if value in held else first).append(value)
        self._head = first + moved_back


# -- The visits to one level's tasks, pass after pass, any of them in constant time ---------------


class LevelVisit(NamedTuple):
    """A task's id, and how often it was visited before."""

    task: str
    occurrence: int


class LevelOrder:
    """The order of one level.

    Args:
        apart: at most as many as there are tasks. A level of fewer than three times as many keeps one order for all
            passes: reshuffling it could bring a task back too soon.

    Example:
        >>> order = LevelOrder([Task(id=name, prompt="?") for name in "ab"], seed=0, level="easy", apart=2)
        >>> visits = [order.visit(k) for k in range(4)]
        >>> sorted(visits[:2])
        [Visit(task='a', occurrence=0), Visit(task='b', occurrence=0)]
        >>> [visit.task for visit in visits[:2]] == [visit.task for visit in visits[2:]]
        True
    """

    def __init__(self, tasks: Sequence[Task], seed: int, level: str, *, apart: int) -> None:
        self.tasks, self.level, self.apart = tasks, level, apart
        self._seed = zlib.crc32(f"{seed}/{level}".encode())
        self._pass, self._order, self._head = -1, Permutation(max(1, len(tasks)), self._seed, 0), list[int]()

    def visit(self, k: int) -> LevelVisit:
        """The k-th visit, from 0."""
        number, place = divmod(k, len(self.tasks))
        if number != self._pass:
            self._begin(number)
        at = self._head[place] if place < len(self._head) else self._order(place)
        return LevelVisit(self.tasks[at].id, number)

    def holds(self, task: Task) -> bool:
        """Whether the task is of this level."""
        return complexity_of(task.columns) == self.level

    def _begin(self, number: int) -> None:
        size, apart = len(self.tasks), self.apart
        reshuffled = size >= 3 * apart
        self._pass, self._order = number, Permutation(size, self._seed, number if reshuffled else 0)
        self._head = []
        if number and reshuffled:
            before = Permutation(size, self._seed, number - 1)
            late = {before(place) for place in range(size - apart, size)}  # the head of that pass does not reach here
            head = [self._order(place) for place in range(2 * apart)]
            self._head = [*(at for at in head if at not in late), *(at for at in head if at in late)]
