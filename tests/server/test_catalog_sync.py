from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tidegate.adapters.catalogs import open_catalog
from tidegate.adapters.migrations import migrate
from tidegate.errors import DependencyUnavailable
from tidegate.ports import Catalog, KeyRow, NamespaceRow, OverrideRow, WorkspaceRow
from tidegate.server.catalog import sync as catalog_sync
from tidegate.server.catalog.keys import IdSource, digest_of, namespace_id
from tidegate.server.catalog.sync import CatalogFull, CatalogSync, SnapshotFile, describe_unreadable
from tidegate.server.catalog.view import Callers, CatalogView, WorkspaceView

TIMEOUT_S = 10.0
NOW_MS = 1_800_000_000_000


class Outage:
    """A wrapper of a catalog that can be made to fail, and counts its calls."""

    def __init__(self, inner: Catalog) -> None:
        self.inner = inner
        self.is_down = False
        self.calls: list[str] = []
        self.asked = asyncio.Event()
        # A function to run just before the next call of that name.
        self.before: tuple[str, Callable[[], Awaitable[None]]] | None = None

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.inner, name)
        if name in ("close", "statistics"):
            return method

        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            self.asked.set()
            if self.is_down:
                raise DependencyUnavailable("the database is away")
            if self.before is not None and self.before[0] == name:
                await self.before[1]()
            return await method(*args, **kwargs)

        return call

    def statistics(self) -> Mapping[str, int]:
        return self.inner.statistics()


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Outage]:
    url = f"sqlite:///{tmp_path / 'catalog.db'}"
    await migrate(url)
    catalog = open_catalog(url)
    await catalog.open(timeout_s=TIMEOUT_S)
    await catalog.put_workspace(WorkspaceRow("w", "w", True, None, None), timeout_s=TIMEOUT_S)
    yield Outage(catalog)
    await catalog.close()


def key_row(key: str) -> KeyRow:
    return KeyRow("key_" + key, "w", digest_of(key), "", "", (), 1, None, True, None)


def sync_of(database: Outage, snapshot: SnapshotFile | None = None, *, purges: bool = False) -> CatalogSync:
    return CatalogSync(
        database,
        CatalogView(),
        IdSource(),
        now_ms=lambda: NOW_MS,
        snapshot=snapshot,
        snapshot_age_max_ms=60_000,
        purges=purges,
    )


def workspace_of(sync: CatalogSync) -> WorkspaceView:
    return sync.view.workspaces["w"]


async def test_a_turn_without_changes_asks_for_one_number(database: Outage) -> None:
    sync = sync_of(database)
    await sync.start()
    database.calls.clear()
    await sync.run_once()
    await sync.run_once()
    assert database.calls == ["version", "version"]


async def test_a_turn_after_a_change_reads_what_has_changed(database: Outage) -> None:
    sync, other = sync_of(database), sync_of(database)
    await sync.start()
    await other.start()
    created = await other.create_namespace(workspace_of(other), "new")
    await other.set_override(created, "vip_*", 7, 1_000)
    assert "new" not in workspace_of(sync).namespaces
    await sync.run_once()
    found = workspace_of(sync).namespaces["new"]
    assert found.id == created.id
    assert found.matcher.find("vip_1") is not None


async def test_a_change_applies_on_this_node_before_its_answer(database: Outage) -> None:
    sync = sync_of(database)
    await sync.start()
    created = await sync.create_namespace(workspace_of(sync), "new")
    stored = await sync.set_override(created, "x", 7, 1_000)
    found = workspace_of(sync).namespaces["new"].matcher.find("x")
    assert found is not None
    assert found.id == stored.id
    assert await sync.delete_override(created, "x")
    assert created.matcher.find("x") is None
    assert not await sync.delete_override(created, "x")


async def test_all_callers_that_wait_for_a_poll_share_it(database: Outage) -> None:
    sync = sync_of(database)
    await sync.start()
    database.calls.clear()
    await asyncio.gather(*(sync.refresh() for _ in range(500)))
    assert database.calls == ["version"]


async def test_a_poll_in_progress_does_not_count_for_later_callers(database: Outage) -> None:
    sync = sync_of(database)
    await sync.start()
    database.calls.clear()
    database.asked.clear()
    first = asyncio.ensure_future(sync.refresh())
    await database.asked.wait()
    await asyncio.gather(first, sync.refresh())
    assert database.calls == ["version", "version"]


async def test_while_the_database_is_down_no_request_waits_for_it(database: Outage) -> None:
    sync = sync_of(database)
    await sync.start()
    database.is_down = True
    await sync.confirm()
    assert sync.failure is not None
    database.calls.clear()
    for _ in range(50):
        await sync.confirm()
    assert database.calls == []


