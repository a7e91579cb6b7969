"""`Limiter` for threads and `AsyncLimiter` for tasks: two thin drivers over one engine.

Both decide through a `Gate`, and obey it when it says that a read must come first. Neither contains a rule of its
own. An embedded limiter starts nothing. One with an origin or a ledger runs a `Node`: on the caller's event loop,
or on a loop in one thread that the `Limiter` owns. A limiter that was made before a fork works in the child, as a
new node with connections of its own.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from copy import copy
from random import Random
from types import TracebackType
from typing import Any, ParamSpec, Protocol, Self, TypeVar

from tidegate.core.engine import Need
from tidegate.core.model import DEGRADED, ORIGIN, Decision, Limit, Request, Tuning
from tidegate.errors import Closed, ConfigurationError, InvalidInput, LimitExceeded
from tidegate.ports import Clock, Ledger, Origin
from tidegate.runtime.fleet import Fleet, Parts
from tidegate.runtime.forks import FORK_WAIT_S, INHERITED, follow_forks
from tidegate.runtime.loops import wait_for_event
from tidegate.runtime.node_thread import NodeThread
from tidegate.runtime.statistics import Health, Statistics
from tidegate.runtime.waiting import checked_timeout, pause_s

__all__ = ["AsyncLimiter", "LimitCall", "Limiter"]

P = ParamSpec("P")
R = TypeVar("R")


class LimitCall(Protocol):
    """The signature of `Limiter.limit`."""

    def __call__(
        self, limit: Limit, identifier: str, cost: int = 1, *, now_ms: int | None = None
    ) -> Decision: ...


class AsyncLimiter:
    """A limiter for one event loop.

    `AsyncLimiter()` is embedded: one process, nothing to start. With `region`, `origin` and `ledger` it is a node
    of a fleet; use it as an asynchronous context manager, or call `start` and `stop`.
    """

    def __init__(
        self,
        region: str | None = None,
        origin: str | Origin | None = None,
        ledger: str | Ledger | None = None,
        *,
        clock: Clock | None = None,
        tuning: Tuning | None = None,
        node_id: str | None = None,
        random: Random | None = None,
    ) -> None:
        self._fleet = Fleet(region, origin, ledger, clock, tuning, node_id, random)
        self._closed = False
        # What can never work was found at the start: told again to everybody who asks.
        self._failure: ConfigurationError | None = None
        self._starting: asyncio.Task[None] | None = None
        # Until when requests wait for it, by the loop's clock.
        self._start_by_s = 0.0
        self._make()
        follow_forks(self)

    def _make(self) -> None:
        self._is_forked = False
        self._use(self._fleet.make(self._wake, _cannot_settle))
        self._started = not self._fleet.shares
        self._gate = self._parts.gate

    def _use(self, parts: Parts) -> None:
        self._parts = parts
        self._starting = None
        if parts.node is not None:
            parts.node.on_cut_off = self._cut_off

    def _cut_off(self) -> None:
        """The event loop ends without a `stop`. Counts stay, and the next call starts again, on its own loop."""
        self._started = False
        self._use(self._fleet.make_for_new_loop(self._parts))

    def _wake(self) -> None:
        node = self._parts.node
        if node is not None:
            node.wake()

    # -- deciding

    def limit_nowait(
        self, limit: Limit, identifier: str, cost: int = 1, *, now_ms: int | None = None
    ) -> Decision | None:
        """A decision from memory, or None when `limit` would have to read the origin, or to start, first."""
        return self._gate.attempt(limit, identifier, cost, now_ms) if self._started else None

    @property
    def attempt(self) -> Callable[[Limit, str, int, int], Decision | None]:
        """`limit_nowait(limit, identifier, cost, now_ms=now_ms)` without a frame of Python, once `start` is over."""
        return self._gate.attempt

    @property
    def attempt_many(self) -> Callable[[list[tuple[Limit, str, int]], int], list[Decision] | None]:
        """`limit_many_nowait` in the same way, for requests that were checked before."""
        return self._gate.attempt_many

    async def limit(
        self, limit: Limit, identifier: str, cost: int = 1, *, now_ms: int | None = None
    ) -> Decision:
        """Decide, and consume `cost` if it fits. Cost 0 looks without consuming."""
        if not self._started:
            await self._begin()
        at_ms = self._gate.now_ms() if now_ms is None else now_ms
        answer = self._gate.ask(limit, identifier, cost, at_ms)
        if isinstance(answer, Decision):
            return answer
        source = await self._read([answer])
        decision = self._gate.decide(limit, identifier, cost, at_ms, source)
        assert isinstance(decision, Decision), "after reading, the engine decides"
        return decision

    def limit_many_nowait(
        self, requests: Sequence[Request], *, now_ms: int | None = None
    ) -> list[Decision] | None:
        """A batch from memory, or None when `limit_many` would have to read the origin, or to start, first."""
        if not self._started:
            return None
        decisions, _ = self._gate.decide_many(_batch(requests), now_ms)
        return decisions

    async def limit_many(self, requests: Sequence[Request], *, now_ms: int | None = None) -> list[Decision]:
        """Decide a batch at one instant: all items are consumed, or none."""
        if not self._started:
            await self._begin()
        requests = _batch(requests)
        at_ms = self._gate.now_ms() if now_ms is None else now_ms
        decisions, needs = self._gate.decide_many(requests, at_ms)
        if decisions is None:
            source = await self._read(needs)
            decisions, _ = self._gate.decide_many(requests, at_ms, source)
            assert decisions is not None, "after reading, the engine decides"
        return decisions

    async def _read(self, needs: list[Need]) -> int:
        node = self._parts.node
        assert node is not None and node.reads is not None, "only an engine with an origin asks for reads"
        return ORIGIN if await node.reads.fetch(needs) else DEGRADED

    async def peek(self, limit: Limit, identifier: str, *, now_ms: int | None = None) -> Decision:
        """How things stand, without consuming."""
        return await self.limit(limit, identifier, 0, now_ms=now_ms)

    async def wait(
        self, limit: Limit, identifier: str, cost: int = 1, *, timeout: float | None = None
    ) -> Decision:
        """Wait until the cost fits and consume it, or give up: then the last denial is returned.

        Gives up at once when the cost cannot fit within `timeout` seconds, or ever.
        """
        checked_timeout(timeout)
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        while True:
            decision = await self.limit(limit, identifier, cost)
            if decision:
                return decision
            wait_s = pause_s(decision, loop.time() - started_s, timeout)
            if wait_s is None:
                return decision
            await asyncio.sleep(wait_s)

    def limited(
        self, limit: Limit, *, key: Callable[..., str], cost: int = 1, wait: float | None = None
    ) -> Callable[[Callable[P, Awaitable[R]]], Callable[P, Coroutine[Any, Any, R]]]:
        """Decorate a coroutine function: `key` gets its arguments and names the identifier.

        A denial raises `LimitExceeded`; with `wait`, only after so many seconds were not enough.
        """

        def decorate(function: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R]]:
            @functools.wraps(function)
            async def limited(*args: P.args, **kwargs: P.kwargs) -> R:
                identifier = key(*args, **kwargs)
                if wait is None:
                    decision = await self.limit(limit, identifier, cost)
                else:
                    decision = await self.wait(limit, identifier, cost, timeout=wait)
                if not decision:
                    raise _exceeded(limit, identifier, decision)
                return await function(*args, **kwargs)

            return limited

        return decorate

    # -- start and stop

    async def start(self) -> None:
        """Start the background work. Raises what can never work; a dependency that is down is no error."""
        starting = self._start()
        if starting is not None:
            await asyncio.shield(starting)

    async def _begin(self) -> None:
        """Start for a request, which waits for the origin no longer than for a read, and for the ledger not at
        all; then it is decided from memory."""
        starting = self._start()
        if starting is None:
            return
        node = self._parts.node
        assert node is not None
        loop = asyncio.get_running_loop()
        await wait_for_event(node.can_decide, self._start_by_s - loop.time())
        if starting.done():
            starting.result()

    def _start(self) -> asyncio.Task[None] | None:
        """The start under way, one for all callers; None when there is nothing to wait for."""
        if self._closed:
            raise Closed("this limiter was stopped; make a new one")
        if self._failure is not None:
            raise copy(self._failure)
        if self._started:
            return None
        if self._is_forked:
            self._make()
        if self._starting is None:
            node = self._parts.node
            assert node is not None
            loop = asyncio.get_running_loop()
            self._start_by_s = loop.time() + self._fleet.tuning.read_timeout_ms / 1000
            # Owned by the limiter: a caller that goes away ends nothing.
            self._starting = loop.create_task(node.start())
            self._starting.add_done_callback(self._on_started)
        return self._starting

    def _on_started(self, starting: asyncio.Task[None]) -> None:
        if starting is not self._starting:
            return
        error = None if starting.cancelled() else starting.exception()
        if error is None and not starting.cancelled():
            self._started = not self._closed
            return
        self._starting = None
        if isinstance(error, ConfigurationError):
            self._failure = error

    async def stop(self, timeout_s: float | None = None) -> None:
        """Stop the background work and flush the last counts, within a deadline."""
        if self._closed:
            return
        self._closed = True
        self._started = False
        node = self._parts.node
        if node is None or self._is_forked:
            # A forked child that never began has nothing of its own to stop.
            with self._gate:
                self._gate.shut()
            return
        if self._starting is not None and not self._starting.done():
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await node.stop(timeout_s)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    # -- telling

    def health(self) -> list[Health]:
        """One line per dependency."""
        node = self._parts.node
        return [] if node is None else node.health(_loop_time())

    def statistics(self) -> Statistics:
        """Counters and gauges of every part, as of now."""
        return self._parts.statistics(self._fleet.region, _loop_time())

    def hold_for_fork(self) -> None:
        """Nothing to hold: its event loop's thread is the only one that decides."""

    def go_on_after_fork(self) -> None:
        """Nothing was held."""

    def renew_after_fork(self) -> None:
        """In a forked child: a limiter that shares something begins again, as a node of its own."""
        if self._fleet.shares:
            INHERITED.append((self._parts, self._starting))
            self._is_forked = True
            self._started = False
            self._starting = None

    def __repr__(self) -> str:
        return _repr(self, self._fleet, self._parts)


