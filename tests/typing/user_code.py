"""User code for mypy only: `assert_type` states what a type checker must infer, and each `type: ignore` marks an error
that it must find, because an unused one is an error too. Nothing here runs."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from typing import Any, assert_type

from tidegate import (
    AsyncLimiter,
    AsyncReservation,
    Decision,
    Health,
    InvalidInput,
    Limit,
    Limiter,
    LimitExceeded,
    Request,
    Reservation,
    Statistics,
    TidegateError,
    Tuning,
    Usage,
)
from tidegate.testing import ManualClock, make_async_limiter, make_limiter

LIMIT = Limit("100/minute", namespace="email.send")
HOURLY = Limit(1_000, duration_ms=3_600_000, namespace="email.send", workspace="acme")

limiter = Limiter(
    region="fra", origin="redis://localhost", ledger="mysql://localhost/x", tuning=Tuning(fresh_ms=1)
)
tasks = AsyncLimiter()

Limiter("redis://localhost")  # type: ignore[call-arg]
Limiter(clock=ManualClock())  # type: ignore[call-arg]
AsyncLimiter("fra")  # type: ignore[call-arg]
Limit("100/minute")  # type: ignore[call-arg]
Limit(1.5, namespace="x")  # type: ignore[arg-type]
Tuning(5)  # type: ignore[call-arg, arg-type]
LIMIT.quota = 5  # type: ignore[misc]


def decisions() -> None:
    decision = limiter.limit(LIMIT, "user", 2, now_ms=5)
    assert_type(decision, Decision)
    assert_type(decision.allowed, bool)
    assert_type(decision.limit, Limit)
    assert_type(decision.limit.quota, int)
    assert_type(decision.remaining, int)
    assert_type(decision.reset_at, float)
    assert_type(decision.reset_at_ms, int)
    assert_type(decision.retry_after, float | None)
    assert_type(decision.retry_after_ms, int | None)
    assert_type(decision.source, str)
    assert_type(decision.headers(), dict[str, str])
    assert_type(limiter.limit_many([Request(LIMIT, "user"), Request(HOURLY, "user", 2)]), list[Decision])
    assert_type(limiter.peek(LIMIT, "user"), Decision)
    assert_type(limiter.usage(LIMIT, "user"), Usage)
    assert_type(limiter.reset(LIMIT, "user"), bool)
    with limiter.reserve(LIMIT, "user", 5) as reservation:
        assert_type(reservation, Reservation)
        reservation.settle(3)
    assert_type(limiter.wait(LIMIT, "user", timeout=1.5), Decision)
    assert_type(limiter.health(), list[Health])
    assert_type(limiter.statistics(), Statistics)
    assert_type(limiter.statistics().subjects_evicted, Mapping[str, int])
    decision.allowed = True  # type: ignore[misc]
    limiter.limit("100/minute", "user")  # type: ignore[arg-type]
    limiter.limit(LIMIT, 5)  # type: ignore[arg-type]
    limiter.limit(LIMIT, "user", 1, 5)  # type: ignore[call-arg]
    limiter.stop(timeout=1)


async def decisions_of_tasks() -> None:
    assert_type(await tasks.limit(LIMIT, "user", 2, now_ms=5), Decision)
    assert_type(tasks.limit_nowait(LIMIT, "user"), Decision | None)
    assert_type(await tasks.limit_many([Request(LIMIT, "user")]), list[Decision])
    assert_type(tasks.limit_many_nowait([Request(LIMIT, "user")]), list[Decision] | None)
    assert_type(await tasks.peek(LIMIT, "user"), Decision)
    assert_type(await tasks.usage(LIMIT, "user"), Usage)
    assert_type(await tasks.reset(LIMIT, "user"), bool)
    async with tasks.reserve_many([Request(LIMIT, "user", 5)], life=1.5) as reservation:
        assert_type(reservation, AsyncReservation)
        reservation.settle(3)
    assert_type(await tasks.wait(LIMIT, "user", timeout=None), Decision)
    await tasks.stop(timeout=1)
    async with AsyncLimiter() as opened:
        assert_type(opened, AsyncLimiter)
    with Limiter() as embedded:
        assert_type(embedded, Limiter)


@limiter.limited(
    LIMIT, HOURLY, key=lambda user, text: str(user), cost=lambda user, text: len(text), timeout=None
)
def send(user: str, text: str) -> int:
    return len(user + text)


@tasks.limited(LIMIT, timeout=2.5)
async def send_later(user: str, *, text: str = "") -> int:
    return len(user + text)


async def decorated() -> None:
    assert_type(send("ann", "hello"), int)
    assert_type(await send_later("ann", text="hello"), int)
    returned: Callable[..., Coroutine[Any, Any, int]] = send_later
    assert_type(await returned("ann"), int)
    send(5, "hello")  # type: ignore[arg-type]
    send("ann")  # type: ignore[call-arg]
    await send_later("ann", "hello")  # type: ignore[call-arg]
    limiter.limited("100/minute")  # type: ignore[arg-type]
    limiter.limited(LIMIT, key="user")  # type: ignore[arg-type]
    tasks.limited(LIMIT)(len)  # type: ignore[arg-type]


class Counting(Limiter):
    """A subclass may override `limit` with the signature that it has."""

    calls: int = 0

    def limit(self, limit: Limit, identifier: str, cost: int = 1, *, now_ms: int | None = None) -> Decision:
        self.calls += 1
        return super().limit(limit, identifier, cost, now_ms=now_ms)


def errors() -> None:
    try:
        send("ann", "hello")
    except LimitExceeded as error:
        assert_type(error.decision, Decision)
        assert_type(error.decisions, tuple[Decision, ...])
    except InvalidInput as error:
        assert_type(error.field, str)
    except TidegateError as error:
        assert_type(error.transient, bool)


def tests_of_users() -> None:
    clock = ManualClock(1_700_000_000_000)
    assert_type(make_limiter(clock=clock, sleep=lambda seconds: None), Limiter)
    assert_type(make_async_limiter(clock=clock, node_id="n1"), AsyncLimiter)
