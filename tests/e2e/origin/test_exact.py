"""Exactly the quota passes, however many nodes share it: on real servers and on a file that several processes share.

The pauses between requests are part of the traffic of a published table; no test waits for anything with them. A busy
machine delays answers, so timeouts are long here, and a request that is denied although it would fit is repeated after
its retry time: the tests prove that exactly the quota passes, not how fast. Those whose name says that each request is
sent once repeat none, and bound what is denied although it would fit.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Self

import pytest

from tests.contract.origin_places import ClusterPlace
from tests.e2e.origin.audit import (
    DEADLINE_S,
    DURATION_MS,
    LIMIT,
    PATIENT,
    REGION,
    ShiftedClock,
    delivered,
    offset_to_mid_window_ms,
    until,
)
from tests.e2e.origin.process import NodeProcess
from tidegate import AsyncLimiter, Limit, Tuning
from tidegate.testing import RedisCluster, RedisSentinel, RedisServer
from tidegate.testing.limiters import make_async_limiter

ONE_AFTER_THE_OTHER = [(2, 6, 50), (4, 6, 50), (8, 6, 50), (8, 6, 300), (8, 20, 50), (16, 100, 10)]
ALL_AT_ONCE = [(8, 5), (8, 100), (8, 1_000)]


def limit_of(quota: int) -> Limit:
    return Limit(quota, duration_ms=DURATION_MS, namespace="exact")


class Nodes:
    """Limiters in this process, each with connections of its own."""

    def __init__(self, url: str, count: int, *, credit: bool = True) -> None:
        clock = ShiftedClock(offset_to_mid_window_ms())
        tuning = Tuning(**PATIENT, credit=credit)
        self.limiters: list[AsyncLimiter] = [
            make_async_limiter(region=REGION, origin=url, clock=clock, tuning=tuning) for _ in range(count)
        ]
        self.accepted = 0

    async def __aenter__(self) -> Self:
        await asyncio.gather(*(limiter.start() for limiter in self.limiters))
        for limiter in self.limiters:
            await until(partial(self._is_connected, limiter), "a connection to the server of x")
        return self

    @staticmethod
    async def _is_connected(limiter: AsyncLimiter) -> bool:
        # A node gives up an attempt to connect after 2 s, however long its requests may wait.
        return (await limiter.peek(limit_of(10_000), "x")).source != "degraded"

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(limiter.stop() for limiter in self.limiters))

    async def ask(self, node: int, quota: int, cost: int = 1) -> None:
        retry_after = await self.ask_once(node, quota, cost)
        if retry_after > 0:
            await asyncio.sleep(retry_after)
            await self.ask(node, quota, cost)

    async def ask_once(self, node: int, quota: int, cost: int = 1) -> float:
        """When to try again what was refused because other nodes hold credit, in seconds; 0 for all other answers."""
        limiter = self.limiters[node % len(self.limiters)]
        decision = await limiter.limit(limit_of(quota), "x", cost)
        assert decision.source != "degraded", limiter.health()
        assert decision.retry_after is not None
        if decision:
            self.accepted += cost
        elif decision.retry_after < DURATION_MS / 2_000 - DEADLINE_S:
            # Not in the next window, so that credit explains it, which lives 5 s and a second.
            assert decision.retry_after <= 6, decision
            return decision.retry_after
        return 0

    async def round_robin(self, quota: int, gap_ms: int, count: int) -> None:
        for index in range(count):
            await self.ask(index, quota)
            await asyncio.sleep(gap_ms / 1000)

    async def all_at_once(self, quota: int, each: int) -> None:
        await asyncio.gather(
            *(self.ask(node, quota) for _ in range(each) for node in range(len(self.limiters)))
        )


@pytest.fixture(
    params=[
        pytest.param(kind, marks=pytest.mark.server) for kind in ("redis", "valkey", "sentinel", "cluster")
    ]
)
def url(request: pytest.FixtureRequest) -> str:
    """A server of each kind, whole and empty."""
    if request.param == "cluster":
        cluster: RedisCluster = request.getfixturevalue("fresh_redis_cluster")
        return ClusterPlace(cluster).url
    name = "fresh_redis_sentinel" if request.param == "sentinel" else f"fresh_{request.param}"
    server: RedisServer | RedisSentinel = request.getfixturevalue(name)
    return server.url


@pytest.mark.parametrize(("nodes", "quota", "gap_ms"), ONE_AFTER_THE_OTHER)
async def test_one_after_the_other_exactly_the_quota_passes(
    url: str, nodes: int, quota: int, gap_ms: int
) -> None:
    async with Nodes(url, nodes) as fleet:
        await fleet.round_robin(quota, gap_ms, 2 * quota + nodes)
        assert fleet.accepted == quota


@pytest.mark.parametrize(("nodes", "quota"), ALL_AT_ONCE)
async def test_all_at_once_exactly_the_quota_passes(url: str, nodes: int, quota: int) -> None:
    async with Nodes(url, nodes) as fleet:
        await fleet.all_at_once(quota, max(8, 2 * quota // nodes))
        assert fleet.accepted == quota


@pytest.mark.parametrize("burst", [1, 40, 100_000], ids=["one by one", "in bursts", "all at once"])
@pytest.mark.parametrize(("nodes", "quota"), [(2, 20), (8, 200), (8, 1_000), (16, 1_000)])
async def test_requests_that_are_each_sent_once_use_all_but_half_a_percent_of_the_quota(
    server: RedisServer, nodes: int, quota: int, burst: int
) -> None:
    """Three quarters of the quota on all nodes, then more than is left on one: it needs what the others hold."""
    random = Random(f"{nodes} {quota} {burst}")
    async with Nodes(server.url, nodes) as fleet:
        for busy, requests in ((nodes, quota // 2), (1, quota)):
            left = requests
            while left > 0:
                asked = [
                    (random.randrange(busy), random.choice((1, 1, 1, 3)))
                    for _ in range(min(left, random.randint(1, burst)))
                ]
                await asyncio.gather(*(fleet.ask_once(node, quota, cost) for node, cost in asked))
                left -= len(asked)
        assert quota - quota * 5 // 1_000 <= fleet.accepted <= quota
        # A second of quiet is what the promise names: nothing is held back after it.
        await asyncio.sleep(1)
        unused = quota - fleet.accepted
        if unused > 0:
            assert await fleet.ask_once(0, quota, unused) == 0
        assert (fleet.accepted, await fleet.ask_once(nodes - 1, quota)) == (quota, 0)


async def test_a_lost_connection_for_recalls_is_made_again_and_nothing_passes_twice(
    server: RedisServer,
) -> None:
    async with Nodes(server.url, 4) as fleet:
        await fleet.round_robin(60, 1, 20)
        before = [limiter.statistics().credit_recalls for limiter in fleet.limiters]
        await asyncio.to_thread(server.command, "CLIENT", "KILL", "TYPE", "pubsub")
        await fleet.all_at_once(60, 3)

        async def all_listen() -> bool:
            return all(limiter.statistics().credit_is_listening for limiter in fleet.limiters)

        await until(all_listen, "the nodes to subscribe again")
        await fleet.all_at_once(60, 20)
        assert fleet.accepted == 60
        assert sum(limiter.statistics().credit_recalls for limiter in fleet.limiters) >= sum(before)


async def test_nodes_without_credit_share_their_counts_with_nodes_that_have_it(server: RedisServer) -> None:
    """As in a rolling update: the version before reads and merges cells, and does not know of credit."""
    async with Nodes(server.url, 2) as new, Nodes(server.url, 2, credit=False) as old:
        for _ in range(30):
            for index, limiter in enumerate(old.limiters):
                await old.ask(index, 100)
                # The answer contains the counts of the others. Without this, its loop may not run before the end.
                await delivered(limiter)
            for index in range(len(new.limiters)):
                await new.ask(index, 100)

        async def agree() -> bool:
            # For a limit that is not used up: otherwise the node denies from memory and reads no more.
            looks = [await limiter.peek(limit_of(10_000), "x") for limiter in (*old.limiters, *new.limiters)]
            return {look.effective for look in looks} == {old.accepted + new.accepted}

        await until(agree, "all nodes to know all counts")
        # An old node accepts requests until it learns of the others: one request each, in turn.
        assert 100 <= old.accepted + new.accepted <= 100 + len(old.limiters)


async def test_a_limit_that_denies_on_an_outage_denies_while_the_server_is_frozen(
    server: RedisServer,
) -> None:
    careful = Limit(100, duration_ms=DURATION_MS, namespace="careful", on_outage="deny")
    async with AsyncLimiter(region=REGION, origin=server.url) as limiter:
        await limiter.limit(limit_of(100), "known")
        await asyncio.to_thread(server.freeze)
        try:
            denied = await limiter.limit(careful, "x")
            usual = await limiter.limit(limit_of(100), "x")
        finally:
            await asyncio.to_thread(server.thaw)
        assert (denied.allowed, denied.source) == (False, "degraded")
        assert denied.retry_after is not None and 0 < denied.retry_after <= 0.3
        assert (usual.allowed, usual.source) == (True, "degraded")

        async def is_back() -> bool:
            return bool(await limiter.limit(careful, "x"))

        await until(is_back, "the limit to allow again")


@pytest.fixture(
    params=[*(pytest.param(kind, marks=pytest.mark.server) for kind in ("redis", "valkey")), "sqlite"]
)
async def processes(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[list[NodeProcess]]:
    if request.param == "sqlite":
        url = f"sqlite:///{tmp_path}/counts.db"
    else:
        server: RedisServer = request.getfixturevalue(f"fresh_{request.param}")
        url = server.url
    clock = ShiftedClock(offset_to_mid_window_ms())
    found = list(await asyncio.gather(*(NodeProcess.start(url, clock, PATIENT) for _ in range(4))))
    yield found
    for process in found:
        await process.kill()


async def test_processes_one_after_the_other_pass_exactly_the_quota(processes: list[NodeProcess]) -> None:
    for quota in (1, 6, 20, 100):
        name = f"quota {quota}"
        for index in range(2 * quota + 8):
            await processes[index % 4].accept(name, 1, quota=quota)
        assert sum(process.accepted[name] for process in processes) == quota


async def test_processes_all_at_once_pass_exactly_the_quota(processes: list[NodeProcess]) -> None:
    for quota in (5, 100, 1_000):
        name = f"quota {quota}"
        await asyncio.gather(
            *(process.accept(name, max(16, quota), threads=8, quota=quota) for process in processes)
        )
        assert sum(process.accepted[name] for process in processes) == quota


async def test_credit_of_a_killed_process_is_usable_again_when_it_expires(
    processes: list[NodeProcess],
) -> None:
    killed, *others = processes
    await killed.accept("x", 40, quota=100)
    await killed.delivered()
    await killed.kill()
    left = 60
    async with asyncio.timeout(DEADLINE_S):
        while left > 0:
            for process in others:
                left -= await process.accept("x", 20, threads=4, quota=100)
    assert left == 0
    assert sum(process.accepted["x"] for process in processes) == 100


async def test_a_refusal_because_of_a_killed_process_says_when_its_credit_ends(server: RedisServer) -> None:
    clock = ShiftedClock(offset_to_mid_window_ms())
    killed = await NodeProcess.start(server.url, clock, PATIENT)
    limit = Limit(100, duration_ms=DURATION_MS, namespace=LIMIT.namespace)
    await killed.accept("x", 40, quota=100)
    await killed.delivered()
    await killed.kill()
    async with (
        make_async_limiter(
            region=REGION, origin=server.url, clock=clock, tuning=Tuning(**PATIENT)
        ) as limiter,
        asyncio.timeout(DEADLINE_S),
    ):
        retry_after = 0.0
        while not (decision := await limiter.limit(limit, "x", 60)):
            # Until the holder is known not to answer, the time to try again is short. The time after that is its end.
            assert retry_after < 0.5, decision
            assert decision.source != "degraded", limiter.health()
            assert decision.retry_after is not None and 0 < decision.retry_after <= 6
            retry_after = decision.retry_after
            await asyncio.sleep(retry_after)
        assert decision.effective == 100
