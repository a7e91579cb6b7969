from __future__ import annotations

import asyncio
import gc
import os
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest

from tidegate.adapters.sqlite.connection import (
    CHANGES_PER_CHECKPOINT,
    LOCK_RETRIES,
    LOCK_RETRY_S,
    LOCK_RETRY_S_MAX,
    WAL_PAGES_MAX,
    SQLiteFile,
    transaction,
)
from tidegate.errors import (
    DependencyError,
    DependencyTimeout,
    DependencyUnavailable,
    InvalidInput,
    RowsRejected,
)
from tidegate.testing import wait_until

TIMEOUT_S = 10.0
ENDLESS = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT count(*) FROM r"


def prepare(connection: sqlite3.Connection) -> None:
    connection.execute("CREATE TABLE IF NOT EXISTS t (a UNIQUE)")


def insert(value: object) -> Callable[[sqlite3.Connection], None]:
    def work(connection: sqlite3.Connection) -> None:
        with transaction(connection):
            connection.execute("INSERT INTO t VALUES (?)", (value,))

    return work


def count(connection: sqlite3.Connection) -> int:
    (rows,) = connection.execute("SELECT count(*) FROM t").fetchone()
    return int(rows)


@pytest.fixture
async def file(tmp_path: Path) -> AsyncIterator[SQLiteFile]:
    file = SQLiteFile(tmp_path / "file.db", prepare=prepare)
    yield file
    await file.close()


def _threads_of(*files: SQLiteFile) -> int:
    names = {f"tidegate sqlite {file.path.name}" for file in files}
    return sum(thread.name in names for thread in threading.enumerate())


async def test_work_is_done_on_the_thread_of_the_file_and_answered_on_the_loop(file: SQLiteFile) -> None:
    here = threading.current_thread()
    there = await file.run(lambda connection: threading.current_thread(), timeout_s=TIMEOUT_S)
    assert there is not here
    assert await file.run(lambda connection: threading.current_thread(), timeout_s=TIMEOUT_S) is there


async def test_what_the_work_raises_reaches_the_caller_and_nothing_of_it_is_kept(file: SQLiteFile) -> None:
    def work(connection: sqlite3.Connection) -> None:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO t VALUES (1)")
        raise InvalidInput("a", 1, "2")

    with pytest.raises(InvalidInput):
        await file.run(work, timeout_s=TIMEOUT_S)
    assert await file.run(count, timeout_s=TIMEOUT_S) == 0


@pytest.mark.parametrize("value", [2**63, "\ud800"], ids=["too large an int", "lone surrogate"])
async def test_values_that_sqlite_cannot_hold_are_rejected_rows(file: SQLiteFile, value: object) -> None:
    with pytest.raises(RowsRejected):
        await file.run(insert(value), timeout_s=TIMEOUT_S)


async def test_a_broken_constraint_is_a_rejected_row_and_nothing_is_kept(file: SQLiteFile) -> None:
    def twice(connection: sqlite3.Connection) -> None:
        with transaction(connection):
            connection.execute("INSERT INTO t VALUES (1)")
            connection.execute("INSERT INTO t VALUES (1)")

    with pytest.raises(RowsRejected, match="UNIQUE"):
        await file.run(twice, timeout_s=TIMEOUT_S)
    assert await file.run(count, timeout_s=TIMEOUT_S) == 0


async def test_work_that_takes_too_long_is_interrupted_and_rolled_back(file: SQLiteFile) -> None:
    def slow(connection: sqlite3.Connection) -> None:
        with transaction(connection):
            connection.execute("INSERT INTO t VALUES (1)")
            connection.execute(ENDLESS)

    with pytest.raises(DependencyTimeout):
        await file.run(slow, timeout_s=0.1)
    assert await file.run(count, timeout_s=TIMEOUT_S) == 0


async def test_cancelled_work_is_interrupted_and_the_next_gets_its_own_answer(file: SQLiteFile) -> None:
    begun = threading.Event()

    def slow(connection: sqlite3.Connection) -> None:
        begun.set()
        connection.execute(ENDLESS)

    task = asyncio.create_task(file.run(slow, timeout_s=TIMEOUT_S))
    await asyncio.to_thread(begun.wait, TIMEOUT_S)
    waiting = asyncio.create_task(file.run(insert(1), timeout_s=TIMEOUT_S))
    after = asyncio.create_task(file.run(lambda connection: "mine", timeout_s=TIMEOUT_S))
    await asyncio.sleep(0)
    waiting.cancel()
    task.cancel()
    assert await after == "mine"
    assert [isinstance(one, asyncio.CancelledError) for one in await asyncio.gather(
        task, waiting, return_exceptions=True)] == [True, True]  # fmt: skip
    assert await file.run(count, timeout_s=TIMEOUT_S) == 0, "what had not begun was skipped"


