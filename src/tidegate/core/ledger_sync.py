"""How regions come to agree, through a database (the ledger): what to publish, and how imported rows merge.

Pure: `collect_publish` returns the rows that should be written, `apply_*` merges what is known to be in the ledger,
`fail_publish` takes back what may not have arrived; loops in `runtime` do the sending. Everything merges with max. A
region writes only its own row; rows of other regions raise the view and are never written back. Every call costs what
has changed, not what exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from tidegate.core.cells import BLOCKED, CLEAN, PINNED, Cell, Subject
from tidegate.core.engine import Engine
from tidegate.core.generations import RESET_NAME, cell_name, cell_of
from tidegate.core.grants import CellTotals
from tidegate.core.model import LedgerRow, Tuning, subject_digest
from tidegate.core.pending import Pending
from tidegate.core.resets import Reset, Resets
from tidegate.core.sharing import DUE, NOT_DUE, PRESSED
from tidegate.core.subjects import Subjects
from tidegate.core.sweep import Sweep
from tidegate.core.views import GlobalView, Growth, LedgerView
from tidegate.core.windows import publish_threshold

__all__ = ["Found", "LedgerSync", "Publication"]

# Expiry work done along with each row that finds memory full.
EXPIRE_PER_ROW: Final = 4


Found = tuple[LedgerRow, Subject | None, Cell | None]
"""A row to publish, and what it comes from."""


@final
class Publication:
    """Rows that are being sent to the ledger, in any order. Those that were imported have no subject in memory."""

    __slots__ = ("cells", "rows", "subjects")

    def __init__(self, found: list[Found]) -> None:
        self.rows: Final[list[LedgerRow]] = [row for row, _, _ in found]
        self.subjects: Final[list[Subject | None]] = [subject for _, subject, _ in found]
        self.cells: Final[list[Cell | None]] = [cell for _, _, cell in found]

    def digest(self, index: int) -> bytes:
        row = self.rows[index]
        subject = self.subjects[index]
        key = (row.workspace, row.namespace, row.duration_ms)
        if subject is None:
            return subject_digest(row.workspace, row.namespace, row.identifier, row.duration_ms)
        return subject.digest_of(key)


@final
class LedgerSync:
    """Merges the rows of the ledger into one engine."""

    __slots__ = (
        "_global_view",
        "_import_at_ms",
        "_region",
        "_resets",
        "_rows_until_ms",
        "_subjects",
        "_tuning",
        "alone_at_ms",
        "can_publish",
        "cells_imported",
        "epoch",
        "hot_until_ms",
        "pending",
        "rows_imported",
        "rows_set_aside",
        "sweep",
    )

    def __init__(self, engine: Engine, sweep: Sweep, tuning: Tuning, region: str) -> None:
        self._subjects: Final[Subjects] = engine.subjects
        self._global_view: Final[GlobalView] = engine.global_view
        self._tuning: Final[Tuning] = tuning
        self._region: Final[str] = region
        self._resets: Final[Resets] = engine.resets
        self.pending: Final[Pending] = engine.pending
        self.sweep: Final[Sweep] = sweep
        # Until when the ledger must hold rows of this region.
        self._rows_until_ms: int = 0
        # When the import that is under way began, -1 before its first rows.
        self._import_at_ms: int = -1
        # Imports are fast until then: this node has cells above their threshold that still grow.
        self.hot_until_ms: int = 0
        # False while this node cannot reach the ledger: the origin makes it responsible for nothing.
        self.can_publish: bool = True
        # When the ledger last lost rows, and from when on this node publishes for itself unless the origin answers: 0
        # if it does so already, or has had no answer yet. Sent with each message (`CreditRequest`). Written by
        # `ImportLease`.
        self.epoch: int = 0
        self.alone_at_ms: int = 0
        self.cells_imported: int = 0
        self.rows_imported: int = 0
        self.rows_set_aside: int = 0

    # -- publish

    def subjects_waiting(self, *, pressed_only: bool = False) -> int:
        """How many subjects wait for a publish. A turn takes that many: what is queued meanwhile is for the next."""
        return len(self.pending.pressed) if pressed_only else len(self.pending.changed)

    def collect_publish(
        self,
        found: list[Found],
        now_ms: int,
        subjects_max: int,
        *,
        pressed_only: bool = False,
        is_shared: bool = False,
    ) -> None:
        """Take the next subjects from the queue and add their due rows to `found`: one slice of a turn.

        Each row must be applied, failed or set aside. By tick all changed cells are checked, by pressure only those
        that have grown by their step. A cell that does not pass the filters leaves the queue: it returns when it
        grows, when another region publishes it, or when the number of regions rises.
        """
        for subject in self.pending.take_publish(subjects_max, pressed_only=pressed_only):
            if subject.table < 0:
                continue
            key = self._subjects.key_of(subject)
            for cell in subject.cells():
                ledger = cell.ledger
                if ledger is None or not (ledger.is_pressed if pressed_only else ledger.is_changed):
                    continue
                ledger.is_pressed = False
                if pressed_only and not ledger.is_changed:
                    continue
                row = self._row(subject, cell, ledger, key, now_ms)
                if row is not None:
                    ledger.is_changed = False
                    if cell.origin is not None and not is_shared:
                        cell.origin.published = cell.own
                    found.append((row, subject, cell))
                elif not pressed_only:
                    ledger.is_changed = False
                    if now_ms < ledger.set_aside_until_ms:
                        self.pending.queue_publish(subject, cell)
            if subject.queue == PINNED and subject.current.origin is None and not subject.is_unreplayed():
                is_blocked = subject.strict_until_ms > now_ms
                self._subjects.move(subject, BLOCKED if is_blocked else CLEAN, subject.touched_ms)

    def drop_pressed(self) -> None:
        """The origin says what is published before the tick."""
        pending = self.pending
        for subject in pending.take_publish(len(pending.pressed), pressed_only=True):
            for cell in subject.cells():
                if cell.ledger is not None:
                    cell.ledger.is_pressed = False

    def collect_due(
        self, found: list[Found], now_ms: int, subjects_max: int, *, pressed_only: bool = False
    ) -> None:
        """Take the next subjects that this node is responsible for, and add their rows to `found`.

        Each row must be applied, failed, set aside or dropped.
        """
        for subject in self.pending.take_due(subjects_max):
            if subject.table < 0:
                continue
            key = self._subjects.key_of(subject)
            for cell in subject.cells():
                ledger = cell.ledger
                if ledger is None or ledger.due == NOT_DUE:
                    continue
                if pressed_only and ledger.due == DUE:
                    self.pending.queue_due(subject, cell, DUE)
                    continue
                ledger.due = NOT_DUE
                if now_ms < (cell.sequence + 2) * key[2] and now_ms >= ledger.set_aside_until_ms:
                    ledger.is_changed = False
                    found.append((self._row_of(subject, cell, key), subject, cell))

    def entrust(self, row: LedgerRow, due: int) -> bool:
        """The origin has made this node responsible for a row that it imports: True if its cell is in memory, where
        what a message said of it waits too, so that it is published once."""
        subject = self._subjects.find((row.workspace, row.namespace, row.duration_ms), row.identifier)
        sequence, _ = cell_of(row.sequence, row.duration_ms)
        cell = None if subject is None else subject.cell(sequence)
        if subject is None or cell is None or cell.ledger is None:
            return False
        if row.sequence != cell_name(sequence, subject.generation, row.duration_ms):
            return False
        if row.regional - cell.own > cell.others:
            cell.others = row.regional - cell.own
        self.pending.queue_due(subject, cell, due)
        return True

    def forget_due(self) -> None:
        """The origin does not answer: every node publishes what it has."""
        for subject in self.pending.take_due(len(self.pending.due)):
            for cell in subject.cells():
                if cell.ledger is not None:
                    cell.ledger.due = NOT_DUE
                    self.pending.queue_publish(subject, cell)
        self.pending.has_pressed_due = False

    def apply_claim(self, publication: Publication, index: int, total: int, published: int, due: int) -> bool:
        """The origin said who publishes this row, and how much: True if this node does."""
        cell, subject = publication.cells[index], publication.subjects[index]
        if cell is not None and cell.ledger is not None and subject is not None:
            cell.ledger.published = published
            if due == NOT_DUE:
                # Another node does, or it is done. If not, the next tick asks again.
                self.pending.queue_publish(subject, cell)
        if due != NOT_DUE:
            publication.rows[index] = publication.rows[index]._replace(regional=total)
        return due != NOT_DUE

    def fail_claim(self, publication: Publication) -> None:
        """The origin has not said who publishes these rows: they stay due, and do not wait for the tick, until it does.

        An answer to a message from before this node knew that the ledger lost them may call them published.
        """
        for cell, subject in zip(publication.cells, publication.subjects, strict=True):
            if cell is not None and subject is not None:
                self.pending.queue_due(subject, cell, DUE)

    def apply_published(
        self, publication: Publication, index: int, total: int, published: int, due: int, now_ms: int
    ) -> None:
        """The origin knows of the publish: what has been counted since may be due, at once if that is a step."""
        cell, subject = publication.cells[index], publication.subjects[index]
        if cell is not None and cell.ledger is not None and subject is not None:
            cell.ledger.published = max(cell.ledger.published, published)
            if due != NOT_DUE:
                duration_ms = publication.rows[index].duration_ms
                step = self.pending.step_of(subject, cell, cell.ledger, now_ms, duration_ms)
                self.pending.queue_due(subject, cell, PRESSED if total >= published + step else due)

    def _row(
        self, subject: Subject, cell: Cell, ledger: LedgerView, key: tuple[str, str, int], now_ms: int
    ) -> LedgerRow | None:
        """The cell's row, if it passes the filters of publishing."""
        regional = cell.own + cell.others
        expires_at_ms = (cell.sequence + 2) * key[2]
        if now_ms >= expires_at_ms or regional <= ledger.published or now_ms < ledger.set_aside_until_ms:
            return None
        if cell.foreign == 0 and (
            ledger.quota_min == 0 or regional < publish_threshold(ledger.quota_min, self._global_view.regions)
        ):
            return None
        self.hot_until_ms = max(self.hot_until_ms, now_ms + 2 * self._tuning.import_interval_ms)
        return self._row_of(subject, cell, key)

    def _row_of(self, subject: Subject, cell: Cell, key: tuple[str, str, int]) -> LedgerRow:
        workspace, namespace, duration_ms = key
        return LedgerRow(
            workspace,
            namespace,
            subject.identifier,
            duration_ms,
            cell_name(cell.sequence, subject.generation, duration_ms),
            self._region,
            cell.own + cell.others,
            (cell.sequence + 2) * duration_ms,
        )

    def apply_publish(self, publication: Publication, start: int, end: int, now_ms: int) -> None:
        """The rows from `start` up to `end` are in the ledger."""
        for i in range(start, end):
            cell, subject = publication.cells[i], publication.subjects[i]
            if cell is None or subject is None:
                continue
            ledger = cell.ledger
            assert ledger is not None
            row = publication.rows[i]
            ledger.published = max(ledger.published, row.regional)
            ledger.set_aside = 0
            ledger.seen = self._global_view.full_imports
            self._rows_until_ms = max(self._rows_until_ms, row.expires_at_ms)
            self.pending.set_pressure(subject, cell, ledger, now_ms, row.duration_ms)
            # The row has what the origin knew, which may be less than this node does.
            self.pending.queue_publish(subject, cell)

    def fail_publish(self, publication: Publication, start: int, end: int) -> None:
        """These rows may not be in the ledger: they wait for the next turn."""
        for i in range(start, end):
            cell, subject = publication.cells[i], publication.subjects[i]
            if cell is not None and subject is not None:
                self.pending.queue_publish(subject, cell)

    def set_aside(self, publication: Publication, index: int, now_ms: int) -> None:
        """The ledger rejects this row: it waits, longer each time, and does not delay the others."""
        cell, subject = publication.cells[index], publication.subjects[index]
        self.rows_set_aside += 1
        if cell is None or subject is None:
            return
        ledger = cell.ledger
        assert ledger is not None
        until_ms = now_ms + (self._tuning.set_aside_ms << min(ledger.set_aside, 10))
        ledger.set_aside_until_ms = max(ledger.set_aside_until_ms, until_ms)
        ledger.set_aside += 1
        self.pending.queue_publish(subject, cell)

    # -- import

    @property
    def wants_full_import(self) -> bool:
        """A request came for a subject whose foreign counts may have been evicted: no change brings them back."""
        return self._global_view.is_full_import_wanted

    def begin_full_import(self) -> None:
        """A full read of the ledger begins: it should return every live row of this region."""
        self._global_view.full_imports += 1
        self._global_view.is_full_import_wanted = False
        self._subjects.has_lost_foreign = False

    def fail_full_import(self) -> None:
        """A full read did not come to its end: what it should have brought back is still missing."""
        self._subjects.has_lost_foreign = True
        self._global_view.is_full_import_wanted = True

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
            if not self.is_counted(row, now_ms):
                continue
            self.rows_imported += 1
            sequence, _ = cell_of(row.sequence, row.duration_ms)
            subject = self._import_subject(row, sequence, now_ms)
            if subject is None:
                continue
            cell = self._import_cell(subject, row, sequence, now_ms)
            ledger = cell.ledger
            assert ledger is not None
            if row.region == self._region:
                self._apply_own_row(subject, cell, ledger, row, full)
            else:
                lag = 0 if lag_ms is None else lag_ms.get(row.region, 0)
                self._apply_foreign_row(subject, cell, ledger, row, now_ms, lag)

    def is_counted(self, row: LedgerRow, now_ms: int) -> bool:
        """Whether a row is the count of a cell that matters: not over, not from before a reset, and not a reset itself.

        A reset is applied, and so is one that only shows in the name of a cell.
        """
        if now_ms >= row.expires_at_ms:
            return False
        duration_ms = row.duration_ms
        key = (row.workspace, row.namespace, duration_ms)
        sequence, generation = cell_of(row.sequence, duration_ms)
        if row.sequence == RESET_NAME:
            generation = row.regional
        known = self._resets.generation_of(key, row.identifier)
        if generation > known:
            reset = Reset(row.workspace, row.namespace, row.identifier, duration_ms, generation)
            self._resets.import_reset(reset, now_ms)
            known = self._resets.generation_of(key, row.identifier)
        if row.sequence == RESET_NAME or duration_ms < self._tuning.ledger_duration_ms_min:
            return False
        return row.sequence == cell_name(sequence, known, duration_ms)

    @property
    def has_imported_resets(self) -> bool:
        """The import has found resets that must be written to the origin."""
        return bool(self._resets.imported)

    def generation_of(self, row: LedgerRow) -> int:
        """The last reset of a row's subject, if the row is of that generation; the one in its name otherwise."""
        sequence, generation = cell_of(row.sequence, row.duration_ms)
        key = (row.workspace, row.namespace, row.duration_ms)
        known = self._resets.generation_of(key, row.identifier)
        return known if row.sequence == cell_name(sequence, known, row.duration_ms) else generation

    def _import_subject(self, row: LedgerRow, sequence: int, now_ms: int) -> Subject | None:
        """The subject of a row. In a full memory none is created: traffic in other regions must not evict what is used
        in this one. If a request comes for it, the next full import brings its rows."""
        subjects = self._subjects
        key = (row.workspace, row.namespace, row.duration_ms)
        subject = subjects.find(key, row.identifier)
        if subject is not None:
            return subject
        if subjects.is_full:
            subjects.expire(now_ms, EXPIRE_PER_ROW)
            if subjects.is_full:
                subjects.has_lost_foreign = True
                return None
        self.cells_imported += 1
        return subjects.create(key, row.identifier, sequence, now_ms)

    def _import_cell(self, subject: Subject, row: LedgerRow, sequence: int, now_ms: int) -> Cell:
        cell = subject.cell(sequence)
        if cell is None:
            self.cells_imported += 1
            sequence_min = now_ms // row.duration_ms - 2
            cell = self._subjects.new_cell(subject, sequence, row.duration_ms, sequence_min, now_ms)
        return cell

    def _apply_own_row(
        self, subject: Subject, cell: Cell, ledger: LedgerView, row: LedgerRow, full: bool
    ) -> None:
        ledger.seen = self._global_view.full_imports
        self._rows_until_ms = max(self._rows_until_ms, row.expires_at_ms)
        if row.regional - cell.own > cell.others:
            cell.others = row.regional - cell.own
        if row.regional > ledger.published:
            ledger.published = row.regional
        elif full and row.regional < ledger.published:
            # The ledger was restored from an older copy: publish again what it lost.
            ledger.published = row.regional
            self.pending.queue_publish(subject, cell)

    def _apply_foreign_row(
        self, subject: Subject, cell: Cell, ledger: LedgerView, row: LedgerRow, now_ms: int, lag_ms: int
    ) -> None:
        components = ledger.components
        if components is None:
            components = {}
            ledger.components = components
            ledger.learned = {}
        known = components.get(row.region, 0)
        grown = row.regional - known
        if grown <= 0:
            return
        components[row.region] = row.regional
        if ledger.learned is not None:
            ledger.learned[row.region] = now_ms
        ledger.imported += grown
        # The origin may have known some of it before.
        grown = ledger.imported - cell.foreign
        if grown <= 0:
            return
        cell.foreign = ledger.imported
        self._note_growth(ledger, grown, now_ms, lag_ms, is_first=known == 0)
        self.pending.set_pressure(subject, cell, ledger, now_ms, row.duration_ms)
        self.pending.queue_publish(subject, cell)

    def _note_growth(
        self, ledger: LedgerView, grown: int, now_ms: int, lag_ms: int, *, is_first: bool
    ) -> None:
        growth = ledger.growth
        if growth is None:
            growth = Growth(now_ms)
            ledger.growth = growth
        growth.start(now_ms, 2 * self._tuning.import_interval_ms)
        if not is_first:
            # A first count gives no rate: it may have grown over any time.
            growth.amount += grown
            growth.lag += grown * lag_ms

    def apply_totals(self, subject: Subject, cell: Cell, totals: CellTotals, now_ms: int) -> None:
        """The origin answered a message: what it knows of other regions, of what was published, of who publishes."""
        grown = totals.foreign - cell.foreign
        if grown > 0:
            cell.foreign = totals.foreign
        ledger = cell.ledger
        if ledger is None:
            return
        if grown > 0:
            is_first = grown == totals.foreign
            self._note_growth(ledger, grown, now_ms, self._global_view.import_lag_ms, is_first=is_first)
        elif ledger.growth is not None:
            # Imports come this often while counts change, and answers from far away less often.
            busy_ms = self._tuning.import_busy_interval_ms
            ledger.growth.stop(now_ms, busy_ms, 2 * self._tuning.import_hot_interval_ms)
        if totals.regions > ledger.regions:
            ledger.regions = totals.regions
        if totals.published > ledger.published:
            ledger.published = totals.published
        # As with an own row that was imported: at least this much was counted here.
        if totals.published - cell.own > cell.others:
            cell.others = totals.published - cell.own
        if totals.due != NOT_DUE:
            self.pending.queue_due(subject, cell, totals.due)

    def apply_lease(self, age_ms: int, regions: int, lag_ms: int, now_ms: int) -> None:
        """One node imports for this region: how long ago it did, how many regions are live, and how old their counts
        are when they reach the origin, -1 if that is not known."""
        view = self._global_view
        # Not less than half an import interval: until a node's own message brings them, they grow older at the origin.
        view.import_lag_ms = max(lag_ms, self._tuning.import_hot_interval_ms // 2)
        if age_ms >= 0:
            view.imported_at_ms = max(view.imported_at_ms, now_ms - age_ms)
        # Growth is measured with what answers of the origin say, not with imports.
        view.growth_since_ms = 0
        self.apply_regions(regions)
        self.apply_import_interval(self._tuning.import_hot_interval_ms)

    def finish_import(self, now_ms: int, *, full: bool = False) -> None:
        """An import is complete. After a full one, publish again the rows of this region that it did not return: the
        ledger was wiped, or restored from an older copy."""
        view = self._global_view
        view.imported_at_ms = max(view.imported_at_ms, now_ms)
        # It is not known when an import without any row began; its end is close enough.
        view.growth_since_ms = now_ms if self._import_at_ms < 0 else self._import_at_ms
        self._import_at_ms = -1
        if full and now_ms < self._rows_until_ms:
            self.sweep.start_republish_lost()

    def apply_regions(self, regions: int) -> None:
        """So many regions are live. More regions mean lower thresholds: every cell is checked again."""
        known = self._global_view.regions
        self._global_view.regions = max(1, regions)
        if regions > known:
            self.sweep.start_republish()

    def apply_import_interval(self, interval_ms: int) -> None:
        """Imports follow each other this fast at the moment: anticipation reaches two of them ahead."""
        self._global_view.anticipation_ms_max = 2 * interval_ms

    def expect_import(self, at_ms: int) -> None:
        """The next import begins at this time."""
        self._global_view.next_import_ms = at_ms
