"""Memory: which subjects are kept, which are evicted first, and when they expire.

Laws: no call visits all subjects; every call does a bounded amount of work. The number of subjects is bounded. At the
bound, a subject of the largest table is evicted, so that a caller who fills the memory loses its own subjects. There
the least recently used subject without unreplayed counts is evicted. Blocked ones are evicted last, as long as they are
not more than half of the table: otherwise one client with many blocked subjects could have all others evicted. One with
unreplayed counts is evicted only when nothing else is left in the table; `evicted_unreplayed` counts those.

Recency is exact to `touch_ms`. Queues are linked by slot numbers, because references would form cycles.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final, cast, final

from tidegate.core.cells import BLOCKED, PINNED, Cell, Subject
from tidegate.core.model import Tuning
from tidegate.core.table import Queue, Table, TablesBySize
from tidegate.core.views import LedgerView, OriginView

__all__ = ["Subjects"]

# Entries of a list that grows and shrinks with the subjects: one of hundreds of thousands is copied, or its memory is
# returned to the system, in one step of more than a millisecond.
LIST_MAX: Final = 4_096

# Expiry work done along with each new subject: more than one, so that expiry outruns growth.
EXPIRE_PER_CREATION: Final = 4

# A subject that was not used for so long holds no live credit: longer than any life of credit.
HOLDS_MS: Final = 10_000
# Evicted subjects whose credit is given back with the next message. What is left out ends by itself.
RELEASED_MAX: Final = 10_000

# A subject with its cells and its places in table, queue and calendar, without its name; and a table without its key.
# Measured, interpreted and compiled, by tests/core/test_memory_bytes.py.
SUBJECT_BYTES: Final = 800
TABLE_BYTES: Final = 1_200


def text_bytes(text: str) -> int:
    """What a name takes, at most: Python stores a text with one emoji in four bytes for each character."""
    return len(text) if text.isascii() else 4 * len(text)


def table_bytes(table: Table) -> int:
    """What a table takes when it is empty."""
    workspace, namespace, _ = table.key
    return TABLE_BYTES + text_bytes(workspace) + text_bytes(namespace)


@final
class Subjects:
    """All subjects of one node."""

    __slots__ = (
        "_buckets",
        "_by_size",
        "_due",
        "_free_slots",
        "_free_tables",
        "_fresh_ms",
        "_grace_ms",
        "_has_ledger",
        "_has_origin",
        "_last",
        "_last_key",
        "_ledger_duration_ms_min",
        "_new",
        "_numbered",
        "_bytes_max",
        "_subjects_max",
        "bytes",
        "cells",
        "cells_created",
        "count",
        "evicted_blocked",
        "evicted_clean",
        "evicted_unreplayed",
        "expired",
        "generations",
        "has_lost_foreign",
        "released",
        "reserved",
        "slots",
        "tables",
    )

    def __init__(self, tuning: Tuning, *, has_origin: bool, has_ledger: bool) -> None:
        self._has_origin: Final[bool] = has_origin
        self._has_ledger: Final[bool] = has_ledger
        self._ledger_duration_ms_min: Final[int] = tuning.ledger_duration_ms_min
        self._fresh_ms: Final[int] = tuning.fresh_ms
        self._grace_ms: Final[int] = tuning.rollover_grace_ms
        self._subjects_max: Final[int] = tuning.subjects_max
        self._bytes_max: Final[int] = tuning.subjects_bytes_max
        # Live reservations of this node by (key, identifier): they outlive the subject. Written by `reserve`.
        self.reserved: Final[dict[tuple[object, str], int]] = {}
        # The same for resets, by their generations. Written by `Resets`.
        self.generations: Final[dict[tuple[object, str], int]] = {}
        # By (workspace, namespace, duration_ms), and by number. `Engine.decide` reads the first too.
        self.tables: Final[dict[object, Table]] = {}
        # The one that was found last, and by which key: most requests ask for the same limit as the one before.
        self._last: Table | None = None
        self._last_key: object = None
        self._numbered: list[Table | None] = []
        self._free_tables: list[int] = []
        # Every subject by slot; None where there is none any more. Sweeps go through it in slices.
        self.slots: list[Subject | None] = []
        # Numbers of those, in lists of up to `LIST_MAX`; none is empty.
        self._free_slots: list[list[int]] = []
        self._by_size: Final[TablesBySize] = TablesBySize()
        self._buckets: dict[int, list[Subject]] = {}
        self._due: list[int] = []
        self.count: int = 0
        # How many were created since the last call of `make_room`.
        self._new: int = 0
        # What the subjects and their tables take, by estimate.
        self.bytes: int = 0
        # Cells created so far, and those in memory now.
        self.cells_created: int = 0
        self.cells: int = 0
        self.evicted_clean: int = 0
        self.evicted_blocked: int = 0
        self.evicted_unreplayed: int = 0
        self.expired: int = 0
        # Since the last full import, counts of other regions were evicted, or were not kept because memory was full.
        self.has_lost_foreign: bool = False
        # (digest, incarnation) of subjects that were dropped while they may have held credit. Taken by `CreditSync`.
        self.released: list[tuple[bytes, int]] = []

    # -- finding and creating

    def find(self, key: object, identifier: str) -> Subject | None:
        """The subject of `identifier` in the table of `key`: (workspace, namespace, duration_ms)."""
        table = self._last
        if table is None or self._last_key is not key:
            table = self.tables.get(key)
            if table is None:
                return None
            self._last = table
            self._last_key = key
        return table.find(identifier)

    def key_of(self, subject: Subject) -> tuple[str, str, int]:
        """(workspace, namespace, duration_ms) of a subject that is in memory."""
        table = self._numbered[subject.table]
        assert table is not None
        return table.key

    def create(self, key: object, identifier: str, sequence: int, now_ms: int) -> Subject:
        """Add a subject with one empty cell. The caller calls `make_room` when it can: after all of a batch."""
        table = self.tables.get(key)
        if table is None:
            table = self._new_table(key)
        if self._free_slots:
            free = self._free_slots[-1]
            slot = free.pop()
            if not free:
                self._free_slots.pop()
        else:
            slot = len(self.slots)
            self.slots.append(None)
        evictions = self.evicted_clean + self.evicted_blocked + self.evicted_unreplayed
        cell = self.blank_cell(sequence, table.duration_ms)
        subject = Subject(identifier, table.number, slot, evictions, cell)
        self.cells_created += 1
        self.cells += 1
        self.slots[slot] = subject
        table.add(subject)
        self._by_size.grown(table)
        self.count += 1
        self._new += 1
        self.bytes += SUBJECT_BYTES + text_bytes(identifier)
        subject.touched_ms = now_ms
        self._append(table.clean, subject)
        self._schedule(subject, table, now_ms)
        if self.reserved:
            subject.reserved = self.reserved.get((key, identifier), 0)
        if self.generations:
            subject.generation = self.generations.get((key, identifier), 0)
        return subject

    def reserve(self, key: object, identifier: str, amount: int) -> None:
        """Add to what is reserved of a subject, or take from it."""
        place = (key, identifier)
        left = self.reserved.get(place, 0) + amount
        if left > 0:
            self.reserved[place] = left
        else:
            self.reserved.pop(place, None)
        subject = self.find(key, identifier)
        if subject is not None:
            subject.reserved = left

    def is_published(self, duration_ms: int) -> bool:
        """Whether windows of this duration are published: shorter ones are regional."""
        return self._has_ledger and duration_ms >= self._ledger_duration_ms_min

    def blank_cell(self, sequence: int, duration_ms: int) -> Cell:
        """An empty cell with the views that its window needs, in no subject yet."""
        origin = OriginView() if self._has_origin else None
        return Cell(sequence, origin, LedgerView() if self.is_published(duration_ms) else None)

    def new_cell(
        self, subject: Subject, sequence: int, duration_ms: int, sequence_min: int, clock_ms: int
    ) -> Cell:
        """Add the cell of `sequence` to a subject; its cells from `sequence_min` on are kept."""
        cell = self.blank_cell(sequence, duration_ms)
        origin = cell.origin
        earlier = subject.cell(sequence - 1)
        start_ms = sequence * duration_ms
        if origin is not None and earlier is not None and earlier.origin is not None and start_ms <= clock_ms:
            # Not for a cell of the future: nodes whose clocks are ahead may have counted in it.
            origin.follow(earlier.origin, start_ms, duration_ms, self._fresh_ms, self._grace_ms)
        self.insert(subject, cell, sequence_min)
        return cell

    def insert(self, subject: Subject, cell: Cell, sequence_min: int) -> None:
        """Add a blank cell to a subject; its cells from `sequence_min` on are kept."""
        self.cells_created += 1
        held = subject.count()
        subject.insert(cell, sequence_min)
        self.cells += subject.count() - held

    def _new_table(self, key: object) -> Table:
        names = cast("tuple[str, str, int]", key)
        if self._free_tables:
            table = Table(names, self._free_tables.pop())
            self._numbered[table.number] = table
        else:
            table = Table(names, len(self._numbered))
            self._numbered.append(table)
        self.tables[key] = table
        self.bytes += table_bytes(table)
        return table

    # -- queues

    def _append(self, queue: Queue, subject: Subject) -> None:
        slot = subject.slot
        newest = queue.newest
        subject.older = newest
        subject.newer = -1
        if newest >= 0:
            neighbour = self.slots[newest]
            assert neighbour is not None
            neighbour.newer = slot
        else:
            queue.oldest = slot
        queue.newest = slot
        queue.length += 1

    def _unlink(self, queue: Queue, subject: Subject) -> None:
        newer = subject.newer
        older = subject.older
        if newer >= 0:
            neighbour = self.slots[newer]
            assert neighbour is not None
            neighbour.older = older
        else:
            queue.newest = older
        if older >= 0:
            neighbour = self.slots[older]
            assert neighbour is not None
            neighbour.newer = newer
        else:
            queue.oldest = newer
        queue.length -= 1

    def move(self, subject: Subject, queue: int, now_ms: int) -> None:
        """Put the subject at the newest end of `queue`."""
        table = self._numbered[subject.table]
        assert table is not None
        self._unlink(table.queue(subject.queue), subject)
        subject.queue = queue
        if now_ms > subject.touched_ms:
            subject.touched_ms = now_ms
        self._append(table.queue(queue), subject)

    # -- the memory bound

    @property
    def is_full(self) -> bool:
        """One more subject would evict another."""
        return self.count >= self._subjects_max or self.bytes + SUBJECT_BYTES >= self._bytes_max

    def make_room(self, now_ms: int, keep: Subject | None) -> None:
        """Evict subjects until the bound holds again, never `keep`; and do a little of the expiry work for each subject
        that was created since the last call."""
        if self._new == 0:
            return
        self.expire(now_ms, EXPIRE_PER_CREATION * self._new)
        self._new = 0
        while self.count > self._subjects_max or self.bytes > self._bytes_max:
            victim = self._victim(now_ms, keep)
            if victim is None:
                return
            if victim.queue == PINNED and victim.is_unreplayed():
                self.evicted_unreplayed += 1
            elif victim.queue == BLOCKED and victim.strict_until_ms > now_ms:
                self.evicted_blocked += 1
            else:
                self.evicted_clean += 1
            if self._has_ledger:
                self.has_lost_foreign = True
            self.drop(victim, now_ms)

    def _victim(self, now_ms: int, keep: Subject | None) -> Subject | None:
        """The subject to evict next. Of two tables of one subject each, one may hold nothing but `keep`."""
        for table in self._by_size.largest():
            victim = self._victim_of(table, now_ms, keep)
            if victim is not None:
                return victim
        return None

    def _victim_of(self, table: Table, now_ms: int, keep: Subject | None) -> Subject | None:
        clean = self._oldest(table.clean, keep)
        blocked = self._oldest(table.blocked, keep)
        if blocked is not None:
            is_over = blocked.strict_until_ms <= now_ms
            is_older = clean is None or blocked.touched_ms < clean.touched_ms
            if (is_over and is_older) or 2 * table.blocked.length > table.count:
                return blocked
        if clean is not None:
            return clean
        return self._oldest(table.pinned, keep) if blocked is None else blocked

    def _oldest(self, queue: Queue, keep: Subject | None) -> Subject | None:
        slot = queue.oldest
        if slot < 0:
            return None
        subject = self.slots[slot]
        assert subject is not None
        if subject is keep:
            return self.slots[subject.newer] if subject.newer >= 0 else None
        return subject

    def drop(self, subject: Subject, now_ms: int) -> None:
        """Remove a subject with everything it holds."""
        table = self._numbered[subject.table]
        assert table is not None
        credit = subject.credit
        if (
            credit is not None
            and (credit.spare > 0 or credit.in_flight)
            and now_ms - subject.touched_ms < HOLDS_MS
            and len(self.released) < RELEASED_MAX
        ):
            self.released.append((subject.digest_of(table.key), subject.incarnation))
        self._unlink(table.queue(subject.queue), subject)
        self._unschedule(subject)
        table.remove(subject.identifier)
        self.bytes -= SUBJECT_BYTES + text_bytes(subject.identifier)
        self._by_size.shrunk(table)
        if table.count == 0:
            self.bytes -= table_bytes(table)
            del self.tables[table.key]
            self._last = None
            self._numbered[table.number] = None
            self._free_tables.append(table.number)
        self.slots[subject.slot] = None
        if not self._free_slots or len(self._free_slots[-1]) == LIST_MAX:
            self._free_slots.append([])
        self._free_slots[-1].append(subject.slot)
        subject.table = -1
        self.count -= 1
        self.cells -= subject.count()

    # -- expiry

    def _schedule(self, subject: Subject, table: Table, now_ms: int) -> None:
        """Check the subject again when its newest cell has aged out, but not in a span that is due already."""
        bucket_ms = table.bucket_ms
        due_ms = ((subject.sequence + 3) * table.duration_ms // bucket_ms + 1) * bucket_ms
        if due_ms <= now_ms:
            due_ms = (now_ms // bucket_ms + 1) * bucket_ms
        # A span with more than `LIST_MAX` subjects has several lists, each due a millisecond after the one before.
        due_ms += subject.slot // LIST_MAX
        bucket = self._buckets.get(due_ms)
        if bucket is None:
            bucket = []
            self._buckets[due_ms] = bucket
            heappush(self._due, due_ms)
        subject.bucket = due_ms
        subject.position = len(bucket)
        bucket.append(subject)

    def _unschedule(self, subject: Subject) -> None:
        bucket = self._buckets[subject.bucket]
        last = bucket.pop()
        if last is not subject:
            bucket[subject.position] = last
            last.position = subject.position

    def drop_aged(self, subject: Subject, now_ms: int, duration_ms: int) -> bool:
        """Drop a subject's cells that have aged out; False if none is left."""
        held = subject.count()
        lives = subject.drop_aged(now_ms, duration_ms)
        self.cells += subject.count() - held
        return lives

    def expire(self, now_ms: int, subjects_max: int) -> bool:
        """Check up to `subjects_max` subjects that are due. True if more are waiting.

        A subject is due when the newest cell that it had at the last check has aged out. If it has a newer one by
        then it is only rescheduled: a busy subject costs one check in three durations.
        """
        checked = 0
        while self._due:
            due_ms = self._due[0]
            if due_ms > now_ms:
                return False
            bucket = self._buckets[due_ms]
            while bucket:
                if checked == subjects_max:
                    return True
                checked += 1
                subject = bucket[len(bucket) - 1]
                table = self._numbered[subject.table]
                assert table is not None
                if self.drop_aged(subject, now_ms, table.duration_ms):
                    self._unschedule(subject)
                    self._schedule(subject, table, now_ms)
                else:
                    self.expired += 1
                    self.drop(subject, now_ms)
            heappop(self._due)
            del self._buckets[due_ms]
        return False
