"""Credit in a SQLite file: the holds beside the components, the rule of `core.grants` inside a transaction.

A file cannot push. The processes that share it run on one machine, so a recall is a datagram on the loopback interface:
each process writes its port into the file, with a secret that its datagrams must begin with. A datagram that is lost or
forged costs a message, never a count: a holder that does not answer is not waited for, and its credit ends by itself.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final

from tidegate.adapters.sqlite.connection import SQLiteFile, transaction
from tidegate.adapters.sqlite.sharing import (
    NUMBER_MAX,
    cell_expires_at_ms,
    load_foreign,
    store_foreign,
    store_mark,
)
from tidegate.core.generations import cell_name
from tidegate.core.grants import (
    CellPart,
    CellRecord,
    CreditReply,
    CreditRequest,
    GrantRules,
    Hold,
    SubjectRecord,
    grant,
    share,
)
from tidegate.core.reservations import usage_of
from tidegate.core.sharing import Mark, OriginUsage, Share, ShareReply
from tidegate.errors import DependencyError
from tidegate.ports import Clock

__all__ = [
    "CREDIT_RULES",
    "CREDIT_SCHEMA",
    "CREDIT_TABLES",
    "Listener",
    "answer",
    "answer_shares",
    "answer_usage",
    "ports_of",
]

# Reports take a fifth of the time at most: workers that start under load have thousands of subjects to ask for, and
# each of them is reported too. A message costs as much CPU as ten requests and a recall little: a first one asks for
# more in advance than in Redis.
CREDIT_RULES: Final = GrantRules(report_rests=4, advance=16)

CREDIT_TABLES: Final = ("origin_holds", "origin_listeners", "origin_records")
CREDIT_SCHEMA: Final = (
    """
    CREATE TABLE IF NOT EXISTS origin_holds (
        digest BLOB NOT NULL, writer TEXT NOT NULL, number INTEGER NOT NULL, spare INTEGER NOT NULL,
        firm INTEGER NOT NULL, firm_until_ms INTEGER NOT NULL, quota INTEGER NOT NULL,
        expires_at_ms INTEGER NOT NULL, recalled_at_ms INTEGER NOT NULL, subject_recalled_at_ms INTEGER NOT NULL,
        PRIMARY KEY (digest, writer)
    ) WITHOUT ROWID
    """,
    "CREATE INDEX IF NOT EXISTS origin_holds_expiry ON origin_holds (expires_at_ms)",
    """
    CREATE TABLE IF NOT EXISTS origin_listeners (
        node TEXT PRIMARY KEY, port INTEGER NOT NULL, secret BLOB NOT NULL, seen_at_ms INTEGER NOT NULL
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE IF NOT EXISTS origin_records (
        digest BLOB NOT NULL, sequence INTEGER NOT NULL, id INTEGER NOT NULL, returned INTEGER NOT NULL,
        expires_at_ms INTEGER NOT NULL,
        PRIMARY KEY (digest, sequence)
    ) WITHOUT ROWID
    """,
    "CREATE INDEX IF NOT EXISTS origin_records_expiry ON origin_records (expires_at_ms)",
)

# The base of a cell, and what evicted lives had counted, are rows like any component, for the sums. No node has such a
# name.
BASE: Final = "!base"
RETIRED: Final = "!retired"

# All that is kept of a subject, as rows of one statement, which costs half as much as one for each table. The first
# column says what a row is: a total, a component, a record, what the ledger holds, a mark, a hold. Components are those
# of all lives of a node: "~" comes after its id, and "\x7f" after "~".
TOTAL, COMPONENT, RECORD, FOREIGN, MARK, HOLD = range(6)
LOAD: Final = f"""
    SELECT {TOTAL}, sequence, CAST(min(total(own), 4611686018427387904.0) AS INTEGER), 0, 0, 0, 0, 0, 0, 0
      FROM origin_components WHERE digest = :digest AND sequence BETWEEN :first AND :last AND expires_at_ms > :now_ms
     GROUP BY sequence
     UNION ALL
    SELECT {COMPONENT}, sequence, writer, own, 0, 0, 0, 0, 0, 0
      FROM origin_components WHERE digest = :digest AND sequence BETWEEN :first AND :last AND expires_at_ms > :now_ms
       AND (writer IN (:node, '{BASE}') OR (writer > :node || '~' AND writer < :node || char(127)))
     UNION ALL
    SELECT {RECORD}, sequence, id, returned, 0, 0, 0, 0, 0, 0
      FROM origin_records WHERE digest = :digest AND sequence BETWEEN :first AND :last AND expires_at_ms > :now_ms
     UNION ALL
    SELECT {FOREIGN}, sequence, region, count, learned_at_ms, 0, 0, 0, 0, 0
      FROM origin_foreign WHERE digest = :digest AND sequence BETWEEN :first AND :last AND expires_at_ms > :now_ms
     UNION ALL
    SELECT {MARK}, sequence, published, assigned, owner, until_ms, epoch, 0, 0, 0
      FROM origin_marks WHERE digest = :digest AND sequence BETWEEN :first AND :last AND expires_at_ms > :now_ms
     UNION ALL
    SELECT {HOLD}, subject_recalled_at_ms, writer, number, spare, firm, firm_until_ms, quota, expires_at_ms,
           recalled_at_ms
      FROM origin_holds WHERE digest = :digest AND expires_at_ms > :now_ms
"""
PUT_COMPONENT: Final = """
    INSERT INTO origin_components (digest, sequence, writer, own, expires_at_ms) VALUES (?, ?, ?, ?, ?)
        ON CONFLICT (digest, sequence, writer) DO UPDATE SET own = excluded.own
"""
RETIRE: Final = """
    INSERT INTO origin_components (digest, sequence, writer, own, expires_at_ms) VALUES (?, ?, ?, ?, ?)
        ON CONFLICT (digest, sequence, writer) DO UPDATE SET own = own + excluded.own
"""
DROP_COMPONENT: Final = "DELETE FROM origin_components WHERE digest = ? AND sequence = ? AND writer = ?"
PUT_RECORD: Final = "INSERT OR REPLACE INTO origin_records VALUES (?, ?, ?, ?, ?)"
FORGET_RECORDS: Final = """
    DELETE FROM origin_records WHERE (digest, sequence) IN (
        SELECT digest, sequence FROM origin_records WHERE expires_at_ms <= ? ORDER BY expires_at_ms LIMIT ?)
"""
PUT_HOLD: Final = "INSERT OR REPLACE INTO origin_holds VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
FORGET_HOLDS: Final = """
    DELETE FROM origin_holds WHERE (digest, writer) IN (
        SELECT digest, writer FROM origin_holds WHERE expires_at_ms <= ? ORDER BY expires_at_ms LIMIT ?)
"""
# Expired holds deleted with each call, for every message: more than one, or a backlog would never shrink.
FORGOTTEN_PER_MESSAGE: Final = 2
SECRET_BYTES: Final = 16
DIGEST_BYTES: Final = 16
# How often a process confirms its port, and when one that did not is forgotten.
CONFIRM_INTERVAL_S: Final = 5.0
FORGOTTEN_AFTER_MS: Final = 60_000
CONFIRM_TIMEOUT_S: Final = 5.0


def answer(
    connection: sqlite3.Connection, requests: Sequence[CreditRequest], now_ms: int
) -> tuple[list[CreditReply], list[tuple[bytes, str]]]:
    """Answer messages inside the caller's transaction; and (digest, writer) of the holds that must be asked back."""
    replies: list[CreditReply] = []
    recalls: list[tuple[bytes, str]] = []
    for forget in (FORGET_HOLDS, FORGET_RECORDS):
        connection.execute(forget, (now_ms, FORGOTTEN_PER_MESSAGE * len(requests)))
    for original in requests:
        request = _cut(original)
        names = [cell_name(part.sequence, request.generation, request.duration_ms) for part in request.cells]
        following = cell_name(request.cells[0].sequence + 1, request.generation, request.duration_ms)
        last = max(*names, following)
        record = _load(connection, request.digest, request.writer, min(names), last, now_ms)
        before = {sequence: cell.copied() for sequence, cell in record.cells.items()}
        reply, recalled = grant(record, request, now_ms, CREDIT_RULES)
        _store(connection, before, record, request, names, reply, recalled)
        recalls += [(request.digest, writer) for writer in recalled]
        replies.append(reply if request is original else _restored(original, reply))
    return replies, recalls


def _cut(request: CreditRequest) -> CreditRequest:
    """Numbers that the file holds exactly."""
    if max(request.quota, request.want, request.held, *map(max, request.cells)) < NUMBER_MAX:
        return request
    cells = tuple(
        CellPart(part.sequence, *[min(number, NUMBER_MAX) for number in part[1:]]) for part in request.cells
    )
    return request._replace(
        cells=cells,
        quota=min(request.quota, NUMBER_MAX),
        want=min(request.want, NUMBER_MAX),
        held=min(request.held, NUMBER_MAX),
    )


def _restored(request: CreditRequest, reply: CreditReply) -> CreditReply:
    """The answer for those who counted more than the file holds: all of their own is held."""
    cells = []
    for part, totals in zip(request.cells, reply.cells, strict=True):
        if part.own > NUMBER_MAX:
            others = totals.total - max(totals.component, NUMBER_MAX)
            component = totals.component if totals.component < NUMBER_MAX else part.own
            cells.append(totals._replace(total=others + part.own, component=component))
        else:
            cells.append(totals)
    return reply._replace(cells=tuple(cells))


def answer_shares(
    connection: sqlite3.Connection, shares: Sequence[Share], now_ms: int
) -> tuple[list[ShareReply], list[tuple[bytes, str]]]:
    """Keep what the ledger holds, inside the caller's transaction; and the holds that must be asked back."""
    replies: list[ShareReply] = []
    recalls: list[tuple[bytes, str]] = []
    for original in shares:
        entry = original._replace(counted=min(original.counted, NUMBER_MAX))
        digest = entry.digest
        names = [
            cell_name(entry.sequence + ahead, entry.generation, entry.duration_ms) for ahead in (-1, 0, 1)
        ]
        record = _load(connection, digest, "", min(names), max(names), now_ms)
        reply, recalled = share(record, entry, now_ms, CREDIT_RULES)
        replies.append(reply)
        if names[1] not in record.cells:
            continue
        if entry.region and entry.counted:
            store_foreign(connection, record, entry)
        store_mark(connection, record, digest, names[1], entry.duration_ms)
        # Any row holds the time of the subject's last recall, also if no holder had something to give back.
        _store_holds(connection, record, digest, recalled or list(record.holds)[:1])
        recalls += [(digest, writer) for writer in recalled]
    return replies, recalls


def answer_usage(connection: sqlite3.Connection, digest: bytes, sequence: int, now_ms: int) -> OriginUsage:
    """What was counted in a cell, here and by other regions, and what is reserved."""
    return usage_of(_load(connection, digest, "", sequence, sequence, now_ms), sequence, now_ms)


def _load(
    connection: sqlite3.Connection, digest: bytes, writer: str, first: int, last: int, now_ms: int
) -> SubjectRecord:
    """The cells with names from `first` to `last`, with the components of one node, and all holds."""
    record = SubjectRecord()
    arguments = {
        "digest": digest,
        "first": first,
        "last": last,
        "now_ms": now_ms,
        "node": writer.partition("~")[0],
    }
    # In the order of the statement: cells that nothing was counted in have no record.
    for kind, sequence, *values in connection.execute(LOAD, arguments):
        if kind == HOLD:
            name, *numbers = values
            record.holds[name] = Hold(*numbers)
            record.recalled_at_ms = max(record.recalled_at_ms, sequence)
        elif kind == TOTAL:
            record.cell(sequence).total = values[0]
        elif kind == COMPONENT:
            name, own = values[:2]
            if name == BASE:
                record.cells[sequence].base = own
            else:
                record.cells[sequence].components[name] = own
        elif kind == RECORD:
            if sequence in record.cells:
                record.cells[sequence].id, record.cells[sequence].returned = values[:2]
        elif kind == FOREIGN:
            load_foreign(record.cell(sequence), *values[:3])
        else:
            record.cell(sequence).mark = Mark(*values[:5])
    return record


def _store(
    connection: sqlite3.Connection,
    before: Mapping[int, CellRecord],
    record: SubjectRecord,
    request: CreditRequest,
    names: Sequence[int],
    reply: CreditReply,
    recalled: Sequence[str],
) -> None:
    digest, writer = request.digest, request.writer
    for sequence in set(names) & record.cells.keys():
        cell, old = record.cells[sequence], before.get(sequence) or CellRecord()
        expires_at_ms = cell_expires_at_ms(sequence, request.duration_ms)
        for gone in old.components.keys() - cell.components.keys():
            connection.execute(DROP_COMPONENT, (digest, sequence, gone))
            connection.execute(RETIRE, (digest, sequence, RETIRED, old.components[gone], expires_at_ms))
        counts = [*cell.components.items(), (BASE, cell.base)]
        for one, own in counts:
            if own != (old.base if one == BASE else old.components.get(one, -1)):
                connection.execute(PUT_COMPONENT, (digest, sequence, one, own, expires_at_ms))
        if (cell.id, cell.returned) != (old.id, old.returned):
            connection.execute(PUT_RECORD, (digest, sequence, cell.id, cell.returned, expires_at_ms))
    for name, totals in zip(names, reply.cells, strict=True):
        if totals.due:
            store_mark(connection, record, digest, name, request.duration_ms)
    # The writer's own row always holds the time of the subject's last recall: it is the row that lives longest.
    _store_holds(connection, record, digest, (writer, *recalled))


def _store_holds(
    connection: sqlite3.Connection, record: SubjectRecord, digest: bytes, writers: Sequence[str]
) -> None:
    for name in writers:
        hold = record.holds[name]
        connection.execute(
            PUT_HOLD,
            (
                digest,
                name,
                hold.number,
                hold.spare,
                hold.firm,
                hold.firm_until_ms,
                hold.quota,
                min(hold.expires_at_ms, NUMBER_MAX),
                hold.recalled_at_ms,
                record.recalled_at_ms,
            ),
        )


def ports_of(connection: sqlite3.Connection, recalls: Sequence[tuple[bytes, str]]) -> list[tuple[int, bytes]]:
    """(port, datagram) of each recall whose holder listens."""
    found = []
    for digest, writer in recalls:
        query = "SELECT port, secret FROM origin_listeners WHERE node = ?"
        row = connection.execute(query, (writer.partition("~")[0],)).fetchone()
        if row is not None:
            found.append((row[0], row[1] + digest + writer.encode()))
    return found


class Listener(asyncio.DatagramProtocol):
    """The loopback port of one node: receives recalls, and sends them to others."""

    def __init__(self) -> None:
        self.is_listening: bool = False
        self._secret = b""
        self._on_recall: Callable[[bytes, str], None] | None = None
        self._sender: socket.socket | None = None

    def send(self, port: int, payload: bytes) -> None:
        """Ask another process. Never waits; what is lost is asked for again."""
        if self._sender is None:
            self._sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            self._sender.setblocking(False)
        with suppress(OSError):
            self._sender.sendto(payload, ("127.0.0.1", port))

    async def run(
        self, file: SQLiteFile, clock: Clock, node_id: str, on_recall: Callable[[bytes, str], None]
    ) -> None:
        """Listen until cancelled; the file names the port as long as that lasts."""
        loop = asyncio.get_running_loop()
        self._secret = secrets.token_bytes(SECRET_BYTES)
        self._on_recall = on_recall
        try:
            transport, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=("127.0.0.1", 0))
        except OSError:
            # No loopback: this process cannot be recalled, so it asks for nothing in advance.
            await loop.create_future()
            return
        port: int = transport.get_extra_info("sockname")[1]
        try:
            while True:
                self.is_listening = await self._confirm(file, clock, node_id, port)
                await asyncio.sleep(CONFIRM_INTERVAL_S)
        finally:
            self.is_listening = False
            transport.close()

    async def _confirm(self, file: SQLiteFile, clock: Clock, node_id: str, port: int) -> bool:
        """Write the port: also after the file was lost. False while that is not possible."""
        now_ms = clock.now_ms()
        row = (node_id, port, self._secret, now_ms)

        def work(connection: sqlite3.Connection) -> None:
            with transaction(connection):
                connection.execute("INSERT OR REPLACE INTO origin_listeners VALUES (?, ?, ?, ?)", row)
                connection.execute(
                    "DELETE FROM origin_listeners WHERE seen_at_ms < ?", (now_ms - FORGOTTEN_AFTER_MS,)
                )

        try:
            await file.run(work, timeout_s=CONFIRM_TIMEOUT_S)
        except DependencyError:
            return False
        return True

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    # ---- asyncio.DatagramProtocol

    def datagram_received(self, data: bytes, addr: tuple[str | object, int]) -> None:
        secret, digest = data[:SECRET_BYTES], data[SECRET_BYTES : SECRET_BYTES + DIGEST_BYTES]
        writer = data[SECRET_BYTES + DIGEST_BYTES :]
        if not writer or not hmac.compare_digest(secret, self._secret) or self._on_recall is None:
            return
        with suppress(UnicodeDecodeError):
            self._on_recall(digest, writer.decode())
