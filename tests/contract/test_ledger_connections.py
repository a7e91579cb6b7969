"""The lanes to MariaDB, MySQL and PostgreSQL, which ledgers, catalogs and migrations use."""

from __future__ import annotations

import asyncio
import gc
import os
import pwd
import tempfile
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tidegate.adapters.lane import Lane, LockConflict, Session
from tidegate.adapters.migrations import migrate
from tidegate.adapters.mysql.connection import PREPARED_MAX, MySQLConnection
from tidegate.adapters.mysql.ledger import MySQLLedger
from tidegate.adapters.postgres.connection import PostgresConnection
from tidegate.adapters.postgres.ledger import PostgresLedger
from tidegate.adapters.urls import open_ledger
from tidegate.errors import (
    ConfigurationError,
    DependencyError,
    DependencyTimeout,
    DependencyUnavailable,
    RowsRejected,
    SchemaMissing,
)
from tidegate.ports import Ledger
from tidegate.testing.contracts.ledger import NOW_MS, TIMEOUT_S, held, publish, read_all, row, rows_of
from tidegate.testing.contracts.ledger_server import until
from tidegate.testing.servers import MariaDBServer, MySQLServer, PostgresServer, ServerProcess
from tidegate.testing.servers.mysql_family import MySQLFamilyServer
from tidegate.testing.servers.redis import create_certificate

Connect = Callable[[str], Lane[Any, Any]]
DIALECTS = [pytest.param(name, marks=pytest.mark.server) for name in ("mariadb", "mysql", "postgres")]
PASSWORD = "p@ss:wörd/%?#& 'x"


class Dialect:
    """One server, and its SQL dialect."""

    def __init__(self, name: str, request: pytest.FixtureRequest) -> None:
        self.server: Any = request.getfixturevalue(f"{name}_server")
        self.url: str = request.getfixturevalue(f"{name}_url")
        self.is_postgres = name == "postgres"
        self.connect: Connect = PostgresConnection if self.is_postgres else MySQLConnection
        self.one = "$1" if self.is_postgres else "?"
        # Not SLEEP on MariaDB and MySQL: it ends by itself when its client disconnects.
        self.endless = "SELECT pg_sleep(60)" if self.is_postgres else "SELECT BENCHMARK(1e12, SHA2('x', 256))"
        self.thread = "SELECT pg_backend_pid()" if self.is_postgres else "SELECT CONNECTION_ID()"

    def endless_running(self) -> int:
        if self.is_postgres:
            query = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep%'"
        else:
            query = "SELECT COUNT(*) FROM information_schema.processlist WHERE info LIKE 'SELECT BENCHMARK%'"
        return int(self.server.sql(query)[0][0])

    def ledger(self, url: str | None = None) -> Ledger:
        return (PostgresLedger if self.is_postgres else MySQLLedger)(url or self.url)


@pytest.fixture(params=DIALECTS)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    return Dialect(request.param, request)


@pytest.fixture
async def lane(dialect: Dialect) -> AsyncIterator[Lane[Any, Any]]:
    lane = dialect.connect(dialect.url)
    await lane.execute("CREATE TABLE things (id INTEGER PRIMARY KEY)", timeout_s=TIMEOUT_S)
    yield lane
    await lane.close()


async def ids(lane: Lane[Any, Any]) -> list[int]:
    return [
        record[0] for record in await lane.fetch("SELECT id FROM things ORDER BY id", timeout_s=TIMEOUT_S)
    ]


async def test_values_are_bound_and_rows_are_counted(lane: Lane[Any, Any], dialect: Dialect) -> None:
    insert = f"INSERT INTO things VALUES ({dialect.one})"
    for number in (3, 1, 2):
        assert await lane.execute(insert, (number,), timeout_s=TIMEOUT_S) == 1
    assert await ids(lane) == [1, 2, 3]
    delete = f"DELETE FROM things WHERE id > {dialect.one}"
    assert await lane.execute(delete, (1,), timeout_s=TIMEOUT_S) == 2
    nothing = await lane.fetch(f"SELECT id FROM things WHERE id = {dialect.one}", (9,), timeout_s=TIMEOUT_S)
    assert nothing == []


