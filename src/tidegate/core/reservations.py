"""Reservations: cost that a caller keeps until it knows what its work has used (docs/adr/0021-reservations.md).

A reservation counts like cost but is not a count: it enters no cell before it is settled, so that counts only grow.

At the origin it is a hold of its own: `Run` and `grant` take it, `claim` makes it last (`is_final` false) and ends it,
counting what was used in the same step. The origin decides once whether a reservation is settled: a repeated message
finds the mark of the first one and counts nothing. `reserve.lua` is the same inside Redis.

At the node, `Reservations` is what decisions add to the counts. It survives the eviction of a subject. With credit,
what the origin holds is added only when it does not answer: it counts for all nodes, and any may have ended it.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple, final

from tidegate.core.budget import MemoryBudget
from tidegate.core.generations import cell_name
from tidegate.core.grants import NEVER, Hold, SubjectRecord, drop_expired
from tidegate.core.model import Limit
from tidegate.core.sharing import OriginUsage
from tidegate.core.subjects import Subjects, text_bytes

__all__ = [
    "ENDED",
    "ENDED_BEFORE",
    "ENDED_MS",
    "GONE",
    "HELD",
    "HOLDS_MAX",
    "RESERVED_BYTES_MAX",
    "SETTLED_WRITER",
    "Claim",
    "ClaimReply",
    "Reservations",
    "are_same_counters",
    "claim",
    "is_reservation",
    "reserved_bytes",
    "usage_of",
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
# What the live reservations of one node take, by estimate: about 160,000 with one limit and a short identifier.
RESERVED_BYTES_MAX: Final = 100_000_000
# A reservation with its places in the table and in the queue, and each of its limits, without the identifier. Measured,
# interpreted and compiled, by tests/core/test_reservations.py.
RESERVATION_BYTES: Final = 350
ITEM_BYTES: Final = 250
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
    generation: int = 0
    """The last reset of the subject: part of the name of the cell (`tidegate.core.generations`)."""


class ClaimReply(NamedTuple):
    """The origin's answer."""

    state: int
    total: int
    """What all nodes have counted in the cell, after this step."""


def claim(record: SubjectRecord, entry: Claim, was_ended: bool, now_ms: int) -> ClaimReply:
    """Keep or end a reservation. One atomic step of the origin; `was_ended`: it remembers the end of this one."""
    drop_expired(record, now_ms)
    name = cell_name(entry.sequence, entry.generation, entry.duration_ms)
    cell = record.cells.get(name)
    total = 0 if cell is None else cell.total
    if was_ended:
        return ClaimReply(ENDED_BEFORE, total)
    hold = record.holds.get(entry.holder)
    if hold is None:
        return ClaimReply(GONE, total)
    if entry.is_final:
        del record.holds[entry.holder]
        if entry.amount > 0:
            cell = record.cell(name)
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


def is_reservation(writer: str) -> bool:
    """Whether a hold of this writer is a reservation, and not the credit of a node."""
    return SETTLED_WRITER in writer


def usage_of(record: SubjectRecord, name: int, now_ms: int) -> OriginUsage:
    """What is reserved, and what was counted in the cell of this name, here and by other regions."""
    reserved = 0
    for writer, hold in record.holds.items():
        if is_reservation(writer) and hold.expires_at_ms > now_ms:
            reserved += hold.spare
    cell = record.cells.get(name)
    if cell is None:
        return OriginUsage(0, reserved, [])
    return OriginUsage(cell.total, reserved, cell.region_counts(now_ms))


def reserved_bytes(requests: list[tuple[Limit, str, int]]) -> int:
    """What a reservation of these takes in memory, by estimate."""
    found = RESERVATION_BYTES
    for _, identifier, _ in requests:
        found += ITEM_BYTES + text_bytes(identifier)
    return found


def are_same_counters(some: list[tuple[Limit, str, int]], others: list[tuple[Limit, str, int]]) -> bool:
    """Whether both name the same counters. The name of a reservation is not a secret: another tenant may send it."""
    return {(limit.key, who) for limit, who, _ in some} == {(limit.key, who) for limit, who, _ in others}


@final
class Reservations:
    """The live reservations of one node. Their sum by subject is `Subjects.reserved`, without those that are shared."""

    __slots__ = ("_due", "_live", "_shared", "_subjects", "budget")

    def __init__(self, subjects: Subjects) -> None:
        self._subjects: Final[Subjects] = subjects
        # By name: until when, what, and whether the origin counts it.
        self._live: dict[str, tuple[int, list[tuple[Limit, str, int]], bool]] = {}
        # The sum of those that the origin counts, by (key, identifier).
        self._shared: dict[tuple[object, str], int] = {}
        # A heap of (until_ms, name). A name that is not in `_live` any more has ended before.
        self._due: list[tuple[int, str]] = []
        # What they take, by the workspace of the first limit.
        self.budget: Final[MemoryBudget] = MemoryBudget(RESERVED_BYTES_MAX)

    def has_room(self, requests: list[tuple[Limit, str, int]]) -> bool:
        """Whether their workspace may hold these too: no more than is free then."""
        return self.budget.allows(requests[0][0].workspace, reserved_bytes(requests))

    def holds(self, name: str, requests: list[tuple[Limit, str, int]]) -> bool:
        """Whether a reservation of this name, for these very counters, is live."""
        held = self._live.get(name)
        return held is not None and are_same_counters(held[1], requests)

    def add(
        self, name: str, requests: list[tuple[Limit, str, int]], until_ms: int, is_shared: bool = False
    ) -> None:
        """Count these until they are dropped, and no longer than `until_ms`. `is_shared`: the origin counts them."""
        self._live[name] = (until_ms, requests, is_shared)
        self.budget.take(requests[0][0].workspace, reserved_bytes(requests))
        heappush(self._due, (until_ms, name))
        if len(self._due) > 2 * len(self._live) + ENDED_DUE_MAX:
            # Most of them have ended long before their time.
            self._due = [(held[0], live) for live, held in self._live.items()]
            heapify(self._due)
        for limit, identifier, cost in requests:
            self._reserve(limit.key, identifier, cost, is_shared)

    def _reserve(self, key: object, identifier: str, amount: int, is_shared: bool) -> None:
        if not is_shared:
            self._subjects.reserve(key, identifier, amount)
            return
        place = (key, identifier)
        left = self._shared.get(place, 0) + amount
        if left > 0:
            self._shared[place] = left
        else:
            self._shared.pop(place, None)

    def shared(self, key: object, identifier: str, wall_ms: int) -> int:
        """What the origin counts of this node's reservations, as far as this node knows."""
        if not self._shared:
            return 0
        self.expire(wall_ms)
        return self._shared.get((key, identifier), 0)

    def drop(self, name: str) -> bool:
        """Count them no more; False if they are not live."""
        held = self._live.pop(name, None)
        if held is None:
            return False
        self.budget.take(held[1][0][0].workspace, -reserved_bytes(held[1]))
        for limit, identifier, cost in held[1]:
            self._reserve(limit.key, identifier, -cost, held[2])
        return True

    def expire(self, wall_ms: int) -> None:
        """Drop those whose time has run out."""
        while self._due and self._due[0][0] <= wall_ms:
            self.drop(heappop(self._due)[1])
