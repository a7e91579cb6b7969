"""`Limiter` for threads. With `AsyncLimiter` for tasks (`async_limiter`): two thin drivers over one engine.

Both decide through a `Gate`, and wait for the origin when it answers that the origin must be asked first. Neither
contains a rule of its own. An embedded limiter starts nothing. One with an origin or a ledger runs a `Node`: on the
caller's event loop, or on a loop in one thread that the `Limiter` owns. A limiter that was made before a fork works in
the child, as a new node with connections of its own.

What only a shared limiter needs (asyncio, the loops of a node, drivers) is imported when one is made: an embedded one
is ready in half the time.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, Self, TypeVar

from tidegate.adapters.deadline import Deadline
from tidegate.adapters.forks import FORK_WAIT_S, INHERITED
from tidegate.core.freshness import Need
from tidegate.core.gate import CLOSED, NOT_STARTED, LimitMethod
from tidegate.core.model import DEGRADED, ORIGIN, Decision, Limit, Request, Tuning
from tidegate.core.tickets import Ticket
from tidegate.ports import Ledger, Origin
from tidegate.runtime.driver import Driver, LimiterState, checked_batch
from tidegate.runtime.environment import Environment
from tidegate.runtime.fleet import Fleet, Parts
from tidegate.runtime.limited import LimitedCall, check_decisions, check_plain_function
from tidegate.runtime.reservation import Ending, Item, Reservation, Taken, in_order, merged
from tidegate.runtime.usage import Usage
from tidegate.runtime.waiting import checked_timeout, pause_s

if TYPE_CHECKING:
    from tidegate.runtime.node_thread import NodeThread

__all__ = ["Limiter"]

P = ParamSpec("P")
R = TypeVar("R")


class Limiter(Driver, LimitMethod):
    """A limiter for threads.

    `Limiter()` is embedded: one process, nothing to start. With `region`, `origin` and `ledger` it is a node of a
    fleet, whose background work runs in one thread of its own from the first call, or `start`, to `stop`.
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

    if TYPE_CHECKING:
        # The compiled base class has this method, and takes objects that it checks.
        def limit(
            self, limit: Limit, identifier: str, cost: int = 1, *, now_ms: int | None = None
        ) -> Decision:
            """Decide, and consume `cost` if it fits. Cost 0 checks without consuming."""

    def _make(self) -> None:
        # Guards the life cycle and `_thread`. Taken before the gate's lock, never inside it.
        self._start_lock = threading.Lock()
        self._lock = threading.RLock()
        self._is_held_for_fork = False
        self._thread: NodeThread | None = None
        self._parts = self._fleet.make(
            self._wake, self._settle, self._begin, _ignore, self._lock.acquire, self._lock.release
        )
        self._gate = self._parts.gate

    def _wake(self) -> None:
        """Called by any thread after a decision left work."""
        thread, node = self._thread, self._parts.node
        if thread is not None and node is not None and not node.is_awake:
            thread.call_soon(node.wake)

    def _settle(self, limit: Limit, identifier: str, cost: int, now_ms: int, need: Need | Ticket) -> Decision:
        if isinstance(need, Ticket):
            return self._wait_for(need)[0]
        decision = self._gate.decide(limit, identifier, cost, now_ms, self._read([need]))
        assert isinstance(decision, Decision), "after reading, the engine decides"
        return decision

    def _wait_for(self, ticket: Ticket) -> list[Decision]:
        thread = self._thread
        if thread is not None:
            # It is decided in time by itself. If the node's thread gets no time to run, the caller does not wait.
            thread.wait_for(ticket, 1.1 * self._fleet.tuning.read_timeout_ms / 1000)
        if ticket.decisions is None:
            node = self._parts.node
            assert node is not None and node.exchanges is not None
            node.exchanges.give_up(ticket)
        assert ticket.decisions is not None
        return ticket.decisions

    def _read(self, needs: list[Need]) -> int:
        thread = self._thread
        if thread is None:
            return DEGRADED
        # A read ends by itself in time. If the node's thread gets no time to run, the caller does not wait for it.
        return ORIGIN if thread.read(needs, 1.1 * self._fleet.tuning.read_timeout_ms / 1000) else DEGRADED

    # -- decisions

    def limit_many(self, requests: Sequence[Request], *, now_ms: int | None = None) -> list[Decision]:
        """Decide a batch at one instant: all items are consumed, or none.

        Limits in shadow mode do not decide about the others: each is consumed, if it fits, after the batch is allowed.
        """
        requests = checked_batch(requests)
        if not self._gate.is_open:
            self._begin()
        at_ms = self._gate.now_ms() if now_ms is None else now_ms
        if self._parts.engine.has_credit:
            answer = self._gate.ask_many(requests, at_ms)
            if answer is None:
                return self._limit_with_shadows(requests, at_ms)
            return self._wait_for(answer) if isinstance(answer, Ticket) else answer
        decisions, needs = self._gate.decide_many(requests, at_ms)
        if decisions is None and not needs:
            return self._limit_with_shadows(requests, at_ms)
        if decisions is None:
            decisions, _ = self._gate.decide_many(requests, at_ms, self._read(needs))
            assert decisions is not None, "after reading, the engine decides"
        return decisions

    def _limit_with_shadows(self, requests: Sequence[Request], at_ms: int) -> list[Decision]:
        # The methods of this class: what a subclass adds to its own is for the whole batch.
        enforced = [request for request in requests if not request.limit.shadow]
        decisions = Limiter.limit_many(self, enforced, now_ms=at_ms) if enforced else []
        shadows = [
            Limiter.limit(self, limit, identifier, cost * all(decisions), now_ms=at_ms)
            for limit, identifier, cost in requests
            if limit.shadow
        ]
        return in_order(requests, decisions, shadows)

    def peek(self, limit: Limit, identifier: str, *, now_ms: int | None = None) -> Decision:
        """The present state of a counter, without consuming."""
        return self.limit(limit, identifier, 0, now_ms=now_ms)

    def usage(self, limit: Limit, identifier: str, *, now_ms: int | None = None) -> Usage:
        """What counts against a limit, and where each part was accepted. Consumes nothing."""
        decision = self.peek(limit, identifier, now_ms=now_ms)
        node, thread = self._parts.node, self._thread
        known = None
        if node is not None and thread is not None:
            key = (limit.workspace, limit.namespace, limit.duration_ms)
            known = thread.run(node.usage(key, identifier, decision.decided_at_ms))
        return self._usage(identifier, decision, known)

    def reset(self, limit: Limit, identifier: str) -> bool:
        """Set the counter of `identifier` back to zero: here at once, on every node and in every region within 2 s.

        True if Redis and the database have confirmed it; otherwise this process repeats it until they do. What is
        reserved stays reserved. Raises `TooManyResets` if the workspace has as many live resets as it may.
        """
        if not self._gate.is_open:
            self._begin()
        reset = self._reset_here(limit, identifier)
        node, thread = self._parts.node, self._thread
        return True if node is None or thread is None else thread.run(node.resets.spread(reset))

    def reserve(
        self, limit: Limit, identifier: str, estimate: int, *, life: float | None = None
    ) -> Reservation:
        """Keep `estimate` for a block of work whose cost is known only at its end.

        `with limiter.reserve(limit, identifier, estimate) as r: …; r.settle(actual)`. Raises `LimitExceeded` if
        the estimate does not fit, `TooManyReservations` if the workspace holds as many as it may.

        It counts like cost until the end of the block, and no longer than `life` seconds (default: the window). If the
        block ends without `settle`, the estimate is counted; if it raises, the reservation is released.
        """
        return self.reserve_many([Request(limit, identifier, estimate)], life=life)

    def reserve_many(self, requests: Sequence[Request], *, life: float | None = None) -> Reservation:
        """`reserve` under several limits, all or nothing; `life` is that of the shortest window by default."""
        return Reservation(checked_batch(requests), life, self._take, self._end_taken)

    def _take(self, requests: Sequence[Request], life_ms: int) -> Taken:
        if not self._gate.is_open:
            self._begin()
        at_ms = self._gate.now_ms()
        items = merged([request for request in requests if not request.limit.shadow])
        reserving, thread = self._reserving, self._thread
        if reserving is None or thread is None or not items:
            taken = self._reserve_here(items, life_ms, at_ms)
        else:
            taken = thread.run(reserving.take(items, self._reservation_name, life_ms, at_ms))
        taken.check_room()
        return taken.for_requests(requests, [self.limit(*each) for each in requests if each.limit.shadow])

    def _end_taken(self, taken: Taken, items: list[Item]) -> Ending:
        reserving, thread = self._reserving, self._thread
        if reserving is None or thread is None or not taken.name:
            return self._end_here(taken.name, items)
        return thread.run(reserving.end(taken.name, items, is_first=True))

    def wait(self, limit: Limit, identifier: str, cost: int = 1, *, timeout: float | None = None) -> Decision:
        """Wait until the cost fits and consume it, or give up: then the last denial is returned.

        Gives up at once when the cost cannot fit within `timeout` seconds, or ever.
        """
        (decision,) = self._retry([Request(limit, identifier, cost)], timeout)
        return decision

    def _retry(self, requests: list[Request], timeout: float | None) -> list[Decision]:
        checked_timeout(timeout)
        environment = self._fleet.environment
        deadline = Deadline.after(timeout, environment.monotonic_s())
        while True:
            decisions = [self.limit(*requests[0])] if len(requests) == 1 else self.limit_many(requests)
            wait_s = pause_s(decisions, deadline.remaining(environment.monotonic_s()))
            if wait_s is None:
                return decisions
            environment.sleep(wait_s)

    def limited(
        self,
        *limits: Limit,
        key: Callable[..., str] | None = None,
        cost: int | Callable[..., int] = 1,
        timeout: float | None = 0,
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorate a function so that each call must be allowed by all `limits`.

        `key` gets the arguments of the call and returns the identifier; without it all calls share one counter.
        `cost` is a number, or a function like `key`. Several limits are one batch: all are consumed, or none.
        A denied call waits up to `timeout` seconds (None: as long as it takes), then raises `LimitExceeded`.
        """
        call = LimitedCall(limits, key, cost, timeout)

        def decorate(function: Callable[P, R]) -> Callable[P, R]:
            check_plain_function(function)

            @functools.wraps(function)
            def limited(*args: P.args, **kwargs: P.kwargs) -> R:
                requests = call.requests(args, kwargs)
                check_decisions(requests, self._retry(requests, call.timeout))
                return function(*args, **kwargs)

            return limited

        return decorate

    # -- start and stop

    def start(self) -> None:
        """Start the background work. Raises what can never work; a dependency that is down is not an error."""
        thread = self._start()
        if thread is not None:
            thread.wait_started()

    def _begin(self) -> None:
        """Start for a request. It waits for the origin no longer than for a read, and not for the ledger; then it is
        decided from memory."""
        thread = self._start()
        if thread is not None:
            thread.wait_can_decide()
            with self._start_lock:
                if self._life.state is LimiterState.STARTING:
                    self._set_gate()

    def _start(self) -> NodeThread | None:
        """The thread, started; None when there is nothing to wait for."""
        with self._start_lock:
            self._raise_if_over()
            if self._life.state is LimiterState.NEW:
                from tidegate.runtime.node_thread import NodeThread

                assert self._parts.node is not None
                self._life.move(LimiterState.STARTING)
                self._thread = NodeThread(
                    self._parts.node, self._on_started, self._fleet.tuning.read_timeout_ms / 1000
                )
                self._thread.begin()
            return self._thread

    def _on_started(self, failure: BaseException | None) -> None:
        """Called in the node's thread."""
        with self._start_lock:
            if failure is not None:
                self._thread = None
            self._start_ended(failure)

    def stop(self, timeout: float | None = None) -> None:
        """Stop the background work and flush the last counts, within `timeout` seconds (default: the tuning's)."""
        checked_timeout(timeout)
        with self._start_lock:
            if self._life.state is LimiterState.STOPPED:
                return
            thread = self._thread
            with self._gate:
                # With a thread, its last flush closes the gate: requests that wait for a read are decided before.
                self._gate.resting = CLOSED if thread is None else NOT_STARTED
            self._life.move(LimiterState.STOPPED)
            self._thread = None
        if thread is not None:
            thread.stop(timeout)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _time_s(self) -> float:
        return time.monotonic()

    # -- forks

    def _before_fork(self) -> None:
        """Wait until no other thread is in the middle of a decision, so that the child does not inherit half of one.
        Bounded, because a fork must not hang."""
        self._is_held_for_fork = self._lock.acquire(timeout=FORK_WAIT_S)

    def _after_fork_in_parent(self) -> None:
        """Let decisions continue."""
        if self._is_held_for_fork:
            self._is_held_for_fork = False
            self._lock.release()

    def _after_fork_in_child(self) -> None:
        """A limiter that shares something starts again, as a new node. Every lock is new, because the thread that held
        the old one does not exist in the child."""
        if self._fleet.shares:
            INHERITED.append((self._parts, self._thread))
            self._renew()
            return
        self._is_held_for_fork = False
        self._start_lock = threading.Lock()
        self._lock = threading.RLock()
        self._gate = self._gate.with_lock(self._lock.acquire, self._lock.release)
        self._parts = Parts(self._parts.engine, self._gate, None)


def _ignore() -> None:
    """The event loop of a Limiter's own thread ends with `stop` only."""
