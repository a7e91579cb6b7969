"""An origin in a SQLite file: several processes of one machine share it, without any server.

Laws: a merge is one transaction; a read takes no lock; expired cells are invisible at once and deleted a few at a
time by later merges. A statement handles many cells in one step and answers in one row: the driver hands the
interpreter lock over at each step, so that a busy application would otherwise be waited for once per cell.
"""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Final

from tidegate.adapters.clock import WallClock
from tidegate.adapters.deadline import Deadline, loop_time
from tidegate.adapters.sqlite.connection import SQLiteFile, transaction
from tidegate.adapters.sqlite.credit import (
    CREDIT_RULES,
    CREDIT_SCHEMA,
    CREDIT_TABLES,
    Listener,
    answer,
    answer_shares,
    answer_usage,
    ports_of,
)
from tidegate.adapters.sqlite.reserving import RESERVING_SCHEMA, RESERVING_TABLES, answer_claims
from tidegate.adapters.sqlite.resets import RESETS_NUMBER, RESETS_SCHEMA, RESETS_TABLES, answer_resets
from tidegate.adapters.sqlite.sharing import (
    ADDED_COLUMNS,
    SHARING_SCHEMA,
    SHARING_TABLES,
    answer_lease,
    delete_expired,
)
from tidegate.core.grants import CreditReply, CreditRequest, GrantRules
from tidegate.core.model import Component, OriginReply
from tidegate.core.reservations import Claim, ClaimReply
from tidegate.core.resets import Reset, ResetsReply
from tidegate.core.sharing import ImportState, Lease, OriginUsage, Share, ShareReply
from tidegate.errors import ConfigurationError, RegionMismatch
from tidegate.ports import Clock, Pulse

__all__ = ["SQLiteOrigin"]

# The format of the records that this version writes, and the newest that it reads (docs/adr/0015-credit.md).
FORMAT: Final = 1

SCHEMA: Final = (
    """
    CREATE TABLE IF NOT EXISTS origin_components (
        digest BLOB NOT NULL, sequence INTEGER NOT NULL, writer TEXT NOT NULL,
        own INTEGER NOT NULL, expires_at_ms INTEGER NOT NULL,
        PRIMARY KEY (digest, sequence, writer)
    ) WITHOUT ROWID
    """,
    "CREATE INDEX IF NOT EXISTS origin_components_expiry ON origin_components (expires_at_ms)",
    *CREDIT_SCHEMA,
    *SHARING_SCHEMA,
    *RESERVING_SCHEMA,
    *RESETS_SCHEMA,
    """
    CREATE TABLE IF NOT EXISTS origin_region (
        only INTEGER PRIMARY KEY CHECK (only = 1), region TEXT NOT NULL, incarnation TEXT NOT NULL
    )
    """,
)

# The arguments of a call. Cells that share all but subject and count, which most do, are passed as one group: :groups
# is a JSON array of [sequence, writer, expires_at_ms, first, [own, …]], and :digests holds 16 bytes for each cell, in
# the same order. Decoding a value of its own for every cell would cost more than looking the cell up. Answers come
# back in that order because a join reads its left side in the order in which json_each yields it. "LIMIT -1" keeps a
# group from being decoded again for each of its cells ("AS MATERIALIZED" is too new for some systems' SQLite).
CELLS: Final = """
    WITH groups AS (
        SELECT json_extract(value, '$[0]') AS sequence, json_extract(value, '$[1]') AS writer,
               json_extract(value, '$[2]') AS expires_at_ms, json_extract(value, '$[3]') AS first,
               json_extract(value, '$[4]') AS owns
          FROM json_each(:groups) LIMIT -1
    ), cells AS (
        SELECT substr(:digests, (groups.first + item.key) * 16 + 1, 16) AS digest, groups.sequence, groups.writer,
               item.value AS own, groups.expires_at_ms
          FROM groups, json_each(groups.owns) AS item
    )
"""
# Two numbers for each cell: the sum of its components, and that of the asking writer. A sum beyond 64 bits would fail
# the whole statement, for every cell in it; a total in floating point is exact up to 2^53, as far as counts go.
HELD: Final = f"""{CELLS}
    SELECT '[' || group_concat(
        (SELECT CAST(min(total(held.own), 4611686018427387904.0) AS INTEGER) || ',' ||
                coalesce(sum(CASE WHEN held.writer = cells.writer THEN held.own END), 0)
           FROM origin_components AS held
          WHERE held.digest = cells.digest AND held.sequence = cells.sequence AND held.expires_at_ms > :after_ms)
    ) || ']' FROM cells
"""
# What there is of some subjects: [place in :digests, sequence, writer, own] of each component. Most cells that are read
# are new: a read answers with what was found instead of two numbers for each cell.
FOUND: Final = """
    SELECT json_group_array(json_array(place.key, held.sequence, held.writer, held.own))
      FROM json_each(:places) AS place
     CROSS JOIN origin_components AS held ON held.digest = substr(:digests, place.key * 16 + 1, 16)
     WHERE held.expires_at_ms > :now_ms
"""
# "WHERE true" keeps the parser from taking ON CONFLICT for the condition of a join.
MERGE: Final = f"""{CELLS}
    INSERT INTO origin_components (digest, sequence, writer, own, expires_at_ms)
    SELECT digest, sequence, writer, own, expires_at_ms FROM cells WHERE true
        ON CONFLICT (digest, sequence, writer) DO UPDATE SET own = excluded.own WHERE excluded.own > own
"""
DELETE_EXPIRED: Final = """
    DELETE FROM origin_components WHERE (digest, sequence, writer) IN (
        SELECT digest, sequence, writer FROM origin_components
         WHERE expires_at_ms <= :now_ms ORDER BY expires_at_ms LIMIT :rows_max)
"""

