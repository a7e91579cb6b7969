"""Work for the background loops: which subjects have counts to replay, and which have cells to publish.

`Engine`, `OriginSync`, `LedgerSync` and `Sweep` add to these queues; `OriginSync` and `LedgerSync` take from them. A
subject is in a queue at most once, about in the order in which it was added. The rules that decide when a cell is
published early are here too, because every change of a count has to apply them.
"""

from __future__ import annotations

from typing import Final, final

from tidegate.core.cells import PINNED, Cell, Subject
from tidegate.core.model import Limit, Tuning
from tidegate.core.subjects import Subjects
from tidegate.core.views import GlobalView, LedgerView
from tidegate.core.windows import effective, publish_threshold

__all__ = ["Pending"]

# Entries of each queue that are checked with each new subject: more than one, so that pruning outruns growth.
PRUNED_PER_CREATION: Final = 4


@final
class Pending:
    """The queues of one node."""

    __slots__ = (
        "_global_view",
        "_pressure_parts",
        "_pruned",
        "_subjects",
        "asking",
        "changed",
        "dirty",
        "is_urgent",
        "pressed",
    )

    def __init__(self, subjects: Subjects, global_view: GlobalView, tuning: Tuning) -> None:
        self._subjects: Final[Subjects] = subjects
        self._global_view: Final[GlobalView] = global_view
        self._pressure_parts: Final[int] = tuning.pressure_parts
        # Subjects with counts to replay; with something to ask the origin at once: requests wait, credit is low or was
        # recalled; with cells to publish on the tick; with cells to publish before it.
        self.dirty: Final[list[Subject]] = []
        self.asking: Final[list[Subject]] = []
        self.changed: Final[list[Subject]] = []
        self.pressed: Final[list[Subject]] = []
        # True when something was added to `dirty`, `asking` or `pressed`: the driver wakes its loops, and sets it to
        # False.
        self.is_urgent: bool = False
        # Where `prune` last stopped.
        self._pruned: int = 0

    # -- adding

    def note(self, subject: Subject, cell: Cell, limit: Limit, now_ms: int, has_grown: bool) -> None:
        """A request for the cell was decided: queue what the origin and the ledger do not know yet.

        A lower quota than before lowers the threshold from which on other regions should know the count. A quota
        of 0 does not: it denies every request, whatever the count is.
        """
        if has_grown and cell.origin is not None and not subject.is_dirty:
            self.queue_replay(subject, now_ms)
        ledger = cell.ledger
        if ledger is None:
            return
        quota = limit.quota
        if quota > 0 and (quota < ledger.quota_min or ledger.quota_min == 0):
            ledger.quota_min = quota
            self.set_pressure(subject, cell, ledger, now_ms, limit.duration_ms)
            self.queue_publish(subject, cell)
        elif has_grown:
            self.queue_publish(subject, cell)

    def queue_replay(self, subject: Subject, now_ms: int) -> None:
        """The subject has counts that the origin does not have. It stays in memory until they are acknowledged."""
        if subject.is_dirty or subject.table < 0:
            return
        subject.is_dirty = True
        self.dirty.append(subject)
        self.is_urgent = True
        if subject.queue != PINNED:
            self._subjects.move(subject, PINNED, now_ms)

    def queue_ask(self, subject: Subject) -> None:
        """A message about the subject should leave at once. While one is in flight, its answer sees to that."""
        if subject.is_asking or subject.table < 0:
            return
        subject.is_asking = True
        self.asking.append(subject)
        self.is_urgent = True

    def queue_publish(self, subject: Subject, cell: Cell) -> None:
        """Publish the cell on the next tick, or before it under pressure, if its count is above the published one."""
        ledger = cell.ledger
        if ledger is None or subject.table < 0:
            return
        regional = cell.own + cell.others
        if regional <= ledger.published:
            return
        if not ledger.is_changed:
            ledger.is_changed = True
            if cell.origin is None and subject.queue != PINNED and cell.own > ledger.published:
                # Without an origin nothing else holds these counts until they are published.
                self._subjects.move(subject, PINNED, subject.touched_ms)
            if not subject.is_changed:
                subject.is_changed = True
                self.changed.append(subject)
        if not ledger.is_pressed and ledger.quota_min > 0 and regional >= ledger.pressure_at:
            ledger.is_pressed = True
            self.pressed.append(subject)
            self.is_urgent = True

    def set_pressure(
        self, subject: Subject, cell: Cell, ledger: LedgerView, now_ms: int, duration_ms: int
    ) -> None:
        """Set the count from which on this cell is published without waiting for the tick.

        It may grow by a part of the headroom, divided among the regions seen on it: what other regions cannot see
        stays a small part of what is left. The first publish waits for the threshold alone. Up to it all regions
        together may hold half of the quota unseen, and a part of the headroom on top would be as much again.
        """
        if ledger.quota_min == 0:
            return
        used = cell.total()
        previous = subject.cell(cell.sequence - 1)
        elapsed_ms = now_ms - cell.sequence * duration_ms
        if previous is not None and 0 <= elapsed_ms < duration_ms:
            used = effective(used, previous.total(), elapsed_ms, duration_ms)
        regions = 1 if ledger.components is None else 1 + len(ledger.components)
        step = (ledger.quota_min - used) // (self._pressure_parts * regions)
        pressure_at = ledger.published + (step if step > 1 else 1)
        if cell.foreign == 0:
            threshold = publish_threshold(ledger.quota_min, self._global_view.regions)
            if threshold > pressure_at or ledger.published == 0:
                pressure_at = threshold
        ledger.pressure_at = pressure_at

    # -- taking

    def take_publish(self, count: int, *, pressed_only: bool) -> list[Subject]:
        """Remove the next `count` subjects to publish from their queue."""
        queue = self.pressed if pressed_only else self.changed
        taken = queue[:count]
        del queue[:count]
        if not pressed_only:
            for subject in taken:
                subject.is_changed = False
        return taken

    def take_dirty(self, count: int) -> list[Subject]:
        """Remove the next `count` subjects to replay from their queue."""
        taken = self.dirty[:count]
        del self.dirty[:count]
        for subject in taken:
            subject.is_dirty = False
        return taken

    def take_asking(self, count: int) -> list[Subject]:
        """Remove the next `count` subjects whose message should leave at once."""
        taken = self.asking[:count]
        del self.asking[:count]
        for subject in taken:
            subject.is_asking = False
        return taken

    def prune(self) -> None:
        """Remove a few evicted subjects. Called with each new subject.

        While the origin or the ledger is down its queue is not emptied: a client that sprays identifiers would
        otherwise fill it with subjects that were evicted long ago.
        """
        self._prune(self.dirty)
        self._prune(self.asking)
        self._prune(self.changed)
        self._prune(self.pressed)

    def _prune(self, queue: list[Subject]) -> None:
        for _ in range(PRUNED_PER_CREATION):
            if not queue:
                return
            self._pruned = (self._pruned + 1) % len(queue)
            if queue[self._pruned].table < 0:
                queue[self._pruned] = queue[-1]
                queue.pop()
