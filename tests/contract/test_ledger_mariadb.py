from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from tidegate.adapters.ledger_rows import stored_rows
from tidegate.adapters.migrations import migrate
from tidegate.adapters.mysql.connection import MySQLConnection
from tidegate.adapters.mysql.ledger import MySQLLedger, publish_packets
from tidegate.core.model import LedgerRow
from tidegate.ports import Ledger
from tidegate.testing.contracts.ledger import TIMEOUT_S
from tidegate.testing.contracts.ledger_server import ServerLedgerContract, ServerLedgerPlace
from tidegate.testing.servers import MariaDBServer


class MariaDBPlace(ServerLedgerPlace):
    dialect = "mysql"

    def __init__(self, server: MariaDBServer, url: str) -> None:
        self.server: MariaDBServer = server
        self.url = url

    def ledger(self, url: str | None = None) -> Ledger:
        return MySQLLedger(url or self.url)

    def empty_url(self) -> str:
        return self.server.create_database()

    def connections(self) -> int:
        ((count,),) = self.server.sql(
            "SELECT COUNT(*) FROM information_schema.processlist WHERE db LIKE 'tidegate%' AND id <> CONNECTION_ID()"
        )
        return int(count)

    def waiting(self) -> int:
        # Not information_schema.innodb_trx: it shows an old copy to who asks often.
        ((_, count),) = self.server.sql("SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'")
        return int(count)

    def sql(self, statement: str) -> None:
        self.server.sql(statement, self.url.rpartition("/")[2])

    @asynccontextmanager
    async def held_open(self, rows: Sequence[LedgerRow]) -> AsyncIterator[None]:
        connection = MySQLConnection(self.url)
        *_, last = packets = await publish_packets(await stored_rows(rows))
        packets[-1] = last.removesuffix("COMMIT") + "DO 0"
        async with connection.session(timeout_s=TIMEOUT_S) as session:
            for packet in packets:
                await session.script(packet)
            yield
            await session.script("COMMIT")
        await connection.close()

    @asynccontextmanager
    async def opposite(self, first: str, then: str) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        connection = MySQLConnection(self.url)
        lock = "UPDATE ratelimit_publishes SET published_at = published_at + 1 WHERE region = ?"
        async with connection.session(timeout_s=TIMEOUT_S) as session:
            await session.script("BEGIN")
            # Much work done: the server prefers to give up the transaction that has done less.
            await session.script(
                "INSERT INTO ratelimit_regions (region, beat_at) VALUES "
                + ",".join(f"('{number}', 0)" for number in range(500))
            )
            await session.execute(lock, (first.encode(),))

            async def close_the_circle() -> None:
                await session.execute(lock, (then.encode(),))

            yield close_the_circle
            await session.script("COMMIT")
        await connection.close()


@pytest.fixture
async def place(mariadb_server: MariaDBServer, mariadb_url: str) -> MariaDBPlace:
    await migrate(mariadb_url)
    return MariaDBPlace(mariadb_server, mariadb_url)


class TestMariaDBLedger(ServerLedgerContract):
    @pytest.fixture
    def place(self, place: MariaDBPlace) -> MariaDBPlace:
        return place
