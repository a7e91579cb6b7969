"""A pass over all subjects, in slices: after the origin or the ledger lost counts, or when thresholds fell."""

from __future__ import annotations

from typing import Final, final

from tidegate.core.cells import Subject
from tidegate.core.pending import Pending
from tidegate.core.subjects import Subjects
from tidegate.core.views import GlobalView

__all__ = ["Sweep"]


@final
class Sweep:
    """Queues again what must be replayed or published again. One pass serves all reasons there are for it."""

    __slots__ = (
        "_global_view",
        "_next_slot",
        "_pending",
        "_replays_all",
        "_republishes_all",
        "_republishes_lost",
        "_subjects",
        "heals",
    )

    def __init__(self, subjects: Subjects, pending: Pending, global_view: GlobalView) -> None:
        self._subjects: Final[Subjects] = subjects
        self._pending: Final[Pending] = pending
        self._global_view: Final[GlobalView] = global_view
        # The next slot to check, -1 when there is no pass.
        self._next_slot: int = -1
        # What the pass is for.
        self._replays_all: bool = False
        self._republishes_all: bool = False
        self._republishes_lost: bool = False
        # Cells that were queued again for a replay.
        self.heals: int = 0

    @property
    def is_active(self) -> bool:
        """A pass has begun: call `run` until it is done."""
        return self._next_slot >= 0

    def start_heal(self) -> None:
        """Replay every cell again: the origin lost counts."""
        self._replays_all = True
        self._next_slot = 0

    def start_republish(self) -> None:
        """Check every cell against the publish filters again: thresholds fell."""
        self._republishes_all = True
        self._next_slot = 0

    def start_republish_lost(self) -> None:
        """Publish every row again that the last full import did not see: the ledger lost it."""
        self._republishes_lost = True
        self._next_slot = 0

    def will_heal(self, subject: Subject) -> bool:
        """Whether the present pass will still replay this subject again."""
        return self._replays_all and 0 <= self._next_slot <= subject.slot

    def run(self, slots_max: int) -> bool:
        """Check the next slots. True while there are more."""
        if self._next_slot < 0:
            return False
        slots = self._subjects.slots
        end = min(self._next_slot + slots_max, len(slots))
        for slot in range(self._next_slot, end):
            subject = slots[slot]
            if subject is not None:
                self._check(subject)
        if end < len(slots):
            self._next_slot = end
            return True
        self._next_slot = -1
        self._replays_all = False
        self._republishes_all = False
        self._republishes_lost = False
        return False

    def _check(self, subject: Subject) -> None:
        for cell in subject.cells():
            origin = cell.origin
            if self._replays_all and origin is not None and cell.own > 0:
                origin.acked = 0
                self.heals += 1
                self._pending.queue_replay(subject, subject.touched_ms)
            ledger = cell.ledger
            if ledger is None:
                continue
            is_lost = (
                self._republishes_lost
                and ledger.published > 0
                and ledger.seen < self._global_view.full_imports
            )
            if is_lost:
                ledger.published = 0
            if is_lost or self._republishes_all:
                self._pending.queue_publish(subject, cell)
