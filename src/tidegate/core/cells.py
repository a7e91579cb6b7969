"""Cell and Subject: the counts that a node keeps in memory.

A subject owns the cells of its last three sequences in place (`current`, `previous`, `oldest`) and, when clocks
step or requests bring their own time, any others in `rest`. Cells are keyed by sequence and never reset: a count
cannot outlive its window.

These objects are passive and acyclic (see `_native`). `Subjects` moves them; `Engine`, `OriginSync` and `LedgerSync`
write their counts.
"""

from __future__ import annotations

from typing import Final, final

from tidegate.core._native import mypyc_attr
from tidegate.core.credit import Credit
from tidegate.core.generations import cell_name
from tidegate.core.model import Component, subject_digest
from tidegate.core.views import LedgerView, OriginView

__all__ = ["BLOCKED", "CLEAN", "PINNED", "Cell", "Subject"]

# The queue of a subject. Memory is freed in this order.
CLEAN: Final = 0  # holds nothing that is not stored elsewhere too
BLOCKED: Final = 1  # was denied recently: evicting it would allow it again
PINNED: Final = 2  # holds counts that no store has acknowledged, or waits for an answer of the origin


@final
@mypyc_attr(acyclic=True)
class Cell:
    """A subject's counts in one fixed window. Every count only rises."""

    __slots__ = ("foreign", "ledger", "origin", "others", "own", "sequence")

    def __init__(self, sequence: int, origin: OriginView | None, ledger: LedgerView | None) -> None:
        self.sequence: Final[int] = sequence
        # Accepted by this node. Written by decisions, and by answers that return counts of a cell that had aged out.
        self.own: int = 0
        # Accepted by the other nodes of this region, as last read. Written by reads, replays and own rows.
        self.others: int = 0
        # Accepted by the other regions: as last imported, or as the origin knows, whichever is more.
        self.foreign: int = 0
        # None without an origin; None without a ledger, and in windows too short for it.
        self.origin: Final[OriginView | None] = origin
        self.ledger: Final[LedgerView | None] = ledger

    def regional(self) -> int:
        """All that this region is known to have accepted."""
        return self.own + self.others

    def total(self) -> int:
        """All that is known to have been accepted anywhere."""
        return self.own + self.others + self.foreign

    def is_unreplayed(self) -> bool:
        """Whether it holds counts that the origin has not acknowledged; without one, that wait for the ledger."""
        if self.origin is not None:
            return self.own > self.origin.acked or self.origin.is_lost
        ledger = self.ledger
        return ledger is not None and ledger.is_changed and self.own > ledger.published


