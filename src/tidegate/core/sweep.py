"""A pass over all subjects, in slices: after the origin or the ledger lost counts, or when thresholds fell."""

from __future__ import annotations

from typing import Final, final

from tidegate.core.cells import Subject
from tidegate.core.pending import Pending
from tidegate.core.sharing import DUE
from tidegate.core.subjects import Subjects
from tidegate.core.views import GlobalView

__all__ = ["Sweep"]

# Pause after a heal, doubled while there are reasons for another one. An origin that evicts keys, or expires them
# early, shows a loss again and again: merging everything each time would be most of its load.
HEAL_PAUSE_FIRST_MS: Final = 1_000
HEAL_PAUSE_LAST_MS: Final = 64_000


@final
class Sweep:
    """Queues again what must be replayed or published again. One pass serves all reasons there are for it."""

    __slots__ = (
        "_global_view",
        "_has_credit",
        "_heal_after_ms",
        "_heal_pause_ms",
        "_is_suspected",
        "_next_slot",
        "_pending",
        "_replays_all",
        "_republishes_all",
        "_republishes_lost",
        "_subjects",
        "_takes_back_all",
        "heals",
        "losses",
        "origin_ahead_ms",
    )

    def __init__(
        self, subjects: Subjects, pending: Pending, global_view: GlobalView, *, has_credit: bool = False
    ) -> None:
        self._has_credit: Final[bool] = has_credit
        self._subjects: Final[Subjects] = subjects
        self._pending: Final[Pending] = pending
        self._global_view: Final[GlobalView] = global_view
        # The next slot to check, -1 when there is no pass.
        self._next_slot: int = -1
        # What the pass is for.
        self._replays_all: bool = False
        self._republishes_all: bool = False
        self._republishes_lost: bool = False
        self._takes_back_all: bool = False
        # A loss starts no heal before this, and how long the next pause is.
        self._heal_after_ms: int = 0
        self._heal_pause_ms: int = HEAL_PAUSE_FIRST_MS
        # A loss was seen in the pause.
        self._is_suspected: bool = False
        # By how much the clock of the origin may be ahead. Written by the pulse.
        self.origin_ahead_ms: int = 0
        # Cells that were queued again for a replay.
        self.heals: int = 0
        # How often a loss of the origin was seen.
        self.losses: int = 0

    @property
    def is_active(self) -> bool:
        """A pass has begun: call `run` until it is done."""
        return self._next_slot >= 0

    def start_heal(self) -> None:
        """Replay every cell again: the origin lost counts."""
        self.losses += 1
        self._replays_all = True
        self._next_slot = 0

    def suspect(self, subject: Subject, now_ms: int) -> None:
        """An answer shows that the origin lost counts of this subject, and so perhaps of others.

        Heal, but not soon after the last heal: `resume` then does it after the pause. A heal that is under way need not
        start again for what it has not reached yet.
        """
        if not self.will_heal(subject):
            self.suspect_all(now_ms)

    def suspect_all(self, now_ms: int) -> None:
        """The origin seems to have lost everything: heal, unless the last heal was a moment ago.

        An origin that evicts keys may lose the name of the region again and again, and little else.
        """
        if now_ms < self._heal_after_ms <= now_ms + HEAL_PAUSE_LAST_MS:
            self._is_suspected = True
            return
        is_quiet = now_ms - self._heal_after_ms > self._heal_pause_ms
        self._heal_pause_ms = (
            HEAL_PAUSE_FIRST_MS if is_quiet else min(2 * self._heal_pause_ms, HEAL_PAUSE_LAST_MS)
        )
        self._heal_after_ms = now_ms + self._heal_pause_ms
        self._is_suspected = False
        self.start_heal()

    def resume(self, now_ms: int) -> bool:
        """Start the heal that a pause has delayed. True if there was one."""
        if not self._is_suspected or now_ms < self._heal_after_ms <= now_ms + HEAL_PAUSE_LAST_MS:
            return False
        self._is_suspected = False
        self._heal_pause_ms = min(2 * self._heal_pause_ms, HEAL_PAUSE_LAST_MS)
        self._heal_after_ms = now_ms + self._heal_pause_ms
        self.start_heal()
        return True

    def start_republish(self) -> None:
        """Check every cell against the publish filters again: thresholds fell."""
        self._republishes_all = True
        self._next_slot = 0

    def start_republish_lost(self) -> None:
        """Publish every row again that the last full import did not see: the ledger lost it."""
        self._republishes_lost = True
        self._next_slot = 0

    def start_take_back(self) -> None:
        """Ask the origin again for every published cell who publishes it: the ledger lost rows."""
        self._takes_back_all = True
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
        self._takes_back_all = False
        return False

    def _check(self, subject: Subject) -> None:
        for cell in subject.cells():
            origin = cell.origin
            if self._replays_all and origin is not None and cell.regional() > 0:
                self.heals += 1
                if self._has_credit:
                    # Also what is known of others: they may have ended. A message says what was acknowledged.
                    origin.is_lost = True
                else:
                    origin.acked = 0
                self._pending.queue_replay(subject, subject.touched_ms)
            ledger = cell.ledger
            if ledger is None:
                continue
            is_lost = (
                self._republishes_lost
                and ledger.published > 0
                and ledger.seen < self._global_view.full_imports
            )
            is_taken_back = self._takes_back_all and ledger.published > 0
            if is_lost or is_taken_back:
                ledger.published = 0
            if is_taken_back:
                self._pending.queue_due(subject, cell, DUE)
            if is_lost or self._republishes_all:
                self._pending.queue_publish(subject, cell)
