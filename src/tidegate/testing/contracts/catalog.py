"""The contract of `tidegate.ports.Catalog` as tests, for every catalog.

Subclasses define the fixture `place`. Each test creates its own workspaces, so that tests can share a database. The
suite does not know a particular store.
"""

from __future__ import annotations

import asyncio
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import pytest

from tidegate.errors import InvalidInput
from tidegate.ports import Catalog, CatalogChanges, KeyRow, NamespaceRow, OverrideRow, WorkspaceRow

__all__ = ["CatalogContract", "CatalogPlace", "OpenCatalog", "all_changes", "key", "namespace", "override"]

TIMEOUT_S: Final = 20.0
INT64_MAX: Final = 2**63 - 1

# Names that some collation, encoding or C string confuses with another.
NASTY_NAMES: Final = (
    *("a", "A", "á", "a\u0301", "ß", "ss", "SS", "ı", "i", "İ", "a ", "a  ", " a", "a\n", "a\x00", "\x00"),
    *("\U0001f600", "\u200b", "%", "_", "'", '"', "\\", "?", "$1", ";", "*", "x" * 512, "\U0001f600" * 512),
)

_numbers = itertools.count()

OpenCatalog = Callable[[], Awaitable[Catalog]]


def key(workspace_id: str, name: str = "") -> KeyRow:
    number = next(_numbers)
    digest = number.to_bytes(32, "big")
    return KeyRow(
        f"key_{number}", workspace_id, digest, name, "tg_abcd", ("ratelimit.*.limit",), 1, None, True, None
    )


def namespace(workspace_id: str, name: str) -> NamespaceRow:
    return NamespaceRow(f"rlns_{next(_numbers)}", workspace_id, name, 5, None)


def override(namespace_id: str, identifier: str, limit: int = 10, duration_ms: int = 1_000) -> OverrideRow:
    return OverrideRow(f"rlor_{next(_numbers)}", namespace_id, identifier, limit, duration_ms, None)


async def all_changes(catalog: Catalog, since: int = 0) -> CatalogChanges:
    """All changes after `since`, in as many reads as necessary."""
    parts = []
    while True:
        part = await catalog.changes(since, timeout_s=TIMEOUT_S)
        parts.append(part)
        if part.is_complete:
            return CatalogChanges(
                part.version,
                True,
                [row for each in parts for row in each.workspaces],
                [row for each in parts for row in each.keys],
                [row for each in parts for row in each.namespaces],
                [row for each in parts for row in each.overrides],
                tuple(row for each in parts for row in each.unreadable),
            )
        assert part.version > since, "an incomplete answer must have a later version"
        since = part.version


class CatalogPlace(ABC):
    """The store behind the catalogs of one test, with its schema."""

    @abstractmethod
    def catalog(self) -> Catalog:
        """A catalog for one more node, not yet opened."""


