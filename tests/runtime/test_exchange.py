"""Credit through limiters: real engines and loops, in virtual time, on an origin in memory behind a network."""

from __future__ import annotations

import asyncio

import pytest

from tests.runtime.credit_fleet import CreditFleet
from tests.runtime.world import on_virtual_time


@pytest.mark.parametrize(
    ("nodes", "quota", "gap_ms"),
    [(2, 6, 50), (4, 6, 50), (8, 6, 50), (8, 6, 300), (8, 20, 50), (16, 100, 10)],
)
@on_virtual_time
async def test_one_after_the_other_exactly_the_quota_passes(nodes: int, quota: int, gap_ms: int) -> None:
    fleet = CreditFleet(nodes)
    await fleet.start()
    await fleet.round_robin(quota, gap_ms, 3 * quota + 2 * nodes)
    assert (fleet.accepted(), fleet.over) == (quota, 0)
    await fleet.stop()


@pytest.mark.parametrize(("nodes", "quota"), [(8, 5), (8, 100), (8, 1_000), (1, 1), (64, 1), (64, 100)])
@on_virtual_time
async def test_all_at_once_exactly_the_quota_passes(nodes: int, quota: int) -> None:
    fleet = CreditFleet(nodes)
    await fleet.start()
    await fleet.all_at_once(quota, max(2, 2 * quota // nodes))
    assert fleet.over == 0
    assert fleet.accepted() == quota
    await fleet.stop()


@on_virtual_time
async def test_a_busy_node_far_from_its_limit_does_not_wait() -> None:
    fleet = CreditFleet(2)
    await fleet.start()
    sources = []
    for index in range(2_000):
        sources.append((await fleet.ask(index % 2, 1_000_000)).source)
        await asyncio.sleep(0.0005)
    assert sources[1_000:] == ["local"] * 1_000
    assert fleet.limiters[0].statistics().credit_waits < 50
    await fleet.stop()