async def test_a_namespace_first_seen_during_an_outage_is_written_afterwards(database: Outage) -> None:
    sync, other = sync_of(database), sync_of(database)
    await sync.start()
    await other.start()
    database.is_down = True
    made = await sync.create_namespace(workspace_of(sync), "dark")
    assert made.id == namespace_id("w", "dark")
    assert workspace_of(sync).namespaces["dark"] is made
    assert await sync.create_namespace(workspace_of(sync), "dark") is made
    assert (await other.create_namespace(workspace_of(other), "dark")).id == made.id, (
        "every node picks the same id"
    )
    database.is_down = False
    await sync.run_once()
    assert sync.failure is None
    await other.run_once()
    changes = await database.inner.changes(0, timeout_s=TIMEOUT_S)
    assert [row.id for row in changes.namespaces] == [made.id]


async def test_an_id_that_is_taken_is_drawn_again(database: Outage) -> None:
    taken = NamespaceRow(namespace_id("w", "mine"), "elsewhere", "x", 1, None)
    await database.inner.create_namespace(taken, timeout_s=TIMEOUT_S)
    sync = sync_of(database)
    await sync.start()
    made = await sync.create_namespace(workspace_of(sync), "mine")
    assert made.id != taken.id
    assert workspace_of(sync).namespaces["mine"] is made


async def test_a_database_that_was_restored_from_a_copy_is_read_again(
    database: Outage, tmp_path: Path
) -> None:
    sync = sync_of(database)
    await sync.start()
    await sync.create_namespace(workspace_of(sync), "later")
    sync.view.version += 1_000  # the database was ahead once, and has been set back
    await sync.run_once()
    assert sync.reloads == 2
    assert sync.view.version == await database.inner.version(timeout_s=TIMEOUT_S)
    assert "later" in workspace_of(sync).namespaces


async def purge_all(database: Outage) -> None:
    while await database.inner.purge(NOW_MS + 1, timeout_s=TIMEOUT_S):
        pass


async def test_a_purge_costs_a_node_that_followed_it_nothing_and_frees_its_memory(database: Outage) -> None:
    sync = sync_of(database)
    await sync.start()
    namespace = await sync.create_namespace(workspace_of(sync), "one")
    await sync.set_override(namespace, "a", 1, 1_000)
    await sync.set_override(namespace, "b", 1, 1_000)
    await sync.delete_override(namespace, "a")
    await sync.run_once()
    assert [row.identifier for row in namespace.overrides()] == ["a", "b"]
    await purge_all(database)
    await sync.run_once()
    assert sync.reloads == 1, "the one of its start"
    assert [row.identifier for row in namespace.overrides()] == ["b"]
    database.calls.clear()
    await sync.run_once()
    assert database.calls == ["version"]


async def test_a_node_that_missed_purged_marks_reads_everything(database: Outage) -> None:
    sleeper, other = sync_of(database), sync_of(database)
    await other.start()
    namespace = await other.create_namespace(workspace_of(other), "one")
    await other.set_override(namespace, "a", 1, 1_000)
    for name in ("revoked", "kept"):
        await database.inner.put_key(key_row(name), timeout_s=TIMEOUT_S)
    await sleeper.start()
    assert sleeper.view.key(digest_of("revoked")) is not None
    await other.delete_override(namespace, "a")
    await database.inner.put_key(key_row("revoked")._replace(revoked_at_ms=1), timeout_s=TIMEOUT_S)
    await database.inner.put_key(key_row("kept"), timeout_s=TIMEOUT_S)
    await purge_all(database)
    await sleeper.run_once()
    assert sleeper.reloads == 2
    assert sleeper.view.key(digest_of("revoked")) is None, "the mark was never seen, and is not needed"
    assert sleeper.view.key(digest_of("kept")) is not None
    assert workspace_of(sleeper).namespaces["one"].matcher.find("a") is None


@pytest.mark.parametrize("reads", ["changes", "purged_version"])
async def test_a_purge_in_the_middle_of_a_reading_is_noticed(database: Outage, reads: str) -> None:
    sync, other = sync_of(database), sync_of(database)
    await other.start()
    namespace = await other.create_namespace(workspace_of(other), "one")
    await other.set_override(namespace, "a", 1, 1_000)
    await sync.start()
    await other.create_namespace(workspace_of(other), "two")

    strikes = []

    async def strike() -> None:
        strikes.append(database.before)
        database.before = None
        await other.delete_override(namespace, "a")
        await purge_all(database)

    database.before = (reads, strike)
    await sync.run_once()
    assert len(strikes) == 1
    assert workspace_of(sync).namespaces["one"].matcher.find("a") is None
    assert "two" in workspace_of(sync).namespaces


