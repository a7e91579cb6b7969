"""A lane to MySQL or MariaDB, by asyncmy.

`execute` and `fetch` take native `?` placeholders and run as prepared statements, so that no value is ever quoted by
us. `script` sends several statements in one packet: the server works through them without waiting for us, which is
one round trip instead of many and leaves no moment at which a client that hangs could hold locks.

Sessions are strict (what does not fit is refused, not cut), in UTC and READ COMMITTED. Text columns are decoded as
UTF-8; binary columns stay bytes.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from asyncmy import errors as driver
from asyncmy.connection import Connection

from tidegate.adapters.deadline import Deadline
from tidegate.adapters.lane import (
    TLS_OPTIONS,
    Attempt,
    Lane,
    LockConflict,
    Record,
    Session,
    SqlValue,
    tls_of,
)
from tidegate.adapters.urls import parse_server_url
from tidegate.errors import (
    ConfigurationError,
    DependencyTimeout,
    DependencyUnavailable,
    RowsRejected,
    SchemaMissing,
    TidegateError,
)

__all__ = ["MySQLConnection", "MySQLSession", "ScriptResult"]

connect: Final[Any] = Connection  # its stubs leave the arguments untyped

OPTIONS: Final = TLS_OPTIONS | {"unix_socket"}
DEFAULT_PORT: Final = 3306

# Statements kept prepared on a connection. The ledger and the catalog use a few dozen; the server allows thousands.
PREPARED_MAX: Final = 100

# The server ends an idle connection after this, not after the default of eight hours: clients that hang do not use up
# its connections. A node uses its ledger every few seconds, so that a connection in use is never closed.
IDLE_MAX_S: Final = 120

# How often to check whether an abandoned attempt can be cancelled by now.
GIVE_UP_AGAIN_S: Final = 0.02

SETTINGS: Final = (
    "SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', time_zone = '+00:00', autocommit = 1, "
    f"wait_timeout = {IDLE_MAX_S}; "
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED; DO 0"
)

MISSING: Final = frozenset(
    {
        1054,  # unknown column: an older schema
        1146,  # no such table
    }
)
MEANINGS: Final[dict[int, type[TidegateError]]] = {
    1205: LockConflict,  # lock wait timeout
    1213: LockConflict,  # deadlock, or a certification failure of Galera
    8002: LockConflict,  # TiDB: a conflict at the commit, rolled back
    8005: LockConflict,  # TiDB: write conflict
    8022: LockConflict,  # TiDB: the commit failed, rolled back
    8028: LockConflict,  # TiDB: the schema has changed since the transaction began
    9007: LockConflict,  # TiDB: write conflict in its store
    1969: DependencyTimeout,  # max_statement_time (MariaDB)
    3024: DependencyTimeout,  # max_execution_time (MySQL)
    1048: RowsRejected,  # NULL
    1062: RowsRejected,  # duplicate key
    1153: RowsRejected,  # larger than max_allowed_packet: the caller's bisection makes it smaller
    1264: RowsRejected,  # out of range
    1265: RowsRejected,  # would be cut
    1292: RowsRejected,  # not of the column's type
    1366: RowsRejected,  # bad encoding, bad number
    1406: RowsRejected,  # too long
    1690: RowsRejected,  # out of range in an expression
    3819: RowsRejected,  # check constraint (MySQL)
    4025: RowsRejected,  # check constraint (MariaDB)
    1044: ConfigurationError,  # access to the database denied
    1045: ConfigurationError,  # access denied
    1049: ConfigurationError,  # unknown database
    1130: ConfigurationError,  # host not allowed
    1142: ConfigurationError,  # command denied
    1227: ConfigurationError,  # privilege missing
    1251: ConfigurationError,  # old authentication
    2026: ConfigurationError,  # TLS
    2059: ConfigurationError,  # authentication plugin
}
# The connection is lost, or leads to a server that is about to be replaced: one that shuts down or became read-only.
# (1153: the server closes the connection after a packet that is too large.)
RECONNECT: Final = frozenset({1053, 1153, 1290, 1792, 1836, 1927, 2006, 2013, 2014})


class ScriptResult(NamedTuple):
    """The answer to one statement of a script."""

    rows: Sequence[Record]
    affected: int


class MySQLSession(Session[Any]):
    """Values are bound to `?`."""

    def __init__(self, lane: MySQLConnection, raw: Any, deadline: Deadline) -> None:
        super().__init__(lane, raw, deadline)
        self._prepared = lane.prepared
        # In steps, so that callers with slightly different limits do not cost a round trip each.
        self.allowed_s: Final = 2 ** max(0, math.ceil(math.log2(max(deadline.timeout_s, 1))))
        if not lane.is_mariadb:
            # A transaction that waits for a client that has stopped holds its locks. MariaDB has a limit for that;
            # in MySQL it is the one for idle connections, lowered for as long as the transaction lasts.
            self.begin: str = f"SET SESSION wait_timeout = {self.allowed_s}; BEGIN"
            self.commit: str = f"COMMIT; SET SESSION wait_timeout = {IDLE_MAX_S}"
            self.rollback: str = f"ROLLBACK; SET SESSION wait_timeout = {IDLE_MAX_S}"

    async def execute(self, sql: str, args: Sequence[SqlValue] = ()) -> int:
        if not args:
            return (await self.script(sql))[-1].affected
        return int((await self.bounded(self._run(sql, args))).affected_rows)

    async def fetch(self, sql: str, args: Sequence[SqlValue] = ()) -> list[Record]:
        if not args:
            return list((await self.script(sql))[-1].rows)
        return list((await self.bounded(self._run(sql, args))).rows or ())

    async def script(self, sql: str) -> list[ScriptResult]:
        """Statements separated by ";", in one round trip. The first that fails ends it; nothing is rolled back."""
        return await self.bounded(self._run_script(sql))

    async def _run_script(self, sql: str) -> list[ScriptResult]:
        self._lane.count_statement()
        cursor = self.raw.cursor()
        await cursor.execute(sql)
        results = [ScriptResult(await cursor.fetchall(), cursor.rowcount)]
        while await cursor.nextset():
            results.append(ScriptResult(await cursor.fetchall(), cursor.rowcount))
        return results

    async def _run(self, sql: str, args: Sequence[SqlValue]) -> Any:
        self._lane.count_statement()
        statement = self._prepared.pop(sql, None)
        if statement is None:
            statement = await self.raw.prepare(sql)
        self._prepared[sql] = statement  # at the end: the first is the one not used for longest
        result = await statement.execute(args)
        if len(self._prepared) > PREPARED_MAX:
            await self._prepared.pop(next(iter(self._prepared))).close()
        return result


class MySQLConnection(Lane[Any, MySQLSession]):
    """`mysql://user:password@host:port/database?ssl=verify-full&ssl_ca=/path`. Connects when first used."""

    def __init__(self, url: str) -> None:
        parsed = parse_server_url(url, default_port=DEFAULT_PORT)
        parsed.refuse_unknown_options(OPTIONS)
        if len(parsed.hosts) > 1:
            raise ConfigurationError(f"{parsed.shown}: names several hosts; MySQL takes one")
        if not parsed.path:
            raise ConfigurationError(
                f"{parsed.shown}: names no database; expected mysql://host:port/database"
            )
        super().__init__(parsed)
        mode, self._tls = tls_of(parsed, "disable")
        if mode == "prefer":
            raise ConfigurationError(f"{parsed.shown}: MySQL cannot do ssl=prefer; use require or disable")
        self.prepared: dict[str, Any] = {}  # of the present connection; written by its sessions
        self._allowed_s = 0  # what was last sent to the server; 0 on a new connection
        self.is_mariadb: bool = False  # written when a connection is made

    async def _connect(self, timeout_s: float, attempt: Attempt) -> Any:
        host, port = self.url.hosts[0]
        raw = connect(
            host=host,
            port=port,
            unix_socket=self.url.options.get("unix_socket"),
            user=self.url.username,
            # As bytes: the driver would encode a str as Latin-1, and the server has it in UTF-8.
            password=(self.url.password or "").encode(),
            database=self.url.path,
            connect_timeout=max(timeout_s, 0.001),
            ssl=self._tls,
            autocommit=None,
            program_name="tidegate",
        )
        attempt.give_up = partial(_give_up, raw)
        await raw.connect()
        try:
            cursor = raw.cursor()
            await cursor.execute(SETTINGS)
            await cursor.close()
        except BaseException:
            self._abort(raw)
            raise
        self.prepared = {}
        self._allowed_s = 0
        self.is_mariadb = "mariadb" in raw.get_server_info().lower()
        return raw

    async def _allow(self, session: MySQLSession) -> None:
        wanted_s = session.allowed_s
        if wanted_s == self._allowed_s:
            return
        # Both know a limit for locks. MariaDB has one for statements and one for transactions that wait for their
        # client; MySQL has one for SELECT only, and `MySQLSession` sees to transactions.
        lock_s = max(1, wanted_s // 2)
        statement = (
            f"max_statement_time = {wanted_s}, idle_transaction_timeout = {wanted_s}"
            if self.is_mariadb
            else f"max_execution_time = {wanted_s * 1000}"
        )
        await session.script(f"SET SESSION innodb_lock_wait_timeout = {lock_s}, {statement}")
        self._allowed_s = wanted_s

    def _is_usable(self, raw: Any) -> bool:
        transport = raw._transport  # noqa: SLF001 - asyncmy has no public way to see that the server hung up
        return bool(raw.connected) and transport is not None and not transport.is_closing()

    def _abort(self, raw: Any) -> None:
        # close() would wait until a frozen server has taken what is still in the buffer.
        transport = raw._transport  # noqa: SLF001 - and none to abort
        if transport is not None:
            transport.abort()
        raw.close()

    async def _close_connection(self, raw: Any) -> None:
        await raw.ensure_closed()

    def _session(self, raw: Any, deadline: Deadline) -> MySQLSession:
        return MySQLSession(self, raw, deadline)

    def is_broken_by(self, error: Exception) -> bool:
        if isinstance(error, driver.MySQLError):
            return isinstance(error, driver.InterfaceError) or _code(error) in RECONNECT
        # Values that the driver cannot write are refused before a byte is sent. All else is a broken stream.
        return not isinstance(error, (ValueError, OverflowError))

    def translate_error(self, error: Exception) -> TidegateError:
        shown = self.url.shown
        if isinstance(error, (ValueError, OverflowError)):
            return RowsRejected(f"{shown}: {error}")
        if isinstance(error, TimeoutError):
            return DependencyTimeout(f"{shown}: no answer while connecting")
        if isinstance(error, (RuntimeError, ssl.SSLError)):
            # A missing package for an authentication method, or certificates that do not fit.
            step = "; run: pip install 'tidegate[mysql]'" if "'cryptography'" in str(error) else ""
            return ConfigurationError(f"{shown}: {error}{step}")
        code = _code(error)
        text = f"{shown}: {error.args[1] if len(error.args) > 1 else error} ({code})"
        if isinstance(error.__cause__, ssl.SSLError):
            return ConfigurationError(text)
        if code in MISSING:
            return SchemaMissing(f"{text}; run: tidegate migrate --ledger {shown}")
        return MEANINGS.get(code, DependencyUnavailable)(text)


def _give_up(raw: Any, task: asyncio.Task[Any]) -> None:
    """Cancel an attempt to connect, but not while it waits for TCP.

    There the driver uses `wait_for`, which before Python 3.12 may lose the cancellation, or the socket, when both
    come at once. That wait is bounded by `connect_timeout` in any case.
    """
    if task.done():
        return
    if raw._transport is None:  # noqa: SLF001 - the driver has no public way to see how far it is
        asyncio.get_running_loop().call_later(GIVE_UP_AGAIN_S, _give_up, raw, task)
    else:
        task.cancel()


def _code(error: BaseException) -> int:
    code = error.args[0] if error.args else 0
    return code if isinstance(code, int) else 0
