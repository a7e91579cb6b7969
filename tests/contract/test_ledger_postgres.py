from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from tidegate.adapters.ledger_rows import stored_rows
from tidegate.adapters.migrations import migrate
from tidegate.adapters.postgres.connection import PostgresConnection
from tidegate.adapters.postgres.ledger import PUBLISH, PostgresLedger, publish_arguments
from tidegate.core.model import LedgerRow
from tidegate.ports import Ledger
from tidegate.testing.contracts.ledger import TIMEOUT_S
from tidegate.testing.contracts.ledger_server import ServerLedgerContract, ServerLedgerPlace
from tidegate.testing.servers import PostgresServer


class PostgresPlace(ServerLedgerPlace):
    dialect = "postgres"

    def __init__(self, server: PostgresServer, url: str) -> None:
        self.server: PostgresServer = server
        self.url = url

    def ledger(self, url: str | None = None) -> Ledger:
        return PostgresLedger(url or self.url)

    def empty_url(self) -> str:
        return self.server.create_database()

    def connections(self) -> int:
        ((count,),) = self.server.sql(
            "SELECT count(*) FROM pg_stat_activity WHERE datname LIKE 'tidegate%' AND pid <> pg_backend_pid()"
        )
        return int(count)

    def waiting(self) -> int:
        ((count,),) = self.server.sql("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
        return int(count)

    def sql(self, statement: str) -> None:
        self.server.sql(statement, self.url.rpartition("/")[2])

    @asynccontextmanager
    async def held_open(self, rows: Sequence[LedgerRow]) -> AsyncIterator[None]:
        connection = PostgresConnection(self.url)
        async with connection.session(timeout_s=TIMEOUT_S) as session, session.transaction():
            await session.execute(PUBLISH, await publish_arguments(await stored_rows(rows)))
            yield
        await connection.close()

    @asynccontextmanager
    async def opposite(self, first: str, then: str) -> AsyncIterator[Callable[[], Awaitable[None]]]:
        connection = PostgresConnection(self.url)
        lock = "UPDATE ratelimit_publishes SET published_at = published_at + 1 WHERE region = $1"
        async with connection.session(timeout_s=TIMEOUT_S) as session, session.transaction():
            await session.execute(lock, (first.encode(),))

            async def complete_the_deadlock() -> None:
                await session.execute(lock, (then.encode(),))

            yield complete_the_deadlock
        await connection.close()


@pytest.fixture
async def place(postgres_server: PostgresServer, postgres_url: str) -> PostgresPlace:
    await migrate(postgres_url)
    return PostgresPlace(postgres_server, postgres_url)


class TestPostgresLedger(ServerLedgerContract):
    @pytest.fixture
    def place(self, place: PostgresPlace) -> PostgresPlace:
        return place
