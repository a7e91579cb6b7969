"""Checks at the end of a simulation: which counts may be lost, and whether all nodes agree on the rest.

Counts may be lost in two ways only. A node that crashes loses what it accepted in its last round trip. An origin that
is wiped, or fails over to an older copy, loses what no running node knew of and what was in flight at that moment: that
much may be missing from the cell. Every node must know all other counts at the end. Without credit, or if memory is too
small, the counts of ended processes may be missing too; such a cell is incomplete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from tidegate.adapters.memory import OriginSnapshot
from tidegate.core.cells import Cell
from tidegate.core.grants import CreditRequest, GrantRules
from tidegate.core.model import Component, Limit, subject_digest
from tidegate.core.windows import publish_threshold
from tidegate.sim.auditor import WORKSPACE
from tidegate.sim.plan import SubjectSpec
from tidegate.sim.reset_check import PROBES_WORKSPACE
from tidegate.sim.truth import CellId, CellKey, key_of

if TYPE_CHECKING:
    from tidegate.sim.node_process import NodeProcess
    from tidegate.sim.simulation import Simulation

__all__ = ["ConvergenceCheck"]


class ConvergenceCheck:
    """Records the losses of one simulation, and compares the views of its nodes at the end."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        # (region, digest, sequence) of cells of which the origin lost components of ended processes.
        self._incomplete: set[tuple[str, bytes, int]] = set()
        # By the same key: how much may be missing, because no running node knew of it when it was lost.
        self._missing: dict[tuple[str, bytes, int], int] = {}
        # How much may be counted twice, because a message sent before a loss arrived after it, out of order or
        # repeated.
        self._excess: dict[tuple[str, bytes, int], int] = {}
        # Messages that have arrived at an origin: writer, digest, number.
        self._delivered: set[tuple[str, bytes, int]] = set()
        self._is_restored = simulation.tuning.credit and "subjects_max" not in simulation.plan.tuning
        # By how much the fastest clock was ahead when all clocks were corrected.
        self.ahead_ms = 0
        self._compared = 0
        self._agreed_total = 0
        self._lost_total = 0

    def describe(self) -> str:
        return (
            f"{self._compared} cells compared, {self._agreed_total} counted, "
            f"{self._lost_total} lost in crashes, {len(self._incomplete)} cells incomplete"
        )

    @property
    def compared(self) -> int:
        return self._compared

    @property
    def excused(self) -> int:
        """The number of cells whose counts may be lost because an origin lost them after their writer had ended."""
        return len(self._incomplete | self._missing.keys())

    def is_incomplete(self, region: str, digest: bytes, sequence: int) -> bool:
        return (region, digest, sequence) in self._incomplete

    def missing(self, region: str, digest: bytes, sequence: int) -> int:
        """How much of what was accepted may be missing from the cell."""
        return self._missing.get((region, digest, sequence), 0)

    def excess(self, region: str, digest: bytes, sequence: int) -> int:
        """How much more than was accepted may be counted."""
        return self._excess.get((region, digest, sequence), 0)

    def _miss(self, region: str, digest: bytes, sequence: int, count: int) -> None:
        if count > 0:
            place = (region, digest, sequence)
            self._missing[place] = self._missing.get(place, 0) + count

    # -- losses

    def record_loss(self, region: str, lose_data: Callable[[], None]) -> None:
        """Let an origin lose data, and record which components of ended processes are lost."""
        memory = self._simulation.origins[region].memory
        before = memory.snapshot()
        lose_data()
        after = memory.snapshot()
        self._simulation.truth_check.origin_lost(region)
        running = {process.node_id for process in self._simulation.processes.values() if process.is_running}
        is_small = "subjects_max" in self._simulation.plan.tuning
        if is_small:
            # A node that evicted a subject cannot send its component again either.
            running = set()
        for (digest, sequence), cell in before.cells.items():
            left = after.cells.get((digest, sequence))
            if is_small and (left is None or left.total < cell.total):
                self._incomplete.add((region, digest, sequence))
            if self._is_restored:
                # In an older copy, old counts cannot be told apart from new ones.
                known = self._known(region, digest, sequence) if left is None else left.total
                self._miss(region, digest, sequence, cell.total - known)
                if left is None:
                    self._miss_older(region, digest, sequence, before)
                continue
            for writer, count in cell.components.items():
                kept = 0 if left is None else left.components.get(writer, 0)
                if kept < count and (writer not in running):
                    self._incomplete.add((region, digest, sequence))

    def _miss_older(self, region: str, digest: bytes, sequence: int, before: OriginSnapshot) -> None:
        """Two losses in a row lose what only a silent node knew of the record before the first one."""
        record = before.records[digest].cells[sequence]
        known = self._known(region, digest, sequence, below_id=record.id)
        self._miss(region, digest, sequence, known - record.base - record.returned)

    def record_end(self, process: NodeProcess) -> None:
        """A process ended: record what the origin had already lost, and what only this process could have sent again:
        its own counts, and those of processes that ended before it."""
        if self._is_restored:
            snapshot = self._simulation.origins[process.region].memory.snapshot()
            for digest, sequence in dict.fromkeys([*process.acknowledged, *self._cells_of(process)]):
                held = self.held(process.region, digest, sequence)
                left = max(held, self._known(process.region, digest, sequence))
                alone = _known_to(process, self._id(digest, sequence)) - left
                acknowledged = process.acknowledged.get((digest, sequence), 0)
                unreported = acknowledged - self._component(process, digest, sequence)
                older = 0
                if (digest, sequence) in snapshot.cells:
                    # What is new in the record that follows a loss is not part of what was lost.
                    record = snapshot.records[digest].cells[sequence]
                    older = _known_to(process, self._id(digest, sequence), record.id) - max(
                        self._known(process.region, digest, sequence, below_id=record.id),
                        record.base + record.returned,
                    )
                self._miss(process.region, digest, sequence, max(alone, unreported, older))
            return
        for (digest, sequence), count in process.acknowledged.items():
            if self._component(process, digest, sequence) < count:
                self._incomplete.add((process.region, digest, sequence))

    def record_repeat(self, process: NodeProcess, request: CreditRequest) -> None:
        """Counts that a message reports again after a loss may have arrived before the loss: treat them as arrived. So
        may all of a message that arrives when its node may publish for itself."""
        is_late = 0 < request.alone_at_ms <= self._simulation.clock.now_ms()
        message = (request.writer, request.digest, request.number)
        was_delivered = message in self._delivered
        self._delivered.add(message)
        for part in request.cells:
            place = (request.digest, part.sequence)
            if (process.region, place) not in self._simulation.truth_check.lost:
                continue
            reported = min(part.own, max(part.sent, part.published))
            cell_id = self._id(*place)
            subject = process.engine.subjects.find(cell_id.key, cell_id.identifier)
            credit = None if subject is None else subject.credit
            # Either a later message overtook this one, or it is delivered a second time. The writer reports what it
            # adds as part of the total that was lost; the origin has forgotten the first delivery and counts the second
            # as new.
            is_second = was_delivered or process.acknowledged.get(place, 0) >= part.own > reported
            if credit is None or credit.number > request.number or is_second:
                late = (process.region, *place)
                self._excess[late] = self._excess.get(late, 0) + part.own - reported
            if self._is_restored:
                before = self._component(process, *place)
                repeated = part.own if is_late else reported
                self._miss(process.region, *place, repeated - max(before, part.acked))

    def _id(self, digest: bytes, sequence: int) -> CellId:
        return self._simulation.auditor.cell_of(digest, sequence)

    def _known(self, region: str, digest: bytes, sequence: int, below_id: int | None = None) -> int:
        """The most that a running node of the region knows to have been reported, to a record older than `below_id` if
        given."""
        cell_id = self._id(digest, sequence)
        running = [
            one for one in self._simulation.processes.values() if one.is_running and one.region == region
        ]
        return max((_known_to(process, cell_id, below_id) for process in running), default=0)

    def _cells_of(self, process: NodeProcess) -> list[CellKey]:
        """All cells in the memory of a process, except those of probes."""
        subjects = process.engine.subjects
        return [
            (subject.digest_of(subjects.key_of(subject)), cell.sequence)
            for subject in subjects.slots
            if subject is not None and subjects.key_of(subject)[0] != PROBES_WORKSPACE
            for cell in subject.cells()
        ]

    def held(self, region: str, digest: bytes, sequence: int) -> int:
        return (
            self._simulation.origins[region]
            .memory.read_nowait([Component(digest, sequence, "", 0, 0)])[0]
            .total
        )

    def _component(self, process: NodeProcess, digest: bytes, sequence: int) -> int:
        wanted = Component(digest, sequence, process.node_id, 0, 0)
        return self._simulation.origins[process.region].memory.read_nowait([wanted])[0].component

    def check_crash(self, process: NodeProcess) -> None:
        """A crash loses only the counts of the last round trip, if the link to the origin worked."""
        simulation = self._simulation
        tuning = simulation.tuning
        if tuning.replay_cells_max < 50 or process.evictions or process.has_stepped:
            return
        conditions = simulation.network.conditions
        delay_ms = max(conditions.delay_ms, conditions.slow_ms if conditions.slow_percent else 0)
        round_trip_s = 2 * delay_ms / 1000
        tolerance_s = (tuning.breaker_open_ms + tuning.backoff_last_ms + tuning.replay_timeout_ms) / 1000 + 1
        now_s = simulation.loop.time()
        if now_s - max(process.origin_link.disturbed_s, process.started_s) < tolerance_s or process.is_paused:
            return
        if simulation.origins[process.region].is_down or process.origin_link.is_cut:
            return
        deadline_s = now_s - 2 * round_trip_s - 0.005 - 2 * tuning.report_interval_ms / 1000
        unacknowledged: dict[tuple[bytes, int], int] = {}
        for at_s, digest, sequence, cost in process.accepted:
            place = (digest, sequence)
            if at_s < deadline_s:
                unacknowledged[place] = unacknowledged.get(place, -process.acknowledged.get(place, 0)) + cost
        now_ms = process.clock.now_ms()
        for (digest, sequence), count in unacknowledged.items():
            duration_ms = simulation.auditor.cell_of(digest, sequence).key[2]
            if count > 0 and now_ms < (sequence + 3) * duration_ms:
                simulation.auditor.fail(
                    8,
                    f"{process.node_id} crashed and lost {count} that it had accepted before its last round trip",
                )

    def check_stop(self, process: NodeProcess, started_s: float) -> None:
        """A graceful stop loses nothing, if the link to the origin worked."""
        simulation = self._simulation
        tuning = simulation.tuning
        tolerance_s = (tuning.breaker_open_ms + tuning.backoff_last_ms + tuning.replay_timeout_ms) / 1000 + 1
        origin = simulation.origins[process.region]
        if (
            max(process.origin_link.disturbed_s, process.started_s) > started_s - tolerance_s
            or process.origin_link.is_cut
        ):
            return
        if origin.is_down or origin.is_frozen or process.evictions:
            return
        now_ms = process.clock.now_ms()
        for cell_id, by_process in simulation.auditor.truth.accepted.items():
            duration_ms = cell_id.key[2]
            accepted = by_process[process.node_id].last if process.node_id in by_process else 0
            if accepted and now_ms + 1_000 < (cell_id.sequence + 3) * duration_ms:
                digest = cell_id.digest
                # What the origin acknowledged and lost later, in a failover without a trace, counts as delivered.
                delivered = max(
                    self._component(process, digest, cell_id.sequence),
                    process.acknowledged.get((digest, cell_id.sequence), 0),
                )
                if delivered != accepted and simulation.clock.now_ms() < (cell_id.sequence + 3) * duration_ms:
                    simulation.auditor.fail(
                        8,
                        f"{process.node_id} stopped and delivered {delivered} of {accepted} of {cell_id}",
                    )

    # -- agreement

    async def check(self) -> None:
        """Let time pass, let every node read every subject, and then compare all views."""
        simulation = self._simulation
        tuning = simulation.tuning
        interval_s = (tuning.publish_interval_ms + tuning.import_interval_ms) / 1000 * 1.3
        settle_s = (tuning.breaker_open_ms + tuning.backoff_last_ms + tuning.ledger_timeout_ms) / 1000
        settle_s += (tuning.read_retry_ms + tuning.replay_timeout_ms + simulation.ledger.lag_ms) / 1000
        if any(event.kind == "ledger_rejects" for event in simulation.plan.events):
            settle_s += tuning.set_aside_ms * 32 / 1000
        # A node whose clock was ahead and has been corrected still trusts its last reply until the old deadline.
        settle_s += max(0, self.ahead_ms) / 1000
        await asyncio.sleep(settle_s + interval_s)
        # A request of cost 0 is answered from memory while the last answer of the origin is no older than this.
        fresh_ms = max(tuning.fresh_ms, GrantRules().life_ms) if tuning.credit else tuning.fresh_ms
        for _ in range(2):
            await self._read_all()
            await asyncio.sleep(max(fresh_ms / 1000 + 0.1, interval_s + simulation.ledger.lag_ms / 1000))
        await self._read_all()
        simulation.sweep()
        if simulation.auditor.violations:
            return
        for spec, limits in zip(simulation.plan.subjects, simulation.limits, strict=True):
            sequence = simulation.clock.now_ms() // spec.duration_ms
            for one in (sequence - 1, sequence):
                self._compare(spec, CellId(key_of(limits[0]), spec.identifier, one))
        if not simulation.auditor.violations:
            self._deliver_again()
            self._expire_all()

    async def _read_all(self) -> None:
        """Every node decides every subject with cost 0 and no real limit, so that it reads whatever is stale."""
        for process in self._simulation.processes.values():
            for spec in self._simulation.plan.subjects:
                unlimited = Limit(
                    1 << 60, duration_ms=spec.duration_ms, namespace=spec.namespace, workspace=WORKSPACE
                )
                await process.limiter.limit(unlimited, spec.identifier, 0)

    def _compare(self, spec: SubjectSpec, cell_id: CellId) -> None:
        simulation = self._simulation
        digest = subject_digest(WORKSPACE, spec.namespace, spec.identifier, spec.duration_ms)
        views: dict[str, dict[str, Cell]] = {}
        for process in simulation.processes.values():
            subject = process.engine.subjects.find(cell_id.key, cell_id.identifier)
            cell = None if subject is None else subject.cell(cell_id.sequence)
            if cell is not None:
                views.setdefault(process.region, {})[process.node_id] = cell
        for region in simulation.plan.regions:
            self._compare_region(region, digest, cell_id, views.get(region, {}))
        if "subjects_max" in simulation.plan.tuning:
            # A node that may keep three subjects cannot know the counts of other regions for a fourth.
            return
        if spec.duration_ms >= simulation.tuning.ledger_duration_ms_min:
            self._compare_regions(cell_id, views)

    def _compare_region(self, region: str, digest: bytes, cell_id: CellId, views: dict[str, Cell]) -> None:
        """The nodes of a region agree with its origin, and the origin with what was accepted."""
        simulation = self._simulation
        histories = simulation.auditor.truth.accepted.get(cell_id, {})
        accepted = {node_id: history.last for node_id, history in histories.items()}
        processes = [process for process in simulation.all_processes if process.region == region]
        running = {process.node_id for process in simulation.processes.values()}
        place = (digest, cell_id.sequence)
        highest = sum(accepted.get(process.node_id, 0) for process in processes)
        lowest = sum(
            accepted.get(process.node_id, 0)
            if process.node_id in running
            else process.acknowledged.get(place, 0)
            for process in processes
            if not process.engine.subjects.evicted_unreplayed
        )
        lowest -= self.missing(region, *place)
        held = self.held(region, *place)
        incomplete = (region, *place) in self._incomplete
        if incomplete:
            lowest = sum(accepted.get(node_id, 0) for node_id in running)
            lowest = min(lowest, highest)
        self._compared += 1
        self._agreed_total += held
        self._lost_total += highest - held
        highest += self.excess(region, *place)
        if not incomplete and not lowest <= held <= highest:
            simulation.auditor.fail(
                8, f"region {region} holds {held} of {cell_id}: not {lowest} to {highest}"
            )
        if "subjects_max" in simulation.plan.tuning:
            return
        # A node may publish more than it has replayed, and crash: then the region's own row holds more than the origin.
        known = max(held, self._rows(cell_id).get(region, 0))
        for node_id, cell in views.items():
            view = cell.own + cell.others
            # With credit, a row that holds more than the origin hides what was counted since.
            is_hidden = simulation.tuning.credit and held < known <= view <= highest
            if view != known and not is_hidden and not (incomplete and cell.own <= view <= highest):
                simulation.auditor.fail(8, f"{node_id} counts {view} of {cell_id}, its region {known}")

    def _rows(self, cell_id: CellId) -> dict[str, int]:
        """The counts of a cell in the ledger, by region."""
        return {
            row.region: row.regional
            for row in self._simulation.ledger.memory.rows()
            if (row.workspace, row.namespace, row.duration_ms) == cell_id.key
            and (row.identifier, row.sequence) == cell_id[1:]
        }

    def _compare_regions(self, cell_id: CellId, views: dict[str, dict[str, Cell]]) -> None:
        """The regions agree through the ledger, and those that do not publish hold little (9)."""
        simulation = self._simulation
        rows = self._rows(cell_id)
        regions = len(simulation.plan.regions)
        silent = 0
        limits: list[int] = []
        for region, nodes in views.items():
            known = max(cell.own + cell.others for cell in nodes.values())
            published = rows.get(region, 0)
            limit = min(
                (cell.ledger.quota_min for cell in nodes.values() if cell.ledger and cell.ledger.quota_min),
                default=0,
            )
            if simulation.tuning.credit:
                # A region publishes what its origin has. Nodes may remember more: counts of a node that ended, or the
                # row.
                known = max(
                    self.held(region, cell_id.digest, cell_id.sequence),
                    published if published <= known else 0,
                )
            should = bool(rows.keys() - {region}) or (limit and known >= publish_threshold(limit, regions))
            if should and known > 0 and published != known:
                simulation.auditor.fail(
                    8, f"region {region} has {known} of {cell_id}, but published {published}"
                )
            if not published and limit:
                silent += known
                limits.append(limit)
        if limits and regions > 1 and silent * 2 > max(limits):
            simulation.auditor.fail(
                9, f"regions that did not publish hold {silent} of {cell_id}, limit {max(limits)}"
            )
        for region, nodes in views.items():
            foreign = {other: count for other, count in rows.items() if other != region}
            for node_id, cell in nodes.items():
                if simulation.tuning.credit:
                    # One node has imported for all: they know the sum.
                    expected = sum(foreign.values())
                    may_exceed = "ledger_wipe" in simulation.fault_kinds
                    if cell.foreign != expected and not (may_exceed and cell.foreign > expected):
                        simulation.auditor.fail(
                            8, f"{node_id} has {cell.foreign} of {cell_id}, the ledger {foreign}"
                        )
                    continue
                imported = (
                    {} if cell.ledger is None or cell.ledger.components is None else cell.ledger.components
                )
                if "ledger_wipe" in simulation.fault_kinds:
                    # If its origin was wiped as well, a region may have lost what it had published; other regions keep
                    # it.
                    imported = {other: min(imported.get(other, 0), count) for other, count in foreign.items()}
                if dict(imported) != foreign:
                    simulation.auditor.fail(8, f"{node_id} has {imported} of {cell_id}, the ledger {foreign}")

    # -- after the comparison

    def _deliver_again(self) -> None:
        """Deliver all messages once more, in another order: nothing may change (5)."""
        simulation = self._simulation
        for region, origin in simulation.origins.items():
            before = origin.memory.snapshot()
            again = [
                Component(digest, sequence, writer, own, cell.expires_at_ms)
                for (digest, sequence), cell in before.cells.items()
                for writer, own in cell.components.items()
            ]
            again += [one._replace(own=one.own // 2) for one in again]
            simulation.network.random.shuffle(again)
            origin.memory.merge_nowait(again)
            if origin.memory.snapshot().cells != before.cells:
                simulation.auditor.fail(
                    5, f"the origin of {region} changed when all components were merged again"
                )
        rows = [row for row in simulation.ledger.memory.rows() if row.workspace != PROBES_WORKSPACE]
        if simulation.tuning.credit:
            # A node knows counts of other nodes only for the cells that its messages named.
            now_ms = simulation.clock.now_ms()
            rows = [row for row in rows if 0 <= now_ms // row.duration_ms - row.sequence <= 1]
        simulation.network.random.shuffle(rows)
        for process in simulation.processes.values():
            if "subjects_max" in simulation.plan.tuning:
                continue
            before_ms = process.clock.now_ms()
            counts = _counts(process)
            process.node.ledger_sync.apply_import([*rows, *reversed(rows)], before_ms)
            if any(count != 0 and counts.get(place) != count for place, count in _counts(process).items()):
                simulation.auditor.fail(5, f"{process.node_id} changed when all rows were imported again")

    def _expire_all(self) -> None:
        """Long after the end, no subject is left, and a full read of the ledger does not bring one back (10)."""
        rows = self._simulation.ledger.memory.rows()
        for process in self._simulation.processes.values():
            subjects = process.engine.subjects
            later_ms = process.clock.now_ms() + 10**9
            subjects.expire(later_ms, 1 << 60)
            if subjects.count:
                self._simulation.auditor.fail(10, f"{process.node_id} still holds {subjects.count} subjects")
            process.node.ledger_sync.apply_import(rows, later_ms, full=True)
            if subjects.count:
                self._simulation.auditor.fail(
                    10, f"{process.node_id} imported rows that had expired: {subjects.count} subjects"
                )


def _known_to(process: NodeProcess, cell_id: CellId, below_id: int | None = None) -> int:
    """What a node knows to have been reported to its origin, if its record there is older than `below_id`."""
    subject = process.engine.subjects.find(cell_id.key, cell_id.identifier)
    cell = None if subject is None else subject.cell(cell_id.sequence)
    # What a node has read in the ledger, without an answer of the origin, is only a lower bound: it may include counts
    # from before or after the loss, so counts that follow a loss may already be part of it.
    if cell is None or cell.origin is None or cell.origin.id == 0:
        return 0
    if below_id is not None and cell.origin.id >= below_id:
        return 0
    return min(cell.own, cell.origin.acked) + cell.others


def _counts(process: NodeProcess) -> dict[tuple[int, int], int]:
    return {
        (subject.slot, cell.sequence): cell.total()
        for subject in process.engine.subjects.slots
        if subject is not None
        for cell in subject.cells()
    }