async def test_a_transaction_is_all_or_nothing(lane: Lane[Any, Any]) -> None:
    async def insert(session: Session[Any], *numbers: int) -> None:
        async with session.transaction():
            for number in numbers:
                await session.execute(f"INSERT INTO things VALUES ({number})")
            if len(numbers) == 2:
                raise ZeroDivisionError

    async with lane.session(timeout_s=TIMEOUT_S) as session:
        await insert(session, 1)
        with pytest.raises(ZeroDivisionError):
            await insert(session, 2, 3)
        with pytest.raises(RowsRejected):
            await insert(session, 4, 1, 5)
    assert await ids(lane) == [1]
    assert lane.statistics()["connections_opened"] == 1


async def test_a_transaction_whose_caller_is_cancelled_is_rolled_back(
    lane: Lane[Any, Any],
) -> None:
    inside = asyncio.Event()

    async def work() -> None:
        async with lane.session(timeout_s=TIMEOUT_S) as session, session.transaction():
            await session.execute("INSERT INTO things VALUES (1)")
            inside.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await ids(lane) == []
    await lane.execute("INSERT INTO things VALUES (1)", timeout_s=TIMEOUT_S)
    assert await ids(lane) == [1]


async def test_a_session_that_stays_open_makes_others_wait_no_longer_than_their_timeout(
    lane: Lane[Any, Any],
) -> None:
    async with lane.session(timeout_s=TIMEOUT_S) as session:
        with pytest.raises(DependencyTimeout):
            await lane.execute("INSERT INTO things VALUES (1)", timeout_s=0.05)
        await session.execute("INSERT INTO things VALUES (2)")
    assert await ids(lane) == [2]


async def test_a_transaction_whose_client_has_stopped_is_ended_by_the_server(
    lane: Lane[Any, Any], dialect: Dialect
) -> None:
    other = dialect.connect(dialect.url)

    async def stop_in_the_middle() -> None:
        async with lane.session(timeout_s=1) as session, session.transaction():
            await session.execute("INSERT INTO things VALUES (1)")
            # This waits for the lock of the transaction around it, which is never committed.
            await other.execute("INSERT INTO things VALUES (1)", timeout_s=TIMEOUT_S)
            await session.execute("INSERT INTO things VALUES (2)")

    with pytest.raises(DependencyError):
        await stop_in_the_middle()
    assert await ids(lane) == [1], "the other one's"
    await other.close()


async def test_a_statement_that_takes_too_long_ends_here_and_on_the_server(
    lane: Lane[Any, Any], dialect: Dialect
) -> None:
    with pytest.raises(DependencyTimeout):
        await lane.fetch(dialect.endless, timeout_s=0.3)
    await until(lambda: dialect.endless_running() == 0, "the server has ended the statement by itself")
    assert await ids(lane) == []


async def test_an_error_of_the_server_costs_no_connection(lane: Lane[Any, Any]) -> None:
    await lane.execute("INSERT INTO things VALUES (1)", timeout_s=TIMEOUT_S)
    with pytest.raises(RowsRejected):
        await lane.execute("INSERT INTO things VALUES (1)", timeout_s=TIMEOUT_S)
    with pytest.raises(SchemaMissing):
        await lane.fetch("SELECT * FROM nowhere", timeout_s=TIMEOUT_S)
    with pytest.raises(DependencyUnavailable):
        await lane.fetch("SELEKT", timeout_s=TIMEOUT_S)
    assert lane.statistics()["connections_opened"] == 1


