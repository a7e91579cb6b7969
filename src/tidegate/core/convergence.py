"""How nodes and regions come to agree: what to replay, what to publish, how an answer merges.

Pure: `plan_*` says what should be sent, `apply_*` merges what came back, and the loops in `runtime` and the
simulator carry it between the two. Everything merges with max, so that any order and any repetition of deliveries
gives the same state. A node writes only its own component, a region only its own row; what was read of others
raises the view and is never written back. Every call costs what has changed, not what exists; the sweeps that
follow a wiped origin or ledger go through the slots in slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from tidegate.core.cells import BLOCKED, CLEAN, PINNED, Cell, Shared, Subject
from tidegate.core.engine import Engine, Need
from tidegate.core.model import Component, Heard, LedgerRow, Tuning
from tidegate.core.windows import publish_threshold

__all__ = ["Convergence", "Publication", "Replay", "row_of"]

# A digest costs a microsecond to compute and 64 bytes to keep. With more subjects than this it is computed each time
# that one is replayed: those of a million would be 64 MB.
DIGESTS_KEPT: Final = 100_000


@final
class Replay:
    """Components on their way to the origin, in one command's worth."""

    __slots__ = ("acked", "cells", "components", "subjects")

    def __init__(self) -> None:
        # What the origin had acknowledged of each cell when it was sent: an answer that holds less was not overtaken.
        self.acked: Final[list[int]] = []
        self.components: Final[list[Component]] = []
        self.subjects: Final[list[Subject]] = []
        self.cells: Final[list[Cell]] = []


@final
class Publication:
    """Rows on their way to the ledger, in unique-key order."""

    __slots__ = ("cells", "rows", "subjects")

    def __init__(self, found: list[tuple[LedgerRow, Subject, Cell]]) -> None:
        found.sort(key=row_of)
        self.rows: Final[list[LedgerRow]] = [row for row, _, _ in found]
        self.subjects: Final[list[Subject]] = [subject for _, subject, _ in found]
        self.cells: Final[list[Cell]] = [cell for _, _, cell in found]


