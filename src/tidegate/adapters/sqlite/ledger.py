"""The ledger in a SQLite file: regions that share a machine, demonstrations, tests without a server.

Every call is one job of the file's worker thread. Rows travel as one JSON answer and one blob of names, because the
driver hands the interpreter lock over at every row, and a busy application would be waited for once per row. Cleans
itself, a few expired rows at every publish: there is no operator to do it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from tidegate.adapters.clock import WallClock
from tidegate.adapters.deadline import Deadline, loop_time
from tidegate.adapters.ledger_cursor import ANSWER_ROWS_MAX, Heads, LivePlace, Place, read_changes
from tidegate.adapters.ledger_rows import (
    ROWS_PER_PUBLISH_MAX,
    SLICE_ROWS,
    RowReader,
    StoredRow,
    beats_of,
    encode_name,
    shown_name,
    stored_rows,
)
from tidegate.adapters.migrations import sqlite_schema_version
from tidegate.adapters.sql_ledger import CLEANUP_BATCH_ROWS, check_schema
from tidegate.adapters.sqlite.connection import SQLiteFile, transaction
from tidegate.core.generations import RESET_NAME
from tidegate.core.model import LedgerRow
from tidegate.ports import Changes, Clock, LedgerOverview, RegionBeat

__all__ = ["SQLiteLedger"]

Result = TypeVar("Result")

# Rows in one answer of the worker: parsing them holds the interpreter for about a millisecond.
STATEMENT_ROWS_MAX: Final = 500

# Expired rows deleted by each publish, for every one published: more than one, or a backlog would never shrink.
FORGOTTEN_PER_PUBLISHED: Final = 2
FORGOTTEN_MIN: Final = 100

TAKE_NUMBER: Final = """
    INSERT INTO ratelimit_publishes (region, published_at) VALUES (:region, :now_ms)
        ON CONFLICT (region) DO UPDATE SET published_at = max(published_at + 1, excluded.published_at)
    RETURNING published_at
"""

# :rows is a JSON array of [offset, length of region, of workspace, of namespace, of identifier, sequence, duration_ms,
# count, expires_at], and at each offset of :names stand the digest and the four names, one after the other. "WHERE
# true" keeps the parser from taking ON CONFLICT for the condition of a join.
PUBLISH: Final = """
    INSERT INTO ratelimit_window_counts AS held
           (subject, sequence, region, workspace_id, namespace, identifier, duration_ms, count, expires_at, updated_at)
    SELECT substr(:names, at, 16), sequence, substr(:names, at + 16, region),
           substr(:names, at + 16 + region, workspace), substr(:names, at + 16 + region + workspace, namespace),
           substr(:names, at + 16 + region + workspace + namespace, identifier),
           duration_ms, count, expires_at, :number
      FROM (SELECT json_extract(value, '$[0]') AS at, json_extract(value, '$[1]') AS region,
                   json_extract(value, '$[2]') AS workspace, json_extract(value, '$[3]') AS namespace,
                   json_extract(value, '$[4]') AS identifier, json_extract(value, '$[5]') AS sequence,
                   json_extract(value, '$[6]') AS duration_ms, json_extract(value, '$[7]') AS count,
                   json_extract(value, '$[8]') AS expires_at
              FROM json_each(:rows)) WHERE true
        ON CONFLICT (subject, sequence, region) DO UPDATE
           SET count = excluded.count, updated_at = excluded.updated_at WHERE held.count < excluded.count
"""

# SQLite keeps a value of any type in any column: what another program has written as text is still read.
AS_JSON: Final = """
    SELECT json_group_array(json_array(
               hex(subject), sequence, hex(region), hex(workspace_id), hex(namespace), hex(identifier),
               duration_ms, count, expires_at, CAST(updated_at AS INTEGER))) FROM
"""
LIVE: Final = f"""
    {AS_JSON} (SELECT * FROM ratelimit_window_counts
                WHERE (expires_at, subject, sequence, region) > (:expires_at, :subject, :sequence, :region)
                ORDER BY expires_at, subject, sequence, region LIMIT :limit)
"""
CHANGED: Final = f"""
    {AS_JSON} (SELECT * FROM ratelimit_window_counts
                WHERE region = :region AND (updated_at, subject, sequence) > (:updated_at, :subject, :sequence)
                  AND expires_at > :now_ms
                ORDER BY updated_at, subject, sequence LIMIT :limit)
"""
HOTTEST: Final = f"""
    {AS_JSON} (SELECT * FROM ratelimit_window_counts WHERE expires_at > :now_ms AND sequence <> {RESET_NAME:d}
                ORDER BY count DESC, subject, sequence, region LIMIT :limit)