async def test_waiting_for_a_turn_counts_against_the_time_limit(file: SQLiteFile) -> None:
    begun = threading.Event()

    def slow(connection: sqlite3.Connection) -> None:
        begun.set()
        connection.execute(ENDLESS)

    first = asyncio.create_task(file.run(slow, timeout_s=TIMEOUT_S))
    await asyncio.to_thread(begun.wait, TIMEOUT_S)
    with pytest.raises(DependencyTimeout):
        await file.run(insert(1), timeout_s=0.05)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert await file.run(count, timeout_s=TIMEOUT_S) == 0


def test_one_file_serves_several_event_loops_one_after_the_other(tmp_path: Path) -> None:
    file = SQLiteFile(tmp_path / "file.db", prepare=prepare)
    for value in range(3):
        asyncio.run(file.run(insert(value), timeout_s=TIMEOUT_S))
    assert asyncio.run(file.run(count, timeout_s=TIMEOUT_S)) == 3
    asyncio.run(file.close())


async def test_a_closed_file_refuses_work(file: SQLiteFile) -> None:
    await file.run(count, timeout_s=TIMEOUT_S)
    await file.close()
    await file.close()
    with pytest.raises(DependencyUnavailable, match="closed"):
        await file.run(count, timeout_s=TIMEOUT_S)


async def test_the_thread_ends_with_close_and_with_the_last_reference(tmp_path: Path) -> None:
    closed, dropped = SQLiteFile(tmp_path / "closed.db"), SQLiteFile(tmp_path / "dropped.db")
    for file in (closed, dropped):
        await file.open(timeout_s=TIMEOUT_S)
    assert (_threads_of(closed), _threads_of(dropped)) == (1, 1)
    await closed.close()
    wait_until(
        lambda: _threads_of(closed) == 0, timeout_s=TIMEOUT_S, what="the thread of a closed file to end"
    )
    name = f"tidegate sqlite {dropped.path.name}"
    del dropped, file
    gc.collect()
    wait_until(
        lambda: all(thread.name != name for thread in threading.enumerate()),
        timeout_s=TIMEOUT_S,
        what="the thread of a dropped file to end",
    )


async def test_several_processes_that_create_the_file_at_once_all_succeed(tmp_path: Path) -> None:
    files = [SQLiteFile(tmp_path / "file.db", prepare=prepare) for _ in range(8)]
    await asyncio.gather(*(file.run(insert(value), timeout_s=TIMEOUT_S) for value, file in enumerate(files)))
    assert await files[0].run(count, timeout_s=TIMEOUT_S) == 8
    for file in files:
        await file.close()


# The warning is about threads that the child lacks: that the child does without them is what is tested.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_works_on_a_connection_of_its_own(tmp_path: Path) -> None:
    file = SQLiteFile(tmp_path / "file.db", prepare=prepare)
    asyncio.run(file.run(insert("parent"), timeout_s=TIMEOUT_S))
    child = os.fork()
    if child == 0:
        status = 1
        try:
            asyncio.run(file.run(insert("child"), timeout_s=TIMEOUT_S))
            status = 0 if asyncio.run(file.run(count, timeout_s=TIMEOUT_S)) == 2 else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert asyncio.run(file.run(count, timeout_s=TIMEOUT_S)) == 2
    assert file.statistics()["connections_opened"] == 2, "the parent closed its connection for the fork"
    asyncio.run(file.close())


async def test_a_damaged_file_is_unavailable_and_works_again_when_it_is_replaced(file: SQLiteFile) -> None:
    await file.run(insert(1), timeout_s=TIMEOUT_S)
    for name in file.path.parent.iterdir():
        name.unlink()
    file.path.write_bytes(b"not a database" * 1000)
    with pytest.raises(DependencyError):
        await file.run(count, timeout_s=TIMEOUT_S)
    for name in file.path.parent.iterdir():
        name.unlink()
    assert await file.run(count, timeout_s=TIMEOUT_S) == 0


# -- several processes


