"""A cache that forgets what was not asked for the longest.

Promises   never more than `capacity` entries; a stored None is a value and no miss; safe to use from many threads.
"""

from __future__ import annotations

import enum
import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Final, Generic, Literal, TypeVar

from surefoot.errors import ConfigError

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Miss(enum.Enum):
    """The type of `MISS`."""

    MISS = "miss"


MISS: Final = Miss.MISS
"""What `get` returns for a key that is not there: unlike None, nobody can have stored it by accident."""


class LRUCache(Generic[K, V]):
    """Least recently used goes first.

    Example:
        >>> cache = LRUCache(2)
        >>> cache.put("a", 1); cache.put("b", None)
        >>> cache.get("a"), cache.get("b"), cache.get("c") is MISS
        (1, None, True)
    """

    def __init__(self, capacity: int) -> None:
        if type(capacity) is not int or capacity < 1:  # True is no capacity
            raise ConfigError(
                f"a cache of capacity {capacity!r}", "it could never hold anything", "use a whole number from 1 on"
            )
        self.capacity = capacity
        self.hits = self.misses = self.evicted = 0
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K) -> V | Literal[Miss.MISS]:
        """The value, which is now the last to be forgotten; `MISS` where there is none."""
        with self._lock:
            if key not in self._entries:
                self.misses += 1
                return MISS
            self.hits += 1
            self._entries.move_to_end(key)
            return self._entries[key]

    def put(self, key: K, value: V) -> None:
        """Store or update; a new key may push out the oldest."""
        with self._lock:
            self._entries[key] = value
            self._entries.move_to_end(key)
            if len(self._entries) > self.capacity:
                self._entries.popitem(last=False)
                self.evicted += 1

    def clear(self) -> None:
        """Forget everything but the counts."""
        with self._lock:
            self._entries.clear()

    def items(self) -> list[tuple[K, V]]:
        """All entries, the next to be forgotten first; asks for none of them."""
        with self._lock:
            return list(self._entries.items())

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)
