"""Memory: which subjects are remembered, which go first, and when they go by themselves.

Laws: no call walks all subjects; every call does a bounded amount of work. The number of subjects is bounded. At
the bound the least recently used subject goes that holds nothing unreplayed, blocked ones last; only when nothing
else is left does one with unreplayed counts go, and `evicted_unreplayed` tells.

Recency is exact to `touch_ms`. Queues are linked by slot numbers, because references would close cycles.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final, cast, final

from tidegate.core.cells import BLOCKED, CLEAN, PINNED, Cell, Shared, Subject, Table
from tidegate.core.model import Tuning

__all__ = ["Subjects"]

# Expiry work done along with each new subject: more than one, so that expiry outruns growth.
EXPIRE_PER_CREATION: Final = 4

# How many blocked subjects are looked at for one whose denial is over, when there is no other to forget.
BLOCKED_LOOKS: Final = 32


@final
class Queue:
    """A doubly linked list of slots, from the oldest to the newest."""

    __slots__ = ("length", "newest", "oldest")

    def __init__(self) -> None:
        self.oldest: int = -1
        self.newest: int = -1
        self.length: int = 0


@final
class Subjects:
    """All subjects of one node."""

    __slots__ = (
        "_blocked",
        "_buckets",
        "_clean",
        "_due",
        "_free_slots",
        "_free_tables",
        "_numbered",
        "_pinned",
        "_shares",
        "_subjects_max",
        "cells",
        "cells_created",
        "count",
        "evicted_blocked",
        "evicted_clean",
        "evicted_unreplayed",
        "expired",
        "slots",
        "tables",
    )

    def __init__(self, tuning: Tuning, shares: bool) -> None:
        self._subjects_max: Final[int] = tuning.subjects_max
        self._shares: Final[bool] = shares
        # By (workspace, namespace, duration_ms). The engine looks into it directly; only this class changes it.
        self.tables: Final[dict[object, Table]] = {}
        self._numbered: list[Table | None] = []
        self._free_tables: list[int] = []
        # Every subject by slot; None where one was forgotten. Sweeps walk it in slices.
        self.slots: list[Subject | None] = []
        self._free_slots: list[int] = []
        self._clean: Final[Queue] = Queue()
        self._blocked: Final[Queue] = Queue()
        self._pinned: Final[Queue] = Queue()
        self._buckets: dict[int, list[Subject]] = {}
        self._due: list[int] = []
        self.count: int = 0
        # Cells made so far, and those remembered now.
        self.cells_created: int = 0
        self.cells: int = 0
        self.evicted_clean: int = 0
        self.evicted_blocked: int = 0
        self.evicted_unreplayed: int = 0
        self.expired: int = 0

    # -- finding and making

    def find(self, key: object, identifier: str) -> Subject | None:
        table = self.tables.get(key)
        return None if table is None else table.find(identifier)

    def key_of(self, subject: Subject) -> tuple[str, str, int]:
        """(workspace, namespace, duration_ms) of a remembered subject."""
        table = self._numbered[subject.table]
        assert table is not None
        return table.key

    def create(self, key: object, identifier: str, sequence: int, now_ms: int) -> Subject:
        """Remember a new subject with one empty cell. The caller makes room (`make_room`) when it can."""
        table = self.tables.get(key)
        if table is None:
            table = self._new_table(key)
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot = len(self.slots)
            self.slots.append(None)
        evictions = self.evicted_clean + self.evicted_blocked + self.evicted_unreplayed
        subject = Subject(identifier, table.number, slot, evictions, self.new_cell(sequence))
        self.slots[slot] = subject
        table.add(subject)
        self.count += 1
        subject.touched_ms = now_ms
        self._append(self._clean, subject)
        self._schedule(subject, table, now_ms)
        return subject

    def new_cell(self, sequence: int) -> Cell:
        self.cells_created += 1
        self.cells += 1
        return Cell(sequence, Shared() if self._shares else None)

    def _new_table(self, key: object) -> Table:
        names = cast("tuple[str, str, int]", key)
        if self._free_tables:
            table = Table(names, self._free_tables.pop())
            self._numbered[table.number] = table
        else:
            table = Table(names, len(self._numbered))
            self._numbered.append(table)
        self.tables[key] = table
        return table

    # -- queues

    def _queue(self, number: int) -> Queue:
        if number == CLEAN:
            return self._clean
        return self._blocked if number == BLOCKED else self._pinned

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
        self._unlink(self._queue(subject.queue), subject)
        subject.queue = queue
        if now_ms > subject.touched_ms:
            subject.touched_ms = now_ms
        self._append(self._queue(queue), subject)

    # -- the memory bound

    def make_room(self, now_ms: int, keep: Subject | None) -> None:
        """Forget subjects until the bound is kept again, never `keep`; and do a little of the expiry work."""
        self.expire(now_ms, EXPIRE_PER_CREATION)
        while self.count > self._subjects_max:
            victim = self._victim(now_ms, keep)
            if victim is None:
                return
            if victim.queue == PINNED:
                self.evicted_unreplayed += 1
            elif victim.queue == BLOCKED and victim.strict_until_ms > now_ms:
                self.evicted_blocked += 1
            else:
                self.evicted_clean += 1
            self.forget(victim)

    def _victim(self, now_ms: int, keep: Subject | None) -> Subject | None:
        clean = self._oldest(self._clean, keep)
        blocked = self._oldest(self._blocked, keep)
        if (
            blocked is not None
            and blocked.strict_until_ms <= now_ms
            and (clean is None or blocked.touched_ms < clean.touched_ms)
        ):
            # Its denial is over: it is as good as clean, and it is the older one.
            return blocked
        if clean is not None:
            return clean
        if blocked is not None:
            return self._unblocked(blocked, now_ms, keep)
        return self._oldest(self._pinned, keep)

    def _unblocked(self, oldest: Subject, now_ms: int, keep: Subject | None) -> Subject:
        """One of the older blocked subjects whose denial is over, or else the oldest.

        A denial lasts as long as its window, so that the oldest is not always the first to be free again.
        """
        subject = oldest
        for _ in range(BLOCKED_LOOKS):
            if subject.strict_until_ms <= now_ms and subject is not keep:
                return subject
            newer = self.slots[subject.newer] if subject.newer >= 0 else None
            if newer is None:
                break
            subject = newer
        return oldest

    def _oldest(self, queue: Queue, keep: Subject | None) -> Subject | None:
        slot = queue.oldest
        if slot < 0:
            return None
        subject = self.slots[slot]
        assert subject is not None
        if subject is keep:
            return self.slots[subject.newer] if subject.newer >= 0 else None
        return subject

    def forget(self, subject: Subject) -> None:
        """Drop a subject and everything it holds."""
        table = self._numbered[subject.table]
        assert table is not None
        self._unlink(self._queue(subject.queue), subject)
        self._unschedule(subject)
        table.remove(subject.identifier)
        if table.count == 0:
            del self.tables[table.key]
            self._numbered[table.number] = None
            self._free_tables.append(table.number)
        self.slots[subject.slot] = None
        self._free_slots.append(subject.slot)
        subject.table = -1
        self.count -= 1
        self.cells -= subject.count()

    # -- expiry

    def _schedule(self, subject: Subject, table: Table, now_ms: int) -> None:
        """Look at the subject again when its newest cell has aged out, and never in a span that is due already."""
        bucket_ms = table.bucket_ms
        due_ms = ((subject.sequence + 3) * table.duration_ms // bucket_ms + 1) * bucket_ms
        if due_ms <= now_ms:
            due_ms = (now_ms // bucket_ms + 1) * bucket_ms
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

    def adopt(self, subject: Subject, cell: Cell) -> None:
        """Let the subject remember an older cell that was made to ask the origin with."""
        self.cells_created += 1
        self.cells += 1
        self.insert(subject, cell, cell.sequence)

    def insert(self, subject: Subject, cell: Cell, sequence_min: int) -> None:
        """Let the subject remember a cell that `new_cell` made."""
        held = subject.count()
        subject.insert(cell, sequence_min)
        self.cells += subject.count() - held - 1

    def drop_aged(self, subject: Subject, now_ms: int, duration_ms: int) -> bool:
        """Let the subject forget cells that have aged out; False if none is left."""
        held = subject.count()
        lives = subject.drop_aged(now_ms, duration_ms)
        self.cells += subject.count() - held
        return lives

    def expire(self, now_ms: int, subjects_max: int) -> bool:
        """Look at up to `subjects_max` subjects whose time has come. True if more are waiting.

        A subject is looked at when the newest cell it had at the last look has aged out. If it lives on in a
        newer cell it is only rescheduled, so that a busy subject costs one look in three durations.
        """
        looked = 0
        while self._due:
            due_ms = self._due[0]
            if due_ms > now_ms:
                return False
            bucket = self._buckets[due_ms]
            while bucket:
                if looked == subjects_max:
                    return True
                looked += 1
                subject = bucket[len(bucket) - 1]
                table = self._numbered[subject.table]
                assert table is not None
                if self.drop_aged(subject, now_ms, table.duration_ms):
                    self._unschedule(subject)
                    self._schedule(subject, table, now_ms)
                else:
                    self.expired += 1
                    self.forget(subject)
            heappop(self._due)
            del self._buckets[due_ms]
        return False
