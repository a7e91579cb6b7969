"""What credit costs and what it saves, on a real Redis: every figure with credit beside the same without it.

Run by `bench.origin`. Both variants use the same server, each with its own namespace; waiting is measured for both at
the same time, CPU time in turns. `limits` and `throttled-py` ask Redis for each decision. Only the reference fleet is
simulated: real nodes in virtual time (`tidegate simulate fleet`).
"""

from __future__ import annotations

import asyncio
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from random import Random
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from bench.figures import (
    DECISIONS_PER_TURN,
    FREE,
    HOUR_MS,
    REGION,
    SUBJECTS,
    Figure,
    Scale,
    acknowledged,
    rate_of,
)
from tidegate import AsyncLimiter, Limit, Limiter, Tuning
from tidegate.adapters.redis.origin import RedisOrigin
from tidegate.sim.capacity import measure_fleet
from tidegate.testing.clock import ManualClock
from tidegate.testing.limiters import make_async_limiter

__all__ = ["FIGURES"]

NODES = 8


class Variant:
    """Nodes that decide with credit, or without."""

    def __init__(self, url: str, nodes: int, *, credit: bool, clock: ManualClock | None = None) -> None:
        self.credit = credit
        self.namespace = f"bench.{'with' if credit else 'without'}"
        # No pulse: it asks once a second in any case, and is not counted here.
        tuning = Tuning(credit=credit, pulse_interval_ms=HOUR_MS)
        self.origins = [RedisOrigin(url) for _ in range(nodes)]
        self.limiters: list[AsyncLimiter] = [
            make_async_limiter(region=REGION, origin=origin, tuning=tuning, clock=clock)
            for origin in self.origins
        ]

    async def __aenter__(self) -> Self:
        await asyncio.gather(*(limiter.start() for limiter in self.limiters))
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*(limiter.stop() for limiter in self.limiters))

    def limit(self, quota: int, duration_ms: int = HOUR_MS) -> Limit:
        return Limit(quota, duration_ms=duration_ms, namespace=self.namespace)

    async def settle(self) -> None:
        for limiter in self.limiters:
            await acknowledged(limiter)

    @property
    def commands(self) -> int:
        return sum(origin.statistics()["commands"] for origin in self.origins)

    @property
    def waited(self) -> int:
        return sum(limiter.statistics().from_origin for limiter in self.limiters)


async def warm(limiter: AsyncLimiter, limit: Limit) -> None:
    """Ask for every subject once, hundreds in a round trip."""
    for start in range(0, len(SUBJECTS), 500):
        await asyncio.gather(*(limiter.limit(limit, name) for name in SUBJECTS[start : start + 500]))


# -- far from the limit


async def hot_rate(way: Variant, seconds: float) -> tuple[float, float]:
    """One subject, as fast as possible: decisions per CPU second, and commands per decision."""
    limiter, limit = way.limiters[0], way.limit(10**12)
    await limiter.limit(limit, "hot")
    await way.settle()
    before = way.commands
    done = 0
    ends_s, began_s = time.perf_counter() + seconds, time.process_time()
    while time.perf_counter() < ends_s:
        for _ in range(DECISIONS_PER_TURN):
            await limiter.limit(limit, "hot")
        done += DECISIONS_PER_TURN
        await asyncio.sleep(0)
    rate = done / (time.process_time() - began_s)
    await way.settle()
    return rate, (way.commands - before) / done


