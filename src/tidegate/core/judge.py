"""The judge: what counts for a request, and whether it fits. The same for single requests and for batches.

It finds the subject and the cell of a request, creates what is not known yet, and counts nothing: that is the engine's
part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from tidegate.core.cells import Cell, Subject
from tidegate.core.evaluation import DENIED, FITS, UNKNOWN, UNLIKELY, UNREAD, Evaluation
from tidegate.core.freshness import Freshness
from tidegate.core.model import DEGRADED, LOCAL, ORIGIN, Limit, checked_name
from tidegate.core.pending import Pending
from tidegate.core.reservations import Reservations
from tidegate.core.subjects import Subjects
from tidegate.core.views import GlobalView
from tidegate.core.windows import effective

__all__ = ["Judge", "uncovered"]

# Cells that a subject may keep while its clock jumps. With more, the aged ones are dropped.
CELLS_MAX: Final = 11


@final
class Judge:
    """Judges the requests of one node."""

    __slots__ = ("_freshness", "_global_view", "_pending", "_reservations", "_subjects")

    def __init__(
        self,
        subjects: Subjects,
        reservations: Reservations,
        pending: Pending,
        global_view: GlobalView,
        freshness: Freshness,
    ) -> None:
        self._subjects: Final[Subjects] = subjects
        self._reservations: Final[Reservations] = reservations
        self._pending: Final[Pending] = pending
        self._global_view: Final[GlobalView] = global_view
        self._freshness: Final[Freshness] = freshness

    # -- what counts

    def evaluate(
        self,
        limit: Limit,
        identifier: str,
        cost: int,
        now_ms: int,
        wall_ms: int,
        source: int,
        in_batch: bool,
    ) -> Evaluation:
        """What counts for a request. Its subject and its cell are created if they are not known."""
        duration_ms = limit.duration_ms
        sequence = now_ms // duration_ms
        subject = self._subjects.find(limit.key, identifier)
        if subject is None:
            subject = self._create(limit, identifier, sequence, wall_ms)
            if not in_batch:
                # Room for a batch is made after it: a later item must not evict the subject of an earlier one.
                self._subjects.make_room(wall_ms, subject)
        if subject.sequence == sequence:
            cell = subject.current
            previous = subject.previous
        else:
            cell = self._cell(subject, sequence, duration_ms, wall_ms)
            previous = subject.cell(sequence - 1)
        used = cell.total()
        before = 0
        if previous is not None:
            before = previous.total()
            used = effective(used, before, now_ms - sequence * duration_ms, duration_ms)
        if subject.reserved > 0:
            self._reservations.expire(wall_ms)
            used += subject.reserved
        if source == ORIGIN:
            source = self._freshness.source_after_read(cell, wall_ms)
        shared = 0
        if source == DEGRADED:
            shared = self._reservations.shared(limit.key, identifier, wall_ms)
        item = Evaluation(limit, cost, now_ms, wall_ms, source, subject, cell, before, used + shared)
        item.beside = shared
        return item

    def evaluate_all(
        self, requests: Sequence[tuple[Limit, str, int]], now_ms: int, source: int, wall_ms: int
    ) -> list[Evaluation]:
        """What counts for each request of a batch, without the others."""
        return [
            self.evaluate(limit, identifier, cost, now_ms, wall_ms, source, True)
            for limit, identifier, cost in requests
        ]

    def _create(self, limit: Limit, identifier: str, sequence: int, wall_ms: int) -> Subject:
        name = checked_name("identifier", identifier)
        if self._subjects.has_lost_foreign:
            self._global_view.is_full_import_wanted = True
        subject = self._subjects.create(limit.key, name, sequence, wall_ms)
        self._pending.prune()
        return subject

    def _cell(self, subject: Subject, sequence: int, duration_ms: int, wall_ms: int) -> Cell:
        """The cell of `sequence`; created if there is none. What the clock has not aged out stays."""
        cell = subject.cell(sequence)
        if cell is not None:
            return cell
        if subject.count() >= CELLS_MAX:
            # Time stepped back: `current` is a later cell, and so no new one pushes the aged ones out.
            self._subjects.drop_aged(subject, wall_ms, duration_ms)
        if subject.count() >= CELLS_MAX:
            # Requests with times of their own, far ahead of the clock. Their cells are bounded too.
            self._subjects.drop_aged(subject, sequence * duration_ms, duration_ms)
        sequence_now = wall_ms // duration_ms
        sequence_min = (sequence if sequence < sequence_now else sequence_now) - 2
        return self._subjects.new_cell(subject, sequence, duration_ms, sequence_min, wall_ms)

    # -- verdicts

    def verdict(self, item: Evaluation, demand: int) -> int:
        """The verdict on a request that needs `demand` beside what is used."""
        quota = item.limit.quota
        needed = item.used + demand
        if needed > quota:
            return DENIED
        if item.source == LOCAL and self._freshness.must_read(
            item.subject, item.cell, item.now_ms, item.wall_ms
        ):
            return UNREAD
        if item.limit.denies_on_outage and self._freshness.source_of(item) == DEGRADED:
            return UNKNOWN
        ledger = item.cell.ledger
        if ledger is not None and needed + self._global_view.probable(ledger, item.wall_ms) > quota:
            return UNLIKELY
        return FITS

    def verdict_of_all(self, items: list[Evaluation]) -> int:
        """The verdict on a batch: the highest one of its items."""
        highest = FITS
        if len({item.subject for item in items}) == len(items):
            # The usual batch: no subject comes twice.
            for item in items:
                item.verdict = self.verdict(item, item.cost)
                highest = max(highest, item.verdict)
            return highest
        demands: dict[Subject, int] = {}
        for item in items:
            item.demand += demands.get(item.subject, 0)
            item.verdict = self.verdict(item, item.demand)
            if item.verdict != DENIED:
                demands[item.subject] = item.demand
            highest = max(highest, item.verdict)
        if highest != DENIED:
            for item in items:
                demand = demands[item.subject]
                item.verdict = self.verdict(item, demand)
                if item.verdict == DENIED:
                    item.demand = demand
                highest = max(highest, item.verdict)
        return highest


def uncovered(items: list[Evaluation], clock_ms: int) -> list[tuple[Subject, int, int]]:
    """Subjects whose credit does not cover what the batch needs of them: (subject, cost, lowest quota)."""
    costs: dict[Subject, int] = {}
    quotas: dict[Subject, int] = {}
    for item in items:
        subject = item.subject
        quota = item.limit.quota
        costs[subject] = costs.get(subject, 0) + item.cost
        quotas[subject] = min(quotas.get(subject, quota), quota)
    found: list[tuple[Subject, int, int]] = []
    for subject, cost in costs.items():
        credit = subject.credit
        quota = quotas[subject]
        if credit is None or not credit.covers(cost, quota, items[0].now_ms, clock_ms):
            found.append((subject, cost, quota))
    return found
