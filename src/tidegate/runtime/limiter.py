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
import os
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from random import Random
from types import TracebackType
from typing import Any, ParamSpec, Protocol, Self, TypeVar

from tidegate.core.engine import Need
from tidegate.core.model import DEGRADED, ORIGIN, Decision, Limit, Request, Tuning
from tidegate.errors import Closed, LimitExceeded
from tidegate.ports import Clock, Ledger, Origin
from tidegate.runtime.fleet import Fleet, Parts
from tidegate.runtime.statistics import Health, Statistics
from tidegate.runtime.waiting import pause_s

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
        self._starting: asyncio.Task[None] | None = None
        self._make()
        LIVING.add(self)

    def _make(self) -> None:
        self._is_forked = False
        self._parts = self._fleet.make(self._wake, _cannot_settle)
        self._started = not self._fleet.shares
        self._starting = None
        self._gate = self._parts.gate

    def _wake(self) -> None:
        node = self._parts.node
        if node is not None:
            node.wake()

    # -- deciding

    def limit_nowait(
        self, limit: Limit, identifier: str, cost: int = 1, *, now_ms: int | None = None
    ) -> Decision | None:
        """A decision from memory, or None when `limit` would have to read the origin first."""
        answer = self._gate.ask(limit, identifier, cost, now_ms)
        return answer if isinstance(answer, Decision) else None

    async def limit(
        self, limit: Limit, identifier: str, cost: int = 1, *, now_ms: int | None = None
    ) -> Decision:
        """Decide, and consume `cost` if it fits. Cost 0 looks without consuming."""
        if not self._started:
            await self.start()
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
        """A batch from memory, or None when `limit_many` would have to read the origin first."""
        decisions, _ = self._gate.decide_many(requests, now_ms)
        return decisions

    async def limit_many(self, requests: Sequence[Request], *, now_ms: int | None = None) -> list[Decision]:
        """Decide a batch at one instant: all items are consumed, or none."""
        if not self._started:
            await self.start()
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
        if self._closed:
            raise Closed("this limiter was stopped; make a new one")
        if self._started:
            return
        if self._is_forked:
            self._make()
        if self._starting is None:
            node = self._parts.node
            assert node is not None
            # Owned by the limiter: callers that arrive together share one start, and one that leaves ends nothing.
            self._starting = asyncio.get_running_loop().create_task(node.start())
        starting = self._starting
        try:
            await asyncio.shield(starting)
        except BaseException:
            if starting.done() and self._starting is starting:
                self._starting = None
            raise
        self._started = True

    async def stop(self, timeout_s: float | None = None) -> None:
        """Stop the background work and flush the last counts, within a deadline."""
        if self._closed:
            return
        self._closed = True
        node = self._parts.node
        if node is not None:
            if self._starting is not None and not self._starting.done():
                self._starting.cancel()
                await asyncio.gather(self._starting, return_exceptions=True)
            await node.stop(timeout_s)
        self._started = False

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

    def renew_after_fork(self) -> None:
        """In a forked child: a limiter that shares something begins again, as a node of its own."""
        if self._fleet.shares:
            self._is_forked = True
            self._started = False

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
        self._start_lock = threading.Lock()
        self._make()
        LIVING.add(self)

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
        self.start()
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
        return ORIGIN if thread.read(needs, 2 * self._fleet.tuning.read_timeout_ms / 1000) else DEGRADED

    # -- deciding

    def limit_many(self, requests: Sequence[Request], *, now_ms: int | None = None) -> list[Decision]:
        """Decide a batch at one instant: all items are consumed, or none."""
        if self._fleet.shares and self._thread is None:
            self.start()
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
        if self._closed:
            raise Closed("this limiter was stopped; make a new one")
        if not self._fleet.shares:
            return
        with self._start_lock:
            if self._is_forked:
                self._make()
            if self._thread is None:
                thread = NodeThread(self._parts)
                thread.start()
                self._thread = thread
                self.limit = self._gate.limit

    def stop(self, timeout_s: float | None = None) -> None:
        """Stop the background work and flush the last counts, within a deadline."""
        self._closed = True
        with self._start_lock:
            thread, self._thread = self._thread, None
            if self._fleet.shares:
                self.limit = self._first_limit
        if thread is not None:
            thread.stop(timeout_s)

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

    def renew_after_fork(self) -> None:
        """In a forked child: a limiter that shares something begins again, as a node of its own, and every lock is
        new, because the thread that held the old one may be gone."""
        self._start_lock = threading.Lock()
        self._lock = threading.RLock()
        if self._fleet.shares:
            self._is_forked = True
            self._thread = None
            self.limit = self._first_limit
        else:
            self._gate = self._gate.reopened(self._lock.acquire, self._lock.release)
            self._parts = Parts(self._parts.engine, self._gate, None)
            self.limit = self._gate.limit

    def __repr__(self) -> str:
        return _repr(self, self._fleet, self._parts)


class NodeThread:
    """A node on an event loop of its own, in one thread: what a `Limiter` with an origin or a ledger owns."""

    def __init__(self, parts: Parts) -> None:
        assert parts.node is not None
        self._node = parts.node
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="tidegate", daemon=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def start(self) -> None:
        self._thread.start()
        try:
            self._call(self._node.start()).result()
        except BaseException:
            self._end()
            raise

    def _call(self, coroutine: Coroutine[Any, Any, R]) -> Future[R]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def wake(self) -> None:
        """Called by any thread after a decision left work. The loop is only poked when it sleeps."""
        if not self._node.is_awake:
            self._loop.call_soon_threadsafe(self._node.wake)

    def read(self, needs: list[Need], timeout_s: float) -> bool:
        """Read on the node's loop and wait for it; False when a decision must do without."""
        assert self._node.reads is not None
        try:
            return self._call(self._node.reads.fetch(needs)).result(timeout_s)
        except TimeoutError:
            return False

    def stop(self, timeout_s: float | None) -> None:
        try:
            self._call(self._node.stop(timeout_s)).result()
        finally:
            self._end()

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


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


# Every limiter of this process. A forked child makes each a new node.
LIVING: weakref.WeakSet[Limiter | AsyncLimiter] = weakref.WeakSet()


def _renew_after_fork() -> None:
    for limiter in list(LIVING):
        limiter.renew_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_after_fork)