class Limiter:
    """A limiter for threads.

    `Limiter()` is embedded: one process, nothing to start. With `region`, `origin` and `ledger` it is a node of a
    fleet, whose background work runs in one thread of its own from the first call, or `start`, to `stop`.
    """

    limit: LimitCall
    """Decide, and consume `cost` if it fits: `limit(limit, identifier, cost=1, *, now_ms=None) -> Decision`.

    Bound to the compiled gate when the limiter is made, so that no Python frame stands between caller and engine.
    """

    def __init__(
        self,
        region: str | None = None,
        origin: str | Origin | None = None,
        ledger: str | Ledger | None = None,
        *,
        clock: Clock | None = None,
        tuning: Tuning | None = None,
        node_id: str | None = None,
        random: Random | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._fleet = Fleet(region, origin, ledger, clock, tuning, node_id, random)
        self._sleep = sleep
        self._closed = False
        self._failure: ConfigurationError | None = None
        self._held_for_fork = False
        self._start_lock = threading.Lock()
        self._make()
        follow_forks(self)

    def _make(self) -> None:
        self._is_forked = False
        self._lock = threading.RLock()
        self._thread: NodeThread | None = None
        self._parts = self._fleet.make(self._wake, self._settle, self._lock.acquire, self._lock.release)
        self._gate = self._parts.gate
        self.limit = self._first_limit if self._fleet.shares else self._gate.limit

    def _first_limit(
        self, limit: Limit, identifier: str, cost: int = 1, *, now_ms: int | None = None
    ) -> Decision:
        """Starts the background work at the first call, then gets out of the way."""
        self._begin()
        return self._gate.limit(limit, identifier, cost, now_ms=now_ms)

    def _wake(self) -> None:
        thread = self._thread
        if thread is not None:
            thread.wake()

    def _settle(self, limit: Limit, identifier: str, cost: int, now_ms: int, need: Need) -> Decision:
        decision = self._gate.decide(limit, identifier, cost, now_ms, self._read([need]))
        assert isinstance(decision, Decision), "after reading, the engine decides"
        return decision

    def _read(self, needs: list[Need]) -> int:
        thread = self._thread
        if thread is None:
            return DEGRADED
        # The read ends by itself; a little later it is the node's thread that gets no time, and nobody waits for that.
        return ORIGIN if thread.read(needs, 1.1 * self._fleet.tuning.read_timeout_ms / 1000) else DEGRADED

    # -- deciding

    def limit_many(self, requests: Sequence[Request], *, now_ms: int | None = None) -> list[Decision]:
        """Decide a batch at one instant: all items are consumed, or none."""
        if self._thread is None and (self._fleet.shares or self._closed):
            self._begin()
        requests = _batch(requests)
        at_ms = self._gate.now_ms() if now_ms is None else now_ms
        decisions, needs = self._gate.decide_many(requests, at_ms)
        if decisions is None:
            decisions, _ = self._gate.decide_many(requests, at_ms, self._read(needs))
            assert decisions is not None, "after reading, the engine decides"
        return decisions

    def peek(self, limit: Limit, identifier: str, *, now_ms: int | None = None) -> Decision:
        """How things stand, without consuming."""
        return self.limit(limit, identifier, 0, now_ms=now_ms)

    def wait(self, limit: Limit, identifier: str, cost: int = 1, *, timeout: float | None = None) -> Decision:
        """Wait until the cost fits and consume it, or give up: then the last denial is returned.

        Gives up at once when the cost cannot fit within `timeout` seconds, or ever.
        """
        checked_timeout(timeout)
        waited_s = 0.0
        while True:
            decision = self.limit(limit, identifier, cost)
            if decision:
                return decision
            wait_s = pause_s(decision, waited_s, timeout)
            if wait_s is None:
                return decision
            self._sleep(wait_s)
            waited_s += wait_s

    def limited(
        self, limit: Limit, *, key: Callable[..., str], cost: int = 1, wait: float | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Decorate a function: `key` gets its arguments and names the identifier.

        A denial raises `LimitExceeded`; with `wait`, only after so many seconds were not enough.
        """

        def decorate(function: Callable[P, R]) -> Callable[P, R]:
            if inspect.iscoroutinefunction(function):
                raise TypeError(f"{function!r} is a coroutine function: decorate it with an AsyncLimiter")

            @functools.wraps(function)
            def limited(*args: P.args, **kwargs: P.kwargs) -> R:
                identifier = key(*args, **kwargs)
                if wait is None:
                    decision = self.limit(limit, identifier, cost)
                else:
                    decision = self.wait(limit, identifier, cost, timeout=wait)
                if not decision:
                    raise _exceeded(limit, identifier, decision)
                return function(*args, **kwargs)

            return limited

        return decorate

    # -- start and stop

    def start(self) -> None:
        """Start the background work. Raises what can never work; a dependency that is down is no error."""
        thread = self._start()
        if thread is not None:
            thread.wait_started()

    def _begin(self) -> None:
        """Start for a request, which waits for the origin no longer than for a read, and for the ledger not at
        all; then it is decided from memory."""
        thread = self._start()
        if thread is not None:
            thread.wait_can_decide()

    def _start(self) -> NodeThread | None:
        """The thread, started; None when there is nothing to wait for."""
        with self._start_lock:
            if self._closed:
                raise Closed("this limiter was stopped; make a new one")
            if self._failure is not None:
                raise copy(self._failure)
            if not self._fleet.shares:
                return None
            if self._is_forked:
                self._make()
            if self._thread is None:
                assert self._parts.node is not None
                self._thread = NodeThread(
                    self._parts.node, self._on_started, self._fleet.tuning.read_timeout_ms / 1000
                )
                self._thread.begin()
            return self._thread

    def _on_started(self, failure: BaseException | None) -> None:
        """Called in the node's thread."""
        with self._start_lock:
            if failure is None:
                if not self._closed:
                    self.limit = self._gate.limit
                return
            self._thread = None
            if isinstance(failure, ConfigurationError):
                self._failure = failure

    def stop(self, timeout_s: float | None = None) -> None:
        """Stop the background work and flush the last counts, within a deadline."""
        with self._start_lock:
            self._closed = True
            thread, self._thread = self._thread, None
            self.limit = self._first_limit
        if thread is not None:
            thread.stop(timeout_s)
        elif not self._is_forked:
            with suppress(Closed), self._gate:
                self._gate.shut()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # -- telling

    def health(self) -> list[Health]:
        """One line per dependency."""
        node = self._parts.node
        return [] if node is None else node.health(time.monotonic())

    def statistics(self) -> Statistics:
        """Counters and gauges of every part, as of now."""
        return self._parts.statistics(self._fleet.region, time.monotonic())

    def hold_for_fork(self) -> None:
        """Before a fork: wait until no other thread is in the middle of a decision, so that the child does not
        inherit half of one. Bounded, because a fork must not hang; the child then has to take what it gets."""
        self._held_for_fork = self._lock.acquire(timeout=FORK_WAIT_S)

    def go_on_after_fork(self) -> None:
        """After a fork, in the parent."""
        if self._held_for_fork:
            self._held_for_fork = False
            self._lock.release()

    def renew_after_fork(self) -> None:
        """In a forked child: a limiter that shares something begins again, as a node of its own, and every lock is
        new, because the thread that held the old one may be gone."""
        self._held_for_fork = False
        self._start_lock = threading.Lock()
        self._lock = threading.RLock()
        if self._fleet.shares:
            INHERITED.append((self._parts, self._thread))
            self._is_forked = True
            self._thread = None
        else:
            self._gate = self._gate.reopened(self._lock.acquire, self._lock.release)
            self._parts = Parts(self._parts.engine, self._gate, None)
        self.limit = self._gate.limit if not self._fleet.shares and not self._closed else self._first_limit

    def __repr__(self) -> str:
        return _repr(self, self._fleet, self._parts)


def _batch(requests: Sequence[Request]) -> Sequence[Request]:
    """A batch is looked at more than once: what can be walked through only once would be decided as empty."""
    if isinstance(requests, (list, tuple)):
        return requests
    raise InvalidInput("requests", requests, "a list or a tuple of Request items")


def _cannot_settle(_limit: Limit, _identifier: str, _cost: int, _now_ms: int, _need: Need) -> Decision:
    raise AssertionError("an AsyncLimiter asks its gate without settling")


def _exceeded(limit: Limit, identifier: str, decision: Decision) -> LimitExceeded:
    return LimitExceeded(
        f"{identifier!r} is over {limit.quota} per {limit.duration_ms} ms in {limit.namespace!r}", decision
    )


def _loop_time() -> float:
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


def _repr(limiter: Limiter | AsyncLimiter, fleet: Fleet, parts: Parts) -> str:
    place = "embedded" if not fleet.shares else f"region {fleet.region!r}"
    return f"<{type(limiter).__name__} {place}, node {parts.engine.node_id}, {parts.engine.subjects.count} subjects>"
