"""One real Redis with every kind of fault. After each, all nodes agree on exactly what was accepted."""

from __future__ import annotations

import asyncio

import pytest

from tests.e2e.origin.audit import LIMIT, PATIENT, Fleet, LocalNode, until
from tidegate import AsyncLimiter, Limiter
from tidegate.errors import RegionMismatch
from tidegate.testing import Faults, RedisServer
from tidegate.testing.fixtures import StartProxy

NAMES = [f"user {n}" for n in range(7)]


async def test_two_nodes_converge_within_two_round_trips(server: RedisServer) -> None:
    # No pulse, no reads because of age, no credit: the commands counted below are those of convergence.
    async with Fleet(server.url, credit=False, fresh_ms=3_600_000, pulse_interval_ms=3_600_000) as fleet:
        first, second = fleet.node(), fleet.node()
        await first.accept("x", 1)
        await second.accept("x", 1)
        await first.delivered()
        await second.delivered()
        before = [node.origin.statistics()["round_trips"] for node in (first, second)]
        await first.accept("x", 500)
        await first.delivered()
        assert first.origin.statistics()["round_trips"] - before[0] == 1, "one merge carries all of them"
        assert fleet.accepted()["x"] == 502
        await second.accept("x", 1)
        await second.delivered()
        assert second.origin.statistics()["round_trips"] - before[1] == 1
        assert await second.seen("x") == 503, "learned from the answer to its own merge"
        assert second.origin.statistics()["round_trips"] - before[1] == 1
        assert await fleet.origin_total("x") == 503


async def test_the_origin_is_killed_and_comes_back_empty_under_traffic(server: RedisServer) -> None:
    async with Fleet(server.url) as fleet:
        fleet.node(), fleet.node()
        fleet.start_traffic(NAMES)
        await fleet.more_traffic()
        for _ in range(2):
            await asyncio.to_thread(server.kill)
            await fleet.more_traffic()
            await asyncio.to_thread(server.start)
            await fleet.more_traffic()
        await fleet.stop_traffic()
        await fleet.agree()
        assert any(node.limiter.statistics().origin_heals for node in fleet.nodes)


async def test_the_origin_is_killed_and_comes_back_empty_without_requests(server: RedisServer) -> None:
    async with Fleet(server.url) as fleet:
        first, second = fleet.node(), fleet.node()
        for name in NAMES:
            await first.accept(name, 3)
            await second.accept(name, 4)
        await first.delivered()
        await second.delivered()
        await asyncio.to_thread(server.restart, empty=True)

        async def is_back() -> bool:
            return await fleet.origin_total("user 0") == 7

        await until(is_back, "the pulse to find the wipe")
        await fleet.agree()


async def test_flushall_in_mid_window(server: RedisServer) -> None:
    async with Fleet(server.url) as fleet:
        fleet.node(), fleet.node(), fleet.node()
        fleet.start_traffic(NAMES)
        for _ in range(3):
            await fleet.more_traffic(100)
            await asyncio.to_thread(server.command, "FLUSHALL")
        await fleet.more_traffic(100)
        await fleet.stop_traffic()
        await fleet.agree()


async def test_script_flush_in_mid_window(server: RedisServer) -> None:
    async with Fleet(server.url, **PATIENT) as fleet:
        node = fleet.node()
        await node.accept("x", 5)
        await node.delivered()
        await asyncio.to_thread(server.command, "SCRIPT", "FLUSH", "SYNC")
        await node.accept("x", 5)
        await fleet.agree()
        assert node.limiter.statistics().origin_errors == {}


async def test_a_frozen_origin_keeps_no_request_waiting(server: RedisServer) -> None:
    """SIGSTOP: connections are open, no answer comes. A request that waited for one would never end; how long it waits
    at most is tested in virtual time (tests/runtime/test_exchange.py)."""
    async with Fleet(server.url) as fleet:
        first, second = fleet.node(), fleet.node()
        fleet.start_traffic(NAMES)
        await fleet.more_traffic()
        await asyncio.to_thread(server.freeze)
        asked = 0

        async def customer(node: LocalNode, number: int) -> None:
            nonlocal asked
            for turn in range(30):
                asked += 1
                await node.accept(f"cold {number % 2} {number} {turn}")

        before = first.answered + second.answered
        await asyncio.gather(*(customer((first, second)[n % 2], n) for n in range(20)))
        await fleet.more_traffic()
        assert asked == 600
        assert first.answered + second.answered >= before + asked, "every request was answered"
        for node in (first, second):
            errors = node.limiter.statistics().origin_errors
            assert errors.get(("exchange", "timeout"), 0) > 0, "some reads failed"
            assert errors.get(("exchange", "circuit_open"), 0) > 0, "and then the breaker stopped them"
        await asyncio.to_thread(server.thaw)
        await fleet.more_traffic()
        await fleet.stop_traffic()
        expected = {name: count for name, count in fleet.accepted().items() if not name.startswith("cold")}
        await fleet.agree(type(fleet.accepted())(expected))