async def hot_subject(url: str, scale: Scale) -> list[Figure]:
    """One hot subject, far from its limit."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    commands: dict[bool, list[float]] = {True: [], False: []}
    async with Variant(url, 1, credit=True) as after, Variant(url, 1, credit=False) as before:
        for _ in range(3):
            for way in (before, after):
                rate, asked = await hot_rate(way, scale.seconds / 4)
                rates[way.credit].append(rate)
                commands[way.credit].append(asked)
    origin = RedisOrigin(url)

    def threads() -> float:
        with Limiter(region=REGION, origin=origin) as limiter:
            limiter.limit(FREE, "hot")
            asked = origin.statistics()["commands"]
            for _ in range(scale.decisions):
                limiter.limit(FREE, "hot")
            return (origin.statistics()["commands"] - asked) / scale.decisions

    in_threads = await asyncio.to_thread(threads)
    rate, without = statistics.median(rates[True]), statistics.median(rates[False])
    asked, asked_without = statistics.median(commands[True]), statistics.median(commands[False])
    return [
        Figure(
            "decisions per CPU second, one hot subject",
            f"{rate:,.0f}",
            f"without credit {without:,.0f}",
            "≥ 90 %",
            rate >= 0.9 * without,
        ),
        Figure(
            "  commands per accepted request, tasks",
            f"{asked:.5f}",
            f"without credit {asked_without:.5f}; limits, throttled-py 1",
            "≤ 0.01",
            asked <= 0.01,
        ),
        Figure(
            "  commands per accepted request, threads",
            f"{in_threads:.5f}",
            "limits, throttled-py 1",
            "≤ 0.01",
            in_threads <= 0.01,
        ),
    ]


async def busy_subjects(url: str, scale: Scale) -> list[Figure]:
    """10,000 busy subjects, far from their limits."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    counted: dict[bool, tuple[int, int, int]] = {}
    async with Variant(url, 1, credit=True) as after, Variant(url, 1, credit=False) as before:
        for way in (before, after):
            await warm(way.limiters[0], way.limit(10**12))
        for _ in range(3):
            for way in (before, after):
                limiter, limit = way.limiters[0], way.limit(10**12)

                async def ask(name: str, limiter: AsyncLimiter = limiter, limit: Limit = limit) -> None:
                    await limiter.limit(limit, name)

                # Runs first until the traffic of the last seconds is known, which the other variant has used.
                await rate_of(ask, scale.seconds, yields=True)
                statistics_before = limiter.statistics()
                rate = await rate_of(ask, scale.seconds / 2, yields=True)
                statistics_after = limiter.statistics()
                rates[way.credit].append(rate)
                counted[way.credit] = (
                    statistics_after.allowed - statistics_before.allowed,
                    statistics_after.from_origin - statistics_before.from_origin,
                    statistics_after.credit_messages - statistics_before.credit_messages,
                )
    rate, without = statistics.median(rates[True]), statistics.median(rates[False])
    decisions, waited, messages = counted[True]
    _, waited_without, _ = counted[False]
    return [
        Figure(
            "decisions per CPU second, 10,000 busy subjects",
            f"{rate:,.0f}",
            f"without credit {without:,.0f}",
            "≥ 90 %",
            rate >= 0.9 * without,
        ),
        Figure(
            "  decisions that waited",
            f"{waited:,} of {decisions:,}",
            f"without credit {waited_without:,}",
            "0",
            waited == 0,
        ),
        Figure("  messages for each decision", f"{messages / decisions:.4f}", "", "", None),
    ]


