"""The catalog in an SQLite file."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Mapping
from typing import TypeVar

from tidegate.adapters import catalog_sql
from tidegate.adapters.catalog_sql import Script, Unchanged
from tidegate.adapters.sqlite.connection import SQLiteFile, transaction
from tidegate.errors import SchemaMissing
from tidegate.ports import CatalogChanges, KeyRow, NamespaceRow, OverrideRow, WorkspaceRow

__all__ = ["SQLiteCatalog"]

T = TypeVar("T")


class SQLiteCatalog:
    """The `Catalog` port on the file at `path`, the same as the ledger's."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = SQLiteFile(path)
        self._statements = 0

    async def open(self, *, timeout_s: float) -> None:
        await self._file.open(timeout_s=timeout_s)
        await self._file.run(self._check_schema, timeout_s=timeout_s)

    def _check_schema(self, connection: sqlite3.Connection) -> None:
        sql = "SELECT 1 FROM pragma_table_info('ratelimit_overrides') WHERE name = 'shadow'"
        if connection.execute(sql).fetchone() is None:
            path = self._file.path
            raise SchemaMissing(
                f"{path}: has no catalog, or an older one; run: tidegate migrate --ledger sqlite:///{path}"
            )

    async def version(self, *, timeout_s: float) -> int:
        return await self._read(catalog_sql.read_version(), timeout_s)

    async def changes(self, since: int, *, timeout_s: float) -> CatalogChanges:
        return await self._read(catalog_sql.changes(since), timeout_s)

    async def purged_version(self, *, timeout_s: float) -> int:
        return await self._read(catalog_sql.read_purged_version(), timeout_s)

    async def purge(self, cutoff_ms: int, *, timeout_s: float) -> int:
        return await self._write(catalog_sql.purge(cutoff_ms), timeout_s)

    async def put_workspace(self, row: WorkspaceRow, *, timeout_s: float) -> WorkspaceRow:
        return await self._write(catalog_sql.put_workspace(row), timeout_s)

    async def put_key(self, row: KeyRow, *, timeout_s: float) -> KeyRow:
        return await self._write(catalog_sql.put_key(row), timeout_s)

    async def expire_key(self, key_id: str, *, expires_at_ms: int, timeout_s: float) -> KeyRow | None:
        return await self._write(catalog_sql.expire_key(key_id, expires_at_ms), timeout_s)

    async def revoke_key(self, key_id: str, *, revoked_at_ms: int, timeout_s: float) -> KeyRow | None:
        return await self._write(catalog_sql.revoke_key(key_id, revoked_at_ms), timeout_s)

    async def create_namespace(self, row: NamespaceRow, *, timeout_s: float) -> NamespaceRow:
        return await self._write(catalog_sql.create_namespace(row), timeout_s)

    async def delete_namespace(
        self, namespace_id: str, *, deleted_at_ms: int | None, timeout_s: float
    ) -> bool:
        return await self._write(catalog_sql.delete_namespace(namespace_id, deleted_at_ms), timeout_s)

    async def set_override(self, row: OverrideRow, *, timeout_s: float) -> OverrideRow:
        return await self._write(catalog_sql.set_override(row), timeout_s)

    async def delete_override(
        self, namespace_id: str, identifier: str, *, deleted_at_ms: int, timeout_s: float
    ) -> OverrideRow | None:
        return await self._write(
            catalog_sql.delete_override(namespace_id, identifier, deleted_at_ms), timeout_s
        )

    async def close(self) -> None:
        await self._file.close()

    def statistics(self) -> Mapping[str, int]:
        opened = self._file.statistics()["connections_opened"]
        return {"statements": self._statements, "connections_opened": opened}

    async def _read(self, script: Script[T], timeout_s: float) -> T:
        return await self._file.run(self._driver(script), timeout_s=timeout_s)

    async def _write(self, script: Script[T], timeout_s: float) -> T:
        drive = self._driver(script)

        def work(connection: sqlite3.Connection) -> T:
            try:
                with transaction(connection):
                    return drive(connection)
            except Unchanged as unchanged:
                found: T = unchanged.value
                return found

        return await self._file.run(work, timeout_s=timeout_s)

    def _driver(self, script: Script[T]) -> Callable[[sqlite3.Connection], T]:
        def drive(connection: sqlite3.Connection) -> T:
            # As bytes: the driver would refuse a whole answer for one text in it that is not UTF-8.
            connection.text_factory = bytes
            try:
                statement = next(script)
                while True:
                    self._statements += 1
                    rows = connection.execute(statement.sql, statement.args).fetchall()
                    statement = script.send(rows)
            except StopIteration as stop:
                result: T = stop.value
                return result

        return drive