@pytest.mark.parametrize("reply_bytes", [1, 40, 333])
async def test_connections_are_reset_in_the_middle_of_a_reply(
    server: RedisServer, fault_proxy: StartProxy, reply_bytes: int
) -> None:
    proxy = fault_proxy(server.port, seed=reply_bytes)
    async with Fleet(server.url, **PATIENT) as fleet:
        hurt, well = fleet.node(proxy.through(server.url)), fleet.node()
        fleet.start_traffic(NAMES)
        await fleet.more_traffic()
        for _ in range(4):
            await asyncio.to_thread(proxy.apply, Faults(reset_after_reply_bytes=reply_bytes))
            await fleet.more_traffic(100)
            await asyncio.to_thread(proxy.heal)
            await fleet.more_traffic(50)
        await fleet.stop_traffic()
        await fleet.agree()
        assert proxy.statistics().connections_reset > 0
        assert hurt.limiter.statistics().origin_errors
        assert not well.limiter.statistics().origin_errors


async def test_replies_come_after_the_timeout_although_the_merge_was_applied(
    server: RedisServer, fault_proxy: StartProxy
) -> None:
    proxy = fault_proxy(server.port)
    async with Fleet(server.url, replay_timeout_ms=200) as fleet:
        hurt, well = fleet.node(proxy.through(server.url)), fleet.node()
        await hurt.accept("x", 10)
        await hurt.delivered()
        await asyncio.to_thread(proxy.apply, Faults(stall_replies=True))
        await hurt.accept("x", 5)

        async def is_applied() -> bool:
            return await fleet.origin_total("x") == 15

        await until(is_applied, "the merge to be applied")
        await until(
            lambda: hurt.limiter.statistics().origin_errors.get(("exchange", "timeout"), 0) >= 2,
            "the answers to be given up",
        )
        await hurt.accept("x", 5)
        await well.accept("x", 7)
        await asyncio.to_thread(proxy.heal)
        await fleet.agree()
        assert fleet.accepted()["x"] == 27


async def test_a_slow_network_changes_nothing_but_the_time(
    server: RedisServer, fault_proxy: StartProxy
) -> None:
    proxy = fault_proxy(server.port)
    proxy.apply(Faults(latency_ms=10, jitter_ms=20))
    async with Fleet(server.url) as fleet:
        fleet.node(proxy.through(server.url)), fleet.node()
        fleet.start_traffic(NAMES)
        await fleet.more_traffic(40)
        await fleet.stop_traffic()
        await fleet.agree()


async def test_an_origin_that_is_down_at_the_start_is_used_when_it_comes(server: RedisServer) -> None:
    await asyncio.to_thread(server.kill)
    async with Fleet(server.url) as fleet:
        node = fleet.node()
        await node.limiter.start()
        await node.accept("x", 9)
        await asyncio.to_thread(server.start)
        await fleet.agree()


async def test_an_origin_of_another_region_refuses_both_drivers_and_leaves_no_connection(
    server: RedisServer,
) -> None:
    async with AsyncLimiter(region="ams", origin=server.url) as owner:
        await owner.limit(LIMIT, "x")

        def connections() -> int:
            return int(server.info("clients")["connected_clients"])

        before = await asyncio.to_thread(connections)
        with pytest.raises(RegionMismatch, match=r"'fra'.*'ams'"):
            await AsyncLimiter(region="fra", origin=server.url).start()
        with pytest.raises(RegionMismatch, match=r"'fra'.*'ams'"):
            await asyncio.to_thread(Limiter(region="fra", origin=server.url).start)

        async def is_released() -> bool:
            return await asyncio.to_thread(connections) == before

        await until(is_released, "the connections to be closed")
