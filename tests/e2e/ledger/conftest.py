from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.e2e.ledger.world import Database, FileDatabase, ServerDatabase, World
from tests.running_server import URL
from tidegate.adapters.migrations import migrate

# Those that the tests start, or the one that runs already and is to be tested.
SERVERS = ["running"] if URL else ["mariadb", "mysql", "postgres"]


async def _database(request: pytest.FixtureRequest, kind: str, tmp_path: Path) -> Database:
    if kind == "sqlite":
        database: Database = FileDatabase(tmp_path / "ledger.db")
    else:
        url: str = request.getfixturevalue(f"{kind}_url")
        database = ServerDatabase(request.getfixturevalue(f"{kind}_server"), url)
    await migrate(database.url)
    return database


@pytest.fixture(params=SERVERS)
async def server_database(request: pytest.FixtureRequest, tmp_path: Path) -> ServerDatabase:
    """A database on a real server."""
    database = await _database(request, request.param, tmp_path)
    assert isinstance(database, ServerDatabase)
    return database


@pytest.fixture(params=SERVERS if URL else [*SERVERS, "sqlite"])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    """A database of any kind."""
    return await _database(request, request.param, tmp_path)


@pytest.fixture
async def world(database: Database) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        yield World(database, stack)


@pytest.fixture
async def server_world(server_database: ServerDatabase) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        yield World(server_database, stack)
