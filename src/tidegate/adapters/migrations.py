"""The schema of a database: numbered `.sql` files beside each dialect's adapter, applied in order, each one once.

`NNNN_name.sql` holds statements that end with ";" at the end of a line. Which ones a database has had is in its table
`tidegate_schema`. Several processes may migrate the same database at once: one works, the others wait for it and find
nothing left to do. PostgreSQL and SQLite apply a file whole or not at all; MySQL commits every statement that changes
the schema, so its files are written to be repeatable ("IF NOT EXISTS").
"""

from __future__ import annotations

import re
import sqlite3
from dataclasses import dataclass
from hashlib import blake2b
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from tidegate.adapters.secrets import mask_url
from tidegate.adapters.sqlite.connection import SQLiteFile, transaction
from tidegate.adapters.urls import (
    LEDGER_EXAMPLES,
    MYSQL_SCHEMES,
    POSTGRES_SCHEMES,
    scheme_of,
    sqlite_path,
)
from tidegate.errors import ConfigurationError, DependencyTimeout, MissingExtra, SchemaMissing

if TYPE_CHECKING:
    from tidegate.adapters.lane import Session
    from tidegate.adapters.mysql.connection import MySQLConnection
    from tidegate.adapters.postgres.connection import PostgresConnection

__all__ = ["Migration", "load_migrations", "migrate", "schema_version", "sqlite_schema_version"]

FILE_NAME: Final = re.compile(r"(\d{4})_([a-z0-9_]+)\.sql")
STATEMENT_END: Final = re.compile(r";[ \t]*$", re.MULTILINE)

# Held by the process that migrates. Advisory locks of PostgreSQL are numbers; this one was chosen at random.
LOCK_NUMBER: Final = int.from_bytes(blake2b(b"tidegate migrate", digest_size=8).digest(), "big", signed=True)

HISTORY: Final = (
    "CREATE TABLE IF NOT EXISTS tidegate_schema "
    "(version INTEGER NOT NULL PRIMARY KEY, name VARCHAR(100) NOT NULL)"
)
VERSION: Final = "SELECT MAX(version) FROM tidegate_schema"


@dataclass(frozen=True)
class Migration:
    """One file."""

    version: int
    name: str
    statements: tuple[str, ...]

    def script(self) -> list[str]:
        """All that is to be run for it, the entry in the history included."""
        entry = f"INSERT INTO tidegate_schema (version, name) VALUES ({self.version}, '{self.name}')"
        return [*self.statements, entry]


def load_migrations(dialect: str) -> list[Migration]:
    """The files of "mysql", "postgres" or "sqlite", in order. Their numbers have no gaps."""
    found: list[Migration] = []
    for file in resources.files(f"tidegate.adapters.{dialect}").iterdir():
        match = FILE_NAME.fullmatch(file.name)
        if match is not None:
            parts = [part.strip() for part in STATEMENT_END.split(file.read_text(encoding="utf-8"))]
            found.append(Migration(int(match[1]), match[2], tuple(part for part in parts if part)))
    found.sort(key=lambda migration: migration.version)
    assert [migration.version for migration in found] == list(range(1, len(found) + 1)), found
    return found


async def migrate(url: str, *, dry_run: bool = False, timeout_s: float = 60.0) -> list[str]:
    """Bring the database at `url` to the newest schema; the statements that were run, in order.

    With `dry_run` nothing is changed, and the answer is what would be run.
    """
    database = _open(url)
    try:
        if dry_run:
            return _missing(database.dialect, await database.version(timeout_s=timeout_s))
        return await database.apply(timeout_s=timeout_s)
    finally:
        await database.close()


async def schema_version(url: str, *, timeout_s: float = 10.0) -> int:
    """The newest migration that the database at `url` has had, 0 for none."""
    database = _open(url)
    try:
        return await database.version(timeout_s=timeout_s)
    finally:
        await database.close()


def sqlite_schema_version(connection: sqlite3.Connection) -> int:
    """The same, for a caller that has the file open."""
    known = connection.execute(
        "SELECT count(*) FROM sqlite_master WHERE name = 'tidegate_schema'"
    ).fetchone()[0]
    return int(connection.execute(VERSION).fetchone()[0] or 0) if known else 0


