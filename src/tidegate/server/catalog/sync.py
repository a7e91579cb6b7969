"""Keeps the view of the catalog up to date with the database, and writes what the API changes.

Once a second it reads the version of the catalog, one row, and then what has changed. A change made here is in the view
before its answer is sent; other nodes see it within two seconds. Requests do not wait for the database, with two
exceptions that are shared and spaced: an unknown key or namespace may be new, so the database is asked once more
before it is refused.

While the database is down the view stays as it was. A namespace that is first used then is counted under the id that it
will get, and written when the database is back. A node that starts meanwhile reads the local snapshot.
"""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from tidegate.errors import DependencyError, InvalidInput, TidegateError
from tidegate.ports import Catalog, CatalogChanges, KeyRow, NamespaceRow, OverrideRow
from tidegate.server.catalog.keys import IdSource, namespace_id
from tidegate.server.catalog.overrides import SCANNED_MAX, is_indexed
from tidegate.server.catalog.view import CatalogView, NamespaceView, WorkspaceView

logger = logging.getLogger(__name__)

# A change must be visible everywhere within 2 s: this, and a round trip.
POLL_INTERVAL_S: Final = 1.0
POLL_JITTER: Final = 0.2
# Polls that requests ask for are at least this far apart, however many unknown keys are tried.
POLL_SPACING_S: Final = 0.05
POLL_TIMEOUT_S: Final = 2.0
# A full read of a large catalog.
LOAD_TIMEOUT_S: Final = 30.0
WRITE_TIMEOUT_S: Final = 5.0
# The snapshot follows changes with this delay, and its date is renewed now and then without a change.
SNAPSHOT_SPACING_S: Final = 5.0
SNAPSHOT_CONFIRM_S: Final = 300.0
SNAPSHOT_FORMAT: Final = 1
# Ceilings for one workspace and one namespace: the memory of every node, and the database, grow with them.
NAMESPACES_MAX: Final = 100_000
OVERRIDES_MAX: Final = 100_000
# Unreadable rows of a table that are named in a message, and the characters of an id in it.
SHOWN_IDS: Final = 3
SHOWN_ID_MAX: Final = 64
# Namespaces that may wait for the database to come back.
PENDING_MAX: Final = 10_000
# The node that owns the catalog purges overrides this long after their deletion and keys this long after their
# revocation: long enough to look them up.
PURGE_AGE_MS: Final = 30 * 86_400_000
PURGE_INTERVAL_S: Final = 3_600.0


class CatalogFull(Exception):
    """A workspace has as many namespaces, or a namespace as many overrides, as it may have."""


class _Snapshot(msgspec.Struct):
    format: int
    source: bytes
    saved_at_ms: int
    catalog: CatalogChanges


