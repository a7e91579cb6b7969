"""Limiters with a clock, node id, randomness or sleep of the test's own; everything else as in the public classes.

clock = ManualClock(1_700_000_000_000)
limiter = make_limiter(clock=clock)
limiter.limit(Limit("2/minute", namespace="tests"), "user_123")
clock.advance(60_000)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from random import Random

from tidegate.adapters.clock import WallClock
from tidegate.core.model import Tuning
from tidegate.ports import Clock, Ledger, Origin
from tidegate.runtime.async_limiter import AsyncLimiter
from tidegate.runtime.environment import Environment
from tidegate.runtime.limiter import Limiter

__all__ = ["make_async_limiter", "make_limiter"]


def make_limiter(
    *,
    region: str | None = None,
    origin: str | Origin | None = None,
    ledger: str | Ledger | None = None,
    tuning: Tuning | None = None,
    clock: Clock | None = None,
    node_id: str | None = None,
    random: Random | None = None,
    sleep: Callable[[float], object] | None = None,
) -> Limiter:
    """A `Limiter`. With `sleep`, which should advance `clock`, its `wait` measures time by that clock."""
    clock = clock or WallClock()
    environment = Environment(
        clock=clock,
        node_id=node_id,
        random=random or Random(),
        sleep=sleep or time.sleep,
        monotonic_s=time.monotonic if sleep is None else lambda: clock.now_ms() / 1000,
        monotonic_ns=_monotonic_ns(clock),
    )
    return Limiter._in_environment(  # noqa: SLF001 - it is made for this
        environment, region=region, origin=origin, ledger=ledger, tuning=tuning
    )


def make_async_limiter(
    *,
    region: str | None = None,
    origin: str | Origin | None = None,
    ledger: str | Ledger | None = None,
    tuning: Tuning | None = None,
    clock: Clock | None = None,
    node_id: str | None = None,
    random: Random | None = None,
    monotonic_ns: Callable[[], int] | None = None,
    run_loops: bool = True,
) -> AsyncLimiter:
    """An `AsyncLimiter`. Its `wait` sleeps on the event loop, by the loop's own clock.

    `monotonic_ns` is a clock that never steps back; without it `clock` must not step back either.

    With `run_loops=False` it counts as started, its dependencies as open, and nothing runs by itself: the caller
    takes every step with the `run_once` of a loop.
    """
    clock = clock or WallClock()
    environment = Environment(
        clock=clock,
        node_id=node_id,
        random=random or Random(),
        monotonic_ns=monotonic_ns or _monotonic_ns(clock),
    )
    limiter = AsyncLimiter._in_environment(  # noqa: SLF001 - it is made for this
        environment, region=region, origin=origin, ledger=ledger, tuning=tuning
    )
    if not run_loops:
        limiter._start_without_loops()  # noqa: SLF001 - the same
    return limiter


def _monotonic_ns(clock: Clock) -> Callable[[], int]:
    """That of the machine, unless the test has a clock of its own."""
    return time.monotonic_ns if isinstance(clock, WallClock) else lambda: clock.now_ms() * 1_000_000
