"""Cell, Shared and Subject: what a node remembers.

A subject owns the cells of its last three sequences in place (`current`, `previous`, `oldest`) and, when clocks
step or requests bring their own time, any others in `rest`. Cells are keyed by sequence and never reset: a count
can not outlive its window. A cell of a limiter that shares nothing has no `Shared` part.

These objects are passive and acyclic (see `_native`); `Subjects` moves them, `Engine` and `Convergence` fill them.
"""

from __future__ import annotations

from typing import Final, final

from tidegate.core._native import mypyc_attr
from tidegate.core.model import Decision, subject_digest

__all__ = ["BLOCKED", "CLEAN", "PINNED", "Cell", "Shared", "Subject", "Table"]

# The queue that a subject stands in, which is the order in which memory is given back.
CLEAN: Final = 0  # holds nothing that is not elsewhere too
BLOCKED: Final = 1  # was denied lately: forgetting it would let it in again
PINNED: Final = 2  # holds counts that the origin has not acknowledged


@final
@mypyc_attr(acyclic=True)
class Shared:
    """What a cell needs only where nodes or regions share it."""

    __slots__ = (
        "acked",
        "changed",
        "components",
        "failed_until_ms",
        "fresh_until_ms",
        "grew_at_ms",
        "growth",
        "growth_lag",
        "growth_ms",
        "heard_at_ms",
        "limit_min",
        "pressed",
        "pressure_at",
        "published",
        "seen",
        "set_aside",
        "set_aside_until_ms",
    )

    def __init__(self) -> None:
        # No read is wanted before this instant. Written by reads, replays, failed reads and rollover.
        self.fresh_until_ms: int = 0
        # A read failed and the next try waits for this. Written by failed reads.
        self.failed_until_ms: int = 0
        # When the origin was last heard, -1 for never. Written by reads and replays.
        self.heard_at_ms: int = -1
        # `own` as the origin last acknowledged it. Falls to 0 when the origin is found to have lost it.
        self.acked: int = 0

        # The highest regional count known to stand in the ledger, and since which full import that was last known.
        self.published: int = 0
        self.seen: int = 0
        # The lowest limit that this cell was asked for with, 0 for never. Gives the publish threshold.
        self.limit_min: int = 0
        # True while the cell waits for the next publish, by tick and by pressure.
        self.changed: bool = False
        self.pressed: bool = False
        # The regional count from which the next publish should not wait for the tick.
        self.pressure_at: int = 0
        # How often the ledger refused this cell's row in a row, and when it is tried again.
        self.set_aside: int = 0
        self.set_aside_until_ms: int = 0

        # The foreign components, by region; None until another region has published. Written by imports.
        self.components: dict[str, int] | None = None
        # By how much they grew between the last two imports that saw them grow, in what time, and when.
        self.growth: int = 0
        self.growth_ms: int = 0
        self.grew_at_ms: int = 0
        # The growth weighted with its lag: how old, in ms, the rows were when that import read them.
        self.growth_lag: int = 0

    def anticipated(self, now_ms: int, age_ms_max: int, since_ms: int) -> int:
        """What the foreign components have probably grown since their rows were written.

        Nothing when the last import, which began at `since_ms`, saw no growth: they have stopped.
        """
        if self.growth == 0 or self.growth_ms == 0 or self.grew_at_ms < since_ms:
            return 0
        age_ms = now_ms - self.grew_at_ms
        if age_ms < 0:
            return 0
        age_ms += self.growth_lag // self.growth
        if age_ms > age_ms_max:
            age_ms = age_ms_max
        return self.growth * age_ms // self.growth_ms


