from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.contract.unreadable_rows import UnreadableRowsContract, WritablePlace
from tidegate.adapters import catalog_sql
from tidegate.adapters.catalogs import open_catalog
from tidegate.adapters.migrations import migrate
from tidegate.adapters.sqlite.catalog import SQLiteCatalog
from tidegate.errors import ConfigurationError, SchemaMissing
from tidegate.ports import Catalog, WorkspaceRow
from tidegate.testing.contracts.catalog import (
    TIMEOUT_S,
    all_changes,
    key,
    namespace,
    override,
)


class SQLitePlace(WritablePlace):
    def __init__(self, path: Path) -> None:
        self.path = path

    def catalog(self) -> Catalog:
        return open_catalog(f"sqlite:///{self.path}")

    def sql(self, statement: str) -> None:
        with closing(sqlite3.connect(self.path)) as connection, connection:
            connection.execute(statement)


class TestSQLiteCatalog(UnreadableRowsContract):
    @pytest.fixture
    async def place(self, tmp_path: Path) -> SQLitePlace:
        path = tmp_path / "catalog.db"
        await migrate(f"sqlite:///{path}")
        return SQLitePlace(path)

    async def test_a_large_catalog_comes_in_bounded_answers_and_completely(
        self, catalog: Catalog, workspace_id: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(catalog_sql, "ROWS_MAX", 3)
        stored_namespaces = [
            await catalog.create_namespace(namespace(workspace_id, str(number)), timeout_s=TIMEOUT_S)
            for number in range(7)
        ]
        stored_overrides = [
            await catalog.set_override(override(each.id, "x"), timeout_s=TIMEOUT_S)
            for each in stored_namespaces
        ]
        first = await catalog.changes(0, timeout_s=TIMEOUT_S)
        assert not first.is_complete
        assert len(first.namespaces) == len(first.overrides) == 3
        whole = await all_changes(catalog)
        assert sorted(set(whole.namespaces)) == sorted(stored_namespaces)
        assert sorted(set(whole.overrides)) == sorted(stored_overrides)

    @pytest.mark.parametrize("version", [0, 1, 4])
    async def test_reading_ends_also_when_the_version_is_older_than_the_rows(
        self,
        catalog: Catalog,
        place: SQLitePlace,
        workspace_id: str,
        monkeypatch: pytest.MonkeyPatch,
        version: int,
    ) -> None:
        """The tables were copied one after the other while they changed, or one of them was restored alone."""
        monkeypatch.setattr(catalog_sql, "ROWS_MAX", 3)
        stored = [
            await catalog.create_namespace(namespace(workspace_id, str(number)), timeout_s=TIMEOUT_S)
            for number in range(7)
        ]
        with sqlite3.connect(place.path) as connection:
            connection.execute("UPDATE ratelimit_catalog SET version = ?", (version,))
        changes = await all_changes(catalog)
        assert (changes.is_complete, changes.version) == (True, version)
        assert set(changes.namespaces) >= {row for row in stored if row.version <= version}

    @pytest.mark.parametrize(
        ("table", "column", "value", "is_readable"),
        [
            ("overrides", "identifier", "'abc'", True),
            ("overrides", "identifier", "CAST(x'ff' AS TEXT)", False),
            ("overrides", "identifier", "7", False),
            ("overrides", "quota", "'abc'", False),
            ("overrides", "version", "'abc'", False),
            ("workspaces", "quota", "'abc'", False),
            ("workspaces", "enabled", "'no'", False),
            ("namespaces", "deleted_at", "'abc'", False),
            ("keys", "expires_at", "'abc'", False),
            ("keys", "revoked_at", "x''", False),
        ],
    )
    async def test_values_of_a_type_that_tidegate_never_writes_stop_no_reading(
        self,
        catalog: Catalog,
        place: SQLitePlace,
        workspace_id: str,
        monkeypatch: pytest.MonkeyPatch,
        table: str,
        column: str,
        value: str,
        is_readable: bool,
    ) -> None:
        monkeypatch.setattr(catalog_sql, "ROWS_MAX", 1)
        await catalog.put_key(key(workspace_id), timeout_s=TIMEOUT_S)
        home = await catalog.create_namespace(namespace(workspace_id, "n"), timeout_s=TIMEOUT_S)
        row = WorkspaceRow(workspace_id, "", True, 5, 60_000)
        await catalog.put_workspace(row, timeout_s=TIMEOUT_S)
        await catalog.set_override(override(home.id, "i"), timeout_s=TIMEOUT_S)
        place.sql(f"UPDATE ratelimit_{table} SET {column} = {value}")
        changes = await all_changes(catalog)
        assert {each for each, _ in changes.unreadable} == (set() if is_readable else {f"ratelimit_{table}"})
        read = {
            name: bool(getattr(changes, name)) for name in ("workspaces", "keys", "namespaces", "overrides")
        }
        assert read == {name: is_readable or name != table for name in read}

    async def test_a_purge_goes_in_bounded_steps(
        self, catalog: Catalog, workspace_id: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(catalog_sql, "PURGE_ROWS", 3)
        home = await catalog.create_namespace(namespace(workspace_id, "n"), timeout_s=TIMEOUT_S)
        for number in range(7):
            await catalog.set_override(override(home.id, str(number)), timeout_s=TIMEOUT_S)
            await catalog.delete_override(home.id, str(number), deleted_at_ms=1, timeout_s=TIMEOUT_S)
        assert [await catalog.purge(2, timeout_s=TIMEOUT_S) for _ in range(4)] == [3, 3, 1, 0]
        assert (await all_changes(catalog)).overrides == []


async def test_a_file_without_the_schema_names_the_command_that_creates_it(tmp_path: Path) -> None:
    catalog = SQLiteCatalog(tmp_path / "empty.db")
    with pytest.raises(SchemaMissing, match="tidegate migrate"):
        await catalog.open(timeout_s=TIMEOUT_S)
    await catalog.close()


def test_a_url_that_is_not_for_a_catalog_is_refused_with_the_valid_schemes() -> None:
    with pytest.raises(ConfigurationError, match="mysql://, postgres:// or sqlite:///path"):
        open_catalog("redis://user:secret@host")
    with pytest.raises(ConfigurationError) as refusal:
        open_catalog("redis://user:secret@host")
    assert "secret" not in str(refusal.value)


async def test_migrating_twice_keeps_what_is_there(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'c.db'}"
    await migrate(url)
    catalog = open_catalog(url)
    await catalog.open(timeout_s=TIMEOUT_S)
    await catalog.put_workspace(WorkspaceRow("w", "w", True, None, None), timeout_s=TIMEOUT_S)
    assert await migrate(url) == []
    assert [row.id for row in (await all_changes(catalog)).workspaces] == ["w"]
    await catalog.close()
