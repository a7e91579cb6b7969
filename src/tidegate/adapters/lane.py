"""One connection to a database server: opened when needed, used by one caller at a time, dropped when unsure.

Laws:
- Everything inside `session(timeout_s=…)` ends by then: waiting for one's turn, connecting, every statement. A driver
  is never asked to cancel, because some wait for the server while they do; the socket is closed instead.
- A connection is kept only if its last statement was answered to the end and no transaction is open. After a
  timeout, a cancelled caller or a lost byte it is dropped, so that no answer can ever reach the wrong caller.
- A driver's own exception never escapes.

Knows no SQL and no ledger; the catalog of the server uses it too. No pool: a node needs a connection to write and
one to read, and two lanes are simpler to prove than a pool that several drivers have got wrong.
"""

from __future__ import annotations

import asyncio
import ssl
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from operator import methodcaller
from random import Random
from typing import Any, Final, Generic, NoReturn, TypeVar

from tidegate.adapters.backoff import Backoff
from tidegate.adapters.deadline import Deadline, loop_time
from tidegate.adapters.urls import ServerURL
from tidegate.errors import (
    ConfigurationError,
    DependencyError,
    DependencyTimeout,
    DependencyUnavailable,
    TidegateError,
)

__all__ = [
    "TLS_OPTIONS",
    "Lane",
    "LockConflict",
    "Record",
    "Session",
    "SqlValue",
    "conflict_backoff",
    "tls_of",
]

Raw = TypeVar("Raw")
Result = TypeVar("Result")
SessionType = TypeVar("SessionType", bound="Session[Any]")

SqlValue = int | str | bytes | float | Sequence[int] | Sequence[str] | Sequence[bytes] | None
"""What can be bound. Sequences are arrays of PostgreSQL."""
Record = Sequence[Any]
"""One row of an answer, by position."""

# How long a regular close of the connection may take; then the socket is closed.
CLOSE_S: Final = 0.5

# libpq's names are accepted too, so that a URL for libpq works here.
TLS_OPTIONS: Final = frozenset(
    {"ssl", "sslmode", "ssl_ca", "sslrootcert", "ssl_cert", "sslcert", "ssl_key", "sslkey"}
)
TLS_MODES: Final = {
    "disable": "disable",
    "false": "disable",
    "0": "disable",
    "prefer": "prefer",
    "require": "require",
    "true": "require",
    "1": "require",
    "verify-ca": "verify-ca",
    "verify-full": "verify-full",
}


# Pauses after a lock conflict: longer than a transaction takes, shorter than a caller waits.
CONFLICT_PAUSE_FIRST_S: Final = 0.01
CONFLICT_PAUSE_LAST_S: Final = 0.5


class LockConflict(DependencyUnavailable):
    """A deadlock or a lock that was not given in time. The transaction was rolled back; trying again may help."""


def conflict_backoff(random: Random) -> Backoff:
    """The pauses before a transaction is tried again."""
    return Backoff(CONFLICT_PAUSE_FIRST_S, CONFLICT_PAUSE_LAST_S, random)


def tls_of(url: ServerURL, default: str) -> tuple[str, ssl.SSLContext | None]:
    """The mode that the URL asks for, and the context for it (None for "disable").

    "require" encrypts and trusts any certificate, as libpq does; "verify-ca" checks the certificate, "verify-full"
    the name in it as well.
    """

    def option(*names: str) -> str | None:
        return next((url.options[name] for name in names if name in url.options), None)

    authority = option("ssl_ca", "sslrootcert")
    wanted = option("ssl", "sslmode") or ("verify-full" if authority else default)
    mode = TLS_MODES.get(wanted.lower())
    if mode is None:
        raise ConfigurationError(
            f"{url.shown}: ssl={wanted!r} is not known; expected disable, require, verify-ca or verify-full"
        )
    if mode == "disable":
        return mode, None
    try:
        context = ssl.create_default_context(cafile=authority)
        if (certificate := option("ssl_cert", "sslcert")) is not None:
            context.load_cert_chain(certificate, option("ssl_key", "sslkey"))
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(f"{url.shown}: the certificates cannot be used: {error}") from error
    context.check_hostname = mode == "verify-full"
    if mode in ("prefer", "require"):
        context.verify_mode = ssl.CERT_NONE
    return mode, context


class Attempt:
    """A connection that is being made."""

    def __init__(self) -> None:
        self.give_up: Callable[[asyncio.Task[Any]], object] = methodcaller("cancel")