@pytest.mark.server
@pytest.mark.parametrize("code", [1205, 1213, 8002, 8005, 8022, 8028, 9007])
async def test_a_conflict_that_a_server_of_mysqls_protocol_reports_may_be_tried_again(
    mariadb_url: str, code: int
) -> None:
    """Those above 8000 are TiDB's. A publish and a change of keys try again (`test_catalog_conflicts.py`)."""
    lane = MySQLConnection(mariadb_url)
    with pytest.raises(LockConflict, match=str(code)):
        async with lane.session(timeout_s=TIMEOUT_S) as session:
            await session.script(
                f"SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = {code}, MESSAGE_TEXT = 'conflict'"
            )
    await lane.close()


async def test_callers_take_turns_on_one_connection(lane: Lane[Any, Any], dialect: Dialect) -> None:
    answers = await asyncio.gather(*(lane.fetch(dialect.thread, timeout_s=TIMEOUT_S) for _ in range(20)))
    assert len({answer[0][0] for answer in answers}) == 1


def test_a_lane_follows_its_caller_to_another_event_loop(dialect: Dialect) -> None:
    lane = dialect.connect(dialect.url)
    with warnings.catch_warnings():
        # asyncio warns that the first loop was closed before its connection, which is intended here.
        warnings.simplefilter("ignore", ResourceWarning)
        for _ in range(2):
            assert asyncio.run(lane.fetch("SELECT 7", timeout_s=TIMEOUT_S))[0][0] == 7
        asyncio.run(lane.close())
        gc.collect()


