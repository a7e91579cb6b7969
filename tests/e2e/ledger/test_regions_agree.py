from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from tests.e2e.ledger.world import (
    BRISK,
    DAY_MS,
    HUNDRED_A_DAY,
    THOUSAND_A_DAY,
    World,
    accept,
    publish_of,
    seen,
    until,
    until_all_see,
    until_publishes_are_answered,
)
from tidegate import AsyncLimiter, Limit, Tuning
from tidegate.adapters.clock import WallClock
from tidegate.testing.limiters import make_limiter
from tidegate.testing.servers import RedisServer

pytestmark = pytest.mark.server


async def _traffic(
    nodes: list[AsyncLimiter], identifiers: list[str], rounds: int, limit: Limit, seed: int = 1
) -> Counter[str]:
    """All nodes at once, in random order, until each identifier is well above its threshold everywhere."""
    accepted: Counter[str] = Counter()

    async def work(node: AsyncLimiter, chance: random.Random) -> None:
        for _ in range(rounds):
            for identifier in chance.sample(identifiers, len(identifiers)):
                cost = await accept(node, identifier, chance.randrange(1, 10), limit)
                accepted[identifier] += cost
            await asyncio.sleep(0)

    await asyncio.gather(*(work(node, random.Random(seed + i)) for i, node in enumerate(nodes)))
    return accepted


async def test_two_regions_of_two_nodes_agree_and_the_sum_is_what_was_accepted(world: World) -> None:
    nodes = await world.grid("fra", "iad")
    identifiers = [f"user-{n}" for n in range(40)]
    accepted = await _traffic(nodes, identifiers, 30, THOUSAND_A_DAY)
    await until_all_see(nodes, accepted, THOUSAND_A_DAY)
    stored = world.database.counts()
    sums = Counter(
        {identifier: stored[identifier, "fra"] + stored[identifier, "iad"] for identifier in accepted}
    )
    assert sums == accepted
    assert {region for _, region in stored} == {"fra", "iad"}


async def test_regions_with_a_redis_of_their_own_agree_over_a_server(server_world: World) -> None:
    world = server_world
    with RedisServer() as one, RedisServer() as two:
        await world.grid_on(fra=one.url, iad=two.url)
        accepted = await _traffic(world.nodes(), [f"user-{n}" for n in range(20)], 20, HUNDRED_A_DAY)
        await until_all_see(world.nodes(), accepted)
        await world.stack.aclose()


async def test_a_limit_that_is_used_up_in_one_region_denies_in_the_other(world: World) -> None:
    fra, iad = await world.grid("fra", "iad", nodes=1)
    while await accept(fra, "ada"):
        pass
    await until_all_see([iad], {"ada": 100})
    denied = await iad.limit(HUNDRED_A_DAY, "ada")
    assert not denied
    assert denied.source == "local", "no request ever waits for cross-region state"


async def test_an_identifier_of_any_unicode_reaches_other_regions_unchanged(world: World) -> None:
    fra, iad = await world.grid("fra", "iad", nodes=1)
    names = [
        "é",
        "e\u0301",
        "E",
        "e",
        "e ",
        " e",
        "🦀" * 512,
        "x" * 512,
        "a\tb\x01",
        "ß",
        "ss",
        "\ud800",
        "%_'\\\"",
    ]
    for weight, name in enumerate(names):
        await accept(fra, name, 40 + weight)
    await until_all_see([iad], {name: 40 + weight for weight, name in enumerate(names)})


async def test_windows_shorter_than_a_minute_are_never_written_to_the_ledger(world: World) -> None:
    world.clock = WallClock()  # SQLite deletes by the real time what has expired by now
    fra, iad = await world.grid("fra", "iad", nodes=1)
    short = Limit(100, duration_ms=59_999, namespace="tests")
    minute = Limit(100, duration_ms=60_000, namespace="tests")
    now_ms = world.clock.now_ms()
    for _ in range(50):
        await fra.limit(short, "ada", now_ms=now_ms)
        await fra.limit(minute, "ada", now_ms=now_ms)

    async def has_crossed() -> bool:
        return (await iad.peek(minute, "ada", now_ms=now_ms)).effective == 50

    await until(has_crossed, "the minute has crossed")
    turn = await publish_of(fra).run_once()
    assert turn.ok
    durations = {int(row[0]) for row in world.database.sql("SELECT duration_ms FROM ratelimit_window_counts")}
    assert durations == {60_000}
    assert (await iad.peek(short, "ada", now_ms=now_ms)).effective == 0


