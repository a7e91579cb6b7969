"""Rows of a catalog that another program has changed: part of the contract where a test can write such rows."""

from __future__ import annotations

from tidegate.ports import Catalog, WorkspaceRow
from tidegate.testing.contracts.catalog import (
    TIMEOUT_S,
    CatalogContract,
    CatalogPlace,
    all_changes,
    key,
    namespace,
    override,
)


class WritablePlace(CatalogPlace):
    """A store to which a test writes what Tidegate never does."""

    # How the dialect writes bytes, around their hexadecimal digits.
    binary = ("x'", "'")

    def sql(self, statement: str) -> None:
        raise NotImplementedError

    def spoil(self, table: str, row_id: str, column: str, value: bytes | int) -> None:
        written = value if isinstance(value, int) else value.hex().join(self.binary)
        where = row_id.encode().hex().join(self.binary)
        self.sql(f"UPDATE ratelimit_{table} SET {column} = {written} WHERE id = {where}")


class UnreadableRowsContract(CatalogContract):
    async def test_rows_that_cannot_be_read_are_skipped_and_named_and_all_others_read(
        self, place: WritablePlace, catalog: Catalog, workspace_id: str
    ) -> None:
        good_key = await catalog.put_key(key(workspace_id), timeout_s=TIMEOUT_S)
        good_namespace = await catalog.create_namespace(namespace(workspace_id, "n"), timeout_s=TIMEOUT_S)
        good_override = await catalog.set_override(override(good_namespace.id, "i"), timeout_s=TIMEOUT_S)
        bad = set()
        for column, value in (("name", b"\xff\xfe"), ("quota", -5), ("quota_duration_ms", 0)):
            row = WorkspaceRow(f"{workspace_id} bad {column}", "", True, 5, 60_000)
            await catalog.put_workspace(row, timeout_s=TIMEOUT_S)
            place.spoil("workspaces", row.id, column, value)
            bad.add(("ratelimit_workspaces", row.id))
        for column, value in (
            ("name", b"\xc3"),
            ("hint", b"caf\xe9"),
            ("permissions", b"\xff"),
            ("permissions", b"ratelimit.*.limit"),
            ("permissions", b'"ratelimit.*.limit"'),
            ("permissions", b'{"ratelimit.*.limit": true}'),
            ("permissions", b"[1]"),
            ("permissions", b"[" * 50_000),
        ):
            stored = await catalog.put_key(key(workspace_id), timeout_s=TIMEOUT_S)
            place.spoil("keys", stored.id, column, value)
            bad.add(("ratelimit_keys", stored.id))
        spoiled = await catalog.create_namespace(namespace(workspace_id, "m"), timeout_s=TIMEOUT_S)
        place.spoil("namespaces", spoiled.id, "name", b"\x80")
        bad.add(("ratelimit_namespaces", spoiled.id))
        changed = await catalog.set_override(override(good_namespace.id, "j"), timeout_s=TIMEOUT_S)
        place.spoil("overrides", changed.id, "identifier", b"\xff\xfe")
        bad.add(("ratelimit_overrides", changed.id))
        whole = await all_changes(catalog)
        assert set(whole.unreadable) == bad
        assert len(whole.unreadable) == len(bad)
        assert [each.id for each in whole.workspaces] == [workspace_id]
        assert (whole.keys, whole.namespaces, whole.overrides) == (
            [good_key],
            [good_namespace],
            [good_override],
        )
        later = await catalog.revoke_key(good_key.id, revoked_at_ms=7, timeout_s=TIMEOUT_S)
        changes = await all_changes(catalog, whole.version)
        assert (changes.keys, changes.unreadable) == ([later], ()), "and a later change arrives without them"

    async def test_a_key_that_cannot_be_read_can_be_revoked(
        self, place: WritablePlace, catalog: Catalog, workspace_id: str
    ) -> None:
        stored = await catalog.put_key(key(workspace_id), timeout_s=TIMEOUT_S)
        place.spoil("keys", stored.id, "name", b"\xff")
        assert await catalog.revoke_key(stored.id, revoked_at_ms=7, timeout_s=TIMEOUT_S) is None
        changes = await all_changes(catalog, stored.version)
        assert changes.unreadable == (("ratelimit_keys", stored.id),), "so that nodes notice"
        place.spoil("keys", stored.id, "name", b"x")
        (held,) = (await all_changes(catalog, stored.version)).keys
        assert held.revoked_at_ms == 7
