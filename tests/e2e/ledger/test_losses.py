from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from tests.e2e.ledger.world import (
    HUNDRED_A_DAY,
    World,
    accept,
    node_of,
    publish_of,
    seen,
    until_all_see,
    until_publishes_are_answered,
)
from tidegate.adapters.memory import MemoryLedger
from tidegate.adapters.migrations import migrate
from tidegate.adapters.urls import open_ledger
from tidegate.core.model import LedgerRow
from tidegate.ports import Changes, Ledger, LedgerOverview, RegionBeat

pytestmark = pytest.mark.server


async def _filled(world: World, identifiers: Sequence[str], cost: int = 60) -> None:
    fra = world.regions["fra"].nodes[0]
    for identifier in identifiers:
        await accept(fra, identifier, cost)
    published = {(identifier, "fra") for identifier in identifiers}
    await world.until_rows(lambda rows: published <= rows.keys(), "all are published")


async def _read_by_fra(world: World) -> dict[tuple[str, str], int]:
    """Wait until fra has read all rows that are there, and one more, of iad, which is returned: that a row is missing
    which no node has read, only the next full read finds."""
    await accept(world.regions["iad"].nodes[0], "last", 70)
    await until_all_see(world.regions["fra"].nodes, {"last": 70})
    return {("last", "iad"): 70}


async def test_a_wiped_ledger_is_filled_again(world: World) -> None:
    """Soon, by the next import: without the next full read, and without more traffic."""
    await world.grid("fra", "iad")
    names = [f"user-{n}" for n in range(30)]
    await _filled(world, names)
    await until_all_see(world.nodes(), dict.fromkeys(names, 60))
    expected = {(name, "fra"): 60 for name in names} | await _read_by_fra(world)
    await asyncio.to_thread(world.database.wipe)
    await world.until_rows(lambda rows: rows == expected, "every row is there again")
    newcomer = await world.region("syd").start(world.database.url)
    await until_all_see([newcomer], dict.fromkeys(names, 60))


async def test_a_ledger_restored_from_an_older_copy_is_filled_again(world: World) -> None:
    """Rows that were lower then, and rows that did not exist then."""
    await world.grid("fra", "iad")
    before = [f"before-{n}" for n in range(20)]
    await _filled(world, before, 40)
    restore = await asyncio.to_thread(world.database.copy)
    after = [f"after-{n}" for n in range(20)]
    await _filled(world, after, 70)
    fra = world.regions["fra"].nodes[0]
    for name in before:
        await accept(fra, name, 10)
    expected = {(name, "fra"): 50 for name in before} | {(name, "fra"): 70 for name in after}
    await until_all_see(world.regions["iad"].nodes, {name: count for (name, _), count in expected.items()})
    expected |= await _read_by_fra(world)
    await world.until_rows(lambda rows: rows == expected, "all is published")
    await asyncio.to_thread(restore)
    await world.until_rows(lambda rows: rows == expected, "what the copy lacked is there again")


async def test_rows_that_vanish_one_by_one_are_found_by_the_next_full_read(world: World) -> None:
    await world.grid("fra", "iad", import_full_interval_ms=300)
    await _filled(world, ["ada", "bob", "eve"])
    await asyncio.to_thread(
        world.database.sql,
        f"DELETE FROM ratelimit_window_counts WHERE {world.database.text('identifier')} = 'bob'",
    )
    await world.until_rows(lambda rows: ("bob", "fra") in rows, "it is there again")


async def test_a_full_read_of_an_unharmed_ledger_publishes_nothing(world: World) -> None:
    (fra,) = await world.grid("fra", nodes=1)
    await _filled(world, [f"user-{n}" for n in range(30)])
    await until_publishes_are_answered([fra])
    importer = node_of(fra).importer
    assert importer is not None
    for _ in range(3):
        imported = await importer.run_once(full=True)
        assert imported.full and imported.rows == 30
        assert (await publish_of(fra).run_once()).rows == []


