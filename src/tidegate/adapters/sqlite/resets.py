"""Resets in a SQLite file: a table of its own."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Final

from tidegate.adapters.resets import RESETS_PER_ANSWER, reset_of, subject_of
from tidegate.adapters.sqlite.sharing import NUMBER_MAX
from tidegate.core.resets import Reset, ResetsReply

__all__ = ["RESETS_NUMBER", "RESETS_SCHEMA", "RESETS_TABLES", "answer_resets"]

RESETS_TABLES: Final = ("origin_resets",)
RESETS_SCHEMA: Final = (
    """
    CREATE TABLE IF NOT EXISTS origin_resets (
        subject TEXT PRIMARY KEY, generation INTEGER NOT NULL, number INTEGER NOT NULL, expires_at_ms INTEGER NOT NULL
    ) WITHOUT ROWID
    """,
    "CREATE INDEX IF NOT EXISTS origin_resets_number ON origin_resets (number)",
    "CREATE INDEX IF NOT EXISTS origin_resets_expiry ON origin_resets (expires_at_ms)",
)

RESETS_NUMBER: Final = "SELECT coalesce(max(number), 0) FROM origin_resets"
FOUND: Final = """
    SELECT subject, generation, number FROM origin_resets WHERE number > ? AND expires_at_ms > ? ORDER BY number LIMIT ?
"""
KEEP: Final = """
    INSERT INTO origin_resets VALUES (?, ?, ?, ?)
        ON CONFLICT (subject) DO UPDATE
        SET generation = excluded.generation, number = excluded.number, expires_at_ms = excluded.expires_at_ms
        WHERE excluded.generation > generation
"""
# Not the last one: its number is the last number.
FORGET: Final = """
    DELETE FROM origin_resets WHERE subject IN (
        SELECT subject FROM origin_resets WHERE expires_at_ms <= ? ORDER BY expires_at_ms LIMIT ?)
       AND number < (SELECT max(number) FROM origin_resets)
"""
FORGOTTEN_MAX: Final = 1_000


def answer_resets(
    connection: sqlite3.Connection, known: Sequence[Reset], since: int, now_ms: int
) -> ResetsReply:
    """Inside the caller's transaction, if `known` is not empty."""
    ((number,),) = connection.execute(RESETS_NUMBER)
    if known:
        connection.execute(FORGET, (now_ms, FORGOTTEN_MAX))
    for reset in known:
        if reset.expires_at_ms > now_ms:
            values = (subject_of(reset), reset.generation, max(number + 1, now_ms), reset.expires_at_ms)
            if connection.execute(KEEP, (*values[:3], min(values[3], NUMBER_MAX))).rowcount > 0:
                number = values[2]
    if since > number:
        return ResetsReply(0, [])
    rows = connection.execute(FOUND, (since, now_ms, RESETS_PER_ANSWER + 1)).fetchall()
    more = len(rows) > RESETS_PER_ANSWER
    if more:
        rows = rows[:RESETS_PER_ANSWER]
        number = rows[-1][2]
    resets = [reset_of(subject, generation) for subject, generation, _ in rows]
    return ResetsReply(number, [reset for reset in resets if reset is not None], more)