# About ten million live cells.
FILE_BYTES_MAX: Final = 1_073_741_824
# Cells in one statement: about 0.1 ms. Requests wait that long for the thread that writes. With 250 the p99 of a server
# on one core was twice as high.
STATEMENT_CELLS: Final = 64
# Subjects in one statement that reads. Requests wait for it: fewer statements are sooner done.
READ_CELLS: Final = 250
# Cells that are put in order between two rests: some 20 µs, in which the interpreter is not free.
ORDER_CELLS: Final = 100
# A large merge rests between two statements, this many times as long as it has worked: it then takes about a quarter
# of the core that it may share with requests, instead of whole slices of the system's scheduler.
RESTS: Final = 2.5
REST_S_MAX: Final = 0.005
# What had expired before it was merged is answered, and not kept.
BEFORE_ALL_MS: Final = -1
NOTHING: Final = OriginReply(0, 0)
# `OriginReply(*pair)` without a call of a Python function for each cell.
new_reply: Final = partial(tuple.__new__, OriginReply)
# Expired components deleted by each merge, for every one merged: more than one, or a backlog would never shrink.
EXPIRED_ROWS_PER_MERGED: Final = 2
EXPIRED_ROWS_MIN: Final = 100


def _prepare(connection: sqlite3.Connection) -> None:
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    if found > FORMAT:
        raise ConfigurationError(
            f"the file is used by a newer version of Tidegate (record format {found}; this one knows {FORMAT}); "
            "update this node, or give it another file"
        )
    names = ["origin_components", "origin_region", *CREDIT_TABLES, *SHARING_TABLES]
    names += [*RESERVING_TABLES, *RESETS_TABLES]
    known = connection.execute(
        f"SELECT count(*) FROM sqlite_master WHERE name IN ({','.join('?' * len(names))})", names
    ).fetchone()[0]
    if known == len(names) and not _missing_columns(connection):
        return  # the usual case takes no write lock
    with transaction(connection):
        for statement in SCHEMA:
            connection.execute(statement)
        for table, column in _missing_columns(connection):
            connection.execute(f"ALTER TABLE {table} ADD COLUMN {column} INTEGER NOT NULL DEFAULT -1")


