"""The decision: which requests are allowed, from what this node knows, or what must come first.

With credit (docs/adr/0015-credit.md) `decide` and `decide_all` return decisions, or a `Ticket` for what this node holds
too little credit for: the driver queues it with `CreditSync`, which decides it when the origin has answered. Without
credit `decide` and `decide_many` return decisions, or the reads that the rules of freshness ask for: the driver reads,
gives the answers to `OriginSync`, and asks again with the `source` it has by then.

Check and commit are one step: nothing that is called between them can start another decision. The engine knows no
clock, no lock and no I/O. One driver owns it, and lets one thread in at a time.

Three times. `now_ms` is the request's, which may be its own: it chooses the cells and how much they weigh. `wall_ms`
is the node's: it decides what is fresh, what has expired and what was used last, because a request must not age what
others use. `clock_ms` never steps back: credit expires by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from tidegate.core._native import mypyc_attr
from tidegate.core.cells import BLOCKED, CLEAN, PINNED, Cell, Subject
from tidegate.core.credit import Credit
from tidegate.core.generations import cell_name
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
from tidegate.core.pending import Pending
from tidegate.core.reservations import Reservations
from tidegate.core.resets import Resets
from tidegate.core.subjects import Subjects
from tidegate.core.table import Table
from tidegate.core.tickets import Ticket
from tidegate.core.views import GlobalView, LedgerView, OriginView
from tidegate.core.windows import earliest_fit, effective, wait_ms

__all__ = ["COLD", "DENIED", "FITS", "HELD", "STALE", "STRICT", "Engine", "Evaluation", "Need"]

# Why a read is needed.
COLD: Final = "cold"  # the origin has not answered for this cell yet
STALE: Final = "stale"  # its last answer is too old
STRICT: Final = "strict"  # denied recently, so that the latest counts of other nodes matter

# Verdicts on a request. The highest one among the items of a batch decides about the batch.
FITS: Final = 0
UNLIKELY: Final = 1  # does not fit, if other regions went on as the last imports saw them
HELD: Final = 2  # does not fit beside what other nodes hold credit for
UNKNOWN: Final = 3  # may fit, but the origin did not answer when it should have, and the limit denies then
UNREAD: Final = 4  # may fit, but the origin must be read first
DENIED: Final = 5  # does not fit; cells only grow, so no read could change that

# Cells that a subject may keep while its clock jumps. With more, the aged ones are dropped.
CELLS_MAX: Final = 11


@final
@mypyc_attr(acyclic=True)
class Need:
    """What must be read before a decision: one or two cells of one subject, in one round trip."""

    __slots__ = ("acked", "cells", "reason", "subject", "wanted")

    def __init__(self, reason: str, subject: Subject, cells: list[Cell], wanted: list[Component]) -> None:
        self.reason: Final[str] = reason
        self.subject: Final[Subject] = subject
        self.cells: Final[list[Cell]] = cells
        self.wanted: Final[list[Component]] = wanted
        # What the origin had acknowledged of each cell when it was asked. An answer with less shows a loss.
        self.acked: Final[list[int]] = [0 if cell.origin is None else cell.origin.acked for cell in cells]


@final
@mypyc_attr(acyclic=True, free_list_len=1)
class Evaluation:
    """One request while it is judged."""

    __slots__ = (
        "before",
        "beside",
        "cell",
        "cost",
        "demand",
        "limit",
        "now_ms",
        "retry_ms",
        "source",
        "subject",
        "used",
        "verdict",
        "wall_ms",
    )

    def __init__(
        self,
        limit: Limit,
        cost: int,
        now_ms: int,
        wall_ms: int,
        source: int,
        subject: Subject,
        cell: Cell,
        before: int,
        used: int,
    ) -> None:
        self.limit: Final[Limit] = limit
        self.cost: Final[int] = cost
        self.now_ms: Final[int] = now_ms
        self.wall_ms: Final[int] = wall_ms
        self.subject: Final[Subject] = subject
        self.cell: Final[Cell] = cell
        # The count of the previous cell, and what counts in the sliding window without this request.
        self.before: Final[int] = before
        self.used: Final[int] = used
        # What must fit beside `used`: the cost, and in a batch the costs of earlier items for the same subject.
        self.demand: int = cost
        self.source: Final[int] = source
        self.verdict: int = FITS
        # Of a HELD one: what waiting requests of other nodes were granted, and when more is known; -1 when that is
        # found from the counts.
        self.beside: int = 0
        self.retry_ms: int = -1


@final
class Engine:
    """One node's decisions.

    `has_origin` and `has_ledger` say which layers exist; without either, nothing is read, replayed or published.
    `has_credit`: nothing is accepted without credit from the origin; otherwise freshness decides when it is read.
    """

    __slots__ = (
        "_anticipates",
        "_fresh_ms",
        "_guess_check_ms",
        "_retry_ms",
        "_tables",
        "_touch_ms",
        "allowed",
        "denied",
        "denied_from_origin",
        "exceeded_in_shadow",
        "from_degraded",
        "from_origin",
        "global_view",
        "has_credit",
        "is_embedded",
        "message_number",
        "node_id",
        "pending",
        "reservations",
        "resets",
        "strict_activations",
        "subjects",
    )

    def __init__(
        self,
        tuning: Tuning,
        *,
        node_id: str,
        has_origin: bool = False,
        has_ledger: bool = False,
        has_credit: bool = False,
    ) -> None:
        self.node_id: Final[str] = node_id
        self.is_embedded: Final[bool] = not has_origin and not has_ledger
        self.has_credit: Final[bool] = has_origin and has_credit
        # Of the last message to the origin, over all subjects. Written by `CreditSync`.
        self.message_number: int = 0
        self._fresh_ms: Final[int] = tuning.fresh_ms
        self._retry_ms: Final[int] = tuning.read_retry_ms
        self._touch_ms: Final[int] = tuning.touch_ms
        self._anticipates: Final[bool] = tuning.anticipation
        self._guess_check_ms: Final[int] = tuning.import_busy_interval_ms
        self.subjects: Final[Subjects] = Subjects(tuning, has_origin=has_origin, has_ledger=has_ledger)
        self._tables: Final[dict[object, Table]] = self.subjects.tables
        self.reservations: Final[Reservations] = Reservations(self.subjects)
        self.global_view: Final[GlobalView] = GlobalView(tuning.import_interval_ms)
        self.pending: Final[Pending] = Pending(self.subjects, self.global_view, tuning)
        self.resets: Final[Resets] = Resets(self.subjects, self.pending)

        self.allowed: int = 0
        self.denied: int = 0
        # Of those: decisions after a read, denials among them, and decisions whose read had failed.
        self.from_origin: int = 0
        self.denied_from_origin: int = 0
        self.from_degraded: int = 0
        self.strict_activations: int = 0
        # Requests that limits in shadow mode would have denied. They count as allowed.
        self.exceeded_in_shadow: int = 0

    # -- one request

    def decide(
        self,
        limit: Limit,
        identifier: str,
        cost: int,
        now_ms: int,
        source: int = LOCAL,
        clock_ms: int = 0,
        wall_ms: int = -1,
    ) -> Decision | Need | Ticket:
        """Decide one request at `now_ms`. With a `source` other than LOCAL the driver has tried to read.

        `clock_ms` is a clock that never steps back; only credit needs it. Without a `wall_ms` the request's time is the
        node's. `Gate` has checked the types and the cost; the identifier's length is checked when its subject is
        created.
        """
        if wall_ms < 0:
            wall_ms = now_ms
        if self.is_embedded:
            known = self.decide_known(limit, identifier, cost, now_ms)
            if known is not None:
                return known
        duration_ms = limit.duration_ms
        sequence = now_ms // duration_ms
        subject = self.subjects.find(limit.key, identifier)
        if subject is None:
            subject = self._create(limit, identifier, sequence, wall_ms)
        if subject.sequence == sequence:
            cell = subject.current
            previous = subject.previous
        else:
            cell = self._cell(subject, sequence, duration_ms, wall_ms)
            previous = subject.cell(sequence - 1)
        used = cell.own + cell.others + cell.foreign
        before = 0
        if previous is not None:
            before = previous.own + previous.others + previous.foreign
            used = effective(used, before, now_ms - sequence * duration_ms, duration_ms)
        if subject.reserved > 0:
            used += self._reserved(subject, wall_ms)
        if source == ORIGIN:
            source = self._after_read(cell)
        quota = limit.quota
        needed = used + cost
        verdict = self._judge(subject, cell, limit, needed, now_ms, wall_ms, source)
        if verdict == FITS:
            if self.has_credit:
                credit = subject.credit
                if credit is None or not credit.covers(cost, quota, now_ms, clock_ms):
                    return self._ask(limit, identifier, cost, now_ms, clock_ms, wall_ms, subject)
                if cost > 0:
                    credit.spend(cost, clock_ms)
                    if credit.is_low():
                        self.pending.queue_ask(subject)
            cell.own += cost
            if wall_ms - subject.touched_ms >= self._touch_ms:
                self._touch(subject, wall_ms)
            self.pending.note(subject, cell, limit, now_ms, cost > 0)
            return self._allow(subject, cell, limit, quota - needed, needed, now_ms, wall_ms, source)
        if cost == 0 and self.has_credit:
            self._look_again(subject, clock_ms)
        item = Evaluation(limit, cost, now_ms, wall_ms, source, subject, cell, before, used)
        item.verdict = verdict
        return self._need(item) if verdict == UNREAD else self._deny(item)

    def decide_known(self, limit: Limit, identifier: str, cost: int, now_ms: int) -> Decision | None:
        """`decide`, for an embedded limiter and the usual request; None for every other one, and nothing is changed.

        Usual: the subject is known, in its running cell, and allowed, or denied and not for the first time.
        Compiled, this is one step without a lock: it looks up plain strings, adds integers and makes one object that
        the garbage collector does not follow, so that nothing in it gives up the GIL or runs Python code. The caller
        gives a plain str. `tests/core/test_one_step.py` follows the calls of the compiled function.
        """
        table = self._tables.get(limit.key)
        if table is None:
            return None
        subject = table.whole.get(identifier) if table.mask == 0 else table.find(identifier)
        if subject is None or subject.reserved > 0:
            return None
        duration_ms = limit.duration_ms
        sequence = now_ms // duration_ms
        if subject.sequence != sequence or now_ms - subject.touched_ms >= self._touch_ms:
            return None
        cell = subject.current
        needed = cell.own + cost
        previous = subject.previous
        if previous is not None:
            needed = effective(needed, previous.own, now_ms - sequence * duration_ms, duration_ms)
        remaining = limit.quota - needed
        if remaining >= 0:
            cell.own += cost
            self.allowed += 1
            return Decision(True, limit, remaining, now_ms, needed, 0, LOCAL, -1, -1)
        strict_until_ms = now_ms + duration_ms
        room = limit.quota - cost
        if subject.queue != BLOCKED or not now_ms < subject.strict_until_ms <= strict_until_ms or room < 0:
            return None
        # `_deny`, for a subject that has been denied before.
        subject.strict_until_ms = strict_until_ms
        if limit.shadow:
            self.allowed += 1
            self.exceeded_in_shadow += 1
        else:
            self.denied += 1
        before = 0 if previous is None else previous.own
        retry_after_ms = wait_ms(cell.own, before, room, now_ms - sequence * duration_ms, duration_ms)
        return Decision(False, limit, 0, now_ms, needed, retry_after_ms, LOCAL, -1, -1)

    def _ask(
        self,
        limit: Limit,
        identifier: str,
        cost: int,
        now_ms: int,
        clock_ms: int,
        wall_ms: int,
        subject: Subject,
    ) -> Decision | Ticket:
        """A request for which there is no credit waits for the origin, unless that has just failed to answer."""
        items = [(limit, identifier, cost)]
        if subject.credit is not None and clock_ms < subject.credit.failed_until_ms:
            return self.decide_degraded(items, now_ms, clock_ms, wall_ms)[0]
        return Ticket(items, [subject], now_ms, clock_ms, wall_ms)

    def _look_again(self, subject: Subject, clock_ms: int) -> None:
        """A peek at a counter that is used up: requests are denied without a message, so nothing else would bring what
        other regions have counted since. The answer is for the next peek."""
        credit = self.credit_of(subject)
        if clock_ms >= credit.until_ms and clock_ms >= credit.failed_until_ms:
            self.pending.queue_ask(subject)

    def _create(self, limit: Limit, identifier: str, sequence: int, wall_ms: int) -> Subject:
        name = checked_name("identifier", identifier)
        if self.subjects.has_lost_foreign:
            self.global_view.is_full_import_wanted = True
        subject = self.subjects.create(limit.key, name, sequence, wall_ms)
        self.subjects.make_room(wall_ms, subject)
        self.pending.prune()
        return subject

    # -- batches

    def decide_many(
        self,
        requests: Sequence[tuple[Limit, str, int]],
        now_ms: int,
        source: int = LOCAL,
        wall_ms: int = -1,
    ) -> tuple[list[Decision] | None, list[Need]]:
        """Decide a batch of (limit, identifier, cost) at one instant, all or nothing, in one step.

        Items are judged in order, each with the costs of the earlier ones for its subject; if all may fit, each is
        judged once more on the final state, so that the order of items decides nothing. When one is certain to
        fail, nothing is read.
        """
        if wall_ms < 0:
            wall_ms = now_ms
        items = self.evaluate(requests, now_ms, source, wall_ms)
        verdict = self.judge_all(items)
        if verdict == UNREAD:
            return None, self._needs(items)
        decisions = self.answer_all(items, verdict, 0)
        self._make_room(len(items), wall_ms)
        return decisions, []

    def decide_all(
        self, requests: Sequence[tuple[Limit, str, int]], now_ms: int, clock_ms: int, wall_ms: int
    ) -> list[Decision] | Ticket:
        """`decide_many` with credit: decide the batch from memory, or return what waits for the origin.

        Credit must cover the whole batch: for each subject the sum of its costs.
        """
        items = self.evaluate(requests, now_ms, LOCAL, wall_ms)
        verdict = self.judge_all(items)
        if verdict == FITS:
            lacking = self.lacking(items, clock_ms)
            if lacking:
                for subject, _, _ in lacking:
                    credit = subject.credit
                    if credit is not None and clock_ms < credit.failed_until_ms:
                        return self.decide_degraded(requests, now_ms, clock_ms, wall_ms)
                return Ticket(list(requests), [item.subject for item in items], now_ms, clock_ms, wall_ms)
        decisions = self.answer_all(items, verdict, clock_ms)
        self._make_room(len(items), wall_ms)
        return decisions

    def decide_degraded(
        self, requests: Sequence[tuple[Limit, str, int]], now_ms: int, clock_ms: int, wall_ms: int
    ) -> list[Decision]:
        """Decide from memory, because the origin does not answer."""
        items = self.evaluate(requests, now_ms, DEGRADED, wall_ms)
        decisions = self.answer_all(items, self.judge_all(items), clock_ms)
        self._make_room(len(items), wall_ms)
        return decisions

    def evaluate(
        self, requests: Sequence[tuple[Limit, str, int]], now_ms: int, source: int, wall_ms: int
    ) -> list[Evaluation]:
        """What counts for each request of a batch, without the others."""
        items: list[Evaluation] = []
        for limit, identifier, cost in requests:
            duration_ms = limit.duration_ms
            sequence = now_ms // duration_ms
            subject = self.subjects.find(limit.key, identifier)
            if subject is None:
                if self.subjects.has_lost_foreign:
                    self.global_view.is_full_import_wanted = True
                # Room is made after the batch: a later item must not evict the subject of an earlier one.
                subject = self.subjects.create(limit.key, identifier, sequence, wall_ms)
            cell = self._cell(subject, sequence, duration_ms, wall_ms)
            previous = subject.cell(sequence - 1)
            before = 0 if previous is None else previous.total()
            used = effective(cell.total(), before, now_ms - sequence * duration_ms, duration_ms)
            if subject.reserved > 0:
                used += self._reserved(subject, wall_ms)
            heard = self._after_read(cell) if source == ORIGIN else source
            items.append(Evaluation(limit, cost, now_ms, wall_ms, heard, subject, cell, before, used))
        return items

    def lacking(self, items: list[Evaluation], clock_ms: int) -> list[tuple[Subject, int, int]]:
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

    def answer_all(self, items: list[Evaluation], verdict: int, clock_ms: int) -> list[Decision]:
        """The decisions on a batch that got `verdict`; consumes it if it fits.

        What is allowed without an answer of the origin is counted, and spends no credit.
        """
        if verdict == FITS:
            for item in items:
                item.cell.own += item.cost
                if item.cost > 0 and self.has_credit:
                    credit = self.credit_of(item.subject)
                    if item.source == DEGRADED:
                        credit.count_without(item.cost, clock_ms)
                    else:
                        credit.spend(item.cost, clock_ms)
                        if credit.is_low():
                            self.pending.queue_ask(item.subject)
        return [self._answer(item, verdict) for item in items]

    def credit_of(self, subject: Subject) -> Credit:
        credit = subject.credit
        if credit is None:
            credit = Credit()
            subject.credit = credit
        return credit

    def _make_room(self, times: int, wall_ms: int) -> None:
        """Once for each item, for the expiry work. The batch is done, so that its own subjects may be evicted too."""
        for _ in range(times):
            self.subjects.make_room(wall_ms, None)

    def judge_all(self, items: list[Evaluation]) -> int:
        """The verdict on a batch: the highest one of its items."""
        demands: dict[Subject, int] = {}
        highest = FITS
        for item in items:
            item.demand += demands.get(item.subject, 0)
            item.verdict = self._judge_item(item, item.demand)
            if item.verdict != DENIED:
                demands[item.subject] = item.demand
            highest = max(highest, item.verdict)
        if highest != DENIED and len(demands) < len(items):
            for item in items:
                demand = demands[item.subject]
                item.verdict = self._judge_item(item, demand)
                if item.verdict == DENIED:
                    item.demand = demand
                highest = max(highest, item.verdict)
        return highest

    def _judge_item(self, item: Evaluation, demand: int) -> int:
        needed = item.used + demand
        return self._judge(
            item.subject, item.cell, item.limit, needed, item.now_ms, item.wall_ms, item.source
        )

    def _needs(self, items: list[Evaluation]) -> list[Need]:
        """The reads of a batch, one for each subject."""
        unread: dict[Subject, Need] = {}
        for item in items:
            if item.verdict == UNREAD and item.subject not in unread:
                unread[item.subject] = self._need(item)
        return list(unread.values())

    def _answer(self, item: Evaluation, verdict: int) -> Decision:
        """The decision on one item of a batch that got `verdict`."""
        remaining = item.limit.quota - item.used
        if verdict == FITS:
            self.pending.note(item.subject, item.cell, item.limit, item.now_ms, item.cost > 0)
            if item.wall_ms - item.subject.touched_ms >= self._touch_ms:
                self._touch(item.subject, item.wall_ms)
            remaining -= item.demand
        elif item.verdict == verdict:
            return self._deny(item)
        else:
            # It fits, but nothing of a failed batch is consumed: `used` stays as it is.
            self.pending.note(item.subject, item.cell, item.limit, item.now_ms, False)
        return self._allow(
            item.subject,
            item.cell,
            item.limit,
            remaining,
            item.used + item.demand,
            item.now_ms,
            item.wall_ms,
            item.source,
        )

    # -- reservations

    def _reserved(self, subject: Subject, wall_ms: int) -> int:
        self.reservations.expire(wall_ms)
        return subject.reserved

    def reserve(
        self,
        requests: list[tuple[Limit, str, int]],
        name: str,
        now_ms: int,
        wall_ms: int,
        until_ms: int,
        source: int,
    ) -> list[Decision]:
        """Judge a batch, and keep its costs under `name` until `until_ms` if all fit. Counts nothing.

        No decisions: the workspace may hold no more reservations.
        """
        self.reservations.expire(wall_ms)
        if not self.reservations.has_room(requests):
            return []
        items = self.evaluate(requests, now_ms, source, wall_ms)
        verdict = self.judge_all(items)
        if verdict == FITS:
            self.reservations.add(name, requests, until_ms)
        decisions = [self._answer(item, verdict) for item in items]
        self._make_room(len(items), wall_ms)
        return decisions

    def refuse_held(
        self,
        requests: list[tuple[Limit, str, int]],
        beside: list[int],
        retry_ms: int,
        now_ms: int,
        wall_ms: int,
    ) -> list[Decision]:
        """The decisions on a batch that the origin refused: `beside` is what others hold of each, -1 where it fits."""
        items = self.evaluate(requests, now_ms, ORIGIN, wall_ms)
        highest = self.judge_all(items)
        if highest == FITS:
            highest = HELD
            for i, item in enumerate(items):
                if beside[i] >= 0:
                    item.verdict = HELD
                    item.beside = beside[i]
                    if item.used + item.demand + beside[i] <= item.limit.quota:
                        item.retry_ms = retry_ms
        decisions = [self._answer(item, highest) for item in items]
        self._make_room(len(items), wall_ms)
        return decisions

    def count_spent(
        self, requests: list[tuple[Limit, str, int]], now_ms: int, clock_ms: int, wall_ms: int
    ) -> None:
        """Count what was used, beyond the limit too: it is spent."""
        for item in self.evaluate(requests, now_ms, LOCAL, wall_ms):
            if item.cost > 0:
                item.cell.own += item.cost
                if self.has_credit:
                    self.credit_of(item.subject).count_without(item.cost, clock_ms)
                self.pending.note(item.subject, item.cell, item.limit, now_ms, True)
        self._make_room(len(requests), wall_ms)

    def learn_total(self, limit: Limit, identifier: str, sequence: int, total: int) -> None:
        """All nodes of the region have counted `total` in a cell. A cell that is not known is not created."""
        subject = self.subjects.find(limit.key, identifier)
        cell = None if subject is None else subject.cell(sequence)
        if subject is not None and cell is not None and total - cell.own > cell.others:
            cell.others = total - cell.own
            self.pending.queue_publish(subject, cell)

    # -- judging

    def _cell(self, subject: Subject, sequence: int, duration_ms: int, wall_ms: int) -> Cell:
        """The cell of `sequence`; created if there is none. What the clock has not aged out stays."""
        cell = subject.cell(sequence)
        if cell is not None:
            return cell
        if subject.count() >= CELLS_MAX:
            # Time stepped back: `current` is a later cell, and so no new one pushes the aged ones out.
            self.subjects.drop_aged(subject, wall_ms, duration_ms)
        if subject.count() >= CELLS_MAX:
            # Requests with times of their own, far ahead of the clock. Their cells are bounded too.
            self.subjects.drop_aged(subject, sequence * duration_ms, duration_ms)
        sequence_now = wall_ms // duration_ms
        sequence_min = (sequence if sequence < sequence_now else sequence_now) - 2
        return self.subjects.new_cell(subject, sequence, duration_ms, sequence_min, wall_ms)

    def _judge(
        self,
        subject: Subject,
        cell: Cell,
        limit: Limit,
        needed: int,
        now_ms: int,
        wall_ms: int,
        source: int,
    ) -> int:
        """The verdict on a request, for which `needed` is what would count with it."""
        quota = limit.quota
        if needed > quota:
            return DENIED
        origin = cell.origin
        if (
            origin is not None
            and source == LOCAL
            and not self.has_credit
            and (now_ms < subject.strict_until_ms or origin.is_stale(wall_ms, self._fresh_ms, self._retry_ms))
            and not origin.is_paused(wall_ms, self._retry_ms)
        ):
            return UNREAD
        if limit.denies_on_outage and origin is not None:
            if source == LOCAL:
                source = self._source(subject, origin, now_ms, wall_ms)
            if source == DEGRADED:
                return UNKNOWN
        ledger = cell.ledger
        if ledger is not None and needed + self._probable(ledger, wall_ms) > quota:
            return UNLIKELY
        return FITS

    def _probable(self, ledger: LedgerView, wall_ms: int) -> int:
        """What other regions have probably accepted in a cell since the last import."""
        if ledger.growth is None or not self._anticipates:
            return 0
        view = self.global_view
        return ledger.growth.expected(wall_ms, view.anticipation_ms_max, view.growth_since_ms)

    def _source(self, subject: Subject, origin: OriginView, now_ms: int, wall_ms: int) -> int:
        """DEGRADED if the origin should be read, but the last read has just failed and is not repeated yet.

        Memory is good enough if the origin has answered since that failure, for both cells, but not in strict mode.
        """
        if not origin.is_paused(wall_ms, self._retry_ms):
            return LOCAL
        is_answered = (
            origin.answered_at_ms >= origin.failed_until_ms - self._retry_ms
            and origin.previous_until_ms > origin.failed_until_ms
        )
        return LOCAL if is_answered and now_ms >= subject.strict_until_ms else DEGRADED

    def _after_read(self, cell: Cell) -> int:
        """The source of a decision after the origin was read.

        DEGRADED if it has not answered about this cell or the one before: the subject was evicted during the read or
        after it, came back without what the answer said, and another read would be one too many. With credit the
        decision is made in the step that merges the answer.
        """
        origin = cell.origin
        if self.has_credit or origin is None:
            return ORIGIN
        is_known = origin.answered_at_ms >= 0 and origin.previous_until_ms > origin.failed_until_ms
        return ORIGIN if is_known else DEGRADED

    def _need(self, item: Evaluation) -> Need:
        subject = item.subject
        cell = item.cell
        key = self.subjects.key_of(subject)
        cells = [cell]
        origin = cell.origin
        assert origin is not None
        reason = STRICT
        if origin.is_stale(item.wall_ms, self._fresh_ms, self._retry_ms):
            reason = COLD if origin.answered_at_ms < 0 else STALE
            previous = subject.cell(cell.sequence - 1)
            if previous is None:
                # For the read only, since most are empty: it is kept if the origin has counts of it.
                previous = self.subjects.blank_cell(cell.sequence - 1, key[2])
            cells.append(previous)
        if subject.queue != PINNED:
            # It must not be evicted before the answer comes: the decision would be made without it.
            self.subjects.move(subject, PINNED, item.wall_ms)
        return Need(reason, subject, cells, [self.component(subject, one, key) for one in cells])

    def component(self, subject: Subject, cell: Cell, key: tuple[str, str, int]) -> Component:
        """This node's component of a cell, as the origin stores it."""
        writer = self.writer_of(subject.incarnation)
        name = cell_name(cell.sequence, subject.generation, key[2])
        return Component(subject.digest_of(key), name, writer, cell.own, (cell.sequence + 3) * key[2])

    def writer_of(self, incarnation: int) -> str:
        """This node's name at the origin, for a subject that was created after so many evictions."""
        return f"{self.node_id}~{incarnation}" if incarnation else self.node_id

    # -- answering

    def _touch(self, subject: Subject, wall_ms: int) -> None:
        is_over = subject.queue == BLOCKED and subject.strict_until_ms <= wall_ms
        self.subjects.move(subject, CLEAN if is_over else subject.queue, wall_ms)

    def _allow(
        self,
        subject: Subject,
        cell: Cell,
        limit: Limit,
        remaining: int,
        needed: int,
        now_ms: int,
        wall_ms: int,
        source: int,
    ) -> Decision:
        self.allowed += 1
        regional_age_ms = -1
        origin = cell.origin
        if origin is not None:
            regional_age_ms = origin.age_ms(wall_ms)
            if source == LOCAL:
                source = self._source(subject, origin, now_ms, wall_ms)
            if source != LOCAL:
                self._count_source(source)
        global_age_ms = self.global_view.age_ms(wall_ms)
        return Decision(True, limit, remaining, now_ms, needed, 0, source, regional_age_ms, global_age_ms)

    def _deny(self, item: Evaluation) -> Decision:
        """A denial: nothing is counted, and the subject is strict for one duration.

        Unless it is a guess about other regions (UNLIKELY) or depends on what other nodes do (HELD, UNKNOWN): those are
        not reported as `effective`, and set no strict deadline.
        """
        subject = item.subject
        limit = item.limit
        now_ms = item.now_ms
        wall_ms = item.wall_ms
        duration_ms = limit.duration_ms
        strict_until_ms = now_ms + duration_ms
        if limit.shadow:
            self.allowed += 1
            self.exceeded_in_shadow += 1
        else:
            self.denied += 1
        if item.verdict == DENIED and subject.strict_until_ms < strict_until_ms:
            if subject.strict_until_ms <= now_ms:
                self.strict_activations += 1
            subject.strict_until_ms = strict_until_ms
            if subject.queue == CLEAN:
                self.subjects.move(subject, BLOCKED, wall_ms)
            elif wall_ms - subject.touched_ms >= self._touch_ms:
                self.subjects.move(subject, subject.queue, wall_ms)
        needed = item.used + item.demand
        retry_after_ms = self._retry_after_ms(item, limit.quota - item.demand, duration_ms)
        source = item.source
        origin = item.cell.origin
        regional_age_ms = -1
        if origin is not None:
            regional_age_ms = origin.age_ms(wall_ms)
            if item.verdict != DENIED and source == LOCAL and not self.has_credit:
                source = self._source(subject, origin, now_ms, wall_ms)
        if source == ORIGIN and not limit.shadow:
            self.denied_from_origin += 1
        self._count_source(source)
        self.pending.note(subject, item.cell, limit, now_ms, False)
        if item.verdict == UNLIKELY and self.has_credit:
            self._check_guess(subject, item.cell, wall_ms)
        global_age_ms = self.global_view.age_ms(wall_ms)
        return Decision(
            False, limit, 0, now_ms, needed, retry_after_ms, source, regional_age_ms, global_age_ms
        )

    def _check_guess(self, subject: Subject, cell: Cell, wall_ms: int) -> None:
        """Ask the origin how far other regions have come, as often as it can know more: where one node imports for all,
        only an answer shows that they have stopped, and a subject that denies has nothing else to ask."""
        ledger = cell.ledger
        if ledger is None or ledger.growth is None:
            return
        growth = ledger.growth
        if not 0 <= wall_ms - growth.asked_at_ms < self._guess_check_ms:
            growth.asked_at_ms = wall_ms
            self.pending.queue_ask(subject)

    def _retry_after_ms(self, item: Evaluation, room: int, duration_ms: int) -> int:
        """How long until no more than `room` is used if no other request comes, -1 if `room` is negative."""
        if room < 0:
            return -1
        cell = item.cell
        subject = item.subject
        if item.retry_ms >= 0:
            return item.retry_ms
        if item.verdict == UNKNOWN:
            # More is known after the next read.
            next_read_ms = 0 if cell.origin is None else cell.origin.failed_until_ms - item.wall_ms
            return next_read_ms if next_read_ms > 0 else self._retry_ms
        sequence = cell.sequence
        start_ms = sequence * duration_ms
        elapsed_ms = item.now_ms - start_ms
        # What is reserved may be settled now.
        current = cell.own + cell.others + cell.foreign + item.beside + subject.reserved
        previous = item.before
        if item.verdict == UNLIKELY and cell.ledger is not None:
            # More is known after the next import, which may show that the others went no further.
            current += self._probable(cell.ledger, item.wall_ms)
            until_import_ms = self.global_view.until_import_ms(item.wall_ms)
            until_fit_ms = wait_ms(current, previous, room, elapsed_ms, duration_ms)
            # 0: this item would fit, but not with the rest of its batch.
            return until_fit_ms if 0 < until_fit_ms < until_import_ms else until_import_ms
        if subject.sequence == sequence:
            return wait_ms(current, previous, room, elapsed_ms, duration_ms)
        # Later cells have counts already, because clocks differ: try cell after cell.
        while True:
            earliest_ms = earliest_fit(current, previous, room, elapsed_ms, duration_ms)
            if 0 <= earliest_ms < duration_ms:
                return start_ms + earliest_ms - item.now_ms
            sequence += 1
            start_ms += duration_ms
            elapsed_ms = 0
            previous = current
            later = subject.cell(sequence)
            current = 0 if later is None else later.total()

    def _count_source(self, source: int) -> None:
        if source == ORIGIN:
            self.from_origin += 1
        elif source == DEGRADED:
            self.from_degraded += 1
