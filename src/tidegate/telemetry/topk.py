"""The heaviest keys of a stream in bounded memory: the space-saving sketch of Metwally, Agrawal and El Abbadi.

It holds at most `capacity` keys, however many distinct keys there are. The count of a held key is never too low, and
too high by at most total / capacity. A key with more than that share of the stream is always held.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

__all__ = ["Heavy", "SpaceSaving", "Thinning"]

K = TypeVar("K", bound=Hashable)


class Heavy(NamedTuple, Generic[K]):
    """One of the heaviest keys."""

    key: K
    weight: int
    """Never below the true weight."""
    error: int
    """The true weight is at least `weight - error`."""


class SpaceSaving(Generic[K]):
    """Counts keys. `add` of a held key is one dictionary access; a new key costs O(log capacity)."""

    __slots__ = ("_capacity", "_counts", "_errors", "_heap", "_order", "total")

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity: got {capacity}, expected at least 1")
        self._capacity = capacity
        self._counts: dict[K, int] = {}
        self._errors: dict[K, int] = {}
        # (count when pushed, order of arrival, key). An entry may be below the count of its key, never above: the least
        # count is found by correcting the top until it is up to date. The order avoids comparing keys.
        self._heap: list[tuple[int, int, K]] = []
        self._order = 0
        self.total: int = 0

    def add(self, key: K, weight: int = 1) -> None:
        """Count `key`. A weight below 1 counts nothing."""
        if weight < 1:
            return
        self.total += weight
        counts = self._counts
        held = counts.get(key)
        if held is not None:
            counts[key] = held + weight
            return
        if len(counts) < self._capacity:
            error = 0
        else:
            error = self._evict_least()
            self._errors[key] = error
        counts[key] = error + weight
        self._order += 1
        heapq.heappush(self._heap, (error + weight, self._order, key))

    def _evict_least(self) -> int:
        """Drop the key with the least count (the oldest of several), and return its count."""
        heap = self._heap
        while True:
            pushed, order, key = heap[0]
            count = self._counts[key]
            if pushed == count:
                heapq.heappop(heap)
                del self._counts[key]
                self._errors.pop(key, None)
                return count
            heapq.heapreplace(heap, (count, order, key))

    def top(self, at_most: int) -> list[Heavy[K]]:
        """The heaviest keys, heaviest first."""
        largest = heapq.nlargest(at_most, self._counts.items(), key=lambda item: item[1])
        return [Heavy(key, count, self._errors.get(key, 0)) for key, count in largest]

    def __len__(self) -> int:
        return len(self._counts)


class Thinning:
    """Weights of the events of a stream. Up to `per_s` events per second weigh 1 each; above that, one in `share`,
    drawn at random, weighs `share` and the others 0. The sum stays correct on average."""

    __slots__ = ("_count", "_per_s", "_random", "_second", "_share")

    def __init__(self, per_s: int, share: int, random: Callable[[], float]) -> None:
        self._per_s = per_s
        self._share = share
        self._random = random
        self._second = 0
        self._count = 0

    def weight(self, now_s: int) -> int:
        """The weight of one event at `now_s`; skip the event if it is 0."""
        if now_s != self._second:
            self._second = now_s
            self._count = 0
        self._count += 1
        if self._count <= self._per_s:
            return 1
        return self._share if self._random() * self._share < 1 else 0
