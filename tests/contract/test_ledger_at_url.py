"""The contract of the ledger on a database that runs already: `TIDEGATE_TEST_LEDGER=mysql://root@127.0.0.1:4000/test`.

For engines that no test starts by itself, such as TiDB. Each test has a new database, beside the one in the URL;
the user needs the right to create and drop databases.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from itertools import count
from urllib.parse import urlsplit, urlunsplit

import pytest

from tidegate.adapters.migrations import migrate
from tidegate.adapters.urls import open_ledger
from tidegate.ports import Ledger
from tidegate.testing.contracts.ledger import LedgerContract, LedgerPlace

URL = os.environ.get("TIDEGATE_TEST_LEDGER", "")
TIMEOUT_S = 60.0

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(
        not URL, reason="TIDEGATE_TEST_LEDGER names no running database: nothing was checked on it"
    ),
]

_numbers = count(1)


async def execute(statement: str) -> None:
    """Run a statement on the database that the URL names."""
    if urlsplit(URL).scheme.startswith("postgres"):
        from tidegate.adapters.postgres.connection import PostgresConnection

        connection = PostgresConnection(URL)
        async with connection.session(timeout_s=TIMEOUT_S) as session:
            await session.execute(statement)
        await connection.close()
    else:
        from tidegate.adapters.mysql.connection import MySQLConnection

        mysql = MySQLConnection(URL)
        async with mysql.session(timeout_s=TIMEOUT_S) as session:
            await session.script(statement)
        await mysql.close()


class UrlPlace(LedgerPlace):
    def __init__(self, url: str) -> None:
        self._url = url

    def ledger(self) -> Ledger:
        return open_ledger(self._url)


class TestLedgerAtUrl(LedgerContract):
    @pytest.fixture
    async def place(self) -> AsyncIterator[UrlPlace]:
        name = f"tidegate_test_{os.getpid()}_{next(_numbers)}"
        await execute(f"CREATE DATABASE {name}")
        url = urlunsplit(urlsplit(URL)._replace(path=f"/{name}"))
        await migrate(url)
        yield UrlPlace(url)
        await execute(f"DROP DATABASE {name}")
