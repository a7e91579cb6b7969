from __future__ import annotations

import asyncio
import dataclasses
from contextlib import suppress
from random import Random
from typing import Any, Self

import pytest

from tests.runtime.credit_fleet import CreditFleet
from tests.runtime.world import HUNDRED_A_MINUTE, Member, Region, clock, on_virtual_time, turns
from tidegate import AsyncLimiter, Limit, Limiter, Request, Tuning
from tidegate.adapters.memory import MemoryLedger, MemoryOrigin
from tidegate.errors import InvalidInput, TooManyResets
from tidegate.sim.node_process import parts_of
from tidegate.testing.limiters import make_async_limiter

TEN_A_MINUTE = Limit("10/minute", namespace="tests")
TEN_AN_HOUR = Limit("10/hour", namespace="tests")
# The time within which every node of every region has applied a reset.
SOON_S = 2.0


async def use_up(limiter: AsyncLimiter, limit: Limit, who: str) -> None:
    for _ in range(limit.quota):
        assert await limiter.limit(limit, who)
    assert not await limiter.limit(limit, who)


class World:
    """Regions of nodes with credit around one ledger, in virtual time."""

    def __init__(self, *regions: str, nodes: int = 2, with_origin: bool = True, **tuning: Any) -> None:
        self.clock = clock()
        self.ledger = MemoryLedger(clock=self.clock)
        self.origins = {name: MemoryOrigin(clock=self.clock) for name in regions}
        loop = asyncio.get_running_loop()
        self.limiters = {
            name: [
                make_async_limiter(
                    region=name,
                    origin=self.origins[name].another() if with_origin else None,
                    ledger=self.ledger,
                    clock=self.clock,
                    tuning=Tuning(**tuning),
                    random=Random(f"{name} {index}"),
                    monotonic_ns=lambda: int(loop.time() * 1e9),
                )
                for index in range(nodes)
            ]
            for name in regions
        }
        self.all = [limiter for limiters in self.limiters.values() for limiter in limiters]

    async def __aenter__(self) -> Self:
        await asyncio.gather(*(limiter.start() for limiter in self.all))
        return self

    async def __aexit__(self, *_: object) -> None:
        for limiter in self.all:
            await limiter.stop(0)


# -- one process


def test_a_reset_begins_a_counter_again() -> None:
    with Limiter() as limiter:
        for _ in range(10):
            assert limiter.limit(TEN_A_MINUTE, "ann")
        assert not limiter.limit(TEN_A_MINUTE, "ann")
        assert limiter.reset(TEN_A_MINUTE, "ann")
        assert limiter.peek(TEN_A_MINUTE, "ann").remaining == 10
        for _ in range(10):
            assert limiter.limit(TEN_A_MINUTE, "ann")
        assert not limiter.limit(TEN_A_MINUTE, "ann")


def test_a_reset_concerns_one_identifier_under_one_limit() -> None:
    with Limiter() as limiter:
        for limit in (TEN_A_MINUTE, TEN_AN_HOUR):
            for who in ("ann", "bob"):
                limiter.limit(limit, who, 4)
        limiter.reset(TEN_A_MINUTE, "ann")
        assert limiter.peek(TEN_A_MINUTE, "ann").remaining == 10
        assert limiter.peek(TEN_A_MINUTE, "bob").remaining == 6
        assert limiter.peek(TEN_AN_HOUR, "ann").remaining == 6


def test_a_reset_of_an_unused_identifier_is_harmless() -> None:
    with Limiter() as limiter:
        assert limiter.reset(TEN_A_MINUTE, "nobody")
        assert limiter.limit(TEN_A_MINUTE, "nobody").remaining == 9


def test_what_is_reserved_stays_reserved_and_counts_when_it_is_settled() -> None:
    with Limiter() as limiter:
        limiter.limit(TEN_A_MINUTE, "ann", 4)
        with limiter.reserve(TEN_A_MINUTE, "ann", 5) as reservation:
            limiter.reset(TEN_A_MINUTE, "ann")
            assert limiter.peek(TEN_A_MINUTE, "ann").remaining == 5
            reservation.settle(3)
        assert limiter.peek(TEN_A_MINUTE, "ann").remaining == 7


@pytest.mark.parametrize("identifier", ["", 5, None, "x" * 513])
def test_a_bad_identifier_is_refused(identifier: object) -> None:
    with Limiter() as limiter, pytest.raises(InvalidInput, match="identifier"):
        limiter.reset(TEN_A_MINUTE, identifier)  # type: ignore[arg-type]  # what is tested


def test_a_bad_limit_is_refused() -> None:
    with Limiter() as limiter, pytest.raises(InvalidInput, match="limit"):
        limiter.reset("10/minute", "ann")  # type: ignore[arg-type]  # what is tested


