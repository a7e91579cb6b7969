from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.runtime.world import EPOCH_MS, Member, Region, clock, on_virtual_time, turns
from tidegate import Limit
from tidegate.adapters.memory import MemoryLedger
from tidegate.core.model import LedgerRow
from tidegate.ports import Changes
from tidegate.runtime.importer import ImportLoop

THOUSAND_A_MINUTE = Limit("1000/minute", namespace="tests")
SEQUENCE = EPOCH_MS // 60_000


def row(identifier: str, regional: int, region: str = "ams") -> LedgerRow:
    return LedgerRow(
        "default", "tests", identifier, 60_000, SEQUENCE, region, regional, (SEQUENCE + 2) * 60_000
    )


def importer(node: Member) -> ImportLoop:
    assert node.limiter._parts.node is not None
    loop = node.limiter._parts.node.importer
    assert loop is not None
    return loop


def world(**tuning: Any) -> tuple[MemoryLedger, Region, Member]:
    ledger = MemoryLedger(clock=clock())
    region = Region(ledger=ledger, **tuning)
    return ledger, region, region.node(with_origin=False)


@on_virtual_time
async def test_the_first_import_is_full_and_creates_cells_that_were_not_known() -> None:
    ledger, region, node = world()
    ledger.publish_nowait([row("x", 400), row("x", 100, "nyc"), row("y", 5)])
    await node.limiter.start()
    await turns()
    assert await node.seen("x", THOUSAND_A_MINUTE) == 500
    assert await node.accept("x", 600, THOUSAND_A_MINUTE) == 500
    statistics = node.limiter.statistics()
    assert statistics.import_rows == 3
    assert statistics.cells_created_by_import >= 2
    decision = await node.limiter.peek(THOUSAND_A_MINUTE, "y")
    assert decision.global_age_ms == 0
    await region.stop()


@on_virtual_time
async def test_later_imports_ask_for_what_changed_only_and_now_and_then_for_all() -> None:
    ledger, region, node = world(import_full_interval_ms=60_000)
    ledger.publish_nowait([row(f"user {n}", 5) for n in range(50)])
    await node.limiter.start()
    await turns()
    ledger.publish_nowait([row("user 1", 9)])
    done = await importer(node).run_once()
    assert (done.ok, done.full, done.rows) == (True, False, 1)
    done = await importer(node).run_once()
    assert (done.full, done.rows) == (False, 0)
    await asyncio.sleep(66)
    assert node.ledger is not None
    assert node.ledger.arguments("changes").count(None) == 2, "at the start, and after a minute"
    await region.stop()


@on_virtual_time
async def test_a_failed_import_keeps_the_foreign_counts_and_continues_where_it_stopped() -> None:
    ledger, region, node = world()
    ledger.publish_nowait([row("x", 400)])
    await node.limiter.start()
    await turns()
    assert node.failing_ledger is not None
    node.failing_ledger.faults.fail("changes")
    ledger.publish_nowait([row("x", 500)])
    done = await importer(node).run_once()
    assert not done.ok
    assert await node.seen("x", THOUSAND_A_MINUTE) == 400
    node.failing_ledger.faults.heal()
    done = await importer(node).run_once()
    assert (done.ok, done.full, done.rows) == (True, False, 1)
    assert await node.seen("x", THOUSAND_A_MINUTE) == 500
    await region.stop()


@on_virtual_time
async def test_the_regions_own_row_raises_the_view_but_makes_nothing_fresh() -> None:
    ledger = MemoryLedger(clock=clock())
    region = Region("fra", ledger=ledger)
    node = region.node()
    ledger.publish_nowait([row("x", 400, "fra")])
    await node.limiter.start()
    await turns()
    decision = await node.limiter.peek(THOUSAND_A_MINUTE, "x")
    assert decision.effective == 400, "every process of a region restarts: counts come back from its own rows"
    assert decision.source == "origin"
    await region.stop()


@on_virtual_time
async def test_imports_are_fast_while_cells_are_hot_and_slow_otherwise() -> None:
    _, region, node = world(publish_interval_ms=1_000)
    await node.limiter.start()
    await turns()
    assert node.ledger is not None
    await asyncio.sleep(20)
    cold = node.ledger.count("changes")
    assert 18 <= cold <= 28, "once a second, to get resets"
    for _ in range(50):
        await node.accept("x", 10, THOUSAND_A_MINUTE)
        await asyncio.sleep(0.1)
    hot = node.ledger.count("changes") - cold
    assert hot >= 12, "every 250 ms"
    await asyncio.sleep(40)
    before = node.ledger.count("changes")
    await asyncio.sleep(20)
    assert node.ledger.count("changes") - before <= 24
    await region.stop()