@final
@mypyc_attr(acyclic=True)
class Subject:
    """What is being limited: its place in memory, its cells, its strict deadline."""

    __slots__ = (
        "bucket",
        "credit",
        "current",
        "digest",
        "generation",
        "identifier",
        "incarnation",
        "is_asking",
        "is_changed",
        "is_dirty",
        "is_due",
        "newer",
        "older",
        "oldest",
        "position",
        "previous",
        "queue",
        "reserved",
        "rest",
        "sequence",
        "slot",
        "strict_until_ms",
        "table",
        "touched_ms",
    )

    def __init__(self, identifier: str, table: int, slot: int, incarnation: int, current: Cell) -> None:
        # What every decision touches comes first, to share a line of the processor's cache.
        self.sequence: int = current.sequence
        self.current: Cell = current
        self.previous: Cell | None = None
        # When it was last moved to the newest end of its queue. Written by `Subjects`.
        self.touched_ms: int = 0
        # What live reservations of this node hold of it. Written by `Subjects`.
        self.reserved: int = 0
        # After a denial: until this instant the origin is read before a request is allowed.
        self.strict_until_ms: int = 0
        # Its queue. Written by `Subjects`.
        self.queue: int = CLEAN
        # What it may accept without asking the origin; None before the first request, and without credit.
        self.credit: Credit | None = None
        # True while it is in the queue of that name. Written by `Pending`.
        self.is_asking: bool = False
        self.is_dirty: bool = False
        self.is_changed: bool = False
        self.is_due: bool = False

        self.identifier: Final[str] = identifier
        # Its table's number, -1 once it was evicted or has expired.
        self.table: int = table
        self.slot: Final[int] = slot
        # Evictions before it was created. Part of the writer's name at the origin: what the same subject counted
        # before it was evicted is a component of its own.
        self.incarnation: Final[int] = incarnation
        self.oldest: Cell | None = None
        self.rest: dict[int, Cell] | None = None
        # Its last reset; 0 for none. Part of the names of its cells in every store. Written by `Subjects` and `Resets`.
        self.generation: int = 0
        # Computed when first needed; never in an embedded limiter.
        self.digest: bytes | None = None

        # Its neighbours in its queue, as slots. Written by `Subjects`.
        self.newer: int = -1
        self.older: int = -1
        # Its place among those that expire together. Written by `Subjects`.
        self.bucket: int = 0
        self.position: int = 0

    def cell(self, sequence: int) -> Cell | None:
        """The cell of `sequence`, if there is one."""
        behind = self.sequence - sequence
        if behind == 0:
            return self.current
        if behind == 1:
            return self.previous
        if behind == 2:
            return self.oldest
        return None if self.rest is None else self.rest.get(sequence)

    def cells(self) -> list[Cell]:
        """All cells, the last three sequences first."""
        found = [self.current]
        if self.previous is not None:
            found.append(self.previous)
        if self.oldest is not None:
            found.append(self.oldest)
        if self.rest is not None:
            found.extend(self.rest.values())
        return found

    def count(self) -> int:
        """How many cells there are."""
        count = 1 if self.previous is None else 2
        if self.oldest is not None:
            count += 1
        return count if self.rest is None else count + len(self.rest)

    def is_unreplayed(self) -> bool:
        """Whether it holds counts that the origin has not acknowledged."""
        return any(cell.is_unreplayed() for cell in self.cells())

    def insert(self, cell: Cell, sequence_min: int) -> None:
        """Add a cell. If it is later than `current` it becomes current, and the others move back by that much.

        A cell that moves out of the last three has aged out, if the clock is right. It moves to `rest` all the same
        when it holds unreplayed counts or when time jumped by three cells and more, because a clock that jumped
        ahead may step back; and from `sequence_min` on, because the new cell may come from a clock that is ahead.
        """
        ahead = cell.sequence - self.sequence
        if ahead > 0:
            recent = [self.current, self.previous, self.oldest]
            self.sequence = cell.sequence
            self.current = cell
            self.previous = None
            self.oldest = None
            for known in recent:
                if known is None:
                    continue
                behind = cell.sequence - known.sequence
                if behind == 1:
                    self.previous = known
                elif behind == 2:
                    self.oldest = known
                elif ahead >= 3 or known.sequence >= sequence_min or known.is_unreplayed():
                    self._add_to_rest(known)
        elif ahead == -1:
            self.previous = cell
        elif ahead == -2:
            self.oldest = cell
        else:
            self._add_to_rest(cell)

    def replace(self, cell: Cell) -> None:
        """Put this cell in the place of the one with its sequence."""
        if cell.sequence == self.sequence:
            self.current = cell
        else:
            self.insert(cell, cell.sequence)

    def _add_to_rest(self, cell: Cell) -> None:
        if self.rest is None:
            self.rest = {}
        self.rest[cell.sequence] = cell

    def drop_aged(self, now_ms: int, duration_ms: int) -> bool:
        """Drop cells that have aged out (start + 3 durations); False if none is left."""
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

    def component(self, cell: Cell, key: tuple[str, str, int], writer: str) -> Component:
        """The component of `writer` in a cell, as the origin stores it. `key` is the subject's table's."""
        duration_ms = key[2]
        name = cell_name(cell.sequence, self.generation, duration_ms)
        expires_at_ms = (cell.sequence + 3) * duration_ms
        # `Component(…)` without a call of a Python function.
        return tuple.__new__(Component, (self.digest_of(key), name, writer, cell.own, expires_at_ms))

    def digest_of(self, key: tuple[str, str, int]) -> bytes:
        """The subject's digest, computed once. `key` is its table's."""
        digest = self.digest
        if digest is None:
            digest = subject_digest(key[0], key[1], self.identifier, key[2])
            self.digest = digest
        return digest
