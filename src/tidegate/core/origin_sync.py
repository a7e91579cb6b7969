"""How the nodes of a region come to agree, through Redis (the origin): what to replay, and how an answer merges.

Pure: `plan_*` returns what should be sent, `apply_*` merges the answer, `fail_*` takes back what may not have
arrived; loops in `runtime` do the sending. Everything merges with max, so that any order and any repetition of
deliveries gives the same state. A node writes only its own component; what it reads of others raises its view and is
never written back. Every call costs what has changed, not what exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from tidegate.core.cells import BLOCKED, CLEAN, PINNED, Cell, Subject
from tidegate.core.engine import Engine
from tidegate.core.freshness import Need
from tidegate.core.generations import cell_name
from tidegate.core.model import Component, OriginReply, Tuning
from tidegate.core.pending import Pending
from tidegate.core.subjects import Subjects
from tidegate.core.sweep import Sweep

__all__ = ["OriginSync", "Replay"]

# A digest costs a microsecond to compute and 64 bytes to keep: 64 MB for a million. With more subjects than this it is
# computed for each replay.
DIGESTS_KEPT: Final = 100_000


@final
class Replay:
    """Components that are being sent to the origin in one command."""

    __slots__ = ("acked", "cells", "components", "subjects")

    def __init__(self) -> None:
        self.subjects: Final[list[Subject]] = []
        self.cells: Final[list[Cell]] = []
        self.components: Final[list[Component]] = []
        # What the origin had acknowledged of each cell when it was sent. An answer with less shows a loss.
        self.acked: Final[list[int]] = []


@final
class OriginSync:
    """Merges the answers of the origin into one engine."""

    __slots__ = ("_engine", "_fresh_ms", "_retry_ms", "_subjects", "pending", "sweep")

    def __init__(self, engine: Engine, sweep: Sweep, tuning: Tuning) -> None:
        self._engine: Final[Engine] = engine
        self._subjects: Final[Subjects] = engine.subjects
        self._fresh_ms: Final[int] = tuning.fresh_ms
        self._retry_ms: Final[int] = tuning.read_retry_ms
        self.pending: Final[Pending] = engine.pending
        self.sweep: Final[Sweep] = sweep

    # -- reads

    def apply_read(self, need: Need, replies: Sequence[OriginReply], now_ms: int) -> None:
        """The origin answered a read: its cells are fresh."""
        subject = need.subject
        for i, reply in enumerate(replies):
            if subject.table >= 0 and self._is_reset(
                subject, need.cells[i].sequence, need.wanted[i].sequence
            ):
                continue
            cell = self._cell_of(need, i, reply)
            self._restore_own(subject, cell, reply.component)
            self._merge_others(subject, cell, reply.total - reply.component, now_ms)
            self._detect_loss(subject, cell, need.acked[i], reply.component, now_ms)
        self.unpin(subject, now_ms)

    def _is_reset(self, subject: Subject, sequence: int, name: int) -> bool:
        """The subject was reset since it asked under this name: the answer is about counts of before."""
        return name != cell_name(sequence, subject.generation, self._subjects.key_of(subject)[2])

    def _cell_of(self, need: Need, index: int, reply: OriginReply) -> Cell:
        """The cell that a reply is about. One that was created for the read is kept if the origin has counts of it."""
        subject = need.subject
        cell = need.cells[index]
        known = subject.cell(cell.sequence)
        if known is not None:
            return known
        if reply.total > 0 and index > 0 and subject.table >= 0:
            self._subjects.insert(subject, cell, cell.sequence)
        return cell

    def apply_read_failure(self, need: Need, now_ms: int) -> None:
        """A read failed at `now_ms`: decide from memory, and do not read again for `read_retry_ms`."""
        until_ms = now_ms + self._retry_ms
        for cell in need.cells:
            origin = cell.origin
            if origin is not None:
                origin.fail(until_ms)
        self.unpin(need.subject, now_ms)

    # -- replay

    def plan_replay(self, now_ms: int, cells_max: int, subjects_max: int = 1_000_000_000) -> Replay | None:
        """The next dirty cells, oldest first; None when there are none. Each must be applied or failed.

        Checks the first `subjects_max` in the queue at most: some may have aged out, or be evicted.
        """
        replay = Replay()
        taken = 0
        for subject in self.pending.dirty:
            if len(replay.cells) >= cells_max or taken >= subjects_max:
                break
            taken += 1
            if subject.table >= 0:
                self._plan_subject(replay, subject, now_ms)
        for subject in self.pending.take_dirty(taken):
            self.unpin(subject, now_ms)
        return replay if replay.cells else None

    def _plan_subject(self, replay: Replay, subject: Subject, now_ms: int) -> None:
        key = self._subjects.key_of(subject)
        duration_ms = key[2]
        sequence_min = now_ms // duration_ms - 2
        writer = self._engine.writer_of(subject.incarnation)
        for cell in subject.cells():
            origin = cell.origin
            if origin is None or cell.own == 0 or cell.sequence < sequence_min:
                continue
            # The previous cell is sent along, once after its end and then whenever half of the time is over that its
            # answers last: replays keep the current cell fresh, and so the previous one alone should need no read.
            ended_ms = (cell.sequence + 1) * duration_ms
            is_due = origin.answered_at_ms < ended_ms or origin.answered_at_ms + self._fresh_ms <= now_ms
            if cell.own > origin.acked or (is_due and cell.sequence == sequence_min + 1):
                replay.subjects.append(subject)
                replay.cells.append(cell)
                replay.acked.append(origin.acked)
                replay.components.append(subject.component(cell, key, writer))

    def apply_replay(self, replay: Replay, replies: Sequence[OriginReply], now_ms: int) -> None:
        """The origin merged them: they are acknowledged, and its totals bring the counts of the other nodes."""
        for i, reply in enumerate(replies):
            subject = replay.subjects[i]
            sent = replay.components[i].own
            if subject.table >= 0 and self._is_reset(
                subject, replay.cells[i].sequence, replay.components[i].sequence
            ):
                self.unpin(subject, now_ms)
                continue
            self.apply_report(
                subject, replay.cells[i], sent, replay.acked[i], reply.total, reply.component, 0, now_ms
            )
            self.unpin(subject, now_ms)

    def apply_report(
        self,
        subject: Subject,
        cell: Cell,
        sent: int,
        acked: int,
        total: int,
        component: int,
        base: int,
        now_ms: int,
    ) -> None:
        """The origin merged `sent`, and answered its total, the component that it held before, and what of the total
        no writer has reported. `acked` was acknowledged when it was sent."""
        origin = cell.origin
        assert origin is not None
        self._restore_own(subject, cell, component)
        self._detect_loss(subject, cell, acked, component, now_ms)
        origin.acked = max(origin.acked, sent)
        origin.is_lost = False
        ours = max(component, sent)
        # What this node has published for itself may be in the base: another one may have reported its row.
        in_base = min(base, max(0, origin.published - ours))
        self._merge_others(subject, cell, total - ours - in_base, now_ms)

    def fail_replay(self, replay: Replay) -> None:
        """They may not have arrived: they are sent again. Merging twice is harmless."""
        for subject in replay.subjects:
            self.pending.queue_replay(subject, subject.touched_ms)

    def unpin(self, subject: Subject, now_ms: int) -> None:
        """A subject whose counts are all acknowledged, and for which nothing waits, may be evicted again."""
        if subject.queue != PINNED or subject.is_dirty or subject.table < 0:
            return
        credit = subject.credit
        if credit is not None and (credit.in_flight or credit.waiting is not None):
            return
        sequence_min = now_ms // self._subjects.key_of(subject)[2] - 2
        for cell in subject.cells():
            if cell.sequence >= sequence_min and cell.is_unreplayed():
                return
        is_blocked = subject.strict_until_ms > now_ms
        self._subjects.move(subject, BLOCKED if is_blocked else CLEAN, subject.touched_ms)
        if self._subjects.count > DIGESTS_KEPT:
            subject.digest = None

    # -- merging

    def _merge_others(self, subject: Subject, cell: Cell, others: int, now_ms: int) -> None:
        origin = cell.origin
        assert origin is not None
        origin.answer(now_ms, self._fresh_ms)
        following = subject.cell(cell.sequence + 1)
        if following is not None and following.origin is not None:
            following.origin.answer_previous(now_ms, self._fresh_ms)
        if others > cell.others:
            cell.others = others
            self.pending.queue_publish(subject, cell)

    def _restore_own(self, subject: Subject, cell: Cell, component: int) -> None:
        """Add what the origin holds of this node's counts, if it is more than the cell holds.

        Time ran ahead, the cell aged out, and time stepped back. What the cell counted since then is not in that
        component, so that both count in full.
        """
        if component > cell.own:
            cell.own += component
            self.pending.queue_replay(subject, subject.touched_ms)
            self.pending.queue_publish(subject, cell)

    def _detect_loss(self, subject: Subject, cell: Cell, acked: int, component: int, now_ms: int) -> None:
        """Heal if the origin holds less of ours than it had acknowledged when the request was sent.

        It was wiped, or failed over to an older copy: such an answer says something about every cell. But a cell that
        is missing because the clock of the origin has passed its end is not a loss.
        """
        origin = cell.origin
        assert origin is not None
        if component >= acked or component >= origin.acked or subject.table < 0:
            return
        expires_at_ms = (cell.sequence + 3) * self._subjects.key_of(subject)[2]
        if now_ms + self.sweep.origin_ahead_ms >= expires_at_ms:
            return
        origin.acked = 0
        self.sweep.suspect(subject, now_ms)
        self.pending.queue_replay(subject, subject.touched_ms)
