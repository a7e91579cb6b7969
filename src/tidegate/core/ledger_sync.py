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
from tidegate.core.model import LedgerRow, Tuning
from tidegate.core.pending import Pending
from tidegate.core.subjects import Subjects
from tidegate.core.sweep import Sweep
from tidegate.core.views import GlobalView, Growth, LedgerView
from tidegate.core.windows import publish_threshold

__all__ = ["LedgerSync", "Publication"]

# Expiry work done along with each row that finds memory full.
EXPIRE_PER_ROW: Final = 4


@final
class Publication:
    """Rows on their way to the ledger, in any order."""

    __slots__ = ("cells", "rows", "subjects")

    def __init__(self, found: list[tuple[LedgerRow, Subject, Cell]]) -> None:
        self.rows: Final[list[LedgerRow]] = [row for row, _, _ in found]
        self.subjects: Final[list[Subject]] = [subject for _, subject, _ in found]
        self.cells: Final[list[Cell]] = [cell for _, _, cell in found]


@final
class LedgerSync:
    """Merges the rows of the ledger into one engine."""

    __slots__ = (
        "_global_view",
        "_import_at_ms",
        "_region",
        "_rows_until_ms",
        "_subjects",
        "_tuning",
        "cells_imported",
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
        self.pending: Final[Pending] = engine.pending
        self.sweep: Final[Sweep] = sweep
        # Until when the ledger must hold rows of this region.
        self._rows_until_ms: int = 0
        # When the import that is under way began, -1 before its first rows.
        self._import_at_ms: int = -1
        # Imports are fast until then: this node has cells above their threshold that still grow.
        self.hot_until_ms: int = 0
        self.cells_imported: int = 0
        self.rows_imported: int = 0
        self.rows_set_aside: int = 0

    # -- publish

    def subjects_waiting(self, *, pressed_only: bool = False) -> int:
        """How many subjects wait for a publish. A turn takes that many: what is queued meanwhile is for the next."""
        return len(self.pending.pressed) if pressed_only else len(self.pending.changed)

    def collect_publish(
        self,
        found: list[tuple[LedgerRow, Subject, Cell]],
        now_ms: int,
        subjects_max: int,
        *,
        pressed_only: bool = False,
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
                    found.append((row, subject, cell))
                elif not pressed_only:
                    ledger.is_changed = False
                    if now_ms < ledger.set_aside_until_ms:
                        self.pending.queue_publish(subject, cell)
            if subject.queue == PINNED and subject.current.origin is None and not subject.is_unreplayed():
                is_blocked = subject.strict_until_ms > now_ms
                self._subjects.move(subject, BLOCKED if is_blocked else CLEAN, subject.touched_ms)

    def _row(
        self, subject: Subject, cell: Cell, ledger: LedgerView, key: tuple[str, str, int], now_ms: int
    ) -> LedgerRow | None:
        """The cell's row, if it passes the filters of publishing."""
        workspace, namespace, duration_ms = key
        expires_at_ms = (cell.sequence + 2) * duration_ms
        regional = cell.own + cell.others
        if now_ms >= expires_at_ms or regional <= ledger.published or now_ms < ledger.set_aside_until_ms:
            return None
        if cell.foreign == 0 and (
            ledger.quota_min == 0 or regional < publish_threshold(ledger.quota_min, self._global_view.regions)
        ):
            return None
        self.hot_until_ms = max(self.hot_until_ms, now_ms + 2 * self._tuning.import_interval_ms)
        if cell.origin is not None:
            cell.origin.published = cell.own
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
        """The rows from `start` up to `end` are in the ledger."""
        for i in range(start, end):
            cell = publication.cells[i]
            ledger = cell.ledger
            assert ledger is not None
            row = publication.rows[i]
            ledger.published = max(ledger.published, row.regional)
            ledger.set_aside = 0
            ledger.seen = self._global_view.full_imports
            self._rows_until_ms = max(self._rows_until_ms, row.expires_at_ms)
            self.pending.set_pressure(publication.subjects[i], cell, ledger, now_ms, row.duration_ms)

    def fail_publish(self, publication: Publication, start: int, end: int) -> None:
        """These rows may not be in the ledger: they wait for the next turn."""
        for i in range(start, end):
            self.pending.queue_publish(publication.subjects[i], publication.cells[i])

    def set_aside(self, publication: Publication, index: int, now_ms: int) -> None:
        """The ledger rejects this row: it waits, longer each time, and does not delay the others."""
        cell = publication.cells[index]
        ledger = cell.ledger
        assert ledger is not None
        self.rows_set_aside += 1
        until_ms = now_ms + (self._tuning.set_aside_ms << min(ledger.set_aside, 10))
        ledger.set_aside_until_ms = max(ledger.set_aside_until_ms, until_ms)
        ledger.set_aside += 1
        self.pending.queue_publish(publication.subjects[index], cell)

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
            if now_ms >= row.expires_at_ms or row.duration_ms < self._tuning.ledger_duration_ms_min:
                continue
            self.rows_imported += 1
            subject = self._import_subject(row, now_ms)
            if subject is None:
                continue
            cell = self._import_cell(subject, row, now_ms)
            ledger = cell.ledger
            assert ledger is not None
            if row.region == self._region:
                self._apply_own_row(subject, cell, ledger, row, full)
            else:
                lag = 0 if lag_ms is None else lag_ms.get(row.region, 0)
                self._apply_foreign_row(subject, cell, ledger, row, now_ms, lag)

    def _import_subject(self, row: LedgerRow, now_ms: int) -> Subject | None:
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
        return subjects.create(key, row.identifier, row.sequence, now_ms)

    def _import_cell(self, subject: Subject, row: LedgerRow, now_ms: int) -> Cell:
        cell = subject.cell(row.sequence)
        if cell is None:
            self.cells_imported += 1
            sequence_min = now_ms // row.duration_ms - 2
            cell = self._subjects.new_cell(subject, row.sequence, row.duration_ms, sequence_min, now_ms)
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
        known = components.get(row.region, 0)
        grown = row.regional - known
        if grown <= 0:
            return
        components[row.region] = row.regional
        cell.foreign += grown
        growth = ledger.growth
        if growth is None:
            growth = Growth(now_ms)
            ledger.growth = growth
        growth.start(now_ms, 2 * self._tuning.import_interval_ms)
        if known > 0:
            # A first count gives no rate: it may have grown over any time.
            growth.amount += grown
            growth.lag += grown * lag_ms
        self.pending.set_pressure(subject, cell, ledger, now_ms, row.duration_ms)
        self.pending.queue_publish(subject, cell)

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
