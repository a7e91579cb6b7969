"""The ledger on PostgreSQL.

Every call is one statement and one round trip, whatever the number of rows: the server works alone, so that the lock
on the region's row is held for the server's time only, and never while a client is slow, far away or stopped.
Columns travel as array literals in text form: building them in slices keeps the event loop free, where the driver
would encode thousands of values in one go.

The order of a publish: the region's row in `ratelimit_publishes` first, then the counts in key order. So publishers of
one region queue instead of deadlocking, and those of different regions share no row. See `ledger_cursor` for the use
of the region's number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from tidegate.adapters.ledger_cursor import ChangeReader, Heads, LivePlace, Place
from tidegate.adapters.ledger_rows import RowReader, StoredRow, beats_of, shown_name
from tidegate.adapters.postgres.connection import PostgresConnection, PostgresSession
from tidegate.adapters.sql_ledger import SqlLedger
from tidegate.core.generations import RESET_NAME
from tidegate.ports import LedgerOverview, RegionBeat

__all__ = ["PUBLISH", "PostgresLedger", "publish_arguments"]

NOW_MS: Final = "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"
COLUMNS: Final = (
    "subject, sequence, region, workspace_id, namespace, identifier, "
    "duration_ms, count, expires_at, updated_at"
)
HEADS: Final = f"SELECT region, published_at, {NOW_MS} FROM ratelimit_publishes"

# A row is inserted only after it was joined with its region's number, that is, after the region's row was locked.
PUBLISH: Final = f"""
    WITH number AS (
        INSERT INTO ratelimit_publishes AS held (region, published_at)
        SELECT region, {NOW_MS} FROM unnest($1::text::bytea[]) AS region ORDER BY region
            ON CONFLICT (region) DO UPDATE SET published_at = greatest(held.published_at + 1, {NOW_MS})
        RETURNING region, published_at
    )
    INSERT INTO ratelimit_window_counts AS held ({COLUMNS})
    SELECT subject, sequence, region, workspace_id, namespace, identifier, duration_ms, count, expires_at, published_at
      FROM unnest($2::text::bytea[], $3::text::bigint[], $4::text::bytea[], $5::text::bytea[], $6::text::bytea[],
                  $7::text::bytea[], $8::text::bigint[], $9::text::bigint[], $10::text::bigint[])
           WITH ORDINALITY AS sent (subject, sequence, region, workspace_id, namespace, identifier, duration_ms, count,
                                    expires_at, place)
      JOIN number USING (region)
     ORDER BY place
        ON CONFLICT (subject, sequence, region) DO UPDATE
           SET count = excluded.count, updated_at = excluded.updated_at WHERE held.count < excluded.count
"""

# Both reads follow an index in its order and stop early. Without statistics (a table that has just filled up, a replica
# that was just promoted) the planner would rather collect and sort everything, once for every page.
READ_IN_ORDER: Final = {"enable_bitmapscan": "off", "enable_seqscan": "off"}

LIVE: Final = f"""
    SELECT {COLUMNS} FROM ratelimit_window_counts
     WHERE (expires_at, subject, sequence, region) > ($1::bigint, $2::bytea, $3::bigint, $4::bytea)
     ORDER BY expires_at, subject, sequence, region LIMIT $5::int
"""

# One row at least for every region, with its number; its records beside it where it was asked for.
CHANGED: Final = f"""
    SELECT heads.region AS head, published_at, {NOW_MS}, record.*
      FROM ratelimit_publishes AS heads
      LEFT JOIN unnest($1::bytea[], $2::bigint[], $3::bytea[], $4::bigint[])
             AS asked (region, updated_at, subject, sequence) ON asked.region = heads.region
      LEFT JOIN LATERAL (
            SELECT {COLUMNS} FROM ratelimit_window_counts AS counts
             WHERE counts.region = asked.region
               AND (counts.updated_at, counts.subject, counts.sequence)
                   > (asked.updated_at, asked.subject, asked.sequence)
               AND counts.expires_at > $5::bigint
             ORDER BY counts.updated_at, counts.subject, counts.sequence LIMIT $6::int
           ) AS record ON true
     ORDER BY heads.region, record.updated_at, record.subject, record.sequence
"""

HEARTBEAT: Final = f"""
    WITH beat AS (
        INSERT INTO ratelimit_regions AS held (region, beat_at) VALUES ($1::bytea, {NOW_MS})
            ON CONFLICT (region) DO UPDATE SET beat_at = greatest(held.beat_at, excluded.beat_at)
        RETURNING region, beat_at
    )
    SELECT region, beat_at FROM beat UNION ALL SELECT region, beat_at FROM ratelimit_regions WHERE region <> $1::bytea
