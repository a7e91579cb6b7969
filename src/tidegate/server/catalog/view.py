"""What the server knows of workspaces, keys, namespaces and overrides, in memory: every warm request reads only this.

`CatalogView` holds the rows of the catalog and answers look-ups. It does no I/O: `catalog_sync` feeds it with rows,
in any order and as often as it likes, and the row with the higher version stays. Views are changed in place, so
that a look-up made a moment ago is never left with a stale copy; what was derived from a view is dropped with it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from operator import attrgetter
from typing import Final

from tidegate.core.model import Limit, make_limit
from tidegate.ports import CatalogChanges, KeyRow, NamespaceRow, OverrideRow, WorkspaceRow
from tidegate.server.catalog.overrides import Override, OverrideMatcher

__all__ = ["Caller", "CatalogView", "NamespaceView", "WorkspaceView"]

# The namespace in which calls of the API itself are counted. Namespaces of callers are counted by their ids, which
# begin with rlns_, so that none of them can ever be this one.
QUOTA_NAMESPACE: Final = "tidegate.api"


class NamespaceView:
    """One namespace and its overrides."""

    __slots__ = (
        "_overrides",
        "_sorted",
        "has_overrides",
        "id",
        "is_deleted",
        "matcher",
        "name",
        "row",
        "token",
    )

    def __init__(self, row: NamespaceRow) -> None:
        self.row = row
        self.id = row.id
        self.name = row.name
        self.is_deleted = row.deleted_at_ms is not None
        # Rows by identifier, marked ones included: a mark must not be undone by an older row.
        self._overrides: dict[str, OverrideRow] = {}
        self._sorted: list[Override] | None = None
        self.matcher = OverrideMatcher()
        self.has_overrides = False
        # A new object for each state of the overrides: what was cached for the old one is not found any more.
        self.token = object()

    def update(self, row: NamespaceRow) -> None:
        if self.row.version <= row.version:
            self.row = row
            self.is_deleted = row.deleted_at_ms is not None

    def put(self, row: OverrideRow) -> bool:
        """Take the row, unless a newer one is held; whether it was taken."""
        held = self._overrides.get(row.identifier)
        if held is not None and held.version > row.version:
            return False
        self._overrides[row.identifier] = row
        self._sorted = None
        self.token = object()
        if row.deleted_at_ms is None:
            self.matcher.add(Override(row.id, row.identifier, row.limit, row.duration_ms))
        else:
            self.matcher.discard(row.identifier)
        self.has_overrides = len(self.matcher) > 0
        return True

    def forget(self, identifier: str, version: int) -> None:
        """Drop the mark that was put with `version`: nobody can bring an older row any more."""
        held = self._overrides.get(identifier)
        if held is not None and held.version == version:
            del self._overrides[identifier]

    def page(self, cursor: str, size: int) -> tuple[list[Override], str | None]:
        """(overrides by id from `cursor` on, the id that begins the next page)."""
        if self._sorted is None:
            self._sorted = sorted(self.matcher, key=attrgetter("id"))
        first = bisect_left(self._sorted, cursor, key=attrgetter("id"))
        found = self._sorted[first : first + size + 1]
        return found[:size], found[size].id if len(found) > size else None

    def overrides(self) -> Iterable[OverrideRow]:
        """All rows, marked ones included."""
        return self._overrides.values()


class WorkspaceView:
    """One workspace and its namespaces, found by id or by name."""

    __slots__ = ("by_name", "decisions", "id", "is_enabled", "name", "namespaces", "quota", "row")

    def __init__(self, row: WorkspaceRow) -> None:
        self.id = row.id
        self.by_name: dict[str, NamespaceView] = {}
        # Ids and names together; should one's name be the other's id, the id wins.
        self.namespaces: dict[str, NamespaceView] = {}
        # Decisions made for it, by this process. Written by the API.
        self.decisions = 0
        self.update(row)

    def update(self, row: WorkspaceRow) -> None:
        self.row = row
        self.name = row.name
        self.is_enabled = row.enabled
        self.quota: Limit | None = None
        if row.quota is not None and row.quota_duration_ms is not None:
            self.quota = make_limit(row.quota, row.quota_duration_ms, QUOTA_NAMESPACE, row.id)

    def place(self, namespace: NamespaceView) -> NamespaceView | None:
        """Make `namespace` known here; answers another one of the same name, which it replaces."""
        held = self.by_name.get(namespace.name)
        if held is not None:
            self.namespaces.pop(held.id, None)
        self.by_name[namespace.name] = namespace
        by_either = self.namespaces.get(namespace.name)
        if by_either is None or by_either.id != namespace.name:
            self.namespaces[namespace.name] = namespace
        self.namespaces[namespace.id] = namespace
        return held


class Caller:
    """A root key as the authenticator and the permission checks see it."""

    __slots__ = (
        "can_create",
        "can_limit",
        "digest",
        "expires_at_ms",
        "grants",
        "id",
        "is_enabled",
        "workspace",
        "workspace_id",
    )

    def __init__(self, row: KeyRow) -> None:
        self.id = row.id
        self.workspace_id = row.workspace_id
        self.digest = row.digest
        self.grants = frozenset(row.permissions)
        self.expires_at_ms = row.expires_at_ms
        self.is_enabled = row.enabled
        # Set by the authenticator, once it has found the workspace to be there and enabled.
        self.workspace: WorkspaceView | None = None
        # The two that the hot path asks about.
        self.can_limit = "ratelimit.*.limit" in self.grants
        self.can_create = "ratelimit.*.create_namespace" in self.grants

    def may(self, action: str, namespace_id: str) -> bool:
        """Grants are compared as strings: `*` stands for all namespaces because we ask for it, not by matching."""
        return f"ratelimit.*.{action}" in self.grants or f"ratelimit.{namespace_id}.{action}" in self.grants


class CatalogView:
    """All rows, by the questions that requests ask."""

    def __init__(self) -> None:
        # Everything up to this version of the catalog has been seen.
        self.version = 0
        # Raised whenever a key or a workspace changes: whoever remembers a caller must look again.
        self.epoch = 0
        self.workspaces: dict[str, WorkspaceView] = {}
        self._callers: dict[bytes, Caller] = {}
        self._keys: dict[str, KeyRow] = {}
        self._namespaces: dict[str, NamespaceView] = {}
        # Namespaces whose workspace, and overrides whose namespace, has not been seen yet: an answer is bounded and
        # may bring them first.
        self._homeless: dict[str, list[NamespaceView]] = {}
        self._orphans: dict[str, list[OverrideRow]] = {}
        # The versions of marked overrides, by namespace id and identifier: what `forget` walks, instead of all rows.
        self._marks: dict[tuple[str, str], int] = {}

    def become(self, other: CatalogView) -> None:
        """Take over everything that `other` holds, in one step; `other` is not used any more."""
        for workspace_id, workspace in other.workspaces.items():
            if (held := self.workspaces.get(workspace_id)) is not None:
                workspace.decisions = held.decisions
        self.version = other.version
        self.workspaces = other.workspaces
        self._callers = other._callers
        self._keys = other._keys
        self._namespaces = other._namespaces
        self._homeless = other._homeless
        self._orphans = other._orphans
        self._marks = other._marks
        self.epoch += 1

    def caller(self, digest: bytes) -> Caller | None:
        return self._callers.get(digest)

    def namespace(self, namespace_id: str) -> NamespaceView | None:
        return self._namespaces.get(namespace_id)

    def apply(self, changes: CatalogChanges) -> None:
        for workspace in changes.workspaces:
            self.put_workspace(workspace)
        for key in changes.keys:
            self.put_key(key)
        for namespace in changes.namespaces:
            self.put_namespace(namespace)
        for override in changes.overrides:
            self.put_override(override)
        self.version = max(self.version, changes.version)

    def put_workspace(self, row: WorkspaceRow) -> None:
        held = self.workspaces.get(row.id)
        if held is None:
            self.workspaces[row.id] = held = WorkspaceView(row)
            for namespace in self._homeless.pop(row.id, ()):
                held.place(namespace)
        elif held.row.version <= row.version:
            held.update(row)
        self.epoch += 1

    def put_key(self, row: KeyRow) -> None:
        held = self._keys.get(row.id)
        if held is not None:
            if held.version > row.version:
                return
            self._callers.pop(held.digest, None)
        self._keys[row.id] = row
        if row.revoked_at_ms is None:
            self._callers[row.digest] = Caller(row)
        self.epoch += 1

    def put_namespace(self, row: NamespaceRow) -> NamespaceView:
        held = self._namespaces.get(row.id)
        if held is not None:
            held.update(row)
            return held
        self._namespaces[row.id] = held = NamespaceView(row)
        for override in self._orphans.pop(row.id, ()):
            self._put_override(held, override)
        workspace = self.workspaces.get(row.workspace_id)
        if workspace is None:
            self._homeless.setdefault(row.workspace_id, []).append(held)
            return held
        replaced = workspace.place(held)
        if replaced is not None:
            # We had counted under an id of our own while the database was away; somebody else had created it.
            self._namespaces.pop(replaced.id, None)
        return held

    def put_override(self, row: OverrideRow) -> None:
        namespace = self._namespaces.get(row.namespace_id)
        if namespace is None:
            self._orphans.setdefault(row.namespace_id, []).append(row)
        else:
            self._put_override(namespace, row)

    def _put_override(self, namespace: NamespaceView, row: OverrideRow) -> None:
        if namespace.put(row) and row.deleted_at_ms is not None:
            self._marks[namespace.id, row.identifier] = row.version

    def forget(self, version: int) -> None:
        """Drop the marks up to `version`, which the database has purged: memory is not to grow with what is gone."""
        for (namespace_id, identifier), marked in list(self._marks.items()):
            if marked <= version:
                del self._marks[namespace_id, identifier]
                namespace = self._namespaces.get(namespace_id)
                if namespace is not None:
                    namespace.forget(identifier, marked)
        gone = [
            row.id for row in self._keys.values() if row.revoked_at_ms is not None and row.version <= version
        ]
        for key_id in gone:
            del self._keys[key_id]

    def export(self) -> CatalogChanges:
        """All rows, as `apply` takes them."""
        return CatalogChanges(
            self.version,
            True,
            [workspace.row for workspace in self.workspaces.values()],
            list(self._keys.values()),
            [namespace.row for namespace in self._namespaces.values()],
            [row for namespace in self._namespaces.values() for row in namespace.overrides()],
        )
