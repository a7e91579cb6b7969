"""What really happened in a simulation: what was accepted in each cell, and when the stores held how much of it.

No node has this knowledge. The auditor compares every answer with it. `Truth` belongs to the simulation; a
`Knowledge` belongs to one process, and is what that process must know, because it counted it itself or because the
origin reported it. Times are microseconds of the event loop, which no clock step changes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from tidegate.core.cells import Subject
from tidegate.core.model import Limit, subject_digest

__all__ = ["CellId", "CellKey", "History", "Knowledge", "Truth", "digest_of", "key_of"]

CellKey = tuple[bytes, int]
"""The digest of a subject, and a sequence: how an origin names a cell."""


def key_of(limit: Limit) -> tuple[str, str, int]:
    """The part of a subject that comes from its limit."""
    return limit.workspace, limit.namespace, limit.duration_ms


class CellId(NamedTuple):
    """A cell, identified the same way for all nodes."""

    key: tuple[str, str, int]
    identifier: str
    sequence: int

    @property
    def digest(self) -> bytes:
        return digest_of(self.key, self.identifier)


@cache
def digest_of(key: tuple[str, str, int], identifier: str) -> bytes:
    """The digest of a subject: simulations use a few subjects and ask for them all the time."""
    workspace, namespace, duration_ms = key
    return subject_digest(workspace, namespace, identifier, duration_ms)


class History:
    """A count over time, 0 at first."""

    __slots__ = ("_at_us", "_values")

    def __init__(self) -> None:
        self._at_us: list[int] = []
        self._values: list[int] = []

    @property
    def last(self) -> int:
        return self._values[-1] if self._values else 0

    @property
    def changes(self) -> int:
        return len(self._values)

    @property
    def changed_at_us(self) -> int:
        return self._at_us[-1] if self._at_us else -1

    def note(self, at_us: int, value: int) -> None:
        if value != self.last:
            self._at_us.append(at_us)
            self._values.append(value)

    def at(self, at_us: int) -> int:
        index = bisect_right(self._at_us, at_us)
        return self._values[index - 1] if index else 0

    def lowest(self, since_us: int, until_us: int) -> int:
        """The lowest value between two times, both included."""
        first = bisect_right(self._at_us, since_us)
        end = bisect_right(self._at_us, until_us)
        return min([self.at(since_us), *self._values[first:end]])


class Truth:
    """All counts of one simulation, over time."""

    def __init__(self) -> None:
        # By cell, then by process.
        self.accepted: dict[CellId, dict[str, History]] = {}
        self.regions: dict[str, str] = {}
        self._latest_ms: dict[tuple[CellId, str], int] = {}
        # What the origin of a region holds of a cell, by writer.
        self._held: dict[tuple[str, CellKey], dict[str, History]] = {}
        # What nodes can read in the ledger, by cell and region.
        self._rows: dict[tuple[CellId, str], History] = {}

    def accept(self, cell_id: CellId, node_id: str, cost: int, instant_ms: int, at_us: int) -> None:
        """A process accepted a request of this time."""
        history = self.accepted.setdefault(cell_id, {}).setdefault(node_id, History())
        history.note(at_us, history.last + cost)
        if cost:
            place = (cell_id, self.regions[node_id])
            self._latest_ms[place] = max(instant_ms, self._latest_ms.get(place, 0))

    def latest_ms(self, cell_id: CellId, region: str) -> int:
        """The latest time of a request that a region accepted in a cell; 0 for none."""
        return self._latest_ms.get((cell_id, region), 0)

    def by_process(self, cell_id: CellId, node_id: str) -> int:
        history = self.accepted.get(cell_id, {}).get(node_id)
        return 0 if history is None else history.last

    def regions_but(self, region: str) -> list[str]:
        """All other regions that have had a node."""
        return sorted(set(self.regions.values()) - {region})

    def by_region(self, cell_id: CellId, region: str, at_us: int | None = None) -> int:
        """What all processes of a region had accepted at a time, by default until now."""
        return sum(
            history.last if at_us is None else history.at(at_us)
            for node_id, history in self.accepted.get(cell_id, {}).items()
            if self.regions[node_id] == region
        )

    def total(self, cell_id: CellId) -> int:
        return sum(history.last for history in self.accepted.get(cell_id, {}).values())

    # -- the stores

    def origin_holds(self, region: str, cell: CellKey, writer: str, count: int, at_us: int) -> None:
        self._held.setdefault((region, cell), {}).setdefault(writer, History()).note(at_us, count)

    def origin_replaced(
        self, region: str, components: Mapping[CellKey, Mapping[str, int]], at_us: int
    ) -> list[CellKey]:
        """The origin lost counts, and holds these now. Returns the cells that hold less than before."""
        lost: list[CellKey] = []
        for (place, cell), writers in self._held.items():
            if place == region:
                left = components.get(cell, {})
                if any(left.get(writer, 0) < history.last for writer, history in writers.items()):
                    lost.append(cell)
                for writer, history in writers.items():
                    history.note(at_us, left.get(writer, 0))
        return lost

    def held(self, region: str, cell: CellKey) -> Mapping[str, History]:
        return self._held.get((region, cell), {})

    def row_visible(self, cell_id: CellId, region: str, count: int, at_us: int) -> None:
        history = self._rows.setdefault((cell_id, region), History())
        history.note(at_us, max(count, history.last))

    def ledger_wiped(self, at_us: int) -> None:
        for history in self._rows.values():
            history.note(at_us, 0)

    def row(self, cell_id: CellId, region: str) -> History:
        return self._rows.get((cell_id, region)) or History()


class Knowledge:
    """What one process must know."""

    def __init__(self) -> None:
        # When the origin answered about a cell.
        self._replies_us: dict[CellKey, list[int]] = {}
        # By writer: the highest count of another process that any answer contained.
        self._reported: dict[CellKey, dict[str, int]] = {}
        # What the origin acknowledged to this process, and how often a component was sent again without need.
        self.acknowledged: dict[CellKey, int] = {}
        self.repeats = 0
        self.sent = 0
        # When the process first asked about a cell that the origin had lost without any other sign of the loss.
        self.noticed_us: dict[CellKey, int] = {}
        # The latest time that the process has seen on its clock: older cells may be dropped.
        self.clock_max_ms = 0
        # (when, cell, regional count, subject): counts that the process has to publish, unless it evicts them.
        self.publishable: list[tuple[int, CellId, int, Subject]] = []

    def replied(self, cell: CellKey, at_us: int) -> None:
        self._replies_us.setdefault(cell, []).append(at_us)

    def replied_us(self, cell: CellKey) -> int | None:
        """When the origin last answered about a cell."""
        replies = self._replies_us.get(cell)
        return replies[-1] if replies else None

    def first_reply_us(self, cell: CellKey, after_us: float) -> float:
        """The first answer about a cell after that time; infinite if there was none."""
        replies = self._replies_us.get(cell, [])
        index = bisect_right(replies, after_us)
        return replies[index] if index < len(replies) else float("inf")

    def report(self, cell: CellKey, writer: str, count: int) -> None:
        if count > 0:
            reported = self._reported.setdefault(cell, {})
            reported[writer] = max(count, reported.get(writer, 0))

    def others(self, cell: CellKey) -> int:
        return sum(self._reported.get(cell, {}).values())
