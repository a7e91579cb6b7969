"""Reservations: cost that a caller keeps until it knows what its work has used (docs/adr/0021-reservations.md).

A reservation counts like cost and is no count: it never enters a cell before it is settled, so that counts only grow.

At the origin it is a hold of its own: `Run` and `grant` take it, `claim` makes it last (`is_final` false) and ends it,
counting what was used in the same step. The origin decides once whether a reservation is settled: a repeated message
finds the mark of the first one and counts nothing. `reserve.lua` is the same inside Redis.

At the node, `Reservations` is what decisions add to the counts. It survives the eviction of a subject.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple, final

from tidegate.core.grants import NEVER, Hold, SubjectRecord, drop_expired
from tidegate.core.model import Limit
from tidegate.core.subjects import Subjects

__all__ = [
    "ENDED",
    "ENDED_BEFORE",
    "ENDED_MS",
    "GONE",
    "HELD",
    "HOLDS_MAX",
    "RESERVATIONS_MAX",
    "SETTLED_WRITER",
    "Claim",
    "ClaimReply",
    "Reservations",
    "claim",
]

# What becomes of a claim.
GONE: Final = 0  # there is no such reservation, or none any more
HELD: Final = 1  # it lasts for its life
ENDED: Final = 2  # it is over, and what was used is counted
ENDED_BEFORE: Final = 3  # an earlier claim has ended it: nothing was counted now

# How long an ended reservation is remembered: a client that got no answer has tried again by then.
ENDED_MS: Final = 600_000
# Holds of one subject. Each message about the subject reads them all, about 0.7 µs each in Redis.
HOLDS_MAX: Final = 1_000
# Live reservations of one node, about 500 bytes each: a client that reserves for many identifiers fills no memory.
RESERVATIONS_MAX: Final = 100_000
# Ended ones that may wait in the queue of those that are due.
ENDED_DUE_MAX: Final = 1_000
# The writer of what reservations have counted: one component for all of them in a cell.
SETTLED_WRITER: Final = "+"
# The quota of a reservation's hold: it is taken already, whatever quota others have.
QUOTA_MAX: Final = 2**53


class Claim(NamedTuple):
    """One step of a reservation at the origin."""

    digest: bytes
    holder: str
    """The writer of its hold: the id of a node, `+`, and the name of the reservation."""
    duration_ms: int
    sequence: int
    """The cell in which it is counted."""
    amount: int
    """What is kept; at the end, what was used."""
    life_ms: int
    is_final: bool


class ClaimReply(NamedTuple):
    """The origin's answer."""

    state: int
    total: int
    """What all nodes have counted in the cell, after this step."""


def claim(record: SubjectRecord, entry: Claim, was_ended: bool, now_ms: int) -> ClaimReply:
    """Keep or end a reservation. One atomic step of the origin; `was_ended`: it remembers the end of this one."""
    drop_expired(record, now_ms)
    cell = record.cells.get(entry.sequence)
    total = 0 if cell is None else cell.total
    if was_ended:
        return ClaimReply(ENDED_BEFORE, total)
    hold = record.holds.get(entry.holder)
    if hold is None:
        return ClaimReply(GONE, total)
    if entry.is_final:
        del record.holds[entry.holder]
        if entry.amount > 0:
            cell = record.cell(entry.sequence)
            cell.components[SETTLED_WRITER] = cell.components.get(SETTLED_WRITER, 0) + entry.amount
            cell.total += entry.amount
            total = cell.total
        return ClaimReply(ENDED, total)
    if hold.spare < entry.amount or len(record.holds) > HOLDS_MAX:
        del record.holds[entry.holder]
        return ClaimReply(GONE, total)
    until_ms = now_ms + entry.life_ms
    record.holds[entry.holder] = Hold(
        hold.number, entry.amount, entry.amount, until_ms, QUOTA_MAX, until_ms, NEVER
    )
    return ClaimReply(HELD, total)


@final
class Reservations:
    """The live reservations of one node. Their sum by subject is `Subjects.reserved`."""

    __slots__ = ("_due", "_live", "_subjects")

    def __init__(self, subjects: Subjects) -> None:
        self._subjects: Final[Subjects] = subjects
        # By name: until when, and what.
        self._live: dict[str, tuple[int, list[tuple[Limit, str, int]]]] = {}
        # A heap of (until_ms, name). A name that is not in `_live` any more has ended before.
        self._due: list[tuple[int, str]] = []

    @property
    def is_full(self) -> bool:
        """There are as many as there may be."""
        return len(self._live) >= RESERVATIONS_MAX

    def __contains__(self, name: str) -> bool:
        return name in self._live

    def add(self, name: str, requests: list[tuple[Limit, str, int]], until_ms: int) -> None:
        """Count these until they are dropped, and no longer than `until_ms`."""
        self._live[name] = (until_ms, requests)
        heappush(self._due, (until_ms, name))
        if len(self._due) > 2 * len(self._live) + ENDED_DUE_MAX:
            # Most of them have ended long before their time.
            self._due = [(held[0], live) for live, held in self._live.items()]
            heapify(self._due)
        for limit, identifier, cost in requests:
            self._subjects.reserve(limit.key, identifier, cost)

    def drop(self, name: str) -> bool:
        """Count them no more; False if they are not live."""
        held = self._live.pop(name, None)
        if held is None:
            return False
        for limit, identifier, cost in held[1]:
            self._subjects.reserve(limit.key, identifier, -cost)
        return True

    def expire(self, wall_ms: int) -> None:
        """Drop those whose time has run out."""
        while self._due and self._due[0][0] <= wall_ms:
            self.drop(heappop(self._due)[1])
