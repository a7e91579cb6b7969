"""Exactly the quota passes in every kind of traffic: on a real Redis, and over one SQLite file.

As in `test_exact.py` a request that is denied although it would fit is repeated after its retry time, because a busy
machine makes answers late. Time moves only when a test moves it.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from random import Random

import pytest

from tests.e2e.origin.audit import DEADLINE_S, DURATION_MS, PATIENT, REGION
from tests.e2e.origin.test_exact import Nodes, limit_of
from tidegate import AsyncLimiter, Limit, Request, Tuning
from tidegate.testing import ManualClock, RedisServer
from tidegate.testing.limiters import make_async_limiter, make_limiter


@pytest.fixture(params=[pytest.param("redis", marks=pytest.mark.server), "sqlite"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/counts.db"
    server: RedisServer = request.getfixturevalue("fresh_redis")
    return server.url


async def limit_with_retries(
    limiter: AsyncLimiter, limit: Limit, cost: int = 1, *, expected: bool = True
) -> bool:
    """Ask once. If the request should pass, repeat it while other nodes have to give credit back first."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            decision = await limiter.limit(limit, "x", cost)
            assert decision.source != "degraded", limiter.health()
            if decision or not expected:
                return bool(decision)
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(("nodes", "quota"), [(1, 1), (64, 1), (64, 100), (32, 7)])
async def test_1_to_64_nodes_pass_exactly_the_quota(place: str, nodes: int, quota: int) -> None:
    async with Nodes(place, nodes) as fleet:
        await fleet.all_at_once(quota, max(2, 2 * quota // nodes))
        assert fleet.accepted == quota


async def test_a_limit_of_100_000_passes_exactly(place: str) -> None:
    async with Nodes(place, 4) as fleet:
        await asyncio.gather(*(fleet.ask(n, 100_000, 2_500) for n in range(39)))
        await fleet.all_at_once(100_000, 1_000)
        assert fleet.accepted == 100_000


@pytest.mark.parametrize("seed", range(2))
async def test_costs_above_1_use_the_whole_limit(place: str, seed: int) -> None:
    random = Random(seed)
    async with Nodes(place, 6) as fleet:
        costs = [random.choice((1, 2, 5, 9, 50)) for _ in range(120)]
        await asyncio.gather(*(fleet.ask(n, 300, cost) for n, cost in enumerate(costs)))
        assert fleet.accepted <= 300
        await fleet.all_at_once(300, 50)
        assert fleet.accepted == 300


async def test_several_limits_on_one_counter_each_pass_exactly(place: str) -> None:
    async with Nodes(place, 6) as fleet:
        for quota in (30, 100, 60, 101):
            before = fleet.accepted
            await fleet.all_at_once(quota, 20)
            assert fleet.accepted == max(before, quota)


async def test_batches_pass_exactly_the_scarcest_of_their_limits_and_refused_ones_count_nothing(
    place: str,
) -> None:
    async with Nodes(place, 5) as fleet:
        accepted = dict.fromkeys(("a", "b"), 0)

        async def batch(node: int, names: tuple[str, ...]) -> None:
            limiter = fleet.limiters[node % 5]
            quotas = {"a": 20, "b": 50}
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    items = [Request(limit_of(quotas[name]), name, 1) for name in names]
                    decisions = await limiter.limit_many(items)
                    assert {decision.source for decision in decisions} <= {"local", "origin"}
                    if all(decisions):
                        for name in names:
                            accepted[name] += 1
                        return
                    if any((decision.retry_after or 0) > 10 for decision in decisions if not decision):
                        return
                    await asyncio.sleep(0.005)

        await asyncio.gather(*(batch(n, ("a", "b")) for n in range(60)))
        assert accepted == {"a": 20, "b": 20}
        await asyncio.gather(*(batch(n, ("b",) if n % 2 else ("b", "a")) for n in range(120)))
        assert accepted == {"a": 20, "b": 50}


@pytest.mark.parametrize("duration_ms", [1_000, 60_000])
async def test_windows_that_roll_over_pass_what_a_single_counter_passes(place: str, duration_ms: int) -> None:
    """The same requests, one after the other, on four nodes and on a single limiter."""
    # Ahead of the server's time: counts of the past expire there.
    clock = ManualClock(int(time.time() * 1000) + 3_600_000)
    limit = Limit(10, duration_ms=duration_ms, namespace="exact")
    alone = make_limiter(clock=clock)
    nodes = [
        make_async_limiter(region=REGION, origin=place, clock=clock, tuning=Tuning(**PATIENT))
        for _ in range(4)
    ]
    await asyncio.gather(*(node.start() for node in nodes))
    random = Random(duration_ms)
    passed = 0
    for turn in range(250):
        clock.advance(random.choice((0, 0, duration_ms // 50, duration_ms // 9)))
        cost = random.choice((1, 1, 1, 3))
        expected = bool(alone.limit(limit, "x", cost))
        assert await limit_with_retries(nodes[turn % 4], limit, cost, expected=expected) == expected, turn
        passed += expected
    assert 50 < passed < 200
    await asyncio.gather(*(node.stop() for node in nodes))


async def test_a_process_that_did_not_run_for_a_while_uses_what_was_answered_meanwhile(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    usual, ahead_s = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: usual() + ahead_s)
    async with Nodes(place, 1) as fleet:
        asked = asyncio.create_task(fleet.limiters[0].limit(limit_of(1), "x"))
        for _ in range(3):
            await asyncio.sleep(0)
        # All timers are late now, as after a stop of the process for three times as long as an answer may take.
        ahead_s += 3 * PATIENT["read_timeout_ms"] / 1000
        assert (await asked).source == "origin"
        assert not await fleet.limiters[0].limit(limit_of(1), "x")


async def test_nodes_that_join_and_leave_under_traffic_pass_exactly_the_quota(place: str) -> None:
    async with Nodes(place, 3) as first:
        await first.all_at_once(400, 40)
        async with Nodes(place, 3) as second:
            await asyncio.gather(first.all_at_once(400, 20), second.all_at_once(400, 20))
        # These have left, and given back what they held.
        await first.limiters[0].stop()
        first.limiters = first.limiters[1:]
        await first.all_at_once(400, 100)
        assert first.accepted + second.accepted == 400
    assert DURATION_MS >= 3_600_000, "no window ended meanwhile"
