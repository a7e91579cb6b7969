from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.credit_fleet import CreditFleet
from tests.runtime.world import EPOCH_MS, HUNDRED_A_MINUTE, Region, clock, on_virtual_time, turns
from tidegate import AsyncLimiter, Limit, Limiter
from tidegate.adapters.memory import MemoryLedger
from tidegate.core.model import LedgerRow, subject_digest
from tidegate.core.sharing import Share
from tidegate.testing.limiters import make_async_limiter

TEN_A_MINUTE = Limit("10/minute", namespace="tests")
NOON_MS = 4_102_444_800_000


def test_usage_consumes_nothing_and_names_the_parts() -> None:
    with Limiter() as limiter:
        limiter.limit(TEN_A_MINUTE, "ann", 8, now_ms=NOON_MS)
        limiter.limit(TEN_A_MINUTE, "ann", 1, now_ms=NOON_MS + 90_000)
        limiter.usage(TEN_A_MINUTE, "ann", now_ms=NOON_MS + 90_000)
        usage = limiter.usage(TEN_A_MINUTE, "ann", now_ms=NOON_MS + 90_000)
    assert (usage.own, usage.regional, usage.foreign, usage.carried) == (1, 1, 0, 4)
    assert (usage.used, usage.remaining) == (5, 5)
    assert (usage.as_of_ms, usage.reset_at_ms) == (NOON_MS + 90_000, NOON_MS + 120_000)
    assert (usage.regions, usage.regional_age_ms, usage.global_age_ms) == ({}, None, None)
    assert (usage.limit, usage.identifier, usage.source) == (TEN_A_MINUTE, "ann", "local")


def test_usage_of_an_unused_identifier_is_zero() -> None:
    usage = Limiter().usage(TEN_A_MINUTE, "nobody")
    assert (usage.used, usage.remaining) == (0, 10)


@on_virtual_time
async def test_usage_shows_processes_and_regions_separately_and_how_old_each_count_is() -> None:
    ledger = MemoryLedger(clock=clock())
    region = Region(ledger=ledger)
    first, second = region.node(), region.node()
    sequence = EPOCH_MS // 60_000
    rows = [
        LedgerRow("default", "tests", "x", 60_000, at, name, count, (at + 2) * 60_000)
        for name, at, count in [("ams", sequence, 20), ("nyc", sequence, 5), ("nyc", sequence - 1, 40)]
    ]
    ledger.publish_nowait(rows)
    await first.limiter.start()
    await second.limiter.start()
    await turns()
    await second.accept("x", 7, HUNDRED_A_MINUTE)
    await turns()
    await first.accept("x", 3, HUNDRED_A_MINUTE)
    await asyncio.sleep(2)
    usage = await first.limiter.usage(HUNDRED_A_MINUTE, "x")
    assert (usage.own, usage.regional, usage.foreign) == (3, 10, 25)
    assert usage.regions == {"ams": (20, 2_000), "nyc": (5, 2_000)}
    assert usage.carried == 40 * 28 // 60
    assert usage.used == 10 + 25 + usage.carried
    assert usage.remaining == 100 - usage.used
    assert usage.regional_age_ms is not None and 0 <= usage.regional_age_ms <= 5_000
    assert usage.global_age_ms is not None and 0 <= usage.global_age_ms <= 6_000
    await region.stop()


@pytest.mark.parametrize("has_origin", [True, False], ids=["one node imports", "each node imports"])
@on_virtual_time
async def test_each_region_has_the_age_of_its_own_count(has_origin: bool) -> None:
    ledger = MemoryLedger(clock=clock())
    region = Region(ledger=ledger, credit=True)
    first, second = region.node(with_origin=has_origin), region.node(with_origin=has_origin)
    await first.limiter.start()
    await second.limiter.start()
    for name, count in ("ams", 20), ("nyc", 5), ("ams", 20):
        ledger.publish_nowait([_row(name, count)])
        await asyncio.sleep(7)
    usage = await second.limiter.usage(HUNDRED_A_MINUTE, "x")
    assert {name: part.counted for name, part in usage.regions.items()} == {"ams": 20, "nyc": 5}
    ages = {name: part.age_ms for name, part in usage.regions.items()}
    # Published 21 and 14 s ago, and imported at most one interval later. Publishing the same count again changes
    # nothing.
    assert ages["ams"] is not None and 15_000 <= ages["ams"] <= 21_000
    assert ages["nyc"] is not None and 8_000 <= ages["nyc"] <= 14_000
    assert usage.foreign == 25
    await region.stop()