@final
class Convergence:
    """The shared side of one engine."""

    __slots__ = (
        "_engine",
        "_fulls",
        "_import_at_ms",
        "_region",
        "_rows_until_ms",
        "_sweep_at",
        "_sweep_heals",
        "_sweep_publishes",
        "_sweep_unpublishes",
        "_tuning",
        "cells_imported",
        "heals",
        "hot_until_ms",
        "rows_imported",
        "rows_set_aside",
    )

    def __init__(self, engine: Engine, tuning: Tuning, region: str) -> None:
        self._engine: Final[Engine] = engine
        self._tuning: Final[Tuning] = tuning
        self._region: Final[str] = region
        # A sweep is going through the slots and has come this far; -1 when there is none.
        self._sweep_at: int = -1
        self._sweep_heals: bool = False
        self._sweep_publishes: bool = False
        self._sweep_unpublishes: bool = False
        # Full imports begun so far, and until when the ledger must hold rows of this region.
        self._fulls: int = 0
        self._rows_until_ms: int = 0
        # When the import that is under way began, -1 before its first rows.
        self._import_at_ms: int = -1
        # While this node holds cells above their threshold that still grow, imports are fast.
        self.hot_until_ms: int = 0
        self.cells_imported: int = 0
        self.rows_imported: int = 0
        self.rows_set_aside: int = 0
        self.heals: int = 0

    # -- reads

    def apply_read(self, need: Need, heard: Sequence[Heard], now_ms: int) -> None:
        """The origin answered: both cells are as fresh as they can be."""
        for i, answer in enumerate(heard):
            cell = self._asked(need, i, answer)
            self._regain(need.subject, cell, answer.component)
            self._hear(need.subject, cell, answer.total - answer.component, now_ms)
            self._check(need.subject, cell, need.acked[i], answer.component)

    def _asked(self, need: Need, index: int, answer: Heard) -> Cell:
        """The cell that an answer is about. One that was made to ask with is remembered if it holds something."""
        subject = need.subject
        cell = need.cells[index]
        known = subject.cell(cell.sequence)
        if known is not None:
            return known
        if answer.total > 0 and index > 0 and subject.table >= 0:
            self._engine.subjects.adopt(subject, cell)
        return cell

    def apply_read_failure(self, need: Need, now_ms: int) -> None:
        """The read failed, as known at `now_ms`: decide from memory, and try again no sooner than in a while."""
        until_ms = now_ms + self._tuning.read_retry_ms
        for cell in need.cells:
            shared = cell.shared
            if shared is not None:
                shared.fresh_until_ms = max(shared.fresh_until_ms, until_ms)
                shared.failed_until_ms = max(shared.failed_until_ms, until_ms)

    def _hear(self, subject: Subject, cell: Cell, others: int, now_ms: int) -> None:
        shared = cell.shared
        if shared is None:
            return
        shared.fresh_until_ms = max(shared.fresh_until_ms, now_ms + self._tuning.fresh_ms)
        shared.heard_at_ms = max(shared.heard_at_ms, now_ms)
        if others > cell.others:
            cell.others = others
            if subject.table >= 0 and cell.own + others > shared.published:
                self._note_change(subject, cell, shared)

    def _note_change(self, subject: Subject, cell: Cell, shared: Shared) -> None:
        duration_ms = self._engine.subjects.key_of(subject)[2]
        if self._engine.has_ledger and duration_ms >= self._tuning.ledger_duration_ms_min:
            self._engine.note_change(subject, cell, shared)

    # -- replay

    def plan_replay(self, now_ms: int, cells_max: int, subjects_max: int = 1_000_000_000) -> Replay | None:
        """The next dirty cells, oldest first; None when there are none. Each must be applied or failed.

        Looks at the first `subjects_max` in the queue at most: some may have aged, or be forgotten.
        """
        engine = self._engine
        replay = Replay()
        taken = 0
        for subject in engine.dirty:
            if len(replay.cells) >= cells_max or taken >= subjects_max:
                break
            taken += 1
            subject.awaiting = False
            if subject.table < 0:
                continue
            key = engine.subjects.key_of(subject)
            sequence_min = now_ms // key[2] - 2
            for cell in subject.cells():
                shared = cell.shared
                if shared is None or cell.own == 0 or cell.sequence < sequence_min:
                    continue
                # The cell before the current one goes along until it was heard after its end: replays keep the
                # current one fresh, so that no read would tell what others counted there last.
                ended_ms = (cell.sequence + 1) * key[2]
                is_open_question = cell.sequence == sequence_min + 1 and shared.heard_at_ms < ended_ms
                if cell.own > shared.acked or is_open_question:
                    replay.subjects.append(subject)
                    replay.cells.append(cell)
                    replay.acked.append(shared.acked)
                    replay.components.append(engine.component(subject, cell, key))
            self._unpin(subject, now_ms)
        del engine.dirty[:taken]
        return replay if replay.cells else None

    def apply_replay(self, replay: Replay, heard: Sequence[Heard], now_ms: int) -> None:
        """The origin merged them: acknowledged, and its totals are news of the other nodes."""
        for i, answer in enumerate(heard):
            subject = replay.subjects[i]
            cell = replay.cells[i]
            sent = replay.components[i].own
            shared = cell.shared
            assert shared is not None
            self._regain(subject, cell, answer.component)
            self._check(subject, cell, replay.acked[i], answer.component)
            shared.acked = max(shared.acked, sent)
            self._hear(subject, cell, answer.total - max(answer.component, sent), now_ms)
            self._unpin(subject, now_ms)

    def fail_replay(self, replay: Replay) -> None:
        """It is not known whether they arrived: they are sent again. Merging twice is harmless."""
        for subject in replay.subjects:
            self._queue(subject)

    def _queue(self, subject: Subject) -> None:
        """The subject holds counts to replay: until then it is kept in memory."""
        if not subject.awaiting and subject.table >= 0:
            subject.awaiting = True
            self._engine.dirty.append(subject)
            self._engine.signals = True
            if subject.queue != PINNED:
                self._engine.subjects.move(subject, PINNED, subject.touched_ms)

    def _unpin(self, subject: Subject, now_ms: int) -> None:
        """A subject whose counts are all acknowledged may be forgotten again."""
        if subject.queue != PINNED or subject.awaiting or subject.table < 0:
            return
        sequence_min = now_ms // self._engine.subjects.key_of(subject)[2] - 2
        for cell in subject.cells():
            if cell.shared is not None and cell.own > cell.shared.acked and cell.sequence >= sequence_min:
                return
        blocked = subject.strict_until_ms > now_ms
        self._engine.subjects.move(subject, BLOCKED if blocked else CLEAN, subject.touched_ms)
        if self._engine.subjects.count > DIGESTS_KEPT:
            subject.digest = None

    def _regain(self, subject: Subject, cell: Cell, component: int) -> None:
        """The origin holds more of ours than we remember: time ran ahead, the cell aged out, and time stepped back.

        What is remembered came after that, so it is added: the earlier part counts in full.
        """
        if component > cell.own:
            cell.own += component
            self._queue(subject)
            shared = cell.shared
            if shared is not None and subject.table >= 0:
                self._note_change(subject, cell, shared)

    # -- a wiped or older origin

    def _check(self, subject: Subject, cell: Cell, acked: int, component: int) -> None:
        """Does the origin hold less of ours than it had acknowledged when it was asked?

        If so it was wiped, or failed over to an older copy. One such answer is evidence about every cell. A sweep
        marks them all to be merged again; if one is under way, only what lies behind it can be news.
        """
        shared = cell.shared
        if shared is None or component >= acked or component >= shared.acked:
            return
        shared.acked = 0
        if self._sweep_at < 0 or not self._sweep_heals or subject.slot < self._sweep_at:
            self.start_heal()
        self._queue(subject)

    def start_heal(self) -> None:
        """Merge everything again, in slices: call `sweep` until it says that it is done."""
        self._sweep_heals = True
        self._sweep_at = 0

    def start_republish(self) -> None:
        """Offer every cell to the publish filters again: the ledger lost rows, or thresholds fell."""
        self._sweep_publishes = True
        self._sweep_at = 0

    @property
    def sweeping(self) -> bool:
        """A sweep is under way: call `sweep` until it is done."""
        return self._sweep_at >= 0

    @property
    def dirty_subjects(self) -> int:
        """How many subjects wait for a replay."""
        return len(self._engine.dirty)

    @property
    def has_dirty(self) -> bool:
        """There is something to replay."""
        return bool(self._engine.dirty)

    @property
    def has_pressed(self) -> bool:
        """There is something to publish before the next tick."""
        return bool(self._engine.pressed)

    def sweep(self, slots_max: int) -> bool:
        """Go through the next slots. True while there are more."""
        if self._sweep_at < 0:
            return False
        slots = self._engine.subjects.slots
        end = min(self._sweep_at + slots_max, len(slots))
        for slot in range(self._sweep_at, end):
            subject = slots[slot]
            if subject is None:
                continue
            for cell in subject.cells():
                shared = cell.shared
                if shared is None:
                    continue
                if self._sweep_heals and cell.own > 0:
                    shared.acked = 0
                    self.heals += 1
                    self._queue(subject)
                is_lost = self._sweep_unpublishes and shared.published > 0 and shared.seen < self._fulls
                if is_lost:
                    shared.published = 0
                if (is_lost or self._sweep_publishes) and cell.own + cell.others > shared.published:
                    self._note_change(subject, cell, shared)
        if end < len(slots):
            self._sweep_at = end
            return True
        self._sweep_at = -1
        self._sweep_heals = False
        self._sweep_publishes = False
        self._sweep_unpublishes = False
        return False

    # -- publish

    def plan_publish(self, now_ms: int, *, pressed_only: bool = False) -> Publication | None:
        """The rows that should go out now; None when there are none. Each must be applied, failed or set aside.

        By tick all changed cells are considered, by pressure only those that have grown by their step. A cell
        that does not pass the filters leaves the queue: it comes back when it grows, when another region
        publishes it, or when the number of regions rises.
        """
        found: list[tuple[LedgerRow, Subject, Cell]] = []
        waiting = self.subjects_waiting(pressed_only=pressed_only)
        self.collect_publish(found, now_ms, waiting, pressed_only=pressed_only)
        return Publication(found) if found else None

    def subjects_waiting(self, *, pressed_only: bool = False) -> int:
        """How many subjects wait for a publish. A turn takes so many and no more: who comes back is for the next."""
        return len(self._engine.pressed) if pressed_only else len(self._engine.changed)

    def collect_publish(
        self,
        collected: list[tuple[LedgerRow, Subject, Cell]],
        now_ms: int,
        subjects_max: int,
        *,
        pressed_only: bool = False,
    ) -> None:
        """Take the next subjects from the queue and add what should go out, sorted by itself: a slice of a turn."""
        engine = self._engine
        if pressed_only:
            subjects = engine.pressed[:subjects_max]
            del engine.pressed[:subjects_max]
        else:
            subjects = engine.changed[:subjects_max]
            del engine.changed[:subjects_max]
        found: list[tuple[LedgerRow, Subject, Cell]] = []
        for subject in subjects:
            if not pressed_only:
                subject.publishing = False
            if subject.table < 0:
                continue
            key = engine.subjects.key_of(subject)
            for cell in subject.cells():
                shared = cell.shared
                if shared is None or not (shared.pressed if pressed_only else shared.changed):
                    continue
                shared.pressed = False
                if pressed_only and not shared.changed:
                    continue
                row = self._row(subject, cell, shared, key, now_ms)
                if row is not None:
                    shared.changed = False
                    found.append((row, subject, cell))
                elif not pressed_only:
                    shared.changed = False
                    if now_ms < shared.set_aside_until_ms:
                        engine.note_change(subject, cell, shared)
        found.sort(key=row_of)
        collected.extend(found)

    def _row(
        self, subject: Subject, cell: Cell, shared: Shared, key: tuple[str, str, int], now_ms: int
    ) -> LedgerRow | None:
        """The cell's row, if it passes the filters of publishing."""
        workspace, namespace, duration_ms = key
        expires_at_ms = (cell.sequence + 2) * duration_ms
        regional = cell.own + cell.others
        if duration_ms < self._tuning.ledger_duration_ms_min or now_ms >= expires_at_ms:
            return None
        if regional <= shared.published or now_ms < shared.set_aside_until_ms:
            return None
        if cell.foreign == 0 and (
            shared.limit_min == 0 or regional < publish_threshold(shared.limit_min, self._engine.regions)
        ):
            return None
        self.hot_until_ms = max(self.hot_until_ms, now_ms + 2 * self._tuning.import_interval_ms)
        return LedgerRow(
            workspace,
            namespace,
            subject.identifier,
            duration_ms,
            cell.sequence,
            self._region,
            regional,
            expires_at_ms,
        )

    def apply_publish(self, publication: Publication, start: int, end: int, now_ms: int) -> None:
        """The rows from `start` up to `end` stand in the ledger."""
        for i in range(start, end):
            cell = publication.cells[i]
            shared = cell.shared
            assert shared is not None
            row = publication.rows[i]
            shared.published = max(shared.published, row.regional)
            shared.set_aside = 0
            shared.seen = self._fulls
            self._rows_until_ms = max(self._rows_until_ms, row.expires_at_ms)
            self._aim(publication.subjects[i], cell, shared, now_ms, row.duration_ms)

    def fail_publish(self, publication: Publication, start: int, end: int) -> None:
        """These rows did not go out, or nobody knows: they wait for the next turn."""
        for i in range(start, end):
            cell = publication.cells[i]
            subject = publication.subjects[i]
            if cell.shared is not None and subject.table >= 0:
                self._engine.note_change(subject, cell, cell.shared)

    def set_aside(self, publication: Publication, index: int, now_ms: int) -> None:
        """The ledger refuses this very row: it waits, longer each time, and holds nobody else up."""
        cell = publication.cells[index]
        shared = cell.shared
        assert shared is not None
        self.rows_set_aside += 1
        until_ms = now_ms + (self._tuning.set_aside_ms << min(shared.set_aside, 10))
        shared.set_aside_until_ms = max(shared.set_aside_until_ms, until_ms)
        shared.set_aside += 1
        if publication.subjects[index].table >= 0:
            self._engine.note_change(publication.subjects[index], cell, shared)

    def _aim(self, subject: Subject, cell: Cell, shared: Shared, now_ms: int, duration_ms: int) -> None:
        if shared.limit_min > 0:
            self._engine.aim(subject, cell, shared, now_ms, duration_ms)

    # -- import

    def apply_import(
        self,
        rows: Sequence[LedgerRow],
        now_ms: int,
        *,
        full: bool = False,
        lag_ms: dict[str, int] | None = None,
    ) -> None:
        """Merge rows of the ledger: own ones raise the region's lower bound, others are foreign components.

        `now_ms` is when the import began, `lag_ms` how old the newest row of each region was then.
        """
        self._import_at_ms = now_ms
        for row in rows:
            if now_ms >= row.expires_at_ms or row.duration_ms < self._tuning.ledger_duration_ms_min:
                continue
            self.rows_imported += 1
            subject, cell = self._import_cell(row, now_ms)
            shared = cell.shared
            assert shared is not None
            if row.region == self._region:
                self._apply_own_row(subject, cell, shared, row, full)
            else:
                lag = 0 if lag_ms is None else lag_ms.get(row.region, 0)
                self._apply_foreign_row(subject, cell, shared, row, now_ms, lag)

    def _import_cell(self, row: LedgerRow, now_ms: int) -> tuple[Subject, Cell]:
        subjects = self._engine.subjects
        key = (row.workspace, row.namespace, row.duration_ms)
        subject = subjects.find(key, row.identifier)
        if subject is None:
            self.cells_imported += 1
            subject = subjects.create(key, row.identifier, row.sequence, now_ms)
            subjects.make_room(now_ms, subject)
        cell = subject.cell(row.sequence)
        if cell is None:
            self.cells_imported += 1
            sequence_min = now_ms // row.duration_ms - 2
            cell = self._engine.new_cell(subject, row.sequence, row.duration_ms, sequence_min)
        return subject, cell

    def _apply_own_row(
        self, subject: Subject, cell: Cell, shared: Shared, row: LedgerRow, full: bool
    ) -> None:
        shared.seen = self._fulls
        self._rows_until_ms = max(self._rows_until_ms, row.expires_at_ms)
        if row.regional - cell.own > cell.others:
            cell.others = row.regional - cell.own
        if row.regional > shared.published:
            shared.published = row.regional
        elif full and row.regional < shared.published:
            # The ledger was restored from an older copy: what it lost is published again.
            shared.published = row.regional
            self._engine.note_change(subject, cell, shared)

    def _apply_foreign_row(
        self, subject: Subject, cell: Cell, shared: Shared, row: LedgerRow, now_ms: int, lag_ms: int
    ) -> None:
        components = shared.components
        if components is None:
            components = {}
            shared.components = components
        known = components.get(row.region, 0)
        grown = row.regional - known
        if grown <= 0:
            return
        components[row.region] = row.regional
        cell.foreign += grown
        if shared.grew_at_ms != now_ms:
            # The rate is what one import saw grow since the one before that did. Too long ago is no rate.
            since_ms = now_ms - shared.grew_at_ms
            shared.growth = 0
            shared.growth_lag = 0
            shared.growth_ms = since_ms if 0 < since_ms <= 2 * self._tuning.import_interval_ms else 0
            shared.grew_at_ms = now_ms
        if known > 0:
            # A first sight is no rate either: that count may have grown over any time.
            shared.growth += grown
            shared.growth_lag += grown * lag_ms
        self._aim(subject, cell, shared, now_ms, row.duration_ms)
        if cell.own + cell.others > shared.published:
            self._engine.note_change(subject, cell, shared)

    def begin_full_import(self) -> None:
        """A full read of the ledger begins: every live row of this region should come by."""
        self._fulls += 1

    def finish_import(self, now_ms: int, *, full: bool = False) -> None:
        """An import is complete. After a full one the cells are swept: a row that stood in the ledger before it began
        and did not come by was lost, in a wipe or by a restore of an older copy, and is published again."""
        self._engine.imported_at_ms = max(self._engine.imported_at_ms, now_ms)
        # An import that brought no row at all began when nobody told us; that it ends now is close enough.
        self._engine.growth_since_ms = now_ms if self._import_at_ms < 0 else self._import_at_ms
        self._import_at_ms = -1
        if full and now_ms < self._rows_until_ms:
            self._sweep_unpublishes = True
            self._sweep_at = 0

    def apply_regions(self, regions: int) -> None:
        """So many regions are live. More regions mean lower thresholds: every cell is considered again."""
        known = self._engine.regions
        self._engine.regions = max(1, regions)
        if regions > known:
            self.start_republish()


def row_of(found: tuple[LedgerRow, Subject, Cell]) -> LedgerRow:
    """What rows that should go out are sorted by."""
    return found[0]
