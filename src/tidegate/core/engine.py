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

from tidegate.core.cells import BLOCKED, CLEAN, PINNED, Cell, Subject
from tidegate.core.credit import Credit
from tidegate.core.evaluation import DENIED, FITS, HELD, UNLIKELY, UNREAD, Evaluation
from tidegate.core.freshness import STRICT, Freshness, Need
from tidegate.core.judge import Judge, uncovered
from tidegate.core.model import (
    DEGRADED,
    LOCAL,
    ORIGIN,
    Decision,
    Limit,
    Tuning,
)
from tidegate.core.pending import Pending
from tidegate.core.reservations import Reservations
from tidegate.core.resets import Resets
from tidegate.core.subjects import Subjects
from tidegate.core.table import Table
from tidegate.core.tickets import Ticket
from tidegate.core.views import GlobalView
from tidegate.core.windows import effective, wait_ms

__all__ = ["Engine"]


@final
class Engine:
    """One node's decisions.

    `has_origin` and `has_ledger` say which layers exist; without either, nothing is read, replayed or published.
    `has_credit`: nothing is accepted without credit from the origin; otherwise freshness decides when it is read.
    """

    __slots__ = (
        "_freshness",
        "_guess_check_ms",
        "_read_retry_ms",
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
        "judge",
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
        self._freshness: Final[Freshness] = Freshness(tuning, has_credit=self.has_credit)
        self._read_retry_ms: Final[int] = tuning.read_retry_ms
        self._touch_ms: Final[int] = tuning.touch_ms
        self._guess_check_ms: Final[int] = tuning.import_busy_interval_ms
        self.subjects: Final[Subjects] = Subjects(tuning, has_origin=has_origin, has_ledger=has_ledger)
        self._tables: Final[dict[object, Table]] = self.subjects.tables
        self.reservations: Final[Reservations] = Reservations(self.subjects)
        self.global_view: Final[GlobalView] = GlobalView(tuning)
        self.pending: Final[Pending] = Pending(self.subjects, self.global_view, tuning)
        self.resets: Final[Resets] = Resets(self.subjects, self.pending)
        self.judge: Final[Judge] = Judge(
            self.subjects, self.reservations, self.pending, self.global_view, self._freshness
        )

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
        else:
            known = self._decide_warm(limit, identifier, cost, now_ms, source, clock_ms, wall_ms)
        if known is not None:
            return known
        item = self.judge.evaluate(limit, identifier, cost, now_ms, wall_ms, source, False)
        verdict = self.judge.verdict(item, cost)
        item.verdict = verdict
        if verdict == UNREAD:
            return self._need(item)
        if verdict == FITS:
            if self.has_credit:
                credit = item.subject.credit
                if credit is None or not credit.covers(cost, limit.quota, now_ms, clock_ms):
                    answer = self._wait([item], [item.subject], clock_ms)
                    return answer if isinstance(answer, Ticket) else answer[0]
            self._consume(item, clock_ms)
        elif cost == 0 and self.has_credit:
            self._look_again(item.subject, clock_ms)
        return self._answer(item, verdict)

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
        before = 0 if previous is None else previous.own
        return self._deny_again(limit, subject, cost, now_ms, cell.own, before, needed, -1, -1)

    def _deny_again(
        self,
        limit: Limit,
        subject: Subject,
        cost: int,
        now_ms: int,
        current: int,
        before: int,
        needed: int,
        regional_age_ms: int,
        global_age_ms: int,
    ) -> Decision | None:
        """`_deny`, for a subject in its running cell that was denied within the last duration. None, and nothing is
        changed, if it was not, or if the cost never fits."""
        duration_ms = limit.duration_ms
        strict_until_ms = now_ms + duration_ms
        room = limit.quota - cost
        if subject.queue == CLEAN or not now_ms < subject.strict_until_ms <= strict_until_ms or room < 0:
            return None
        subject.strict_until_ms = strict_until_ms
        if limit.shadow:
            self.allowed += 1
            self.exceeded_in_shadow += 1
        else:
            self.denied += 1
        elapsed_ms = now_ms - subject.sequence * duration_ms
        retry_after_ms = wait_ms(current, before, room, elapsed_ms, duration_ms)
        return Decision(
            False, limit, 0, now_ms, needed, retry_after_ms, LOCAL, regional_age_ms, global_age_ms
        )

    def _decide_warm(
        self, limit: Limit, identifier: str, cost: int, now_ms: int, source: int, clock_ms: int, wall_ms: int
    ) -> Decision | None:
        """`decide`, for a limiter with an origin and the usual request; None for every other one: nothing is changed.

        Usual: the subject is known, in its running cell, and memory may decide: it denies, not for the first time, or
        credit covers the request, or the last answer of the origin is fresh. This is the judge's rule without what it
        needs for the other cases.
        """
        subject = self.subjects.find(limit.key, identifier)
        if subject is None or subject.reserved > 0 or cost == 0 or source != LOCAL:
            return None
        duration_ms = limit.duration_ms
        sequence = now_ms // duration_ms
        if subject.sequence != sequence or wall_ms - subject.touched_ms >= self._touch_ms:
            return None
        cell = subject.current
        origin = cell.origin
        ledger = cell.ledger
        if (
            origin is None
            or wall_ms < origin.failed_until_ms
            or (ledger is not None and ledger.growth is not None)
        ):
            return None
        current = cell.total()
        needed = current + cost
        before = 0
        previous = subject.previous
        if previous is not None:
            before = previous.total()
            needed = effective(needed, before, now_ms - sequence * duration_ms, duration_ms)
        remaining = limit.quota - needed
        regional_age_ms = origin.age_ms(wall_ms)
        global_age_ms = self.global_view.age_ms(wall_ms)
        if remaining < 0:
            denial = self._deny_again(
                limit, subject, cost, now_ms, current, before, needed, regional_age_ms, global_age_ms
            )
            if denial is not None:
                self.pending.note(subject, cell, limit, now_ms, wall_ms, False)
            return denial
        if self.has_credit:
            credit = subject.credit
            if credit is None or not credit.can_spend(cost, limit.quota, now_ms, clock_ms):
                return None
            credit.spend(cost, clock_ms)
            if credit.is_low():
                self.pending.queue_ask(subject)
        elif self._freshness.must_read(subject, cell, now_ms, wall_ms):
            return None
        cell.own += cost
        self.pending.note(subject, cell, limit, now_ms, wall_ms, True)
        self.allowed += 1
        return Decision(True, limit, remaining, now_ms, needed, 0, LOCAL, regional_age_ms, global_age_ms)

    def _look_again(self, subject: Subject, clock_ms: int) -> None:
        """A peek at a counter that is used up: requests are denied without a message, so nothing else would bring what
        other regions have counted since. The answer is for the next peek."""
        credit = self.credit_of(subject)
        if clock_ms >= credit.until_ms and clock_ms >= credit.failed_until_ms:
            self.pending.queue_ask(subject)

    # -- batches

    def decide_many(
        self,
        requests: Sequence[tuple[Limit, str, int]],
        now_ms: int,
        source: int = LOCAL,
        wall_ms: int = -1,
        wants_needs: bool = True,
    ) -> tuple[list[Decision] | None, list[Need]]:
        """Decide a batch of (limit, identifier, cost) at one instant, all or nothing, in one step.

        None when something must be read first, and what that is if the caller `wants_needs`.

        Items are judged in order, each with the costs of the earlier ones for its subject; if all may fit, each is
        judged once more on the final state, so that the order of items decides nothing. When one is certain to
        fail, nothing is read.
        """
        if wall_ms < 0:
            wall_ms = now_ms
        items = self.judge.evaluate_all(requests, now_ms, source, wall_ms)
        verdict = self.judge.verdict_of_all(items)
        if verdict == UNREAD:
            return None, self._needs(items) if wants_needs else []
        return self._finish(items, verdict, 0), []

    def decide_all(
        self, requests: Sequence[tuple[Limit, str, int]], now_ms: int, clock_ms: int, wall_ms: int
    ) -> list[Decision] | Ticket:
        """`decide_many` with credit: decide the batch from memory, or return what waits for the origin.

        Credit must cover the whole batch: for each subject the sum of its costs.
        """
        items = self.judge.evaluate_all(requests, now_ms, LOCAL, wall_ms)
        verdict = self.judge.verdict_of_all(items)
        if verdict == FITS:
            lacking = uncovered(items, clock_ms)
            if lacking:
                return self._wait(items, [subject for subject, _, _ in lacking], clock_ms)
        return self._finish(items, verdict, clock_ms)

    def _wait(
        self, items: list[Evaluation], lacking: list[Subject], clock_ms: int
    ) -> list[Decision] | Ticket:
        """What credit does not cover waits for the origin, unless that has just failed to answer."""
        requests = [(item.limit, item.subject.identifier, item.cost) for item in items]
        now_ms = items[0].now_ms
        wall_ms = items[0].wall_ms
        for subject in lacking:
            credit = subject.credit
            if credit is not None and clock_ms < credit.failed_until_ms:
                return self.decide_degraded(requests, now_ms, clock_ms, wall_ms)
        return Ticket(requests, [item.subject for item in items], now_ms, clock_ms, wall_ms)

    def decide_degraded(
        self, requests: Sequence[tuple[Limit, str, int]], now_ms: int, clock_ms: int, wall_ms: int
    ) -> list[Decision]:
        """Decide from memory, because the origin does not answer."""
        items = self.judge.evaluate_all(requests, now_ms, DEGRADED, wall_ms)
        return self._finish(items, self.judge.verdict_of_all(items), clock_ms)

    def _finish(self, items: list[Evaluation], verdict: int, clock_ms: int) -> list[Decision]:
        decisions = self.answer_all(items, verdict, clock_ms)
        self._make_room(items)
        return decisions

    def _make_room(self, items: list[Evaluation]) -> None:
        """The batch is done, so that its own subjects may be evicted too."""
        if items:
            self.subjects.make_room(items[0].wall_ms, None)

    def answer_all(self, items: list[Evaluation], verdict: int, clock_ms: int) -> list[Decision]:
        """The decisions on a batch that got `verdict`; consumes it if it fits."""
        if verdict == FITS:
            for item in items:
                self._consume(item, clock_ms)
        return [self._answer(item, verdict) for item in items]

    def _needs(self, items: list[Evaluation]) -> list[Need]:
        """The reads of a batch, one for each subject."""
        unread: dict[Subject, Need] = {}
        for item in items:
            if item.verdict == UNREAD and item.subject not in unread:
                unread[item.subject] = self._need(item)
        return list(unread.values())

    # -- reservations

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
        items = self.judge.evaluate_all(requests, now_ms, source, wall_ms)
        verdict = self.judge.verdict_of_all(items)
        if verdict == FITS:
            self.reservations.add(name, requests, until_ms, self.has_credit and source == ORIGIN)
        decisions = [self._answer(item, verdict) for item in items]
        self._make_room(items)
        return decisions

    def refuse_held(
        self,
        requests: list[tuple[Limit, str, int]],
        held: list[tuple[int, int] | None],
        retry_ms: int,
        now_ms: int,
        wall_ms: int,
    ) -> list[Decision]:
        """The decisions on a batch that the origin refused: `firm` and `following` of replies, None for what fits."""
        items = self.judge.evaluate_all(requests, now_ms, ORIGIN, wall_ms)
        decisions = self.answer_held(items, held, retry_ms)
        self._make_room(items)
        return decisions

    def answer_held(
        self, items: list[Evaluation], held: list[tuple[int, int] | None], retry_ms: int
    ) -> list[Decision]:
        """`refuse_held`, for a batch that was evaluated."""
        highest = self.judge.verdict_of_all(items)
        if highest == FITS:
            highest = HELD
            for item, one in zip(items, held, strict=True):
                if one is not None:
                    item.hold(one[0], one[1], retry_ms)
        return [self._answer(item, highest) for item in items]

    def count_spent(
        self, requests: list[tuple[Limit, str, int]], now_ms: int, clock_ms: int, wall_ms: int
    ) -> None:
        """Count what was used, beyond the limit too: it is spent. No credit was granted for it, as in an outage."""
        items = self.judge.evaluate_all(requests, now_ms, DEGRADED, wall_ms)
        for item in items:
            self._consume(item, clock_ms)
            if item.cost > 0:
                self._note(item, True)
        self._make_room(items)

    def learn_total(self, limit: Limit, identifier: str, sequence: int, total: int) -> None:
        """All nodes of the region have counted `total` in a cell. A cell that is not known is not created."""
        subject = self.subjects.find(limit.key, identifier)
        cell = None if subject is None else subject.cell(sequence)
        if subject is not None and cell is not None and total - cell.own > cell.others:
            cell.others = total - cell.own
            self.pending.queue_publish(subject, cell)

    # -- asking the origin

    def _need(self, item: Evaluation) -> Need:
        subject = item.subject
        cell = item.cell
        key = self.subjects.key_of(subject)
        cells = [cell]
        reason = self._freshness.reason_for(item)
        if reason != STRICT:
            previous = subject.cell(cell.sequence - 1)
            if previous is None:
                # For the read only, since most are empty: it is kept if the origin has counts of it.
                previous = self.subjects.blank_cell(cell.sequence - 1, key[2])
            cells.append(previous)
        if subject.queue != PINNED:
            # It must not be evicted before the answer comes: the decision would be made without it.
            self.subjects.move(subject, PINNED, item.wall_ms)
        return Need(reason, subject, cells, key, self.writer_of(subject.incarnation))

    def writer_of(self, incarnation: int) -> str:
        """This node's name at the origin, for a subject that was created after so many evictions."""
        return f"{self.node_id}~{incarnation}" if incarnation else self.node_id

    def credit_of(self, subject: Subject) -> Credit:
        """The credit of a subject, empty if it has none yet."""
        credit = subject.credit
        if credit is None:
            credit = Credit()
            subject.credit = credit
        return credit

    # -- answering

    def _consume(self, item: Evaluation, clock_ms: int) -> None:
        """Count the cost. What is allowed without an answer of the origin spends no credit."""
        item.cell.own += item.cost
        if item.cost > 0 and self.has_credit:
            credit = self.credit_of(item.subject)
            if item.source == DEGRADED:
                credit.count_without(item.cost, clock_ms)
            else:
                credit.spend(item.cost, clock_ms)
                if credit.is_low():
                    self.pending.queue_ask(item.subject)

    def _answer(self, item: Evaluation, verdict: int) -> Decision:
        """The decision on a request that got `verdict`, alone or with the rest of its batch."""
        if verdict != FITS and item.verdict == verdict:
            return self._deny(item)
        remaining = item.limit.quota - item.used
        if verdict == FITS:
            remaining -= item.demand
            self._note(item, item.cost > 0)
            if item.wall_ms - item.subject.touched_ms >= self._touch_ms:
                self._touch(item.subject, item.wall_ms)
        else:
            # It fits, but nothing of a failed batch is consumed: `used` stays as it is.
            self._note(item, False)
        self.allowed += 1
        return self._decision(item, True, remaining, 0, self._freshness.source_of(item))

    def _note(self, item: Evaluation, has_grown: bool) -> None:
        self.pending.note(item.subject, item.cell, item.limit, item.now_ms, item.wall_ms, has_grown)

    def _touch(self, subject: Subject, wall_ms: int) -> None:
        is_over = subject.queue == BLOCKED and subject.strict_until_ms <= wall_ms
        self.subjects.move(subject, CLEAN if is_over else subject.queue, wall_ms)

    def _deny(self, item: Evaluation) -> Decision:
        """A denial: nothing is counted, and the subject is strict for one duration.

        Unless it is a guess about other regions (UNLIKELY) or depends on what other nodes do (HELD, UNKNOWN): those are
        not reported as `effective`, and set no strict deadline.
        """
        subject = item.subject
        source = item.source
        if item.verdict == DENIED:
            self._make_strict(item)
        else:
            source = self._freshness.source_of(item)
        if item.limit.shadow:
            self.allowed += 1
            self.exceeded_in_shadow += 1
        else:
            self.denied += 1
            if source == ORIGIN:
                self.denied_from_origin += 1
        self._note(item, False)
        if item.verdict == UNLIKELY and self.has_credit:
            self._check_guess(subject, item.cell, item.wall_ms)
        retry_after_ms = item.retry_after_ms(self.global_view, self._read_retry_ms)
        return self._decision(item, False, 0, retry_after_ms, source)

    def _make_strict(self, item: Evaluation) -> None:
        """Until one duration from now the latest counts of other nodes matter, and evicting would allow it again."""
        subject = item.subject
        strict_until_ms = item.now_ms + item.limit.duration_ms
        if subject.strict_until_ms >= strict_until_ms:
            return
        if subject.strict_until_ms <= item.now_ms:
            self.strict_activations += 1
        subject.strict_until_ms = strict_until_ms
        if subject.queue == CLEAN:
            self.subjects.move(subject, BLOCKED, item.wall_ms)
        elif item.wall_ms - subject.touched_ms >= self._touch_ms:
            self.subjects.move(subject, subject.queue, item.wall_ms)

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

    def _decision(
        self, item: Evaluation, fits: bool, remaining: int, retry_after_ms: int, source: int
    ) -> Decision:
        if source == ORIGIN:
            self.from_origin += 1
        elif source == DEGRADED:
            self.from_degraded += 1
        origin = item.cell.origin
        regional_age_ms = -1 if origin is None else origin.age_ms(item.wall_ms)
        return Decision(
            fits,
            item.limit,
            remaining,
            item.now_ms,
            item.used + item.demand,
            retry_after_ms,
            source,
            regional_age_ms,
            self.global_view.age_ms(item.wall_ms),
        )