def _row(region: str, count: int) -> LedgerRow:
    sequence = clock().now_ms() // 60_000
    return LedgerRow("default", "tests", "x", 60_000, sequence, region, count, (sequence + 2) * 60_000)


@on_virtual_time
async def test_what_other_regions_have_counted_is_one_sum_while_the_origin_cannot_be_asked() -> None:
    fleet = CreditFleet(1, duration_ms=60_000, latency_ms=(0, 0))
    await fleet.start()
    limit = fleet.limit_of(100)
    digest = subject_digest(limit.workspace, limit.namespace, "x", limit.duration_ms)
    sequence = clock().now_ms() // limit.duration_ms
    fleet.store.share_nowait([Share(digest, limit.duration_ms, sequence, "ams", 20, "importer")])
    assert (await fleet.limiters[0].limit(limit, "x")).allowed
    assert (await fleet.limiters[0].usage(limit, "x")).regions == {"ams": (20, 0)}
    fleet.origins[0].is_down = True
    usage = await fleet.limiters[0].usage(limit, "x")
    assert (usage.foreign, usage.regions) == (20, {"other regions": (20, None)})
    await fleet.stop()


@on_virtual_time
async def test_what_is_reserved_is_used_on_every_node_until_it_is_settled() -> None:
    fleet = CreditFleet(2)
    await fleet.start()
    async with fleet.limiters[0].reserve(TEN_A_MINUTE, "x", 8) as reservation:
        for limiter in fleet.limiters:
            usage = await limiter.usage(TEN_A_MINUTE, "x")
            assert (usage.reserved, usage.regional, usage.used, usage.remaining) == (8, 0, 8, 2)
        reservation.settle(3)
    for limiter in fleet.limiters:
        usage = await limiter.usage(TEN_A_MINUTE, "x")
        assert (usage.reserved, usage.regional, usage.used, usage.remaining) == (0, 3, 3, 7)
    await fleet.stop()


def test_what_is_reserved_is_used_without_an_origin_too() -> None:
    with Limiter() as limiter:
        with limiter.reserve(TEN_A_MINUTE, "x", 8) as reservation:
            usage = limiter.usage(TEN_A_MINUTE, "x")
            assert (usage.reserved, usage.used, usage.remaining) == (8, 8, 2)
            reservation.settle(3)
        usage = limiter.usage(TEN_A_MINUTE, "x")
        assert (usage.reserved, usage.used, usage.remaining) == (0, 3, 7)


@on_virtual_time
async def test_usage_asks_the_origin_before_it_answers() -> None:
    fleet = CreditFleet(2)
    await fleet.start()
    await fleet.limiters[0].limit(TEN_A_MINUTE, "x", 4)
    await asyncio.sleep(0.1)
    usage = await fleet.limiters[1].usage(TEN_A_MINUTE, "x")
    assert (usage.own, usage.regional, usage.source) == (0, 4, "origin")
    await fleet.stop()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 90_000)), max_size=12))
def test_usage_agrees_with_the_decision_of_a_peek(requests: list[tuple[int, int]]) -> None:
    async def run(limiter: AsyncLimiter) -> None:
        now_ms = NOON_MS
        for cost, pause_ms in requests:
            now_ms += pause_ms
            await limiter.limit(TEN_A_MINUTE, "x", cost, now_ms=now_ms)
            usage = await limiter.usage(TEN_A_MINUTE, "x", now_ms=now_ms)
            peeked = await limiter.peek(TEN_A_MINUTE, "x", now_ms=now_ms)
            assert usage.used == peeked.effective == usage.regional + usage.foreign + usage.carried
            assert usage.remaining == peeked.remaining

    asyncio.run(run(make_async_limiter()))