async def test_a_ledger_without_an_origin_is_a_region_of_one_node(world: World) -> None:
    fra = await world.region("fra", origin=None).start(world.database.url)
    iad = await world.region("iad", origin=None).start(world.database.url)
    accepted = await _traffic([fra, iad], ["ada", "bob"], 20, HUNDRED_A_DAY)
    await until_all_see([fra, iad], accepted)


async def test_only_what_passes_its_threshold_is_written(world: World) -> None:
    fra, iad = await world.grid("fra", "iad", nodes=1)
    await until(lambda: fra.statistics().regions == 2, "both know of each other")
    # 20 % of the limit or half of a region's share, whichever is less: 20 of 100.
    await accept(fra, "quiet", 19)
    await accept(fra, "loud", 20)
    await until_all_see([iad], {"loud": 20})
    assert set(world.database.counts()) == {("loud", "fra")}
    # Once another region has published the cell every change matters, however small.
    await accept(iad, "loud", 1)
    await until_all_see([fra], {"loud": 21})


async def test_a_cell_that_reaches_its_threshold_does_not_wait_for_the_tick(world: World) -> None:
    """Regions that all reach it at once would otherwise let the limit through once more before they see each other."""
    fra, iad = await world.grid("fra", "iad", nodes=1, publish_interval_ms=600_000)
    await until(lambda: fra.statistics().regions == 2, "both know of each other")
    for _ in range(200):
        await accept(fra, "ada", 1, THOUSAND_A_DAY)
    await until_all_see([iad], {"ada": 200}, THOUSAND_A_DAY)


async def test_an_imported_count_is_never_published(world: World) -> None:
    await world.publish(world.row("ada", "syd", 70))
    fra, iad = await world.grid("fra", "iad", nodes=1)
    await until_all_see([fra, iad], {"ada": 70})
    await accept(fra, "ada", 5)
    await until_all_see([iad], {"ada": 75})
    assert world.database.counts() == {("ada", "syd"): 70, ("ada", "fra"): 5}


async def test_what_a_neighbour_published_is_not_published_again(world: World) -> None:
    region = world.region("fra")
    first = await region.start(world.database.url)
    second = await region.start(world.database.url)
    await accept(first, "ada", 40)
    await world.until_rows(lambda rows: ("ada", "fra") in rows, "the first has published")
    await until_all_see([second], {"ada": 40})
    await until_publishes_are_answered([first, second])
    # Now the second knows it from the ledger or from the origin; either way the region's row says so already.
    for node in (first, second):
        assert (await publish_of(node).run_once()).rows == []


async def test_concurrent_flushers_of_the_same_cells_never_deadlock_for_good(world: World) -> None:
    """Three nodes of each region publish the same cells at the same moments, again and again."""
    nodes = await world.grid("fra", "iad", nodes=3, pressure_interval_ms=1, import_hot_interval_ms=5)
    identifiers = [f"user-{n}" for n in range(200)]
    accepted: Counter[str] = Counter()
    for turn in range(6):
        accepted += await _traffic(nodes, identifiers, 2, THOUSAND_A_DAY, seed=100 * turn)
        turns = await asyncio.gather(*(publish_of(node).run_once() for node in nodes))
        assert all(turn.ok for turn in turns)
    # Cells below their threshold are raised above it, so that there is something to compare.
    for node in (nodes[0], nodes[3]):
        for identifier in identifiers:
            cost = await accept(node, identifier, 200, THOUSAND_A_DAY)
            accepted[identifier] += cost
    await until_all_see(nodes, accepted, THOUSAND_A_DAY)
    assert all(node.statistics().publish_errors == 0 for node in nodes)


