from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from tidegate.core.model import Limit
from tidegate.errors import MissingExtra
from tidegate.runtime.limiter import Limiter
from tidegate.telemetry.collecting import collect
from tidegate.telemetry.metrics import METRICS, HistogramValue, Snapshot
from tidegate.telemetry.otel_metrics import OtelMetrics, otel_name


def exported(snapshot: Snapshot) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """The values that an exporter reads, by instrument and attributes."""
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    try:
        metrics = OtelMetrics(provider.get_meter("test"))
        metrics.update(snapshot)
        data: Any = reader.get_metrics_data()
        return {
            metric.name: {
                tuple(sorted(point.attributes.items())): point.value for point in metric.data.data_points
            }
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }
    finally:
        provider.shutdown()


def test_every_metric_has_the_value_of_the_snapshot() -> None:
    limiter = Limiter()
    limit = Limit("2/minute", namespace="tests")
    for _ in range(3):
        limiter.limit(limit, "user_123", now_ms=1_700_000_000_000)
    snapshot = collect(limiter)
    found = exported(snapshot)
    decisions = found["tidegate.decisions"]
    assert decisions[("outcome", "allowed"), ("source", "local")] == 2
    assert decisions[("outcome", "denied"), ("source", "local")] == 1
    by_name = {entry.name: entry for entry in METRICS}
    for (name, labels), value in snapshot.values.items():
        entry = by_name[name]
        attributes = tuple(sorted(zip(entry.labels, labels, strict=True)))
        assert found[otel_name(entry)][attributes] == value, name


def test_a_histogram_becomes_cumulative_buckets_a_count_and_a_sum() -> None:
    histogram = HistogramValue((0.1, 1.0), (3, 2, 1), 4.5)
    found = exported(Snapshot("n", {}, {("origin_latency_seconds", ("replay",)): histogram}))
    buckets = {
        dict(key)["le"]: value for key, value in found["tidegate.origin_latency_seconds.bucket"].items()
    }
    assert buckets == {"0.1": 3, "1": 5, "+Inf": 6}
    assert found["tidegate.origin_latency_seconds.count"] == {(("op", "replay"),): 6}
    assert found["tidegate.origin_latency_seconds.sum"] == {(("op", "replay"),): 4.5}


def test_no_identifier_leaves_the_process() -> None:
    named = {
        (entry.name, ("secret",) * len(entry.labels)): 1.0
        for entry in METRICS
        if entry.series_max is not None
    }
    assert len(named) >= 3
    found = exported(Snapshot("n", {**named, ("subjects", ()): 7}))
    assert found == {"tidegate.subjects": {(): 7}}


def test_without_opentelemetry_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(MissingExtra, match=r"tidegate\[otel\]"):
        OtelMetrics()


def test_a_server_that_does_not_export_never_imports_opentelemetry(tmp_path: Any) -> None:
    program = f"""
import asyncio, sys
from tidegate.adapters.migrations import migrate
from tidegate.server.process.config import ServerConfig
from tidegate.server.process.service import Service

async def main():
    config = ServerConfig(data_dir={str(tmp_path)!r})
    await migrate(config.catalog_url)
    service = Service(config)
    await service.start()
    service.snapshot()
    await service.stop(1.0)

asyncio.run(main())
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