@final
@mypyc_attr(acyclic=True)
class Cell:
    """A subject's counts in one fixed window. Every count only rises."""

    __slots__ = ("foreign", "others", "own", "sequence", "shared")

    def __init__(self, sequence: int, shared: Shared | None) -> None:
        self.sequence: Final[int] = sequence
        # Accepted by this node. Written by decisions, and by answers that bring back what time made it forget.
        self.own: int = 0
        # Accepted by the other nodes of this region, as last heard. Written by reads, replays and own rows.
        self.others: int = 0
        # Accepted by the other regions, as last imported: the sum of `shared.components`.
        self.foreign: int = 0
        self.shared: Final[Shared | None] = shared

    def regional(self) -> int:
        """All that this region is known to have accepted."""
        return self.own + self.others

    def total(self) -> int:
        """All that is known to have been accepted anywhere."""
        return self.own + self.others + self.foreign


@final
@mypyc_attr(acyclic=True)
class Subject:
    """What is being limited: its place in memory, its cells, its strict deadline."""

    __slots__ = (
        "awaiting",
        "bucket",
        "current",
        "denial",
        "denied_cost",
        "digest",
        "identifier",
        "incarnation",
        "newer",
        "older",
        "oldest",
        "position",
        "previous",
        "publishing",
        "queue",
        "rest",
        "sequence",
        "slot",
        "strict_until_ms",
        "table",
        "touched_ms",
    )

    def __init__(self, identifier: str, table: int, slot: int, incarnation: int, current: Cell) -> None:
        # First what every decision touches, so that it shares a line of the processor's cache.
        self.sequence: int = current.sequence
        self.current: Cell = current
        self.previous: Cell | None = None
        # When it was last moved to the newest end of its queue. Written by `Subjects`.
        self.touched_ms: int = 0
        # After a denial: no decision before this instant without a fresh look at the origin.
        self.strict_until_ms: int = 0
        # The last denial and the cost it was for, while nothing is shared: within a millisecond, a hammered
        # subject is told the same again.
        self.denial: Decision | None = None
        self.denied_cost: int = 0
        # True while it waits in the replay queue, and in the publish queue.
        self.awaiting: bool = False
        self.publishing: bool = False

        self.identifier: Final[str] = identifier
        # Its table's number, for the way back from a slot. -1 once it was forgotten.
        self.table: int = table
        self.slot: Final[int] = slot
        # Distinguishes this life from an earlier one that was evicted: the earlier part is another's component.
        self.incarnation: Final[int] = incarnation
        self.oldest: Cell | None = None
        self.rest: dict[int, Cell] | None = None
        # Computed when first needed; an embedded limiter never does.
        self.digest: bytes | None = None

        # Its queue, and its neighbours there as slots. Written by `Subjects`.
        self.queue: int = CLEAN
        self.newer: int = -1
        self.older: int = -1
        # Its place among those that expire together. Written by `Subjects`.
        self.bucket: int = 0
        self.position: int = 0

    def cell(self, sequence: int) -> Cell | None:
        """The cell of `sequence`, if it is remembered."""
        behind = self.sequence - sequence
        if behind == 0:
            return self.current
        if behind == 1:
            return self.previous
        if behind == 2:
            return self.oldest
        return None if self.rest is None else self.rest.get(sequence)

    def cells(self) -> list[Cell]:
        """All remembered cells, newest of the usual three first."""
        found = [self.current]
        if self.previous is not None:
            found.append(self.previous)
        if self.oldest is not None:
            found.append(self.oldest)
        if self.rest is not None:
            found.extend(self.rest.values())
        return found

    def count(self) -> int:
        """How many cells are remembered."""
        count = 1 if self.previous is None else 2
        if self.oldest is not None:
            count += 1
        return count if self.rest is None else count + len(self.rest)

    def insert(self, cell: Cell, sequence_min: int) -> None:
        """Remember a new cell. One ahead of `current` turns the page: the usual three move along.

        What falls off has aged out, if the clock is right. It is put aside nevertheless when it holds unreplayed
        counts or when time jumped by three cells and more, because a clock that jumped ahead may step back; and
        from `sequence_min` on, because the new cell may be another clock's idea of now.
        """
        ahead = cell.sequence - self.sequence
        if ahead > 0:
            usual = [self.current, self.previous, self.oldest]
            self.sequence = cell.sequence
            self.current = cell
            self.previous = None
            self.oldest = None
            for known in usual:
                if known is None:
                    continue
                behind = cell.sequence - known.sequence
                if behind == 1:
                    self.previous = known
                elif behind == 2:
                    self.oldest = known
                elif (
                    ahead >= 3
                    or known.sequence >= sequence_min
                    or (known.shared is not None and known.own > known.shared.acked)
                ):
                    self._put_aside(known)
        elif ahead == -1:
            self.previous = cell
        elif ahead == -2:
            self.oldest = cell
        else:
            self._put_aside(cell)

    def _put_aside(self, cell: Cell) -> None:
        if self.rest is None:
            self.rest = {}
        self.rest[cell.sequence] = cell

    def drop_aged(self, now_ms: int, duration_ms: int) -> bool:
        """Forget cells that have aged out (start + 3 durations); False if none is left."""
        sequence_min = now_ms // duration_ms - 2
        if self.rest is not None:
            for sequence in list(self.rest):
                if sequence < sequence_min:
                    del self.rest[sequence]
            if not self.rest:
                self.rest = None
        if self.oldest is not None and self.oldest.sequence < sequence_min:
            self.oldest = None
        if self.previous is not None and self.previous.sequence < sequence_min:
            self.previous = None
        return self.sequence >= sequence_min or self.rest is not None

    def digest_of(self, key: tuple[str, str, int]) -> bytes:
        """The subject's digest, computed once. `key` is its table's."""
        digest = self.digest
        if digest is None:
            digest = subject_digest(key[0], key[1], self.identifier, key[2])
            self.digest = digest
        return digest


