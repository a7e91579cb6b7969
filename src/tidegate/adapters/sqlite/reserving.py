"""Reservations in a SQLite file: the rule of `core.reservations` inside a transaction.

A reservation is a row of `origin_holds`, as credit is. That one has ended is a row of a table of its own.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Final

from tidegate.adapters.sqlite.sharing import NUMBER_MAX, cell_expires_at_ms
from tidegate.core.generations import cell_name
from tidegate.core.grants import Hold, SubjectRecord
from tidegate.core.reservations import ENDED, HELD, SETTLED_WRITER, Claim, ClaimReply, claim

__all__ = ["RESERVING_SCHEMA", "RESERVING_TABLES", "answer_claims"]

RESERVING_TABLES: Final = ("origin_ended",)
RESERVING_SCHEMA: Final = (
    """
    CREATE TABLE IF NOT EXISTS origin_ended (
        digest BLOB NOT NULL, holder TEXT NOT NULL, expires_at_ms INTEGER NOT NULL, PRIMARY KEY (digest, holder)
    ) WITHOUT ROWID
    """,
    "CREATE INDEX IF NOT EXISTS origin_ended_expiry ON origin_ended (expires_at_ms)",
)

HOLDS: Final = """
    SELECT writer, number, spare, firm, firm_until_ms, quota, expires_at_ms, recalled_at_ms FROM origin_holds
     WHERE digest = ? AND expires_at_ms > ?
"""
TOTAL: Final = """
    SELECT CAST(min(total(own), 4611686018427387904.0) AS INTEGER) FROM origin_components
     WHERE digest = ? AND sequence = ? AND expires_at_ms > ?
"""
KEEP: Final = """
    UPDATE origin_holds SET spare = ?, firm = ?, firm_until_ms = ?, quota = ?, expires_at_ms = ?, recalled_at_ms = ?
     WHERE digest = ? AND writer = ?
"""
DROP: Final = "DELETE FROM origin_holds WHERE digest = ? AND writer = ?"
COUNT: Final = """
    INSERT INTO origin_components (digest, sequence, writer, own, expires_at_ms) VALUES (?, ?, ?, ?, ?)
        ON CONFLICT (digest, sequence, writer) DO UPDATE SET own = min(own + excluded.own, 9007199254740992)
"""
END: Final = "INSERT OR REPLACE INTO origin_ended VALUES (?, ?, ?)"
WAS_ENDED: Final = "SELECT 1 FROM origin_ended WHERE digest = ? AND holder = ? AND expires_at_ms > ?"
FORGET: Final = """
    DELETE FROM origin_ended WHERE (digest, holder) IN (
        SELECT digest, holder FROM origin_ended WHERE expires_at_ms <= ? ORDER BY expires_at_ms LIMIT ?)
"""
# Forgotten with each claim: more than one, or a backlog would never shrink.
FORGOTTEN_PER_CLAIM: Final = 2


def answer_claims(connection: sqlite3.Connection, claims: Sequence[Claim], now_ms: int) -> list[ClaimReply]:
    """Keep or end reservations, inside the caller's transaction."""
    connection.execute(FORGET, (now_ms, FORGOTTEN_PER_CLAIM * len(claims)))
    return [_answer(connection, entry, now_ms) for entry in claims]


def _answer(connection: sqlite3.Connection, original: Claim, now_ms: int) -> ClaimReply:
    entry = original._replace(amount=min(original.amount, NUMBER_MAX))
    digest, holder = entry.digest, entry.holder
    record = SubjectRecord()
    for writer, *numbers in connection.execute(HOLDS, (digest, now_ms)):
        record.holds[writer] = Hold(*numbers)
    name = cell_name(entry.sequence, entry.generation, entry.duration_ms)
    ((total,),) = connection.execute(TOTAL, (digest, name, now_ms))
    record.cell(name).total = total
    was_ended = connection.execute(WAS_ENDED, (digest, holder, now_ms)).fetchone() is not None
    was_held = holder in record.holds
    reply = claim(record, entry, was_ended, now_ms)
    if reply.state == HELD:
        hold = record.holds[holder]
        until_ms = min(hold.expires_at_ms, NUMBER_MAX)
        values = (hold.spare, hold.firm, until_ms, hold.quota, until_ms, hold.recalled_at_ms)
        connection.execute(KEEP, (*values, digest, holder))
    elif was_held and not was_ended:
        connection.execute(DROP, (digest, holder))
    if reply.state == ENDED:
        connection.execute(END, (digest, holder, min(now_ms + entry.life_ms, NUMBER_MAX)))
        if entry.amount > 0:
            expires_at_ms = cell_expires_at_ms(name, entry.duration_ms)
            connection.execute(COUNT, (digest, name, SETTLED_WRITER, entry.amount, expires_at_ms))
    return reply
