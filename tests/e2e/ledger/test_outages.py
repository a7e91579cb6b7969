from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.e2e.ledger.world import (
    BY_HAND,
    HUNDRED_A_DAY,
    NEVER_MS,
    THOUSAND_A_DAY,
    ServerDatabase,
    World,
    accept,
    node_of,
    seen,
    until,
    until_all_see,
)
from tidegate import AsyncLimiter
from tidegate.adapters.ledger_rows import stored_rows
from tidegate.adapters.migrations import migrate
from tidegate.adapters.mysql.connection import MySQLConnection
from tidegate.adapters.mysql.ledger import publish_packets
from tidegate.adapters.postgres.connection import PostgresConnection
from tidegate.adapters.postgres.ledger import PUBLISH, publish_arguments
from tidegate.core.model import LedgerRow
from tidegate.errors import SchemaMissing
from tidegate.runtime.importer import ImportLoop
from tidegate.runtime.publish import PublishLoop
from tidegate.testing.faults import TrackingLedger

pytestmark = pytest.mark.server

IMPATIENT = {"ledger_timeout_ms": 500}


def server_of(world: World) -> ServerDatabase:
    assert isinstance(world.database, ServerDatabase)
    return world.database


def loops_of(limiter: AsyncLimiter) -> tuple[PublishLoop, ImportLoop]:
    node = node_of(limiter)
    assert node.publish is not None and node.importer is not None
    return node.publish, node.importer


class Traffic:
    """Requests to all nodes, one round after the other, until it is stopped; knows what was accepted."""

    def __init__(self, nodes: list[AsyncLimiter], identifiers: list[str]) -> None:
        self._nodes = nodes
        self._identifiers = identifiers
        self.accepted: Counter[str] = Counter()
        self.rounds = 0
        self.is_over = False

    async def run(self) -> None:
        while not self.is_over:
            for node in self._nodes:
                for identifier in self._identifiers:
                    cost = await accept(node, identifier, 1, THOUSAND_A_DAY)
                    self.accepted[identifier] += cost
                await asyncio.sleep(0)
            self.rounds += 1

    async def more(self, rounds: int) -> None:
        """Return when `rounds` more rounds were decided."""
        wanted = self.rounds + rounds
        await until(lambda: self.rounds >= wanted, "decisions go on")


@asynccontextmanager
async def traffic(nodes: list[AsyncLimiter], identifiers: list[str]) -> AsyncIterator[Traffic]:
    made = Traffic(nodes, identifiers)
    running = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        # Not cancelled: a request may be accepted at the moment it is cancelled, and would count.
        made.is_over = True
        await running


@pytest.mark.parametrize("how", ["killed", "frozen", "restarted"])
async def test_a_database_that_fails_in_the_middle_loses_and_doubles_nothing(
    server_world: World, how: str
) -> None:
    """Decisions continue, nothing is lost or counted twice, and propagation resumes by itself."""
    world = server_world
    server = server_of(world).server
    # A frozen server does not answer; a connection to a killed one fails at once.
    nodes = await world.grid("fra", "iad", **IMPATIENT if how == "frozen" else {})
    identifiers = [f"user-{n}" for n in range(10)]
    async with traffic(nodes, identifiers) as requests:
        await until(lambda: sum(node.statistics().publish_rows for node in nodes) > 0, "rows go out")
        for _ in range(2):
            errors = sum(node.statistics().publish_errors for node in nodes)
            if how == "frozen":
                server.freeze()
            else:
                server.kill()
            if how == "restarted":
                server.start()
            else:
                await requests.more(3)
                await until(
                    lambda errors=errors: (
                        sum(node.statistics().publish_errors for node in nodes) > errors  # type: ignore[misc]  # mypy sees no default
                        or all(requests.accepted[name] >= 990 for name in identifiers)
                    ),
                    "publishes fail",
                )
                server.thaw() if how == "frozen" else server.start()
            await requests.more(3)
    await until_all_see(nodes, requests.accepted, THOUSAND_A_DAY)
    stored = world.database.counts()
    assert {name: stored[name, "fra"] + stored[name, "iad"] for name in identifiers} == requests.accepted


async def use_up_the_turn(limiter: AsyncLimiter, identifier: str) -> None:
    """Under pressure the loop publishes at once, and then not again: the test publishes everything else."""
    publish, _ = loops_of(limiter)
    await until(
        node_of(limiter)._is_ledger_usable, "the database was opened, which a slow one does after the start"
    )
    await accept(limiter, identifier, 50)
    await until(
        lambda: publish.rows_published == 1 or bool(publish.calls.errors), "the loop has had its turn"
    )
    if publish.rows_published == 0:  # the database was too slow
        assert (await publish.run_once()).ok


