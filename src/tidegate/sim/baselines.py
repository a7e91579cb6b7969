"""The limiters that Tidegate is compared with: one perfect counter, an exact sliding log, and the plain scheme.

The perfect counter uses the same two-cell formula, in one place, without delay. The sliding log stores every request.
The plain scheme is the usual one: one INCRBY per accepted request, the larger of the local and the shared count,
and a table between regions, written and read at fixed intervals, for counts above a fixed share of the limit.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable
from random import Random
from typing import NamedTuple

from tidegate.core.windows import carried
from tidegate.sim.fleet import ORIGIN_DELAY_MS, Offer

__all__ = ["PlainOptions", "PlainScheme", "admitted_by_log", "admitted_by_perfect_counter"]


def admitted_by_perfect_counter(
    offers: Iterable[Offer], limit: int, duration_ms: int, start_ms: int
) -> list[bool]:
    """One counter for all nodes, with the two-cell formula."""
    counts: Counter[int] = Counter()
    answers = []
    for offer in offers:
        now_ms = start_ms + offer.at_us // 1000
        sequence = now_ms // duration_ms
        used = counts[sequence] + carried(counts[sequence - 1], now_ms - sequence * duration_ms, duration_ms)
        fits = used + 1 <= limit
        counts[sequence] += fits
        answers.append(fits)
    return answers


def admitted_by_log(offers: Iterable[Offer], limit: int, duration_ms: int) -> list[bool]:
    """An exact log of the requests admitted in the last `duration_ms`."""
    log: deque[int] = deque()
    answers = []
    for offer in offers:
        while log and log[0] <= offer.at_us - duration_ms * 1000:
            log.popleft()
        fits = len(log) < limit
        if fits:
            log.append(offer.at_us)
        answers.append(fits)
    return answers


class PlainOptions(NamedTuple):
    """The share of the limit above which the plain scheme publishes, and how often it does."""

    floor_percent: int
    interval_s: int


class _PlainNode:
    """Counts by cell: what this node knows of its region, and what other regions published."""

    def __init__(self, region: int) -> None:
        self.region = region
        self.local: Counter[int] = Counter()
        self.foreign: dict[int, dict[int, int]] = {}

    def known(self, cell: int) -> int:
        return self.local[cell] + sum(self.foreign.get(cell, {}).values())


class PlainScheme:
    """The plain scheme, event by event."""

    def __init__(
        self,
        plain: PlainOptions,
        *,
        regions: int,
        nodes: int,
        limit: int,
        duration_ms: int,
        start_ms: int,
        ledger_delay_ms: int,
        seed: int,
    ) -> None:
        self._limit = limit
        self._floor = limit * plain.floor_percent / 100
        self._interval_us = plain.interval_s * 1_000_000
        self._duration_ms = duration_ms
        self._start_ms = start_ms
        self._ledger_delay_us = ledger_delay_ms * 1_000
        self._random = Random(f"plain {seed}")
        self._members = [_PlainNode(number // nodes) for number in range(regions * nodes)]
        self._totals: list[Counter[int]] = [Counter() for _ in range(regions)]
        self._rows: dict[int, dict[int, int]] = {}
        # A heap of (time, order of scheduling, callback, node, cell).
        self._events: list[tuple[int, int, Callable[[int, _PlainNode, int], None], _PlainNode, int]] = []
        self._order = 0
        for member in self._members:
            self._later(int(self._random.random() * self._interval_us), self._publish, member)
            self._later(int(self._random.random() * self._interval_us), self._import, member)

    def _later(
        self, at_us: int, callback: Callable[[int, _PlainNode, int], None], member: _PlainNode, cell: int = 0
    ) -> None:
        self._order += 1
        heapq.heappush(self._events, (at_us, self._order, callback, member, cell))

    def _cells(self, at_us: int) -> tuple[int, int]:
        sequence = (self._start_ms + at_us // 1_000) // self._duration_ms
        return sequence - 1, sequence

    def _increment(self, at_us: int, member: _PlainNode, cell: int) -> None:
        self._totals[member.region][cell] += 1
        self._later(at_us + self._random.randrange(ORIGIN_DELAY_MS * 1_000), self._reply, member, cell)

    def _reply(self, _at_us: int, member: _PlainNode, cell: int) -> None:
        member.local[cell] = max(member.local[cell], self._totals[member.region][cell])

    def _publish(self, at_us: int, member: _PlainNode, _cell: int) -> None:
        for cell in self._cells(at_us):
            if member.local[cell] >= self._floor:
                delay_us = self._random.randrange(self._ledger_delay_us + 1)
                self._later(at_us + delay_us, self._write, member, cell)
        self._later(at_us + self._interval_us, self._publish, member)

    def _write(self, _at_us: int, member: _PlainNode, cell: int) -> None:
        held = self._rows.setdefault(cell, {})
        held[member.region] = max(held.get(member.region, 0), member.local[cell])

    def _import(self, at_us: int, member: _PlainNode, _cell: int) -> None:
        delay_us = self._random.randrange(2 * self._ledger_delay_us + 1)
        self._later(at_us + delay_us, self._imported, member)
        self._later(at_us + self._interval_us, self._import, member)

    def _imported(self, at_us: int, member: _PlainNode, _cell: int) -> None:
        for cell in self._cells(at_us):
            rows = self._rows.get(cell, {})
            member.foreign[cell] = {
                region: count for region, count in rows.items() if region != member.region
            }

    def admits(self, offer: Offer) -> bool:
        """Run all events before this request, and decide it."""
        while self._events and self._events[0][0] <= offer.at_us:
            at_us, _, callback, node, cell = heapq.heappop(self._events)
            callback(at_us, node, cell)
        member = self._members[offer.node]
        previous, current = self._cells(offer.at_us)
        elapsed_ms = self._start_ms + offer.at_us // 1_000 - current * self._duration_ms
        used = member.known(current) + carried(member.known(previous), elapsed_ms, self._duration_ms)
        if used + 1 > self._limit:
            return False
        member.local[current] += 1
        delay_us = self._random.randrange(ORIGIN_DELAY_MS * 1_000)
        self._later(offer.at_us + delay_us, self._increment, member, current)
        return True