async def test_a_purge_in_the_middle_of_a_full_reading_is_noticed(database: Outage) -> None:
    sync, other = sync_of(database), sync_of(database)
    await other.start()
    namespace = await other.create_namespace(workspace_of(other), "one")
    await other.set_override(namespace, "a", 1, 1_000)

    strikes = []

    async def strike() -> None:
        # The rows have been read by now; the override was live in them.
        strikes.append(database.before)
        database.before = None
        await other.delete_override(namespace, "a")
        await purge_all(database)

    database.before = ("purged_version", strike)
    await sync.start()
    assert len(strikes) == 1
    assert workspace_of(sync).namespaces["one"].matcher.find("a") is None


async def test_the_node_that_owns_the_catalog_purges_it(
    database: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_sync, "PURGE_AGE_MS", 0)
    monkeypatch.setattr(catalog_sync, "PURGE_INTERVAL_S", 0.0)
    for purges in (False, True):
        sync = sync_of(database, purges=purges)
        await sync.start()
        namespace = await sync.create_namespace(workspace_of(sync), "one")
        await sync.set_override(namespace, "a", 1, 1_000)
        await database.inner.delete_override(namespace.id, "a", deleted_at_ms=NOW_MS - 1, timeout_s=TIMEOUT_S)
        await sync.run_once()
        left = (await database.inner.changes(0, timeout_s=TIMEOUT_S)).overrides
        assert [row.identifier for row in left] == ([] if purges else ["a"])


async def test_the_search_for_rows_to_purge_is_rare(database: Outage) -> None:
    sync = sync_of(database, purges=True)
    await sync.start()
    for _ in range(5):
        await sync.run_once()
    assert database.calls.count("purge") == 1


async def test_a_workspace_and_a_namespace_have_ceilings(
    database: Outage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_sync, "NAMESPACES_MAX", 2)
    monkeypatch.setattr(catalog_sync, "OVERRIDES_MAX", 1)
    sync = sync_of(database)
    await sync.start()
    namespace = await sync.create_namespace(workspace_of(sync), "one")
    await sync.create_namespace(workspace_of(sync), "two")
    with pytest.raises(CatalogFull, match="2 namespaces"):
        await sync.create_namespace(workspace_of(sync), "three")
    await sync.set_override(namespace, "a", 1, 1_000)
    await sync.set_override(namespace, "a", 2, 1_000)
    with pytest.raises(CatalogFull, match="1 overrides"):
        await sync.set_override(namespace, "b", 1, 1_000)


async def test_a_stop_leaves_the_newest_view_in_the_snapshot(database: Outage, tmp_path: Path) -> None:
    snapshot = SnapshotFile(tmp_path / "snapshot", "mysql://here")
    sync = sync_of(database, snapshot)
    await sync.start()
    namespace = await sync.create_namespace(workspace_of(sync), "one")
    await sync.set_override(namespace, "a", 1, 1_000)
    database.is_down = True
    await sync.close()

    later = sync_of(database, snapshot)
    await later.start()
    assert workspace_of(later).namespaces["one"].matcher.find("a") is not None


async def test_a_start_without_the_database_uses_the_snapshot(database: Outage, tmp_path: Path) -> None:
    snapshot = SnapshotFile(tmp_path / "snapshot", "mysql://here")
    sync = sync_of(database, snapshot)
    await sync.start()
    namespace = await sync.create_namespace(workspace_of(sync), "one")
    await sync.set_override(namespace, "a", 1, 1_000)
    snapshot.save(sync.view.export(), NOW_MS)

    database.is_down = True
    later = sync_of(database, snapshot)
    await later.start()
    assert later.is_loaded
    assert workspace_of(later).namespaces["one"].matcher.find("a") is not None
    # When the database is back, all changes of the meantime are read.
    row = OverrideRow("rlor_x", namespace.id, "b", 1, 1_000, None)
    await database.inner.set_override(row, timeout_s=TIMEOUT_S)
    await database.inner.delete_override(namespace.id, "a", deleted_at_ms=1, timeout_s=TIMEOUT_S)
    database.is_down = False
    await later.run_once()
    matcher = workspace_of(later).namespaces["one"].matcher
    assert matcher.find("a") is None
    assert matcher.find("b") is not None