def _missing_columns(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    """Columns that this file, of an earlier version, does not have."""
    return [
        (table, column)
        for table, column in ADDED_COLUMNS
        if not connection.execute(
            "SELECT 1 FROM pragma_table_info(?) WHERE name = ?", (table, column)
        ).fetchone()
    ]


class _Statement:
    """Some components of a call, as the arguments of a statement. `positions` says where they stand in the call, in
    the order of the answers; `has_twins`, whether a cell stands twice among them."""

    __slots__ = ("_arguments", "has_twins", "owns", "positions")

    def __init__(self, components: Sequence[Component], positions: list[int]) -> None:
        if len({components[position].sequence for position in positions}) > 1:  # few and large groups
            positions = sorted(positions, key=lambda position: components[position].sequence)
        digests, sequences, writers, owns, expiries = zip(
            *[components[position] for position in positions], strict=True
        )
        self.positions: list[int] = positions
        self.owns: tuple[int, ...] = owns
        self.has_twins: bool = len({*zip(digests, sequences, strict=True)}) < len(positions)
        groups: list[tuple[int, str, int, int, tuple[int, ...]]] = []
        first = 0
        for group, together in groupby(zip(sequences, writers, expiries, strict=True)):
            end = first + len(list(together))
            groups.append((*group, first, owns[first:end]))
            first = end
        self._arguments = {
            "digests": b"".join(digests),
            "groups": json.dumps(groups, separators=(",", ":")),
        }

    def held(self, connection: sqlite3.Connection, after_ms: int) -> tuple[list[int], list[int]]:
        """The total and the writer's component of each cell, of what expires after `after_ms`."""
        row = connection.execute(HELD, self._arguments | {"after_ms": after_ms}).fetchone()
        numbers: list[int] = json.loads(row[0])
        return numbers[::2], numbers[1::2]

    def merge(self, connection: sqlite3.Connection) -> None:
        connection.execute(MERGE, self._arguments)


class _Pace:
    """Rests of a large merge, in proportion to the time that its thread has had of a core."""

    __slots__ = ("_is_needed", "_worked_s")

    def __init__(self, cells: int) -> None:
        self._is_needed = cells > STATEMENT_CELLS
        self._worked_s = time.thread_time()

    def rest(self) -> None:
        if self._is_needed:
            time.sleep(min(REST_S_MAX, RESTS * (time.thread_time() - self._worked_s)))
            self._worked_s = time.thread_time()


def _statements(components: Sequence[Component], pace: _Pace) -> Iterator[_Statement]:
    """In the order of the table: SQLite then goes from page to page, and finds most cells beside the last one."""
    # Put in order in parts: to sort or to copy ten thousand at once would keep the interpreter for milliseconds.
    parts: list[list[int]] = [[] for _ in range(256)]
    for start in range(0, len(components), ORDER_CELLS):
        for position in range(start, min(start + ORDER_CELLS, len(components))):
            parts[components[position].digest[0]].append(position)
        pace.rest()
    some: list[int] = []
    for part in parts:
        part.sort(key=lambda position: components[position].digest)
        for position in part:
            # Not between two components of a cell: `has_twins` has to see both.
            if len(some) >= STATEMENT_CELLS and components[some[-1]].digest != components[position].digest:
                yield _Statement(components, some)
                some = []
            some.append(position)
    if some:
        yield _Statement(components, some)


def _read(connection: sqlite3.Connection, wanted: Sequence[Component], now_ms: int) -> list[OriginReply]:
    """Totals, and each writer's component."""
    # In the order of the table, as in `_statements`.
    digests = sorted({component.digest for component in wanted})
    found: dict[tuple[bytes, int], list[tuple[str, int]]] = {}
    for start in range(0, len(digests), READ_CELLS):
        some = digests[start : start + READ_CELLS]
        places = "[" + ",".join(["0"] * len(some)) + "]"
        arguments = {"digests": b"".join(some), "places": places, "now_ms": now_ms}
        for place, sequence, writer, own in json.loads(connection.execute(FOUND, arguments).fetchone()[0]):
            found.setdefault((some[place], sequence), []).append((writer, own))
    if not found:
        return [NOTHING] * len(wanted)
    answers: list[OriginReply] = []
    for component in wanted:
        held = found.get((component.digest, component.sequence), ())
        mine = sum(own for writer, own in held if writer == component.writer)
        answers.append(OriginReply(sum(own for _, own in held), mine))
    return answers


def _merge(connection: sqlite3.Connection, components: Sequence[Component], now_ms: int) -> list[OriginReply]:
    """Totals after the merge, each writer's component before it."""
    pace = _Pace(len(components))
    statements: list[_Statement] = []
    answers = [NOTHING] * len(components)
    for statement in _statements(components, pace):
        pace.rest()
        statements.append(statement)
        totals, held = statement.held(connection, now_ms)
        if totals == held:  # no other node counts in these cells
            totals = list(map(max, totals, statement.owns))
        else:
            totals = [
                total + max(0, own - before)
                for total, own, before in zip(totals, statement.owns, held, strict=True)
            ]
        for position, pair in zip(statement.positions, zip(totals, held, strict=True), strict=True):
            answers[position] = new_reply(pair)
    for statement in statements:
        pace.rest()
        statement.merge(connection)
    for statement in statements:
        if statement.has_twins:
            # The total of a cell that stands twice in one call must be read again.
            totals, _ = statement.held(connection, BEFORE_ALL_MS)
            for position, total in zip(statement.positions, totals, strict=True):
                answers[position] = OriginReply(total, answers[position].component)
    return answers


class SQLiteOrigin:
    """Implements `tidegate.ports.Origin` for all processes that open the file at `path`."""

    def __init__(
        self, path: str | os.PathLike[str], *, clock: Clock | None = None, bytes_max: int = FILE_BYTES_MAX
    ) -> None:
        """`bytes_max`: beyond it merges fail, and nodes keep their counts in memory until cells have expired."""

        def prepare(connection: sqlite3.Connection) -> None:
            (page_bytes,) = connection.execute("PRAGMA page_size").fetchone()
            connection.execute(f"PRAGMA max_page_count={max(1, bytes_max // page_bytes):d}")
            _prepare(connection)

        self._file = SQLiteFile(path, prepare=prepare)
        # A connection and a thread of its own: a read must not wait for the transactions queued before it.
        self._reader = SQLiteFile(path, prepare=prepare)
        self._clock = clock if clock is not None else WallClock()
        self._incarnation: str | None = None  # as `pulse` last read it
        self._cells_read = 0
        self._cells_merged = 0
        self._messages = 0
        self._shares = 0
        self._listener = Listener()

    async def open(self, region: str, *, timeout_s: float) -> None:
        deadline = Deadline.after(timeout_s, loop_time())
        await self._file.open(timeout_s=timeout_s)
        held = (await self.pulse(region, timeout_s=deadline.remaining(loop_time()))).region
        if held != region:
            raise RegionMismatch(region, held)

    async def read(self, wanted: Sequence[Component], *, timeout_s: float) -> list[OriginReply]:
        if not wanted:
            return []
        now_ms = self._clock.now_ms()

        def work(connection: sqlite3.Connection) -> list[OriginReply]:
            connection.execute("BEGIN")  # all answers from one state of the file
            answers = _read(connection, wanted, now_ms)
            connection.execute("COMMIT")
            return answers

        answers = await self._reader.run(work, timeout_s=timeout_s)
        self._cells_read += len(wanted)
        return answers

    async def merge(self, components: Sequence[Component], *, timeout_s: float) -> list[OriginReply]:
        if not components:
            return []
        now_ms = self._clock.now_ms()
        expired_max = max(EXPIRED_ROWS_MIN, EXPIRED_ROWS_PER_MERGED * len(components))

        def work(connection: sqlite3.Connection) -> list[OriginReply]:
            with transaction(connection):
                answers = _merge(connection, components, now_ms)
                connection.execute(DELETE_EXPIRED, {"now_ms": now_ms, "rows_max": expired_max})
            return answers

        answers = await self._file.run(work, timeout_s=timeout_s)
        self._cells_merged += len(components)
        return answers

    async def exchange(self, requests: Sequence[CreditRequest], *, timeout_s: float) -> list[CreditReply]:
        """Answer each message (`core.grants.grant`), in the order of the arguments, in one transaction.

        Recalls are sent to the processes that hold credit, which `listen`.
        """
        if not requests:
            return []
        now_ms = self._clock.now_ms()

        def work(connection: sqlite3.Connection) -> tuple[list[CreditReply], list[tuple[int, bytes]]]:
            with transaction(connection):
                replies, recalls = answer(connection, requests, now_ms)
                expired_max = max(EXPIRED_ROWS_MIN, EXPIRED_ROWS_PER_MERGED * len(requests))
                connection.execute(DELETE_EXPIRED, {"now_ms": now_ms, "rows_max": expired_max})
                delete_expired(connection, now_ms, EXPIRED_ROWS_PER_MERGED * len(requests))
            return replies, ports_of(connection, recalls)

        replies, sendings = await self._file.run(work, timeout_s=timeout_s)
        for port, payload in sendings:
            self._listener.send(port, payload)
        self._messages += len(requests)
        return replies

    async def share(self, shares: Sequence[Share], *, timeout_s: float) -> list[ShareReply]:
        if not shares:
            return []
        now_ms = self._clock.now_ms()

        def work(connection: sqlite3.Connection) -> tuple[list[ShareReply], list[tuple[int, bytes]]]:
            with transaction(connection):
                replies, recalls = answer_shares(connection, shares, now_ms)
                delete_expired(connection, now_ms, EXPIRED_ROWS_PER_MERGED * len(shares))
            return replies, ports_of(connection, recalls)

        replies, sendings = await self._file.run(work, timeout_s=timeout_s)
        for port, payload in sendings:
            self._listener.send(port, payload)
        self._shares += len(shares)
        return replies

    async def usage(self, digest: bytes, sequence: int, *, timeout_s: float) -> OriginUsage:
        now_ms = self._clock.now_ms()
        return await self._reader.run(
            lambda connection: answer_usage(connection, digest, sequence, now_ms), timeout_s=timeout_s
        )

    async def claim(self, claims: Sequence[Claim], *, timeout_s: float) -> list[ClaimReply]:
        if not claims:
            return []
        now_ms = self._clock.now_ms()

        def work(connection: sqlite3.Connection) -> list[ClaimReply]:
            with transaction(connection):
                return answer_claims(connection, claims, now_ms)

        return await self._file.run(work, timeout_s=timeout_s)

    async def lease(
        self,
        node_id: str,
        *,
        life_ms: int,
        state: ImportState | None = None,
        has_lost: bool = False,
        timeout_s: float,
    ) -> Lease:
        now_ms = self._clock.now_ms()

        def work(connection: sqlite3.Connection) -> Lease:
            with transaction(connection):
                return answer_lease(connection, node_id, life_ms, state, has_lost, now_ms)

        return await self._file.run(work, timeout_s=timeout_s)

    async def resets(self, known: Sequence[Reset], *, since: int, timeout_s: float) -> ResetsReply:
        now_ms = self._clock.now_ms()

        def work(connection: sqlite3.Connection) -> ResetsReply:
            if not known:
                return answer_resets(connection, known, since, now_ms)  # the usual case takes no write lock
            with transaction(connection):
                return answer_resets(connection, known, since, now_ms)

        return await self._file.run(work, timeout_s=timeout_s)

    async def listen(self, node_id: str, on_recall: Callable[[bytes, str], None]) -> None:
        """Call `on_recall(digest, writer)` for each request to give credit back, until cancelled."""
        await self._listener.run(self._file, self._clock, node_id, on_recall)

    @property
    def can_be_recalled(self) -> bool:
        return self._listener.is_listening

    @property
    def rules(self) -> GrantRules:
        return CREDIT_RULES

    async def pulse(self, region: str, *, timeout_s: float) -> Pulse:
        claim = (region, secrets.token_hex(8))

        def work(connection: sqlite3.Connection) -> tuple[str, str, bool, int]:
            ((number,),) = connection.execute(RESETS_NUMBER)
            query = "SELECT region, incarnation FROM origin_region"
            row = connection.execute(query).fetchone()
            if row is not None:
                return *row, False, number  # the usual case takes no write lock
            with transaction(connection):
                claimed = connection.execute(
                    "INSERT OR IGNORE INTO origin_region (only, region, incarnation) VALUES (1, ?, ?)", claim
                ).rowcount
                return *connection.execute(query).fetchone(), claimed == 1, number

        # By the reader: a large merge takes longer than a pulse may, and a file that is busy is not one that is down.
        held, incarnation, was_empty, number = await self._reader.run(work, timeout_s=timeout_s)
        # Another process may have been the first to find it empty, and have put the name back already.
        was_empty = was_empty or self._incarnation not in (None, incarnation)
        self._incarnation = incarnation
        return Pulse(held, was_empty, self._clock.now_ms(), number)

    async def close(self) -> None:
        self._listener.close()
        await self._reader.close()
        await self._file.close()

    def statistics(self) -> Mapping[str, int]:
        files = (self._file.statistics(), self._reader.statistics())
        return {
            "commands": sum(file["jobs"] for file in files),
            "connections_opened": sum(file["connections_opened"] for file in files),
            "cells_read": self._cells_read,
            "cells_merged": self._cells_merged,
            "messages": self._messages,
            "shares": self._shares,
        }
