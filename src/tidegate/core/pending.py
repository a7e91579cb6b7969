"""Work for the background loops: which subjects have counts to replay, and which have cells to publish.

`Engine`, `OriginSync`, `LedgerSync` and `Sweep` add to these queues; `OriginSync` and `LedgerSync` take from them. A
subject is in a queue at most once, about in the order in which it was added. The rules that decide when a cell is
published early are here too, because every change of a count has to apply them.
"""

from __future__ import annotations

from typing import Final, final

from tidegate.core.cells import PINNED, Cell, Subject
from tidegate.core.model import Limit, Tuning
from tidegate.core.sharing import PRESSED
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
        "due",
        "has_pressed_due",
        "is_urgent",
        "pressed",
    )

    def __init__(self, subjects: Subjects, global_view: GlobalView, tuning: Tuning) -> None:
        self._subjects: Final[Subjects] = subjects
        self._global_view: Final[GlobalView] = global_view
        self._pressure_parts: Final[int] = tuning.pressure_parts
        # Subjects with counts to replay; with something to ask the origin at once: requests wait, credit is low or was
        # recalled; with cells to publish on the tick; with cells to publish before it; with cells that the origin has
        # made this node responsible for.
        self.dirty: Final[list[Subject]] = []
        self.asking: Final[list[Subject]] = []
        self.changed: Final[list[Subject]] = []
        self.pressed: Final[list[Subject]] = []
        self.due: Final[list[Subject]] = []
        # Some of the last should not wait for a tick.
        self.has_pressed_due: bool = False
        # True when something was added to `dirty`, `asking` or `pressed`: the driver wakes its loops, and sets it to
        # False.
        self.is_urgent: bool = False
        # Where `prune` last stopped.
        self._pruned: int = 0

    # -- adding

    def note(
        self, subject: Subject, cell: Cell, limit: Limit, now_ms: int, wall_ms: int, has_grown: bool
    ) -> None:
        """A request was decided: queue what the origin and the ledger do not know yet of its cell.

        A lower quota than before lowers the threshold from which on other regions should know the count. A quota
        of 0 does not: it denies every request, whatever the count is.
        """
        if has_grown and cell.origin is not None and not subject.is_dirty:
            self.queue_replay(subject, wall_ms)
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
        """A message about the subject should leave at once. While one is in flight, its answer queues the next one."""
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

    def queue_due(self, subject: Subject, cell: Cell, due: int) -> None:
        """The origin has made this node responsible for publishing the cell."""
        ledger = cell.ledger
        if ledger is None or subject.table < 0:
            return
        self.queue_publish(subject, cell)
        if due > ledger.due:
            ledger.due = due
        if due == PRESSED:
            self.has_pressed_due = True
            self.is_urgent = True
        if not subject.is_due:
            subject.is_due = True
            self.due.append(subject)

    def take_due(self, count: int) -> list[Subject]:
        """Remove the next `count` subjects that this node is responsible for from their queue."""
        taken = self.due[:count]
        del self.due[:count]
        for subject in taken:
            subject.is_due = False
        return taken

    def step_of(self, subject: Subject, cell: Cell, ledger: LedgerView, now_ms: int, duration_ms: int) -> int:
        """By how much a cell may grow before other regions should know: a part of the headroom, divided among the
        regions seen on it, so that what they cannot see stays a small part of what is left."""
        used = cell.total()
        previous = subject.cell(cell.sequence - 1)
        elapsed_ms = now_ms - cell.sequence * duration_ms
        if previous is not None and 0 <= elapsed_ms < duration_ms:
            used = effective(used, previous.total(), elapsed_ms, duration_ms)
        regions = 0 if ledger.components is None else len(ledger.components)
        if ledger.regions > regions:
            regions = ledger.regions
        step = (ledger.quota_min - used) // (self._pressure_parts * (1 + regions))
        return step if step > 1 else 1

    def floor_of(self, ledger: LedgerView) -> int:
        """From which count on other regions should know the cell; 0 before its first request."""
        return 0 if ledger.quota_min == 0 else publish_threshold(ledger.quota_min, self._global_view.regions)

    def set_pressure(
        self, subject: Subject, cell: Cell, ledger: LedgerView, now_ms: int, duration_ms: int
    ) -> None:
        """Set the count from which on this cell is published without waiting for the tick.

        The first publish waits for the threshold alone. Up to it all regions together may hold half of the quota
        unseen, and a part of the headroom on top would be as much again.
        """
        if ledger.quota_min == 0:
            return
        pressure_at = ledger.published + self.step_of(subject, cell, ledger, now_ms, duration_ms)
        if cell.foreign == 0:
            threshold = self.floor_of(ledger)
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
        self._prune(self.due)

    def _prune(self, queue: list[Subject]) -> None:
        for _ in range(PRUNED_PER_CREATION):
            if not queue:
                return
            self._pruned = (self._pruned + 1) % len(queue)
            if queue[self._pruned].table < 0:
                queue[self._pruned] = queue[-1]
                queue.pop()
