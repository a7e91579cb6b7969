"""Messages to Redis (the origin): they ask for credit, report counts, and answer recalls.

There are two kinds of messages. What a request waits for, what was recalled and what is running low is sent at the end
of the present turn of the event loop, all subjects in one round trip. Counts that only have to be reported are a group
commit: sent command after command, at most every `report_interval_ms`, so that a busy subject costs few messages. A
subject has one message in flight at a time, of either kind.

A message that no request waits for any more continues: a cancelled caller cancels no message and trips no breaker. In
any case a caller is answered after `read_timeout_ms` in which the event loop ran (`adapters/running_time.py`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from random import Random
from typing import Final

from tidegate.adapters.running_time import LATE_S, STEP_S
from tidegate.core.cells import Subject
from tidegate.core.credit_sync import CreditSync, Exchange, Served
from tidegate.core.gate import Gate
from tidegate.core.grants import CreditReply
from tidegate.core.model import Decision, Tuning
from tidegate.core.sweep import Sweep
from tidegate.core.tickets import Ticket
from tidegate.errors import Closed, DependencyError
from tidegate.ports import Origin
from tidegate.runtime.calls import Calls
from tidegate.runtime.latency import Histogram
from tidegate.runtime.loops import GroupCommit, loop_backoff

__all__ = ["Exchanges"]

# Messages of one command: about two milliseconds of a Redis server's time.
MESSAGES_MAX: Final = 100
# Commands that ask, in flight at a time. Thousands of new subjects in one moment wait here and not in the queue of the
# server, where they would all time out together and open the breaker.
ASKS_MAX: Final = 8
# Subjects looked at for the reports of one command: some have been reported by a message that asked.
SUBJECTS_MAX: Final = 400
# Turns of the event loop between two full commands of reports. A command costs about 1.5 ms of it, a busy turn of
# decisions some 0.14 ms: reports then take less than a tenth, and 10,000 busy subjects are all reported in two seconds.
YIELDS: Final = 160
# A request waits for other nodes to give credit back no longer than this, or than so many round trips, and never so
# long that it would be decided as if the origin did not answer.
PATIENCE_MS: Final = 5
PATIENCE_ROUND_TRIPS: Final = 4
# What a round trip is taken for before the first, and the weight of a new one in the average.
ROUND_TRIP_S: Final = 0.001
ROUND_TRIP_WEIGHT: Final = 1 / 8
# Never ask again sooner than this after the answer that other nodes were asked.
PAUSE_MIN_S: Final = 0.00005


class Exchanges(GroupCommit):
    """One node's messages. `wake` starts a turn; `run_once` is one turn of reports."""

    _yields = YIELDS
    _turns = 1

    def __init__(
        self,
        origin: Origin,
        gate: Gate,
        sync: CreditSync,
        sweep: Sweep,
        tuning: Tuning,
        random: Random,
        *,
        is_usable: Callable[[], bool],
        on_work: Callable[[], object],
    ) -> None:
        calls = Calls("origin", tuning, is_usable, carries="counts for the origin")
        backoff = loop_backoff(tuning, random)
        super().__init__(gate, sync.pending, sweep, calls, backoff, tuning.report_interval_ms, MESSAGES_MAX)
        self._origin = origin
        self._sync = sync
        self._random = random
        self._timeout_s = tuning.read_timeout_ms / 1000
        self._rests = origin.rules.report_rests
        # Called when an answer has left work for other loops (cells to publish).
        self._on_work = on_work
        self._tasks: set[asyncio.Task[None]] = set()
        self._timers: set[asyncio.TimerHandle] = set()
        # What was planned, and has no answer yet.
        self._unanswered: set[Exchange] = set()
        # True while `_send_asks` is about to run.
        self._is_asking = False
        # True from `close` on: what is left is sent by `flush`.
        self._is_closed = False
        # Tickets that wait, in order, with the time at which they are decided without an answer: that of the loop, less
        # what it did not run for while tickets waited.
        self._waiting: deque[tuple[float, Ticket]] = deque()
        self._stalled_s = 0.0
        # The next look at them, and when it is due.
        self._deadline: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        # At the last look a ticket's time was over, and it got one more turn, because the loop had not run.
        self._was_over = False
        self._round_trip_s = ROUND_TRIP_S
        # Messages about a subject that were sent, and those that only gave credit back.
        self.messages: int = 0
        self.releases: int = 0
        self.waits: int = 0
        self.wait_latency: Final[Histogram] = Histogram()

    # -- requests

    async def wait(self, ticket: Ticket) -> list[Decision]:
        """The decisions on a ticket: when the origin has answered, or without it when that takes too long."""
        loop = asyncio.get_running_loop()
        with self._gate:
            is_decided = self._sync.queue(ticket, self._gate.clock_ms())
        if not is_decided:
            began_s = loop.time()
            future: asyncio.Future[None] = loop.create_future()
            ticket.owner = future
            self.waits += 1
            self._expect(ticket, began_s)
            self.wake()
            try:
                await future
            except asyncio.CancelledError:
                with suppress(Closed), self._gate:
                    self._sync.cancel(ticket)
                raise
            finally:
                ticket.owner = None
                self.wait_latency.observe(loop.time() - began_s)
        assert ticket.decisions is not None
        return ticket.decisions

    def give_up(self, ticket: Ticket) -> None:
        """Decide a ticket without the origin; from any thread."""
        with self._gate:
            self._sync.give_up(ticket, self._gate.clock_ms())

    def _expect(self, ticket: Ticket, began_s: float) -> None:
        if self._deadline is not None and began_s - self._due_s > LATE_S:
            # The loop did not run. That adds to the time of those that waited then, not to this one's.
            self._deadline.cancel()
            self._end_waits()
        self._waiting.append((began_s - self._stalled_s + self._timeout_s, ticket))
        if self._deadline is None:
            self._look_later(began_s)

    def _look_later(self, now_s: float) -> None:
        self._due_s = min(self._waiting[0][0] + self._stalled_s, now_s + STEP_S)
        self._deadline = asyncio.get_running_loop().call_at(self._due_s, self._end_waits)

    def _end_waits(self) -> None:
        """Decide what has waited for too long; wait for the next."""
        self._deadline = None
        now_s = asyncio.get_running_loop().time()
        late_s = now_s - self._due_s
        is_over = bool(self._waiting) and self._waiting[0][0] + self._stalled_s <= self._due_s
        if late_s > LATE_S and not (is_over and self._was_over):
            # The loop did not run: what the origin has answered meanwhile is read in this turn and handled in the next.
            self._was_over = is_over
            self._stalled_s += late_s
        else:
            self._was_over = False
            self._give_up_late()
        if self._waiting:
            self._look_later(now_s)
        self.wake()

    def _give_up_late(self) -> None:
        while self._waiting:
            deadline_s, ticket = self._waiting[0]
            if ticket.decisions is None and not ticket.is_cancelled:
                if deadline_s + self._stalled_s > self._due_s:
                    break
                self.give_up(ticket)
            self._waiting.popleft()
            _answer(ticket)

    # -- messages that should leave at once

    def wake(self) -> None:
        """There may be something to ask or to report. On the node's own event loop."""
        if self._is_closed:
            return
        pending = self._sync.pending
        has_asks = pending.asking or self._sync.has_releases
        if has_asks and not self._is_asking and len(self._tasks) < ASKS_MAX:
            self._is_asking = True
            asyncio.get_running_loop().call_soon(self._send_asks)
        if pending.dirty or self._sweep.is_active:
            self.is_reporting = True
            self._woken.set()

    @property
    def is_awake(self) -> bool:
        """New work will be seen without `wake`."""
        has_asks = bool(self._sync.pending.asking)
        return self.is_reporting and (self._is_asking or not has_asks or len(self._tasks) >= ASKS_MAX)

    def _send_asks(self) -> None:
        """Send everything that was queued in this turn of the event loop, or as much as may be in flight."""
        self._is_asking = False
        while not self._is_closed and len(self._tasks) < ASKS_MAX:
            with self._gate:
                exchange = self._sync.plan_asks(
                    self._gate.now_ms(), self._gate.clock_ms(), MESSAGES_MAX, self._origin.can_be_recalled
                )
                is_empty = not self._sync.pending.asking
            if exchange is not None:
                self._spawn(exchange)
            if is_empty:
                return

    def _spawn(self, exchange: Exchange) -> None:
        unsent = [exchange]
        self._unanswered.add(exchange)
        task = asyncio.get_running_loop().create_task(self._ask_now(unsent))
        self._tasks.add(task)
        task.add_done_callback(lambda task: self._on_ended(task, unsent))

    async def _ask_now(self, unsent: list[Exchange]) -> None:
        with suppress(DependencyError):
            await self._send_or_fail(unsent.pop())

    def _on_ended(self, task: asyncio.Task[None], unsent: list[Exchange]) -> None:
        self._tasks.discard(task)
        for exchange in unsent:
            # A task that is cancelled before its first step runs no line of it: its requests must not wait forever.
            self.fail(exchange)
        self.wake()

    async def send(self, exchange: Exchange) -> None:
        """One round trip, and what its answers decide. Raises a `DependencyError`; the caller then calls `fail`."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        replies = await self.calls.call(
            ["exchange"],
            lambda timeout_s: self._send_counted(exchange, timeout_s),
            self._timeout_s,
        )
        # A slower one counts at once: what other nodes are asked for takes as long.
        took_s = loop.time() - began_s
        faster_s = max(0.0, self._round_trip_s - took_s)
        self._round_trip_s = took_s + faster_s * (1 - ROUND_TRIP_WEIGHT)
        patience_s = min(PATIENCE_ROUND_TRIPS * self._round_trip_s, self._timeout_s / 2)
        patience_ms = max(PATIENCE_MS, int(patience_s * 1000))
        with self._gate:
            served = self._sync.apply(
                exchange, replies, self._gate.now_ms(), self._gate.clock_ms(), patience_ms
            )
        self._unanswered.discard(exchange)
        self._finish(served)

    async def _send_counted(self, exchange: Exchange, timeout_s: float) -> list[CreditReply]:
        # Here, because an open breaker lets no message through.
        releases = exchange.subjects.count(None)
        self.releases += releases
        self.messages += len(exchange.requests) - releases
        return await self._origin.exchange(exchange.requests, timeout_s=timeout_s)

    def fail(self, exchange: Exchange) -> None:
        """No answer will come."""
        with self._gate:
            served = self._sync.fail(exchange, self._gate.clock_ms())
        self._unanswered.discard(exchange)
        self._finish(served)

    def _finish(self, served: Served) -> None:
        for ticket in served.settled:
            _answer(ticket)
        if served.paused_subjects or served.paused_tickets:
            pause_s = max(PAUSE_MIN_S, self._round_trip_s / 2)
            if served.paused_subjects:
                self._later(pause_s, lambda: self._resume(served.paused_subjects))
            for ticket in served.paused_tickets:
                self._requeue(ticket, pause_s + self._random.random() * self._round_trip_s)
        self._on_work()

    def _later(self, delay_s: float, callback: Callable[[], object]) -> None:
        def run() -> None:
            self._timers.discard(handle)
            callback()

        handle = asyncio.get_running_loop().call_later(delay_s, run)
        self._timers.add(handle)

    def _resume(self, subjects: list[Subject]) -> None:
        with self._gate:
            for subject in subjects:
                self._sync.ask_again(subject)
        self.wake()

    def _requeue(self, ticket: Ticket, delay_s: float) -> None:
        def queue() -> None:
            if ticket.decisions is None and not ticket.is_cancelled:
                with self._gate:
                    is_decided = self._sync.queue(ticket, self._gate.clock_ms())
                if is_decided:
                    _answer(ticket)
                self.wake()

        self._later(delay_s, queue)

    def expire(self, subjects_max: int) -> bool:
        """Forget subjects whose credit has ended. True when more may be left."""
        with self._gate:
            return self._sync.prune(self._gate.clock_ms(), subjects_max)

    def on_recall(self, digest: bytes, writer: str) -> None:
        """The origin asks for credit that is not needed at once."""
        with self._gate:
            self._sync.recall(digest, writer)
        self.wake()

    # -- reports

    async def _report(self, waiting: int) -> tuple[int, int]:
        """One command: how many of the waiting subjects were looked at, and how many messages it carried."""
        with self._gate:
            dirty = len(self._sync.pending.dirty)
            exchange = self._sync.plan_reports(
                self._gate.now_ms(),
                self._gate.clock_ms(),
                MESSAGES_MAX,
                min(waiting, SUBJECTS_MAX),
                self._origin.can_be_recalled,
            )
            taken = dirty - len(self._sync.pending.dirty)
        if exchange is None:
            return taken or waiting, 0
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await self._send_or_fail(exchange)
        if self._rests and not self._is_closed:
            await asyncio.sleep(self._rests * (loop.time() - began_s))
        return taken, len(exchange.requests)

    def _sent(self) -> Iterable[Subject]:
        for each in list(self._unanswered):
            for subject, request, acked in zip(each.subjects, each.requests, each.acked, strict=True):
                counts = zip(
                    request.cells, acked, strict=False
                )  # a message that gives credit back has counted nothing
                if subject is not None and any(cell.own > known for cell, known in counts):
                    yield subject

    async def _send_or_fail(self, exchange: Exchange) -> None:
        self._unanswered.add(exchange)
        is_answered = False
        try:
            await self.send(exchange)
            is_answered = True
        finally:
            if not is_answered:
                self.fail(exchange)

    # -- the end

    async def close(self) -> None:
        """Decide what waits, and cancel what is in flight."""
        self._is_closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        while self._waiting:
            _, ticket = self._waiting.popleft()
            if ticket.decisions is None and not ticket.is_cancelled:
                self.give_up(ticket)
                _answer(ticket)

    async def flush(self) -> None:
        """Report all counts and give back all credit. Raises a `DependencyError`."""
        with self._gate:
            self._sync.recall_all()
        while True:
            with self._gate:
                exchange = self._sync.plan_asks(
                    self._gate.now_ms(), self._gate.clock_ms(), MESSAGES_MAX, can_be_recalled=False
                )
                is_empty = not self._sync.pending.asking
            if exchange is not None:
                await self._send_or_fail(exchange)
            if is_empty:
                break
        await self.run_once()

    def statistics(self, now_s: float, *others: Calls) -> dict[str, object]:
        """The fields of `Statistics` about messages and credit."""
        sync = self._sync
        return super().statistics(now_s, *others) | {
            "origin_cells_merged": sync.cells_reported,
            "credit_messages": self.messages,
            "credit_waits": self.waits,
            "credit_wait": self.wait_latency.snapshot(),
            "credit_denied_held": sync.denied_held,
            "credit_recalls": sync.recalls,
            "credit_releases": self.releases,
            "credit_subjects": sync.holders,
            "credit_is_listening": self._origin.can_be_recalled,
        }


def _answer(ticket: Ticket) -> None:
    """Wake the caller of a ticket that is decided."""
    future = ticket.owner
    if isinstance(future, asyncio.Future) and not future.done():
        future.set_result(None)
