"""Workspaces, keys, namespaces and overrides in memory: a warm request reads nothing else.

`CatalogView` holds the rows of the catalog and answers look-ups; `Callers` finds the holder of a key in it. Neither
does I/O: `sync` passes rows in, in any order and repeatedly, and the row with the higher version stays. Views
are changed in place, so that a view which an operation holds is never stale. Compiled with the core where that is
possible (setup.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from operator import attrgetter
from typing import Final, final

from tidegate.core.model import DURATION_MS_MAX, Limit, make_limit
from tidegate.ports import CatalogChanges, KeyRow, NamespaceRow, OverrideRow, WorkspaceRow
from tidegate.server.catalog.keys import digest_of
from tidegate.server.catalog.overrides import Override, OverrideMatcher

# The namespace in which calls of the API itself are counted. Namespaces of callers are counted by their ids, which
# begin with rlns_, so that none of them can ever be this one.
QUOTA_NAMESPACE: Final = "tidegate.api"
# Callers that are remembered by their credentials. Only valid keys get in; this bounds spellings of one header, which
# may have spaces before the key.
FOUND_MAX: Final = 10_000
FOUND_BYTES_MAX: Final = 256
# Digests of keys that are known not to exist. Two generations of this many: an attacker who tries many keys replaces
# entries of the same attack, at a cost of 3 MB.
MISSING_MAX: Final = 10_000


@final
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
        # Rows by identifier, deleted ones included: an older row must not undo a deletion.
        self._overrides: dict[str, OverrideRow] = {}
        self._sorted: list[Override] | None = None
        self.matcher = OverrideMatcher()
        self.has_overrides = False
        # A new object for each state of the overrides: a cache that uses it as a key finds no entry of an older state.
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
            # Older versions accepted longer ones. Neither ends while it matters.
            duration_ms = min(row.duration_ms, DURATION_MS_MAX)
            self.matcher.add(Override(row.id, row.identifier, row.limit, duration_ms, row.shadow))
        else:
            self.matcher.discard(row.identifier)
        self.has_overrides = len(self.matcher) > 0
        return True

    def forget(self, identifier: str, version: int) -> None:
        """Drop the deleted row of `version`: no older row can arrive any more."""
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
        """All rows, deleted ones included."""
        return self._overrides.values()


@final
class WorkspaceView:
    """One workspace and its namespaces, found by id or by name."""

    __slots__ = ("by_name", "id", "is_enabled", "name", "namespaces", "quota", "row")

    def __init__(self, row: WorkspaceRow) -> None:
        self.id = row.id
        self.by_name: dict[str, NamespaceView] = {}
        # By id and by name. If the name of one namespace is the id of another, the id wins.
        self.namespaces: dict[str, NamespaceView] = {}
        self.update(row)

    def update(self, row: WorkspaceRow) -> None:
        self.row = row
        self.name = row.name
        self.is_enabled = row.enabled
        self.quota: Limit | None = None
        if row.quota is not None and row.quota_duration_ms is not None:
            duration_ms = min(row.quota_duration_ms, DURATION_MS_MAX)
            self.quota = make_limit(row.quota, duration_ms, QUOTA_NAMESPACE, row.id)

    def add(self, namespace: NamespaceView) -> NamespaceView | None:
        """Add `namespace`; returns another one of the same name, which it replaces."""
        held = self.by_name.get(namespace.name)
        if held is not None:
            self.namespaces.pop(held.id, None)
        self.by_name[namespace.name] = namespace
        by_either = self.namespaces.get(namespace.name)
        if by_either is None or by_either.id != namespace.name:
            self.namespaces[namespace.name] = namespace
        self.namespaces[namespace.id] = namespace
        return held


@final
class Caller:
    """The holder of a root key: its workspace, and what it may do."""

    __slots__ = (
        "can_create",
        "can_limit",
        "expires_at_ms",
        "grants",
        "is_enabled",
        "is_metered",
        "key_id",
        "workspace",
    )

    def __init__(self, row: KeyRow, workspace: WorkspaceView) -> None:
        self.key_id = row.id
        self.workspace = workspace
        self.is_enabled = row.enabled
        self.expires_at_ms = row.expires_at_ms
        self.grants = frozenset(row.permissions)
        # Each call must be checked against a date or a quota. A change of either makes a new caller.
        self.is_metered = row.expires_at_ms is not None or workspace.quota is not None
        # The two that every check asks for.
        self.can_limit = "ratelimit.*.limit" in self.grants
        self.can_create = "ratelimit.*.create_namespace" in self.grants

    def limited_namespace(self, name: str) -> NamespaceView | None:
        """The namespace with this name or id, if it is not deleted and the key allows `limit` in it."""
        found = self.workspace.namespaces.get(name)
        if found is None or found.is_deleted:
            return None
        return found if self.can_limit or self.may("limit", found.id) else None

    def may(self, action: str, namespace_id: str) -> bool:
        """Whether the key allows `action` in all namespaces or in this one."""
        return f"ratelimit.*.{action}" in self.grants or f"ratelimit.{namespace_id}.{action}" in self.grants


@final
class CatalogView:
    """All rows, by what requests look up."""

    def __init__(self) -> None:
        # Everything up to this version of the catalog has been seen.
        self.version = 0
        # Raised when a key or a workspace changes: a remembered caller must then be looked up again.
        self.epoch = 0
        self.workspaces: dict[str, WorkspaceView] = {}
        # Keys that are not revoked.
        self._by_digest: dict[bytes, KeyRow] = {}
        self._keys: dict[str, KeyRow] = {}
        self._namespaces: dict[str, NamespaceView] = {}
        # Namespaces whose workspace, and overrides whose namespace, has not been seen yet: an answer of the database is
        # bounded and may bring them first.
        self._early_namespaces: dict[str, list[NamespaceView]] = {}
        self._early_overrides: dict[str, list[OverrideRow]] = {}
        # Versions of deleted overrides by namespace id and identifier: `forget` reads this instead of all rows.
        self._deleted: dict[tuple[str, str], int] = {}

    def become(self, other: CatalogView) -> None:
        """Take over everything that `other` holds, in one step; `other` is not used any more."""
        self.version = other.version
        self.workspaces = other.workspaces
        self._by_digest = other._by_digest
        self._keys = other._keys
        self._namespaces = other._namespaces
        self._early_namespaces = other._early_namespaces
        self._early_overrides = other._early_overrides
        self._deleted = other._deleted
        self.epoch += 1

    def key(self, digest: bytes) -> KeyRow | None:
        """The key with this digest, unless it is revoked."""
        return self._by_digest.get(digest)

    def key_by_id(self, key_id: str) -> KeyRow | None:
        """The key with this id, also a revoked one."""
        return self._keys.get(key_id)

    def keys_of(self, workspace_id: str) -> list[KeyRow]:
        """All keys of a workspace, revoked ones included."""
        return [row for row in self._keys.values() if row.workspace_id == workspace_id]

    def caller(self, key_id: str) -> Caller | None:
        """The holder of a key that is not revoked; its state and that of its workspace are not looked at."""
        row = self._keys.get(key_id)
        if row is None or row.revoked_at_ms is not None:
            return None
        workspace = self.workspaces.get(row.workspace_id)
        return None if workspace is None else Caller(row, workspace)

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
            for namespace in self._early_namespaces.pop(row.id, ()):
                held.add(namespace)
        elif held.row.version <= row.version:
            held.update(row)
        self.epoch += 1

    def put_key(self, row: KeyRow) -> None:
        held = self._keys.get(row.id)
        if held is not None:
            if held.version > row.version:
                return
            self._by_digest.pop(held.digest, None)
        self._keys[row.id] = row
        if row.revoked_at_ms is None:
            self._by_digest[row.digest] = row
        self.epoch += 1

    def put_namespace(self, row: NamespaceRow) -> NamespaceView:
        held = self._namespaces.get(row.id)
        if held is not None:
            held.update(row)
            return held
        self._namespaces[row.id] = held = NamespaceView(row)
        for override in self._early_overrides.pop(row.id, ()):
            self._put_override(held, override)
        workspace = self.workspaces.get(row.workspace_id)
        if workspace is None:
            self._early_namespaces.setdefault(row.workspace_id, []).append(held)
            return held
        replaced = workspace.add(held)
        if replaced is not None:
            # This node counted under an id of its own while the database was down, and another node created the row.
            self._namespaces.pop(replaced.id, None)
        return held

    def put_override(self, row: OverrideRow) -> None:
        namespace = self._namespaces.get(row.namespace_id)
        if namespace is None:
            self._early_overrides.setdefault(row.namespace_id, []).append(row)
        else:
            self._put_override(namespace, row)

    def _put_override(self, namespace: NamespaceView, row: OverrideRow) -> None:
        if namespace.put(row) and row.deleted_at_ms is not None:
            self._deleted[namespace.id, row.identifier] = row.version

    def forget(self, version: int) -> None:
        """Drop deleted rows up to `version`, which the database has purged, so that memory does not grow with them."""
        for (namespace_id, identifier), deleted in list(self._deleted.items()):
            if deleted <= version:
                del self._deleted[namespace_id, identifier]
                namespace = self._namespaces.get(namespace_id)
                if namespace is not None:
                    namespace.forget(identifier, deleted)
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


@final
class Callers:
    """Finds the holder of a key, and remembers who was found and which keys do not exist until the catalog changes.

    A key is looked up by its digest, so that the time does not depend on how much of a wrong key is right: every bit
    of the digest changes with every bit of the key.
    """

    __slots__ = ("_epoch", "_found", "_found_max", "_missing", "_missing_before", "_missing_max", "_view")

    def __init__(
        self, view: CatalogView, *, found_max: int = FOUND_MAX, missing_max: int = MISSING_MAX
    ) -> None:
        self._view: Final[CatalogView] = view
        self._found_max: Final[int] = found_max
        self._missing_max: Final[int] = missing_max
        # The state of the catalog that the rest belongs to.
        self._epoch = -1
        self._found: dict[bytes | None, Caller] = {}
        self._missing: set[bytes] = set()
        self._missing_before: set[bytes] = set()

    def recall(self, credentials: bytes | None) -> Caller | None:
        """The enabled caller that `find` found for these credentials, if no key and no workspace has changed since."""
        if self._epoch != self._view.epoch:
            self._start_over()
        return self._found.get(credentials)

    def _start_over(self) -> None:
        self._epoch = self._view.epoch
        self._found = {}
        self._missing = set()
        self._missing_before = set()

    def find(self, credentials: bytes, key: bytes) -> Caller | None:
        """The holder of `key`. If enabled, it is remembered by `credentials`, the header value that brought the key."""
        row = self._view.key(digest_of(key))
        workspace = None if row is None else self._view.workspaces.get(row.workspace_id)
        if row is None or workspace is None:
            return None
        caller = Caller(row, workspace)
        if caller.is_enabled and workspace.is_enabled and len(credentials) <= FOUND_BYTES_MAX:
            if self._epoch != self._view.epoch or len(self._found) >= self._found_max:
                self._start_over()
            self._found[credentials] = caller
        return caller

    def remember_missing(self, key: bytes) -> None:
        """The database was asked for this key after the request came, and has none."""
        if self._epoch != self._view.epoch:
            self._start_over()
        if len(self._missing) >= self._missing_max:
            self._missing_before = self._missing
            self._missing = set()
        self._missing.add(digest_of(key))

    def is_negative_cached(self, key: bytes) -> bool:
        """The database was asked for this key, and no key has changed since. A new key is a change."""
        digest = digest_of(key)
        return self._epoch == self._view.epoch and (digest in self._missing or digest in self._missing_before)
