"""Sentinel and Cluster: a replica that is behind becomes the master, a master of three comes back empty."""

from __future__ import annotations

import asyncio

from tests.e2e.origin.audit import PATIENT, Fleet, until
from tidegate.testing import RedisCluster, RedisSentinel

NAMES = [f"user {n}" for n in range(24)]


def cluster_url(cluster: RedisCluster) -> str:
    return "redis+cluster://" + ",".join(f"{node.host}:{node.port}" for node in cluster.nodes)


async def test_a_replica_that_is_behind_becomes_the_master(fresh_redis_sentinel: RedisSentinel) -> None:
    sentinel = fresh_redis_sentinel
    async with Fleet(sentinel.url) as fleet:
        first, second = fleet.node(), fleet.node()
        for name in NAMES:
            await first.accept(name, 5)
            await second.accept(name, 2)
        await first.delivered()
        await second.delivered()
        old, replica = sentinel.master, sentinel.replica
        await asyncio.to_thread(sentinel.wait_for_replica)
        # If it were only frozen, it would read the rest of the stream from its socket when it thaws.
        await asyncio.to_thread(replica.freeze)
        await asyncio.to_thread(old.command, "CLIENT", "KILL", "TYPE", "replica")
        for name in NAMES:
            await first.accept(name, 3)
            await second.accept(name, 1)
        await first.delivered()
        await second.delivered()
        assert await fleet.origin_total(NAMES[0]) == 11, "acknowledged by the old master"
        await asyncio.to_thread(old.kill)
        await asyncio.to_thread(replica.thaw)
        await asyncio.to_thread(sentinel.wait_for_failover, old)
        await fleet.agree()
        assert all(node.limiter.statistics().origin_heals > 0 for node in fleet.nodes)


async def test_a_failover_under_traffic_loses_nothing(fresh_redis_sentinel: RedisSentinel) -> None:
    sentinel = fresh_redis_sentinel
    async with Fleet(sentinel.url) as fleet:
        fleet.node(), fleet.node()
        fleet.start_traffic(NAMES)
        await fleet.more_traffic()
        old = sentinel.master
        await asyncio.to_thread(old.kill)
        await fleet.more_traffic()
        await asyncio.to_thread(sentinel.wait_for_failover, old)
        await fleet.more_traffic()
        await fleet.stop_traffic()
        await fleet.agree()


async def test_the_nodes_of_a_cluster_agree_and_every_master_has_its_share(
    fresh_redis_cluster: RedisCluster,
) -> None:
    async with Fleet(cluster_url(fresh_redis_cluster), **PATIENT) as fleet:
        fleet.node(), fleet.node()
        fleet.start_traffic(NAMES)
        await fleet.more_traffic()
        await fleet.stop_traffic()
        await fleet.agree()
        for node in fleet.nodes:
            assert node.limiter.statistics().origin_errors == {}, "no CROSSSLOT, no redirection left over"
        for master in fresh_redis_cluster.nodes:
            assert int(str(await asyncio.to_thread(master.command, "DBSIZE"))) > 1


async def test_one_master_of_three_comes_back_empty(fresh_redis_cluster: RedisCluster) -> None:
    async with Fleet(cluster_url(fresh_redis_cluster)) as fleet:
        first, second = fleet.node(), fleet.node()
        for name in NAMES:
            await first.accept(name, 5)
            await second.accept(name, 2)
        await first.delivered()
        await second.delivered()
        victim = fresh_redis_cluster.nodes[1]
        await asyncio.to_thread(victim.restart, empty=True)

        async def is_back() -> bool:
            return int(str(await asyncio.to_thread(victim.command, "DBSIZE"))) > 1

        await until(is_back, "the pulse to find that one master was wiped")
        await fleet.agree()


async def test_one_master_of_three_is_wiped_under_traffic(fresh_redis_cluster: RedisCluster) -> None:
    async with Fleet(cluster_url(fresh_redis_cluster)) as fleet:
        fleet.node(), fleet.node()
        fleet.start_traffic(NAMES)
        await fleet.more_traffic()
        await asyncio.to_thread(fresh_redis_cluster.nodes[2].command, "FLUSHALL")
        await fleet.more_traffic()
        await asyncio.to_thread(fresh_redis_cluster.nodes[0].kill)
        await fleet.more_traffic()
        await asyncio.to_thread(fresh_redis_cluster.recover)
        await fleet.more_traffic()
        await fleet.stop_traffic()
        await fleet.agree()
