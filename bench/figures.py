"""Shared by the benchmarks of one region: the lines of their table, the amounts, and how a rate is measured."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from tidegate import AsyncLimiter, Limit, Limiter

__all__ = [
    "DECISIONS_PER_TURN",
    "FREE",
    "FULL",
    "HOUR_MS",
    "QUICK",
    "REGION",
    "SUBJECTS",
    "Figure",
    "Scale",
    "acknowledged",
    "rate_of",
]

REGION = "bench"
HOUR_MS = 3_600_000
FREE = Limit(10**12, duration_ms=HOUR_MS, namespace="bench")
SUBJECTS = [f"user_{n}" for n in range(10_000)]
TASKS = 64
# The event loop of a server runs one turn per batch of ready sockets: this many decisions per turn.
DECISIONS_PER_TURN = 64


class Figure(NamedTuple):
    """One line of the table."""

    what: str
    value: str
    against: str
    target: str
    met: bool | None
    """None if there is no target."""


class Scale(NamedTuple):
    """How much of everything."""

    decisions: int
    seconds: float
    turns: int
    freeze_s: float


FULL = Scale(decisions=300_000, seconds=4.0, turns=400, freeze_s=10.0)
QUICK = Scale(decisions=30_000, seconds=0.5, turns=40, freeze_s=4.0)


async def acknowledged(limiter: AsyncLimiter | Limiter, poll_s: float = 0.0005) -> None:
    """Return when everything accepted has been acknowledged, checked every `poll_s`."""
    while True:
        now = limiter.statistics()
        if now.origin_dirty_subjects == 0 and now.replay_lag_s == 0.0:
            return
        await asyncio.sleep(poll_s)


async def rate_of(call: Callable[[str], Awaitable[Any]], seconds: float, *, yields: bool) -> float:
    """Decisions per CPU second of this process, with this many concurrent tasks over all subjects.

    Everything that is compared keeps its core busy, so on an idle machine this equals the rate per second of real time;
    on a busy one it leaves out the time of other programs.
    """
    ends_s = time.perf_counter() + seconds
    done = 0

    async def task(number: int) -> None:
        nonlocal done
        position = number * len(SUBJECTS) // TASKS
        while time.perf_counter() < ends_s:
            for _ in range(DECISIONS_PER_TURN if yields else 1):
                await call(SUBJECTS[position % len(SUBJECTS)])
                position += 1
                done += 1
            if yields:
                await asyncio.sleep(0)

    started_s = time.process_time()
    # With this many decisions between two turns of the loop, one task is as good as many.
    await asyncio.gather(*(task(number) for number in range(1 if yields else TASKS)))
    return done / (time.process_time() - started_s)
