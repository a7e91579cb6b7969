from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from tests.runtime.world import EPOCH_MS, Member, Region, clock, on_virtual_time, turns
from tidegate import Limit, Tuning
from tidegate.adapters.memory import MemoryLedger
from tidegate.core.model import LedgerRow
from tidegate.runtime.publish import FREED_ROWS, Published, PublishLoop

TEN_A_MINUTE = Limit("10/minute", namespace="tests")
THOUSAND_A_MINUTE = Limit("1000/minute", namespace="tests")
HUNDRED_A_SECOND = Limit("100/s", namespace="tests")


def publisher(node: Member) -> PublishLoop:
    assert node.limiter._parts.node is not None
    loop = node.limiter._parts.node.publish
    assert loop is not None
    return loop


def world(**tuning: Any) -> tuple[MemoryLedger, Region, Member]:
    ledger = MemoryLedger(clock=clock())
    region = Region(ledger=ledger, **tuning)
    return ledger, region, region.node(with_origin=False)


def published(ledger: MemoryLedger) -> dict[str, int]:
    return {row.identifier: row.regional for row in ledger.rows()}


def sizes(node: Member) -> list[int]:
    assert node.ledger is not None
    return [len(one) for one in node.ledger.arguments("publish") if isinstance(one, list)]


async def fill(node: Member, count: int, cost: int = 5) -> None:
    for n in range(count):
        assert await node.limiter.limit(TEN_A_MINUTE, f"user {n:04d}", cost)


@on_virtual_time
async def test_what_passed_its_threshold_is_published_by_the_next_tick_and_only_once() -> None:
    ledger, region, node = world(pressure_interval_ms=3_600_000)
    await node.accept("quiet", 1, THOUSAND_A_MINUTE)
    await node.accept("loud", 300, THOUSAND_A_MINUTE)
    await node.accept("short", 90, HUNDRED_A_SECOND)
    await asyncio.sleep(6)
    assert published(ledger) == {"loud": 300}
    assert node.ledger is not None
    before = node.ledger.count("publish")
    await asyncio.sleep(10)
    assert node.ledger.count("publish") == before, "nothing changed, nothing is sent"
    await region.stop()


@on_virtual_time
async def test_pressure_does_not_wait_for_the_tick_and_comes_at_most_once_per_its_interval() -> None:
    loop = asyncio.get_running_loop()
    ledger, region, node = world(publish_interval_ms=3_600_000, publish_hot_interval_ms=3_600_000)
    await node.limiter.start()
    for _ in range(900):
        await node.accept("x", 1, THOUSAND_A_MINUTE)
        await asyncio.sleep(0.001)
    assert published(ledger)["x"] >= 500
    assert node.ledger is not None
    begun_s = [call.began_s for call in node.ledger.calls if call.operation == "publish"]
    interval_s = Tuning().pressure_interval_ms / 1000
    assert 2 <= len(begun_s) <= loop.time() / interval_s + 2
    for one_s, next_s in pairwise(begun_s):
        assert next_s - one_s >= interval_s - 1e-6
    await region.stop()


@on_virtual_time
async def test_rows_are_published_in_bounded_chunks() -> None:
    ledger, region, node = world(publish_rows_max=40)
    await node.limiter.start()
    await fill(node, 110)
    done = await publisher(node).run_once()
    assert done.ok
    assert done.chunks == [40, 40, 30]
    assert len(published(ledger)) == 110
    assert node.limiter.statistics().publish_rows == 110
    await region.stop()


@on_virtual_time
async def test_a_count_beyond_what_a_database_holds_is_published_as_the_largest_that_it_holds() -> None:
    ledger, region, node = world()
    await node.limiter.start()
    huge = Limit(2**64, duration_ms=60_000, namespace="tests")
    assert await node.limiter.limit(huge, "x", 2**63 + 5)
    ledger.rejects = lambda row: row.regional >= 2**63
    assert (await publisher(node).run_once()).ok
    assert published(ledger) == {"x": 2**63 - 1}
    assert node.limiter.statistics().rows_set_aside == 0
    await region.stop()


