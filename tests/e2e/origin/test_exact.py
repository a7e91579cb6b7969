"""Exactly the quota passes, however many nodes share it: on real servers and on a file that several processes share.

The pauses between requests are the traffic of a published table; nothing is awaited by them. A machine that is busy
makes answers late, so requests are patient here, and one that is refused although it would fit comes again when it was
told to: what is proven is that exactly the quota passes, not how fast.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import pytest

from tests.contract.origin_places import ClusterPlace
from tests.e2e.origin.audit import DURATION_MS, REGION, ShiftedClock, offset_to_mid_window_ms
from tests.e2e.origin.process import NodeProcess
from tidegate import AsyncLimiter, Limit, Tuning
from tidegate.testing import RedisCluster, RedisSentinel, RedisServer
from tidegate.testing.limiters import make_async_limiter

PATIENT: dict[str, Any] = {"read_timeout_ms": 10_000}

ONE_AFTER_THE_OTHER = [(2, 6, 50), (4, 6, 50), (8, 6, 50), (8, 6, 300), (8, 20, 50), (16, 100, 10)]
ALL_AT_ONCE = [(8, 5), (8, 100), (8, 1_000)]


def limit_of(quota: int) -> Limit:
    return Limit(quota, duration_ms=DURATION_MS, namespace="exact")


class Nodes:
    """Limiters in this process, each with connections of its own."""

    def __init__(self, url: str, count: int) -> None:
        clock = ShiftedClock(offset_to_mid_window_ms())
        self.limiters: list[AsyncLimiter] = [
            make_async_limiter(region=REGION, origin=url, clock=clock, tuning=Tuning(**PATIENT))
            for _ in range(count)
        ]
        self.accepted = 0

    async def __aenter__(self) -> Self:
        await asyncio.gather(*(limiter.start() for limiter in self.limiters))
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(limiter.stop() for limiter in self.limiters))

    async def ask(self, node: int, quota: int, cost: int = 1) -> None:
        limiter = self.limiters[node % len(self.limiters)]
        while True:
            decision = await limiter.limit(limit_of(quota), "x", cost)
            assert decision.source != "degraded"
            if decision:
                self.accepted += cost
            assert decision.retry_after is not None
            if decision or decision.retry_after > 10:
                return
            await asyncio.sleep(decision.retry_after)

    async def round_robin(self, quota: int, gap_ms: int, count: int) -> None:
        for index in range(count):
            await self.ask(index, quota)
            await asyncio.sleep(gap_ms / 1000)

    async def all_at_once(self, quota: int, each: int) -> None:
        await asyncio.gather(
            *(self.ask(node, quota) for _ in range(each) for node in range(len(self.limiters)))
        )


@pytest.mark.parametrize(("nodes", "quota", "gap_ms"), ONE_AFTER_THE_OTHER)
async def test_one_after_the_other_exactly_the_quota_passes(
    server: RedisServer, nodes: int, quota: int, gap_ms: int
) -> None:
    async with Nodes(server.url, nodes) as fleet:
        await fleet.round_robin(quota, gap_ms, 2 * quota + nodes)
        assert fleet.accepted == quota


@pytest.mark.parametrize(("nodes", "quota"), ALL_AT_ONCE)
async def test_all_at_once_exactly_the_quota_passes(server: RedisServer, nodes: int, quota: int) -> None:
    async with Nodes(server.url, nodes) as fleet:
        await fleet.all_at_once(quota, max(8, 2 * quota // nodes))
        assert fleet.accepted == quota


async def exhaust(fleet: Nodes) -> None:
    await fleet.round_robin(20, 5, 60)
    await fleet.all_at_once(20, 5)
    assert fleet.accepted == 20


@pytest.mark.server
async def test_exactly_the_quota_passes_on_a_cluster(fresh_redis_cluster: RedisCluster) -> None:
    async with Nodes(ClusterPlace(fresh_redis_cluster).url, 8) as fleet:
        await exhaust(fleet)


@pytest.mark.server
async def test_exactly_the_quota_passes_behind_sentinels(fresh_redis_sentinel: RedisSentinel) -> None:
    async with Nodes(fresh_redis_sentinel.url, 8) as fleet:
        await exhaust(fleet)


@pytest.fixture
async def processes(tmp_path: Path) -> AsyncIterator[list[NodeProcess]]:
    url = f"sqlite:///{tmp_path}/counts.db"
    clock = ShiftedClock(offset_to_mid_window_ms())
    found = list(await asyncio.gather(*(NodeProcess.start(url, clock, PATIENT) for _ in range(4))))
    yield found
    for process in found:
        await process.kill()


async def test_processes_that_share_a_file_one_after_the_other_pass_exactly_the_quota(
    processes: list[NodeProcess],
) -> None:
    for quota in (1, 6, 20, 100):
        name = f"quota {quota}"
        for index in range(2 * quota + 8):
            await processes[index % 4].accept(name, 1, quota=quota)
        assert sum(process.accepted[name] for process in processes) == quota


async def test_processes_that_share_a_file_all_at_once_pass_exactly_the_quota(
    processes: list[NodeProcess],
) -> None:
    for quota in (5, 100, 1_000):
        name = f"quota {quota}"
        await asyncio.gather(
            *(process.accept(name, max(16, quota), threads=8, quota=quota) for process in processes)
        )
        assert sum(process.accepted[name] for process in processes) == quota
