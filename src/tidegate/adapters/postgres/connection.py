"""A lane to PostgreSQL, by asyncpg.

`execute` and `fetch` take native `$1` placeholders. Sessions are READ COMMITTED; the server itself ends statements,
waits for locks and idle transactions that take longer than the caller allowed, so that a client that hangs or dies
holds nothing for long.

Needs a connection of its own: behind PgBouncer that means session pooling. Several hosts in the URL are tried in
turn for the one that takes writes.
"""

from __future__ import annotations

import math
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, Final

import asyncpg

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

__all__ = ["PostgresConnection", "PostgresSession"]

OPTIONS: Final = TLS_OPTIONS | {"unix_socket"}
DEFAULT_PORT: Final = 5432

SET_LIMITS: Final = """
    SELECT set_config('statement_timeout', $1, false), set_config('lock_timeout', $2, false),
           set_config('idle_in_transaction_session_timeout', $1, false),
           set_config('default_transaction_isolation', 'read committed', false)
"""

SET: Final = (
    "SELECT set_config(name, value, false) FROM unnest($1::text[], $2::text[]) AS given (name, value)"
)

CONFLICTS: Final = frozenset(
    {
        "40001",  # serialization failure
        "40P01",  # deadlock
        "55P03",  # lock_timeout
    }
)
MISSING: Final = frozenset(
    {
        "3F000",  # no such schema
        "42703",  # no such column: an older schema
        "42P01",  # no such table
    }
)
CONFIGURATION: Final = frozenset(
    {
        "3D000",  # no such database
        "42501",  # privilege missing
    }
)
# After these the server behind the name may be another one soon: a standby, or a shutdown.
RECONNECT: Final = frozenset({"25006", "25P03", "57P01", "57P02", "57P03", "57P05"})


class PostgresSession(Session[Any]):
    """Values are bound to `$1`, `$2`, …"""

    async def execute(self, sql: str, args: Sequence[SqlValue] = ()) -> int:
        self._lane.count_statement()
        status = str(await self.bounded(self.raw.execute(sql, *args)))
        count = status.rpartition(" ")[2]  # "INSERT 0 5", "DELETE 3", "BEGIN"
        return int(count) if count.isdigit() else 0

    async def fetch(self, sql: str, args: Sequence[SqlValue] = ()) -> list[Record]:
        self._lane.count_statement()
        rows: list[Record] = await self.bounded(self.raw.fetch(sql, *args))
        return rows


class PostgresConnection(Lane[Any, PostgresSession]):
    """`postgres://user:password@host:port/database?ssl=verify-full&ssl_ca=/path`. Connects when first used.

    `settings` are set on every new connection.
    """

    def __init__(self, url: str, *, settings: Mapping[str, str] | None = None) -> None:
        parsed = parse_server_url(url, default_port=DEFAULT_PORT)
        parsed.refuse_unknown_options(OPTIONS)
        if not parsed.path:
            raise ConfigurationError(
                f"{parsed.shown}: names no database; expected postgres://host:port/database"
            )
        super().__init__(parsed)
        self._tls_mode, self._tls = tls_of(parsed, "prefer")
        self._settings = dict(settings or {})
        self._allowed_s = 0  # what was last sent to the server; 0 on a new connection

    async def _connect(self, timeout_s: float, attempt: Attempt) -> Any:
        socket_directory = self.url.options.get("unix_socket")
        hosts = [host for host, _ in self.url.hosts]
        raw = await asyncpg.connect(
            host=socket_directory or hosts,
            port=self.url.hosts[0][1] if socket_directory else [port for _, port in self.url.hosts],
            user=self.url.username,
            password=self.url.password,
            database=self.url.path,
            timeout=max(timeout_s, 0.001),
            # By name and not by context where nothing is verified: only so does the driver fall back to no TLS.
            ssl={"disable": False, "prefer": "prefer"}.get(self._tls_mode, self._tls),
            target_session_attrs="read-write" if len(hosts) > 1 else None,
            server_settings={"application_name": "tidegate"},
        )
        try:
            if self._settings:
                # Not as parameters of the start: poolers refuse those that they do not know.
                await raw.execute(SET, list(self._settings), list(self._settings.values()))
        except BaseException:
            raw.terminate()
            raise
        self._allowed_s = 0
        return raw

    async def _allow(self, session: PostgresSession) -> None:
        # In steps, so that callers with slightly different limits do not cost a round trip each.
        wanted_s = 2 ** max(0, math.ceil(math.log2(max(session.deadline.timeout_s, 1))))
        if wanted_s != self._allowed_s:
            await session.fetch(SET_LIMITS, (f"{wanted_s}s", f"{wanted_s * 500}ms"))
            self._allowed_s = wanted_s

    def _is_usable(self, raw: Any) -> bool:
        return not raw.is_closed()

    def _abort(self, raw: Any) -> None:
        raw.terminate()

    async def _close_connection(self, raw: Any) -> None:
        await raw.close()

    def _session(self, raw: Any, deadline: Deadline) -> PostgresSession:
        return PostgresSession(self, raw, deadline)

    def is_broken_by(self, error: Exception) -> bool:
        if isinstance(error, asyncpg.PostgresError):
            state = error.sqlstate or ""
            return state[:2] in ("08", "58") or state in RECONNECT
        return True

    def translate_error(self, error: Exception) -> TidegateError:
        shown = self.url.shown
        if isinstance(error, asyncpg.PostgresError):
            return self._translate_server_error(error)
        if isinstance(error, TimeoutError):
            return DependencyTimeout(f"{shown}: no answer while connecting")
        if isinstance(error, (ssl.SSLError, asyncpg.ClientConfigurationError)):
            return ConfigurationError(f"{shown}: {error}")
        return DependencyUnavailable(f"{shown}: {error} ({type(error).__name__})")

    def _translate_server_error(self, error: Any) -> TidegateError:
        shown = self.url.shown
        state = str(error.sqlstate or "")
        text = f"{shown}: {error} ({state})"
        if state in MISSING:
            return SchemaMissing(f"{text}; run: tidegate migrate --ledger {shown}")
        if state in CONFIGURATION or state.startswith("28"):  # authentication
            return ConfigurationError(text)
        if state[:2] in ("22", "23", "54"):  # data, integrity, limits of the program
            return RowsRejected(text)
        if state in CONFLICTS:
            return LockConflict(text)
        if state == "57014":  # statement_timeout
            return DependencyTimeout(text)
        return DependencyUnavailable(text)