class ReplicaReader:
    """Writes to the primary, and reads from a replica that lags: its copy changes only when the test updates it."""

    def __init__(self, primary: Ledger, replica: Ledger) -> None:
        self._primary = primary
        self._replica = replica

    async def catch_up(self, now_ms: int) -> None:
        changes = await self._primary.changes(None, now_ms=now_ms, timeout_s=10)
        assert not changes.more
        if changes.rows:
            await self._replica.publish(sorted(changes.rows), timeout_s=10)

    async def open(self, *, timeout_s: float) -> None:
        await self._primary.open(timeout_s=timeout_s)
        await self._replica.open(timeout_s=timeout_s)

    async def publish(self, rows: Sequence[LedgerRow], *, timeout_s: float) -> None:
        await self._primary.publish(rows, timeout_s=timeout_s)

    async def changes(self, cursor: str | None, *, now_ms: int, timeout_s: float) -> Changes:
        return await self._replica.changes(cursor, now_ms=now_ms, timeout_s=timeout_s)

    async def heartbeat(self, region: str, *, timeout_s: float) -> list[RegionBeat]:
        return await self._primary.heartbeat(region, timeout_s=timeout_s)

    async def cleanup(self, cutoff_ms: int, *, rows_max: int, timeout_s: float) -> int:
        return await self._primary.cleanup(cutoff_ms, rows_max=rows_max, timeout_s=timeout_s)

    async def overview(self, *, now_ms: int, hottest_max: int, timeout_s: float) -> LedgerOverview:
        return await self._primary.overview(now_ms=now_ms, hottest_max=hottest_max, timeout_s=timeout_s)

    async def close(self) -> None:
        await self._primary.close()
        await self._replica.close()

    def statistics(self) -> Mapping[str, int]:
        return self._primary.statistics()


async def test_a_stale_replica_lowers_and_doubles_no_count(server_world: World) -> None:
    world = server_world
    server = world.database.server  # type: ignore[attr-defined]  # a ServerDatabase
    replica_url = server.create_database()
    await migrate(replica_url)
    ledger = ReplicaReader(world.ledger(), open_ledger(replica_url))
    fra = await world.region("fra").start(ledger, import_full_interval_ms=100)
    iad = await world.region("iad").start(ReplicaReader(world.ledger(), open_ledger(replica_url)))
    await accept(fra, "ada", 30)
    await world.until_rows(lambda rows: rows == {("ada", "fra"): 30}, "it is published")
    await ledger.catch_up(world.clock.now_ms())
    await until_all_see([iad], {"ada": 30})
    # The replica is not updated while counts go on; full reads show the region's own row as it was.
    await accept(fra, "ada", 25)
    await accept(fra, "bob", 40)
    await world.until_rows(lambda rows: rows.get(("ada", "fra")) == 55, "it is published")
    node = node_of(fra)
    assert node.importer is not None and node.publish is not None
    for _ in range(3):
        assert (await node.importer.run_once(full=True)).ok
        assert (await node.publish.run_once()).ok
        assert (await seen(fra, "ada"), await seen(fra, "bob"), await seen(iad, "ada")) == (55, 40, 30)
    assert world.database.counts() == {("ada", "fra"): 55, ("bob", "fra"): 40}
    await ledger.catch_up(world.clock.now_ms())
    await until_all_see([fra, iad], {"ada": 55, "bob": 40})
    assert not await iad.limit(HUNDRED_A_DAY, "ada", 46)
    await world.stack.aclose()
    server.drop_database(replica_url)


async def test_a_cursor_from_before_a_wipe_gets_the_answer_that_rows_were_lost(world: World) -> None:
    ledger = world.ledger()
    try:
        await ledger.publish([world.row("ada", "fra", 5)], timeout_s=10)
        first = await ledger.changes(None, now_ms=world.clock.now_ms(), timeout_s=10)
        again = await ledger.changes(first.cursor, now_ms=world.clock.now_ms(), timeout_s=10)
        assert (first.lost, again.lost) == (False, False)
        await asyncio.to_thread(world.database.wipe)
        after = await ledger.changes(again.cursor, now_ms=world.clock.now_ms(), timeout_s=10)
        assert after.lost
        later = await ledger.changes(after.cursor, now_ms=world.clock.now_ms(), timeout_s=10)
        assert not later.lost, "reported once"
    finally:
        await ledger.close()


def test_a_ledger_in_memory_reports_a_loss_too() -> None:
    ledger = MemoryLedger()
    cursor = ledger.changes_nowait(None, now_ms=0).cursor
    assert not ledger.changes_nowait(cursor, now_ms=0).lost
    ledger.wipe()
    after = ledger.changes_nowait(cursor, now_ms=0)
    assert after.lost
    assert not ledger.changes_nowait(after.cursor, now_ms=0).lost
