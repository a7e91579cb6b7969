"""What telemetry costs a decision: OpenTelemetry off, with metrics, with spans; and the log of decisions.

One region with its origin in memory. Each variant has one limiter; they are measured in turns in the same run, as CPU
time of this thread with the background work of the limiter. Round trips to the origin are measured separately, because
only they are traced.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory

from bench.turns import Figures
from tidegate import AsyncLimiter, Limit
from tidegate.adapters.memory import MemoryOrigin
from tidegate.core.model import Component, subject_digest
from tidegate.ports import Origin
from tidegate.server.process.decision_log import DecisionLog, RecordingLimiter
from tidegate.telemetry.collecting import collect
from tidegate.telemetry.decisions import Sampling

IDENTIFIERS = [f"user_{number}" for number in range(100)]
LIMIT = Limit(10**9, duration_ms=3_600_000, namespace="bench")
LAPS = 100
ROUNDS = 61


class Lap:
    """Decisions of one limiter. A decision that memory cannot make waits for the origin, as in a server."""

    def __init__(self, limiter: AsyncLimiter) -> None:
        self._limiter = limiter
        self._attempt = limiter.attempt
        self.decisions = 0
        self.waited = 0

    async def run(self) -> float:
        """CPU nanoseconds per decision, the background work of the limiter included."""
        attempt, limiter = self._attempt, self._limiter
        began = time.thread_time_ns()
        for _ in range(LAPS):
            now_ms = time.time_ns() // 1_000_000
            for identifier in IDENTIFIERS:
                if attempt(LIMIT, identifier, 1, now_ms) is None:
                    self.waited += 1
                    await limiter.limit(LIMIT, identifier)
            await asyncio.sleep(0)
        self.decisions += LAPS * len(IDENTIFIERS)
        return (time.thread_time_ns() - began) / LAPS / len(IDENTIFIERS)


async def _limiters(directory: Path) -> dict[str, AsyncLimiter]:
    """Off comes first, before anything of OpenTelemetry is loaded."""
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
    log = DecisionLog(directory, Sampling(1.0), 67_108_864, lambda _workspace, namespace: namespace)
    found["log of decisions"] = RecordingLimiter(log, region="fra", origin=MemoryOrigin())
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


async def _run(directory: Path) -> None:
    limiters = await _limiters(directory)
    # Its records are not written here: another thread does that. They are dropped after each round.
    recording = limiters["log of decisions"]
    assert isinstance(recording, RecordingLimiter)
    laps = {name: Lap(limiter) for name, limiter in limiters.items()}
    # The same limiter twice, to show the noise of this run.
    laps["off, again"] = Lap(limiters["off"])
    for lap in laps.values():
        await lap.run()
        lap.decisions = lap.waited = 0
    rounds = {name: Figures() for name in laps}
    order = list(laps)
    random = Random(1)
    for _ in range(ROUNDS):
        # In another order each time, because the loop also finishes work of the previous limiter.
        random.shuffle(order)
        for name in order:
            await asyncio.sleep(0.01)
            rounds[name].append(await laps[name].run())
            recording.log.take()
    print("| telemetry | CPU ns per decision | against off, round by round | waited for the origin |")
    print("| --- | ---: | ---: | ---: |")
    for name, measured in rounds.items():
        share = laps[name].waited / laps[name].decisions
        figures = f"{measured.shown()} | {measured.over(rounds['off']).shown(3)} | {share:.2%}"
        print(f"| {name} | {figures} |")

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
    with TemporaryDirectory(prefix="tidegate-bench-") as directory:
        asyncio.run(_run(Path(directory)))
