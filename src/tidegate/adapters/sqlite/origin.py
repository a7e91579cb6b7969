"""An origin in a SQLite file: several processes of one machine share it, without any server.

Laws: a merge is one transaction; a read takes no lock; expired cells are invisible at once and deleted a few at a
time by later merges. Every statement does a whole call's work in one step and answers in one row: the driver hands
the interpreter lock over at each step, so that a busy application would otherwise be waited for once per cell.
"""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import time
from collections.abc import Mapping, Sequence
from typing import Final

from tidegate.adapters.clock import WallClock
from tidegate.adapters.sqlite.connection import SQLiteFile, transaction
from tidegate.core.model import Component, Heard
from tidegate.errors import RegionMismatch
from tidegate.ports import Clock, Pulse

__all__ = ["SQLiteOrigin"]

SCHEMA: Final = (
    """
    CREATE TABLE IF NOT EXISTS origin_components (
        digest BLOB NOT NULL, sequence INTEGER NOT NULL, writer TEXT NOT NULL,
        own INTEGER NOT NULL, expires_at_ms INTEGER NOT NULL,
        PRIMARY KEY (digest, sequence, writer)
    ) WITHOUT ROWID
    """,
    "CREATE INDEX IF NOT EXISTS origin_components_expiry ON origin_components (expires_at_ms)",
    """
    CREATE TABLE IF NOT EXISTS origin_region (
        only INTEGER PRIMARY KEY CHECK (only = 1), region TEXT NOT NULL, incarnation TEXT NOT NULL
    )
    """,
)

# The arguments of a call: :digests are 16 bytes each, one after the other, and :cells is a JSON array of
# [sequence, writer, own, expires_at_ms], both in the order of the call. Answers come back in that order because a
# LEFT JOIN walks its left side in the order in which json_each yields it.
ASKED: Final = """
    (SELECT substr(:digests, key * 16 + 1, 16) AS digest, json_extract(value, '$[0]') AS sequence,
            json_extract(value, '$[1]') AS writer
       FROM json_each(:cells)) AS asked
"""
COMPONENTS: Final = f"""
    SELECT json_group_array(coalesce(held.own, 0)) FROM {ASKED}
      LEFT JOIN origin_components AS held
        ON held.digest = asked.digest AND held.sequence = asked.sequence AND held.writer = asked.writer
       AND held.expires_at_ms > :now_ms
"""
TOTALS: Final = f"""
    SELECT json_group_array(
        (SELECT coalesce(sum(held.own), 0) FROM origin_components AS held
          WHERE held.digest = asked.digest AND held.sequence = asked.sequence
            AND (held.expires_at_ms > :now_ms OR :expired_too))
    ) FROM {ASKED}
"""
# "WHERE true" keeps the parser from taking ON CONFLICT for the condition of a join.
MERGE: Final = """
    INSERT INTO origin_components (digest, sequence, writer, own, expires_at_ms)
    SELECT substr(:digests, key * 16 + 1, 16), json_extract(value, '$[0]'), json_extract(value, '$[1]'),
           json_extract(value, '$[2]'), json_extract(value, '$[3]')
      FROM json_each(:cells) WHERE true
        ON CONFLICT (digest, sequence, writer) DO UPDATE SET own = excluded.own WHERE excluded.own > own
"""
FORGET_EXPIRED: Final = """
    DELETE FROM origin_components WHERE (digest, sequence, writer) IN (
        SELECT digest, sequence, writer FROM origin_components
         WHERE expires_at_ms <= :now_ms ORDER BY expires_at_ms LIMIT :rows_max)
"""

# Expired components deleted by each merge, for every one merged: more than one, or a backlog would never shrink.
FORGOTTEN_PER_MERGED: Final = 2
FORGOTTEN_MIN: Final = 100


def _prepare(connection: sqlite3.Connection) -> None:
    known = connection.execute(
        "SELECT count(*) FROM sqlite_master WHERE name IN ('origin_components', 'origin_region')"
    ).fetchone()[0]
    if known == 2:
        return  # the usual case takes no write lock
    with transaction(connection):
        for statement in SCHEMA:
            connection.execute(statement)


