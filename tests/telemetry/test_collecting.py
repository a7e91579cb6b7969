from __future__ import annotations

from collections.abc import Sequence

import pytest
from prometheus_client.parser import text_string_to_metric_families

import tidegate.telemetry
from tidegate import AsyncLimiter, Limit, Limiter
from tidegate.adapters.memory import MemoryLedger, MemoryOrigin
from tidegate.core.grants import CreditReply, CreditRequest
from tidegate.errors import DependencyUnavailable
from tidegate.telemetry import Collector, collect, render
from tidegate.telemetry.metrics import METRICS, Snapshot, metric
from tidegate.testing import ManualClock
from tidegate.testing.limiters import make_async_limiter

EMAILS = Limit("3/minute", namespace="email")
NOON_MS = 1_700_000_000_000

# What the server adds to the numbers of its limiter.
NOT_OF_A_LIMITER = {
    "http_requests_total",
    "http_connections",
    "origin_file_bytes",
    "rls_rule_decisions",
    "rls_calls_total",
    "rls_rules_faulty",
    "rls_connections",
    "top_workspace_decisions",
    "top_identifier_denials",
    "workers",
    "build_info",
}


def by_outcome(snapshot: Snapshot) -> dict[tuple[str, ...], float]:
    return {labels: value for (name, labels), value in snapshot.values.items() if name == "decisions_total"}


def assert_declared(snapshot: Snapshot) -> None:
    """Every series is a declared metric, with label values from the declared ones where these are declared."""
    for name, labels in [*snapshot.values, *snapshot.histograms]:
        entry = metric(name)
        assert len(labels) == len(entry.labels), name
        for value, known in zip(labels, entry.values, strict=False):
            assert value in known, (name, value)
    for (name, _), histogram in snapshot.histograms.items():
        assert histogram.bounds == metric(name).bounds
        assert len(histogram.counts) == len(histogram.bounds) + 1


def test_an_embedded_limiter_counts_its_decisions() -> None:
    with Limiter() as limiter:
        for _ in range(5):
            limiter.limit(EMAILS, "alice", now_ms=NOON_MS)
        snapshot = collect(limiter)
    assert_declared(snapshot)
    assert by_outcome(snapshot) == {
        ("allowed", "local"): 3,
        ("allowed", "origin"): 0,
        ("denied", "local"): 2,
        ("denied", "origin"): 0,
    }
    assert snapshot.values["subjects", ()] == 1
    assert snapshot.values["cells_created_total", ("traffic",)] >= 1
    assert snapshot.values["origin_errors_total", ("cold", "timeout")] == 0


async def test_a_node_of_a_fleet_has_metrics_of_its_origin_and_ledger() -> None:
    async with AsyncLimiter(region="fra", origin=MemoryOrigin(), ledger=MemoryLedger()) as limiter:
        for _ in range(2):
            await limiter.limit(EMAILS, "alice")
        snapshot = collect(limiter)
    assert_declared(snapshot)
    assert snapshot.values["origin_operations_total", ("exchange",)] >= 1
    assert snapshot.values["credit_waits_total", ()] == 1
    assert sum(snapshot.histograms["credit_wait_seconds", ()].counts) == 1
    assert by_outcome(snapshot)["allowed", "origin"] == 1
    assert by_outcome(snapshot)["allowed", "local"] == 1
    assert sum(snapshot.histograms["origin_latency_seconds", ("exchange",)].counts) >= 1
    assert {labels for name, labels in snapshot.values if name == "breaker_state"}
    named = {name for name, _ in [*snapshot.values, *snapshot.histograms]}
    missing = {entry.name for entry in METRICS} - named - NOT_OF_A_LIMITER
    # Present only after there is another region, a pulse of the origin, or with an origin in a SQLite file.
    assert missing <= {"global_lag_seconds", "clock_offset_seconds", "origin_file_bytes"}


@pytest.mark.parametrize("ahead_ms", [-250, 0, 250])
async def test_the_clock_offset_is_how_far_this_node_is_ahead_of_its_origin(ahead_ms: int) -> None:
    mine, theirs = ManualClock(NOON_MS + ahead_ms), ManualClock(NOON_MS)
    async with make_async_limiter(region="fra", origin=MemoryOrigin(clock=theirs), clock=mine) as limiter:
        node = limiter._parts.node
        assert node is not None and node.pulse is not None
        await node.pulse.run_once()
        assert collect(limiter).values["clock_offset_seconds", ()] == ahead_ms / 1000


class DownOrigin(MemoryOrigin):
    async def exchange(self, requests: Sequence[CreditRequest], *, timeout_s: float) -> list[CreditReply]:
        raise DependencyUnavailable("down")


async def test_a_decision_without_its_origin_is_local_and_the_error_is_counted() -> None:
    async with AsyncLimiter(region="fra", origin=DownOrigin()) as limiter:
        decision = await limiter.limit(EMAILS, "alice")
        snapshot = collect(limiter)
    assert decision.source == "degraded"
    assert by_outcome(snapshot)["allowed", "local"] == 1
    assert by_outcome(snapshot)["allowed", "origin"] == 0
    assert snapshot.values["origin_errors_total", ("exchange", "other")] >= 1


def test_prometheus_can_parse_the_page_of_a_limiter() -> None:
    with Limiter() as limiter:
        limiter.limit(EMAILS, "alice", now_ms=NOON_MS)
        page = render([collect(limiter)])
    families = {family.name: family for family in text_string_to_metric_families(page.decode())}
    allowed = {
        tuple(sample.labels.values()): sample.value for sample in families["tidegate_decisions"].samples
    }
    assert allowed["allowed", "local"] == 1


def test_the_names_of_the_package_can_be_imported() -> None:
    assert tidegate.telemetry.__all__ == ["Collector", "collect", "render"]
    assert Collector is tidegate.telemetry.Collector
    with pytest.raises(AttributeError, match="nothing"):
        _ = tidegate.telemetry.nothing