class Session(ABC, Generic[Raw]):
    """The use of a connection by one caller, for one stretch of time. See the dialect for how values are bound."""

    def __init__(self, lane: Lane[Raw, Any], raw: Raw, deadline: Deadline) -> None:
        self.raw: Final = raw
        self.deadline: Final = deadline
        self._lane = lane
        self._is_waiting = False  # an answer is outstanding
        self._is_in_transaction = False
        # What begins and ends a transaction. A dialect may add statements of its own.
        self.begin: str = "BEGIN"
        self.commit: str = "COMMIT"
        self.rollback: str = "ROLLBACK"

    @property
    def is_at_rest(self) -> bool:
        """Nothing outstanding, nothing open: the connection may serve the next caller."""
        return not self._is_waiting and not self._is_in_transaction

    @abstractmethod
    async def execute(self, sql: str, args: Sequence[SqlValue] = ()) -> int:
        """Run one statement; how many rows it touched."""

    @abstractmethod
    async def fetch(self, sql: str, args: Sequence[SqlValue] = ()) -> list[Record]:
        """Run one statement; all rows of its answer."""

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[None]:
        """All or nothing. An exception inside rolls back, and is raised again."""
        self._is_in_transaction = True
        await self.execute(self.begin)
        try:
            yield
        except Exception:
            await self.roll_back()
            raise
        await self.execute(self.commit)
        self._is_in_transaction = False

    async def roll_back(self) -> None:
        """End an open transaction if the connection can still be used. If not, dropping it has the same effect."""
        if not self._is_waiting:
            self._is_in_transaction = True
            with suppress(DependencyError):
                await self.execute(self.rollback)
                self._is_in_transaction = False

    async def bounded(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Wait for the driver until the deadline, then cut the connection."""
        self._is_waiting = True
        task = asyncio.ensure_future(work)
        task.add_done_callback(_mark_seen)
        try:
            await asyncio.wait((task,), timeout=self.deadline.remaining(loop_time()))
        finally:
            if not task.done():
                # Not task.cancel(): asyncpg would open another connection to ask the server to cancel, and a frozen
                # server would keep that one. The task ends by itself when it finds its socket closed.
                self._lane.drop(self.raw)
        if not task.done():
            raise self._lane.timed_out(self.deadline)
        try:
            result = task.result()
        except Exception as error:  # noqa: BLE001 - whatever a driver raises is translated, never passed on
            self._is_waiting = self._lane.is_broken_by(error)
            self._lane.refuse(error)
        self._is_waiting = False
        return result


class Lane(ABC, Generic[Raw, SessionType]):
    """One connection and its queue of callers. `session` is the only way to use it."""

    def __init__(self, url: ServerURL) -> None:
        self.url: Final = url
        self._raw: Raw | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop that `_raw` and `_turn` belong to
        self._turn = asyncio.Lock()
        self._is_closed = False
        self._connections_opened = 0
        self._statements = 0

    # ---- the dialect

    @abstractmethod
    async def _connect(self, timeout_s: float, attempt: Attempt) -> Raw:
        """A new connection, ready for use. `attempt.give_up` ends it early; by default it is cancelled."""

    @abstractmethod
    async def _allow(self, session: SessionType) -> None:
        """Set the time limit of statements on the server, unless it is set already."""

    @abstractmethod
    def _is_usable(self, raw: Raw) -> bool:
        """Whether it is open, as far as this side can see without a round trip."""

    @abstractmethod
    def _abort(self, raw: Raw) -> None:
        """Close the socket at once, whatever is still in its buffers."""

    @abstractmethod
    async def _close_connection(self, raw: Raw) -> None:
        """Close it in the regular way."""

    @abstractmethod
    def _session(self, raw: Raw, deadline: Deadline) -> SessionType: ...

    @abstractmethod
    def translate_error(self, error: Exception) -> TidegateError:
        """What a driver's exception means to a caller."""

    @abstractmethod
    def is_broken_by(self, error: Exception) -> bool:
        """Whether the connection is not worth keeping after `error`."""

    # ---- use

    @asynccontextmanager
    async def session(self, *, timeout_s: float) -> AsyncIterator[SessionType]:
        """The connection, for the caller alone. Everything inside ends by `timeout_s`, or raises."""
        deadline = Deadline.after(timeout_s, loop_time())
        self._follow_loop()
        try:
            async with asyncio.timeout(deadline.remaining(loop_time())):
                await self._turn.acquire()
        except TimeoutError:
            raise self.timed_out(deadline) from None
        turn = self._turn
        try:
            session = self._session(await self._connected(deadline), deadline)
            try:
                await self._allow(session)
                yield session
            finally:
                if not session.is_at_rest:
                    self.drop(session.raw)
        finally:
            turn.release()

    async def execute(self, sql: str, args: Sequence[SqlValue] = (), *, timeout_s: float) -> int:
        """One statement, committed at once; how many rows it touched."""
        async with self.session(timeout_s=timeout_s) as session:
            return await session.execute(sql, args)

    async def fetch(self, sql: str, args: Sequence[SqlValue] = (), *, timeout_s: float) -> list[Record]:
        """All rows of one statement's answer."""
        async with self.session(timeout_s=timeout_s) as session:
            return await session.fetch(sql, args)

    async def close(self) -> None:
        """Release the connection. Idempotent; never raises, never waits long. A caller inside gets an error."""
        self._is_closed = True
        raw, self._raw = self._raw, None
        if raw is None:
            return
        if self._turn.locked() or self._loop is not asyncio.get_running_loop():
            self._abort_quietly(raw)
            return
        task = asyncio.ensure_future(self._close_connection(raw))
        try:
            await asyncio.wait((task,), timeout=CLOSE_S)
        finally:
            task.add_done_callback(_mark_seen)
            if not task.done() or task.cancelled() or task.exception() is not None:
                self._abort_quietly(raw)

    def statistics(self) -> Mapping[str, int]:
        """Counters for telemetry."""
        return {"statements": self._statements, "connections_opened": self._connections_opened}

    # ---- for sessions

    def count_statement(self) -> None:
        """A session is about to send something."""
        self._statements += 1

    def drop(self, raw: Raw) -> None:
        """Cut the connection; the next caller opens another."""
        if self._raw is raw:
            self._raw = None
        self._abort_quietly(raw)

    def timed_out(self, deadline: Deadline) -> DependencyTimeout:
        return DependencyTimeout(f"{self.url.shown}: no answer within {deadline.timeout_s:g} s")

    def refuse(self, error: Exception) -> NoReturn:
        """Raise what `error` means."""
        if isinstance(error, TidegateError):
            raise error
        raise self.translate_error(error) from error

    # ---- inside

    def _follow_loop(self) -> None:
        """A connection cannot leave its event loop: one that was made on another loop cannot be used any more."""
        loop = asyncio.get_running_loop()
        if self._loop is loop:
            return
        raw, self._raw = self._raw, None
        if raw is not None:
            self._abort_quietly(raw)
        self._loop = loop
        self._turn = asyncio.Lock()

    def _abort_quietly(self, raw: Raw) -> None:
        with suppress(RuntimeError):  # its loop is closed, and its socket with it
            self._abort(raw)

    async def _connected(self, deadline: Deadline) -> Raw:
        self._refuse_if_closed()
        raw = self._raw
        if raw is not None:
            # Two turns of the loop show that the server has closed: one reads the end, the next reports it.
            for _ in range(2):
                await asyncio.sleep(0)
            self._refuse_if_closed()
            if self._is_usable(raw):
                return raw
            self.drop(raw)
        attempt = Attempt()
        task = asyncio.create_task(self._connect(deadline.remaining(loop_time()), attempt))
        try:
            await asyncio.wait((task,), timeout=deadline.remaining(loop_time()))
        except asyncio.CancelledError:
            self._give_up(task, attempt)
            raise
        if not task.done():
            self._give_up(task, attempt)
            raise self.timed_out(deadline)
        try:
            raw = task.result()
        except Exception as error:  # noqa: BLE001 - as above
            self.refuse(error)
        try:
            self._refuse_if_closed()  # meanwhile
        except DependencyUnavailable:
            self._abort_quietly(raw)
            raise
        self._raw = raw
        self._connections_opened += 1
        return raw

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise DependencyUnavailable(f"{self.url.shown}: closed")

    def _give_up(self, task: asyncio.Task[Raw], attempt: Attempt) -> None:
        task.add_done_callback(self._discard)  # also if it was made at the moment in which the caller gave up
        attempt.give_up(task)

    def _discard(self, task: asyncio.Future[Raw]) -> None:
        """Close a connection that was made after its caller gave up."""
        if not task.cancelled() and task.exception() is None:
            self._abort_quietly(task.result())


def _mark_seen(task: asyncio.Future[Any]) -> None:
    """Mark the exception as retrieved: the caller has been answered, and asyncio must not log it."""
    if not task.cancelled():
        task.exception()