def test_a_workspace_cannot_use_up_the_resets_of_another() -> None:
    mine = Limit("10/day", namespace="n", workspace="mine")
    with Limiter() as limiter:
        made = 0
        with suppress(TooManyResets):
            while made < 1_000_000:
                limiter.reset(mine, f"{made:0500}")
                made += 1
        assert 1_000 < made < 1_000_000
        with pytest.raises(TooManyResets, match="'mine' has as many live resets as it may"):
            limiter.reset(mine, f"{made:0500}")
        limiter.reset(mine, f"{0:0500}")  # one that it holds already
        theirs = Limit("10/day", namespace="n", workspace="theirs")
        for number in range(made // 4):
            limiter.reset(theirs, f"{number:0500}")


# -- a region


@on_virtual_time
async def test_every_node_of_a_region_learns_of_a_reset_and_counts_exactly_after_it() -> None:
    fleet = CreditFleet(4)
    limit = fleet.limit_of(10)
    await fleet.start()
    for index in range(10):
        assert await fleet.limiters[index % 4].limit(limit, "x")
    for limiter in fleet.limiters:
        assert not await limiter.limit(limit, "x")
    assert await fleet.limiters[0].reset(limit, "x")
    await asyncio.sleep(SOON_S)
    passed = [bool(await fleet.limiters[index % 4].limit(limit, "x")) for index in range(40)]
    assert sum(passed) == 10
    await fleet.stop()


@on_virtual_time
async def test_requests_that_wait_when_a_reset_arrives_are_decided_after_it() -> None:
    fleet = CreditFleet(2, latency_ms=(20, 20))
    limit = fleet.limit_of(10)
    await fleet.start()
    for _ in range(9):
        await fleet.limiters[0].limit(limit, "x")
    await asyncio.sleep(1)
    # Its message is sent before the reset; the answer, which would deny, comes after it.
    waiting = asyncio.create_task(fleet.limiters[1].limit(limit, "x", 5))
    await asyncio.sleep(0.005)
    await fleet.limiters[1].reset(limit, "x")
    assert await waiting
    await fleet.stop()


@on_virtual_time
async def test_a_batch_that_waits_when_a_reset_arrives_is_decided_after_it() -> None:
    fleet = CreditFleet(2, latency_ms=(20, 20))
    limit = fleet.limit_of(10)
    await fleet.start()
    await fleet.limiters[0].limit(limit, "x", 10)
    await asyncio.sleep(1)
    batch = [Request(limit, "x", 2), Request(limit, "y", 2)]
    waiting = asyncio.create_task(fleet.limiters[1].limit_many(batch))
    await asyncio.sleep(0.005)
    await fleet.limiters[1].reset(limit, "x")
    assert all(await waiting)
    assert (await fleet.limiters[1].peek(limit, "x")).effective == 2
    await fleet.stop()


@on_virtual_time
async def test_credit_of_before_a_reset_is_not_spent_after_it() -> None:
    fleet = CreditFleet(2)
    limit = fleet.limit_of(100)
    await fleet.start()
    for _ in range(20):
        await fleet.limiters[1].limit(limit, "x")
    await asyncio.sleep(0.5)
    assert fleet.spare(1) > 0
    await fleet.limiters[0].reset(limit, "x")
    early = [bool(await fleet.limiters[0].limit(limit, "x")) for _ in range(90)]
    await asyncio.sleep(SOON_S)
    passed = [bool(await fleet.limiters[index % 2].limit(limit, "x")) for index in range(300)]
    assert sum(early) + sum(passed) == 100
    await fleet.stop()


@on_virtual_time
async def test_without_credit_nodes_get_a_reset_too() -> None:
    region = Region()
    first, second = region.node(), region.node()
    for member in (first, second):
        await member.limiter.start()
    await first.accept("x", 60, HUNDRED_A_MINUTE)
    await second.accept("x", 60, HUNDRED_A_MINUTE)
    await turns()
    assert await first.limiter.reset(HUNDRED_A_MINUTE, "x")
    await asyncio.sleep(SOON_S)
    assert await second.seen("x", HUNDRED_A_MINUTE) == 0
    assert await second.accept("x", 5, HUNDRED_A_MINUTE) == 5
    await turns()
    await asyncio.sleep(6)
    assert await first.seen("x", HUNDRED_A_MINUTE) == 5
    await region.stop()


@on_virtual_time
async def test_a_reset_during_an_outage_is_sent_when_the_origin_answers_again() -> None:
    fleet = CreditFleet(2)
    limit = fleet.limit_of(10)
    await fleet.start()
    await use_up(fleet.limiters[0], limit, "x")
    await asyncio.sleep(1)
    assert not await fleet.limiters[1].limit(limit, "x")
    for origin in fleet.origins:
        origin.is_down = True
    assert not await fleet.limiters[0].reset(limit, "x")
    await asyncio.sleep(3)
    assert not await fleet.limiters[1].limit(limit, "x")
    for origin in fleet.origins:
        origin.is_down = False
    await asyncio.sleep(8)
    assert await fleet.limiters[1].limit(limit, "x")
    await fleet.stop()


@on_virtual_time
async def test_a_wiped_origin_gets_resets_back_and_old_counts_do_not_return() -> None:
    fleet = CreditFleet(2)
    limit = fleet.limit_of(10)
    await fleet.start()
    copy = None
    await use_up(fleet.limiters[0], limit, "x")
    await asyncio.sleep(1)
    copy = fleet.store.snapshot()
    await fleet.limiters[0].reset(limit, "x")
    await asyncio.sleep(SOON_S)
    for lose in (fleet.store.wipe, lambda: fleet.store.restore(copy)):
        lose()
        await asyncio.sleep(5)
        newcomer = make_async_limiter(region="fra", origin=fleet.store.another(), clock=fleet.clock)
        await newcomer.start()
        assert (await newcomer.peek(limit, "x")).effective == 0
        await newcomer.stop()
    await fleet.stop()


@on_virtual_time
async def test_resets_that_an_origin_lost_come_back_even_if_the_first_message_after_it_is_another_reset() -> (
    None
):
    fleet = CreditFleet(2)
    limit = fleet.limit_of(10)
    await fleet.start()
    await fleet.limiters[0].reset(limit, "x")
    await asyncio.sleep(SOON_S)
    # Redis has evicted its resets, and nothing else.
    fleet.store.restore(
        dataclasses.replace(fleet.store.snapshot(), resets={}, resets_number=0, resets_began=0)
    )
    await fleet.limiters[1].reset(limit, "y")
    await asyncio.sleep(SOON_S)
    newcomer = make_async_limiter(region="fra", origin=fleet.store.another(), clock=fleet.clock)
    await newcomer.start()
    generations = parts_of(newcomer).engine.resets
    assert generations.generation_of(limit.key, "x") > 0
    assert generations.generation_of(limit.key, "y") > 0
    await newcomer.stop()
    await fleet.stop()


@on_virtual_time
async def test_a_node_that_starts_after_a_reset_knows_it_at_its_first_request() -> None:
    fleet = CreditFleet(1)
    limit = fleet.limit_of(10)
    await fleet.start()
    await use_up(fleet.limiters[0], limit, "x")
    await fleet.limiters[0].reset(limit, "x")
    newcomer = make_async_limiter(region="fra", origin=fleet.store.another(), clock=fleet.clock)
    assert (await newcomer.peek(limit, "x")).effective == 0
    await newcomer.stop()
    await fleet.stop()


@on_virtual_time
async def test_when_a_reset_is_forgotten_nodes_still_agree() -> None:
    fleet = CreditFleet(2, duration_ms=60_000)
    limit = fleet.limit_of(10)
    await fleet.start()
    await use_up(fleet.limiters[0], limit, "x")
    await fleet.limiters[0].reset(limit, "x")
    for _ in range(6):
        await asyncio.sleep(60)
        newcomer = make_async_limiter(region="fra", origin=fleet.store.another(), clock=fleet.clock)
        passed = sum([bool(await fleet.limiters[0].limit(limit, "x")) for _ in range(4)])
        await asyncio.sleep(0.1)
        known = (await fleet.limiters[0].peek(limit, "x")).effective
        assert passed > 0
        assert (await newcomer.peek(limit, "x")).effective == known
        assert (await fleet.limiters[1].peek(limit, "x")).effective == known
        await newcomer.stop()
    await fleet.stop()


@on_virtual_time
async def test_a_reservation_survives_a_reset_at_the_origin() -> None:
    fleet = CreditFleet(2)
    limit = fleet.limit_of(10)
    await fleet.start()
    await fleet.limiters[0].limit(limit, "x", 4)
    async with fleet.limiters[0].reserve(limit, "x", 5) as reservation:
        await fleet.limiters[1].reset(limit, "x")
        await asyncio.sleep(SOON_S)
        assert await fleet.limiters[1].limit(limit, "x", 5)
        assert not await fleet.limiters[1].limit(limit, "x")
        reservation.settle(3)
    await asyncio.sleep(6)
    assert (await fleet.limiters[1].peek(limit, "x")).effective == 8
    await fleet.stop()


# -- regions


@on_virtual_time
async def test_every_region_learns_of_a_reset_within_two_seconds() -> None:
    async with World("fra", "nyc", "sin") as world:
        first = world.all[0]
        await use_up(first, TEN_A_MINUTE, "ann")
        await asyncio.sleep(3)
        for limiter in world.all:
            assert not await limiter.limit(TEN_A_MINUTE, "ann")
        assert await world.limiters["nyc"][1].reset(TEN_A_MINUTE, "ann")
        await asyncio.sleep(SOON_S)
        for limiter in world.all:
            assert (await limiter.peek(TEN_A_MINUTE, "ann")).effective == 0
        await use_up(first, TEN_A_MINUTE, "ann")
        await asyncio.sleep(3)
        for limiter in world.all:
            assert not await limiter.limit(TEN_A_MINUTE, "ann")


@on_virtual_time
async def test_regions_without_an_origin_get_a_reset_within_two_seconds() -> None:
    async with World("fra", "nyc", nodes=1, with_origin=False) as world:
        fra, nyc = world.all
        await use_up(fra, TEN_AN_HOUR, "ann")
        await asyncio.sleep(8)
        assert not await nyc.limit(TEN_AN_HOUR, "ann")
        assert await fra.reset(TEN_AN_HOUR, "ann")
        await asyncio.sleep(SOON_S)
        assert await nyc.limit(TEN_AN_HOUR, "ann")


@on_virtual_time
async def test_a_limit_with_a_short_window_is_reset_in_every_region_too() -> None:
    limit = Limit(10, duration_ms=30_000, namespace="tests")
    async with World("fra", "nyc") as world:
        for limiters in world.limiters.values():
            await use_up(limiters[0], limit, "ann")
        await world.all[0].reset(limit, "ann")
        await asyncio.sleep(SOON_S)
        for limiters in world.limiters.values():
            assert await limiters[1].limit(limit, "ann")


async def two_regions_without_quota() -> tuple[list[Region], list[Member], Member]:
    """Two nodes each, which know that "ann" has used up the limit; and the node that imports for the first region."""
    ledger = MemoryLedger(clock=clock())
    regions = [Region(name, ledger=ledger, credit=True) for name in ("fra", "nyc")]
    nodes = [region.node() for region in regions for _ in range(2)]
    for node in nodes:
        await node.limiter.start()
    await asyncio.sleep(1)
    await use_up(nodes[0].limiter, TEN_AN_HOUR, "ann")
    await asyncio.sleep(SOON_S)
    (importer,) = [node for node in nodes[:2] if node.limiter.statistics().is_importer]
    return regions, nodes, importer


@on_virtual_time
async def test_a_reset_that_the_importer_could_not_publish_reaches_other_regions_through_the_next_one() -> (
    None
):
    regions, nodes, importer = await two_regions_without_quota()
    assert not await nodes[2].limiter.limit(TEN_AN_HOUR, "ann")
    assert importer.failing_ledger is not None
    importer.failing_ledger.faults.fail("publish")
    await importer.limiter.reset(TEN_AN_HOUR, "ann")
    await asyncio.sleep(SOON_S)  # the other node has read it from the origin
    importer.faults.fail()
    importer.failing_ledger.faults.fail()
    await asyncio.sleep(2 * SOON_S)
    assert await nodes[2].limiter.limit(TEN_AN_HOUR, "ann")
    for region in regions:
        await region.stop()


@on_virtual_time
async def test_a_reset_that_the_importer_could_not_pass_on_is_imported_by_the_next_one() -> None:
    regions, nodes, importer = await two_regions_without_quota()
    (other,) = [node for node in nodes[:2] if node is not importer]
    importer.faults.fail("resets")
    await nodes[2].limiter.reset(TEN_AN_HOUR, "ann")
    await asyncio.sleep(SOON_S)
    assert await importer.limiter.limit(TEN_AN_HOUR, "ann")
    assert not await other.limiter.limit(TEN_AN_HOUR, "ann")
    assert importer.failing_ledger is not None
    importer.faults.fail()
    importer.failing_ledger.faults.fail()
    await asyncio.sleep(2 * SOON_S)
    assert await other.limiter.limit(TEN_AN_HOUR, "ann")
    for region in regions:
        await region.stop()


@on_virtual_time
async def test_a_ledger_that_lost_a_reset_gets_it_back_with_the_next_full_read() -> None:
    async with World("fra", "nyc") as world:
        await use_up(world.all[0], TEN_AN_HOUR, "ann")
        await world.all[0].reset(TEN_AN_HOUR, "ann")
        await asyncio.sleep(SOON_S)
        world.ledger.wipe()
        await asyncio.sleep(60)
        rows = [row for row in world.ledger.rows() if row.sequence == -1]
        assert rows and rows[0].identifier == "ann"
