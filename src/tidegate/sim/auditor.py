"""The auditor: records what every node accepted, and checks every node against the invariants of the design.

It records decisions in the step in which the caller gets them, and messages when they are sent. This module checks each
answer, message and cell by itself; `truth_check` compares them with what all nodes did. A violation has the number of
its invariant (docs/architecture/consistency-model.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from tidegate.core.cells import Cell, Subject
from tidegate.core.model import Component, Decision, LedgerRow, Limit, OriginReply, Tuning
from tidegate.core.views import OriginView
from tidegate.ports import Clock
from tidegate.sim.answer_check import Item, batch_findings, single_findings, totals_of
from tidegate.sim.memory_check import MemoryCheck
from tidegate.sim.plan import SubjectSpec
from tidegate.sim.reset_check import PROBES_WORKSPACE
from tidegate.sim.truth import CellId, Truth, digest_of, key_of

if TYPE_CHECKING:
    from tidegate.sim.node_process import NodeProcess
    from tidegate.sim.truth_check import TruthCheck

__all__ = ["WORKSPACE", "Answer", "Auditor", "Violation"]

WORKSPACE = "world"


class Violation(NamedTuple):
    """An invariant that was violated."""

    invariant: int
    at_us: int
    text: str

    def __str__(self) -> str:
        return f"invariant {self.invariant}, at {self.at_us / 1e6:.6f} s: {self.text}"


class Answer(NamedTuple):
    """The decisions on a request or a batch."""

    items: Sequence[tuple[Limit, str, int]]
    decisions: Sequence[Decision]
    at_ms: int


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
        self.truth = Truth()
        self.memory = MemoryCheck(self)
        # Set by the simulation, because the check needs a reference to it.
        self.truth_check: TruthCheck
        self._subjects: dict[bytes, tuple[tuple[str, str, int], str]] = {}
        # Counters that `reset_check` and `reservation_check` judge instead.
        self.probes: set[bytes] = set()
        for one in subjects:
            self.know_subject((WORKSPACE, one.namespace, one.duration_ms), one.identifier)
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

    def know_subject(self, key: tuple[str, str, int], identifier: str) -> None:
        """Register a subject before its first request."""
        self._subjects[digest_of(key, identifier)] = (key, identifier)

    def know_probe(self, key: tuple[str, str, int], identifier: str) -> None:
        """Register a counter that the checks of this class leave out."""
        self.know_subject(key, identifier)
        self.probes.add(digest_of(key, identifier))

    def cell_of(self, digest: bytes, sequence: int) -> CellId:
        key, identifier = self._subjects[digest]
        return CellId(key, identifier, sequence)

    # -- decisions

    def decided(
        self,
        process: NodeProcess,
        items: Sequence[tuple[Limit, str, int]],
        decisions: Sequence[Decision],
        at_ms: int,
    ) -> None:
        """A node made these decisions in this step."""
        self.all_decided(process, [Answer(items, decisions, at_ms)], have_waited=False)

    def all_decided(self, process: NodeProcess, answers: Sequence[Answer], *, have_waited: bool) -> None:
        """A node made these decisions in this step, one after the other."""
        self.memory.check(process)
        # With credit, the subject of a decision may have been evicted in this step: it was counted in another cell.
        knows_cell = not (process.evictions and (have_waited or self._tuning.credit))
        for items, decisions, at_ms in answers:
            self._record(process, items, decisions, at_ms, knows_cell=knows_cell)
            self.truth_check.note_denials(process, items, decisions, at_ms)
        # Backwards: what was accepted later in this step did not count for the earlier ones.
        later: dict[CellId, int] = {}
        for items, decisions, at_ms in reversed(answers):
            if knows_cell:
                self._check_answer(process, items, decisions, at_ms, later)
            if all(decision.allowed for decision in decisions):
                for limit, identifier, cost in items:
                    cell_id = CellId(key_of(limit), identifier, at_ms // limit.duration_ms)
                    later[cell_id] = later.get(cell_id, 0) + cost
        for items, decisions, at_ms in answers:
            self.truth_check.decided(process, items, decisions, at_ms)

    def _record(
        self,
        process: NodeProcess,
        items: Sequence[tuple[Limit, str, int]],
        decisions: Sequence[Decision],
        at_ms: int,
        *,
        knows_cell: bool,
    ) -> None:
        self.decisions += 1
        allowed = all(decision.allowed for decision in decisions)
        self.note("decided", process.node_id, at_ms, [(d.allowed, d.effective, d.source) for d in decisions])
        for limit, identifier, cost in items:
            cell_id = CellId(key_of(limit), identifier, at_ms // limit.duration_ms)
            subject = process.engine.subjects.find(cell_id.key, identifier)
            cell = None if subject is None or not knows_cell else subject.cell(cell_id.sequence)
            if allowed:
                self._accept(process, cell_id, cell, cost, at_ms)

    def _accept(
        self, process: NodeProcess, cell_id: CellId, cell: Cell | None, cost: int, at_ms: int
    ) -> None:
        self.truth.accept(cell_id, process.node_id, cost, at_ms, self.now_us())
        if cost:
            digest = cell_id.digest
            process.accepted.append((self.now_us() / 1e6, digest, cell_id.sequence, cost))
        if cell is not None:
            known, counted, seen = self._cells.get(id(cell), (cell, 0, None))
            self._cells[id(cell)] = (known, counted + cost, seen)

    def _check_answer(
        self,
        process: NodeProcess,
        items: Sequence[tuple[Limit, str, int]],
        decisions: Sequence[Decision],
        at_ms: int,
        later: Mapping[CellId, int],
    ) -> None:
        """Compare decisions with formulas on the cells of the same step (6, 7), and on no other cells (10)."""
        judged: list[Item] = []
        for limit, identifier, cost in items:
            subject = process.engine.subjects.find(key_of(limit), identifier)
            if subject is None:
                # A batch may evict its own subjects, once it is done.
                return
            sequence = at_ms // limit.duration_ms
            if process.clock.now_ms() >= (sequence + 2) * limit.duration_ms and None in (
                subject.cell(sequence),
                subject.cell(sequence - 1),
            ):
                # The request carried an old time, and a later decision of this step dropped the cells of that time.
                return
            totals = totals_of(subject)
            for cell in subject.cells():
                cell_id = CellId(key_of(limit), identifier, cell.sequence)
                self.check_cell(process, cell_id, cell)
                totals[cell.sequence] -= later.get(cell_id, 0)
            judged.append(Item(limit, identifier, cost, totals))
        if len(judged) == 1:
            findings = single_findings(judged[0], decisions[0], at_ms)
        else:
            findings = batch_findings(judged, decisions, at_ms)
        for finding in findings:
            self.fail(finding.invariant, f"{process.node_id}: {finding.text}")

    # -- messages

    def sent(self, process: NodeProcess, components: Sequence[Component]) -> None:
        """A node sends to the origin only its own counts, and no more than it accepted (3)."""
        now_ms = process.clock.now_ms()
        self.memory.check(process)
        self.note("sent", process.node_id, [(one.sequence, one.writer, one.own) for one in components])
        self.truth_check.sent(process, components)
        for one in components:
            cell_id = self.cell_of(one.digest, one.sequence)
            duration_ms = cell_id.key[2]
            accepted = self.truth.by_process(cell_id, process.node_id)
            if one.writer.partition("~")[0] != process.node_id:
                self.fail(3, f"{process.node_id} sent the component of {one.writer}")
            elif one.own > accepted:
                self.fail(
                    3, f"{process.node_id} sent the origin {one.own} of {cell_id}, but accepted {accepted}"
                )
            if one.expires_at_ms != (one.sequence + 3) * duration_ms:
                self.fail(10, f"{process.node_id}: {cell_id} would expire at {one.expires_at_ms}")
            elif one.expires_at_ms <= now_ms and not self._tuning.credit:
                # A message that asks for credit names the cells of the request, which may be of another time.
                self.fail(10, f"{process.node_id} replayed {cell_id}, which has aged out")

    def replied(
        self, process: NodeProcess, components: Sequence[Component], merged: bool, asked_s: float
    ) -> None:
        """A node received the origin's reply for these components. It sent the request at `asked_s` (loop time)."""
        self.memory.check(process)
        self.truth_check.replied(process, components, merged, asked_s)

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
            cell = (one.digest, one.sequence)
            if new == old and new.component == 0 and process.evictions:
                continue  # a late message about a subject that was evicted since
            self.truth.origin_holds(process.region, cell, one.writer, new.component, self.now_us())
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
            accepted = self._countable(cell_id, process.region)
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
            # Planned before a pause, a row may age out until it is sent.
            is_due = now_ms < row.expires_at_ms or self.now_us() / 1e6 - process.resumed_s < 1
            if row.expires_at_ms != (row.sequence + 2) * row.duration_ms or not is_due:
                self.fail(10, f"{process.node_id} published {cell_id}, which has aged out")

    # -- the memory of a node

    def sweep(self, process: NodeProcess) -> None:
        """Check everything that a node holds in memory."""
        subjects = process.engine.subjects
        for subject in subjects.slots:
            if subject is None:
                continue
            key = subjects.key_of(subject)
            if key[0] == PROBES_WORKSPACE:
                continue
            if subject.strict_until_ms < self._strict.get(id(subject), (subject, 0))[1]:
                self.fail(2, f"{process.node_id}: the strict deadline of {subject.identifier} decreased")
            self._strict[id(subject)] = (subject, subject.strict_until_ms)
            for cell in subject.cells():
                self.check_cell(process, CellId(key, subject.identifier, cell.sequence), cell)
        self.truth_check.sweep(process)

    def check_cell(self, process: NodeProcess, cell_id: CellId, cell: Cell) -> None:
        """The counts of a node in a cell: exact for itself, never too high for others, never decreasing."""
        origin, ledger = cell.origin, cell.ledger
        assert origin is not None
        known, counted, seen = self._cells.get(id(cell), (cell, 0, None))
        # A cell that was dropped and created again may restore its count from the origin; otherwise these are equal.
        accepted = self.truth.by_process(cell_id, process.node_id)
        if not counted <= cell.own <= accepted:
            self.fail(6, f"{process.node_id}: {cell_id} holds {cell.own}, but {accepted} were accepted")
        accepted = self._countable(cell_id, process.region)
        if cell.own + cell.others > accepted:
            self.fail(
                5,
                f"{process.node_id}: {cell_id} has {cell.own} + {cell.others}, its region accepted {accepted}",
            )
        components = {} if ledger is None or ledger.components is None else ledger.components
        if cell.foreign < sum(components.values()):
            self.fail(2, f"{process.node_id}: foreign {cell.foreign} is less than the sum of {components}")
        accepted = sum(self._countable(cell_id, one) for one in self.truth.regions_but(process.region))
        if cell.foreign > (accepted if self._tuning.credit else sum(components.values())):
            self.fail(
                5, f"{process.node_id}: {cell_id} has {cell.foreign} of others, who accepted {accepted}"
            )
        for region, count in components.items():
            accepted = self._countable(cell_id, region)
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

    def _countable(self, cell_id: CellId, region: str) -> int:
        """The most that may be counted for a region."""
        return self.truth.by_region(cell_id, region) + self.truth_check.excess(cell_id, region)

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
            or (origin.fresh_until_ms < seen.fresh_until_ms and not process.has_stepped)
            or (origin.failed_until_ms < seen.failed_until_ms and not process.has_stepped)
            or any(components.get(region, 0) < count for region, count in seen.components.items())
        ):
            self.fail(2, f"{process.node_id}: {cell_id} decreased from {seen}")
