"""The catalog on a database server: drives the scripts of `catalog_sql` over two lanes, one to read and one to write.

Two, so that the read that every node does once a second never waits behind a writer that waits for a lock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Generic, TypeVar

from tidegate.adapters import catalog_sql
from tidegate.adapters.catalog_sql import Script, Unchanged
from tidegate.adapters.deadline import Deadline, loop_time
from tidegate.adapters.lane import Lane, LockConflict, Session, conflict_backoff
from tidegate.ports import CatalogChanges, KeyRow, NamespaceRow, OverrideRow, WorkspaceRow

__all__ = ["LaneCatalog"]

SessionType = TypeVar("SessionType", bound=Session[Any])
T = TypeVar("T")


class LaneCatalog(Generic[SessionType]):
    """The `Catalog` port on a dialect's lanes. `placeholders` turns `?` into the placeholders of the dialect."""

    def __init__(
        self, connect: Callable[[], Lane[Any, SessionType]], placeholders: Callable[[str], str]
    ) -> None:
        self._reader = connect()
        self._writer = connect()
        self._placeholders = placeholders
        self._random = Random()

    async def open(self, *, timeout_s: float) -> None:
        await self._read(catalog_sql.check_schema(), timeout_s)

    async def version(self, *, timeout_s: float) -> int:
        return await self._read(catalog_sql.read_version(), timeout_s)

    async def changes(self, since: int, *, timeout_s: float) -> CatalogChanges:
        return await self._read(catalog_sql.changes(since), timeout_s)

    async def purged_version(self, *, timeout_s: float) -> int:
        return await self._read(catalog_sql.read_purged_version(), timeout_s)

    async def purge(self, cutoff_ms: int, *, timeout_s: float) -> int:
        return await self._write(lambda: catalog_sql.purge(cutoff_ms), timeout_s)

    async def put_workspace(self, row: WorkspaceRow, *, timeout_s: float) -> WorkspaceRow:
        return await self._write(lambda: catalog_sql.put_workspace(row), timeout_s)

    async def put_key(self, row: KeyRow, *, timeout_s: float) -> KeyRow:
        return await self._write(lambda: catalog_sql.put_key(row), timeout_s)

    async def expire_key(self, key_id: str, *, expires_at_ms: int, timeout_s: float) -> KeyRow | None:
        return await self._write(lambda: catalog_sql.expire_key(key_id, expires_at_ms), timeout_s)

    async def revoke_key(self, key_id: str, *, revoked_at_ms: int, timeout_s: float) -> KeyRow | None:
        return await self._write(lambda: catalog_sql.revoke_key(key_id, revoked_at_ms), timeout_s)

    async def create_namespace(self, row: NamespaceRow, *, timeout_s: float) -> NamespaceRow:
        return await self._write(lambda: catalog_sql.create_namespace(row), timeout_s)

    async def delete_namespace(
        self, namespace_id: str, *, deleted_at_ms: int | None, timeout_s: float
    ) -> bool:
        return await self._write(lambda: catalog_sql.delete_namespace(namespace_id, deleted_at_ms), timeout_s)

    async def set_override(self, row: OverrideRow, *, timeout_s: float) -> OverrideRow:
        return await self._write(lambda: catalog_sql.set_override(row), timeout_s)

    async def delete_override(
        self, namespace_id: str, identifier: str, *, deleted_at_ms: int, timeout_s: float
    ) -> OverrideRow | None:
        return await self._write(
            lambda: catalog_sql.delete_override(namespace_id, identifier, deleted_at_ms), timeout_s
        )

    async def close(self) -> None:
        await self._reader.close()
        await self._writer.close()

    def statistics(self) -> Mapping[str, int]:
        reads, writes = self._reader.statistics(), self._writer.statistics()
        return {name: count + writes[name] for name, count in reads.items()}

    async def _read(self, script: Script[T], timeout_s: float) -> T:
        async with self._reader.session(timeout_s=timeout_s) as session:
            return await self._drive(script, session)

    async def _write(self, script: Callable[[], Script[T]], timeout_s: float) -> T:
        """In one transaction, from the start again after a lock conflict, until the time is used up."""
        backoff = conflict_backoff(self._random)
        deadline = Deadline.after(timeout_s, loop_time())
        while True:
            try:
                async with self._writer.session(timeout_s=deadline.remaining(loop_time())) as session:
                    try:
                        async with session.transaction():
                            return await self._drive(script(), session)
                    except Unchanged as unchanged:
                        found: T = unchanged.value
                        return found
            except LockConflict:
                pause_s = backoff.pause_s()
                # What is left must be enough for the transaction too.
                if deadline.remaining(loop_time()) < pause_s + timeout_s / 4:
                    raise
                await asyncio.sleep(pause_s)

    async def _drive(self, script: Script[T], session: Session[Any]) -> T:
        try:
            statement = next(script)
            while True:
                rows = await session.fetch(self._placeholders(statement.sql), statement.args)
                statement = script.send(rows)
        except StopIteration as stop:
            result: T = stop.value
            return result
