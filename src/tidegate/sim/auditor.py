"""The auditor: records what every node accepted, and checks every node against the invariants of the design.

It records decisions in the step in which the caller gets them, and messages when they are sent. It has its own formula
for a decision. The numbers of violations are those of the invariants (docs/architecture/consistency-model.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from tidegate.core.cells import Cell, Subject
from tidegate.core.model import Component, Decision, LedgerRow, Limit, OriginReply, Tuning, subject_digest
from tidegate.core.tickets import Ticket
from tidegate.core.views import OriginView
from tidegate.ports import Clock
from tidegate.sim.plan import SubjectSpec

if TYPE_CHECKING:
    from tidegate.sim.node_process import NodeProcess

__all__ = ["WORKSPACE", "Auditor", "CellId", "Violation", "key_of"]

WORKSPACE = "world"


def key_of(limit: Limit) -> tuple[str, str, int]:
    """The part of a subject that comes from its limit."""
    return limit.workspace, limit.namespace, limit.duration_ms


class CellId(NamedTuple):
    """A cell, identified the same way for all nodes."""

    key: tuple[str, str, int]
    identifier: str
    sequence: int


class Violation(NamedTuple):
    """An invariant that was violated."""

    invariant: int
    at_us: int
    text: str

    def __str__(self) -> str:
        return f"invariant {self.invariant}, at {self.at_us / 1e6:.6f} s: {self.text}"


class CellView(NamedTuple):
    """The values of a cell at the last check."""

    own: int
    others: int
    foreign: int
    fresh_until_ms: int
    failed_until_ms: int
    components: Mapping[str, int]


class Auditor:
    """Checks one simulation."""

    def __init__(
        self, tuning: Tuning, subjects: Sequence[SubjectSpec], clock: Clock, now_us: Callable[[], int]
    ) -> None:
        self._tuning = tuning
        self._clock = clock
        self.now_us = now_us
        self.violations: list[Violation] = []
        self._trace = blake2b(digest_size=16)
        # What each process has accepted in each cell, and the sum for each region: the expected values.
        self.accepted: dict[CellId, dict[str, int]] = {}
        self.regional: dict[tuple[CellId, str], int] = {}
        self._subjects: dict[bytes, tuple[tuple[str, str, int], str]] = {}
        for one in subjects:
            key = (WORKSPACE, one.namespace, one.duration_ms)
            self._subjects[subject_digest(WORKSPACE, one.namespace, one.identifier, one.duration_ms)] = (
                key,
                one.identifier,
            )
        # id(cell) -> the cell, what it accepted according to its callers, and its values at the last check. The
        # reference to the cell keeps its id from being reused.
        self._cells: dict[int, tuple[Cell, int, CellView | None]] = {}
        self._strict: dict[int, tuple[Subject, int]] = {}
        self.decisions = 0

    # -- trace and violations

    def fail(self, invariant: int, text: str) -> None:
        self.violations.append(Violation(invariant, self.now_us(), text))

    def note(self, *what: object) -> None:
        """Add an event to the trace."""
        self._trace.update(repr((self.now_us(), *what)).encode())

    def trace_hash(self) -> str:
        return self._trace.hexdigest()

    def cell_of(self, digest: bytes, sequence: int) -> CellId:
        key, identifier = self._subjects[digest]
        return CellId(key, identifier, sequence)

    # -- decisions

    def settled(self, process: NodeProcess, tickets: Sequence[Ticket]) -> None:
        """These were decided together when an answer of the origin arrived; each saw the ones before it only."""
        for ticket in tickets:
            decisions = ticket.decisions or []
            self.decisions += 1
            self.note("settled", process.node_id, [(d.allowed, d.effective, d.source) for d in decisions])
            if all(decision.allowed for decision in decisions):
                for limit, identifier, cost in ticket.items:
                    cell_id = CellId(key_of(limit), identifier, ticket.now_ms // limit.duration_ms)
                    subject = process.engine.subjects.find(cell_id.key, identifier)
                    # After an eviction it may have been counted in another cell than the one that is there now.
                    is_same = subject is not None and not process.evictions
                    cell = subject.cell(cell_id.sequence) if subject is not None and is_same else None
                    self._accept(process, cell_id, cell, cost)
        for ticket in tickets:
            for (limit, _, _), decision in zip(ticket.items, ticket.decisions or (), strict=True):
                if decision.allowed and decision.effective > limit.quota:
                    self.fail(7, f"{process.node_id}: allowed with {decision.effective} of {limit.quota}")

    def decided(
        self,
        process: NodeProcess,
        items: Sequence[tuple[Limit, str, int]],
        decisions: Sequence[Decision],
        at_ms: int,
        own_time: bool,
    ) -> None:
        """A caller got these decisions in this step."""
        process.record_tickets()
        if process.is_recorded(decisions):
            return
        self.decisions += 1
        allowed = all(decision.allowed for decision in decisions)
        has_waited = self._tuning.credit and any(decision.source != "local" for decision in decisions)
        self.note("decided", process.node_id, at_ms, [(d.allowed, d.effective, d.source) for d in decisions])
        touched: dict[int, tuple[CellId, Cell]] = {}
        for (limit, identifier, cost), decision in zip(items, decisions, strict=True):
            cell_id = CellId(key_of(limit), identifier, at_ms // limit.duration_ms)
            subject = process.engine.subjects.find(cell_id.key, identifier)
            cell = None if subject is None else subject.cell(cell_id.sequence)
            if allowed:
                # After an eviction one that waited may have been counted in another cell than the one there now.
                self._accept(process, cell_id, None if has_waited and process.evictions else cell, cost)
            if cell is not None:
                touched[id(cell)] = (cell_id, cell)
            # One that waited was decided a moment ago, and others after it.
            if len(items) == 1 and subject is not None and cell is not None and not has_waited:
                self._check_decision(
                    process, limit, cost, decision, cell, subject.cell(cell_id.sequence - 1), at_ms
                )
            if allowed and not own_time and not self._tuning.credit:
                self._check_freshness(process, limit, identifier, decision, at_ms)
            if not decision.allowed and decision.effective > limit.quota:
                place = (cell_id.key, identifier)
                process.denied_ms[place] = max(process.denied_ms.get(place, 0), at_ms)
        for cell_id, cell in touched.values():
            self.check_cell(process, cell_id, cell)
        if len(items) > 1 and allowed and not has_waited:
            self._check_batch(process, items, at_ms)

    def _accept(self, process: NodeProcess, cell_id: CellId, cell: Cell | None, cost: int) -> None:
        by_process = self.accepted.setdefault(cell_id, {})
        by_process[process.node_id] = by_process.get(process.node_id, 0) + cost
        place = (cell_id, process.region)
        self.regional[place] = self.regional.get(place, 0) + cost
        if cost:
            digest = subject_digest(*cell_id.key[:2], cell_id.identifier, cell_id.key[2])
            process.accepted.append((self.now_us() / 1e6, digest, cell_id.sequence, cost))
        if cell is not None:
            known, counted, seen = self._cells.get(id(cell), (cell, 0, None))
            self._cells[id(cell)] = (known, counted + cost, seen)

    def _check_decision(
        self,
        process: NodeProcess,
        limit: Limit,
        cost: int,
        decision: Decision,
        cell: Cell,
        previous: Cell | None,
        at_ms: int,
    ) -> None:
        """Compare a decision with the formula on the cells of the same step (7), and on no other cells (10)."""
        duration_ms = limit.duration_ms
        before = 0 if previous is None else previous.own + previous.others + previous.foreign
        left_ms = (cell.sequence + 1) * duration_ms - at_ms
        used = cell.own + cell.others + cell.foreign + before * left_ms // duration_ms
        if not decision.allowed:
            used += cost
        if decision.effective != used:
            self.fail(
                7, f"{process.node_id}: the decision says {decision.effective} in use, the cells {used}"
            )
        if decision.allowed and used > limit.quota:
            self.fail(7, f"{process.node_id}: allowed with {used} of {limit.quota}")
        if not decision.allowed and used <= limit.quota and not self._tuning.anticipation:
            self.fail(7, f"{process.node_id}: denied with {used} of {limit.quota}")
        if decision.remaining != (limit.quota - used if decision.allowed else 0):
            self.fail(7, f"{process.node_id}: {decision.remaining} remaining, {used} of {limit.quota} used")

    def _check_batch(self, process: NodeProcess, items: Sequence[tuple[Limit, str, int]], at_ms: int) -> None:
        for limit, identifier, _ in items:
            subject = process.engine.subjects.find(key_of(limit), identifier)
            if subject is None:
                continue
            sequence = at_ms // limit.duration_ms
            cell, previous = subject.cell(sequence), subject.cell(sequence - 1)
            used = 0 if cell is None else cell.own + cell.others + cell.foreign
            if previous is not None:
                left_ms = (sequence + 1) * limit.duration_ms - at_ms
                used += (previous.own + previous.others + previous.foreign) * left_ms // limit.duration_ms
            if used > limit.quota:
                self.fail(6, f"{process.node_id}: a batch was allowed with {used} of {limit.quota} used")

    def _check_freshness(
        self, process: NodeProcess, limit: Limit, identifier: str, decision: Decision, at_ms: int
    ) -> None:
        """A decision may use local memory only while it is fresh, and never soon after a denial."""
        if decision.source != "local" or process.has_stepped or process.evictions:
            return
        duration_ms = limit.duration_ms
        denied_ms = process.denied_ms.get((key_of(limit), identifier))
        if denied_ms is not None and at_ms < denied_ms + duration_ms:
            self.fail(2, f"{process.node_id}: allowed from memory {at_ms - denied_ms} ms after a denial")
        digest = subject_digest(limit.workspace, limit.namespace, identifier, duration_ms)
        sequence = at_ms // duration_ms
        replied_ms = process.replied_ms.get((digest, sequence))
        if replied_ms is not None and at_ms < replied_ms + self._tuning.fresh_ms:
            return
        if at_ms - sequence * duration_ms < self._tuning.rollover_grace_ms:
            return
        age = "never" if replied_ms is None else f"{at_ms - replied_ms} ms ago"
        self.fail(2, f"{process.node_id}: allowed from memory, last reply of the origin: {age}")

    # -- messages

    def sent(self, process: NodeProcess, components: Sequence[Component]) -> None:
        """A node sends to the origin only its own counts, and no more than it accepted (3)."""
        now_ms = process.clock.now_ms()
        self.note("sent", process.node_id, [(one.sequence, one.writer, one.own) for one in components])
        for one in components:
            cell_id = self.cell_of(one.digest, one.sequence)
            duration_ms = cell_id.key[2]
            accepted = self.accepted.get(cell_id, {}).get(process.node_id, 0)
            if one.writer.partition("~")[0] != process.node_id:
                self.fail(3, f"{process.node_id} sent the component of {one.writer}")
            elif one.own > accepted:
                self.fail(
                    3, f"{process.node_id} sent the origin {one.own} of {cell_id}, but accepted {accepted}"
                )
            if one.expires_at_ms != (one.sequence + 3) * duration_ms:
                self.fail(10, f"{process.node_id}: {cell_id} would expire at {one.expires_at_ms}")
            elif one.expires_at_ms <= now_ms:
                self.fail(10, f"{process.node_id} replayed {cell_id}, which has aged out")

    def merged(
        self,
        process: NodeProcess,
        components: Sequence[Component],
        before: Sequence[OriginReply],
        after: Sequence[OriginReply],
    ) -> None:
        """A merge arrived, maybe late or repeated: components and totals only rise (2, 5)."""
        now_ms = self._clock.now_ms()
        for one, old, new in zip(components, before, after, strict=True):
            if one.expires_at_ms <= now_ms:
                continue
            if new.component != max(old.component, one.own) or new.total < old.total:
                self.fail(
                    2,
                    f"the origin of {process.region} held {old} of {one.writer}, and {new} after it got {one.own}",
                )

    def published(self, process: NodeProcess, rows: Sequence[LedgerRow]) -> None:
        """A node publishes only its own region's counts, and no more than the region accepted (3, 4)."""
        now_ms = process.clock.now_ms()
        self.note(
            "published", process.node_id, [(row.identifier, row.sequence, row.regional) for row in rows]
        )
        for row in rows:
            cell_id = CellId((row.workspace, row.namespace, row.duration_ms), row.identifier, row.sequence)
            accepted = self.regional.get((cell_id, process.region), 0)
            if row.region != process.region:
                self.fail(
                    3, f"{process.node_id} of region {process.region} wrote the row of region {row.region}"
                )
            elif row.regional > accepted:
                self.fail(
                    4,
                    f"{process.node_id} published {row.regional} of {cell_id}, but its region accepted {accepted}",
                )
            if row.duration_ms < self._tuning.ledger_duration_ms_min:
                self.fail(4, f"{process.node_id} published the short window {cell_id}")
            if row.expires_at_ms != (row.sequence + 2) * row.duration_ms or row.expires_at_ms <= now_ms:
                self.fail(10, f"{process.node_id} published {cell_id}, which has aged out")

    # -- the memory of a node

    def sweep(self, process: NodeProcess) -> None:
        """Check everything that a node holds in memory."""
        process.record_tickets()
        subjects = process.engine.subjects
        for subject in subjects.slots:
            if subject is None:
                continue
            key = subjects.key_of(subject)
            if subject.strict_until_ms < self._strict.get(id(subject), (subject, 0))[1]:
                self.fail(2, f"{process.node_id}: the strict deadline of {subject.identifier} decreased")
            self._strict[id(subject)] = (subject, subject.strict_until_ms)
            for cell in subject.cells():
                self.check_cell(process, CellId(key, subject.identifier, cell.sequence), cell)

    def check_cell(self, process: NodeProcess, cell_id: CellId, cell: Cell) -> None:
        """The counts of a node in a cell: exact for itself, never too high for others, never decreasing."""
        origin, ledger = cell.origin, cell.ledger
        assert origin is not None
        known, counted, seen = self._cells.get(id(cell), (cell, 0, None))
        # A cell that was dropped and created again may restore its count from the origin; otherwise these are equal.
        accepted = self.accepted.get(cell_id, {}).get(process.node_id, 0)
        if not counted <= cell.own <= accepted:
            self.fail(6, f"{process.node_id}: {cell_id} holds {cell.own}, but {accepted} were accepted")
        accepted = self.regional.get((cell_id, process.region), 0)
        if cell.own + cell.others > accepted:
            self.fail(
                5,
                f"{process.node_id}: {cell_id} has {cell.own} + {cell.others}, its region accepted {accepted}",
            )
        components = {} if ledger is None or ledger.components is None else ledger.components
        if cell.foreign != sum(components.values()):
            self.fail(2, f"{process.node_id}: foreign {cell.foreign} is not the sum of {components}")
        for region, count in components.items():
            accepted = self.regional.get((cell_id, region), 0)
            if region == process.region or count > accepted:
                self.fail(
                    5,
                    f"{process.node_id}: {cell_id} has {count} of region {region}, which accepted {accepted}",
                )
        if seen is not None:
            self._check_rising(process, cell_id, cell, origin, components, seen)
        now = CellView(
            cell.own,
            cell.others,
            cell.foreign,
            origin.fresh_until_ms,
            origin.failed_until_ms,
            dict(components),
        )
        self._cells[id(cell)] = (known, counted, now)

    def _check_rising(
        self,
        process: NodeProcess,
        cell_id: CellId,
        cell: Cell,
        origin: OriginView,
        components: Mapping[str, int],
        seen: CellView,
    ) -> None:
        if (
            cell.own < seen.own
            or cell.others < seen.others
            or cell.foreign < seen.foreign
            or origin.fresh_until_ms < seen.fresh_until_ms
            or origin.failed_until_ms < seen.failed_until_ms
            or any(components.get(region, 0) < count for region, count in seen.components.items())
        ):
            self.fail(2, f"{process.node_id}: {cell_id} decreased from {seen}")
