from __future__ import annotations

from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate.ports import CatalogChanges, KeyRow, NamespaceRow, OverrideRow, WorkspaceRow
from tidegate.server.catalog.overrides import Override
from tidegate.server.catalog.view import CatalogView, NamespaceView

Row = WorkspaceRow | KeyRow | NamespaceRow | OverrideRow


def workspace(workspace_id: str, version: int, **changes: Any) -> WorkspaceRow:
    return WorkspaceRow(workspace_id, workspace_id, True, None, None, version)._replace(**changes)


def key(key_id: str, version: int, **changes: Any) -> KeyRow:
    digest = key_id.encode().ljust(32, b".")
    return KeyRow(key_id, "w", digest, "", "", ("ratelimit.*.limit",), 1, None, True, None, version)._replace(
        **changes
    )


def namespace(namespace_id: str, name: str, version: int, **changes: Any) -> NamespaceRow:
    return NamespaceRow(namespace_id, "w", name, 1, None, version)._replace(**changes)


def override(override_id: str, identifier: str, version: int, **changes: Any) -> OverrideRow:
    return OverrideRow(override_id, "rlns_1", identifier, 5, 1_000, None, version)._replace(**changes)


def view_of(*rows: Row) -> CatalogView:
    view = CatalogView()
    for row in rows:
        apply(view, row)
    return view


def apply(view: CatalogView, row: Row) -> None:
    changes = CatalogChanges(row.version, True, [], [], [], [])
    if isinstance(row, WorkspaceRow):
        changes.workspaces.append(row)
    elif isinstance(row, KeyRow):
        changes.keys.append(row)
    elif isinstance(row, NamespaceRow):
        changes.namespaces.append(row)
    else:
        changes.overrides.append(row)
    view.apply(changes)


def summary(view: CatalogView) -> Any:
    """Everything that a request could look up."""
    exported = view.export()
    return (
        sorted(exported.workspaces),
        sorted(exported.keys),
        sorted(exported.namespaces),
        sorted(exported.overrides),
        {
            workspace_id: {
                name: (found.id, found.is_deleted, sorted(found.matcher))
                for name, found in each.namespaces.items()
            }
            for workspace_id, each in view.workspaces.items()
        },
        [view.key(row.digest) is not None for row in sorted(exported.keys)],
    )


ROWS: list[Row] = [
    workspace("w", 1),
    workspace("w", 9, enabled=False),
    workspace("v", 2),
    key("k", 3),
    key("k", 8, revoked_at_ms=1),
    key("l", 4),
    key("l", 11, enabled=False),
    namespace("rlns_1", "one", 5),
    namespace("rlns_1", "one", 12, deleted_at_ms=7),
    namespace("rlns_2", "two", 6),
    override("rlor_1", "a", 7),
    override("rlor_1", "a", 10, limit=9),
    override("rlor_2", "b*", 13),
    override("rlor_2", "b*", 14, deleted_at_ms=3),
]


@given(st.randoms(use_true_random=False), st.lists(st.sampled_from(ROWS), max_size=6))
@settings(max_examples=200)
def test_rows_may_come_in_any_order_and_again_and_the_newest_stays(chance: Random, again: list[Any]) -> None:
    shuffled = ROWS + again
    chance.shuffle(shuffled)
    assert summary(view_of(*shuffled)) == summary(view_of(*ROWS))


def test_an_exported_view_imports_as_the_same_view() -> None:
    view = view_of(*ROWS)
    copy = CatalogView()
    copy.apply(view.export())
    assert summary(copy) == summary(view)
    assert copy.version == view.version


def test_purged_rows_are_removed_and_nothing_else() -> None:
    view = view_of(
        workspace("w", 1),
        override("rlor_early", "came before its namespace", 2, deleted_at_ms=9),
        namespace("rlns_1", "n", 3, deleted_at_ms=9),
        key("revoked", 4, revoked_at_ms=9),
        key("live", 5),
        override("rlor_a", "gone", 6, deleted_at_ms=9),
        override("rlor_b", "live", 7),
        override("rlor_c", "back", 8, deleted_at_ms=9),
        override("rlor_c", "back", 9),
        override("rlor_d", "again", 10, deleted_at_ms=9),
        override("rlor_d", "again", 8),  # late, and older than the mark
        override("rlor_e", "later", 11, deleted_at_ms=9),
        key("revoked later", 12, revoked_at_ms=9),
    )
    view.forget(10)
    left = view.export()
    assert sorted(row.identifier for row in left.overrides) == ["back", "later", "live"]
    assert sorted(row.id for row in left.keys) == ["live", "revoked later"]
    assert [row.deleted_at_ms for row in left.namespaces] == [9]
    view.forget(12)
    assert sorted(row.identifier for row in view.export().overrides) == ["back", "live"]
    apply(view, override("rlor_new", "gone", 13))
    found = view.namespace("rlns_1")
    assert found is not None
    assert found.matcher.find("gone") is not None


def test_a_change_of_a_key_or_a_workspace_is_a_new_epoch() -> None:
    view = view_of(workspace("w", 1), key("k", 2))
    before = view.epoch
    apply(view, namespace("rlns_1", "one", 3))
    assert view.epoch == before, "a namespace changes no caller"
    apply(view, key("k", 4, enabled=False))
    assert view.epoch > before
    before = view.epoch
    apply(view, workspace("w", 5, enabled=False))
    assert view.epoch > before
    before = view.epoch
    view.become(view_of(workspace("w", 1)))
    assert view.epoch > before


def test_an_id_wins_over_a_name() -> None:
    for rows in (
        [namespace("rlns_1", "one", 2), namespace("rlns_2", "rlns_1", 3)],
        [namespace("rlns_2", "rlns_1", 3), namespace("rlns_1", "one", 2)],
    ):
        view = view_of(workspace("w", 1), *rows)
        assert view.workspaces["w"].namespaces["rlns_1"].id == "rlns_1"
        assert view.workspaces["w"].namespaces["rlns_2"].id == "rlns_2"


def test_a_namespace_that_another_node_had_created_replaces_the_assumed_one() -> None:
    view = view_of(workspace("w", 1))
    view.put_namespace(namespace("rlns_guess", "one", 0))
    view.put_namespace(namespace("rlns_real", "one", 2))
    found = view.workspaces["w"].namespaces
    assert found["one"].id == "rlns_real"
    assert "rlns_guess" not in found
    assert [row.id for row in view.export().namespaces] == ["rlns_real"]


@given(st.sets(st.integers(0, 500), max_size=60), st.integers(1, 20))
def test_pages_show_every_override_once_in_order(numbers: set[int], size: int) -> None:
    view = NamespaceView(namespace("rlns_1", "one", 1))
    for number in numbers:
        view.put(override(f"rlor_{number:03}", f"user_{number}", number))
    found: list[Override] = []
    cursor: str | None = ""
    while cursor is not None:
        page, cursor = view.page(cursor, size)
        assert len(page) == size or cursor is None
        found += page
    assert [each.id for each in found] == [f"rlor_{number:03}" for number in sorted(numbers)]