async def test_a_writer_that_waits_for_another_process_tries_again_after_a_short_time_and_less_often_after_many_tries(
    file: SQLiteFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    await file.run(count, timeout_s=TIMEOUT_S)
    pauses: list[float] = []
    with closing(sqlite3.connect(file.path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")

        def sleep(pause_s: float) -> None:
            pauses.append(pause_s)
            if len(pauses) == 100:
                other.execute("ROLLBACK")

        monkeypatch.setattr("tidegate.adapters.sqlite.connection.time.sleep", sleep)
        await file.run(insert(1), timeout_s=TIMEOUT_S)
    assert pauses[:LOCK_RETRIES] == [LOCK_RETRY_S] * LOCK_RETRIES
    assert pauses == sorted(pauses)
    assert pauses[-1] == LOCK_RETRY_S_MAX
    assert await file.run(count, timeout_s=TIMEOUT_S) == 1


async def test_work_that_was_cancelled_while_it_waited_for_another_process_is_not_done(
    file: SQLiteFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    await file.run(count, timeout_s=TIMEOUT_S)
    waits, cancelled = threading.Event(), threading.Event()

    def sleep(_pause_s: float) -> None:
        waits.set()
        cancelled.wait(TIMEOUT_S)

    monkeypatch.setattr("tidegate.adapters.sqlite.connection.time.sleep", sleep)
    with closing(sqlite3.connect(file.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        task = asyncio.create_task(file.run(insert(1), timeout_s=TIMEOUT_S))
        await asyncio.to_thread(waits.wait, TIMEOUT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    cancelled.set()
    assert await file.run(count, timeout_s=TIMEOUT_S) == 0


async def test_statements_outside_of_a_transaction_wait_for_locks_after_one_as_before_it(
    file: SQLiteFile,
) -> None:
    def work(connection: sqlite3.Connection) -> tuple[int, int]:
        ((before,),) = connection.execute("PRAGMA busy_timeout")
        insert(1)(connection)
        ((after,),) = connection.execute("PRAGMA busy_timeout")
        return before, after

    before, after = await file.run(work, timeout_s=TIMEOUT_S)
    assert 0 < before == after


async def test_the_log_of_the_file_is_copied_into_it_now_and_then(file: SQLiteFile) -> None:
    def insert_many(connection: sqlite3.Connection) -> None:
        with transaction(connection):
            values = ((os.urandom(100),) for _ in range(CHANGES_PER_CHECKPOINT - 1))
            connection.executemany("INSERT INTO t VALUES (?)", values)

    await file.run(insert_many, timeout_s=TIMEOUT_S)
    await file.run(count, timeout_s=TIMEOUT_S)
    assert file.path.stat().st_size < 100_000
    await file.run(insert(1), timeout_s=TIMEOUT_S)
    await file.run(count, timeout_s=TIMEOUT_S)  # the copy was made after the caller had its answer
    assert file.path.stat().st_size > 100 * CHANGES_PER_CHECKPOINT


class Recorder:
    """A connection that writes down its statements, of a file whose log has `pages` pages."""

    def __init__(self, pages: int) -> None:
        self.total_changes = CHANGES_PER_CHECKPOINT
        self.in_transaction = False
        self.statements: list[str] = []
        self._pages = pages

    def execute(self, statement: str) -> Recorder:
        self.statements.append(statement)
        return self

    def fetchone(self) -> tuple[int, int, int]:
        return 0, self._pages, self._pages

    def close(self) -> None:
        pass


@pytest.mark.parametrize("pages", [WAL_PAGES_MAX, WAL_PAGES_MAX + 1])
def test_a_log_that_other_processes_keep_from_ending_is_started_again(tmp_path: Path, pages: int) -> None:
    # A checkpoint copies what it finds. What others add meanwhile would keep the log growing, and every later
    # checkpoint would wait for the disk for a few pages.
    file = SQLiteFile(tmp_path / "file.db")
    recorder = Recorder(pages)
    file._worker.connection = cast("sqlite3.Connection", recorder)
    file._worker.checkpoint()
    assert recorder.statements[0] == "PRAGMA wal_checkpoint(PASSIVE)"
    assert ("PRAGMA wal_checkpoint(RESTART)" in recorder.statements) == (pages > WAL_PAGES_MAX)
    before = len(recorder.statements)
    file._worker.checkpoint()
    assert len(recorder.statements) == before, "not again before as much has changed again"
