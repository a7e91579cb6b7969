"""Credit of a node: which messages go to Redis (the origin), how its answers merge, and what they decide.

Pure: `plan_*` returns what should be sent, `apply` merges the answers and decides what waits, `fail` takes back what
may not have arrived; `runtime/exchange.py` sends. The rules of one subject are in `credit.py` and `grants.py`.

Laws:
- Requests that wait for a subject are decided here, in their order, in the step that merges the answer. If each caller
  decided after it was woken, a new request could spend a waiting request's grant in between.
- A batch takes nothing before all its subjects are covered. When one of them has to wait for other nodes, it gives back
  what it was granted on the others before it asks again: two batches never wait for each other.
- A caller that disconnected consumes nothing. Every ticket is decided within the time that the driver allows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, cast, final

from tidegate.core.cells import PINNED, Cell, Subject
from tidegate.core.credit import (
    ACCEPT,
    ASK_AGAIN,
    DENY,
    DENY_HELD,
    WAIT,
    Credit,
    Waiter,
    retry_held_ms,
    stuck_of,
)
from tidegate.core.engine import Engine
from tidegate.core.evaluation import FITS, Evaluation
from tidegate.core.generations import cell_name
from tidegate.core.grants import CellPart, CreditReply, CreditRequest, GrantRules
from tidegate.core.judge import uncovered
from tidegate.core.ledger_sync import LedgerSync
from tidegate.core.model import LOCAL, ORIGIN, Tuning
from tidegate.core.origin_sync import OriginSync
from tidegate.core.pending import Pending
from tidegate.core.subjects import Subjects
from tidegate.core.tickets import Part, Ticket

__all__ = ["CreditSync", "Exchange", "Served"]

# Cells of one message: the two that a decision needs, and those that a clock which jumped has left behind.
CELLS_MAX: Final = 16
# Messages that only give credit back, in one exchange. What is left out ends by itself.
RELEASES_MAX: Final = 1_000
# Holders whose credit has ended, removed with each message: more than one, so that they never pile up.
PRUNED_PER_MESSAGE: Final = 2


@final
class Exchange:
    """Messages on their way to the origin. `subjects` has None for those that only give credit back."""

    __slots__ = ("acked", "requests", "subjects")

    def __init__(self) -> None:
        self.requests: Final[list[CreditRequest]] = []
        self.subjects: Final[list[Subject | None]] = []
        # What the origin had acknowledged of each cell when it was sent. An answer with less shows a loss.
        self.acked: Final[list[list[int]]] = []

    def add(self, request: CreditRequest, subject: Subject | None, acked: list[int]) -> None:
        self.requests.append(request)
        self.subjects.append(subject)
        self.acked.append(acked)


@final
class Served:
    """What an answer decided, and what must ask again in a moment."""

    __slots__ = ("joint", "paused_subjects", "paused_tickets", "settled")

    def __init__(self) -> None:
        self.settled: Final[list[Ticket]] = []
        # Other nodes were asked for what these need: queue them again in half a round trip.
        self.paused_subjects: Final[list[Subject]] = []
        # Batches that gave everything back: the same, after a random time on top.
        self.paused_tickets: Final[list[Ticket]] = []
        # Batches that the answer was about.
        self.joint: Final[list[Ticket]] = []


@final
class CreditSync:
    """Asks and reports for one engine."""

    __slots__ = (
        "_engine",
        "_holders",
        "_ledger_sync",
        "_origin_sync",
        "_releases",
        "_retry_ms",
        "_rules",
        "_subjects",
        "cells_reported",
        "denied_held",
        "pending",
        "recalls",
    )

    def __init__(
        self,
        engine: Engine,
        origin_sync: OriginSync,
        ledger_sync: LedgerSync,
        tuning: Tuning,
        rules: GrantRules,
    ) -> None:
        self._ledger_sync: Final[LedgerSync] = ledger_sync
        self._engine: Final[Engine] = engine
        self._origin_sync: Final[OriginSync] = origin_sync
        self._subjects: Final[Subjects] = engine.subjects
        self._rules: Final[GrantRules] = rules
        self._retry_ms: Final[int] = tuning.read_retry_ms
        self.pending: Final[Pending] = engine.pending
        # By digest: subjects that may hold credit, those with the oldest message first. A recall names the digest.
        # Ordered, because the first entry of a plain dict is behind all that were removed before it: with each message
        # thousands of empty places would be passed.
        self._holders: Final[OrderedDict[bytes, Subject]] = OrderedDict()
        # Holds of this node that belong to no subject any more: (digest, writer).
        self._releases: dict[tuple[bytes, str], None] = {}
        # Cells whose counts the origin acknowledged; denials because other nodes held the rest of the limit; recalls
        # received.
        self.cells_reported: int = 0
        self.denied_held: int = 0
        self.recalls: int = 0
        for subject in self._subjects.slots:
            if subject is not None and subject.credit is not None:
                self._take_over(subject, subject.credit)

    def _take_over(self, subject: Subject, credit: Credit) -> None:
        """A subject of a node whose event loop was closed: its message is not answered, and no caller waits."""
        credit.fail_message(credit.number)
        credit.waiting = None
        self._holders[subject.digest_of(self._subjects.key_of(subject))] = subject

    # -- waiting

    def queue(self, ticket: Ticket, clock_ms: int) -> bool:
        """Let a ticket wait for the origin. True when it is decided at once: things have changed meanwhile."""
        engine = self._engine
        if ticket.decisions is not None:
            return True
        items = engine.judge.evaluate_all(ticket.items, ticket.now_ms, LOCAL, ticket.wall_ms)
        verdict = engine.judge.verdict_of_all(items)
        lacking = uncovered(items, clock_ms) if verdict == FITS else []
        if not lacking:
            ticket.decisions = engine.answer_all(items, verdict, clock_ms)
            return True
        ticket.parts = []
        # Some may have been evicted since the ticket was made, and have come back.
        ticket.subjects[:] = [item.subject for item in items]
        for subject, cost, quota in lacking:
            part = Part(ticket, subject, cost, quota)
            ticket.parts.append(part)
            engine.credit_of(subject).wait(part)
            self.pending.queue_ask(subject)
            if subject.queue != PINNED:
                self._subjects.move(subject, PINNED, ticket.wall_ms)
        return False

    def give_up(self, ticket: Ticket, clock_ms: int) -> None:
        """Decide a ticket from memory: the origin has not answered in time."""
        if ticket.decisions is not None:
            return
        for part in ticket.parts:
            self._engine.credit_of(part.subject).failed_until_ms = clock_ms + self._retry_ms
        self._withdraw(ticket)
        ticket.decisions = self._engine.decide_degraded(ticket.items, ticket.now_ms, clock_ms, ticket.wall_ms)

    def ask_again(self, subject: Subject) -> None:
        """A moment has passed since other nodes were asked for what the requests of this subject need."""
        credit = subject.credit
        if credit is not None and credit.waiting is not None and not credit.in_flight:
            self.pending.queue_ask(subject)

    def cancel(self, ticket: Ticket) -> None:
        """The caller disconnected: nothing is counted, and what was granted for it stays as credit."""
        if ticket.decisions is None:
            ticket.is_cancelled = True
            self._withdraw(ticket)

    def _withdraw(self, ticket: Ticket) -> None:
        for part in ticket.parts:
            credit = part.subject.credit
            if credit is not None and credit.waiting is not None:
                credit.keep_waiting([waiter for waiter in credit.waiting if waiter is not part])
        ticket.parts = []

    # -- messages

    def plan_asks(
        self, now_ms: int, clock_ms: int, messages_max: int, can_be_recalled: bool
    ) -> Exchange | None:
        """The messages that should leave at once; None when there are none. Each must be applied or failed."""
        exchange = Exchange()
        for subject in self.pending.take_asking(messages_max):
            if subject.table >= 0 and not self._engine.credit_of(subject).in_flight:
                self._plan(exchange, subject, now_ms, clock_ms, can_be_recalled)
        self._plan_releases(exchange)
        return exchange if exchange.requests else None

    def plan_reports(
        self, now_ms: int, clock_ms: int, messages_max: int, subjects_max: int, can_be_recalled: bool
    ) -> Exchange | None:
        """The next messages about counts to report, oldest first; None when there are none.

        Checks the first `subjects_max` in the queue at most: some have been reported by a message that asked.
        """
        exchange = Exchange()
        taken = 0
        for subject in self.pending.dirty:
            if len(exchange.requests) >= messages_max or taken >= subjects_max:
                break
            taken += 1
            if subject.table >= 0 and self._must_report(subject):
                self._plan(exchange, subject, now_ms, clock_ms, can_be_recalled)
        for subject in self.pending.take_dirty(taken):
            self._origin_sync.unpin(subject, now_ms)
        return exchange if exchange.requests else None

    def _must_report(self, subject: Subject) -> bool:
        credit = self._engine.credit_of(subject)
        if credit.in_flight:
            return False  # its answer queues the subject again
        if credit.is_dirty:
            return True
        return any(cell.is_unreplayed() for cell in subject.cells())

    def _plan(
        self, exchange: Exchange, subject: Subject, now_ms: int, clock_ms: int, can_be_recalled: bool
    ) -> None:
        engine = self._engine
        key = self._subjects.key_of(subject)
        duration_ms = key[2]
        credit = engine.credit_of(subject)
        sequence = credit.sequence_of(now_ms, duration_ms)
        parts: list[CellPart] = []
        acked: list[int] = []
        sequence_min = now_ms // duration_ms - 2
        self._add_cell(parts, acked, sequence, sequence_min, subject.cell(sequence))
        self._add_cell(parts, acked, sequence - 1, sequence_min, subject.cell(sequence - 1))
        if subject.oldest is not None or subject.rest is not None or subject.sequence != sequence:
            for cell in subject.cells():
                behind = sequence - cell.sequence
                if not 0 <= behind <= 1 and cell.sequence >= sequence_min and cell.is_unreplayed():
                    self._add_cell(parts, acked, cell.sequence, sequence_min, cell)
                    if len(parts) == CELLS_MAX:
                        break
        digest = subject.digest_of(key)
        engine.message_number += 1
        request = credit.plan_message(
            digest,
            engine.writer_of(subject.incarnation),
            engine.message_number,
            duration_ms,
            tuple(parts),
            now_ms,
            clock_ms,
            self._rules,
            can_be_recalled,
        )
        sync = self._ledger_sync
        current = subject.cell(sequence)
        if self._subjects.is_published(duration_ms):
            floor = step = 0
            if current is not None and current.ledger is not None and sync.can_publish:
                floor = self.pending.floor_of(current.ledger)
                step = self.pending.step_of(subject, current, current.ledger, now_ms, duration_ms)
            request = request._replace(floor=floor, step=step, epoch=sync.epoch, alone_at_ms=sync.alone_at_ms)
        if subject.generation:
            request = request._replace(generation=subject.generation)
        exchange.add(request, subject, acked)
        self._holders[digest] = subject
        self._holders.move_to_end(digest)
        self.prune(clock_ms, PRUNED_PER_MESSAGE)

    def _add_cell(
        self, parts: list[CellPart], acked: list[int], sequence: int, sequence_min: int, cell: Cell | None
    ) -> None:
        if cell is None or cell.origin is None:
            parts.append(CellPart(sequence, 0))
            acked.append(0)
            return
        origin = cell.origin
        acked.append(origin.acked)
        if sequence < sequence_min:
            # A request may bring a time whose cell has aged out: it is judged in it, and nothing is kept of that.
            parts.append(CellPart(sequence, 0, cell.others, cell.foreign))
            return
        parts.append(
            CellPart(
                sequence,
                cell.own,
                cell.own + cell.others,
                cell.foreign,
                origin.acked,
                origin.sent,
                origin.published,
                origin.total,
                origin.id,
            )
        )
        origin.sent = cell.own

    def prune(self, clock_ms: int, subjects_max: int) -> bool:
        """Forget holders whose credit has ended, those with the oldest message first. True when more may be left."""
        for _ in range(subjects_max):
            if not self._holders:
                return False
            digest = next(iter(self._holders))
            subject = self._holders[digest]
            credit = subject.credit
            if (
                subject.table >= 0
                and credit is not None
                and (credit.in_flight or clock_ms < credit.until_ms or credit.waiting is not None)
            ):
                return False
            del self._holders[digest]
        return True

    def apply(
        self,
        exchange: Exchange,
        replies: Sequence[CreditReply],
        now_ms: int,
        clock_ms: int,
        patience_ms: int,
    ) -> Served:
        """The origin answered: merge the counts, and decide what waits."""
        served = Served()
        for i, reply in enumerate(replies):
            subject = exchange.subjects[i]
            request = exchange.requests[i]
            if subject is None:
                continue
            if subject.table < 0:
                if reply.granted > 0:
                    self._release(request.digest, request.writer)
                continue
            self._merge(subject, request, reply, exchange.acked[i], now_ms)
            credit = self._engine.credit_of(subject)
            if request.generation != subject.generation:
                # What was granted beside the counts of before is not spent: what waits asks again.
                if credit.fail_message(request.number):
                    if credit.waiting is not None:
                        self.pending.queue_ask(subject)
                    self.pending.queue_replay(subject, subject.touched_ms)
            elif credit.apply_reply(request, reply):
                credit.failed_until_ms = -1
                self._serve(subject, credit, request, reply, clock_ms, patience_ms, served)
                is_running = request.cells[0].sequence == now_ms // request.duration_ms
                if not is_running and credit.waiting is None and credit.spare > request.held:
                    credit.keep_no_more_than(request.held)
                    self.pending.queue_replay(subject, subject.touched_ms)
            self._origin_sync.unpin(subject, now_ms)
        for ticket in served.joint:
            self._serve_batch(ticket, clock_ms, patience_ms, served)
        return served

    def fail(self, exchange: Exchange, clock_ms: int) -> Served:
        """They may not have arrived. What waits for them is decided from memory, and the counts are sent again."""
        served = Served()
        for i, subject in enumerate(exchange.subjects):
            request = exchange.requests[i]
            if subject is None:
                # Not again: the origin lets it end by itself, and one that is down would be asked without a pause.
                continue
            credit = self._engine.credit_of(subject)
            if not credit.fail_message(request.number):
                continue
            credit.failed_until_ms = clock_ms + self._retry_ms
            for waiter in list(credit.waiting or ()):
                ticket = cast("Part", waiter).ticket
                if ticket.decisions is None:
                    self.give_up(ticket, clock_ms)
                    served.settled.append(ticket)
            self.pending.queue_replay(subject, subject.touched_ms)
        return served

    def _merge(
        self, subject: Subject, request: CreditRequest, reply: CreditReply, acked: list[int], now_ms: int
    ) -> None:
        duration_ms = request.duration_ms
        for i, totals in enumerate(reply.cells):
            part = request.cells[i]
            if request.generation != subject.generation:
                name = cell_name(part.sequence, request.generation, duration_ms)
                if name != cell_name(part.sequence, subject.generation, duration_ms):
                    continue  # it was reset since
            cell = subject.cell(part.sequence)
            if cell is None:
                # `published`: the row of this region in the ledger, when the origin has lost what it counts.
                if totals.total == 0 and totals.foreign == 0 and totals.published == 0:
                    continue
                cell = self._subjects.blank_cell(part.sequence, duration_ms)
                sequence_min = now_ms // duration_ms - 2
                self._subjects.insert(subject, cell, min(part.sequence, sequence_min))
            if part.own > acked[i]:
                self.cells_reported += 1
            if cell.origin is not None and totals.id != 0:
                cell.origin.record(totals.id, totals.total)
            self._origin_sync.apply_report(
                subject, cell, part.own, acked[i], totals.total, totals.component, totals.base, now_ms
            )
            self._ledger_sync.apply_totals(subject, cell, totals, now_ms)

    # -- serving

    def _serve(
        self,
        subject: Subject,
        credit: Credit,
        request: CreditRequest,
        answer: CreditReply,
        clock_ms: int,
        patience_ms: int,
        served: Served,
    ) -> None:
        """Decide what waits for this subject, in order."""
        kept: list[Waiter] = []
        reserved = 0
        is_paused = False
        asks_again = False
        for waiter in credit.waiting or ():
            part = cast("Part", waiter)
            ticket = part.ticket
            item = self._evaluate(part)
            reply = answer
            if reply.following > 0 and part.at_ms // request.duration_ms != request.cells[0].sequence:
                reply = reply._replace(following=0)  # a request with a time of its own, in another window
            verdict = self._judge(item, credit, part, reply, clock_ms, patience_ms)
            if verdict == ASK_AGAIN:
                part.is_ready = False
                part.verdict = ASK_AGAIN
                asks_again = True
                kept.append(part)
            elif part.is_joint:
                part.is_ready = verdict == ACCEPT
                part.verdict = verdict
                part.reply = reply
                served.joint.append(ticket)
                kept.append(part)
                if verdict == ACCEPT:
                    # Not for those behind it; and still unspent, should a message leave before the batch is decided.
                    credit.spare -= part.cost
                    reserved += part.cost
            elif verdict == WAIT:
                is_paused = True
                kept.append(part)
            else:
                ticket.parts = []
                if verdict == ACCEPT:
                    self._accept(ticket, [item], clock_ms)
                else:
                    self._deny([item], part, verdict, reply, patience_ms)
                served.settled.append(ticket)
        credit.spare += reserved
        credit.keep_waiting(kept)
        self._queue_next(subject, credit, is_paused, asks_again, served)

    def _evaluate(self, part: Part) -> Evaluation:
        """What counts for a request that waits. For a batch, of one subject, with all that the batch needs of it."""
        ticket = part.ticket
        limit, identifier, _ = ticket.items[ticket.subjects.index(part.subject)]
        return self._engine.judge.evaluate(
            limit, identifier, part.cost, part.at_ms, ticket.wall_ms, ORIGIN, True
        )

    def _judge(
        self,
        item: Evaluation,
        credit: Credit,
        part: Part,
        reply: CreditReply,
        clock_ms: int,
        patience_ms: int,
    ) -> int:
        # What this node has reserved is part of what others hold.
        reserved = part.subject.reserved
        if part.cost == 0:
            if item.used - reserved > part.quota:
                return DENY
            return ACCEPT if part.asked == credit.number else ASK_AGAIN
        is_patient = clock_ms - part.since_ms < patience_ms
        stuck = stuck_of(reply, self._rules, patience_ms)
        needed = item.used_before(reply.following) - reserved + part.cost
        return credit.judge(part, needed, reply, clock_ms, is_patient, stuck)

    def _queue_next(
        self, subject: Subject, credit: Credit, is_paused: bool, asks_again: bool, served: Served
    ) -> None:
        """Queue the next message of a subject whose last one was answered."""
        if credit.is_recalled:
            self.pending.queue_ask(subject)
        elif is_paused:
            served.paused_subjects.append(subject)
        elif asks_again:
            self.pending.queue_ask(subject)
        elif credit.is_dirty:
            if credit.is_low():
                self.pending.queue_ask(subject)
            self.pending.queue_replay(subject, subject.touched_ms)

    def _evaluate_all(self, ticket: Ticket) -> list[Evaluation]:
        return self._engine.judge.evaluate_all(ticket.items, ticket.now_ms, ORIGIN, ticket.wall_ms)

    def _accept(self, ticket: Ticket, items: list[Evaluation], clock_ms: int) -> None:
        """Decide a ticket that credit covers. What is known of other regions may still deny it."""
        engine = self._engine
        ticket.decisions = engine.answer_all(items, engine.judge.verdict_of_all(items), clock_ms)

    def _deny(
        self, items: list[Evaluation], part: Part, verdict: int, reply: CreditReply, patience_ms: int
    ) -> None:
        """Deny a ticket because of one subject: its window is full, or others hold what is left of it."""
        if verdict == DENY_HELD:
            self.denied_held += 1
        answer = (reply.firm, reply.following)
        held = [answer if item.subject is part.subject else None for item in items]
        retry_ms = retry_held_ms(reply, self._rules, patience_ms)
        part.ticket.decisions = self._engine.answer_held(items, held, retry_ms)

    def _serve_batch(self, ticket: Ticket, clock_ms: int, patience_ms: int, served: Served) -> None:
        """Decide a batch if all its subjects are covered, or if one is not and cannot be."""
        if ticket.decisions is not None or not ticket.parts:
            return
        worst: Part | None = None
        are_ready = True
        for part in ticket.parts:
            if part.is_ready:
                continue
            are_ready = False
            if part.verdict in (DENY, DENY_HELD, WAIT) and (worst is None or part.verdict < worst.verdict):
                worst = part
        if worst is not None:
            self._give_back(ticket)
            if worst.verdict == WAIT:
                served.paused_tickets.append(ticket)
            else:
                assert worst.reply is not None
                self._deny(self._evaluate_all(ticket), worst, worst.verdict, worst.reply, patience_ms)
                served.settled.append(ticket)
        elif are_ready:
            covered = True
            for part in ticket.parts:
                credit = self._engine.credit_of(part.subject)
                if part.cost > 0 and (credit.spare < part.cost or clock_ms >= credit.until_ms):
                    covered = False
            parts = ticket.parts
            self._withdraw(ticket)
            if covered and self._covers_rest(ticket, parts, clock_ms):
                self._accept(ticket, self._evaluate_all(ticket), clock_ms)
                served.settled.append(ticket)
            elif self.queue(ticket, clock_ms):
                served.settled.append(ticket)

    def _covers_rest(self, ticket: Ticket, parts: list[Part], clock_ms: int) -> bool:
        """Whether credit covers the subjects of a batch that did not wait: it did when the batch came."""
        waited = {part.subject for part in parts}
        items = self._engine.judge.evaluate_all(ticket.items, ticket.now_ms, LOCAL, ticket.wall_ms)
        rest = [item for item in items if item.subject not in waited]
        return not rest or not uncovered(rest, clock_ms)

    def _give_back(self, ticket: Ticket) -> None:
        """Return what a batch was granted and cannot use now."""
        parts = ticket.parts
        self._withdraw(ticket)
        for part in parts:
            if part.is_ready:
                credit = self._engine.credit_of(part.subject)
                credit.recall()
                if not credit.in_flight:
                    self.pending.queue_ask(part.subject)

    # -- recalls

    def recall(self, digest: bytes, writer: str) -> None:
        """The origin asks for credit that is not needed at once."""
        if writer.partition("~")[0] != self._engine.node_id:
            return
        self.recalls += 1
        subject = self._holder(digest, writer)
        if subject is None:
            self._release(digest, writer)
            return
        credit = self._engine.credit_of(subject)
        credit.recall()
        if not credit.in_flight:
            self.pending.queue_ask(subject)

    def _holder(self, digest: bytes, writer: str) -> Subject | None:
        """The subject whose messages are about this hold; None when it is gone."""
        subject = self._holders.get(digest)
        if subject is None or subject.table < 0 or writer != self._engine.writer_of(subject.incarnation):
            return None
        return subject

    def recall_all(self) -> None:
        """Give back all credit: the node stops."""
        for subject in self._holders.values():
            credit = subject.credit
            if subject.table >= 0 and credit is not None and credit.spare > 0:
                credit.recall()
                self.pending.queue_ask(subject)

    def _release(self, digest: bytes, writer: str) -> None:
        if len(self._releases) < RELEASES_MAX:
            self._releases[digest, writer] = None
            self.pending.is_urgent = True

    @property
    def has_releases(self) -> bool:
        """Credit must be given back that belongs to no subject any more."""
        return bool(self._releases) or bool(self._subjects.released)

    def _plan_releases(self, exchange: Exchange) -> None:
        engine = self._engine
        for digest, incarnation in self._subjects.released[:RELEASES_MAX]:
            self._releases[digest, engine.writer_of(incarnation)] = None
        del self._subjects.released[:RELEASES_MAX]
        nothing = (CellPart(0, 0), CellPart(-1, 0))
        for digest, writer in self._releases:
            if self._holder(digest, writer) is not None:
                continue  # it came back, under the same name: the hold is what its own messages ask for
            engine.message_number += 1
            number = engine.message_number
            exchange.add(CreditRequest(digest, writer, number, 1_000, nothing, 0, 0, (), 0, 0, 0), None, [])
        self._releases.clear()

    @property
    def holders(self) -> int:
        """Subjects that may hold credit."""
        return len(self._holders)
