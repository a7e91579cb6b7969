"""The decision: what may pass, from what this node remembers, or what must be read first.

`decide` and `decide_many` return decisions, or the reads that the rules of freshness ask for; the driver reads,
hands the answers to `Convergence`, and asks again with the `source` it has by then. Check and commit are one step:
nothing is called between them that could let another decision in. The engine knows no clock, no lock and no I/O;
it holds its subjects and is held by one driver, which lets in one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from tidegate.core._native import mypyc_attr
from tidegate.core.cells import BLOCKED, CLEAN, PINNED, Cell, Shared, Subject, Table
from tidegate.core.model import (
    DEGRADED,
    LOCAL,
    ORIGIN,
    Component,
    Decision,
    Limit,
    Tuning,
    checked_name,
)
from tidegate.core.subjects import Subjects
from tidegate.core.windows import carried, earliest_fit, publish_threshold, wait_ms

__all__ = ["COLD", "STALE", "STRICT", "Engine", "Need"]

# Why a read is wanted.
COLD: Final = "cold"  # nothing heard yet
STALE: Final = "stale"  # heard too long ago
STRICT: Final = "strict"  # denied lately, so peers' latest counts matter

# Cells that a subject may keep aside while its clock jumps about. More are looked through for aged ones.
REST_MAX: Final = 8


@final
@mypyc_attr(acyclic=True)
class Need:
    """What must be read before a decision: one or two cells of one subject, in one round trip.

    `acked` is what the origin had acknowledged of each cell by then: an answer that holds less was not overtaken.
    """

    __slots__ = ("acked", "cells", "reason", "subject", "wanted")

    def __init__(self, reason: str, subject: Subject, cells: list[Cell], wanted: list[Component]) -> None:
        self.reason: Final[str] = reason
        self.subject: Final[Subject] = subject
        self.cells: Final[list[Cell]] = cells
        self.wanted: Final[list[Component]] = wanted
        self.acked: Final[list[int]] = [0 if cell.shared is None else cell.shared.acked for cell in cells]


# Entries of a queue looked at with each new subject: more than one, so that tidying outruns growth.
TIDIED_PER_CREATION: Final = 4


@final
@mypyc_attr(acyclic=True)
class Item:
    """One item of a batch while it is judged."""

    __slots__ = ("cell", "cost", "demand", "limit", "probable", "state", "subject")

    def __init__(self, limit: Limit, cost: int, subject: Subject, cell: Cell) -> None:
        self.limit: Final[Limit] = limit
        self.cost: Final[int] = cost
        self.subject: Final[Subject] = subject
        self.cell: Final[Cell] = cell
        # What counted before the batch, and what is judged on top: its own cost and that of earlier items.
        self.state: int = 0
        self.demand: int = 0
        # What foreign regions have probably done since, if that is why it does not fit.
        self.probable: int = 0


@final
class Engine:
    """One node's decisions.

    `has_origin` and `has_ledger` say which layers exist: without an origin nothing is read or replayed, without
    either, cells have no shared part at all.
    """

    __slots__ = (
        "_anticipates",
        "_fresh_ms",
        "_grace_ms",
        "_has_origin",
        "_ledger_duration_ms_min",
        "_pressure_parts",
        "_retry_ms",
        "_shares",
        "_tables",
        "_tidied",
        "_touch_ms",
        "anticipation_ms_max",
        "denied",
        "denied_from_origin",
        "dirty",
        "changed",
        "from_degraded",
        "from_origin",
        "growth_since_ms",
        "has_ledger",
        "imported_at_ms",
        "node_id",
        "allowed",
        "pressed",
        "regions",
        "signals",
        "strict_activations",
        "subjects",
    )

    def __init__(
        self, tuning: Tuning, *, node_id: str, has_origin: bool = False, has_ledger: bool = False
    ) -> None:
        self.node_id: Final[str] = node_id
        self._has_origin: Final[bool] = has_origin
        self.has_ledger: Final[bool] = has_ledger
        self._shares: Final[bool] = has_origin or has_ledger
        self._fresh_ms: Final[int] = tuning.fresh_ms
        self._grace_ms: Final[int] = tuning.rollover_grace_ms
        self._retry_ms: Final[int] = tuning.read_retry_ms
        self._touch_ms: Final[int] = tuning.touch_ms
        self._ledger_duration_ms_min: Final[int] = tuning.ledger_duration_ms_min
        self._pressure_parts: Final[int] = tuning.pressure_parts
        self._anticipates: Final[bool] = tuning.anticipation and has_ledger
        # How far ahead anticipation reaches: two import intervals, as they are at the moment. Written by the importer.
        self.anticipation_ms_max: int = 2 * tuning.import_interval_ms
        self.subjects: Final[Subjects] = Subjects(tuning, has_origin or has_ledger)
        self._tables: Final[dict[object, Table]] = self.subjects.tables

        # Where a queue was last tidied.
        self._tidied: int = 0
        # Subjects with counts to replay, and with cells to publish, about in the order in which they got them.
        # Filled here, emptied by `Convergence`.
        self.dirty: list[Subject] = []
        self.changed: list[Subject] = []
        self.pressed: list[Subject] = []
        # True when something was put into `dirty` or `pressed`: the driver wakes its loops and clears it.
        self.signals: bool = False
        # Live regions in the ledger. Written by `Convergence`.
        self.regions: int = 1
        # When the ledger was last imported, -1 for never, and when that import began. Written by `Convergence`.
        self.imported_at_ms: int = -1
        self.growth_since_ms: int = 0

        self.allowed: int = 0
        self.denied: int = 0
        # Of those, decisions that a read came before, denials among them, and decisions that had to do without.
        self.from_origin: int = 0
        self.denied_from_origin: int = 0
        self.from_degraded: int = 0
        self.strict_activations: int = 0

    # -- one request

    def decide(
        self, limit: Limit, identifier: str, cost: int, now_ms: int, source: int = LOCAL
    ) -> Decision | Need:
        """Decide one request at `now_ms`. With a `source` other than LOCAL the driver has done its reading.

        `Gate` has checked the types and the cost; the identifier's length is checked when it is first met.
        """
        duration_ms = limit.duration_ms
        sequence = now_ms // duration_ms
        # `Subjects.find` written out: two calls less on every decision of an interpreted engine.
        table = self._tables.get(limit.key)
        subject = None
        if table is not None:
            subject = table.find(identifier) if table.mask else table.whole.get(identifier)
        if subject is None:
            subject = self._meet(limit, identifier, sequence, now_ms)
        current = subject.current
        if subject.sequence != sequence:
            current = self._cell(subject, sequence, duration_ms)
            previous = subject.cell(sequence - 1)
        else:
            previous = subject.previous

        before = 0
        effective = current.own + current.others + current.foreign + cost
        if previous is not None:
            before = previous.own + previous.others + previous.foreign
            if before:
                effective += carried(before, now_ms - sequence * duration_ms, duration_ms)
        quota = limit.quota
        if effective > quota:
            denial = subject.denial
            if (
                denial is not None
                and subject.strict_until_ms == now_ms + duration_ms
                and denial.effective == effective
                and denial.limit.quota == quota
                and subject.denied_cost == cost
                and subject.sequence == sequence
            ):
                # Asked the same in the same millisecond, with no later cell: the same answer, worked out once.
                self.denied += 1
                return denial
            return self._deny(subject, current, before, limit, cost, now_ms, effective, 0, source)

        regional_age_ms = -1
        global_age_ms = -1
        if self._shares:
            shared = current.shared
            assert shared is not None
            if self._has_origin and source == LOCAL:
                if now_ms >= shared.fresh_until_ms or now_ms < subject.strict_until_ms:
                    need = self._need(subject, current, shared, sequence, now_ms)
                    if need is not None:
                        return need
                if now_ms < shared.failed_until_ms and (
                    now_ms < subject.strict_until_ms
                    or shared.heard_at_ms < shared.failed_until_ms - self._retry_ms
                ):
                    source = DEGRADED
            if self._anticipates and shared.growth:
                probable = shared.anticipated(now_ms, self.anticipation_ms_max, self.growth_since_ms)
                if effective + probable > quota:
                    return self._deny(
                        subject, current, before, limit, cost, now_ms, effective, probable, source
                    )
            regional_age_ms = self._regional_age_ms(current, now_ms)
            global_age_ms = self._global_age_ms(now_ms)
            if cost:
                current.own += cost
                self._note(subject, current, shared, limit, now_ms)
            elif self.has_ledger and (quota < shared.limit_min or shared.limit_min == 0):
                self._note_limit(subject, current, shared, limit, now_ms)
            if source != LOCAL:
                self._count_source(source)
        else:
            current.own += cost
        self.allowed += 1
        if now_ms - subject.touched_ms >= self._touch_ms:
            self._touch(subject, now_ms)
        return Decision(
            True,
            limit,
            quota - effective,
            now_ms,
            effective,
            0,
            source,
            regional_age_ms,
            global_age_ms,
        )

    def _meet(self, limit: Limit, identifier: str, sequence: int, now_ms: int) -> Subject:
        """A subject that is not remembered: check its name, make room, begin."""
        name = checked_name("identifier", identifier)
        subject = self.subjects.create(limit.key, name, sequence, now_ms)
        self.subjects.make_room(now_ms, subject)
        if self._shares:
            self._tidy(self.dirty)
            self._tidy(self.changed)
            self._tidy(self.pressed)
        return subject

    def _tidy(self, queue: list[Subject]) -> None:
        """Drop a few forgotten subjects from a queue that nobody empties, as long as what it leads to is down.

        A few with each new subject, at a place that moves along: an attacker who sprays identifiers would otherwise
        fill the queue with subjects that memory has long given up.
        """
        for _ in range(TIDIED_PER_CREATION):
            if not queue:
                return
            self._tidied = (self._tidied + 1) % len(queue)
            if queue[self._tidied].table < 0:
                queue[self._tidied] = queue[-1]
                queue.pop()

    def _touch(self, subject: Subject, now_ms: int) -> None:
        if subject.queue == BLOCKED and subject.strict_until_ms <= now_ms:
            self.subjects.move(subject, CLEAN, now_ms)
        else:
            self.subjects.move(subject, subject.queue, now_ms)

    def _cell(self, subject: Subject, sequence: int, duration_ms: int) -> Cell:
        """The cell of `sequence`, which is now, made if need be."""
        cell = subject.cell(sequence)
        if cell is not None:
            return cell
        rest = subject.rest
        if rest is not None and len(rest) >= REST_MAX:
            # Time stepped back, so that no newer cell pushes the aged ones out.
            self.subjects.drop_aged(subject, sequence * duration_ms, duration_ms)
        return self.new_cell(subject, sequence, duration_ms, sequence - 2)

    def new_cell(self, subject: Subject, sequence: int, duration_ms: int, sequence_min: int) -> Cell:
        """A new cell; others are wanted from `sequence_min` on.

        One that follows a warm cell is warm for a moment itself, and keeps the pause of a failed read. Warm is what
        was heard since that cell began: grace alone gives no grace, or windows as short as it would never be read.
        """
        before = subject.cell(sequence - 1)
        cell = self.subjects.new_cell(sequence)
        shared = cell.shared
        if shared is not None and before is not None and self._has_origin:
            known = before.shared
            assert known is not None
            start_ms = sequence * duration_ms
            heard_at_ms = known.heard_at_ms
            if heard_at_ms + self._fresh_ms > start_ms and heard_at_ms > start_ms - duration_ms:
                shared.fresh_until_ms = start_ms + self._grace_ms
                shared.heard_at_ms = start_ms
            if known.failed_until_ms > start_ms:
                shared.failed_until_ms = known.failed_until_ms
                if shared.fresh_until_ms < known.failed_until_ms:
                    shared.fresh_until_ms = known.failed_until_ms
        self.subjects.insert(subject, cell, sequence_min)
        return cell

    def _need(
        self, subject: Subject, current: Cell, shared: Shared, sequence: int, now_ms: int
    ) -> Need | None:
        cells = [current]
        if now_ms >= shared.fresh_until_ms:
            reason = COLD if shared.heard_at_ms < 0 else STALE
            previous = subject.cell(sequence - 1)
            if previous is None:
                # Only to ask with: it is remembered if the origin knows something of it, and most are empty.
                previous = Cell(sequence - 1, Shared())
            cells.append(previous)
        elif now_ms >= shared.failed_until_ms:
            reason = STRICT
        else:
            return None
        key = self.subjects.key_of(subject)
        return Need(reason, subject, cells, [self.component(subject, cell, key) for cell in cells])

    def component(self, subject: Subject, cell: Cell, key: tuple[str, str, int]) -> Component:
        """This node's component of a cell, as the origin knows it."""
        writer = self.node_id
        if subject.incarnation:
            writer = f"{writer}~{subject.incarnation}"
        return Component(
            subject.digest_of(key), cell.sequence, writer, cell.own, (cell.sequence + 3) * key[2]
        )

    def _note(self, subject: Subject, current: Cell, shared: Shared, limit: Limit, now_ms: int) -> None:
        """The cell has grown: queue what must be told to the origin and to the ledger."""
        if self._has_origin and not subject.awaiting:
            subject.awaiting = True
            self.dirty.append(subject)
            if subject.queue != PINNED:
                self.subjects.move(subject, PINNED, now_ms)
            self.signals = True
        if self.has_ledger and limit.duration_ms >= self._ledger_duration_ms_min:
            if limit.quota < shared.limit_min or shared.limit_min == 0:
                shared.limit_min = limit.quota
                self.aim(subject, current, shared, now_ms, limit.duration_ms)
            self.note_change(subject, current, shared)

    def _note_limit(self, subject: Subject, current: Cell, shared: Shared, limit: Limit, now_ms: int) -> None:
        """The cell was asked for with its lowest limit so far, and did not grow: the others should know from when on.

        A limit of 0 asks nobody: it blocks whatever the counts are.
        """
        if limit.quota == 0 or not self.has_ledger or limit.duration_ms < self._ledger_duration_ms_min:
            return
        shared.limit_min = limit.quota
        self.aim(subject, current, shared, now_ms, limit.duration_ms)
        if current.own + current.others > shared.published:
            self.note_change(subject, current, shared)

    def note_change(self, subject: Subject, cell: Cell, shared: Shared) -> None:
        """The regional count of a cell rose above what the ledger holds: it waits for a publish."""
        if not shared.changed:
            shared.changed = True
            if not subject.publishing:
                subject.publishing = True
                self.changed.append(subject)
        if not shared.pressed and shared.limit_min > 0 and cell.own + cell.others >= shared.pressure_at:
            shared.pressed = True
            self.pressed.append(subject)
            self.signals = True

    def aim(self, subject: Subject, cell: Cell, shared: Shared, now_ms: int, duration_ms: int) -> None:
        """Set the count from which this cell is published without waiting for the tick.

        It may grow by a part of the headroom, shared among the regions seen on it, so that what the others
        cannot see stays a small part of what is left.
        """
        used = cell.total()
        previous = subject.cell(cell.sequence - 1)
        if previous is not None:
            elapsed_ms = now_ms - cell.sequence * duration_ms
            if 0 <= elapsed_ms < duration_ms:
                used += carried(previous.total(), elapsed_ms, duration_ms)
        regions = 1 if shared.components is None else 1 + len(shared.components)
        step = (shared.limit_min - used) // (self._pressure_parts * regions)
        if step < 1:
            step = 1
        aim = shared.published + step
        if cell.foreign == 0:
            threshold = publish_threshold(shared.limit_min, self.regions)
            if threshold > aim or shared.published == 0:
                # Reaching the threshold is news by itself: until then all regions together may be silent about
                # half of the limit, and a step of the headroom on top of it would be as much again.
                aim = threshold
        shared.pressure_at = aim

    # -- denials

    def _deny(
        self,
        subject: Subject,
        current: Cell,
        before: int,
        limit: Limit,
        cost: int,
        now_ms: int,
        effective: int,
        probable: int,
        source: int,
    ) -> Decision:
        """A denial: nothing is counted, and the subject is strict for one duration.

        `cost` is what would have to fit: in a batch, the item's cost behind those of the earlier items.
        Cells only grow, so no read could change this answer. Only one that anticipation caused (`probable`) is a
        guess about others: it is not reported as `effective` and makes nobody strict.
        """
        duration_ms = limit.duration_ms
        strict_until_ms = now_ms + duration_ms
        if strict_until_ms > subject.strict_until_ms and probable == 0:
            # Once per millisecond and subject: a hammered one finds all this done.
            if subject.strict_until_ms <= now_ms:
                self.strict_activations += 1
            subject.strict_until_ms = strict_until_ms
            if subject.queue == CLEAN:
                self.subjects.move(subject, BLOCKED, now_ms)
            elif now_ms - subject.touched_ms >= self._touch_ms:
                self.subjects.move(subject, subject.queue, now_ms)
        self.denied += 1
        quota = limit.quota
        sequence = current.sequence
        ends_ms = (sequence + 1) * duration_ms
        retry_after_ms = -1
        if cost <= quota:
            if subject.sequence == sequence:
                counted = current.own + current.others + current.foreign + probable
                retry_after_ms = wait_ms(
                    counted, before, quota - cost, strict_until_ms - ends_ms, duration_ms
                )
            else:
                retry_after_ms = self._wait_ms(
                    subject, sequence, current.total() + probable, quota - cost, now_ms, duration_ms
                )
        if not self._shares:
            denial = Decision(False, limit, 0, now_ms, effective, retry_after_ms, source, -1, -1)
            if subject.strict_until_ms == strict_until_ms:
                # Not after time stepped back: the deadline is what tells at which instant this was said.
                subject.denial = denial
                subject.denied_cost = cost
            return denial
        self._count_source(source)
        if source == ORIGIN:
            self.denied_from_origin += 1
        shared = current.shared
        if shared is not None and (quota < shared.limit_min or shared.limit_min == 0):
            self._note_limit(subject, current, shared, limit, now_ms)
        return Decision(
            False,
            limit,
            0,
            now_ms,
            effective,
            retry_after_ms,
            source,
            self._regional_age_ms(current, now_ms),
            self._global_age_ms(now_ms),
        )

    def _wait_ms(
        self, subject: Subject, sequence: int, current: int, room: int, now_ms: int, duration_ms: int
    ) -> int:
        """The wait when later cells are known already, because clocks differ: cell after cell."""
        previous = self._total_at(subject, sequence - 1)
        start_ms = sequence * duration_ms
        elapsed_ms = now_ms - start_ms
        while True:
            earliest_ms = earliest_fit(current, previous, room, elapsed_ms, duration_ms)
            if 0 <= earliest_ms < duration_ms:
                return start_ms + earliest_ms - now_ms
            sequence += 1
            start_ms += duration_ms
            elapsed_ms = 0
            previous = current
            current = self._total_at(subject, sequence)

    def _total_at(self, subject: Subject, sequence: int) -> int:
        cell = subject.cell(sequence)
        return 0 if cell is None else cell.total()

    def _regional_age_ms(self, cell: Cell, now_ms: int) -> int:
        shared = cell.shared
        if not self._has_origin or shared is None or shared.heard_at_ms < 0:
            return -1
        age_ms = now_ms - shared.heard_at_ms
        return age_ms if age_ms > 0 else 0

    def _global_age_ms(self, now_ms: int) -> int:
        if not self.has_ledger or self.imported_at_ms < 0:
            return -1
        age_ms = now_ms - self.imported_at_ms
        return age_ms if age_ms > 0 else 0

    def _count_source(self, source: int) -> None:
        if source == ORIGIN:
            self.from_origin += 1
        elif source == DEGRADED:
            self.from_degraded += 1

    def _effective(self, subject: Subject, current: Cell, now_ms: int, duration_ms: int) -> int:
        """What counts at `now_ms` before any cost."""
        effective = current.total()
        previous = subject.cell(current.sequence - 1)
        if previous is not None:
            elapsed_ms = now_ms - current.sequence * duration_ms
            effective += carried(previous.total(), elapsed_ms, duration_ms)
        return effective

    # -- batches

    def decide_many(
        self, requests: Sequence[tuple[Limit, str, int]], now_ms: int, source: int = LOCAL
    ) -> tuple[list[Decision] | None, list[Need]]:
        """Decide a batch of (limit, identifier, cost) at one instant, all or nothing, in one step.

        Items are judged in order, each seeing the cost of the earlier ones on its own counter; if all fit, each is
        judged once more on the final state, so that the order of items decides nothing. When one is certain to
        fail nothing is read.
        """
        items: list[Item] = []
        # Most items of a batch are under the limit of the one before.
        key: object = None
        table: Table | None = None
        for limit, identifier, cost in requests:
            sequence = now_ms // limit.duration_ms
            if limit.key is not key or table is None:
                key = limit.key
                table = self._tables.get(key)
            subject = None if table is None else table.find(identifier)
            if subject is None:
                # Room is made after the batch: a subject of this batch must not be evicted by a later one.
                subject = self.subjects.create(limit.key, identifier, sequence, now_ms)
            items.append(Item(limit, cost, subject, self._cell(subject, sequence, limit.duration_ms)))

        pending: dict[Subject, int] = {}
        allowed = True
        for item in items:
            item.state = self._effective(item.subject, item.cell, now_ms, item.limit.duration_ms)
            item.demand = pending.get(item.subject, 0) + item.cost
            if item.state + item.demand > item.limit.quota:
                allowed = False
            else:
                pending[item.subject] = item.demand
        if allowed and len(pending) < len(items):
            for item in items:
                demand = pending[item.subject]
                if item.state + demand > item.limit.quota:
                    allowed = False
                    item.demand = demand

        if allowed and self._has_origin and source == LOCAL:
            needs = self._needs(items, now_ms)
            if needs:
                return None, needs
        if allowed and self._anticipates:
            allowed = self._fits_probably(items, pending, now_ms)
        decisions = self._answer(items, allowed, now_ms, source)
        for _ in items:
            # Once each, for the expiry work; the batch is done, so that its own subjects may go like any other.
            self.subjects.make_room(now_ms, None)
        return decisions, []

    def _needs(self, items: list[Item], now_ms: int) -> list[Need]:
        needs: list[Need] = []
        for item in items:
            subject = item.subject
            shared = item.cell.shared
            assert shared is not None
            if now_ms >= shared.fresh_until_ms or now_ms < subject.strict_until_ms:
                need = self._need(subject, item.cell, shared, item.cell.sequence, now_ms)
                if need is not None and all(known.subject is not subject for known in needs):
                    needs.append(need)
        return needs

    def _fits_probably(self, items: list[Item], pending: dict[Subject, int], now_ms: int) -> bool:
        """Does a batch that fits still do so with what foreign regions have probably done since? Marks who does not."""
        fits = True
        for item in items:
            shared = item.cell.shared
            assert shared is not None
            probable = shared.anticipated(now_ms, self.anticipation_ms_max, self.growth_since_ms)
            if probable and item.state + pending[item.subject] + probable > item.limit.quota:
                item.probable = probable
                fits = False
        return fits

    def _answer(self, items: list[Item], allowed: bool, now_ms: int, source: int) -> list[Decision]:
        decisions: list[Decision] = []
        for item in items:
            limit = item.limit
            subject = item.subject
            current = item.cell
            effective = item.state + item.demand
            if effective > limit.quota or item.probable:
                before = self._total_at(subject, current.sequence - 1)
                decisions.append(
                    self._deny(
                        subject, current, before, limit, item.demand, now_ms, effective, item.probable, source
                    )
                )
            else:
                # In a failed batch nothing is consumed, by no item: that is what remains.
                remaining = limit.quota - (effective if allowed else item.state)
                shared = current.shared
                if (
                    not allowed
                    and shared is not None
                    and (limit.quota < shared.limit_min or not shared.limit_min)
                ):
                    self._note_limit(subject, current, shared, limit, now_ms)
                decisions.append(self._fits(subject, current, limit, now_ms, effective, remaining, source))
        if allowed:
            for item in items:
                item.cell.own += item.cost
            for item in items:
                self._settle(item, now_ms)
        return decisions

    def _fits(
        self,
        subject: Subject,
        current: Cell,
        limit: Limit,
        now_ms: int,
        effective: int,
        remaining: int,
        source: int,
    ) -> Decision:
        shared = current.shared
        if self._has_origin and shared is not None and source == LOCAL and now_ms < shared.failed_until_ms:
            heard_since = shared.heard_at_ms >= shared.failed_until_ms - self._retry_ms
            if not heard_since or now_ms < subject.strict_until_ms:
                source = DEGRADED
        self._count_source(source)
        self.allowed += 1
        return Decision(
            True,
            limit,
            remaining,
            now_ms,
            effective,
            0,
            source,
            self._regional_age_ms(current, now_ms),
            self._global_age_ms(now_ms),
        )

    def _settle(self, item: Item, now_ms: int) -> None:
        limit = item.limit
        subject = item.subject
        shared = item.cell.shared
        if shared is not None:
            if item.cost:
                self._note(subject, item.cell, shared, limit, now_ms)
            elif limit.quota < shared.limit_min or shared.limit_min == 0:
                self._note_limit(subject, item.cell, shared, limit, now_ms)
        if now_ms - subject.touched_ms >= self._touch_ms:
            self._touch(subject, now_ms)
