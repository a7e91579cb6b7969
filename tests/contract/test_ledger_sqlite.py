from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tidegate.adapters.migrations import load_migrations, migrate, schema_version
from tidegate.adapters.sqlite.ledger import SQLiteLedger
from tidegate.errors import ConfigurationError, DependencyError, SchemaMissing
from tidegate.ports import Ledger
from tidegate.testing.contracts.ledger import (
    TIMEOUT_S,
    LedgerContract,
    LedgerPlace,
    OpenLedger,
    held,
    merged,
    publish,
    read_all,
    row,
    rows_of,
)

# Another process of the machine: migrates the file, publishes the same cells as the others, with counts of its own.
NEIGHBOUR = """
import asyncio, sys
from tidegate.adapters.migrations import migrate
from tidegate.adapters.sqlite.ledger import SQLiteLedger
from tidegate.testing.contracts.ledger import rows_of

async def main(path, number):
    await migrate(f"sqlite:///{path}")
    ledger = SQLiteLedger(path)
    await ledger.open(timeout_s=20)
    for turn in range(20):
        await ledger.publish(rows_of(100, regional=3 * turn + number, region=("fra", "iad")[number % 2]), timeout_s=20)
    await ledger.close()

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


BAD_NAMES = {
    "region": b"\xff\xfe",
    "workspace_id": b"\xc3",
    "namespace": b"\x80",
    "identifier": b"caf\xe9",
}


def copy_row(connection: sqlite3.Connection, number: int, column: str, value: str) -> None:
    """Another program writes a row like one of ours, but for its subject and this column."""
    columns = [each[1] for each in connection.execute("PRAGMA table_info(ratelimit_window_counts)")]
    chosen = [{"subject": f"x'{number:032x}'", column: value}.get(each, each) for each in columns]
    connection.execute(
        f"INSERT INTO ratelimit_window_counts SELECT {','.join(chosen)} FROM ratelimit_window_counts LIMIT 1"
    )


async def test_rows_whose_names_are_not_utf_8_are_skipped_and_counted_and_all_others_read(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ledger.db"
    await migrate(f"sqlite:///{path}")
    ledger = SQLiteLedger(path, cleans_itself=False)
    await ledger.open(timeout_s=TIMEOUT_S)
    await publish(ledger, rows_of(10))
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        for number, (column, name) in enumerate(BAD_NAMES.items()):
            copy_row(other, number, column, f"x'{name.hex()}'")
        other.execute("INSERT INTO ratelimit_regions VALUES (?, 1)", (b"\xff",))
        other.execute("INSERT INTO ratelimit_publishes VALUES (?, 1)", (b"\xff\xfe",))
    changes = await ledger.changes(None, now_ms=0, timeout_s=TIMEOUT_S)
    assert (len(changes.rows), changes.unreadable) == (10, len(BAD_NAMES))
    await publish(ledger, rows_of(10, regional=99))
    later = await ledger.changes(changes.cursor, now_ms=0, timeout_s=TIMEOUT_S)
    assert len(later.rows) == 10, "and the cursor has moved past them"
    assert [beat.region for beat in await ledger.heartbeat("fra", timeout_s=TIMEOUT_S)] == ["fra"]
    overview = await ledger.overview(now_ms=0, hottest_max=50, timeout_s=TIMEOUT_S)
    assert "\\xff\\xfe" in overview.rows
    assert len(overview.hottest) == 10
    await ledger.close()


@pytest.mark.parametrize(
    ("column", "value", "unreadable"),
    [
        ("identifier", "'abc'", 0),
        ("identifier", "CAST(x'ff' AS TEXT)", 1),
        ("region", "'abc'", 0),
        ("region", "CAST(x'fffe' AS TEXT)", 1),
        ("updated_at", "'abc'", 0),
        ("updated_at", "x'00'", 0),
        ("duration_ms", "0", 1),
    ],
)
async def test_values_of_a_type_that_tidegate_never_writes_stop_no_import(
    tmp_path: Path, column: str, value: str, unreadable: int
) -> None:
    path = tmp_path / "ledger.db"
    await migrate(f"sqlite:///{path}")
    ledger = SQLiteLedger(path, cleans_itself=False)
    await ledger.open(timeout_s=TIMEOUT_S)
    await publish(ledger, rows_of(10))
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        copy_row(other, 7, column, value)
        for table in ("ratelimit_publishes", "ratelimit_regions"):
            other.execute(f"INSERT INTO {table} VALUES ('abc', 'abc'), (CAST(x'ff' AS TEXT), x'00')")
    changes = await ledger.changes(None, now_ms=0, timeout_s=TIMEOUT_S)
    assert (len(changes.rows), changes.unreadable) == (11 - unreadable, unreadable)
    await publish(ledger, rows_of(10, regional=99))
    later = await ledger.changes(changes.cursor, now_ms=0, timeout_s=TIMEOUT_S)
    assert {each.regional for each in later.rows} >= {99}
    assert "fra" in {beat.region for beat in await ledger.heartbeat("fra", timeout_s=TIMEOUT_S)}
    overview = await ledger.overview(now_ms=0, hottest_max=50, timeout_s=TIMEOUT_S)
    assert sum(overview.rows.values()) == 11
    await ledger.close()


class SQLitePlace(LedgerPlace):
    def __init__(self, path: Path) -> None:
        self.path = path

    def ledger(self) -> Ledger:
        return SQLiteLedger(self.path)


class TestSQLiteLedger(LedgerContract):
    @pytest.fixture
    async def place(self, tmp_path: Path) -> SQLitePlace:
        path = tmp_path / "ledger.db"
        await migrate(f"sqlite:///{path}")
        return SQLitePlace(path)

    async def test_the_time_limit_is_kept_while_another_process_holds_the_lock(
        self, ledger: Ledger, place: SQLitePlace
    ) -> None:
        await publish(ledger, [row()])
        with closing(sqlite3.connect(place.path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            # It ends while the lock is held, and it is held until this test releases it.
            with pytest.raises(DependencyError):
                await ledger.publish([row(regional=2)], timeout_s=0.2)
            assert await held(ledger) == [row()], "a reader does not wait for the writer"
        await publish(ledger, [row(regional=2)])
        assert await held(ledger) == [row(regional=2)]

    async def test_a_transaction_that_commits_late_is_not_missed(
        self, ledger: Ledger, place: SQLitePlace
    ) -> None:
        await publish(ledger, rows_of(3))
        _, cursor = await read_all(ledger)
        with closing(sqlite3.connect(place.path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            other.execute("UPDATE ratelimit_publishes SET published_at = published_at + 1")
            other.execute("UPDATE ratelimit_window_counts SET count = 9, updated_at = updated_at + 1")
            for _ in range(2):
                rows, cursor = await read_all(ledger, cursor)
                assert rows == []
            other.execute("COMMIT")
        assert sorted((await read_all(ledger, cursor))[0]) == sorted(rows_of(3, regional=9))

    async def test_expired_rows_are_forgotten_a_few_at_a_time(
        self, ledger: Ledger, place: SQLitePlace
    ) -> None:
        old = [row(f"user-{number}", sequence=1) for number in range(250)]
        keeping = SQLiteLedger(place.path, cleans_itself=False)
        await publish(keeping, old)
        left = []
        for regional in range(1, 5):
            await publish(ledger, [row(regional=regional)])
            with closing(sqlite3.connect(place.path)) as other:
                left.append(other.execute("SELECT count(*) FROM ratelimit_window_counts").fetchone()[0])
        assert left == [151, 51, 1, 1]
        await keeping.close()

    async def test_it_shares_a_file_with_an_origin(self, place: SQLitePlace, open_ledger: OpenLedger) -> None:
        from tidegate.adapters.sqlite.origin import SQLiteOrigin

        origin = SQLiteOrigin(place.path)
        await origin.open("fra", timeout_s=TIMEOUT_S)
        ledger = await open_ledger()
        await publish(ledger, [row()])
        assert await held(ledger) == [row()]
        await origin.close()


async def test_a_file_without_a_schema_names_the_command_and_is_not_created(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    ledger = SQLiteLedger(path)
    with pytest.raises(SchemaMissing, match=f"tidegate migrate --ledger sqlite:///{path}"):
        await ledger.open(timeout_s=TIMEOUT_S)
    assert not path.exists()
    assert await schema_version(f"sqlite:///{path}") == 0
    planned = await migrate(f"sqlite:///{path}", dry_run=True)
    assert not path.exists()
    assert await migrate(f"sqlite:///{path}") == planned
    assert await migrate(f"sqlite:///{path}") == []
    assert await schema_version(f"sqlite:///{path}") == len(load_migrations("sqlite"))
    await ledger.open(timeout_s=TIMEOUT_S)
    await ledger.close()


async def test_a_directory_that_does_not_exist_is_a_configuration_error(tmp_path: Path) -> None:
    ledger = SQLiteLedger(tmp_path / "missing" / "ledger.db")
    with pytest.raises(ConfigurationError, match="does not exist"):
        await ledger.open(timeout_s=TIMEOUT_S)
    with pytest.raises(ConfigurationError, match="does not exist"):
        await migrate(f"sqlite:///{tmp_path}/missing/ledger.db")
    await ledger.close()


def start_neighbour(path: Path, number: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", NEIGHBOUR, path, str(number)])


async def test_processes_migrate_and_publish_at_the_same_time_and_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    neighbours = [start_neighbour(path, number) for number in range(3)]
    assert [neighbour.wait(60) for neighbour in neighbours] == [0, 0, 0]
    ledger = SQLiteLedger(path)
    expected = merged([*rows_of(100, regional=59), *rows_of(100, regional=58, region="iad")])
    assert await held(ledger) == expected
    await ledger.close()


async def test_a_migration_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE ratelimit_window_counts_by_expiry (in_the_way)")
        connection.commit()
    with pytest.raises(DependencyError):
        await migrate(f"sqlite:///{path}")
    assert await schema_version(f"sqlite:///{path}") == 0
    with closing(sqlite3.connect(path)) as connection:
        names = connection.execute("SELECT name FROM sqlite_master").fetchall()
    assert names == [("ratelimit_window_counts_by_expiry",)]