async def test_a_region_that_restarts_with_an_empty_origin_gets_its_counts_back_from_its_own_rows(
    world: World,
) -> None:
    first = world.region("fra")
    node = await first.start(world.database.url)
    await accept(node, "ada", 60)
    await world.until_rows(lambda rows: rows == {("ada", "fra"): 60}, "it is published")
    await node.stop()
    # A new process, and an empty origin.
    again = await world.region("fra").start(world.database.url)
    await until_all_see([again], {"ada": 60})
    assert await accept(again, "ada", 41) == 0
    assert await accept(again, "ada", 40) == 40
    await world.until_rows(lambda rows: rows == {("ada", "fra"): 100}, "it continues from there")


async def test_the_previous_window_is_shared_too(world: World) -> None:
    """A region without traffic so far knows what still counts from the window before."""
    limit = Limit(100, duration_ms=DAY_MS, namespace="tests")
    now_ms = world.clock.now_ms()
    yesterday_ms = now_ms - DAY_MS
    fra, iad = await world.grid("fra", "iad", nodes=1)
    assert (await fra.limit(limit, "ada", 100, now_ms=yesterday_ms)).allowed

    async def has_crossed() -> bool:
        return (await iad.peek(limit, "ada", now_ms=now_ms)).effective == pytest.approx(50, abs=1)

    await until(has_crossed, "it has crossed")


async def test_a_denial_propagates_nothing_that_denies_other_requests(world: World) -> None:
    """Neither one for a cost above the limit, nor one because of the window before."""
    fra, iad = await world.grid("fra", "iad", nodes=1)
    now_ms = world.clock.now_ms()
    assert not await fra.limit(HUNDRED_A_DAY, "huge", 1_000_000)
    await fra.limit(HUNDRED_A_DAY, "bled", 100, now_ms=now_ms - DAY_MS)
    for _ in range(20):
        assert not await fra.limit(HUNDRED_A_DAY, "bled", 80, now_ms=now_ms)
    await accept(fra, "marker", 50)
    await until_all_see([iad], {"marker": 50})
    assert (await publish_of(fra).run_once()).ok
    rows = world.database.counts()
    assert ("huge", "fra") not in rows
    assert rows["bled", "fra"] == 100, "only yesterday's: the denied requests of today left no row"
    for node in (fra, iad):
        assert await node.limit(HUNDRED_A_DAY, "huge", 100)
        assert await node.limit(HUNDRED_A_DAY, "bled", 20, now_ms=now_ms)
    assert await seen(iad, "nobody") == 0


async def test_old_rows_in_a_full_read_are_not_lag(world: World) -> None:
    """A region that published nothing for ten minutes is idle, not late."""
    await world.publish(world.row("ada", "syd", 40))
    for table, column in (("ratelimit_window_counts", "updated_at"), ("ratelimit_publishes", "published_at")):
        world.database.sql(f"UPDATE {table} SET {column} = {column} - 600000")
    (fra,) = await world.grid("fra", nodes=1)
    await until_all_see([fra], {"ada": 40})
    assert "syd" not in fra.statistics().global_lag_ms
    await world.publish(world.row("ada", "syd", 50))
    await until_all_see([fra], {"ada": 50})
    assert fra.statistics().global_lag_ms["syd"] < 60_000


async def test_limiters_for_threads_converge_too(world: World) -> None:
    """Their loops run in a thread of their own, which a decision has to wake when a cell is under pressure."""
    tuning = Tuning(**{**BRISK, "publish_interval_ms": 600_000})
    fra = make_limiter(region="fra", ledger=world.database.url, clock=world.clock, tuning=tuning)
    iad = make_limiter(region="iad", ledger=world.database.url, clock=world.clock, tuning=tuning)
    try:
        for limiter in (fra, iad):
            await asyncio.to_thread(limiter.start)
        passed = 0
        while fra.limit(HUNDRED_A_DAY, "ada"):
            passed += 1
        await until(lambda: iad.peek(HUNDRED_A_DAY, "ada").effective == passed == 100, "it has crossed")
        assert not iad.limit(HUNDRED_A_DAY, "ada")
    finally:
        for limiter in (fra, iad):
            await asyncio.to_thread(limiter.stop)
