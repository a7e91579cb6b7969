"""The ledger on MySQL and MariaDB.

Every call is one packet of statements and one round trip, whatever the number of rows: the server works through it
alone, so that the lock on the region's row is held for the server's time only, and never while a client is slow, far
away or stopped. Values are written as numbers and hexadecimal literals, which need no quoting.

The order of a publish: the region's row in `ratelimit_publishes` first, then the counts in key order. So publishers of
one region queue instead of deadlocking, and those of different regions share no row. See `ledger_cursor` for the use
of the region's number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from tidegate.adapters.ledger_cursor import ChangeReader, Heads, LivePlace, Place
from tidegate.adapters.ledger_rows import SLICE_ROWS, RowReader, StoredRow, beats_of, shown_name
from tidegate.adapters.mysql.connection import MySQLConnection, MySQLSession
from tidegate.adapters.sql_ledger import SqlLedger
from tidegate.core.generations import RESET_NAME
from tidegate.errors import TidegateError
from tidegate.ports import LedgerOverview, RegionBeat

__all__ = ["MySQLLedger", "publish_packets"]

NOW_MS: Final = "CAST(UNIX_TIMESTAMP(NOW(3)) * 1000 AS SIGNED)"
COLUMNS: Final = (
    "subject, sequence, region, workspace_id, namespace, identifier, "
    "duration_ms, count, expires_at, updated_at"
)
# Columns in ORDER BY carry the table's name: Vitess warns of others, and the driver asks for each warning.
HEADS: Final = f"SELECT region, published_at, {NOW_MS} FROM ratelimit_publishes"

# VALUES() is the form that both MySQL and MariaDB understand. Assignments happen from left to right: updated_at
# must look at count before it is raised.
ON_DUPLICATE: Final = (
    " ON DUPLICATE KEY UPDATE updated_at = IF(VALUES(count) > count, VALUES(updated_at), updated_at), "
    "count = GREATEST(count, VALUES(count))"
)

# Below the smallest max_allowed_packet that is a default anywhere (4 MiB). A chunk of long names takes several.
PACKET_BYTES_MAX: Final = 3 * 1024 * 1024


def _hex(value: bytes) -> str:
    return f"x'{value.hex()}'"


def _values(row: StoredRow, stamp: str) -> str:
    subject, sequence, region, workspace, namespace, identifier, duration_ms, regional, expires_at_ms = row
    return (
        f"(x'{subject.hex()}',{sequence:d},x'{region.hex()}',x'{workspace.hex()}',x'{namespace.hex()}',"
        f"x'{identifier.hex()}',{duration_ms:d},{regional:d},{expires_at_ms:d},{stamp})"
    )


def _insert(rows: Sequence[StoredRow], stamps: Mapping[bytes, str]) -> str:
    values = ",".join([_values(row, stamps[row.region]) for row in rows])
    return f"INSERT INTO ratelimit_window_counts ({COLUMNS}) VALUES {values}{ON_DUPLICATE}"


def _take_number(region: bytes, variable: str) -> str:
    """Lock the region's row, raise its number, and keep the number in a variable of the session.

    By LAST_INSERT_ID and not by a query: Vitess sends a query in a SET to any shard.
    """
    return (
        f"INSERT INTO ratelimit_publishes (region, published_at) VALUES ({_hex(region)}, LAST_INSERT_ID({NOW_MS})) "
        "ON DUPLICATE KEY UPDATE "
        "published_at = LAST_INSERT_ID(GREATEST(published_at + 1, VALUES(published_at))); "
        f"SET {variable} = LAST_INSERT_ID()"
    )


async def publish_packets(rows: Sequence[StoredRow]) -> list[str]:
    """The statements of a publish, to be run in one transaction, cut where a packet would grow too large."""
    stamps = {
        region: f"@tidegate_{number}" for number, region in enumerate(sorted({row.region for row in rows}))
    }
    packets: list[str] = []
    statements = [_take_number(region, variable) for region, variable in stamps.items()]
    size = 0
    for start in range(0, len(rows), SLICE_ROWS):
        statement = _insert(rows[start : start + SLICE_ROWS], stamps)
        if size + len(statement) > PACKET_BYTES_MAX:
            packets.append(";".join(statements))
            statements, size = [], 0
        statements.append(statement)
        size += len(statement)
        await asyncio.sleep(0)
    packets.append(";".join(statements))
    return packets


class _Reader:
    """The three queries of an import, see `ChangeReader`."""

    def __init__(self, session: MySQLSession) -> None:
        self._session = session

    async def heads(self) -> Heads:
        return _heads((await self._session.script(HEADS))[0].rows)

    async def live(self, after: LivePlace, limit: int) -> Sequence[Sequence[Any]]:
        at, subject, sequence, region = (
            after.expires_at,
            _hex(after.subject),
            after.sequence,
            _hex(after.region),
        )
        # Each alternative names all of its columns: only then is it a range of the index.
        (result,) = await self._session.script(
            f"SELECT {COLUMNS} FROM ratelimit_window_counts AS c FORCE INDEX (by_expiry) WHERE expires_at > {at:d} "
            f"OR (expires_at = {at:d} AND subject > {subject}) "
            f"OR (expires_at = {at:d} AND subject = {subject} AND sequence > {sequence:d}) "
            f"OR (expires_at = {at:d} AND subject = {subject} AND sequence = {sequence:d} AND region > {region}) "
            f"ORDER BY c.expires_at, c.subject, c.sequence, c.region LIMIT {limit:d}"
        )
        return result.rows

    async def changed(
        self, after: Mapping[bytes, Place], *, now_ms: int, limit: int
    ) -> tuple[Heads, Mapping[bytes, Sequence[Sequence[Any]]]]:
        heads, *answers = await self._session.script(";".join([HEADS, *self._queries(after, now_ms, limit)]))
        return _heads(heads.rows), {
            region: answer.rows for region, answer in zip(after, answers, strict=True)
        }

    @staticmethod
    def _queries(after: Mapping[bytes, Place], now_ms: int, limit: int) -> Iterator[str]:
        for region, place in after.items():
            at, subject = place.updated_at, _hex(place.subject)
            yield (
                f"SELECT {COLUMNS} FROM ratelimit_window_counts AS c FORCE INDEX (by_change) "
                f"WHERE region = {_hex(region)} AND (updated_at > {at:d} "
                f"OR (updated_at = {at:d} AND subject > {subject}) "
                f"OR (updated_at = {at:d} AND subject = {subject} AND sequence > {place.sequence:d})) "
                f"AND expires_at > {now_ms:d} ORDER BY c.updated_at, c.subject, c.sequence LIMIT {limit:d}"
            )


def _heads(records: Sequence[Sequence[Any]]) -> Heads:
    return Heads(
        {region: published_at for region, published_at, _ in records}, records[0][2] if records else 0
    )


class MySQLLedger(SqlLedger[MySQLSession]):
    """`MySQLLedger("mysql://user:password@host:port/database")`; see `MySQLConnection` for the options."""

    def __init__(self, url: str, **options: Any) -> None:
        super().__init__(MySQLConnection(url), MySQLConnection(url), **options)

    async def _written(self, rows: Sequence[StoredRow]) -> list[str]:
        return await publish_packets(rows)

    async def _publish(self, session: MySQLSession, written: list[str]) -> None:
        # Almost always one packet, and then no moment at which the server waits for us while it holds locks.
        packets = [f"{session.begin}; {written[0]}", *written[1:]]
        packets[-1] += f"; {session.commit}"
        try:
            for packet in packets:
                await session.script(packet)
        except TidegateError:
            await session.roll_back()
            raise

    async def _heartbeat(self, session: MySQLSession, region: bytes) -> list[RegionBeat]:
        _, beats = await session.script(
            f"INSERT INTO ratelimit_regions (region, beat_at) VALUES ({_hex(region)}, {NOW_MS}) "
            "ON DUPLICATE KEY UPDATE beat_at = GREATEST(beat_at, VALUES(beat_at)); "
            "SELECT region, beat_at FROM ratelimit_regions"
        )
        return beats_of(beats.rows)

    async def _delete(self, session: MySQLSession, cutoff_ms: int, limit: int) -> int:
        return await session.execute(
            "DELETE FROM ratelimit_window_counts WHERE expires_at < ? "
            "ORDER BY expires_at, subject, sequence, region LIMIT ?",
            (cutoff_ms, limit),
        )

    async def _overview(self, session: MySQLSession, now_ms: int, hottest_max: int) -> LedgerOverview:
        beats, live, expired, hottest, clock = await session.script(
            "SELECT region, beat_at FROM ratelimit_regions; "
            "SELECT region, COUNT(*) FROM ratelimit_window_counts FORCE INDEX (by_expiry) "
            f"WHERE expires_at > {now_ms:d} GROUP BY region; "
            f"SELECT COUNT(*) FROM ratelimit_window_counts FORCE INDEX (by_expiry) WHERE expires_at <= {now_ms:d}; "
            f"SELECT {COLUMNS} FROM ratelimit_window_counts AS c WHERE expires_at > {now_ms:d} "
            f"AND sequence <> {RESET_NAME:d} "
            f"ORDER BY c.count DESC, c.subject, c.sequence, c.region LIMIT {hottest_max:d}; "
            f"SELECT {NOW_MS}"
        )
        rows = RowReader()
        await rows.add(hottest.rows)
        return LedgerOverview(
            regions=beats_of(beats.rows),
            rows={shown_name(region): count for region, count in live.rows},
            expired_rows=expired.rows[0][0],
            hottest=rows.rows,
            clock_ms=clock.rows[0][0],
        )

    def _changes(self, session: MySQLSession) -> ChangeReader:
        return _Reader(session)
