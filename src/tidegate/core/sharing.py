"""What the nodes of a region share about the database (the ledger), through Redis (the origin).

One node imports for its region, and one node publishes each change (docs/adr/0020-one-importer.md). The origin keeps
who imports (`Lease`), what other regions have published of a cell, how much of it this region has published, and which
node is responsible for the rest (`Mark`). Two importers, or two nodes that publish the same change, are harmless:
everything merges by maximum.

Pure, like `grants`: `now_ms` is the origin's time, and is compared only with what the origin wrote.
"""

from __future__ import annotations

from typing import Final, NamedTuple, final

__all__ = [
    "DUE",
    "NOT_DUE",
    "PRESSED",
    "ImportState",
    "Lease",
    "Mark",
    "OriginUsage",
    "RegionCount",
    "Share",
    "ShareReply",
    "owner_of",
    "take_lease",
]

# `CellTotals.due`: whether the node that asked has to publish the cell.
NOT_DUE: Final = 0
DUE: Final = 1  # with the next tick
PRESSED: Final = 2  # at once: it has grown by its step


def owner_of(writer: str) -> str:
    """The node of a writer: the incarnations of a subject publish as one."""
    return writer.partition("~")[0]


@final
class Mark:
    """How much of a cell this region has published, and which node publishes the rest."""

    __slots__ = ("assigned", "epoch", "owner", "published", "until_ms")

    def __init__(
        self, published: int = 0, assigned: int = 0, owner: str = "", until_ms: int = 0, epoch: int = 0
    ) -> None:
        # What is known to be in the ledger.
        self.published: int = published
        # Up to which count `owner` is responsible, and until when.
        self.assigned: int = assigned
        self.owner: str = owner
        self.until_ms: int = until_ms
        # When the ledger had last lost rows before `published` was written.
        self.epoch: int = epoch

    def copied(self) -> Mark:
        return Mark(self.published, self.assigned, self.owner, self.until_ms, self.epoch)

    def assign(self, total: int, step: int, owner: str, now_ms: int, life_ms: int, pace_ms: int) -> int:
        """Whether `owner` has to publish a cell that has come to `total`.

        Exactly one node is responsible for a change. While its time is not over, another one takes over only what
        comes on top, once that is `step` more (0: never), and not before `pace_ms` have passed: the region publishes a
        cell as often as one node would, however many nodes count in it.
        """
        if total <= self.published:
            return NOT_DUE
        # A time further ahead than any that was set is from before the origin's clock was set back.
        is_live = now_ms < self.until_ms <= now_ms + life_ms
        is_another = is_live and self.owner != owner and now_ms < self.until_ms - life_ms + pace_ms
        is_busy = is_live and self.assigned > self.published
        base = self.assigned if is_busy else self.published
        is_pressed = (base == 0 or (step > 0 and total >= base + step)) and not is_another
        if is_busy and not is_pressed:
            return DUE if self.owner == owner else NOT_DUE
        self.assigned = total
        self.owner = owner
        self.until_ms = now_ms + life_ms
        return PRESSED if is_pressed else DUE


class Share(NamedTuple):
    """What the ledger holds of a cell for one region, as an importer or a publisher reports it to the origin."""

    digest: bytes
    duration_ms: int
    sequence: int
    region: str
    """Another region; '' for this one."""
    counted: int
    """What the ledger is known to hold; 0 with '' only asks who publishes."""
    owner: str
    """The node that asks, and would publish."""
    epoch: int = 0
    """When the ledger last lost rows, as far as that node knows."""
    generation: int = 0
    """The last reset of the subject: part of the names of its cells (`tidegate.core.generations`)."""


class ShareReply(NamedTuple):
    """What the origin holds of that cell now."""

    total: int
    """What this region has counted."""
    foreign: int
    """What all other regions have published."""
    published: int
    due: int
    """`DUE` or `PRESSED`: the node that asked has to publish `total`."""


class RegionCount(NamedTuple):
    """What another region has published of a cell, as the origin knows it."""

    region: str
    counted: int
    age_ms: int
    """How long ago the origin was told this count; -1 if it does not know."""


class OriginUsage(NamedTuple):
    """What the origin holds of a counter, for `usage`."""

    total: int
    """What all nodes have counted in the cell."""
    reserved: int
    """What is reserved and not settled, by all nodes."""
    regions: list[RegionCount]


class ImportState(NamedTuple):
    """How far the import has come. Times are the origin's."""

    cursor: str = ""
    """What the ledger had answered up to here is at the origin; '' before the first import."""
    imported_at_ms: int = -1
    full_at_ms: int = -1
    """When the last full read began; -1 for never."""
    regions: int = 1
    """Live regions in the ledger."""
    epoch: int = 0
    """When the ledger last lost rows, or may have."""
    lag_ms: int = -1
    """How old counts of other regions are when they reach the origin; -1 if that is not known."""
    since_ms: int = -1
    """When the lease began under which this is known, as in `Lease`; -1 for none."""


class Lease(NamedTuple):
    """Which node imports for the region."""

    holder: str
    """'' for none."""
    since_ms: int
    until_ms: int
    time_ms: int
    """The origin's clock at this answer."""
    lost_at_ms: int
    """When a node last saw that the origin had lost counts; -1 for never. A full read brings back what it lost."""
    state: ImportState


def take_lease(
    lease: Lease | None, node_id: str, life_ms: int, state: ImportState | None, has_lost: bool, now_ms: int
) -> Lease:
    """Take the lease if no node holds it, renew it if this node does; a life of 0 gives it back.

    `state` is kept only from the holder, and only if it is of this lease: when a late request takes the lease at a
    wiped origin, the state that the same node sends next is from before the wipe. What is kept stays when the holder
    changes: the next one continues from there. Any node may say that the origin has lost counts.
    """
    if lease is None:
        lease = Lease("", now_ms, 0, now_ms, -1, ImportState(since_ms=now_ms))
    lost_at_ms = now_ms if has_lost else lease.lost_at_ms
    is_held = lease.holder != "" and now_ms < lease.until_ms
    if is_held and lease.holder != node_id:
        return lease._replace(time_ms=now_ms, lost_at_ms=lost_at_ms)
    is_mine = lease.holder == node_id
    if life_ms <= 0 and not is_mine:
        return lease._replace(time_ms=now_ms, lost_at_ms=lost_at_ms)
    since_ms = lease.since_ms if is_mine else now_ms
    if state is None or not is_mine or state.since_ms != since_ms:
        state = lease.state._replace(since_ms=since_ms)
    holder = node_id if life_ms > 0 else ""
    return Lease(holder, since_ms, now_ms + life_ms, now_ms, lost_at_ms, state)