@on_virtual_time
async def test_heartbeats_show_how_many_regions_are_alive() -> None:
    ledger, region, node = world()
    for name in ("ams", "nyc"):
        ledger.heartbeat_nowait(name)
    await node.limiter.start()
    await turns()
    assert node.limiter.statistics().regions == 3
    await asyncio.sleep(70)
    assert node.limiter.statistics().regions == 1, "the others have sent no heartbeat for a minute"
    await region.stop()


@on_virtual_time
async def test_a_failed_heartbeat_changes_nothing() -> None:
    ledger, region, node = world()
    ledger.heartbeat_nowait("ams")
    await node.limiter.start()
    await turns()
    assert node.failing_ledger is not None
    node.failing_ledger.faults.fail("heartbeat")
    assert not await importer(node).beat_once()
    assert node.limiter.statistics().regions == 2
    await region.stop()


@on_virtual_time
async def test_more_regions_mean_lower_thresholds_for_counts_that_are_there_already() -> None:
    ledger, region, node = world()
    await node.limiter.start()
    await node.accept("x", 100, THOUSAND_A_MINUTE)
    await asyncio.sleep(6)
    assert ledger.rows() == [], "a fifth of the limit is not reached"
    for n in range(9):
        ledger.heartbeat_nowait(f"region {n}")
    await asyncio.sleep(12)
    assert [one.regional for one in ledger.rows()] == [100], "with ten regions a twentieth is enough"
    await region.stop()


@on_virtual_time
async def test_a_wiped_ledger_gets_everything_back_after_the_next_full_read() -> None:
    ledger, region, node = world(import_full_interval_ms=10_000)
    await node.accept("x", 700, THOUSAND_A_MINUTE)
    await asyncio.sleep(6)
    assert [one.regional for one in ledger.rows()] == [700]
    ledger.wipe()
    await asyncio.sleep(25)
    assert [one.regional for one in ledger.rows()] == [700]
    await region.stop()


@on_virtual_time
async def test_two_regions_agree_within_seconds_on_what_is_near_its_limit() -> None:
    ledger = MemoryLedger(clock=clock())
    fra, ams = Region("fra", ledger=ledger), Region("ams", ledger=ledger)
    here, there = fra.node(), ams.node()
    assert await here.accept("x", 500, THOUSAND_A_MINUTE) == 500
    assert await there.accept("x", 300, THOUSAND_A_MINUTE) == 300
    await asyncio.sleep(12)
    assert await here.seen("x", THOUSAND_A_MINUTE) == 800
    assert await there.seen("x", THOUSAND_A_MINUTE) == 800
    await fra.stop()
    await ams.stop()


@on_virtual_time
async def test_evicted_foreign_counts_come_back_within_three_intervals_and_cost_no_full_read_each_tick() -> (
    None
):
    """New identifiers fill memory all the time: counts of other regions are read in full every second interval, not
    more."""
    ledger, region, node = world(subjects_max=4, import_interval_ms=5_000)
    ledger.publish_nowait([row("x", 1_000)])
    await node.limiter.start()
    await turns()
    assert not await node.limiter.limit(THOUSAND_A_MINUTE, "x")
    for second in range(20):
        for number in range(10):
            await node.limiter.limit(THOUSAND_A_MINUTE, f"spray {second} {number}")
        await node.limiter.peek(THOUSAND_A_MINUTE, "x")
        await asyncio.sleep(1)
    full_reads = node.limiter._parts.engine.global_view.full_imports
    assert 1 < full_reads <= 1 + 20 // 10 + 1
    for _ in range(15):
        await node.limiter.peek(THOUSAND_A_MINUTE, "x")
        await asyncio.sleep(1)
    # The minute is over: nine tenths of the 1,000 are carried.
    assert (await node.limiter.peek(THOUSAND_A_MINUTE, "x")).effective > 900
    await region.stop()


@on_virtual_time
async def test_rows_that_cannot_be_read_are_counted_and_logged_once_and_stop_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ledger, region, node = world()
    await node.limiter.start()
    await turns()
    real = ledger.changes

    async def with_unreadable(*args: Any, **options: Any) -> Changes:
        return (await real(*args, **options))._replace(unreadable=2)

    ledger.changes = with_unreadable  # type: ignore[method-assign] # of a database that others write to
    ledger.publish_nowait([row("x", 400)])
    for _ in range(3):
        assert (await importer(node).run_once(full=True)).ok
    assert await node.seen("x", THOUSAND_A_MINUTE) == 400
    assert node.limiter.statistics().import_rows_unreadable == 6
    assert caplog.text.count("cannot be read") == 1
    ledger.changes = real  # type: ignore[method-assign] # as before
    await importer(node).run_once(full=True)
    ledger.changes = with_unreadable  # type: ignore[method-assign] # again
    await importer(node).run_once()
    assert caplog.text.count("cannot be read") == 2, "a new state is logged again"
    await region.stop()
