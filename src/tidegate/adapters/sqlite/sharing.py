"""What the nodes of a region share about the ledger, in a SQLite file: tables beside the components.

`credit` loads and stores them around the rules of `core.grants`; the lease is a row of its own.
"""

from __future__ import annotations

import sqlite3
from typing import Final

from tidegate.core.generations import cell_name, cell_of
from tidegate.core.grants import CellRecord, SubjectRecord
from tidegate.core.sharing import ImportState, Lease, Share, take_lease

__all__ = [
    "ADDED_COLUMNS",
    "NUMBER_MAX",
    "SHARING_SCHEMA",
    "SHARING_TABLES",
    "answer_lease",
    "cell_expires_at_ms",
    "delete_expired",
    "load_foreign",
    "store_foreign",
    "store_mark",
]

# SQLite has 64 bits. No limit distinguishes a larger count from this one.
NUMBER_MAX: Final = 2**53

SHARING_TABLES: Final = ("origin_foreign", "origin_marks", "origin_lease")
SHARING_SCHEMA: Final = (
    """
    CREATE TABLE IF NOT EXISTS origin_foreign (
        digest BLOB NOT NULL, sequence INTEGER NOT NULL, region BLOB NOT NULL, count INTEGER NOT NULL,
        expires_at_ms INTEGER NOT NULL, learned_at_ms INTEGER NOT NULL DEFAULT -1,
        PRIMARY KEY (digest, sequence, region)
    ) WITHOUT ROWID
    """,
    "CREATE INDEX IF NOT EXISTS origin_foreign_expiry ON origin_foreign (expires_at_ms)",
    """
    CREATE TABLE IF NOT EXISTS origin_marks (
        digest BLOB NOT NULL, sequence INTEGER NOT NULL, published INTEGER NOT NULL, assigned INTEGER NOT NULL,
        owner TEXT NOT NULL, until_ms INTEGER NOT NULL, epoch INTEGER NOT NULL, expires_at_ms INTEGER NOT NULL,
        PRIMARY KEY (digest, sequence)
    ) WITHOUT ROWID
    """,
    "CREATE INDEX IF NOT EXISTS origin_marks_expiry ON origin_marks (expires_at_ms)",
    """
    CREATE TABLE IF NOT EXISTS origin_lease (
        only INTEGER PRIMARY KEY CHECK (only = 1), holder TEXT NOT NULL, since_ms INTEGER NOT NULL,
        until_ms INTEGER NOT NULL, lost_at_ms INTEGER NOT NULL, cursor TEXT NOT NULL, imported_at_ms INTEGER NOT NULL,
        full_at_ms INTEGER NOT NULL, regions INTEGER NOT NULL, epoch INTEGER NOT NULL,
        lag_ms INTEGER NOT NULL DEFAULT -1
    )
    """,
)

# Columns that files of earlier versions do not have: (table, column). All are INTEGER NOT NULL DEFAULT -1.
ADDED_COLUMNS: Final = (("origin_foreign", "learned_at_ms"), ("origin_lease", "lag_ms"))
PUT_FOREIGN: Final = "INSERT OR REPLACE INTO origin_foreign VALUES (?, ?, ?, ?, ?, ?)"
PUT_MARK: Final = "INSERT OR REPLACE INTO origin_marks VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
FORGET: Final = """
    DELETE FROM {table} WHERE {key} IN (
        SELECT {columns} FROM {table} WHERE expires_at_ms <= ? ORDER BY expires_at_ms LIMIT ?)
"""
FORGET_FOREIGN: Final = FORGET.format(
    table="origin_foreign", key="(digest, sequence, region)", columns="digest, sequence, region"
)
FORGET_MARKS: Final = FORGET.format(
    table="origin_marks", key="(digest, sequence)", columns="digest, sequence"
)


def load_foreign(cell: CellRecord, name: bytes, count: int, learned_at_ms: int) -> None:
    """Add to a cell what another region has published."""
    region = name.decode("utf-8", "surrogatepass")
    cell.regions[region] = count
    if learned_at_ms >= 0:
        cell.learned[region] = learned_at_ms
    cell.foreign += count


def store_mark(
    connection: sqlite3.Connection, record: SubjectRecord, digest: bytes, sequence: int, duration_ms: int
) -> None:
    mark = record.cell(sequence).mark_of(0)
    connection.execute(
        PUT_MARK,
        (
            digest,
            sequence,
            mark.published,
            mark.assigned,
            mark.owner,
            mark.until_ms,
            mark.epoch,
            cell_expires_at_ms(sequence, duration_ms),
        ),
    )


def store_foreign(connection: sqlite3.Connection, record: SubjectRecord, entry: Share) -> None:
    name = cell_name(entry.sequence, entry.generation, entry.duration_ms)
    cell = record.cell(name)
    count, learned_at_ms = cell.regions[entry.region], cell.learned.get(entry.region, -1)
    region = entry.region.encode("utf-8", "surrogatepass")
    expires_at_ms = cell_expires_at_ms(name, entry.duration_ms)
    connection.execute(PUT_FOREIGN, (entry.digest, name, region, count, expires_at_ms, learned_at_ms))


def cell_expires_at_ms(name: int, duration_ms: int) -> int:
    """When a cell is not needed any more, by its name."""
    sequence, _ = cell_of(name, duration_ms)
    return min((sequence + 3) * duration_ms, NUMBER_MAX)


def delete_expired(connection: sqlite3.Connection, now_ms: int, rows_max: int) -> None:
    connection.execute(FORGET_FOREIGN, (now_ms, rows_max))
    connection.execute(FORGET_MARKS, (now_ms, rows_max))


def answer_lease(
    connection: sqlite3.Connection,
    node_id: str,
    life_ms: int,
    state: ImportState | None,
    has_lost: bool,
    now_ms: int,
) -> Lease:
    """Inside the caller's transaction."""
    row = connection.execute(
        "SELECT holder, since_ms, until_ms, lost_at_ms, cursor, imported_at_ms, full_at_ms, regions, epoch, lag_ms "
        "FROM origin_lease"
    ).fetchone()
    held = None
    if row is not None:
        state_held = ImportState(*row[4:])._replace(since_ms=row[1])
        held = Lease(row[0], row[1], row[2], now_ms, row[3], state_held)
    lease = take_lease(held, node_id, life_ms, state, has_lost, now_ms)
    if lease != held:
        connection.execute(
            "INSERT OR REPLACE INTO origin_lease VALUES (1, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*lease[:3], lease.lost_at_ms, *lease.state[:6]),
        )
    return lease
