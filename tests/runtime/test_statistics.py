from __future__ import annotations

import asyncio
import dataclasses

from tests.runtime.world import HUNDRED_A_MINUTE, MILLION_AN_HOUR, Region, clock, on_virtual_time, turns
from tidegate import AsyncLimiter, Limiter, Statistics, Tuning
from tidegate.adapters.memory import MemoryLedger, MemoryOrigin
from tidegate.runtime.latency import BOUNDS_S, Histogram
from tidegate.testing.limiters import make_async_limiter

FIELDS = {field.name for field in dataclasses.fields(Statistics)}
# Only with credit: then one node imports for its region.
OF_THE_IMPORTER = {"import_age_s", "importer", "importer_for_s", "is_importer"}
# Written by the limiter itself, not by its node.
OF_THE_ENGINE = {
    "node_id",
    "region",
    "allowed",
    "denied",
    "denied_from_origin",
    "from_origin",
    "from_degraded",
    "exceeded_in_shadow",
    "resets_made",
    "resets_received",
    "subjects",
    "subjects_bytes",
    "cells",
    "cells_created_by_traffic",
    "subjects_evicted",
    "subjects_expired",
    "strict_activations",
}


@on_virtual_time
async def test_a_node_reports_every_field_of_the_statistics_and_no_other() -> None:
    limiter = make_async_limiter(region="fra", origin=MemoryOrigin(), ledger=MemoryLedger(), clock=clock())
    await limiter.start()
    assert limiter._parts.node is not None
    reported = set(limiter._parts.node.statistics(0.0))
    assert reported | OF_THE_ENGINE == FIELDS
    assert not reported & OF_THE_ENGINE
    await limiter.stop()


@on_virtual_time
async def test_without_credit_a_node_reports_all_fields_but_those_of_credit_and_importer() -> None:
    limiter = make_async_limiter(
        region="fra",
        origin=MemoryOrigin(),
        ledger=MemoryLedger(),
        clock=clock(),
        tuning=Tuning(credit=False),
    )
    await limiter.start()
    assert limiter._parts.node is not None
    reported = set(limiter._parts.node.statistics(0.0))
    of_credit = {name for name in FIELDS if name.startswith("credit_")}
    assert reported | OF_THE_ENGINE == FIELDS - of_credit - OF_THE_IMPORTER
    await limiter.stop()


def test_both_drivers_report_the_same_and_an_embedded_one_reports_zeros() -> None:
    limiter, tasks = Limiter(), AsyncLimiter()
    for statistics in (limiter.statistics(), tasks.statistics()):
        assert statistics.region is None
        assert statistics.origin_operations == {}
        assert statistics.breaker_states == {}
        assert statistics.loop_stall is None
        assert (statistics.allowed, statistics.denied, statistics.subjects) == (0, 0, 0)
    assert limiter.statistics().node_id != tasks.statistics().node_id


@on_virtual_time
async def test_decisions_reads_and_replays_are_counted_by_what_they_were() -> None:
    region = Region(ledger=MemoryLedger())
    node = region.node()
    await node.accept("x", 120, HUNDRED_A_MINUTE)
    await turns()
    await asyncio.sleep(5.001)
    await node.accept("y", 1)
    await turns()
    node.faults.fail("read")
    await node.accept("z", 1)
    statistics = node.limiter.statistics()
    assert (statistics.allowed, statistics.denied) == (102, 20)
    assert (statistics.from_origin, statistics.from_degraded) == (2, 1)
    assert statistics.region == "fra"
    assert statistics.strict_activations == 1
    assert statistics.origin_operations == {"cold": 3, "replay": 2}
    assert statistics.origin_errors == {("cold", "other"): 1}
    assert set(statistics.origin_latency) == {"cold", "replay"}
    assert sum(statistics.origin_latency["cold"].counts) == 2, "without the failed one"
    assert statistics.origin_cells_merged == 2
    assert statistics.cells_created_by_traffic >= 3
    assert set(statistics.breaker_states) == {
        "origin_read",
        "origin_replay",
        "origin_reserve",
        "ledger_publish",
        "ledger_import",
    }
    assert statistics.loop_stall is not None and sum(statistics.loop_stall.counts) >= 40
    assert statistics.loop_stall.sum_s < 0.001
    assert statistics.clock_offset_ms == 0
    await region.stop()


@on_virtual_time
async def test_statistics_count_what_the_memory_bound_evicted() -> None:
    region = Region(subjects_max=10)
    node = region.node()
    for n in range(25):
        await node.accept(f"user {n}", 1)
        await turns()
    statistics = node.limiter.statistics()
    assert statistics.subjects == 10
    assert statistics.subjects_evicted == {"lru": 15, "blocked": 0, "unreplayed": 0}
    await region.stop()


@on_virtual_time
async def test_a_subject_that_was_forgotten_and_comes_back_counts_in_full() -> None:
    region = Region(subjects_max=2)
    node = region.node()
    await node.accept("x", 7)
    await turns()
    for n in range(10):
        await node.accept(f"user {n}", 1)
        await turns()
    assert await node.accept("x", 3) == 3
    assert await node.seen("x") == 10
    await turns()
    other = region.node()
    assert await other.seen("x") == 10
    await region.stop()


@on_virtual_time
async def test_aged_out_subjects_expire() -> None:
    region = Region()
    node = region.node()
    for n in range(2_000):
        await node.accept(f"user {n}", 1, HUNDRED_A_MINUTE)
    await node.accept("x", 1, MILLION_AN_HOUR)
    assert node.limiter.statistics().subjects == 2_001
    await asyncio.sleep(60 * 4)
    statistics = node.limiter.statistics()
    assert statistics.subjects == 1
    assert statistics.subjects_expired == 2_000
    await region.stop()


def test_a_histogram_counts_each_duration_in_the_bucket_it_belongs_to() -> None:
    histogram = Histogram()
    for bound_s in BOUNDS_S:
        histogram.observe(bound_s)
    histogram.observe(1e9)
    snapshot = histogram.snapshot()
    assert snapshot.counts == (1,) * (len(BOUNDS_S) + 1)
    assert snapshot.sum_s == sum(BOUNDS_S) + 1e9
