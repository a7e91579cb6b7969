from __future__ import annotations

import asyncio

import pytest

from tests.runtime.world import HUNDRED_A_MINUTE, MILLION_AN_HOUR, Region, on_virtual_time, turns
from tidegate import Limit, Request

TWO_A_MINUTE = Limit("2/minute", namespace="tests")


@on_virtual_time
async def test_a_cold_subject_is_read_once_both_cells_in_one_round_trip() -> None:
    region = Region()
    node = region.node()
    decision = await node.limiter.limit(MILLION_AN_HOUR, "x")
    assert decision.source == "origin"
    assert decision.regional_age_ms == 0
    assert node.origin.count("read") == 1
    (wanted,) = node.origin.arguments("read")
    assert isinstance(wanted, list) and len(wanted) == 2
    for _ in range(100):
        assert (await node.limiter.limit(MILLION_AN_HOUR, "x")).source == "local"
    assert node.origin.count("read") == 1
    await region.stop()


@on_virtual_time
async def test_concurrent_requests_for_one_subject_share_one_read() -> None:
    region = Region()
    node = region.node()
    await node.limiter.start()
    decisions = await asyncio.gather(*(node.limiter.limit(HUNDRED_A_MINUTE, "x") for _ in range(150)))
    assert sum(map(bool, decisions)) == 100
    assert node.origin.count("read") == 1
    await region.stop()


@on_virtual_time
async def test_different_subjects_wanted_in_one_turn_of_the_loop_share_one_round_trip() -> None:
    region = Region()
    node = region.node()
    await node.limiter.start()
    await asyncio.gather(*(node.limiter.limit(HUNDRED_A_MINUTE, f"user {n}") for n in range(50)))
    assert node.origin.count("read") == 1
    (wanted,) = node.origin.arguments("read")
    assert isinstance(wanted, list) and len(wanted) == 100
    await node.limiter.limit_many([Request(HUNDRED_A_MINUTE, f"item {n}") for n in range(10)])
    assert node.origin.count("read") == 2
    await region.stop()


@on_virtual_time
async def test_a_caller_that_disconnects_cancels_no_other_read_and_trips_no_breaker() -> None:
    region = Region()
    node = region.node()
    await node.limiter.start()
    node.faults.hang("read")
    callers = [asyncio.ensure_future(node.limiter.limit(HUNDRED_A_MINUTE, "x")) for _ in range(60)]
    await node.origin.until("read", 1)
    for caller in callers[:-1]:
        caller.cancel()
    await turns()
    assert node.origin.in_flight["read"] == 1, "the read goes on"
    node.faults.heal()
    decision = await callers[-1]
    assert decision.source == "origin"
    assert decision.effective == 1, "callers that disconnected consumed nothing"
    assert node.origin.count("read") == 1
    statistics = node.limiter.statistics()
    assert statistics.breaker_states["origin_read"] == 0
    assert statistics.origin_errors == {}
    await region.stop()


@on_virtual_time
async def test_the_first_caller_may_disconnect_during_the_start() -> None:
    region = Region()
    node = region.node()
    node.faults.hang("open")
    first = asyncio.ensure_future(node.limiter.limit(HUNDRED_A_MINUTE, "x"))
    second = asyncio.ensure_future(node.limiter.limit(HUNDRED_A_MINUTE, "x"))
    await node.origin.until("open", 1)
    first.cancel()
    await turns()
    node.faults.heal()
    assert await second
    assert node.origin.count("open") == 1
    await region.stop()


@on_virtual_time
async def test_a_read_that_hangs_is_answered_after_300_ms_from_memory() -> None:
    loop = asyncio.get_running_loop()
    region = Region()
    node = region.node()
    await node.limiter.start()
    node.faults.hang("read")
    started_s = loop.time()
    decision = await node.limiter.limit(HUNDRED_A_MINUTE, "x")
    assert decision
    assert decision.source == "degraded"
    assert decision.regional_age_ms is None
    assert loop.time() - started_s == pytest.approx(0.3)
    await region.stop()


@on_virtual_time
async def test_a_batch_with_a_read_that_hangs_is_answered_after_300_ms_too() -> None:
    loop = asyncio.get_running_loop()
    region = Region()
    node = region.node()
    await node.limiter.start()
    node.faults.hang("read")
    started_s = loop.time()
    decisions = await node.limiter.limit_many([Request(HUNDRED_A_MINUTE, f"{n}") for n in range(10)])
    assert all(decisions)
    assert loop.time() - started_s == pytest.approx(0.3)
    await region.stop()


@on_virtual_time
async def test_a_request_that_starts_the_limiter_waits_no_longer_than_for_a_read() -> None:
    loop = asyncio.get_running_loop()
    region = Region()
    node = region.node()
    node.faults.hang("open")
    decision = await node.limiter.limit(HUNDRED_A_MINUTE, "x")
    assert decision
    assert decision.source == "degraded"
    assert loop.time() == pytest.approx(0.3)
    await region.stop()