def _arguments(components: Sequence[Component], now_ms: int) -> dict[str, bytes | str | int]:
    return {
        "digests": b"".join([one.digest for one in components]),
        "cells": json.dumps(
            [(one.sequence, one.writer, one.own, one.expires_at_ms) for one in components],
            separators=(",", ":"),
        ),
        "now_ms": now_ms,
    }


def _numbers(
    connection: sqlite3.Connection, query: str, arguments: Mapping[str, bytes | str | int]
) -> list[int]:
    numbers: list[int] = json.loads(connection.execute(query, arguments).fetchone()[0])
    return numbers


class SQLiteOrigin:
    """Honours `tidegate.ports.Origin` for all processes that open the file at `path`."""

    def __init__(self, path: str | os.PathLike[str], *, clock: Clock | None = None) -> None:
        self._file = SQLiteFile(path, prepare=_prepare)
        self._clock = clock if clock is not None else WallClock()
        self._incarnation: str | None = None  # as last heard by `pulse`
        self._cells_read = 0
        self._cells_merged = 0

    async def open(self, region: str, *, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        await self._file.open(timeout_s=timeout_s)
        held = (await self.pulse(region, timeout_s=max(0.0, deadline - time.monotonic()))).region
        if held != region:
            raise RegionMismatch(region, held)

    async def read(self, wanted: Sequence[Component], *, timeout_s: float) -> list[Heard]:
        if not wanted:
            return []
        arguments = _arguments(wanted, self._clock.now_ms()) | {"expired_too": False}

        def work(connection: sqlite3.Connection) -> list[Heard]:
            connection.execute("BEGIN")  # both answers from one state of the file
            totals = _numbers(connection, TOTALS, arguments)
            components = _numbers(connection, COMPONENTS, arguments)
            connection.execute("COMMIT")
            return list(map(Heard, totals, components))

        answers = await self._file.run(work, timeout_s=timeout_s)
        self._cells_read += len(wanted)
        return answers

    async def merge(self, components: Sequence[Component], *, timeout_s: float) -> list[Heard]:
        if not components:
            return []
        arguments = _arguments(components, self._clock.now_ms()) | {
            # What had expired before it was merged is answered, and not kept.
            "expired_too": True,
            "rows_max": max(FORGOTTEN_MIN, FORGOTTEN_PER_MERGED * len(components)),
        }

        def work(connection: sqlite3.Connection) -> list[Heard]:
            with transaction(connection):
                before = _numbers(connection, COMPONENTS, arguments)
                connection.execute(MERGE, arguments)
                totals = _numbers(connection, TOTALS, arguments)
                connection.execute(FORGET_EXPIRED, arguments)
            return list(map(Heard, totals, before))

        answers = await self._file.run(work, timeout_s=timeout_s)
        self._cells_merged += len(components)
        return answers

    async def pulse(self, region: str, *, timeout_s: float) -> Pulse:
        claim = (region, secrets.token_hex(8))

        def work(connection: sqlite3.Connection) -> tuple[str, str, bool]:
            query = "SELECT region, incarnation FROM origin_region"
            row = connection.execute(query).fetchone()
            if row is not None:
                return *row, False  # the usual case takes no write lock
            with transaction(connection):
                claimed = connection.execute(
                    "INSERT OR IGNORE INTO origin_region (only, region, incarnation) VALUES (1, ?, ?)", claim
                ).rowcount
                return *connection.execute(query).fetchone(), claimed == 1

        held, incarnation, was_empty = await self._file.run(work, timeout_s=timeout_s)
        # Another process may have been the first to find it empty, and have put the name back already.
        was_empty = was_empty or self._incarnation not in (None, incarnation)
        self._incarnation = incarnation
        return Pulse(held, was_empty, self._clock.now_ms())

    async def close(self) -> None:
        await self._file.close()

    def statistics(self) -> Mapping[str, int]:
        file = self._file.statistics()
        return {
            "commands": file["jobs"],
            "connections_opened": file["connections_opened"],
            "cells_read": self._cells_read,
            "cells_merged": self._cells_merged,
        }
