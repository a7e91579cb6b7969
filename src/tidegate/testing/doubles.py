"""For tests of applications: limiters that always allow, deny or fail, and what was consumed of a real one.

    limiter = DenyingLimiter(retry_after=30)
    assert answer_of(application(limiter)).status_code == 429
    assert limiter.requests[0].identifier == "user_123"

The doubles are limiters: everything that takes a `Limiter` or an `AsyncLimiter` takes them. They count nothing and
record the requests they got. Nothing here sleeps.
"""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.adapters.clock import WallClock
from tidegate.core.model import LOCAL, Decision, Limit, Request
from tidegate.errors import Closed, InvalidInput
from tidegate.runtime.async_limiter import AsyncLimiter
from tidegate.runtime.limiter import Limiter
from tidegate.testing.clock import ManualClock

__all__ = [
    "AllowingLimiter",
    "AsyncAllowingLimiter",
    "AsyncDenyingLimiter",
    "AsyncFailingLimiter",
    "DenyingLimiter",
    "FailingLimiter",
    "advance_to_reset",
    "advance_until_empty",
    "consumed",
]


class _Double(Limiter):
    """Answers without counting; subclasses say what."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []

    def _answer(self, request: Request, now_ms: int) -> Decision:
        raise NotImplementedError

    def limit(self, limit: Limit, identifier: str, cost: int = 1, *, now_ms: int | None = None) -> Decision:
        return self.limit_many([Request(limit, identifier, cost)], now_ms=now_ms)[0]

    def limit_many(self, requests: Sequence[Request], *, now_ms: int | None = None) -> list[Decision]:
        self.requests += requests
        at_ms = WallClock().now_ms() if now_ms is None else now_ms
        return [self._answer(request, at_ms) for request in requests]


class _AsyncDouble(AsyncLimiter):
    """The same for tasks: asks its counterpart for threads."""

    _double: _Double

    @property
    def requests(self) -> list[Request]:
        """What was asked, in order."""
        return self._double.requests

    def limit_nowait(
        self, limit: Limit, identifier: str, cost: int = 1, *, now_ms: int | None = None
    ) -> Decision | None:
        return self._double.limit(limit, identifier, cost, now_ms=now_ms)

    async def limit(
        self, limit: Limit, identifier: str, cost: int = 1, *, now_ms: int | None = None
    ) -> Decision:
        return self._double.limit(limit, identifier, cost, now_ms=now_ms)

    def limit_many_nowait(
        self, requests: Sequence[Request], *, now_ms: int | None = None
    ) -> list[Decision] | None:
        return self._double.limit_many(requests, now_ms=now_ms)

    async def limit_many(self, requests: Sequence[Request], *, now_ms: int | None = None) -> list[Decision]:
        return self._double.limit_many(requests, now_ms=now_ms)


class AllowingLimiter(_Double):
    """Allows everything, for tests that are about something else."""

    def _answer(self, request: Request, now_ms: int) -> Decision:
        limit, _, cost = request
        return Decision(True, limit, max(0, limit.quota - cost), now_ms, cost, 0, LOCAL, -1, -1)


class DenyingLimiter(_Double):
    """Denies everything; `retry_after` in seconds, None for "never fits"."""

    def __init__(self, retry_after: float | None = 60.0) -> None:
        super().__init__()
        if retry_after is not None and not retry_after > 0:
            raise InvalidInput("retry_after", retry_after, "seconds above 0, or None")
        self._retry_ms = -1 if retry_after is None else round(retry_after * 1000)

    def _answer(self, request: Request, now_ms: int) -> Decision:
        limit, _, cost = request
        return Decision(False, limit, 0, now_ms, limit.quota + cost, self._retry_ms, LOCAL, -1, -1)


class FailingLimiter(_Double):
    """Raises: a limiter that was stopped, unless `error` says otherwise. A shared dependency that is down raises
    nothing: use `FailingOrigin` and `FailingLedger` for that."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self._error = Closed("this limiter always fails, for a test") if error is None else error

    def _answer(self, request: Request, now_ms: int) -> Decision:
        raise self._error


class AsyncAllowingLimiter(_AsyncDouble):
    """`AllowingLimiter` for tasks."""

    def __init__(self) -> None:
        super().__init__()
        self._double = AllowingLimiter()


class AsyncDenyingLimiter(_AsyncDouble):
    """`DenyingLimiter` for tasks."""

    def __init__(self, retry_after: float | None = 60.0) -> None:
        super().__init__()
        self._double = DenyingLimiter(retry_after)


class AsyncFailingLimiter(_AsyncDouble):
    """`FailingLimiter` for tasks."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self._double = FailingLimiter(error)


def consumed(limiter: Limiter | AsyncLimiter, limit: Limit, identifier: str) -> int:
    """What counts against an identifier now, without consuming: `assert consumed(limiter, limit, "ann") == 2`."""
    if isinstance(limiter, Limiter):
        return limiter.peek(limit, identifier).effective
    decision = limiter.limit_nowait(limit, identifier, 0)
    if decision is None:
        raise RuntimeError(
            "this limiter would have to read its origin first: await limiter.peek(limit, identifier)"
        )
    return decision.effective


def advance_to_reset(clock: ManualClock, limit: Limit) -> int:
    """Move to the next window, `reset_at` of a decision; returns the new time.

    The window slides: what was consumed in the last one still counts at its beginning, and less and less until its end.
    """
    duration_ms = limit.duration_ms
    clock.set((clock.now_ms() // duration_ms + 1) * duration_ms)
    return clock.now_ms()


def advance_until_empty(clock: ManualClock, limit: Limit) -> int:
    """Move on until nothing that was consumed before counts any more; returns the new time."""
    advance_to_reset(clock, limit)
    return advance_to_reset(clock, limit)
