"""What the ledgers on database servers have in common: two lanes, tries after a lock conflict, the check of the schema.

One lane writes and one reads, so that an import never waits behind a publish. The dialects have the SQL of each query;
most regions are far from the ledger, so each query takes one round trip.

A fault of configuration that shows up later than `open` (a table was dropped, a password changed) is raised as
`DependencyUnavailable`, with the same words: loops wait for it to be repaired.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import Any, Final, Generic, TypeVar

from tidegate.adapters.deadline import Deadline, loop_time
from tidegate.adapters.lane import Lane, LockConflict, Session, conflict_backoff
from tidegate.adapters.ledger_cursor import ANSWER_ROWS_MAX, ChangeReader, read_changes
from tidegate.adapters.ledger_rows import ROWS_PER_PUBLISH_MAX, StoredRow, encode_name, stored_rows
from tidegate.core.model import LedgerRow
from tidegate.errors import ConfigurationError, DependencyUnavailable, SchemaMissing
from tidegate.ports import Changes, LedgerOverview, RegionBeat

__all__ = [
    "CLEANUP_BATCH_ROWS",
    "LEDGER_SCHEMA_VERSION",
    "NEWEST_SCHEMA_VERSION",
    "SqlLedger",
    "check_schema",
]

logger: Final[logging.Logger] = logging.getLogger(__name__)

SessionType = TypeVar("SessionType", bound=Session[Any])

# The migration that the ledger needs. Later ones belong to others.
LEDGER_SCHEMA_VERSION: Final = 1

# The newest that this version of Tidegate brings.
NEWEST_SCHEMA_VERSION: Final = 4

# One DELETE's worth: locks are held for some milliseconds, and replicas follow in small steps.
CLEANUP_BATCH_ROWS: Final = 1_000


def check_schema(version: int, shown: str) -> None:
    """Raise `SchemaMissing` unless the ledger's tables are there."""
    if version < LEDGER_SCHEMA_VERSION:
        state = "has no schema" if version == 0 else f"has schema version {version}"
        raise SchemaMissing(
            f"{shown}: {state}, version {LEDGER_SCHEMA_VERSION} is needed; run: tidegate migrate --ledger {shown}"
        )
    if version > NEWEST_SCHEMA_VERSION:
        # A warning and no error: migrations only add, and nodes are updated one after the other.
        logger.warning(
            "%s has schema version %d, and this version of Tidegate knows %d: update this node",
            shown,
            version,
            NEWEST_SCHEMA_VERSION,
        )


class SqlLedger(ABC, Generic[SessionType]):
    """Implements `tidegate.ports.Ledger` over two lanes of one dialect."""

    def __init__(
        self,
        writer: Lane[Any, SessionType],
        reader: Lane[Any, SessionType],
        *,
        random: Random | None = None,
        answer_rows_max: int = ANSWER_ROWS_MAX,
    ) -> None:
        self._writer = writer
        self._reader = reader
        self._random = random or Random()
        self._answer_rows_max = answer_rows_max
        self._rows_published = 0
        self._conflicts = 0

    # ---- the dialect

    @abstractmethod
    async def _written(self, rows: Sequence[StoredRow]) -> list[str]:
        """The rows as `_publish` wants them. Done before a connection is taken, so that other callers can use it."""

    @abstractmethod
    async def _publish(self, session: SessionType, written: list[str]) -> None: ...

    @abstractmethod
    async def _heartbeat(self, session: SessionType, region: bytes) -> list[RegionBeat]: ...

    @abstractmethod
    async def _delete(self, session: SessionType, cutoff_ms: int, limit: int) -> int: ...

    @abstractmethod
    async def _overview(self, session: SessionType, now_ms: int, hottest_max: int) -> LedgerOverview: ...

    @abstractmethod
    def _changes(self, session: SessionType) -> ChangeReader: ...

    # ---- the port

    async def open(self, *, timeout_s: float) -> None:
        async with self._reader.session(timeout_s=timeout_s) as session:
            ((version,),) = await session.fetch("SELECT MAX(version) FROM tidegate_schema")
        check_schema(version or 0, self._reader.url.shown)

    async def publish(self, rows: Sequence[LedgerRow], *, timeout_s: float) -> None:
        if len(rows) > ROWS_PER_PUBLISH_MAX:
            raise ValueError(f"rows: got {len(rows)}, at most {ROWS_PER_PUBLISH_MAX} go in one publish")
        deadline = Deadline.after(timeout_s, loop_time())
        if not rows:
            return
        written = await self._written(await stored_rows(rows))
        backoff = conflict_backoff(self._random)
        while True:
            try:
                async with self._session(self._writer, deadline.remaining(loop_time())) as session:
                    await self._publish(session, written)
            except LockConflict:
                self._conflicts += 1
                pause_s = backoff.pause_s()
                if deadline.remaining(loop_time()) <= pause_s:
                    raise
                await asyncio.sleep(pause_s)
            else:
                self._rows_published += len(rows)
                return

    async def changes(self, cursor: str | None, *, now_ms: int, timeout_s: float) -> Changes:
        async with self._session(self._reader, timeout_s) as session:
            return await read_changes(
                self._changes(session), cursor, now_ms=now_ms, rows_max=self._answer_rows_max
            )

    async def heartbeat(self, region: str, *, timeout_s: float) -> list[RegionBeat]:
        async with self._session(self._writer, timeout_s) as session:
            return await self._heartbeat(session, encode_name(region))

    async def cleanup(self, cutoff_ms: int, *, rows_max: int, timeout_s: float) -> int:
        deleted = 0
        async with self._session(self._writer, timeout_s) as session:
            while deleted < rows_max:
                limit = min(CLEANUP_BATCH_ROWS, rows_max - deleted)
                batch = await self._delete(session, cutoff_ms, limit)
                deleted += batch
                if batch < limit:
                    break
        return deleted

    async def overview(self, *, now_ms: int, hottest_max: int, timeout_s: float) -> LedgerOverview:
        async with self._session(self._reader, timeout_s) as session:
            return await self._overview(session, now_ms, hottest_max)

    async def close(self) -> None:
        await self._writer.close()
        await self._reader.close()

    def statistics(self) -> Mapping[str, int]:
        writer, reader = self._writer.statistics(), self._reader.statistics()
        return {name: writer[name] + reader[name] for name in writer} | {
            "rows_published": self._rows_published,
            "conflicts": self._conflicts,
        }

    # ---- inside

    @asynccontextmanager
    async def _session(self, lane: Lane[Any, SessionType], timeout_s: float) -> AsyncIterator[SessionType]:
        try:
            async with lane.session(timeout_s=timeout_s) as session:
                yield session
        except ConfigurationError as error:
            raise DependencyUnavailable(str(error)) from error