async def test_after_a_read_only_server_the_next_call_connects_again(
    postgres_server: PostgresServer, postgres_url: str
) -> None:
    await migrate(postgres_url)
    name = postgres_url.rpartition("/")[2]
    ledger = PostgresLedger(postgres_url)
    postgres_server.sql(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    with pytest.raises(DependencyUnavailable, match="read-only"):
        await ledger.publish([row()], timeout_s=TIMEOUT_S)
    postgres_server.sql(f'ALTER DATABASE "{name}" RESET default_transaction_read_only')
    await publish(ledger, [row()])
    await ledger.close()


@pytest.mark.server
@pytest.mark.parametrize("kind", ["mariadb", "mysql"])
async def test_statements_do_not_pile_up_on_the_server(request: pytest.FixtureRequest, kind: str) -> None:
    dialect = Dialect(kind, request)

    def prepared() -> int:
        return int(dialect.server.sql("SHOW GLOBAL STATUS LIKE 'Prepared_stmt_count'")[0][1])

    lane = MySQLConnection(dialect.url)
    before = prepared()
    for number in range(3 * PREPARED_MAX):
        assert await lane.fetch(f"SELECT ? + {number}", (1,), timeout_s=TIMEOUT_S) == [(number + 1,)]
    assert prepared() - before <= PREPARED_MAX
    await lane.close()


# ---- what it costs


async def test_every_call_is_one_round_trip(dialect: Dialect) -> None:
    """The ledger is far from most regions, and locks are held for as long as a publish takes."""
    await migrate(dialect.url)
    ledger = dialect.ledger()
    regions = [f"region-{number}" for number in range(10)]

    async def warm() -> str:
        await ledger.heartbeat("fra", timeout_s=TIMEOUT_S)
        await publish(ledger, rows_of(1))
        for region in regions:
            await publish(ledger, [row(region=region)])
        return (await read_all(ledger, (await read_all(ledger))[1]))[1]

    cursor = await warm()

    async def cost(call: Any) -> int:
        before = ledger.statistics()["statements"]
        await call
        return ledger.statistics()["statements"] - before

    def changes() -> Any:
        return ledger.changes(cursor, now_ms=NOW_MS, timeout_s=TIMEOUT_S)

    assert await cost(ledger.publish(rows_of(5_000), timeout_s=TIMEOUT_S)) == 1
    assert await cost(ledger.heartbeat("fra", timeout_s=TIMEOUT_S)) == 1
    for region in regions:
        await publish(ledger, rows_of(20, regional=2, region=region))
    assert await cost(changes()) <= 30, "5,000 changes of one region and 200 of ten others"
    cursor = (await read_all(ledger, cursor))[1]
    assert await cost(changes()) == 1, "nothing changed"
    for region in regions:
        await publish(ledger, rows_of(20, regional=3, region=region))
    assert await cost(changes()) == 1, "200 changes in ten regions"
    await ledger.close()


async def test_the_import_reads_what_changed_and_no_more(dialect: Dialect) -> None:
    await migrate(dialect.url)
    ledger = dialect.ledger()
    await publish(ledger, rows_of(2_000, regional=5))
    _, cursor = await read_all(ledger)
    await publish(ledger, [*rows_of(2_000, regional=4), row("user-7", 6)])
    rows, cursor = await read_all(ledger, cursor)
    assert rows == [row("user-7", 6)]
    assert (await read_all(ledger, cursor))[0] == []
    await ledger.close()


async def test_a_ledger_restored_from_an_older_copy_is_read_again(dialect: Dialect) -> None:
    await migrate(dialect.url)
    ledger = dialect.ledger()
    lane = dialect.connect(dialect.url)
    await publish(ledger, [*rows_of(20), *rows_of(20, region="iad")])
    _, cursor = await read_all(ledger)
    await lane.execute(
        "UPDATE ratelimit_publishes SET published_at = published_at - 1000", timeout_s=TIMEOUT_S
    )
    await lane.execute(
        "UPDATE ratelimit_window_counts SET updated_at = updated_at - 1000", timeout_s=TIMEOUT_S
    )
    rows, cursor = await read_all(ledger, cursor, is_lost=True)
    assert sorted(rows) == sorted([*rows_of(20), *rows_of(20, region="iad")])
    assert (await read_all(ledger, cursor))[0] == []
    await lane.execute("DELETE FROM ratelimit_publishes", timeout_s=TIMEOUT_S)
    rows, cursor = await read_all(ledger, cursor, is_lost=True)
    assert rows == []
    await publish(ledger, [row("new")])
    assert row("new") in (await read_all(ledger, cursor))[0]
    await ledger.close()
    await lane.close()


# ---- URLs, passwords, certificates


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mysql://host", "names no database"),
        ("postgres://host/", "names no database"),
        ("mysql://one,two/db", "several hosts"),
        ("mysql://host/db?sll=true", "unknown option 'sll'"),
        ("mysql://host/db?ssl=maybe", "ssl='maybe' is not known"),
        ("mysql://host/db?ssl=prefer", "cannot do ssl=prefer"),
        ("postgres://host/db?ssl=verify-full&ssl_ca=/nowhere", "certificates cannot be used"),
    ],
)
def test_a_url_that_can_never_work_is_refused_at_once(url: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as refusal:
        open_ledger(url.replace("://", "://user:hunter2@"))
    assert "hunter2" not in str(refusal.value)


class Certificates:
    """A self-signed certificate for 127.0.0.1, and one that no client trusts."""

    def __init__(self, directory: Path) -> None:
        directory.chmod(0o755)
        self.own, self.key = self._made(directory, "own")
        self.stranger, _ = self._made(directory, "stranger")

    @staticmethod
    def _made(directory: Path, name: str) -> tuple[Path, Path]:
        certificate, key = directory / f"{name}.crt", directory / f"{name}.key"
        create_certificate(certificate, key)
        return certificate, key


@pytest.fixture(scope="module")
def certificates() -> Iterator[Certificates]:
    # Not tmp_path: PostgreSQL runs as another user, and must be able to open it.
    with tempfile.TemporaryDirectory(prefix="tidegate-certificates-") as directory:
        yield Certificates(Path(directory))


@pytest.fixture(scope="module")
def guarded_mariadb(certificates: Certificates) -> Iterator[ServerProcess]:
    yield from _guarded(MariaDBServer, certificates)


@pytest.fixture(scope="module")
def guarded_mysql(mysql_server: MySQLServer, certificates: Certificates) -> Iterator[ServerProcess]:
    yield from _guarded(MySQLServer, certificates)


def _guarded(kind: type[MySQLFamilyServer], certificates: Certificates) -> Iterator[ServerProcess]:
    arguments = (f"--ssl-cert={certificates.own}", f"--ssl-key={certificates.key}")
    with kind(arguments=arguments) as server:
        server.create_database("tidegate")
        escaped = PASSWORD.replace("'", "''")
        server.sql(
            f"CREATE USER 'tide gate'@'%' IDENTIFIED BY '{escaped}' REQUIRE SSL; "
            "GRANT ALL ON tidegate.* TO 'tide gate'@'%'"
        )
        yield server


@pytest.fixture(scope="module")
def guarded_postgres(certificates: Certificates) -> Iterator[ServerProcess]:
    rules = certificates.own.with_name("pg_hba.conf")
    rules.write_text("local all all trust\nhostssl all all 127.0.0.1/32 scram-sha-256\n")
    key = certificates.own.with_name("postgres.key")
    key.write_bytes(certificates.key.read_bytes())
    key.chmod(0o600)
    if os.geteuid() == 0:
        owner = pwd.getpwnam("postgres")
        os.chown(key, owner.pw_uid, owner.pw_gid)
    with PostgresServer(
        settings=(f"hba_file={rules}", "ssl=on", f"ssl_cert_file={certificates.own}", f"ssl_key_file={key}")
    ) as server:
        server.create_database("tidegate")
        escaped = PASSWORD.replace("'", "''")
        server.sql(
            f'CREATE ROLE "tide gate" LOGIN PASSWORD \'{escaped}\'; ALTER DATABASE tidegate OWNER TO "tide gate"'
        )
        yield server


@pytest.fixture(params=DIALECTS)
def guarded_url(request: pytest.FixtureRequest) -> str:
    server: ServerProcess = request.getfixturevalue(f"guarded_{request.param}")
    scheme = "postgres" if request.param == "postgres" else "mysql"
    return f"{scheme}://{quote('tide gate', safe='')}:{quote(PASSWORD, safe='')}@127.0.0.1:{server.port}/tidegate"


@pytest.mark.server
@pytest.mark.parametrize(
    "options", ["ssl=require", "ssl=verify-full&ssl_ca={own}", "sslmode=verify-ca&sslrootcert={own}"]
)
async def test_an_encrypted_connection_with_an_awkward_password(
    guarded_url: str, certificates: Certificates, options: str
) -> None:
    url = f"{guarded_url}?{options.format(own=certificates.own)}"
    await migrate(url)
    ledger = open_ledger(url)
    await ledger.open(timeout_s=TIMEOUT_S)
    await publish(ledger, rows_of(10))
    assert await held(ledger) == sorted(rows_of(10))
    await ledger.close()


@pytest.mark.server
async def test_a_server_with_an_untrusted_certificate_is_refused(
    guarded_url: str, certificates: Certificates
) -> None:
    ledger = open_ledger(f"{guarded_url}?ssl=verify-full&ssl_ca={certificates.stranger}")
    with pytest.raises(ConfigurationError, match="certificate"):
        await ledger.open(timeout_s=TIMEOUT_S)
    await ledger.close()


@pytest.mark.server
async def test_a_wrong_password_and_a_missing_encryption_are_refused_and_not_shown(guarded_url: str) -> None:
    wrong = guarded_url.replace(quote(PASSWORD, safe=""), "hunter2")
    for url in (f"{wrong}?ssl=require", f"{guarded_url}?ssl=disable"):
        ledger = open_ledger(url)
        with pytest.raises((ConfigurationError, DependencyError)) as refusal:
            await ledger.open(timeout_s=TIMEOUT_S)
        assert isinstance(refusal.value, ConfigurationError)
        assert "hunter2" not in str(refusal.value)
        assert PASSWORD not in str(refusal.value)
        await ledger.close()
