"""One SQLite file, used from coroutines: a worker thread owns the connection, callers hand it functions.

Laws:
- `run` keeps its time limit by itself, whatever the disk, another process or the queue before it does.
- A call that timed out or was cancelled is skipped if it has not begun, interrupted and rolled back if it has.
- A driver's own exception never escapes; see `dependency_error` for what becomes what.
- Any event loop of any thread may call. A fork is safe: connections are closed before it (SQLite keeps its locks
  by process, and a child that opened the file again would act as if it held those of its parent).
- A file that was deleted or replaced is opened again, so that two processes never count in two different files.

`origin.py` and `ledger.py` define what is stored in the file.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any, Final, Generic, TypeVar

from tidegate.adapters.backoff import Backoff
from tidegate.adapters.deadline import Deadline
from tidegate.adapters.forks import FORK_WAIT_S, INHERITED, follow_forks
from tidegate.adapters.running_time import RunningTimeout
from tidegate.adapters.urls import check_file
from tidegate.errors import (
    ConfigurationError,
    DependencyError,
    DependencyTimeout,
    DependencyUnavailable,
    RowsRejected,
)

__all__ = ["SQLiteFile", "dependency_error", "transaction"]

Result = TypeVar("Result")

# Longest wait of `close` for the job that is running.
CLOSE_WAIT_S: Final = 2.0
BUSY_MARGIN_MS: Final = 10
# Steps of SQLite's machine, some tens of milliseconds: asking takes the interpreter lock, so ordinary work never does.
STEPS_BETWEEN_LOOKS: Final = 500_000
# The pause between tries to get the write lock: a part of what another process's messages take. After so many tries it
# grows by a tenth each time: dozens of waiting threads of one process would otherwise take the interpreter from the one
# that holds the lock.
LOCK_RETRY_S: Final = 0.0005
LOCK_RETRIES: Final = 20
LOCK_RETRY_GROWTH: Final = 1.1
LOCK_RETRY_S_MAX: Final = 0.01
TRY_ONCE: Final = "PRAGMA busy_timeout=0"
# Pauses between tries to switch a new file to WAL: SQLite does not wait by itself there.
WAL_RETRY_FIRST_S: Final = 0.002
WAL_RETRY_LAST_S: Final = 0.05
# A WAL that grew in a burst is cut back to this after a checkpoint.
WAL_BYTES_KEPT: Final = 16 * 1024 * 1024
# Changed rows after which the WAL is copied into the file: few calls for the disk, and a WAL of some megabytes.
CHANGES_PER_CHECKPOINT: Final = 4_000
# Pages in a WAL that is then started again. A checkpoint alone does not get there while other processes write all the
# time: it copies what it finds, and SQLite starts again only when nothing was added meanwhile.
WAL_PAGES_MAX: Final = 4_000
RESTART_WAIT_MS: Final = 100

# Failures after which the connection is not worth keeping: the next call opens a new one.
BROKEN: Final = frozenset(
    {
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_READONLY,
    }
)
# Of those, the ones that will not pass by themselves when they meet the very first use.
UNUSABLE: Final = frozenset(
    {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY}
)
DAMAGED: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
REJECTED: Final = frozenset({sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_TOOBIG})


def _code(error: BaseException | None) -> int:
    """The primary result code of a sqlite3 exception, 0 for anything else."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def dependency_error(error: Exception, path: Path) -> DependencyError:
    """What a failure of the driver means to a caller."""
    code = _code(error)
    if code == sqlite3.SQLITE_INTERRUPT:
        return DependencyTimeout(f"{path}: interrupted at the end of the time allowed")
    if code in REJECTED or isinstance(error, (sqlite3.DataError, sqlite3.IntegrityError)):
        return RowsRejected(f"{path}: {error}")
    if isinstance(error, (OverflowError, UnicodeEncodeError)):
        # The driver raises these while it binds a value: an int beyond 64 bits, a lone surrogate.
        return RowsRejected(f"{path}: {error}")
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return DependencyUnavailable(f"{path}: locked by another process for all of the time allowed")
    name = getattr(error, "sqlite_errorname", type(error).__name__)
    if code == sqlite3.SQLITE_FULL:
        return DependencyUnavailable(
            f"{path}: the disk is full, or the file has reached the largest size that it may have"
        )
    if code in DAMAGED:
        return DependencyUnavailable(
            f"{path}: the file is damaged ({error}, {name}); stop the server, move the file away and start again"
        )
    return DependencyUnavailable(f"{path}: {error} ({name})")


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All or nothing, as the only writer."""
    _begin(connection)
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


class _Connection(sqlite3.Connection):
    """A connection of a worker."""

    is_abandoned: Callable[[], bool]
    """Whether the caller of the running job has given up."""


def _begin(connection: sqlite3.Connection) -> None:
    """IMMEDIATE: a transaction that begins as a reader cannot wait to write.

    SQLite itself would wait longer after each try, up to 100 ms. Of two processes that write all the time, the one that
    waits would then be asleep nearly whenever the lock is free.
    """
    ((wait_ms,),) = connection.execute("PRAGMA busy_timeout")
    until_s = time.monotonic() + wait_ms / 1000
    connection.execute(TRY_ONCE)
    pause_s = LOCK_RETRY_S
    try:
        for tries in count():
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as error:
                if _code(error) != sqlite3.SQLITE_BUSY or time.monotonic() >= until_s:
                    raise
                if tries >= LOCK_RETRIES:
                    pause_s = min(LOCK_RETRY_S_MAX, pause_s * LOCK_RETRY_GROWTH)
                time.sleep(pause_s)
                if isinstance(connection, _Connection) and connection.is_abandoned():
                    raise
            else:
                return
    finally:
        connection.execute(f"PRAGMA busy_timeout={wait_ms}")


class _Job(Generic[Result]):
    """One call of `run` in the worker."""

    __slots__ = ("abandoned", "deadline", "future", "loop", "work")

    def __init__(
        self,
        work: Callable[[sqlite3.Connection], Result],
        loop: asyncio.AbstractEventLoop,
        deadline: Deadline,
    ) -> None:
        self.work = work
        self.loop = loop
        self.future: asyncio.Future[Result] = loop.create_future()
        self.deadline = deadline
        self.abandoned = False  # written by the caller under the worker's lock, read by the worker

    def succeed(self, result: Result) -> None:
        """From the worker's thread."""
        self._post(self._set_result, result)

    def fail(self, error: BaseException) -> None:
        """From the worker's thread."""
        self._post(self._set_exception, error)

    def _post(self, callback: Callable[..., None], value: object) -> None:
        with suppress(RuntimeError):  # the caller's loop is closed: no caller waits any more
            self.loop.call_soon_threadsafe(callback, value)

    def _set_result(self, result: Result) -> None:
        if not self.future.done():
            self.future.set_result(result)

    def _set_exception(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)