async def test_a_publish_of_many_chunks_is_finished_after_the_server_died_in_it(server_world: World) -> None:
    world = server_world
    database = server_of(world)
    ledger = TrackingLedger(world.ledger())
    fra = await world.region("fra", origin=None).start(ledger, publish_rows_max=50, **BY_HAND)
    publish, _ = loops_of(fra)
    names = [f"user-{n:04}" for n in range(2_000)]
    await use_up_the_turn(fra, names[0])
    for name in names[1:]:
        await accept(fra, name, 50)
    turn = asyncio.create_task(publish.run_once())
    await ledger.until("publish", 8)
    database.server.kill()
    assert not (await turn).ok
    database.server.start()
    stored = database.counts()
    assert 0 < len(stored) < len(names), "it died in the middle"
    sent_before = ledger.count("publish")

    async def finished() -> bool:
        return (await publish.run_once()).ok

    await until(finished, "a turn succeeds")
    assert database.counts() == {(name, "fra"): 50 for name in names}
    # What was in the ledger was not sent again, apart from the chunk whose answer was lost.
    sent = [row for rows in ledger.arguments("publish")[sent_before:] for row in rows]  # type: ignore[attr-defined]  # lists of rows
    assert len({row.identifier for row in sent}) <= len(names) - len(stored) + 50


TRIGGERS = {
    "mysql": (
        "DELIMITER //\nCREATE TRIGGER refuse BEFORE INSERT ON ratelimit_window_counts FOR EACH ROW "
        "IF NEW.identifier = 'user-055' THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'not now'; END IF//"
    ),
    "postgres": (
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF NEW.identifier = convert_to('user-055', 'UTF8') THEN RAISE EXCEPTION 'not now'; END IF; "
        "RETURN NEW; END $$; CREATE TRIGGER refuse BEFORE INSERT ON ratelimit_window_counts "
        "FOR EACH ROW EXECUTE FUNCTION refuse()"
    ),
}


async def test_a_chunk_that_fails_in_the_middle_is_the_only_one_that_is_repeated(server_world: World) -> None:
    world = server_world
    database = server_of(world)
    version = database.server.version
    if "TiDB" in version or "Vitess" in version:
        pytest.skip(f"not checked on {version}: it has no triggers")
    ledger = TrackingLedger(world.ledger())
    fra = await world.region("fra", origin=None).start(ledger, publish_rows_max=10, **BY_HAND)
    publish, _ = loops_of(fra)
    names = [f"user-{n:03}" for n in range(100)]
    await use_up_the_turn(fra, "first")
    await asyncio.to_thread(database.sql, TRIGGERS[database.dialect])
    await world.publish(*(world.row(name, "syd", 1) for name in names if name != "user-055"))
    for name in names:
        await accept(fra, name, 40)
    turn = await publish.run_once()
    stored = {name for name, region in database.counts() if region == "fra"}
    assert not turn.ok
    missing = set(names) - stored
    assert "user-055" in missing and len(missing) <= 10, "its chunk, and no other"
    await asyncio.to_thread(
        database.sql,
        "DROP TRIGGER refuse" + (" ON ratelimit_window_counts" if database.dialect == "postgres" else ""),
    )
    sent_before = ledger.count("publish")
    assert (await publish.run_once()).ok
    sent = [row for rows in ledger.arguments("publish")[sent_before:] for row in rows]  # type: ignore[attr-defined]  # lists of rows
    assert {row.identifier for row in sent} == missing
    assert {name for name, region in database.counts() if region == "fra"} == {"first", *names}