class _Database(Protocol):
    """One dialect's way to read the version, and to apply what is missing while holding a lock."""

    dialect: str

    async def version(self, *, timeout_s: float) -> int: ...

    async def apply(self, *, timeout_s: float) -> list[str]: ...

    async def close(self) -> None: ...


def _open(url: str) -> _Database:
    scheme = scheme_of(url, LEDGER_EXAMPLES)
    if scheme == "sqlite":
        return _SQLite(sqlite_path(url))
    if scheme in MYSQL_SCHEMES:
        try:
            from tidegate.adapters.mysql.connection import MySQLConnection
        except ModuleNotFoundError as error:
            raise MissingExtra("mysql", mask_url(url)) from error
        return _MySQL(MySQLConnection(url))
    if scheme in POSTGRES_SCHEMES:
        try:
            from tidegate.adapters.postgres.connection import PostgresConnection
        except ModuleNotFoundError as error:
            raise MissingExtra("postgres", mask_url(url)) from error
        return _Postgres(PostgresConnection(url))
    raise ConfigurationError(
        f"{mask_url(url)}: has no schema to migrate; expected mysql://, postgres:// or sqlite://"
    )


def _missing(dialect: str, version: int) -> list[str]:
    statements = [HISTORY] if version == 0 else []
    for migration in load_migrations(dialect):
        if migration.version > version:
            statements += migration.script()
    return statements


async def _run_missing(session: Session[object], dialect: str, version: int) -> list[str]:
    """The caller holds the lock."""
    statements = _missing(dialect, version)
    for statement in statements:
        await session.execute(statement)
    return statements


async def _version(session: Session[object]) -> int:
    try:
        ((version,),) = await session.fetch(VERSION)
    except SchemaMissing:
        return 0
    return version or 0


class _Server:
    """What MySQL and PostgreSQL have in common."""

    def __init__(self, connection: MySQLConnection | PostgresConnection) -> None:
        self._connection = connection

    async def version(self, *, timeout_s: float) -> int:
        async with self._connection.session(timeout_s=timeout_s) as session:
            return await _version(session)

    async def close(self) -> None:
        await self._connection.close()


class _MySQL(_Server):
    dialect = "mysql"

    async def apply(self, *, timeout_s: float) -> list[str]:
        connection = self._connection
        async with connection.session(timeout_s=timeout_s) as session:
            # The lock is the server's, hence the database's name in it; it ends with the connection.
            name = f"tidegate:{blake2b(connection.url.path.encode(), digest_size=16).hexdigest()}"
            ((held,),) = await session.fetch("SELECT GET_LOCK(?, ?)", (name, int(timeout_s)))
            if held != 1:
                raise DependencyTimeout(
                    f"{connection.url.shown}: another migration has been running for {timeout_s:g} s"
                )
            return await _run_missing(session, self.dialect, await _version(session))


class _Postgres(_Server):
    dialect = "postgres"

    async def apply(self, *, timeout_s: float) -> list[str]:
        async with self._connection.session(timeout_s=timeout_s) as session, session.transaction():
            await session.fetch("SELECT pg_advisory_xact_lock($1)", (LOCK_NUMBER,))
            # A query that fails would end the transaction.
            ((table,),) = await session.fetch("SELECT to_regclass('tidegate_schema')::text")
            version = await _version(session) if table is not None else 0
            return await _run_missing(session, self.dialect, version)


class _SQLite:
    dialect = "sqlite"

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._file = SQLiteFile(path)

    async def version(self, *, timeout_s: float) -> int:
        if not self._path.exists():
            return 0  # looking must not create it
        return await self._file.run(sqlite_schema_version, timeout_s=timeout_s)

    async def apply(self, *, timeout_s: float) -> list[str]:
        def work(connection: sqlite3.Connection) -> list[str]:
            with transaction(connection):
                statements = _missing(self.dialect, sqlite_schema_version(connection))
                for statement in statements:
                    connection.execute(statement)
            return statements

        await self._file.open(timeout_s=timeout_s)
        return await self._file.run(work, timeout_s=timeout_s)

    async def close(self) -> None:
        await self._file.close()
