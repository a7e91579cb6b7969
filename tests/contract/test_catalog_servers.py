from __future__ import annotations

import asyncio

import pytest

from tests.contract.unreadable_rows import UnreadableRowsContract, WritablePlace
from tidegate.adapters.catalogs import open_catalog
from tidegate.adapters.migrations import migrate
from tidegate.errors import DependencyError, SchemaMissing
from tidegate.ports import Catalog, WorkspaceRow
from tidegate.testing.contracts.catalog import TIMEOUT_S, OpenCatalog, all_changes, namespace, override
from tidegate.testing.servers import MariaDBServer, MySQLServer, PostgresServer
from tidegate.testing.servers.mysql_family import MySQLFamilyServer


class ServerPlace(WritablePlace):
    def __init__(self, server: MySQLFamilyServer | PostgresServer, url: str) -> None:
        self.server = server
        self.url = url
        if isinstance(server, PostgresServer):
            self.binary = (r"'\x", "'::bytea")

    def sql(self, statement: str) -> None:
        self.server.sql(statement, self.url.rpartition("/")[2])

    def catalog(self) -> Catalog:
        return open_catalog(self.url)


class ServerCatalogContract(UnreadableRowsContract):
    async def test_a_frozen_server_costs_no_more_than_the_time_allowed(
        self, place: ServerPlace, catalog: Catalog, workspace_id: str
    ) -> None:
        place.server.freeze()
        try:
            # Both calls end while the server is frozen: only this test thaws it.
            with pytest.raises(DependencyError):
                await catalog.version(timeout_s=0.3)
            row = WorkspaceRow(workspace_id, "", True, None, None)
            with pytest.raises(DependencyError):
                await catalog.put_workspace(row, timeout_s=0.3)
        finally:
            place.server.thaw()
        assert await catalog.version(timeout_s=TIMEOUT_S) >= 1

    async def test_a_server_that_was_killed_is_connected_to_again(
        self, place: ServerPlace, catalog: Catalog, workspace_id: str
    ) -> None:
        place.server.kill()
        with pytest.raises(DependencyError):
            await catalog.version(timeout_s=1)
        place.server.recover()
        assert await catalog.version(timeout_s=TIMEOUT_S) >= 1

    async def test_a_database_without_the_schema_names_the_command_that_creates_it(
        self, place: ServerPlace
    ) -> None:
        url = place.server.create_database()
        catalog = open_catalog(url)
        try:
            with pytest.raises(SchemaMissing, match="tidegate migrate"):
                await catalog.open(timeout_s=TIMEOUT_S)
        finally:
            await catalog.close()
            place.server.drop_database(url)

    async def test_a_writer_that_is_cancelled_leaves_the_catalog_usable(
        self, place: ServerPlace, catalog: Catalog, open_catalog: OpenCatalog, workspace_id: str
    ) -> None:
        row = WorkspaceRow(workspace_id, "", True, None, None)
        other = await open_catalog()
        versions = []
        for turns in (0, 1, 3, 8, 20, 40):
            task = asyncio.ensure_future(catalog.put_workspace(row, timeout_s=TIMEOUT_S))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            versions.append((await other.put_workspace(row, timeout_s=TIMEOUT_S)).version)
            versions.append((await catalog.put_workspace(row, timeout_s=TIMEOUT_S)).version)
        assert versions == sorted(set(versions))


class MySQLFamilyCatalogContract(ServerCatalogContract):
    @pytest.mark.parametrize(("column", "value"), [("quota", -5), ("duration_ms", 0)])
    async def test_an_override_with_a_number_that_cannot_be_read_is_repaired_by_setting_it(
        self, place: ServerPlace, catalog: Catalog, workspace_id: str, column: str, value: int
    ) -> None:
        """The other databases check the numbers of overrides."""
        home = await catalog.create_namespace(namespace(workspace_id, "n"), timeout_s=TIMEOUT_S)
        stored = await catalog.set_override(override(home.id, "i"), timeout_s=TIMEOUT_S)
        place.spoil("overrides", stored.id, column, value)
        assert (await all_changes(catalog)).unreadable == (("ratelimit_overrides", stored.id),)
        deleted = await catalog.delete_override(home.id, "i", deleted_at_ms=7, timeout_s=TIMEOUT_S)
        assert deleted is None, "as if it were not there"
        repaired = await catalog.set_override(override(home.id, "i", 3), timeout_s=TIMEOUT_S)
        changes = await all_changes(catalog)
        assert (changes.overrides, changes.unreadable) == ([repaired], ())


class TestMariaDBCatalog(MySQLFamilyCatalogContract):
    @pytest.fixture
    async def place(self, mariadb_server: MariaDBServer, mariadb_url: str) -> ServerPlace:
        await migrate(mariadb_url)
        return ServerPlace(mariadb_server, mariadb_url)


class TestMySQLCatalog(MySQLFamilyCatalogContract):
    @pytest.fixture
    async def place(self, mysql_server: MySQLServer, mysql_url: str) -> ServerPlace:
        await migrate(mysql_url)
        return ServerPlace(mysql_server, mysql_url)


class TestPostgresCatalog(ServerCatalogContract):
    @pytest.fixture
    async def place(self, postgres_server: PostgresServer, postgres_url: str) -> ServerPlace:
        await migrate(postgres_url)
        return ServerPlace(postgres_server, postgres_url)