async def test_a_row_that_the_database_rejects_is_set_aside_and_the_others_are_published_in_the_same_turn(
    server_world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world = server_world
    database = server_of(world)
    fra = await world.region("fra", origin=None).start(world.ledger(), set_aside_ms=200, **BY_HAND)
    publish, _ = loops_of(fra)
    await asyncio.to_thread(database.refuse, "mallory")
    names = [f"user-{n:03}" for n in range(100)]
    await use_up_the_turn(fra, "first")
    for name in [*names, "mallory"]:
        await accept(fra, name, 50)
    with caplog.at_level(logging.WARNING):
        turn = await publish.run_once()
    assert turn.ok, "the ledger works: it rejected the row"
    assert set(names) <= {name for name, _ in database.counts()}
    assert ("mallory", "fra") not in database.counts()
    assert fra.statistics().rows_set_aside == 1
    assert "set aside" in caplog.text
    assert node_of(fra).health(0.0)[0].ok
    await asyncio.to_thread(database.accept_again, "mallory")

    async def stored() -> bool:
        await publish.run_once()
        return ("mallory", "fra") in database.counts()

    await until(stored, "it is tried again")


async def test_a_thousand_timeouts_leave_no_connection_behind(server_world: World) -> None:
    world = server_world
    database = server_of(world)
    fra = await world.region("fra", origin=None).start(
        database.url,
        breaker_calls_min=1_000_000,
        publish_interval_ms=NEVER_MS,
        import_interval_ms=NEVER_MS,
        jitter_percent=0,
    )
    publish, importer = loops_of(fra)
    await accept(fra, "ada", 50)
    usual_s = publish._timeout_s
    publish._timeout_s = importer._timeout_s = 0.004
    database.server.freeze()
    try:
        for number in range(500):
            await accept(fra, "ada", 1, THOUSAND_A_DAY)
            assert not (await publish.run_once()).ok, number
            assert not (await importer.run_once()).ok, number
    finally:
        database.server.thaw()
    publish._timeout_s = importer._timeout_s = usual_s

    async def healed() -> bool:
        return (await publish.run_once()).ok and (await importer.run_once()).ok

    await until(healed, "both work again")
    await until(lambda: database.connections() <= 2, "the server counts one that writes and one that reads")
    # The node's own loop may be publishing the row, so that `healed` had nothing to publish.
    counted = await seen(fra, "ada", THOUSAND_A_DAY)
    await until(lambda: database.counts().get(("ada", "fra")) == counted, "every count is in the ledger")


async def test_a_ledger_that_is_down_at_the_start_does_not_stop_the_limiter(server_world: World) -> None:
    world = server_world
    server = server_of(world).server
    server.kill()
    fra, iad = await world.grid("fra", "iad", nodes=1)
    assert await accept(fra, "ada", 40) == 40
    (health,) = [line for line in fra.health() if line.name == "ledger"]
    assert not health.ok
    server.start()
    await until_all_see([iad], {"ada": 40})
    assert all(line.ok for line in fra.health())


async def test_a_missing_schema_is_an_error_that_names_the_command(server_world: World) -> None:
    world = server_world
    url = server_of(world).server.create_database()
    limiter = AsyncLimiter(region="fra", ledger=url)
    with pytest.raises(SchemaMissing, match=r"tidegate migrate --ledger "):
        await limiter.start()
    await limiter.stop()


async def test_a_schema_that_is_missing_when_the_ledger_comes_up_late_is_logged_and_waited_for(
    server_world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world = server_world
    server = server_of(world).server
    url = server.create_database()
    server.kill()
    # A server that has just started may be slow on a busy machine.
    fra = await world.region("fra", origin=None).start(url, ledger_timeout_ms=5_000)
    iad = await world.region("iad", origin=None).start(url, ledger_timeout_ms=5_000)
    await accept(fra, "ada", 40)
    with caplog.at_level(logging.WARNING):
        server.start()
        await until(lambda: "tidegate migrate --ledger" in caplog.text, "it says what is missing")
        await migrate(url)
        await until_all_see([iad], {"ada": 40})


@asynccontextmanager
async def _late(database: ServerDatabase, rows: list[LedgerRow]) -> AsyncIterator[None]:
    """A publish that has done everything but commit, until the end of the block."""
    if database.dialect == "mysql":
        mysql = MySQLConnection(database.url)
        async with mysql.session(timeout_s=30) as session, session.transaction():
            for packet in await publish_packets(await stored_rows(rows)):
                await session.script(packet)
            yield
        await mysql.close()
    else:
        postgres = PostgresConnection(database.url)
        async with postgres.session(timeout_s=30) as held, held.transaction():
            await held.execute(PUBLISH, await publish_arguments(await stored_rows(rows)))
            yield
        await postgres.close()


async def test_a_transaction_that_commits_late_is_not_missed_by_a_running_importer(
    server_world: World,
) -> None:
    """It does not delay others either: imports continue past it, and read it later."""
    world = server_world
    (fra,) = await world.grid("fra", nodes=1)
    async with _late(server_of(world), [world.row("late", "syd", 77)]):
        for count in (10, 20, 30):
            await world.publish(world.row("on-time", "gru", count))
            await until_all_see([fra], {"on-time": count})
        assert await seen(fra, "late") == 0
    await until_all_see([fra], {"late": 77})
    assert not await fra.limit(HUNDRED_A_DAY, "late", 24)