class CatalogContract:
    """Tests for all catalogs."""

    @pytest.fixture
    async def open_catalog(self, place: CatalogPlace) -> AsyncIterator[OpenCatalog]:
        opened: list[Catalog] = []

        async def open_one() -> Catalog:
            catalog = place.catalog()
            opened.append(catalog)
            await catalog.open(timeout_s=TIMEOUT_S)
            return catalog

        yield open_one
        for catalog in opened:
            await catalog.close()

    @pytest.fixture
    async def catalog(self, open_catalog: OpenCatalog) -> Catalog:
        return await open_catalog()

    @pytest.fixture
    async def workspace_id(self, catalog: Catalog) -> str:
        workspace = WorkspaceRow(f"ws {next(_numbers)}", "", True, None, None)
        return (await catalog.put_workspace(workspace, timeout_s=TIMEOUT_S)).id

    async def test_every_write_raises_the_version_and_stamps_its_row(
        self, catalog: Catalog, workspace_id: str
    ) -> None:
        before = await catalog.version(timeout_s=TIMEOUT_S)
        stored_key = await catalog.put_key(key(workspace_id), timeout_s=TIMEOUT_S)
        stored_namespace = await catalog.create_namespace(namespace(workspace_id, "n"), timeout_s=TIMEOUT_S)
        stored = await catalog.set_override(override(stored_namespace.id, "i"), timeout_s=TIMEOUT_S)
        versions = [stored_key.version, stored_namespace.version, stored.version]
        assert versions == sorted(set(versions))
        assert versions[0] > before
        assert await catalog.version(timeout_s=TIMEOUT_S) == versions[-1]

    async def test_changes_answers_what_was_written_since_and_nothing_else(
        self, catalog: Catalog, open_catalog: OpenCatalog, workspace_id: str
    ) -> None:
        other = await open_catalog()
        since = (await all_changes(other)).version
        assert await all_changes(other, since) == CatalogChanges(since, True, [], [], [], [])
        stored_key = await catalog.put_key(key(workspace_id, "ci"), timeout_s=TIMEOUT_S)
        stored_namespace = await catalog.create_namespace(namespace(workspace_id, "n"), timeout_s=TIMEOUT_S)
        stored = await catalog.set_override(override(stored_namespace.id, "i"), timeout_s=TIMEOUT_S)
        changes = await all_changes(other, since)
        assert changes == CatalogChanges(stored.version, True, [], [stored_key], [stored_namespace], [stored])

    async def test_a_workspace_comes_back_as_it_was_put_and_is_replaced_by_the_next_put(
        self, catalog: Catalog
    ) -> None:
        row = WorkspaceRow(f"ws {next(_numbers)} ünï", "Ümläut", True, None, None)
        first = await catalog.put_workspace(row, timeout_s=TIMEOUT_S)
        changed = row._replace(enabled=False, quota=INT64_MAX, quota_duration_ms=60_000)
        second = await catalog.put_workspace(changed, timeout_s=TIMEOUT_S)
        assert second == changed._replace(version=second.version)
        assert second.version > first.version
        found = [each for each in (await all_changes(catalog)).workspaces if each.id == row.id]
        assert found == [second]

    async def test_a_key_expires_and_is_revoked_and_stays_revoked(
        self, catalog: Catalog, workspace_id: str
    ) -> None:
        stored = await catalog.put_key(key(workspace_id, "ünï"), timeout_s=TIMEOUT_S)
        other = await catalog.put_key(key(workspace_id), timeout_s=TIMEOUT_S)
        expired = await catalog.expire_key(stored.id, expires_at_ms=7, timeout_s=TIMEOUT_S)
        assert expired is not None
        assert expired == stored._replace(expires_at_ms=7, version=expired.version)
        revoked = await catalog.revoke_key(stored.id, revoked_at_ms=8, timeout_s=TIMEOUT_S)
        assert revoked is not None
        assert revoked == expired._replace(revoked_at_ms=8, version=revoked.version)
        assert stored.version < expired.version < revoked.version
        assert await catalog.expire_key(stored.id, expires_at_ms=9, timeout_s=TIMEOUT_S) == revoked
        assert await catalog.revoke_key(stored.id, revoked_at_ms=9, timeout_s=TIMEOUT_S) == revoked
        assert await catalog.expire_key("key_nobody", expires_at_ms=9, timeout_s=TIMEOUT_S) is None
        assert await catalog.revoke_key("key_nobody", revoked_at_ms=9, timeout_s=TIMEOUT_S) is None
        assert await catalog.version(timeout_s=TIMEOUT_S) == revoked.version, "nothing to do leaves no trace"
        found = [each for each in (await all_changes(catalog)).keys if each.workspace_id == workspace_id]
        assert found == [other, revoked]

    async def test_a_key_that_expires_and_is_revoked_at_the_same_moment_is_revoked(
        self, catalog: Catalog, open_catalog: OpenCatalog, workspace_id: str
    ) -> None:
        others = [await open_catalog() for _ in range(2)]
        for moment_ms in range(1, 11):
            row = await catalog.put_key(key(workspace_id), timeout_s=TIMEOUT_S)
            await asyncio.gather(
                others[0].expire_key(row.id, expires_at_ms=moment_ms, timeout_s=TIMEOUT_S),
                others[1].revoke_key(row.id, revoked_at_ms=moment_ms, timeout_s=TIMEOUT_S),
                catalog.expire_key(row.id, expires_at_ms=moment_ms, timeout_s=TIMEOUT_S),
            )
            (held,) = [each for each in (await all_changes(catalog)).keys if each.id == row.id]
            assert held.revoked_at_ms == moment_ms

    async def test_a_key_comes_back_as_it_was_put_and_is_replaced_by_the_next_put(
        self, catalog: Catalog, workspace_id: str
    ) -> None:
        row = key(workspace_id, "für CI")._replace(permissions=("a", "b.*", 'c"\\'), expires_at_ms=7)
        await catalog.put_key(row, timeout_s=TIMEOUT_S)
        changed = row._replace(enabled=False, revoked_at_ms=INT64_MAX, expires_at_ms=None, permissions=())
        stored = await catalog.put_key(changed, timeout_s=TIMEOUT_S)
        found = [each for each in (await all_changes(catalog)).keys if each.id == row.id]
        assert found == [changed._replace(version=stored.version)]

    async def test_a_key_needs_its_workspace_and_a_digest_of_its_own(
        self, catalog: Catalog, workspace_id: str
    ) -> None:
        with pytest.raises(InvalidInput, match="workspace_id"):
            await catalog.put_key(key("nobody"), timeout_s=TIMEOUT_S)
        stored = await catalog.put_key(key(workspace_id), timeout_s=TIMEOUT_S)
        with pytest.raises(InvalidInput, match="digest"):
            await catalog.put_key(key(workspace_id)._replace(digest=stored.digest), timeout_s=TIMEOUT_S)
        assert await catalog.version(timeout_s=TIMEOUT_S) == stored.version, "a refused write leaves no trace"

    async def test_a_namespace_is_created_once_however_many_ask(
        self, open_catalog: OpenCatalog, workspace_id: str
    ) -> None:
        catalogs = [await open_catalog() for _ in range(4)]
        answers = await asyncio.gather(
            *(
                each.create_namespace(namespace(workspace_id, "shared"), timeout_s=TIMEOUT_S)
                for each in catalogs
                for _ in range(5)
            )
        )
        assert len(set(answers)) == 1
        found = [
            each for each in (await all_changes(catalogs[0])).namespaces if each.workspace_id == workspace_id
        ]
        assert found == [answers[0]]

    async def test_asking_for_a_namespace_that_exists_changes_nothing(
        self, catalog: Catalog, workspace_id: str
    ) -> None:
        stored = await catalog.create_namespace(namespace(workspace_id, "n"), timeout_s=TIMEOUT_S)
        assert await catalog.create_namespace(namespace(workspace_id, "n"), timeout_s=TIMEOUT_S) == stored
        assert await catalog.version(timeout_s=TIMEOUT_S) == stored.version

    async def test_an_id_that_another_namespace_has_is_refused(
        self, catalog: Catalog, workspace_id: str
    ) -> None:
        stored = await catalog.create_namespace(namespace(workspace_id, "n"), timeout_s=TIMEOUT_S)
        with pytest.raises(InvalidInput, match="id"):
            await catalog.create_namespace(
                namespace(workspace_id, "m")._replace(id=stored.id), timeout_s=TIMEOUT_S
            )

    async def test_names_and_identifiers_are_compared_byte_by_byte(
        self, catalog: Catalog, workspace_id: str
    ) -> None:
        namespaces = [
            await catalog.create_namespace(namespace(workspace_id, name), timeout_s=TIMEOUT_S)
            for name in NASTY_NAMES
        ]
        assert [each.name for each in namespaces] == list(NASTY_NAMES)
        assert len({each.id for each in namespaces}) == len(NASTY_NAMES)
        overrides = [
            await catalog.set_override(override(namespaces[0].id, name), timeout_s=TIMEOUT_S)
            for name in NASTY_NAMES
        ]
        assert len({each.id for each in overrides}) == len(NASTY_NAMES)
        changes = await all_changes(catalog)
        assert [each for each in changes.namespaces if each.workspace_id == workspace_id] == namespaces
        assert [each for each in changes.overrides if each.namespace_id == namespaces[0].id] == overrides

    async def test_the_same_name_in_another_workspace_is_another_namespace(
        self, catalog: Catalog, workspace_id: str
    ) -> None:
        here = await catalog.create_namespace(namespace(workspace_id, "n"), timeout_s=TIMEOUT_S)
        there = await catalog.create_namespace(namespace(workspace_id + "x", "n"), timeout_s=TIMEOUT_S)
        assert here.id != there.id

    async def test_a_deleted_namespace_is_marked_and_can_be_restored(
        self, catalog: Catalog, workspace_id: str
    ) -> None:
        stored = await catalog.create_namespace(namespace(workspace_id, "n"), timeout_s=TIMEOUT_S)
        assert await catalog.delete_namespace(stored.id, deleted_at_ms=9, timeout_s=TIMEOUT_S)
        again = await catalog.create_namespace(namespace(workspace_id, "n"), timeout_s=TIMEOUT_S)
        assert (again.id, again.deleted_at_ms) == (stored.id, 9)
        assert await catalog.delete_namespace(stored.id, deleted_at_ms=None, timeout_s=TIMEOUT_S)
        again = await catalog.create_namespace(namespace(workspace_id, "n"), timeout_s=TIMEOUT_S)
        assert (again.id, again.deleted_at_ms) == (stored.id, None)
        assert not await catalog.delete_namespace("rlns_nobody", deleted_at_ms=9, timeout_s=TIMEOUT_S)

    async def test_setting_an_override_again_keeps_its_id(self, catalog: Catalog) -> None:
        row = override(f"rlns_{next(_numbers)}", "premium_*")
        first = await catalog.set_override(row, timeout_s=TIMEOUT_S)
        again = row._replace(id="rlor_unused", limit=INT64_MAX, duration_ms=INT64_MAX)
        second = await catalog.set_override(again, timeout_s=TIMEOUT_S)
        assert second == again._replace(id=first.id, version=second.version)
        found = [
            each for each in (await all_changes(catalog)).overrides if each.namespace_id == row.namespace_id
        ]
        assert found == [second]

    async def test_an_override_can_be_put_into_shadow_mode_and_back(self, catalog: Catalog) -> None:
        row = override(f"rlns_{next(_numbers)}", "x")
        for shadow in True, False, True:
            stored = await catalog.set_override(row._replace(shadow=shadow), timeout_s=TIMEOUT_S)
            found = [
                each
                for each in (await all_changes(catalog)).overrides
                if each.namespace_id == row.namespace_id
            ]
            assert found == [stored] and stored.shadow is shadow

    async def test_a_deleted_override_is_marked_and_is_active_again_when_it_is_set(
        self, catalog: Catalog
    ) -> None:
        row = override(f"rlns_{next(_numbers)}", "x", limit=0)
        stored = await catalog.set_override(row, timeout_s=TIMEOUT_S)
        gone = await catalog.delete_override(row.namespace_id, "x", deleted_at_ms=3, timeout_s=TIMEOUT_S)
        assert gone is not None
        assert gone == stored._replace(deleted_at_ms=3, version=gone.version)
        for identifier in ("x", "y"):
            missing = await catalog.delete_override(
                row.namespace_id, identifier, deleted_at_ms=4, timeout_s=TIMEOUT_S
            )
            assert missing is None
        assert await catalog.version(timeout_s=TIMEOUT_S) == gone.version
        back = await catalog.set_override(row, timeout_s=TIMEOUT_S)
        assert back == stored._replace(version=back.version)

    async def test_a_reader_never_misses_a_writer_however_they_interleave(
        self, open_catalog: OpenCatalog, workspace_id: str
    ) -> None:
        writers = [await open_catalog() for _ in range(3)]
        reader = await open_catalog()
        seen: dict[str, NamespaceRow] = {}
        written: list[NamespaceRow] = []
        is_done = False

        async def write(catalog: Catalog, writer: int) -> None:
            for number in range(15):
                row = namespace(workspace_id, f"{writer}.{number}")
                written.append(await catalog.create_namespace(row, timeout_s=TIMEOUT_S))

        async def read() -> None:
            since = 0
            while True:
                was_done = is_done
                changes = await all_changes(reader, since)
                since = changes.version
                for row in changes.namespaces:
                    if row.workspace_id == workspace_id:
                        seen[row.id] = row
                if was_done:
                    return

        reading = asyncio.ensure_future(read())
        await asyncio.gather(*(write(catalog, index) for index, catalog in enumerate(writers)))
        is_done = True
        await reading
        assert sorted(seen.values()) == sorted(written)
        assert len(written) == 45

    async def test_what_was_marked_before_the_cutoff_is_purged_and_nothing_else(
        self, catalog: Catalog, workspace_id: str
    ) -> None:
        here = await catalog.create_namespace(namespace(workspace_id, "here"), timeout_s=TIMEOUT_S)
        gone = await catalog.create_namespace(namespace(workspace_id, "gone"), timeout_s=TIMEOUT_S)
        await catalog.delete_namespace(gone.id, deleted_at_ms=1, timeout_s=TIMEOUT_S)
        kept = [
            await catalog.set_override(override(here.id, "live"), timeout_s=TIMEOUT_S),
            await catalog.set_override(override(gone.id, "live in a deleted one"), timeout_s=TIMEOUT_S),
        ]
        for home, identifier, deleted_at_ms in [(here, "old", 99), (gone, "old", 1), (here, "new", 100)]:
            await catalog.set_override(override(home.id, identifier), timeout_s=TIMEOUT_S)
            marked = await catalog.delete_override(
                home.id, identifier, deleted_at_ms=deleted_at_ms, timeout_s=TIMEOUT_S
            )
            assert marked is not None
            if identifier == "new":
                kept.append(marked)
        rows = [key(workspace_id)._replace(revoked_at_ms=moment) for moment in (99, 100, None)]
        keys = [await catalog.put_key(row, timeout_s=TIMEOUT_S) for row in rows]
        expired = await catalog.put_key(key(workspace_id)._replace(expires_at_ms=1), timeout_s=TIMEOUT_S)

        while await catalog.purge(100, timeout_s=TIMEOUT_S):
            pass
        left = await all_changes(catalog)
        assert [row for row in left.overrides if row.namespace_id in (here.id, gone.id)] == kept
        assert [row for row in left.keys if row.workspace_id == workspace_id] == [*keys[1:], expired]
        again = await catalog.create_namespace(namespace(workspace_id, "gone"), timeout_s=TIMEOUT_S)
        assert (again.id, again.deleted_at_ms) == (gone.id, 1), "a deleted namespace stays in the changes"
        before = await catalog.version(timeout_s=TIMEOUT_S)
        assert await catalog.purge(100, timeout_s=TIMEOUT_S) == 0
        assert await catalog.version(timeout_s=TIMEOUT_S) == before, "nothing to do leaves no trace"

    async def test_what_was_purged_can_be_created_again(self, catalog: Catalog, workspace_id: str) -> None:
        home = await catalog.create_namespace(namespace(workspace_id, "n"), timeout_s=TIMEOUT_S)
        first = await catalog.set_override(override(home.id, "x"), timeout_s=TIMEOUT_S)
        await catalog.delete_override(home.id, "x", deleted_at_ms=1, timeout_s=TIMEOUT_S)
        while await catalog.purge(2, timeout_s=TIMEOUT_S):
            pass
        missing = await catalog.delete_override(home.id, "x", deleted_at_ms=1, timeout_s=TIMEOUT_S)
        assert missing is None
        second = await catalog.set_override(override(home.id, "x"), timeout_s=TIMEOUT_S)
        assert second.id != first.id
        assert second in (await all_changes(catalog)).overrides

    async def test_the_purged_version_is_above_that_of_readers_that_have_not_seen_the_mark_and_of_no_others(
        self, catalog: Catalog, workspace_id: str
    ) -> None:
        home = await catalog.create_namespace(namespace(workspace_id, "n"), timeout_s=TIMEOUT_S)
        live = await catalog.set_override(override(home.id, "x"), timeout_s=TIMEOUT_S)
        while await catalog.purge(2, timeout_s=TIMEOUT_S):
            pass
        assert await catalog.purged_version(timeout_s=TIMEOUT_S) < live.version
        marked = await catalog.delete_override(home.id, "x", deleted_at_ms=1, timeout_s=TIMEOUT_S)
        assert marked is not None
        assert await catalog.purge(2, timeout_s=TIMEOUT_S) == 1
        purged = await catalog.purged_version(timeout_s=TIMEOUT_S)
        assert live.version < purged <= marked.version, "a reader that has read so far has missed nothing"
        assert await catalog.version(timeout_s=TIMEOUT_S) > purged, "others notice that something happened"

    async def test_the_key_that_was_written_last_is_never_purged(
        self, catalog: Catalog, workspace_id: str
    ) -> None:
        first = await catalog.put_key(key(workspace_id)._replace(revoked_at_ms=1), timeout_s=TIMEOUT_S)
        while await catalog.purge(2, timeout_s=TIMEOUT_S):
            pass
        assert first in (await all_changes(catalog)).keys
        second = await catalog.put_key(key(workspace_id)._replace(revoked_at_ms=1), timeout_s=TIMEOUT_S)
        while await catalog.purge(2, timeout_s=TIMEOUT_S):
            pass
        left = (await all_changes(catalog)).keys
        assert second in left
        assert first not in left

    async def test_a_purge_never_deletes_what_is_restored_at_the_same_moment(
        self, catalog: Catalog, open_catalog: OpenCatalog, workspace_id: str
    ) -> None:
        cleaner = await open_catalog()
        home = await catalog.create_namespace(namespace(workspace_id, "n"), timeout_s=TIMEOUT_S)
        for _ in range(10):
            await catalog.set_override(override(home.id, "x"), timeout_s=TIMEOUT_S)
            await catalog.delete_override(home.id, "x", deleted_at_ms=1, timeout_s=TIMEOUT_S)
            stored, _ = await asyncio.gather(
                catalog.set_override(override(home.id, "x"), timeout_s=TIMEOUT_S),
                cleaner.purge(2, timeout_s=TIMEOUT_S),
            )
            rows = (await all_changes(catalog)).overrides
            assert [row for row in rows if row.namespace_id == home.id] == [stored]

    async def test_it_counts_its_statements_and_connections(self, catalog: Catalog) -> None:
        before = catalog.statistics()["statements"]
        await catalog.version(timeout_s=TIMEOUT_S)
        assert catalog.statistics()["statements"] == before + 1
        assert catalog.statistics()["connections_opened"] >= 1

    async def test_closing_twice_is_harmless(self, place: CatalogPlace) -> None:
        catalog = place.catalog()
        await catalog.open(timeout_s=TIMEOUT_S)
        await catalog.close()
        await catalog.close()