class _Worker:
    """The thread, its queue and its connection. Lives as long as its `SQLiteFile`, in one process."""

    def __init__(self, path: Path, prepare: Callable[[sqlite3.Connection], None] | None) -> None:
        self.path = path
        self.prepare = prepare
        self.jobs: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        self.turn = threading.Lock()  # held while a job runs; a fork takes it to find the worker at rest
        # Guards the fields below for a moment, never during I/O. Reentrant, because the collector may finalize the
        # file, which ends in `stop`, on a thread that is inside.
        self.lock = threading.RLock()
        self.current: _Job[Any] | None = None
        self.started = False
        self.stopped = False
        self.finished = False  # the thread has closed the file and is about to end
        self.enders: list[_Job[None]] = []  # who waits for that
        self.is_inherited_open = False  # this process is a child that was forked in the middle of a job
        self.is_held_for_fork = False  # written by the thread that forks
        self.connections_opened = 0
        self.jobs_done = 0
        self.connection: sqlite3.Connection | None = None
        # `total_changes` of `connection` at its last checkpoint.
        self.changes_copied = 0
        # Device and inode of the file that `connection` has open.
        self.identity: tuple[int, int] | None = None

    def submit(self, job: _Job[Any]) -> None:
        with self.lock:
            if self.stopped:
                raise DependencyUnavailable(f"{self.path}: closed")
            if self.is_inherited_open:
                raise DependencyUnavailable(
                    f"{self.path}: this process was forked while its parent was stuck writing the file; restart it"
                )
            if not self.started:
                # A daemon, so that a limiter that was not stopped does not keep the interpreter from ending.
                threading.Thread(
                    target=self.serve, name=f"tidegate sqlite {self.path.name}", daemon=True
                ).start()
                self.started = True
            self.jobs.put(job)

    def abandon(self, job: _Job[Any]) -> None:
        """The caller of `job` has given up."""
        with self.lock:
            job.abandoned = True
            connection = self.connection
            if self.current is job and connection is not None:
                with suppress(sqlite3.Error):  # the worker may be closing it at this very moment
                    connection.interrupt()

    def stop(self, ended: _Job[None] | None = None) -> None:
        """Accept no more jobs, and close the file after those already accepted; then answer `ended`."""
        with self.lock:
            if not self.stopped:
                self.stopped = True
                if self.started:
                    self.jobs.put(None)
                else:
                    self.finished = True
            if ended is not None and not self.finished:
                self.enders.append(ended)
                return
        if ended is not None:
            ended.succeed(None)

    def serve(self) -> None:
        """The thread: one job after the other until `stop`."""
        jobs = self.jobs
        while (job := jobs.get()) is not None:
            with self.turn:
                with self.lock:
                    if job.abandoned:
                        continue
                    self.current = job
                self.perform(job)
                with self.lock:
                    self.current = None
            del job  # do not keep the last caller's data while waiting for the next
        with self.turn:
            self.disconnect()
        with self.lock:
            self.finished = True
            enders, self.enders = self.enders, []
        for ended in enders:
            ended.succeed(None)

    def perform(self, job: _Job[Any]) -> None:
        """Do the work, leave no transaction open, and answer the caller."""
        # Before the caller is answered: the statistics it reads then include this job.
        self.jobs_done += 1
        try:
            result = job.work(self.connected(job.deadline))
        except (sqlite3.Error, OverflowError, UnicodeEncodeError) as error:
            self.tidy(broken=_code(error) in BROKEN)
            translated = dependency_error(error, self.path)
            translated.__cause__ = error
            job.fail(translated)
        except Exception as error:  # noqa: BLE001 - whatever the work raised belongs to the caller of `run`
            self.tidy(broken=False)
            job.fail(error)
        else:
            self.tidy(broken=False)
            job.succeed(result)
            self.checkpoint()

    def checkpoint(self) -> None:
        """Copy the WAL into the file, now and then, after the caller was answered: it waits for the disk."""
        connection = self.connection
        if connection is None or connection.total_changes - self.changes_copied < CHANGES_PER_CHECKPOINT:
            return
        self.changes_copied = connection.total_changes
        try:
            # Others write meanwhile. Then there is little left to copy under the write lock.
            _, pages, _ = connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            if pages > WAL_PAGES_MAX:
                connection.execute(f"PRAGMA busy_timeout={RESTART_WAIT_MS}")
                connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchone()
        except sqlite3.Error as error:
            # Nothing is lost: the WAL holds it.
            self.tidy(broken=_code(error) in BROKEN)

    def connected(self, deadline: Deadline) -> sqlite3.Connection:
        """The connection to the file that is at `path` now, ready to wait for locks until `deadline`."""
        connection = self.connection
        if connection is not None and self.identity != _identity(self.path):
            self.disconnect()
            connection = None
        if connection is None:
            connection = self.connect(deadline)
        # A little less than is left, so that the caller gets the error of the lock instead of a bare timeout.
        remaining_ms = max(1, int(deadline.remaining(time.monotonic()) * 1000) - BUSY_MARGIN_MS)
        connection.execute(f"PRAGMA busy_timeout={remaining_ms}")
        return connection

    def connect(self, deadline: Deadline) -> sqlite3.Connection:
        wait_s = max(0.001, deadline.remaining(time.monotonic()))
        # isolation_level=None: transactions begin where the code says so. The lock of a fork may close it from
        # another thread, hence check_same_thread=False; `turn` keeps that apart from the work.
        connection = sqlite3.connect(
            self.path, timeout=wait_s, isolation_level=None, check_same_thread=False, factory=_Connection
        )
        connection.is_abandoned = self.is_abandoned
        try:
            self.use_wal(connection, deadline)
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute(f"PRAGMA journal_size_limit={WAL_BYTES_KEPT}")
            connection.execute("PRAGMA wal_autocheckpoint=0")  # see `checkpoint`
            # `interrupt` reaches only a statement that is running: work that was between two is stopped here.
            connection.set_progress_handler(self.is_abandoned, STEPS_BETWEEN_LOOKS)
            if self.prepare is not None:
                self.prepare(connection)
        except BaseException:
            connection.close()
            raise
        self.connection = connection
        self.changes_copied = connection.total_changes
        self.identity = _identity(self.path)
        self.connections_opened += 1
        return connection

    def is_abandoned(self) -> bool:
        """Whether the caller of the running job has given up. SQLite asks now and then during long statements."""
        job = self.current
        return job is not None and job.abandoned

    def use_wal(self, connection: sqlite3.Connection, deadline: Deadline) -> None:
        """Readers and the writer do not wait for each other. Several processes may start on a new file at once."""
        backoff = Backoff(WAL_RETRY_FIRST_S, WAL_RETRY_LAST_S, Random())
        while True:
            try:
                (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
            except sqlite3.OperationalError as error:
                pause_s = backoff.pause_s()
                if _code(error) != sqlite3.SQLITE_BUSY or deadline.remaining(time.monotonic()) < pause_s:
                    raise
                time.sleep(pause_s)
            else:
                if mode != "wal":
                    raise DependencyUnavailable(
                        f"{self.path}: SQLite cannot use WAL here (journal mode {mode!r}); put the file on a local disk"
                    )
                return

    def tidy(self, *, broken: bool) -> None:
        """Roll back what a failed job left open; drop a connection that cannot be trusted any more."""
        if not broken and self.connection is not None and self.connection.in_transaction:
            try:
                self.connection.execute("ROLLBACK")
            except sqlite3.Error:
                broken = True
        if broken:
            self.disconnect()

    def before_fork(self) -> None:
        """Wait for the job that is running, and close the file. If the job takes too long, the child refuses to use
        the file."""
        self.is_held_for_fork = self.turn.acquire(timeout=FORK_WAIT_S)
        if self.is_held_for_fork:
            self.disconnect()

    def after_fork_in_parent(self) -> None:
        """Let jobs continue."""
        if self.is_held_for_fork:
            self.is_held_for_fork = False
            self.turn.release()

    def after_fork_in_child(self) -> None:
        """The thread is gone, and with it everything that it and others held or waited for."""
        self.is_held_for_fork = False
        self.jobs = SimpleQueue()
        self.turn = threading.Lock()
        self.lock = threading.RLock()
        self.current = None
        self.started = False
        self.enders = []
        if self.connection is not None:
            # The parent could not close it in time. Closing it here could release what the parent relies on.
            self.is_inherited_open = True
            INHERITED.append(self.connection)
            self.connection = None

    def disconnect(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _nothing(connection: sqlite3.Connection) -> None:
    """Only open the file."""


class SQLiteFile:
    """The file at `path`. `prepare` runs first on every new connection: create or check tables there."""

    def __init__(
        self, path: str | os.PathLike[str], *, prepare: Callable[[sqlite3.Connection], None] | None = None
    ) -> None:
        self.path: Path = Path(path).absolute()  # the working directory may change before the file is opened
        self._worker = _Worker(self.path, prepare)
        # The thread keeps the worker alive, not this object: dropping it without `close` ends the thread too.
        weakref.finalize(self, self._worker.stop)
        follow_forks(
            self._worker,
            before=_Worker.before_fork,
            in_parent=_Worker.after_fork_in_parent,
            in_child=_Worker.after_fork_in_child,
        )

    async def open(self, *, timeout_s: float) -> None:
        """Open the file now. `ConfigurationError` when that can never work, `DependencyError` when it may later."""
        check_file(self.path)
        try:
            await self.run(_nothing, timeout_s=timeout_s)
        except DependencyUnavailable as error:
            if _code(error.__cause__) in UNUSABLE:
                raise ConfigurationError(
                    f"{error}; the file and its directory must be writable, and the file empty or an SQLite database"
                ) from error
            raise

    async def run(self, work: Callable[[sqlite3.Connection], Result], *, timeout_s: float) -> Result:
        """`work(connection)` on the worker's thread: its result, or what it raised.

        The connection is in autocommit mode (`transaction` begins one). Waiting for its turn, for locks and for
        the work all count; after `timeout_s` the caller gets `DependencyTimeout` and the work is interrupted.
        """
        job = _Job(work, asyncio.get_running_loop(), Deadline.after(timeout_s, time.monotonic()))
        self._worker.submit(job)
        try:
            async with RunningTimeout(timeout_s):
                return await job.future
        except TimeoutError:
            raise DependencyTimeout(f"{self.path}: no answer within {timeout_s:g} s") from None
        finally:
            if not job.future.done() or job.future.cancelled():
                self._worker.abandon(job)

    async def close(self) -> None:
        """End the worker and close the file. Idempotent; waits a moment for the job that is running."""
        ended = _Job(_nothing, asyncio.get_running_loop(), Deadline.after(CLOSE_WAIT_S, time.monotonic()))
        self._worker.stop(ended)
        await asyncio.wait([ended.future], timeout=CLOSE_WAIT_S)

    def statistics(self) -> Mapping[str, int]:
        """Counters for telemetry."""
        return {"connections_opened": self._worker.connections_opened, "jobs": self._worker.jobs_done}
