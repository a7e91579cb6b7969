"""`AsyncLimiter`, for the tasks of one event loop. `limiter` has the one for threads, and says what both do.

A module of its own because it needs asyncio: a program with a `Limiter` alone does not import that.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from tidegate.adapters.deadline import Deadline
from tidegate.adapters.forks import INHERITED
from tidegate.core.freshness import Need
from tidegate.core.gate import CLOSED
from tidegate.core.model import DEGRADED, ORIGIN, Decision, Limit, Request, Tuning
from tidegate.core.sharing import OriginUsage
from tidegate.core.tickets import Ticket
from tidegate.ports import Ledger, Origin
from tidegate.runtime.driver import Driver, LimiterState, checked_batch
from tidegate.runtime.environment import Environment
from tidegate.runtime.fleet import Fleet
from tidegate.runtime.limited import LimitedCall, check_coroutine_function, check_decisions
from tidegate.runtime.loops import wait_for_event
from tidegate.runtime.reservation import AsyncReservation, Ending, Item, Taken, in_order, merged
from tidegate.runtime.usage import Usage
from tidegate.runtime.waiting import checked_timeout, pause_s

__all__ = ["AsyncLimiter"]

P = ParamSpec("P")
R = TypeVar("R")


class AsyncLimiter(Driver):
    """A limiter for the tasks of one event loop.

    `AsyncLimiter()` is embedded: one process, nothing to start. With `region`, `origin` and `ledger` it is a node
    of a fleet; use it as an asynchronous context manager, or call `start` and `stop`.
    """

    def __init__(
        self,
        *,
        region: str | None = None,
        origin: str | Origin | None = None,
        ledger: str | Ledger | None = None,
        tuning: Tuning | None = None,
    ) -> None:
        self._set_up(Fleet(region, origin, ledger, tuning, Environment()))

    def _make(self) -> None:
        # The start under way, if any, and until when requests wait for it.
        self._starting: asyncio.Task[None] | None = None
        self._start_by = Deadline.after(0.0, 0.0)
        self._parts = self._fleet.make(self._wake, _cannot_settle, _cannot_begin, self._loop_closed)
        self._gate = self._parts.gate

    def _loop_closed(self) -> None:
        """The event loop ends without a `stop`. Counts stay, and the next call starts again, on its own loop."""
        if self._life.state in (LimiterState.STARTING, LimiterState.RUNNING):
            self._starting = None
            self._life.move(LimiterState.NEW)
            self._parts = self._fleet.make_for_new_loop(self._parts, self._loop_closed)
            self._set_gate()

    def _wake(self) -> None:
        node = self._parts.node
        if node is not None:
            node.wake()

    # -- decisions

    def limit_nowait(
        self, limit: Limit, identifier: str, cost: int = 1, *, now_ms: int | None = None
    ) -> Decision | None:
        """A decision from memory, or None when `limit` would have to ask the origin, or to start, first."""
        return self._gate.attempt(limit, identifier, cost, now_ms)

    @property
    def attempt(self) -> Callable[[Limit, str, int, int | None], Decision | None]:
        """`limit_nowait(limit, identifier, cost, now_ms=now_ms)` without a frame of Python."""
        return self._gate.attempt

    @property
    def attempt_many(self) -> Callable[[list[tuple[Limit, str, int]], int | None], list[Decision] | None]:
        """`limit_many_nowait` in the same way, for requests that were checked before."""
        return self._gate.attempt_many

    async def limit(
        self, limit: Limit, identifier: str, cost: int = 1, *, now_ms: int | None = None
    ) -> Decision:
        """Decide, and consume `cost` if it fits. Cost 0 checks without consuming."""
        if not self._gate.is_open:
            await self._begin()
        at_ms = self._gate.now_ms() if now_ms is None else now_ms
        answer = self._gate.ask(limit, identifier, cost, at_ms)
        if isinstance(answer, Decision):
            return answer
        if isinstance(answer, Ticket):
            return (await self._wait_for(answer))[0]
        source = await self._read([answer])
        decision = self._gate.decide(limit, identifier, cost, at_ms, source)
        assert isinstance(decision, Decision), "after reading, the engine decides"
        return decision

    def limit_many_nowait(
        self, requests: Sequence[Request], *, now_ms: int | None = None
    ) -> list[Decision] | None:
        """A batch from memory, or None when `limit_many` would have to ask the origin, or to start, first; and with
        limits in shadow mode."""
        if not self._gate.is_open:
            return None
        if self._parts.engine.has_credit:
            answer = self._gate.ask_many(checked_batch(requests), now_ms)
            return None if isinstance(answer, Ticket) else answer
        decisions, _ = self._gate.decide_many(checked_batch(requests), now_ms)
        return decisions

    async def limit_many(self, requests: Sequence[Request], *, now_ms: int | None = None) -> list[Decision]:
        """Decide a batch at one instant: all items are consumed, or none.

        Limits in shadow mode do not decide about the others: each is consumed, if it fits, after the batch is allowed.
        """
        requests = checked_batch(requests)
        if not self._gate.is_open:
            await self._begin()
        at_ms = self._gate.now_ms() if now_ms is None else now_ms
        if self._parts.engine.has_credit:
            answer = self._gate.ask_many(requests, at_ms)
            if answer is None:
                return await self._limit_with_shadows(requests, at_ms)
            return await self._wait_for(answer) if isinstance(answer, Ticket) else answer
        decisions, needs = self._gate.decide_many(requests, at_ms)
        if decisions is None and not needs:
            return await self._limit_with_shadows(requests, at_ms)
        if decisions is None:
            source = await self._read(needs)
            decisions, _ = self._gate.decide_many(requests, at_ms, source)
            assert decisions is not None, "after reading, the engine decides"
        return decisions

    async def _wait_for(self, ticket: Ticket) -> list[Decision]:
        node = self._parts.node
        assert node is not None and node.exchanges is not None, "only an engine with an origin makes tickets"
        return await node.exchanges.wait(ticket)

    async def _read(self, needs: list[Need]) -> int:
        node = self._parts.node
        assert node is not None and node.reads is not None, "only an engine with an origin asks for reads"
        return ORIGIN if await node.reads.fetch(needs) else DEGRADED

    async def _limit_with_shadows(self, requests: Sequence[Request], at_ms: int) -> list[Decision]:
        # The methods of this class: what a subclass adds to its own is for the whole batch.
        enforced = [request for request in requests if not request.limit.shadow]
        decisions = await AsyncLimiter.limit_many(self, enforced, now_ms=at_ms) if enforced else []
        shadows = [
            await AsyncLimiter.limit(self, limit, identifier, cost * all(decisions), now_ms=at_ms)
            for limit, identifier, cost in requests
            if limit.shadow
        ]
        return in_order(requests, decisions, shadows)

    async def peek(self, limit: Limit, identifier: str, *, now_ms: int | None = None) -> Decision:
        """The present state of a counter, without consuming."""
        return await self.limit(limit, identifier, 0, now_ms=now_ms)

    async def usage(self, limit: Limit, identifier: str, *, now_ms: int | None = None) -> Usage:
        """What counts against a limit, and where each part was accepted. Consumes nothing."""
        decision = await self.peek(limit, identifier, now_ms=now_ms)
        key = (limit.workspace, limit.namespace, limit.duration_ms)
        known = await self.usage_at_origin(key, identifier, decision.decided_at_ms)
        return self._usage(identifier, decision, known)

    async def usage_at_origin(
        self, key: tuple[str, str, int], identifier: str, now_ms: int
    ) -> OriginUsage | None:
        """What Redis knows of a counter and memory does not; None without it. For the server's console."""
        node = self._parts.node
        return None if node is None else await node.usage(key, identifier, now_ms)

    async def reset(self, limit: Limit, identifier: str) -> bool:
        """Set the counter of `identifier` back to zero: here at once, on every node and in every region within 2 s.

        True if Redis and the database have confirmed it; otherwise this process repeats it until they do. What is
        reserved stays reserved. Raises `TooManyResets` if the workspace has as many live resets as it may.
        """
        if not self._gate.is_open:
            await self._begin()
        reset = self._reset_here(limit, identifier)
        node = self._parts.node
        return True if node is None else await node.resets.spread(reset)

    def reserve(
        self, limit: Limit, identifier: str, estimate: int, *, life: float | None = None
    ) -> AsyncReservation:
        """Keep `estimate` for a block of work whose cost is known only at its end.

        `async with limiter.reserve(limit, identifier, estimate) as r: …; r.settle(actual)`. Raises `LimitExceeded` if
        the estimate does not fit, `TooManyReservations` if the workspace holds as many as it may.

        It counts like cost until the end of the block, and no longer than `life` seconds (default: the window). If the
        block ends without `settle`, the estimate is counted; if it raises, the reservation is released.
        """
        return self.reserve_many([Request(limit, identifier, estimate)], life=life)

    def reserve_many(self, requests: Sequence[Request], *, life: float | None = None) -> AsyncReservation:
        """`reserve` under several limits, all or nothing; `life` is that of the shortest window by default."""
        return AsyncReservation(checked_batch(requests), life, self.take, self._end_taken)

    async def take(self, requests: Sequence[Request], life_ms: int) -> Taken:
        """Reserve all or nothing, without a block: `end` ends it. For the server, which has checked the arguments."""
        if not self._gate.is_open:
            await self._begin()
        at_ms = self._gate.now_ms()
        items = merged([request for request in requests if not request.limit.shadow])
        reserving = self._reserving
        if reserving is None or not items:
            taken = self._reserve_here(items, life_ms, at_ms)
        else:
            taken = await reserving.take(items, self._reservation_name, life_ms, at_ms)
        taken.check_room()
        shadows = [await self.limit(*request) for request in requests if request.limit.shadow]
        return taken.for_requests(requests, shadows)

    async def end(self, name: str, items: list[Item]) -> Ending:
        """End the reservation of this name, of this node or another, and count what was used, once.

        Raises a `DependencyError` when the origin does not answer and this node does not hold it.
        """
        if not self._gate.is_open:
            await self._begin()
        if self._reserving is not None:
            return await self._reserving.end(name, items)
        with self._gate:
            is_live = self._parts.engine.reservations.holds(name, items)
        return self._end_here(name, items) if is_live else Ending(False, False)

    async def _end_taken(self, taken: Taken, items: list[Item]) -> Ending:
        if self._reserving is None or not taken.name:
            return self._end_here(taken.name, items)
        return await self._reserving.end(taken.name, items, is_first=True)

    async def wait(
        self, limit: Limit, identifier: str, cost: int = 1, *, timeout: float | None = None
    ) -> Decision:
        """Wait until the cost fits and consume it, or give up: then the last denial is returned.

        Gives up at once when the cost cannot fit within `timeout` seconds, or ever.
        """
        (decision,) = await self._retry([Request(limit, identifier, cost)], timeout)
        return decision

    async def _retry(self, requests: list[Request], timeout: float | None) -> list[Decision]:
        checked_timeout(timeout)
        loop = asyncio.get_running_loop()
        deadline = Deadline.after(timeout, loop.time())
        while True:
            if len(requests) == 1:
                decisions = [await self.limit(*requests[0])]
            else:
                decisions = await self.limit_many(requests)
            wait_s = pause_s(decisions, deadline.remaining(loop.time()))
            if wait_s is None:
                return decisions
            await asyncio.sleep(wait_s)

    def limited(
        self,
        *limits: Limit,
        key: Callable[..., str] | None = None,
        cost: int | Callable[..., int] = 1,
        timeout: float | None = 0,
    ) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Coroutine[Any, Any, R]]]:
        """Decorate a coroutine function (async def) so that each call must be allowed by all `limits`.

        `key` gets the arguments of the call and returns the identifier; without it all calls share one counter.
        `cost` is a number, or a function like `key`. Several limits are one batch: all are consumed, or none.
        A denied call waits up to `timeout` seconds (None: as long as it takes), then raises `LimitExceeded`.
        """
        call = LimitedCall(limits, key, cost, timeout)

        def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R]]:
            check_coroutine_function(function)

            @functools.wraps(function)
            async def limited(*args: P.args, **kwargs: P.kwargs) -> R:
                requests = call.requests(args, kwargs)
                check_decisions(requests, await self._retry(requests, call.timeout))
                return await function(*args, **kwargs)

            return limited

        return decorate

    # -- start and stop

    async def start(self) -> None:
        """Start the background work. Raises what can never work; a dependency that is down is not an error."""
        starting = self._start()
        if starting is not None:
            await asyncio.shield(starting)

    async def _begin(self) -> None:
        """Start for a request. It waits for the origin no longer than for a read, and not for the ledger; then it is
        decided from memory."""
        starting = self._start()
        if starting is None:
            return
        node = self._parts.node
        assert node is not None
        await wait_for_event(node.can_decide, self._start_by.remaining(asyncio.get_running_loop().time()))
        if starting.done():
            starting.result()
        elif self._life.state is LimiterState.STARTING:
            self._set_gate()

    def _start(self) -> asyncio.Task[None] | None:
        """The start under way, one for all callers; None when there is nothing to wait for."""
        self._raise_if_over()
        if self._life.state is LimiterState.NEW:
            node = self._parts.node
            assert node is not None
            loop = asyncio.get_running_loop()
            self._life.move(LimiterState.STARTING)
            self._start_by = Deadline.after(self._fleet.tuning.read_timeout_ms / 1000, loop.time())
            # Owned by the limiter: a caller that is cancelled does not cancel the start.
            self._starting = loop.create_task(node.start())
            self._starting.add_done_callback(self._on_started)
        return self._starting if self._life.state is LimiterState.STARTING else None

    def _start_without_loops(self) -> None:
        """Count as started, with both dependencies open; for `tidegate.testing.limiters` only."""
        assert self._parts.node is not None
        self._parts.node.assume_open()
        self._life.move(LimiterState.STARTING)
        self._start_ended(None)

    def _on_started(self, starting: asyncio.Task[None]) -> None:
        if starting is self._starting:
            self._starting = None
            if starting.cancelled():
                # Not by `stop`, which has changed the state before.
                self._loop_closed()
            else:
                self._start_ended(starting.exception())

    async def stop(self, timeout: float | None = None) -> None:
        """Stop the background work and flush the last counts, within `timeout` seconds (default: the tuning's)."""
        checked_timeout(timeout)
        if self._life.state is LimiterState.STOPPED:
            return
        node, starting = self._parts.node, self._starting
        self._life.move(LimiterState.STOPPED)
        if node is None:
            with self._gate:
                self._gate.resting = CLOSED
            return
        self._set_gate()
        if starting is not None:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
        await node.stop(timeout)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def _time_s(self) -> float:
        try:
            return asyncio.get_running_loop().time()
        except RuntimeError:
            return time.monotonic()

    def _after_fork_in_child(self) -> None:
        """A limiter that shares something starts again, as a new node."""
        if self._fleet.shares:
            INHERITED.append((self._parts, self._starting))
            self._renew()


def _cannot_settle(
    _limit: Limit, _identifier: str, _cost: int, _now_ms: int, _need: Need | Ticket
) -> Decision:
    raise AssertionError("an AsyncLimiter asks its gate without settling")


def _cannot_begin() -> None:
    raise AssertionError("an AsyncLimiter starts before it asks its gate")