@on_virtual_time
async def test_a_failed_read_never_makes_a_cell_fresh_and_is_not_repeated_for_300_ms() -> None:
    region = Region()
    mine, other = region.node(), region.node()
    await other.accept("x", 60, HUNDRED_A_MINUTE)
    await turns()
    await mine.limiter.start()
    mine.faults.fail("read", "merge")
    first = await mine.limiter.limit(HUNDRED_A_MINUTE, "x")
    assert first.source == "degraded"
    mine.faults.heal("read")
    second = await mine.limiter.limit(HUNDRED_A_MINUTE, "x")
    assert second.source == "degraded", "a dead origin is not asked per request"
    assert second.regional_age_ms is None
    assert mine.origin.count("read") == 1
    await asyncio.sleep(0.301)
    third = await mine.limiter.limit(HUNDRED_A_MINUTE, "x")
    assert mine.origin.count("read") == 2
    assert third.source == "origin"
    assert third.effective == 63
    await region.stop()


@on_virtual_time
async def test_a_view_is_trusted_for_five_seconds_and_then_read_again() -> None:
    region = Region()
    mine, other = region.node(), region.node()
    assert await mine.seen("x") == 0
    await other.accept("x", 10)
    await turns()
    await asyncio.sleep(4.9)
    assert await mine.seen("x") == 0
    await asyncio.sleep(0.101)
    assert await mine.seen("x") == 10
    assert mine.limiter.statistics().origin_operations == {"cold": 1, "stale": 1}
    await region.stop()


@on_virtual_time
async def test_a_blocked_subject_costs_the_origin_nothing_and_is_strict_once_it_has_room_again() -> None:
    region = Region()
    node = region.node()
    await node.accept("x", 2, TWO_A_MINUTE)
    await turns()
    before = node.origin.count("read")
    for _ in range(1000):
        assert not await node.limiter.limit(TWO_A_MINUTE, "x")
    denial = await node.limiter.limit(TWO_A_MINUTE, "x")
    assert node.origin.count("read") == before
    assert denial.retry_after is not None
    await asyncio.sleep(denial.retry_after)
    assert (await node.limiter.limit(TWO_A_MINUTE, "x")).source == "origin"
    await region.stop()


@on_virtual_time
async def test_two_nodes_together_accept_what_the_limit_allows_once_they_know_each_others_counts() -> None:
    region = Region()
    first, second = region.node(), region.node()
    assert await first.accept("x", 70, HUNDRED_A_MINUTE) == 70
    await turns()
    assert await second.accept("x", 70, HUNDRED_A_MINUTE) == 30
    await asyncio.sleep(5.001)
    assert await first.accept("x", 70, HUNDRED_A_MINUTE) == 0
    await region.stop()


@on_virtual_time
async def test_reads_that_mostly_fail_open_their_breaker_and_decisions_continue() -> None:
    region = Region()
    node = region.node()
    await node.limiter.start()
    node.faults.fail("read")
    for n in range(100):
        assert await node.limiter.limit(HUNDRED_A_MINUTE, f"user {n}")
    assert node.origin.count("read") == 20, "then it is not asked any more"
    statistics = node.limiter.statistics()
    assert statistics.breaker_states["origin_read"] == 2
    assert statistics.origin_errors["cold", "circuit_open"] == 80
    assert statistics.from_degraded == 100
    assert ("breaker origin_read", False, "open") in [tuple(vars(h).values()) for h in node.limiter.health()]
    node.faults.heal()
    await asyncio.sleep(5.001)
    assert (await node.limiter.limit(HUNDRED_A_MINUTE, "later")).source == "origin"
    assert node.limiter.statistics().breaker_states["origin_read"] == 0
    await region.stop()


@on_virtual_time
async def test_an_unexpected_error_of_a_driver_is_only_a_failed_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    region = Region()
    node = region.node()
    await node.limiter.start()
    node.faults.fail("read", error=KeyError("a fault of the driver"), times=1)
    assert (await node.limiter.limit(HUNDRED_A_MINUTE, "x")).source == "degraded"
    assert "raised an unexpected error" in caplog.text
    assert (await node.limiter.limit(HUNDRED_A_MINUTE, "y")).source == "origin"
    await region.stop()


@on_virtual_time
async def test_no_read_is_wanted_for_a_second_after_a_rollover_of_a_warm_subject() -> None:
    region = Region()
    node = region.node()
    await node.accept("x", 1, HUNDRED_A_MINUTE)
    await asyncio.sleep(28)
    await node.accept("x", 1, HUNDRED_A_MINUTE)
    reads = node.origin.count("read")
    await asyncio.sleep(2.5)  # the minute ends 30 s after the start
    decision = await node.limiter.limit(HUNDRED_A_MINUTE, "x")
    assert decision.source == "local"
    assert node.origin.count("read") == reads
    await region.stop()