def test_a_snapshot_is_private_and_bound_to_its_database_and_age(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    view = CatalogView()
    view.put_workspace(WorkspaceRow("w", "w", True, 5, 1_000, 3))
    snapshot = SnapshotFile(path, "mysql://user:hunter2@here")
    snapshot.save(view.export(), NOW_MS)
    assert path.stat().st_mode & 0o777 == 0o600
    assert b"hunter2" not in path.read_bytes()
    loaded, _ = snapshot.load(NOW_MS + 60_000, 60_000)
    assert loaded == view.export()
    assert snapshot.load(NOW_MS + 60_001, 60_000)[0] is None
    assert SnapshotFile(path, "mysql://elsewhere").load(NOW_MS, 60_000)[0] is None
    path.write_bytes(path.read_bytes()[:-3])
    assert snapshot.load(NOW_MS, 60_000)[0] is None
    path.write_bytes(b"\xff" * 100)
    assert snapshot.load(NOW_MS, 60_000)[0] is None
    path.unlink()
    assert snapshot.load(NOW_MS, 60_000) == (None, "there is none")
    assert list(tmp_path.iterdir()) == [], "nothing else is left behind"


def spoil(tmp_path: Path, statement: str, *values: bytes | int) -> None:
    """Another program writes to the catalog, as a writer of ours would: with a new version."""
    with closing(sqlite3.connect(tmp_path / "catalog.db")) as other, other:
        other.execute("UPDATE ratelimit_catalog SET version = version + 1")
        other.execute(
            f"{statement}, version = (SELECT version FROM ratelimit_catalog) WHERE id = ?",
            values,
        )


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


async def test_a_start_skips_rows_that_cannot_be_read_and_logs_them_once(
    database: Outage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = sync_of(database)
    await first.start()
    created = await first.create_namespace(workspace_of(first), "n")
    stored = await first.set_override(created, "blocked", 0, 1_000)
    await database.inner.put_key(key_row("tg_a"), timeout_s=TIMEOUT_S)
    await database.inner.put_workspace(WorkspaceRow("v", "v", True, 5, 1_000), timeout_s=TIMEOUT_S)
    lost = key_row("tg_b")._replace(workspace_id="v")
    await database.inner.put_key(lost, timeout_s=TIMEOUT_S)
    spoil(tmp_path, "UPDATE ratelimit_overrides SET identifier = ?", b"\xff\xfe", stored.id.encode())
    spoil(tmp_path, "UPDATE ratelimit_workspaces SET quota = ?", -5, b"v")
    caplog.clear()
    sync = sync_of(database)
    await sync.start()
    await sync.run_once()
    await sync.reload()
    (line,) = lines(caplog)
    assert line == (
        f"rows of the catalog cannot be read and are skipped: 1 of ratelimit_overrides ({stored.id}), "
        "1 of ratelimit_workspaces (v); another program has written them"
    )
    assert sync.failure is None
    assert Callers(sync.view).find(b"", b"tg_a") is not None
    assert Callers(sync.view).find(b"", b"tg_b") is None, "a key of a workspace that cannot be read"
    assert workspace_of(sync).namespaces["n"].matcher.find("blocked") is None


async def test_a_key_that_can_no_longer_be_read_is_not_accepted_and_changes_still_arrive(
    database: Outage, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for key in ("tg_a", "tg_b"):
        await database.inner.put_key(key_row(key), timeout_s=TIMEOUT_S)
    caplog.set_level("INFO")
    sync = sync_of(database)
    await sync.start()
    callers = Callers(sync.view)
    assert callers.find(b"", b"tg_a") is not None
    spoil(tmp_path, "UPDATE ratelimit_keys SET revoked_at = 7, name = ?", b"\xff", b"key_tg_a")
    await sync.run_once()
    assert callers.find(b"", b"tg_a") is None
    assert sync.unreadable == {("ratelimit_keys", "key_tg_a")}
    await database.inner.revoke_key("key_tg_b", revoked_at_ms=7, timeout_s=TIMEOUT_S)
    await sync.run_once()
    assert callers.find(b"", b"tg_b") is None
    spoil(tmp_path, "UPDATE ratelimit_keys SET revoked_at = NULL, name = ?", b"", b"key_tg_a")
    await sync.run_once()
    assert callers.find(b"", b"tg_a") is not None, "repaired"
    await sync.reload()
    assert lines(caplog) == [
        f"{describe_unreadable([('ratelimit_keys', 'key_tg_a')])}; another program has written them",
        "all rows of the catalog can be read again",
    ]


async def test_a_poll_that_fails_unexpectedly_is_logged_once_until_one_succeeds(
    database: Outage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(catalog_sync, "POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(catalog_sync, "POLL_SPACING_S", 0.0)
    sync = sync_of(database)
    await sync.start()
    polls = 0

    async def fails() -> None:
        nonlocal polls
        polls += 1
        if polls == 5:
            database.before = None
        raise KeyError

    database.before = ("version", fails)
    caplog.set_level("INFO")
    running = asyncio.create_task(sync.run())
    async with asyncio.timeout(TIMEOUT_S):
        while polls < 5 or sync.failure is not None:  # noqa: ASYNC110 - the loop sets no event
            await asyncio.sleep(0)
    running.cancel()
    assert lines(caplog) == [
        "a poll of the catalog failed unexpectedly; serving the last known rows",
        "the catalog database answers again",
    ]
    assert caplog.records[0].exc_info is not None