@on_virtual_time
async def test_a_row_that_the_ledger_refuses_is_set_aside_and_all_others_are_published_in_the_same_turn(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ledger, region, node = world()
    await node.limiter.start()
    bad = {"user 0017", "user 0060", "user 0061"}
    ledger.rejects = lambda row: row.identifier in bad
    await fill(node, 100)
    done = await publisher(node).run_once()
    assert done.ok
    assert len(published(ledger)) == 97
    assert node.limiter.statistics().rows_set_aside == 3
    assert [record.getMessage()[:28] for record in caplog.records] == ["the ledger refuses 3 rows, a"]
    assert node.ledger is not None
    before = node.ledger.count("publish")
    await publisher(node).run_once()
    assert node.ledger.count("publish") == before, "refused rows wait"
    ledger.rejects = None
    await asyncio.sleep(61)
    done = await publisher(node).run_once()
    assert {row.identifier for row in done.rows} <= bad, "the others need not go again"
    await region.stop()


@on_virtual_time
async def test_a_refused_row_of_a_counter_that_was_reset_is_logged_with_the_sequence_of_its_window(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ledger, region, node = world()
    await node.limiter.start()
    ledger.rejects = lambda row: row.regional < 1_000
    await node.limiter.reset(TEN_A_MINUTE, "user 0000")
    await fill(node, 1)
    await publisher(node).run_once()
    sequence = node.limiter._gate.now_ms() // TEN_A_MINUTE.duration_ms
    assert f"sequence {sequence}:" in caplog.text
    await region.stop()


@on_virtual_time
async def test_refused_rows_trip_no_breaker() -> None:
    ledger, region, node = world()
    await node.limiter.start()
    ledger.rejects = lambda row: True
    await fill(node, 64)
    await publisher(node).run_once()
    assert node.limiter.statistics().breaker_states["ledger_publish"] == 0
    assert node.limiter.statistics().rows_set_aside == 64
    await region.stop()


@on_virtual_time
async def test_a_chunk_that_failed_is_the_only_one_that_is_repeated() -> None:
    ledger, region, node = world(publish_rows_max=10)
    await node.limiter.start()
    await fill(node, 30)
    assert node.failing_ledger is not None and node.ledger is not None
    node.failing_ledger.faults.fail("publish", times=1)
    done = await publisher(node).run_once()
    assert not done.ok
    assert done.chunks == [10, 10]
    assert len(published(ledger)) == 20
    done = await publisher(node).run_once()
    assert done.ok
    assert done.chunks == [10]
    assert len(published(ledger)) == 30
    await region.stop()


@on_virtual_time
async def test_after_two_failed_chunks_the_rest_of_the_turn_waits_and_nothing_is_forgotten() -> None:
    ledger, region, node = world(publish_rows_max=10)
    await node.limiter.start()
    await fill(node, 60)
    assert node.failing_ledger is not None
    node.failing_ledger.faults.fail("publish")
    assert not (await publisher(node).run_once()).ok
    assert node.failing_ledger.faults.fired["publish"] == 2
    node.failing_ledger.faults.heal()
    assert (await publisher(node).run_once()).ok
    assert len(published(ledger)) == 60
    await region.stop()


@on_virtual_time
async def test_a_publish_that_was_applied_but_timed_out_changes_nothing_when_it_is_repeated() -> None:
    ledger, region, node = world()
    await node.limiter.start()
    assert node.failing_ledger is not None
    node.failing_ledger.faults.lose_answers("publish", times=1)
    await fill(node, 5)
    assert not (await publisher(node).run_once()).ok
    assert (await publisher(node).run_once()).ok
    assert set(published(ledger).values()) == {5}
    await region.stop()


@on_virtual_time
async def test_a_stop_in_the_middle_of_a_publish_of_many_chunks_loses_none_of_them() -> None:
    ledger, _, node = world(publish_rows_max=10)
    await node.limiter.start()
    await fill(node, 50)
    assert node.failing_ledger is not None and node.ledger is not None
    node.failing_ledger.faults.hang("publish", times=1)
    await node.ledger.until("publish", 1)
    await node.limiter.stop()
    assert len(published(ledger)) == 50


@on_virtual_time
async def test_stop_publishes_what_changed_last() -> None:
    ledger, _, node = world(publish_interval_ms=3_600_000, pressure_interval_ms=3_600_000)
    await node.limiter.start()
    await asyncio.sleep(1)
    await fill(node, 3)
    await node.limiter.stop()
    assert len(published(ledger)) == 3


@pytest.mark.parametrize("is_open", [True, False], ids=["fails", "was never open"])
@on_virtual_time
async def test_stop_says_what_it_could_not_publish(is_open: bool, caplog: pytest.LogCaptureFixture) -> None:
    ledger, _, node = world()
    assert node.failing_ledger is not None
    if not is_open:
        node.failing_ledger.faults.fail()
    await node.limiter.start()
    await asyncio.sleep(1)
    node.failing_ledger.faults.fail()
    await fill(node, 3)
    await node.limiter.stop()
    assert ledger.rows() == []
    assert "stopped too early: 3 subjects that changed were not published" in caplog.messages


@on_virtual_time
async def test_stop_with_nothing_to_publish_is_not_too_early_without_a_ledger(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, _, node = world()
    assert node.failing_ledger is not None
    node.failing_ledger.faults.fail()
    await node.limiter.start()
    await asyncio.sleep(30)
    await node.limiter.stop()
    assert not any("stopped too early" in message for message in caplog.messages)


@on_virtual_time
async def test_an_origin_that_hangs_does_not_use_up_the_time_of_the_last_publish() -> None:
    ledger = MemoryLedger(clock=clock())
    region = Region(ledger=ledger, publish_interval_ms=3_600_000, pressure_interval_ms=3_600_000)
    node = region.node()
    await node.limiter.start()
    node.faults.hang("merge")
    await fill(node, 3)
    await node.limiter.stop(timeout=0.5)
    assert len(published(ledger)) == 3


@on_virtual_time
async def test_a_ledger_that_was_down_gets_everything_that_changed() -> None:
    ledger, region, node = world()
    assert node.failing_ledger is not None
    node.failing_ledger.faults.fail()
    await node.limiter.start()
    await node.accept("x", 700, THOUSAND_A_MINUTE)
    await asyncio.sleep(20)
    assert ledger.rows() == []
    node.failing_ledger.faults.heal()
    await asyncio.sleep(12)
    assert published(ledger) == {"x": 700}
    await region.stop()


@on_virtual_time
async def test_rows_that_were_published_are_freed_in_slices() -> None:
    _ledger, region, node = world()
    rows = [LedgerRow("w", "n", f"user {n}", 60_000, 1, "fra", n, 180_000) for n in range(3 * FREED_ROWS)]

    is_published = asyncio.Event()

    async def publish_many(**_: bool) -> Published:
        is_published.set()
        return Published(True, rows, [len(rows)])

    publisher(node).run_once = publish_many  # type: ignore[method-assign]  # a double of the method
    await node.limiter.start()
    await is_published.wait()
    left = [3 * FREED_ROWS]
    while left[-1]:
        left.append(len(rows))
        await asyncio.sleep(0)
    assert max(before - after for before, after in pairwise(left)) == FREED_ROWS
    await region.stop()


@on_virtual_time
async def test_imported_counts_are_never_published() -> None:
    ledger, region, node = world()
    sequence = EPOCH_MS // 60_000
    ledger.publish_nowait(
        [LedgerRow("default", "tests", "x", 60_000, sequence, "ams", 600, (sequence + 2) * 60_000)]
    )
    await node.limiter.start()
    await turns()
    await node.accept("x", 7, THOUSAND_A_MINUTE)
    await asyncio.sleep(6)
    mine = [row for row in ledger.rows() if row.region == "fra"]
    assert [row.regional for row in mine] == [7]
    await region.stop()
