from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from tidegate.adapters import catalog_sql
from tidegate.adapters.catalogs import open_catalog
from tidegate.adapters.migrations import migrate
from tidegate.adapters.sqlite.catalog import SQLiteCatalog
from tidegate.errors import ConfigurationError, SchemaMissing
from tidegate.ports import Catalog, WorkspaceRow
from tidegate.testing.contracts.catalog import (
    TIMEOUT_S,
    CatalogContract,
    CatalogPlace,
    all_changes,
    namespace,
    override,
)


class SQLitePlace(CatalogPlace):
    def __init__(self, path: Path) -> None:
        self.path = path

    def catalog(self) -> Catalog:
        return open_catalog(f"sqlite:///{self.path}")


class TestSQLiteCatalog(CatalogContract):
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