@final
class Table:
    """The subjects of one (workspace, namespace, duration), by identifier.

    A table that grows large is split once into many small dictionaries, so that the pause of a growing
    dictionary, which moves all its entries, stays far below a millisecond.
    """

    __slots__ = ("bucket_ms", "count", "duration_ms", "key", "mask", "number", "shards", "whole")

    # A dictionary of 4,096 entries grows in about 0.1 ms; 256 of them hold the default bound of 1,000,000.
    SPLIT_AT: Final = 4_096
    SHARDS: Final = 256
    BUCKET_MS_MIN: Final = 4_096

    def __init__(self, key: tuple[str, str, int], number: int) -> None:
        self.key: Final[tuple[str, str, int]] = key
        self.duration_ms: Final[int] = key[2]
        self.number: Final[int] = number
        # Subjects that expire within the same span are looked at together: a few spans to a duration, so that
        # there are few of them however the durations vary.
        bucket_ms = Table.BUCKET_MS_MIN
        while bucket_ms * 4 < key[2]:
            bucket_ms *= 2
        self.bucket_ms: Final[int] = bucket_ms
        self.count: int = 0
        self.mask: int = 0
        # All subjects until the split; then empty, and they are in the shards.
        self.whole: dict[str, Subject] = {}
        self.shards: list[dict[str, Subject]] = []

    def find(self, identifier: str) -> Subject | None:
        return self._shard(identifier).get(identifier)

    def _shard(self, identifier: str) -> dict[str, Subject]:
        return self.shards[hash(identifier) & self.mask] if self.mask else self.whole

    def add(self, subject: Subject) -> None:
        if self.count == Table.SPLIT_AT and self.mask == 0:
            self._split()
        self._shard(subject.identifier)[subject.identifier] = subject
        self.count += 1

    def remove(self, identifier: str) -> None:
        del self._shard(identifier)[identifier]
        self.count -= 1

    def _split(self) -> None:
        mask = Table.SHARDS - 1
        shards: list[dict[str, Subject]] = [{} for _ in range(Table.SHARDS)]
        for identifier, subject in self.whole.items():
            shards[hash(identifier) & mask][identifier] = subject
        self.shards = shards
        self.mask = mask
        self.whole = {}