"""

# Skips what another cleanup is deleting at this moment.
DELETE: Final = """
    DELETE FROM ratelimit_window_counts WHERE ctid = ANY (ARRAY(
        SELECT ctid FROM ratelimit_window_counts WHERE expires_at < $1::bigint
         ORDER BY expires_at LIMIT $2::int FOR UPDATE SKIP LOCKED))
"""


def _bytes_array(values: Iterable[bytes]) -> str:
    """An array literal: in its quotes a backslash is written twice."""
    inside = '","\\\\x'.join([value.hex() for value in values])
    return f'{{"\\\\x{inside}"}}'


def _int_array(values: Iterable[int]) -> str:
    return f"{{{','.join([format(value, 'd') for value in values])}}}"


async def publish_arguments(rows: Sequence[StoredRow]) -> list[str]:
    """For `PUBLISH`: the regions, then the columns."""
    arguments = [_bytes_array(sorted({row.region for row in rows}))]
    for column in zip(*rows, strict=True):
        # Built one at a time: about a millisecond each, at the largest chunk.
        arguments.append(_bytes_array(column) if isinstance(column[0], bytes) else _int_array(column))
        await asyncio.sleep(0)
    return arguments


class _Reader:
    """The three queries of an import, see `ChangeReader`."""

    def __init__(self, session: PostgresSession) -> None:
        self._session = session

    async def heads(self) -> Heads:
        return _heads(await self._session.fetch(HEADS))

    async def live(self, after: LivePlace, limit: int) -> Sequence[Sequence[Any]]:
        return await self._session.fetch(LIVE, (*after, limit))

    async def changed(
        self, after: Mapping[bytes, Place], *, now_ms: int, limit: int
    ) -> tuple[Heads, Mapping[bytes, Sequence[Sequence[Any]]]]:
        places = list(after.values())
        asked = (
            list(after),
            [place.updated_at for place in places],
            [place.subject for place in places],
            [place.sequence for place in places],
        )
        answers: dict[bytes, list[Sequence[Any]]] = {region: [] for region in after}
        records = await self._session.fetch(CHANGED, (*asked, now_ms, limit))
        for record in records:
            if record[3] is not None:
                answers[record[0]].append(record[3:])
        return _heads(records), answers


def _heads(records: Sequence[Sequence[Any]]) -> Heads:
    return Heads({record[0]: record[1] for record in records}, records[0][2] if records else 0)


class PostgresLedger(SqlLedger[PostgresSession]):
    """`PostgresLedger("postgres://user:password@host:port/database")`; see `PostgresConnection` for the options."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(PostgresConnection(url), PostgresConnection(url, settings=READ_IN_ORDER), **options)

    async def _written(self, rows: Sequence[StoredRow]) -> list[str]:
        return await publish_arguments(rows)

    async def _publish(self, session: PostgresSession, written: list[str]) -> None:
        await session.execute(PUBLISH, written)

    async def _heartbeat(self, session: PostgresSession, region: bytes) -> list[RegionBeat]:
        return beats_of(await session.fetch(HEARTBEAT, (region,)))

    async def _delete(self, session: PostgresSession, cutoff_ms: int, limit: int) -> int:
        return await session.execute(DELETE, (cutoff_ms, limit))

    async def _overview(self, session: PostgresSession, now_ms: int, hottest_max: int) -> LedgerOverview:
        beats = await session.fetch("SELECT region, beat_at FROM ratelimit_regions")
        live = await session.fetch(
            "SELECT region, count(*) FROM ratelimit_window_counts WHERE expires_at > $1 GROUP BY region",
            (now_ms,),
        )
        ((expired, clock_ms),) = await session.fetch(
            f"SELECT count(*), {NOW_MS} FROM ratelimit_window_counts WHERE expires_at <= $1", (now_ms,)
        )
        rows = RowReader()
        await rows.add(
            await session.fetch(
                f"SELECT {COLUMNS} FROM ratelimit_window_counts WHERE expires_at > $1 AND sequence <> {RESET_NAME:d} "
                "ORDER BY count DESC, subject, sequence, region LIMIT $2",
                (now_ms, hottest_max),
            )
        )
        return LedgerOverview(
            regions=beats_of(beats),
            rows={shown_name(region): count for region, count in live},
            expired_rows=expired,
            hottest=rows.rows,
            clock_ms=clock_ms,
        )

    def _changes(self, session: PostgresSession) -> ChangeReader:
        return _Reader(session)
