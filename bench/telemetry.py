"""What OpenTelemetry costs a decision: off, with metrics, with spans.

One region with its origin in memory. Warm decisions of one limiter each, measured in turns in the same run; CPU time of
this thread, the best of several rounds. A round trip to the origin is measured apart: only that is ever traced.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from statistics import median

from tidegate import AsyncLimiter, Limit
from tidegate.adapters.memory import MemoryOrigin
from tidegate.core.model import Component, subject_digest
from tidegate.ports import Origin
from tidegate.telemetry.collecting import collect

IDENTIFIERS = [f"user_{number}" for number in range(100)]
LIMIT = Limit(10**9, duration_ms=3_600_000, namespace="bench")
LAPS = 100
ROUNDS = 31


def _decide(limiter: AsyncLimiter) -> Callable[[], None]:
    attempt = limiter.attempt
    now_ms = time.time_ns() // 1_000_000

    def lap() -> None:
        for identifier in IDENTIFIERS:
            attempt(LIMIT, identifier, 1, now_ms)

    return lap


def _cpu_ns(lap: Callable[[], None]) -> float:
    began = time.thread_time_ns()
    for _ in range(LAPS):
        lap()
    return (time.thread_time_ns() - began) / LAPS / len(IDENTIFIERS)


async def _limiters() -> dict[str, AsyncLimiter]:
    """Off first: until here nothing of OpenTelemetry is loaded."""
    found = {"off": AsyncLimiter(region="fra", origin=MemoryOrigin())}
    assert not [name for name in sys.modules if name.startswith("opentelemetry")]
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider

    from tidegate.telemetry.otel import traced_origin
    from tidegate.telemetry.otel_metrics import OtelMetrics

    found["metrics"] = AsyncLimiter(region="fra", origin=MemoryOrigin())
    metrics = OtelMetrics(MeterProvider([InMemoryMetricReader()]).get_meter("bench"))
    metrics.update(collect(found["metrics"]))
    tracer = TracerProvider().get_tracer("bench")
    found["spans"] = AsyncLimiter(region="fra", origin=traced_origin(MemoryOrigin(), tracer))
    for limiter in found.values():
        await limiter.start()
        for identifier in IDENTIFIERS:
            await limiter.limit(LIMIT, identifier)
    return found


async def _merge_us(origin: Origin) -> float:
    cells = [Component(subject_digest("w", "n", "a", 60_000), 5, "node", 3, 2**53)]
    times = []
    for _ in range(2_000):
        began = time.thread_time_ns()
        await origin.merge(cells, timeout_s=1)
        times.append(time.thread_time_ns() - began)
    return median(times) / 1000


async def _run() -> None:
    limiters = await _limiters()
    laps = {name: _decide(limiter) for name, limiter in limiters.items()}
    # The same limiter twice: what two equal things differ by in this run.
    laps["off, again"] = laps["off"]
    rounds: dict[str, list[float]] = {name: [] for name in laps}
    for _ in range(ROUNDS):
        for name, lap in laps.items():
            rounds[name].append(_cpu_ns(lap))
    off = min(rounds["off"])
    print("| OpenTelemetry | CPU ns per decision, best | against off |")
    print("| --- | ---: | ---: |")
    for name, measured in rounds.items():
        print(f"| {name} | {min(measured):.0f} | {min(measured) / off:.3f} |")

    from opentelemetry.sdk.trace import TracerProvider

    from tidegate.telemetry.otel import traced_origin

    plain = await _merge_us(MemoryOrigin())
    traced = await _merge_us(traced_origin(MemoryOrigin(), TracerProvider().get_tracer("bench")))
    print(
        f"\nOne round trip to an origin in memory: {plain:.1f} µs, with a span {traced:.1f} µs of CPU (median)."
    )
    for limiter in limiters.values():
        await limiter.stop()


def main() -> None:
    """`python -m bench telemetry`"""
    asyncio.run(_run())