async def server_cpu_s(url: str) -> float:
    """CPU time that the server has used so far."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        writer.write(b"INFO cpu\r\n")
        answer = await reader.readuntil(b"used_cpu_sys_children")
    finally:
        writer.close()
        await writer.wait_closed()
    return sum(float(found) for found in re.findall(rb"used_cpu_(?:user|sys):([0-9.]+)", answer))


async def message_cost(url: str, scale: Scale) -> list[Figure]:
    """CPU of one message about a busy subject, of this process and of Redis: 100 to a command, reports only."""
    ours_s: list[float] = []
    server_s: list[float] = []
    async with Variant(url, 1, credit=True) as way:
        limiter, limit = way.limiters[0], way.limit(10**12)
        await warm(limiter, limit)
        for _ in range(max(3, int(scale.seconds * 2))):
            for name in SUBJECTS:
                limiter.limit_nowait(limit, name)
            before, server_before_s = limiter.statistics().credit_messages, await server_cpu_s(url)
            began_s = time.process_time()
            await acknowledged(
                limiter, 0.005
            )  # rarely, because each query costs time that would be measured too
            took_s = time.process_time() - began_s
            messages = limiter.statistics().credit_messages - before
            ours_s.append(took_s / messages)
            server_s.append((await server_cpu_s(url) - server_before_s) / messages)
    # Those of 10,000 busy subjects, each of which reports every two seconds.
    share = min(server_s) * len(SUBJECTS) / 2
    return [
        Figure("CPU of a message, this process", f"{min(ours_s) * 1e6:.1f} µs", "", "", None),
        Figure(
            "CPU of a message, Redis",
            f"{min(server_s) * 1e6:.1f} µs",
            f"{share:.0%} of a core of Redis for 10,000 busy subjects",
            "",
            None,
        ),
    ]


async def rollover(url: str, _scale: Scale) -> list[Figure]:
    """10,000 warm subjects at the end of their window, each asked once in the second before and the one after."""
    found: dict[bool, tuple[int, int]] = {}
    for credit in (False, True):
        clock = ManualClock((time.time_ns() // 1_000_000 // 60_000 + 1) * 60_000 - 2_000)
        async with Variant(url, 1, credit=credit, clock=clock) as way:
            limiter, limit = way.limiters[0], way.limit(10**9, 60_000)

            async def ask_all(limiter: AsyncLimiter = limiter, limit: Limit = limit) -> None:
                for start in range(0, len(SUBJECTS), DECISIONS_PER_TURN):
                    for name in SUBJECTS[start : start + DECISIONS_PER_TURN]:
                        await limiter.limit(limit, name)
                    await asyncio.sleep(0)

            await warm(limiter, limit)
            await way.settle()
            clock.advance(1_000)
            await ask_all()
            await way.settle()
            waited, commands = way.waited, way.commands
            for step_ms in (1_010, 500):  # across the boundary
                clock.advance(step_ms)
                await ask_all()
                await way.settle()
            found[credit] = way.waited - waited, way.commands - commands
    (waited, commands), (waited_without, commands_without) = found[True], found[False]
    return [
        Figure(
            "decisions that waited in the second after a roll-over, 10,000 warm subjects",
            f"{waited}",
            f"without credit {waited_without}; limits, throttled-py 20,000",
            "0",
            waited == 0,
        ),
        Figure(
            "  commands (20,000 decisions)", f"{commands:,}", f"without credit {commands_without:,}", "", None
        ),
    ]


# -- how many decisions wait


class Traffic(NamedTuple):
    """Requests at their times."""

    quota: int
    duration_ms: int
    arrivals: list[tuple[float, int, str]]
    """Seconds, node, identifier; in order."""
    counted_from_s: float


async def offer(way: Variant, traffic: Traffic) -> tuple[int, int, int]:
    """From `counted_from_s` on: the number of requests, of those that waited, and of those allowed."""
    limit = way.limit(traffic.quota, traffic.duration_ms)
    counted = waited = allowed = 0

    async def one(at_s: float, node: int, name: str) -> None:
        nonlocal counted, waited, allowed
        decision = await way.limiters[node].limit(limit, name)
        if at_s >= traffic.counted_from_s:
            counted += 1
            waited += decision.source == "origin"
            allowed += bool(decision)

    began_s = time.perf_counter()
    tasks: list[asyncio.Task[None]] = []
    for at_s, node, name in traffic.arrivals:
        ahead_s = began_s + at_s - time.perf_counter()
        if ahead_s > 0:
            await asyncio.sleep(ahead_s)
        tasks.append(asyncio.create_task(one(at_s, node, name)))
    await asyncio.gather(*tasks)
    return counted, waited, allowed


def trickle(seconds: float) -> Traffic:
    """Four nodes, 100 subjects, each asked for once in 2 s on each node, far from its limit."""
    random = Random("trickle")
    arrivals = [
        (2.0 * turn + random.random() * 2, node, f"trickle {n}")
        for turn in range(int((4 + seconds) / 2))
        for node in range(4)
        for n in range(100)
    ]
    return Traffic(10**6, HOUR_MS, sorted(arrivals), 4.0)


def steady(name: str, subjects: int, load: float, seconds: float) -> Traffic:
    """Eight nodes at random; `load` times what 100 per second allow, for each subject."""
    random = Random(name)
    arrivals: list[tuple[float, int, str]] = []
    for n in range(subjects):
        at_s = 0.0
        while (at_s := at_s + random.expovariate(100 * load)) < 4 + seconds:
            arrivals.append((at_s, random.randrange(NODES), f"{name} {n}"))
    return Traffic(200, 2_000, sorted(arrivals), 4.0)


async def waits(url: str, scale: Scale) -> list[Figure]:
    """The share of decisions that wait for Redis, with and without credit, in the same moments."""
    found: list[Figure] = []
    seconds = max(4.0, 3 * scale.seconds)
    for what, traffic, is_promised in (
        ("one request per node and subject every 2 s", trickle(seconds), True),
        ("subjects at 0.9 of their limit, 8 nodes", steady("near", 4, 0.9, seconds), False),
        ("a subject at twice its limit, 8 nodes", steady("saturated", 1, 2.0, seconds), False),
    ):
        async with Variant(url, NODES, credit=True) as after, Variant(url, NODES, credit=False) as before:
            results = await asyncio.gather(offer(after, traffic), offer(before, traffic))
        (counted, waited, allowed), (_, waited_without, allowed_without) = results
        found.append(
            Figure(
                f"share that waits: {what}",
                f"{waited / counted:.1%}",
                f"without credit {waited_without / counted:.1%}; limits, throttled-py 100 %",
                "no more than without" if is_promised else "",
                waited <= waited_without if is_promised else None,
            )
        )
        if not is_promised:
            found.append(
                Figure(
                    f"  allowed of {counted:,}",
                    f"{allowed:,}",
                    f"without credit {allowed_without:,}",
                    "",
                    None,
                )
            )
    return found


# -- near the limit


async def round_trip_s(origin: RedisOrigin, times: int) -> float:
    took: list[float] = []
    for _ in range(times):
        began_s = time.perf_counter()
        await origin.pulse(REGION, timeout_s=1)
        took.append(time.perf_counter() - began_s)
    return statistics.median(took)


async def timed(calls: Iterable[Callable[[], Awaitable[Any]]], trip_s: float) -> tuple[float, float, int]:
    """One call after the other: p50 and p99 in round trips, and how many were allowed."""
    took: list[float] = []
    allowed = 0
    for call in calls:
        began_s = time.perf_counter()
        result = await call()
        took.append((time.perf_counter() - began_s) / trip_s)
        allowed += not result.limited if hasattr(result, "limited") else bool(result)
    return *percentiles(took), allowed


def percentiles(took: list[float]) -> tuple[float, float]:
    """p50 and p99."""
    took.sort()
    return took[len(took) // 2], took[int(len(took) * 0.99)]


async def near_the_limit(url: str, scale: Scale) -> list[Figure]:
    """Eight nodes asked in turn until a quota is used up: what passes, and how long the last tenth of it takes."""
    from limits import RateLimitItemPerHour
    from limits.aio.storage import RedisStorage
    from limits.aio.strategies import SlidingWindowCounterRateLimiter
    from throttled.asyncio import RedisStore, Throttled, per_hour

    quota = 5 * scale.turns
    asked = quota + 20
    first = quota * 9 // 10
    found: dict[str, tuple[float, float, int]] = {}
    trip_s = 0.0
    for credit in (False, True):
        async with Variant(url, NODES, credit=credit) as way:
            trip_s = await round_trip_s(way.origins[0], scale.turns)
            limit = way.limit(quota)

            def call(turn: int, way: Variant = way, limit: Limit = limit) -> Callable[[], Awaitable[Any]]:
                return lambda: way.limiters[turn % NODES].limit(limit, "near")

            _, _, early = await timed((call(turn) for turn in range(first)), trip_s)
            p50, p99, late = await timed((call(turn) for turn in range(first, asked)), trip_s)
            found["with credit" if credit else "without credit"] = p50, p99, early + late
    item = RateLimitItemPerHour(quota)
    sliding = SlidingWindowCounterRateLimiter(RedisStorage(f"async+{url}", implementation="redispy"))
    throttled = Throttled(using="sliding_window", quota=per_hour(quota), store=RedisStore(server=url))
    peers: dict[str, Callable[[], Awaitable[Any]]] = {
        "limits": lambda: sliding.hit(item, "near"),
        "throttled-py": lambda: throttled.limit("near"),
    }
    for name, peer in peers.items():
        found[name] = await timed((peer for _ in range(asked)), trip_s)

    def shown(name: str) -> str:
        p50, p99, _ = found[name]
        return f"{p50:.2f} / {p99:.1f}"

    others = ("without credit", "limits", "throttled-py")
    return [
        Figure(
            f"allowed of {quota:,} by 8 nodes, one after the other",
            f"{found['with credit'][2]:,}",
            ", ".join(f"{name} {found[name][2]:,}" for name in others),
            f"{quota:,}",
            found["with credit"][2] == quota,
        ),
        Figure(
            "  the last tenth: p50 / p99 of a decision, in round trips",
            shown("with credit"),
            ", ".join(f"{name} {shown(name)}" for name in others) + f"; a round trip: {trip_s * 1e6:.0f} µs",
            "",
            None,
        ),
    ]


async def near_the_limit_in_processes(url: str, scale: Scale) -> list[Figure]:
    """The same with a process for each node: other nodes give credit back while the one that asks waits."""
    quota = 5 * scale.turns
    took, allowed, degraded, trip_s = await asyncio.to_thread(
        ask_processes, url, quota, quota + 20, scale.turns
    )
    p50, p99 = percentiles([one / trip_s for one in took[quota * 9 // 10 :]])
    return [
        Figure(
            f"allowed of {quota:,} by 8 nodes in processes of their own",
            f"{allowed:,}",
            f"decided without an answer of Redis: {degraded:,}",
            f"{quota:,}",
            allowed == quota,
        ),
        Figure(
            "  the last tenth: p50 / p99 of a decision, in round trips",
            f"{p50:.2f} / {p99:.1f}",
            f"a round trip: {trip_s * 1e6:.0f} µs",
            "",
            None,
        ),
    ]


def ask_processes(url: str, quota: int, asked: int, trips: int) -> tuple[list[float], int, int, float]:
    """Ask one process after the other: how long each decision took, how many were allowed, how many were decided
    without an answer of Redis, and a round trip."""
    command = [sys.executable, "-m", "bench.credit", url, str(quota), str(trips)]
    pipe = subprocess.PIPE
    nodes = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(NODES)]
    try:
        # Each measures its round trip when it has started; the last one does while nothing else runs.
        for node in nodes:
            assert node.stdout is not None
            trip_s = float(node.stdout.readline())
        took: list[float] = []
        allowed = degraded = 0
        for turn in range(asked):
            node = nodes[turn % NODES]
            assert node.stdin is not None and node.stdout is not None
            node.stdin.write("\n")
            node.stdin.flush()
            seconds, is_allowed, source = node.stdout.readline().split()
            took.append(float(seconds))
            allowed += int(is_allowed)
            degraded += source == "degraded"
    finally:
        for node in nodes:
            node.communicate()
    return took, allowed, degraded, trip_s


async def serve_node(url: str, quota: int, trips: int) -> None:
    """A node of `near_the_limit_in_processes`: a line for each decision that it is asked for, until its input ends."""
    origin = RedisOrigin(url)
    limit = Limit(quota, duration_ms=HOUR_MS, namespace="bench.processes")
    async with AsyncLimiter(
        region=REGION, origin=origin, tuning=Tuning(pulse_interval_ms=HOUR_MS)
    ) as limiter:
        print(await round_trip_s(origin, trips), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            began_s = time.perf_counter()
            decision = await limiter.limit(limit, "near")
            print(time.perf_counter() - began_s, int(decision.allowed), decision.source, flush=True)


async def reference_fleet(_url: str, scale: Scale) -> list[Figure]:
    """Commands that all nodes of the reference fleet send to their origins, simulated."""
    seconds = 2 * scale.seconds
    cost = {
        credit: await asyncio.to_thread(measure_fleet, 1, seconds, tuning=Tuning(credit=credit))
        for credit in (False, True)
    }
    ratio = cost[True].origin_commands_per_s / cost[False].origin_commands_per_s
    return [
        Figure(
            "origin commands of the reference fleet, per second (simulated)",
            f"{cost[True].origin_commands_per_s:,.0f}",
            f"without credit {cost[False].origin_commands_per_s:,.0f}; "
            f"limits, throttled-py {cost[True].requests_per_s:,.0f}",
            "≤ 1.1 ×",
            ratio <= 1.1,
        )
    ]


FIGURES = (
    hot_subject,
    busy_subjects,
    message_cost,
    rollover,
    waits,
    near_the_limit,
    near_the_limit_in_processes,
    reference_fleet,
)

if __name__ == "__main__":
    asyncio.run(serve_node(sys.argv[1], *map(int, sys.argv[2:])))
