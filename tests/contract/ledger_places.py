"""The database servers that ledgers are tested on, in the form that the contract suite needs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from tidegate.adapters.ledger_rows import stored_rows
from tidegate.adapters.mysql.connection import MySQLConnection
from tidegate.adapters.mysql.ledger import MySQLLedger, publish_packets
from tidegate.core.model import LedgerRow
from tidegate.ports import Ledger
from tidegate.testing.contracts.ledger import TIMEOUT_S
from tidegate.testing.contracts.ledger_server import ServerLedgerPlace
from tidegate.testing.servers.mysql_family import MySQLFamilyServer


class MySQLPlace(ServerLedgerPlace):
    """A database on MySQL or MariaDB."""

    dialect = "mysql"

    def __init__(self, server: MySQLFamilyServer, url: str) -> None:
        self.server: MySQLFamilyServer = server
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
        # Not information_schema.innodb_trx: queried often, it shows an old copy.
        ((_, count),) = self.server.sql("SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'")
        return int(count)

    def sql(self, statement: str) -> None:
        self.server.sql(statement, self.url.rpartition("/")[2])

    @asynccontextmanager
    async def held_open(self, rows: Sequence[LedgerRow]) -> AsyncIterator[None]:
        connection = MySQLConnection(self.url)
        async with connection.session(timeout_s=TIMEOUT_S) as session, session.transaction():
            for packet in await publish_packets(await stored_rows(rows)):
                await session.script(packet)
            yield
        await connection.close()

    @asynccontextmanager
    async def opposite(self, first: str, then: str) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        connection = MySQLConnection(self.url)
        lock = "UPDATE ratelimit_publishes SET published_at = published_at + 1 WHERE region = ?"
        async with connection.session(timeout_s=TIMEOUT_S) as session, session.transaction():
            # Much work, because the server aborts the transaction that has done less.
            await session.script(
                "INSERT INTO ratelimit_regions (region, beat_at) VALUES "
                + ",".join(f"('{number}', 0)" for number in range(500))
            )
            await session.execute(lock, (first.encode(),))

            async def complete_the_deadlock() -> None:
                await session.execute(lock, (then.encode(),))

            yield complete_the_deadlock
        await connection.close()
