"""Keeps the catalog's view in step with the database, and writes what the API changes.

Once a second it asks for the catalog's version, one row, and reads what has changed. A change made here is in the
view before its answer leaves; elsewhere it is there within two seconds. Requests never wait for the database, with
two exceptions that are shared and spaced: an unknown key or namespace may have been made a moment ago by somebody
else, so the version is asked for once more before it is refused.

While the database is away the view stays as it was. A namespace that is seen for the first time then is counted
under the id that it will get, and written when the database is back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from random import Random
from typing import Final

from tidegate.errors import DependencyError, InvalidInput, TidegateError
from tidegate.ports import Catalog, CatalogChanges, NamespaceRow, OverrideRow
from tidegate.server.api.problems import FORBIDDEN, Refusal
from tidegate.server.catalog.ids import IdSource, namespace_id
from tidegate.server.catalog.snapshot import SnapshotFile
from tidegate.server.catalog.view import CatalogView, NamespaceView, WorkspaceView

__all__ = ["CatalogSync"]

logger = logging.getLogger(__name__)

# A change is to be seen everywhere within 2 s: this, and a round trip.
POLL_INTERVAL_S: Final = 1.0
POLL_JITTER: Final = 0.2
# Polls that requests ask for come no closer than this, however many unknown keys are tried.
POLL_SPACING_S: Final = 0.05
POLL_TIMEOUT_S: Final = 2.0
# A full read of a large catalog.
LOAD_TIMEOUT_S: Final = 30.0
WRITE_TIMEOUT_S: Final = 5.0
# The snapshot follows changes with this delay, and is confirmed from time to time without one.
SNAPSHOT_SPACING_S: Final = 5.0
SNAPSHOT_CONFIRM_S: Final = 300.0
# Ceilings for one workspace and one namespace: memory of every node, and the database, grow with them.
NAMESPACES_MAX: Final = 100_000
OVERRIDES_MAX: Final = 100_000
# Namespaces that may wait for the database to come back.
PENDING_MAX: Final = 10_000
# How long after its deletion an override, and after its revocation a key, is purged by the node that owns the catalog:
# long enough for people to ask what has become of it.
PURGE_AGE_MS: Final = 30 * 86_400_000
# How often to look for them.
PURGE_INTERVAL_S: Final = 3_600.0


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
        """`purges`: this node owns the catalog, and nobody else will delete for good what has been gone for long."""
        self.view = view
        self._catalog = catalog
        self._ids = ids
        self._now_ms = now_ms
        self._snapshot = snapshot
        self._snapshot_age_max_ms = snapshot_age_max_ms
        self._purges = purges
        self._random = random or Random()
        # The view holds something: what the database said, or the snapshot.
        self.is_loaded = False
        # The view was read from this database by this process, and grows by increments since.
        self._is_current = False
        # Why the last poll failed; None if it did not.
        self.failure: str | None = None
        self._next_poll: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._polled_at = float("-inf")
        self._saved_at = float("-inf")
        self._purged_at = float("-inf")
        # Marks up to this version are not held any more.
        self._forgotten = 0
        self._is_unsaved = False
        # Namespaces that were created here while the database was away, by (workspace, name).
        self._pending: dict[tuple[str, str], NamespaceRow] = {}
        self.polls = 0
        self.poll_errors = 0
        self.reloads = 0

    # Reading.

    async def start(self) -> None:
        """Fill the view: from the database, or while that is away from the snapshot.

        Raises `ConfigurationError` for what waiting cannot cure.
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
            except TidegateError as error:
                self._failed(error)
            except Exception as error:
                logger.exception("a poll of the catalog failed in a way that nobody thought of")
                self._failed(error)

    async def refresh(self) -> None:
        """Return after a poll that began after this call. All who wait share it."""
        if self._next_poll is None or self._next_poll.done():
            self._next_poll = asyncio.get_running_loop().create_task(self._poll_next())
            self._next_poll.add_done_callback(_look_at)
        await asyncio.shield(self._next_poll)

    async def reload(self) -> None:
        """Read everything again."""
        self._is_current = False
        await self.refresh()

    async def confirm(self) -> None:
        """`refresh` before something is called unknown, if there is a database to ask."""
        if self.failure is None:
            try:
                await self.refresh()
            except TidegateError as error:
                self._failed(error)

    async def _poll_next(self) -> None:
        async with self._turn:
            loop = asyncio.get_running_loop()
            await asyncio.sleep(max(0.0, self._polled_at + POLL_SPACING_S - loop.time()))
            # Whoever comes from here on may want what happens after the poll began: theirs is the next one.
            self._next_poll = None
            self._polled_at = loop.time()
            await self.run_once()

    async def run_once(self) -> None:
        """One turn: learn what has changed, write what is pending, save the snapshot."""
        self.polls += 1
        version = await self._catalog.version(timeout_s=POLL_TIMEOUT_S)
        if not self._is_current or version < self.view.version:
            await self._reload(version)
        elif version > self.view.version:
            await self._catch_up(version)
        if self.failure is not None:
            logger.warning("the catalog answers again")
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
        """Read what has changed. `version` is the catalog's, from before."""
        since = self.view.version
        parts = await self._changes(since)
        # Asked for last: a mark that was purged while we read is missing too.
        purged = await self._catalog.purged_version(timeout_s=POLL_TIMEOUT_S)
        if purged > since:
            logger.warning("away for so long that marks of what is gone have been purged; reading everything")
            await self._reload(version)
            return
        for changes in parts:
            self.view.apply(changes)
        if purged != self._forgotten:
            self.view.forget(purged)
            self._forgotten = purged
        self._is_unsaved = True

    async def _reload(self, version: int) -> None:
        """Read everything into a new view, and swap: a database that was restored from a copy may hold less.

        `version` is the catalog's, from before: what was marked since and purged already may have been read unmarked,
        and then all is read once more.
        """
        while True:
            fresh = CatalogView()
            for changes in await self._changes(0):
                fresh.apply(changes)
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

    def _failed(self, error: Exception) -> None:
        self.poll_errors += 1
        if self.failure is None:
            logger.warning("the catalog does not answer: %s; going on with what is known", error)
        self.failure = str(error)

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
            raise Refusal(FORBIDDEN, f"The workspace has reached its bound of {NAMESPACES_MAX} namespaces.")
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
                # Another namespace has this id: one chance in 2^53. Then chance must decide.
                row = row._replace(id="rlns_" + self._ids.take())

    async def _write_pending(self) -> None:
        for key, row in list(self._pending.items()):
            self.view.put_namespace(await self._write_namespace(row))
            del self._pending[key]

    async def set_override(
        self, namespace: NamespaceView, identifier: str, limit: int, duration_ms: int
    ) -> OverrideRow:
        if len(namespace.matcher) >= OVERRIDES_MAX and namespace.matcher.get(identifier) is None:
            raise Refusal(FORBIDDEN, f"The namespace has reached its bound of {OVERRIDES_MAX} overrides.")
        row = OverrideRow("rlor_" + self._ids.take(), namespace.id, identifier, limit, duration_ms, None)
        stored = await self._catalog.set_override(row, timeout_s=WRITE_TIMEOUT_S)
        self.view.put_override(stored)
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

    async def close(self) -> None:
        """Leave the newest view behind for the next start, and the database alone."""
        if self._next_poll is not None:
            self._next_poll.cancel()
        await self._save_snapshot(is_last=True)
        await self._catalog.close()


def _look_at(poll: asyncio.Task[None]) -> None:
    """Whoever waits is told; if all have left, the failure is still no surprise."""
    if not poll.cancelled():
        poll.exception()