"""

DELETE: Final = """
    DELETE FROM ratelimit_window_counts WHERE (subject, sequence, region) IN (
        SELECT subject, sequence, region FROM ratelimit_window_counts
         WHERE expires_at < :cutoff_ms ORDER BY expires_at LIMIT :limit)
"""
BEATS: Final = "SELECT CAST(region AS BLOB), CAST(beat_at AS INTEGER) FROM ratelimit_regions"
HEARTBEAT: Final = """
    INSERT INTO ratelimit_regions (region, beat_at) VALUES (:region, :now_ms)
        ON CONFLICT (region) DO UPDATE SET beat_at = max(beat_at, excluded.beat_at)
"""


def _records(
    connection: sqlite3.Connection, query: str, arguments: Mapping[str, int | bytes]
) -> list[tuple[Any, ...]]:
    """The rows of an answer, as `RowReader` takes them."""
    (text,) = connection.execute(query, arguments).fetchone()
    unhex = bytes.fromhex
    return [
        (
            unhex(subject),
            sequence,
            unhex(region),
            unhex(workspace),
            unhex(namespace),
            unhex(identifier),
            *numbers,
        )
        for subject, sequence, region, workspace, namespace, identifier, *numbers in json.loads(text)
    ]


def _delete(cutoff_ms: int, limit: int, connection: sqlite3.Connection) -> int:
    return connection.execute(DELETE, {"cutoff_ms": cutoff_ms, "limit": limit}).rowcount


class _Packed:
    """The rows of one region, as `PUBLISH` takes them."""

    def __init__(self) -> None:
        self.names = bytearray()
        self.slices: list[str] = []

    def add(self, rows: Sequence[StoredRow]) -> None:
        numbers = []
        for row in rows:
            names = (row.region, row.workspace, row.namespace, row.identifier)
            numbers.append(
                (
                    len(self.names) + 1,
                    *(len(name) for name in names),
                    *(row.sequence, row.duration_ms, row.regional, row.expires_at_ms),
                )
            )
            self.names += row.subject
            for name in names:
                self.names += name
        self.slices.append(json.dumps(numbers, separators=(",", ":"))[1:-1])

    def arguments(self, number: int) -> dict[str, int | str | bytes]:
        return {"names": bytes(self.names), "rows": f"[{','.join(self.slices)}]", "number": number}


async def _packed(rows: Sequence[StoredRow]) -> dict[bytes, _Packed]:
    by_region: dict[bytes, list[StoredRow]] = {}
    for row in rows:
        by_region.setdefault(row.region, []).append(row)
    packed = {region: _Packed() for region in by_region}
    for region, own in by_region.items():
        for start in range(0, len(own), SLICE_ROWS):
            packed[region].add(own[start : start + SLICE_ROWS])
            await asyncio.sleep(0)
    return packed


class _Reader:
    """The three queries of an import, see `ChangeReader`."""

    def __init__(self, file: SQLiteFile, clock: Clock, deadline: Deadline) -> None:
        self._file = file
        self._clock = clock
        self._deadline = deadline

    async def _run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        return await self._file.run(work, timeout_s=self._deadline.remaining(loop_time()))

    def _heads(self, connection: sqlite3.Connection) -> Heads:
        records = connection.execute(
            "SELECT CAST(region AS BLOB), CAST(published_at AS INTEGER) FROM ratelimit_publishes"
        ).fetchall()
        return Heads(dict(records), self._clock.now_ms())

    async def heads(self) -> Heads:
        return await self._run(self._heads)

    async def live(self, after: LivePlace, limit: int) -> Sequence[Sequence[Any]]:
        arguments = {**after._asdict(), "limit": limit}
        return await self._run(lambda connection: _records(connection, LIVE, arguments))

    async def changed(
        self, after: Mapping[bytes, Place], *, now_ms: int, limit: int
    ) -> tuple[Heads, Mapping[bytes, Sequence[Sequence[Any]]]]:
        def work(connection: sqlite3.Connection) -> tuple[Heads, dict[bytes, list[tuple[Any, ...]]]]:
            return self._heads(connection), {
                region: _records(
                    connection,
                    CHANGED,
                    {**place._asdict(), "region": region, "now_ms": now_ms, "limit": limit},
                )
                for region, place in after.items()
            }

        return await self._run(work)


class SQLiteLedger:
    """Implements `tidegate.ports.Ledger` for all processes that open the file at `path`."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        clock: Clock | None = None,
        cleans_itself: bool = True,
        answer_rows_max: int = ANSWER_ROWS_MAX,
    ) -> None:
        self._file = SQLiteFile(path)
        self._clock = clock if clock is not None else WallClock()
        self._cleans_itself = cleans_itself
        self._answer_rows_max = answer_rows_max
        self._rows_published = 0

    async def open(self, *, timeout_s: float) -> None:
        deadline = Deadline.after(timeout_s, loop_time())
        path = self._file.path
        version = 0
        if path.exists() or not path.parent.is_dir():  # looking must not create it
            await self._file.open(timeout_s=timeout_s)
            version = await self._file.run(sqlite_schema_version, timeout_s=deadline.remaining(loop_time()))
        check_schema(version, f"sqlite:///{path}")

    async def publish(self, rows: Sequence[LedgerRow], *, timeout_s: float) -> None:
        if len(rows) > ROWS_PER_PUBLISH_MAX:
            raise ValueError(f"rows: got {len(rows)}, at most {ROWS_PER_PUBLISH_MAX} go in one publish")
        deadline = Deadline.after(timeout_s, loop_time())
        packed = await _packed(await stored_rows(rows))
        if not packed:
            return

        def work(connection: sqlite3.Connection) -> None:
            with transaction(connection):
                now_ms = self._clock.now_ms()
                for region, rows_of_region in packed.items():
                    taken = connection.execute(TAKE_NUMBER, {"region": region, "now_ms": now_ms})
                    connection.execute(PUBLISH, rows_of_region.arguments(taken.fetchone()[0]))
                if self._cleans_itself:
                    limit = max(FORGOTTEN_MIN, FORGOTTEN_PER_PUBLISHED * len(rows))
                    _delete(now_ms, limit, connection)

        await self._file.run(work, timeout_s=deadline.remaining(loop_time()))
        self._rows_published += len(rows)

    async def changes(self, cursor: str | None, *, now_ms: int, timeout_s: float) -> Changes:
        reader = _Reader(self._file, self._clock, Deadline.after(timeout_s, loop_time()))
        return await read_changes(
            reader,
            cursor,
            now_ms=now_ms,
            rows_max=self._answer_rows_max,
            statement_rows_max=STATEMENT_ROWS_MAX,
        )

    async def heartbeat(self, region: str, *, timeout_s: float) -> list[RegionBeat]:
        def work(connection: sqlite3.Connection) -> list[RegionBeat]:
            with transaction(connection):
                connection.execute(HEARTBEAT, {"region": encode_name(region), "now_ms": self._clock.now_ms()})
                return beats_of(connection.execute(BEATS).fetchall())

        return await self._file.run(work, timeout_s=timeout_s)

    async def cleanup(self, cutoff_ms: int, *, rows_max: int, timeout_s: float) -> int:
        deadline = Deadline.after(timeout_s, loop_time())
        deleted = 0
        while deleted < rows_max:
            limit = min(CLEANUP_BATCH_ROWS, rows_max - deleted)
            batch = await self._file.run(
                partial(_delete, cutoff_ms, limit), timeout_s=deadline.remaining(loop_time())
            )
            deleted += batch
            if batch < limit:
                break
        return deleted

    async def overview(self, *, now_ms: int, hottest_max: int, timeout_s: float) -> LedgerOverview:
        def work(connection: sqlite3.Connection) -> LedgerOverview:
            live = connection.execute(
                "SELECT CAST(region AS BLOB), count(*) FROM ratelimit_window_counts WHERE expires_at > ? GROUP BY 1",
                (now_ms,),
            ).fetchall()
            (expired,) = connection.execute(
                "SELECT count(*) FROM ratelimit_window_counts WHERE expires_at <= ?", (now_ms,)
            ).fetchone()
            hottest = RowReader()
            hottest.add_nowait(_records(connection, HOTTEST, {"now_ms": now_ms, "limit": hottest_max}))
            return LedgerOverview(
                regions=beats_of(connection.execute(BEATS).fetchall()),
                rows={shown_name(region): count for region, count in live},
                expired_rows=expired,
                hottest=hottest.rows,
                clock_ms=self._clock.now_ms(),
            )

        return await self._file.run(work, timeout_s=timeout_s)

    async def close(self) -> None:
        await self._file.close()

    def statistics(self) -> Mapping[str, int]:
        file = self._file.statistics()
        return {
            "statements": file["jobs"],
            "connections_opened": file["connections_opened"],
            "rows_published": self._rows_published,
        }