class SnapshotFile:
    """The last known catalog in a local file, for a node that starts while the database is down.

    Holds what the database holds: digests of keys, never keys. Readable by its owner only, replaced in one step, and
    refused when it is too old, belongs to another database (`source`), or is damaged.
    """

    def __init__(self, path: Path, source: str) -> None:
        self.path = path
        # A digest: the URL of a database holds its password.
        self._source = blake2b(source.encode(), digest_size=16).digest()
        self._decode = msgspec.msgpack.Decoder(_Snapshot).decode
        self._encode = msgspec.msgpack.Encoder().encode

    def save(self, catalog: CatalogChanges, now_ms: int) -> None:
        """Replace the file. Raises OSError. Blocks: call it from a thread."""
        data = self._encode(_Snapshot(SNAPSHOT_FORMAT, self._source, now_ms, catalog))
        # mkstemp creates it with mode 0600, before anything is written to it.
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name + ".")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            Path(name).replace(self.path)
        except BaseException:
            with suppress(OSError):
                Path(name).unlink()
            raise

    def load(self, now_ms: int, age_max_ms: int) -> tuple[CatalogChanges | None, str]:
        """(what was saved, "") or (None, why it cannot be used)."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None, "there is none"
        except OSError as error:
            return None, str(error)
        try:
            content = self._decode(data)
        except (msgspec.MsgspecError, ValueError) as error:
            return None, f"it is damaged: {error}"
        if content.format != SNAPSHOT_FORMAT or content.source != self._source:
            return None, "it was made for another database or by another version"
        age_ms = now_ms - content.saved_at_ms
        if age_ms > age_max_ms:
            return None, f"it is {age_ms // 1000} s old, and {age_max_ms // 1000} s are allowed"
        return content.catalog, ""


class CatalogSync:
    """One per process. `start`, then `run` in a task; `run_once` is one turn of it."""

    def __init__(
        self,
        catalog: Catalog,
        view: CatalogView,
        ids: IdSource,
        *,
        now_ms: Callable[[], int],
        snapshot: SnapshotFile | None = None,
        snapshot_age_max_ms: int = 0,
        purges: bool = False,
        random: Random | None = None,
    ) -> None:
        """`purges`: this node owns the catalog, and purges what was deleted or revoked long ago."""
        self.view = view
        self._catalog = catalog
        self._ids = ids
        self._now_ms = now_ms
        self._snapshot = snapshot
        self._snapshot_age_max_ms = snapshot_age_max_ms
        self._purges = purges
        self._random = random or Random()
        # The view has been filled, from the database or from the snapshot.
        self.is_loaded = False
        # This process has read the whole view from the database, and reads only changes since.
        self._is_current = False
        # Why the last poll failed; None if it did not.
        self.failure: str | None = None
        # (table, id) of the rows that cannot be read.
        self.unreadable: frozenset[tuple[str, str]] = frozenset()
        self._next_poll: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._polled_at = float("-inf")
        self._saved_at = float("-inf")
        self._purged_at = float("-inf")
        # Deleted rows up to this version are no longer held.
        self._forgotten = 0
        self._is_unsaved = False
        # Namespaces that were created here while the database was down, by (workspace, name).
        self._pending: dict[tuple[str, str], NamespaceRow] = {}
        # Overrides that are being written, by namespace id: they count towards its bounds.
        self._setting: dict[str, int] = {}
        self.reloads = 0

    # Reading.

    async def start(self) -> None:
        """Fill the view from the database, or from the snapshot while the database is down.

        Raises `ConfigurationError` for faults that waiting does not fix.
        """
        try:
            await self._catalog.open(timeout_s=POLL_TIMEOUT_S)
            await self.run_once()
        except DependencyError as error:
            self._failed(error)
            self._load_snapshot()

    def _load_snapshot(self) -> None:
        if self._snapshot is None:
            return
        saved, reason = self._snapshot.load(self._now_ms(), self._snapshot_age_max_ms)
        if saved is None:
            logger.warning("the local snapshot %s cannot be used: %s", self._snapshot.path, reason)
            return
        self.view.apply(saved)
        self.is_loaded = True
        logger.warning(
            "serving keys, namespaces and overrides from the local snapshot %s", self._snapshot.path
        )

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await asyncio.sleep(POLL_INTERVAL_S * (1 - POLL_JITTER * self._random.random()))
            try:
                await self.refresh()
            except Exception as error:  # noqa: BLE001 - whatever it was, the next poll may succeed
                self._failed(error)

    async def refresh(self) -> None:
        """Return after a poll that began after this call. Concurrent calls share it."""
        if self._next_poll is None or self._next_poll.done():
            self._next_poll = asyncio.get_running_loop().create_task(self._poll_next())
            self._next_poll.add_done_callback(_retrieve_exception)
        await asyncio.shield(self._next_poll)

    async def reload(self) -> None:
        """Read everything again."""
        self._is_current = False
        await self.refresh()

    async def confirm(self) -> bool:
        """`refresh` before a key or a namespace is called unknown, if the database is up.

        False if it did not answer: then nothing is known. A database that is known to be down is not asked.
        """
        if self.failure is None:
            try:
                await self.refresh()
            except TidegateError as error:
                self._failed(error)
                return False
        return True

    async def _poll_next(self) -> None:
        async with self._turn:
            loop = asyncio.get_running_loop()
            await asyncio.sleep(max(0.0, self._polled_at + POLL_SPACING_S - loop.time()))
            # A call from here on may need a change that is made after this poll began: it gets the next poll.
            self._next_poll = None
            self._polled_at = loop.time()
            await self.run_once()

    async def run_once(self) -> None:
        """One turn: read what has changed, write what is pending, save the snapshot."""
        version = await self._catalog.version(timeout_s=POLL_TIMEOUT_S)
        if not self._is_current or version < self.view.version:
            await self._reload(version)
        elif version > self.view.version:
            await self._catch_up(version)
        if self.failure is not None:
            logger.info("the catalog database answers again")
            self.failure = None
        if self._pending:
            await self._write_pending()
        if self._purges:
            await self._purge()
        await self._save_snapshot()

    async def _changes(self, since: int) -> list[CatalogChanges]:
        parts = []
        while True:
            changes = await self._catalog.changes(since, timeout_s=LOAD_TIMEOUT_S)
            parts.append(changes)
            if changes.is_complete:
                return parts
            since = changes.version

    async def _catch_up(self, version: int) -> None:
        """Read what has changed. `version` is the version of the catalog before this call."""
        since = self.view.version
        parts = await self._changes(since)
        # Read last: a deletion that was purged while the changes were read is missing from them too.
        purged = await self._catalog.purged_version(timeout_s=POLL_TIMEOUT_S)
        if purged > since:
            logger.warning("deletions were purged before this node had read them; reading the whole catalog")
        # The view may hold such a row as it was before, a key that is revoked since, for example. A new view does not.
        if purged > since or any(changes.unreadable for changes in parts):
            await self._reload(version)
            return
        for changes in parts:
            self.view.apply(changes)
        if self.unreadable:
            read = {row.id for changes in parts for rows in changes[2:6] for row in rows}
            self._note_unreadable(frozenset(each for each in self.unreadable if each[1] not in read))
        if purged != self._forgotten:
            self.view.forget(purged)
            self._forgotten = purged
        self._is_unsaved = True

    async def _reload(self, version: int) -> None:
        """Read everything into a new view, and swap: a database that was restored from a copy may hold less.

        `version` is the version of the catalog before this call. A row that was deleted and purged since may have
        been read as it was before its deletion; then everything is read once more.
        """
        while True:
            fresh = CatalogView()
            unreadable: set[tuple[str, str]] = set()
            for changes in await self._changes(0):
                fresh.apply(changes)
                unreadable.update(changes.unreadable)
                await asyncio.sleep(0)
            purged = await self._catalog.purged_version(timeout_s=POLL_TIMEOUT_S)
            if purged <= version:
                break
            version = await self._catalog.version(timeout_s=POLL_TIMEOUT_S)
        self._forgotten = purged
        for (workspace_id, name), row in self._pending.items():
            workspace = fresh.workspaces.get(workspace_id)
            if workspace is not None and name not in workspace.by_name:
                fresh.put_namespace(row)
        self.view.become(fresh)
        self._note_unreadable(frozenset(unreadable))
        self.reloads += 1
        self.is_loaded = True
        self._is_current = True
        self._is_unsaved = True

    async def _purge(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() - self._purged_at < PURGE_INTERVAL_S:
            return
        self._purged_at = loop.time()
        purged = 0
        while gone := await self._catalog.purge(self._now_ms() - PURGE_AGE_MS, timeout_s=WRITE_TIMEOUT_S):
            purged += gone
        if purged:
            logger.info("purged %s overrides and keys that were deleted or revoked long ago", purged)

    def _note_unreadable(self, unreadable: frozenset[tuple[str, str]]) -> None:
        if unreadable == self.unreadable:
            return
        self.unreadable = unreadable
        if unreadable:
            logger.warning("%s; another program has written them", describe_unreadable(unreadable))
        else:
            logger.info("all rows of the catalog can be read again")

    def _failed(self, error: Exception) -> None:
        if self.failure is None and isinstance(error, TidegateError):
            logger.warning("the catalog database does not answer: %s; serving the last known rows", error)
        elif self.failure is None:
            text = "a poll of the catalog failed unexpectedly; serving the last known rows"
            logger.error(text, exc_info=error)
        self.failure = str(error) or repr(error)

    async def _save_snapshot(self, *, is_last: bool = False) -> None:
        if self._snapshot is None:
            return
        age_s = asyncio.get_running_loop().time() - self._saved_at
        if is_last:
            if not self._is_unsaved:
                return
        elif age_s < (SNAPSHOT_SPACING_S if self._is_unsaved else SNAPSHOT_CONFIRM_S):
            return
        self._saved_at = asyncio.get_running_loop().time()
        self._is_unsaved = False
        try:
            await asyncio.to_thread(self._snapshot.save, self.view.export(), self._now_ms())
        except OSError as error:
            logger.warning("the local snapshot %s cannot be written: %s", self._snapshot.path, error)

    # Writing.

    async def create_namespace(self, workspace: WorkspaceView, name: str) -> NamespaceView:
        """The namespace of that name, created if there is none."""
        if len(workspace.by_name) >= NAMESPACES_MAX:
            raise CatalogFull(f"The workspace has reached its bound of {NAMESPACES_MAX} namespaces.")
        row = NamespaceRow(namespace_id(workspace.id, name), workspace.id, name, self._now_ms(), None)
        if self.failure is None:
            try:
                return self.view.put_namespace(await self._write_namespace(row))
            except DependencyError as error:
                self._failed(error)
        if len(self._pending) >= PENDING_MAX:
            raise DependencyError("too many new namespaces wait for the database")
        self._pending[workspace.id, name] = row
        return self.view.put_namespace(row)

    async def _write_namespace(self, row: NamespaceRow) -> NamespaceRow:
        while True:
            try:
                return await self._catalog.create_namespace(row, timeout_s=WRITE_TIMEOUT_S)
            except InvalidInput:
                # Another namespace has this id, one case in 2^53: draw a random one.
                row = row._replace(id="rlns_" + self._ids.take())

    async def _write_pending(self) -> None:
        for key, row in list(self._pending.items()):
            self.view.put_namespace(await self._write_namespace(row))
            del self._pending[key]

    async def set_override(
        self, namespace: NamespaceView, identifier: str, limit: int, duration_ms: int, *, shadow: bool = False
    ) -> OverrideRow:
        matcher = namespace.matcher
        in_flight = self._setting.get(namespace.id, 0)
        if matcher.get(identifier) is None:
            if len(matcher) + in_flight >= OVERRIDES_MAX:
                raise CatalogFull(f"The namespace has reached its bound of {OVERRIDES_MAX} overrides.")
            is_scanned = "*" in identifier and not is_indexed(identifier)
            if is_scanned and matcher.scanned + in_flight >= SCANNED_MAX:
                raise CatalogFull(
                    f"The namespace has reached its bound of {SCANNED_MAX} patterns with a `*` elsewhere than only at "
                    "their beginning or only at their end."
                )
        row = OverrideRow(
            "rlor_" + self._ids.take(), namespace.id, identifier, limit, duration_ms, None, 0, shadow
        )
        self._setting[namespace.id] = in_flight + 1
        try:
            stored = await self._catalog.set_override(row, timeout_s=WRITE_TIMEOUT_S)
            self.view.put_override(stored)
        finally:
            self._setting[namespace.id] -= 1
            if not self._setting[namespace.id]:
                del self._setting[namespace.id]
        self._is_unsaved = True
        return stored

    async def delete_override(self, namespace: NamespaceView, identifier: str) -> bool:
        deleted = await self._catalog.delete_override(
            namespace.id, identifier, deleted_at_ms=self._now_ms(), timeout_s=WRITE_TIMEOUT_S
        )
        if deleted is None:
            return False
        self.view.put_override(deleted)
        self._is_unsaved = True
        return True

    async def delete_namespace(self, namespace: NamespaceView, *, is_deleted: bool) -> NamespaceRow:
        """Mark it as deleted, or restore it."""
        deleted_at_ms = self._now_ms() if is_deleted else None
        await self._catalog.delete_namespace(
            namespace.id, deleted_at_ms=deleted_at_ms, timeout_s=WRITE_TIMEOUT_S
        )
        # The database has given the row a new version; the next poll brings it.
        await self.refresh()
        return namespace.row

    async def put_key(self, row: KeyRow) -> KeyRow:
        """Store a new key."""
        stored = await self._catalog.put_key(row, timeout_s=WRITE_TIMEOUT_S)
        return self._took_key(stored)

    async def expire_key(self, key_id: str, expires_at_ms: int) -> KeyRow | None:
        """Let a key expire then; None if there is no such key."""
        stored = await self._catalog.expire_key(
            key_id, expires_at_ms=expires_at_ms, timeout_s=WRITE_TIMEOUT_S
        )
        return None if stored is None else self._took_key(stored)

    async def revoke_key(self, key_id: str) -> KeyRow | None:
        """Revoke a key permanently; None if there is no such key."""
        stored = await self._catalog.revoke_key(
            key_id, revoked_at_ms=self._now_ms(), timeout_s=WRITE_TIMEOUT_S
        )
        return None if stored is None else self._took_key(stored)

    def _took_key(self, stored: KeyRow) -> KeyRow:
        self.view.put_key(stored)
        self._is_unsaved = True
        return stored

    async def close(self) -> None:
        """Save the snapshot for the next start, and close the connection to the database."""
        if self._next_poll is not None:
            self._next_poll.cancel()
        await self._save_snapshot(is_last=True)
        await self._catalog.close()


def describe_unreadable(unreadable: Iterable[tuple[str, str]]) -> str:
    """Which rows of the catalog cannot be read: how many of each table, and the first ids."""
    rows = sorted(set(unreadable))
    parts = []
    for table, count in Counter(table for table, _ in rows).items():
        ids = [row_id[:SHOWN_ID_MAX] for each, row_id in rows if each == table]
        more = ", …" if count > SHOWN_IDS else ""
        parts.append(f"{count} of {table} ({', '.join(ids[:SHOWN_IDS])}{more})")
    return f"rows of the catalog cannot be read and are skipped: {', '.join(parts)}"


def _retrieve_exception(poll: asyncio.Task[None]) -> None:
    """If every waiting request was cancelled, asyncio must not report the exception as never retrieved."""
    if not poll.cancelled():
        poll.exception()
