"""The figures of the origin, on a real Redis on loopback, in one run.

Each figure is a function that returns lines: what, the number, what it is compared with, and the target; those of
credit are in `bench.credit`. Times of our own work are CPU time of this process; the Redis server is another process.
Peers are measured on the same server with the same number of concurrent tasks. `--quick` runs a tenth of everything.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from bench.credit import FIGURES
from bench.figures import (
    DECISIONS_PER_TURN,
    FREE,
    FULL,
    HOUR_MS,
    QUICK,
    REGION,
    SUBJECTS,
    Figure,
    Scale,
    acknowledged,
    rate_of,
)
from bench.machine import name_peers
from bench.turns import Figures, in_turns
from tidegate import AsyncLimiter, Limit, Tuning
from tidegate.adapters.redis.origin import RedisOrigin
from tidegate.testing import RedisServer

__all__ = ["main"]

PEERS = ("limits", "throttled-py")
ROUNDS = 9

# -- commands to the origin


async def blocked_subject(url: str, _scale: Scale) -> list[Figure]:
    """Commands for denied requests on one blocked subject."""
    origin = RedisOrigin(url)
    # No pulse: it asks once a second in any case, and is not counted here.
    async with AsyncLimiter(
        region=REGION, origin=origin, tuning=Tuning(pulse_interval_ms=HOUR_MS)
    ) as limiter:
        limit = Limit(10, duration_ms=HOUR_MS, namespace="bench")
        await limiter.limit(limit, "blocked", 10)
        await acknowledged(limiter)
        before = origin.statistics()["commands"]
        denied = 0
        for turn in range(100_000):
            denied += not await limiter.limit(limit, "blocked")
            if turn % DECISIONS_PER_TURN == 0:
                await asyncio.sleep(0)
        used = origin.statistics()["commands"] - before
    return [
        Figure(
            f"commands for {denied:,} denied requests, one blocked subject",
            f"{used}",
            "one read each: 100,000",
            "0 beyond the first few",
            used <= 5 and denied == 100_000,
        )
    ]


# -- what replay costs


async def replay_cost(url: str, scale: Scale) -> list[Figure]:
    """Cells merged per second and CPU per cell, with every cell dirty."""
    # Always fresh, so that no request has to read and only replay is measured.
    tuning = Tuning(credit=False, fresh_ms=HOUR_MS)
    async with AsyncLimiter(region=REGION, origin=url, tuning=tuning) as limiter:
        for name in SUBJECTS:
            await limiter.limit(FREE, name)
        await acknowledged(limiter)
        wall_s, cpu_s, cells = [], [], len(SUBJECTS)
        for _ in range(max(3, int(scale.seconds * 5))):
            for name in SUBJECTS:
                limiter.limit_nowait(FREE, name)
            assert limiter.statistics().origin_dirty_subjects == cells
            started_s, started_cpu_s = time.perf_counter(), time.process_time()
            await acknowledged(
                limiter, 0.005
            )  # rarely, because each query costs time that would be measured too
            wall_s.append(time.perf_counter() - started_s)
            cpu_s.append(time.process_time() - started_cpu_s)
    cpu_us = min(cpu_s) / cells * 1e6
    return [
        Figure("cells merged per second, without credit", f"{cells / min(wall_s):,.0f}", "", "", None),
        Figure("CPU per merged cell, client side", f"{cpu_us:.1f} µs", "", "", None),
        Figure(
            "CPU of replay at 10,000 distinct dirty cells per second",
            f"{cpu_us / 1e6 * 10_000 * 100:.1f} % of a core",
            "",
            "≤ 15 %",
            cpu_us * 0.01 <= 0.15,
        ),
    ]


# -- throughput


async def throughput(url: str, scale: Scale) -> list[Figure]:
    """`AsyncLimiter.limit` with a Redis origin against peers on the same server, and against embedded mode."""
    from limits import RateLimitItemPerHour
    from limits.aio.storage import RedisStorage
    from limits.aio.strategies import SlidingWindowCounterRateLimiter
    from throttled.asyncio import RedisStore, Throttled, per_hour

    sliding = SlidingWindowCounterRateLimiter(RedisStorage(f"async+{url}", implementation="redispy"))
    item = RateLimitItemPerHour(10**9)
    throttled = Throttled(using="sliding_window", quota=per_hour(10**9), store=RedisStore(server=url))
    embedded = AsyncLimiter()
    async with AsyncLimiter(region=REGION, origin=url) as limiter:
        calls: dict[str, Callable[[str], Awaitable[Any]]] = {
            "shared": lambda name: limiter.limit(FREE, name),
            "embedded": lambda name: embedded.limit(FREE, name),
            "limits": lambda name: sliding.hit(item, name),
            "throttled-py": throttled.limit,
        }
        await asyncio.gather(*(embedded.limit(FREE, name) for name in SUBJECTS))
        found = {name: Figures() for name in calls}
        for name in in_turns(calls, ROUNDS):
            if name == "shared":
                # Its credit has ended while others had their turns. Until the traffic of the last seconds is known, and
                # credit is asked for accordingly:
                await asyncio.gather(*(limiter.limit(FREE, each) for each in SUBJECTS))
                await rate_of(calls["shared"], scale.seconds, yields=True)
            await acknowledged(limiter)  # its messages are not part of the turns of others
            is_ours = name in ("shared", "embedded")
            found[name].append(await rate_of(calls[name], scale.seconds / 4, yields=is_ours))
    shared, alone = found["shared"], found["embedded"]
    best = max((found[name] for name in PEERS), key=lambda rates: rates.middle)
    return [
        Figure(
            "decisions per CPU second, Redis origin, 10,000 subjects",
            shared.shown(),
            ", ".join(f"{name} {found[name].shown()}" for name in PEERS),
            "",
            None,
        ),
        Figure(
            "  against the best peer on the same server",
            f"{shared.over(best).shown()} ×",
            "",
            "≥ 20 ×",
            shared.over(best).middle >= 20,
        ),
        Figure(
            "  against embedded mode",
            f"{shared.over(alone).middle:.0%}",
            f"embedded {alone.shown()}",
            "≥ 60 %",
            shared.over(alone).middle >= 0.6,
        ),
    ]


# -- time


async def convergence(url: str, scale: Scale) -> list[Figure]:
    """From the last accepted request of one node until another node decides with it, in round trips."""
    # Every peek of the second node is a read; other messages are turned off.
    tuning = Tuning(credit=False, pulse_interval_ms=HOUR_MS, fresh_ms=0)
    origins = [RedisOrigin(url), RedisOrigin(url)]
    async with (
        AsyncLimiter(region=REGION, origin=origins[0], tuning=tuning) as first,
        AsyncLimiter(region=REGION, origin=origins[1], tuning=tuning) as second,
    ):
        trips_s = []
        for _ in range(scale.turns):
            started_s = time.perf_counter()
            await origins[0].pulse(REGION, timeout_s=1)
            trips_s.append(time.perf_counter() - started_s)
        trip_s = statistics.median(trips_s)
        for limiter in (first, second):
            await limiter.limit(FREE, "x")
            await acknowledged(limiter)
        took = []
        for _ in range(scale.turns):
            expected = (await first.limit(FREE, "x")).effective
            started_s = time.perf_counter()
            while True:
                if (await second.peek(FREE, "x")).effective >= expected:
                    break
                await asyncio.sleep(0)
            took.append((time.perf_counter() - started_s) / trip_s)
    took.sort()
    p50, p99 = took[len(took) // 2], took[int(len(took) * 0.99)]
    return [
        Figure(
            "two nodes converge without credit, p50 / p99, in round trips",
            f"{p50:.1f} / {p99:.1f}",
            f"a round trip: {trip_s * 1e6:.0f} µs",
            "",
            None,
        )
    ]


async def frozen(server: RedisServer, scale: Scale) -> list[Figure]:
    """Decisions while the origin is frozen (SIGSTOP): p99 with an open breaker, and the longest wait."""
    async with AsyncLimiter(region=REGION, origin=server.url) as limiter:
        # All at once, in a few round trips: a thousand recent successes would keep the breaker closed for long.
        await asyncio.gather(*(limiter.limit(FREE, name) for name in SUBJECTS[:1_000]))
        await acknowledged(limiter)
        await asyncio.to_thread(server.freeze)
        try:
            ends_s = time.perf_counter() + scale.freeze_s
            open_s: list[float] = []
            longest_s = 0.0
            answered = 0

            async def request(number: int) -> None:
                nonlocal answered, longest_s
                name = f"cold {number}" if number % 5 == 0 else SUBJECTS[number * 17 % 1_000]
                is_open = limiter.statistics().breaker_states["origin"] == 2
                started_s = time.perf_counter()
                await limiter.limit(FREE, name)
                took_s = time.perf_counter() - started_s
                answered += 1
                longest_s = max(longest_s, took_s)
                if is_open:
                    open_s.append(took_s)

            requests: list[asyncio.Task[None]] = []
            while time.perf_counter() < ends_s:  # an open loop: no request waits for the one before
                requests.append(asyncio.create_task(request(len(requests))))
                await asyncio.sleep(0.001)
            await asyncio.gather(*requests)
        finally:
            await asyncio.to_thread(server.thaw)
        await acknowledged(limiter)
    open_s.sort()
    p99_ms = open_s[int(len(open_s) * 0.99)] * 1000 if open_s else float("nan")
    return [
        Figure(
            f"origin frozen for {scale.freeze_s:g} s: p99 of decisions with an open breaker",
            f"{p99_ms:.2f} ms",
            f"{answered:,} requests, all answered; {len(open_s):,} of them then",
            "< 5 ms",
            p99_ms < 5,
        ),
        Figure("  longest wait of any request", f"{longest_s * 1000:.0f} ms", "", "300 ms", longest_s < 0.33),
    ]


# -- the table


def show(figures: Sequence[Figure]) -> bool:
    """Print lines of the table; False if a target was missed."""
    for figure in figures:
        verdict = {True: "met", False: "**missed**", None: ""}[figure.met]
        line = (figure.what, figure.value, figure.against, figure.target, verdict)
        print(f"| {' | '.join(line)} |", flush=True)
    return all(figure.met is not False for figure in figures)


async def measure(scale: Scale) -> bool:
    are_met = True
    with RedisServer() as server:
        for figure in (*FIGURES, blocked_subject, throughput, replay_cost, convergence):
            await asyncio.to_thread(server.flush)
            are_met &= show(await figure(server.url, scale))
        await asyncio.to_thread(server.flush)
        are_met &= show(await frozen(server, scale))
    return are_met


def main(arguments: Sequence[str] = ()) -> int:
    """Print the table; 1 if a target was missed."""
    name_peers(PEERS)
    print()
    print("| figure | measured | against | target | |")
    print("| --- | --- | --- | --- | --- |")
    return 0 if asyncio.run(measure(QUICK if "--quick" in arguments else FULL)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
