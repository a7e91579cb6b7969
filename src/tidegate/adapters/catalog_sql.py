"""The catalog in SQL, written once for all dialects.

Each operation is a generator that yields statements and is sent their rows: the SQLite adapter drives it on its
thread, the others on the event loop. It is possible without dialects because writers are serialised: a writer
raises the catalog's version first and holds that row's lock until the commit, so that it may read and then insert
without a race. Placeholders are `?`. Knows no driver and no connection.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from hashlib import blake2b
from typing import Any, Final, NamedTuple, TypeVar

from tidegate.adapters.lane import Record, SqlValue
from tidegate.adapters.ledger_rows import decode_name, encode_name, shown_name
from tidegate.core.model import DURATION_MS_MIN, checked_int, make_limit
from tidegate.errors import InvalidInput, SchemaMissing
from tidegate.ports import CatalogChanges, KeyRow, NamespaceRow, OverrideRow, WorkspaceRow

__all__ = [
    "Script",
    "Statement",
    "Unchanged",
    "changes",
    "check_schema",
    "create_namespace",
    "delete_namespace",
    "delete_override",
    "dollars",
    "expire_key",
    "find_namespace",
    "purge",
    "put_key",
    "put_workspace",
    "read_purged_version",
    "read_version",
    "revoke_key",
    "set_override",
]

# The migration that the catalog needs.
SCHEMA_VERSION: Final = 4

# Rows of each table in one answer of `changes`: a few megabytes, and a fraction of a second.
ROWS_MAX: Final = 10_000

# Rows of each table that one purge deletes. All other writers wait for it: a few milliseconds.
PURGE_ROWS: Final = 500


class Statement(NamedTuple):
    """One statement and its values."""

    sql: str
    args: tuple[SqlValue, ...] = ()


T = TypeVar("T")

Script = Generator[Statement, Sequence[Record], T]


class Unchanged(Exception):
    """Raised by a writing script that found nothing to do: roll back, the version stays, and `value` is the answer."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def dollars(sql: str) -> str:
    """`?, ?` as PostgreSQL wants it: `$1, $2`."""
    first, *rest = sql.split("?")
    return first + "".join(f"${index}{part}" for index, part in enumerate(rest, 1))


def digest(*names: bytes) -> bytes:
    """Every part with its length, so that no two lists of names are ever written the same way."""
    return blake2b(b"".join(len(name).to_bytes(4, "big") + name for name in names), digest_size=16).digest()


# The columns of each table in the order of its row's fields, and how a record becomes a row. Any program with the
# password can write anything, and a column of SQLite takes any type: what Tidegate never writes raises an exception.

WORKSPACE_COLUMNS: Final = "id, name, enabled, quota, quota_duration_ms, version"
KEY_COLUMNS: Final = (
    "id, workspace_id, digest, name, hint, permissions, created_at, expires_at, enabled, revoked_at, version"
)
NAMESPACE_COLUMNS: Final = "id, workspace_id, name, created_at, deleted_at, version"
OVERRIDE_COLUMNS: Final = "id, namespace_id, identifier, quota, duration_ms, deleted_at, shadow, version"


# What the functions below raise for a record that they cannot read.
UNREADABLE: Final = (AttributeError, TypeError, ValueError, RecursionError)


def workspace_row(record: Record) -> WorkspaceRow:
    workspace_id, name, enabled, quota, duration_ms, version = record
    _check_ints(enabled, version)
    row = WorkspaceRow(
        decode_name(workspace_id), decode_name(name), bool(enabled), quota, duration_ms, version
    )
    if quota is not None:
        make_limit(quota, duration_ms, "tidegate", row.id)
    return row


def key_row(record: Record) -> KeyRow:
    key_id, workspace_id, key_digest, name, hint, permissions, created, expires, enabled, revoked, version = (
        record
    )
    _check_ints(created, enabled, version, *(each for each in (expires, revoked) if each is not None))
    granted = json.loads(permissions)
    if not isinstance(granted, list) or not all(isinstance(each, str) for each in granted):
        raise TypeError("permissions are not a list of texts")
    return KeyRow(
        decode_name(key_id),
        decode_name(workspace_id),
        bytes(key_digest),
        decode_name(name),
        decode_name(hint),
        tuple(granted),
        created,
        expires,
        bool(enabled),
        revoked,
        version,
    )


def namespace_row(record: Record) -> NamespaceRow:
    namespace_id, workspace_id, name, created, deleted, version = record
    _check_ints(created, version, 0 if deleted is None else deleted)
    names = (decode_name(namespace_id), decode_name(workspace_id), decode_name(name))
    return NamespaceRow(*names, created, deleted, version)


def override_row(record: Record) -> OverrideRow:
    override_id, namespace_id, identifier, quota, duration_ms, deleted_at, shadow, version = record
    _check_ints(shadow, version, 0 if deleted_at is None else deleted_at)
    checked_int("quota", quota, 0)
    checked_int("duration_ms", duration_ms, DURATION_MS_MIN)
    names = (decode_name(override_id), decode_name(namespace_id), decode_name(identifier))
    return OverrideRow(*names, quota, duration_ms, deleted_at, version, bool(shadow))


def _check_ints(*values: object) -> None:
    for value in values:
        if not isinstance(value, int):
            raise TypeError(f"{value!r} is not an int")


class _Reader:
    """Turns the records of one answer into rows, and names those that it skips."""

    def __init__(self) -> None:
        self.unreadable: list[tuple[str, str]] = []

    def rows(self, table: str, row_of: Callable[[Record], T], records: Sequence[Record]) -> list[T]:
        rows = []
        for record in records:
            try:
                rows.append(row_of(record))
            except UNREADABLE:
                row_id = record[0]
                self.unreadable.append(
                    (table, shown_name(row_id) if isinstance(row_id, bytes) else repr(row_id))
                )
        return rows


# Reading.


def check_schema() -> Script[None]:
    rows = yield Statement("SELECT MAX(version) FROM tidegate_schema")
    if not rows or (rows[0][0] or 0) < SCHEMA_VERSION:
        raise SchemaMissing("the catalog is of an older version; run: tidegate migrate --ledger URL")


def read_version() -> Script[int]:
    rows = yield Statement("SELECT version FROM ratelimit_catalog WHERE id = 1")
    if not rows:
        raise SchemaMissing("the catalog has no version; run: tidegate migrate --ledger URL")
    return int(rows[0][0])


def changes(since: int) -> Script[CatalogChanges]:
    """Read the version first: whatever it says is committed by then, so that no row up to it can be missed.

    Rows that are newer than that version do not count as missing: they were written meanwhile, and the next answer has
    them. Or the version was restored from an older copy than they were: waiting for it would never end.
    """
    version = yield from read_version()
    reached = version
    found: list[Sequence[Record]] = []
    for table, columns in (
        ("ratelimit_workspaces", WORKSPACE_COLUMNS),
        ("ratelimit_keys", KEY_COLUMNS),
        ("ratelimit_namespaces", NAMESPACE_COLUMNS),
        ("ratelimit_overrides", OVERRIDE_COLUMNS),
    ):
        rows = yield Statement(
            f"SELECT {columns} FROM {table} WHERE version > ? ORDER BY version LIMIT {ROWS_MAX}", (since,)
        )
        # SQLite sorts a version that is not a number last: then all others are in this answer.
        if len(rows) == ROWS_MAX and isinstance(rows[-1][-1], int):
            reached = min(reached, rows[-1][-1])
        found.append(rows)
    workspaces, keys, namespaces, overrides = found
    reader = _Reader()
    return CatalogChanges(
        reached,
        reached == version,
        reader.rows("ratelimit_workspaces", workspace_row, workspaces),
        reader.rows("ratelimit_keys", key_row, keys),
        reader.rows("ratelimit_namespaces", namespace_row, namespaces),
        reader.rows("ratelimit_overrides", override_row, overrides),
        tuple(reader.unreadable),
    )


def find_namespace(name_digest: bytes) -> Script[NamespaceRow | None]:
    rows = yield Statement(
        f"SELECT {NAMESPACE_COLUMNS} FROM ratelimit_namespaces WHERE name_digest = ?", (name_digest,)
    )
    return namespace_row(rows[0]) if rows else None


def read_purged_version() -> Script[int]:
    rows = yield Statement("SELECT version FROM ratelimit_catalog_purged WHERE id = 1")
    if not rows:
        raise SchemaMissing("the catalog has no purged version; run: tidegate migrate --ledger URL")
    return int(rows[0][0])


# Writing. Each runs in one transaction.


def _next_version() -> Script[int]:
    yield Statement("UPDATE ratelimit_catalog SET version = version + 1 WHERE id = 1")
    return (yield from read_version())


def put_workspace(row: WorkspaceRow) -> Script[WorkspaceRow]:
    version = yield from _next_version()
    key = encode_name(row.id)
    values = (encode_name(row.name), int(row.enabled), row.quota, row.quota_duration_ms, version)
    held = yield Statement("SELECT version FROM ratelimit_workspaces WHERE id = ?", (key,))
    if held:
        sql = (
            "UPDATE ratelimit_workspaces SET name = ?, enabled = ?, quota = ?, quota_duration_ms = ?, version = ? "
            "WHERE id = ?"
        )
        yield Statement(sql, (*values, key))
    else:
        sql = f"INSERT INTO ratelimit_workspaces ({WORKSPACE_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?)"
        yield Statement(sql, (key, *values))
    return row._replace(version=version)


def put_key(row: KeyRow) -> Script[KeyRow]:
    version = yield from _next_version()
    key = encode_name(row.id)
    workspace_id = encode_name(row.workspace_id)
    if not (yield Statement("SELECT version FROM ratelimit_workspaces WHERE id = ?", (workspace_id,))):
        raise InvalidInput("workspace_id", row.workspace_id, "a workspace that exists")
    if (yield Statement("SELECT id FROM ratelimit_keys WHERE digest = ? AND id <> ?", (row.digest, key))):
        raise InvalidInput("digest", "another key's", "a key that does not exist yet")
    values = (
        workspace_id,
        row.digest,
        encode_name(row.name),
        encode_name(row.hint),
        json.dumps(row.permissions).encode(),
        row.created_at_ms,
        row.expires_at_ms,
        int(row.enabled),
        row.revoked_at_ms,
        version,
    )
    if (yield Statement("SELECT version FROM ratelimit_keys WHERE id = ?", (key,))):
        sql = (
            "UPDATE ratelimit_keys SET workspace_id = ?, digest = ?, name = ?, hint = ?, permissions = ?, "
            "created_at = ?, expires_at = ?, enabled = ?, revoked_at = ?, version = ? WHERE id = ?"
        )
        yield Statement(sql, (*values, key))
    else:
        sql = f"INSERT INTO ratelimit_keys ({KEY_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
        yield Statement(sql, (key, *values))
    return row._replace(version=version)


def _change_live_key(key_id: str, column: str, moment_ms: int) -> Script[KeyRow | None]:
    """One statement checks and writes: whatever its caller has read before, a revoked key stays as it is."""
    version = yield from _next_version()
    key = encode_name(key_id)
    sql = f"UPDATE ratelimit_keys SET {column} = ?, version = ? WHERE id = ? AND revoked_at IS NULL"
    yield Statement(sql, (moment_ms, version, key))
    rows = yield Statement(f"SELECT {KEY_COLUMNS} FROM ratelimit_keys WHERE id = ?", (key,))
    if not rows:
        raise Unchanged(None)
    try:
        held = key_row(rows[0])
    except UNREADABLE:
        # Committed all the same: nodes that hold the key as it was see the new version, and drop it.
        return None
    if held.version != version:
        raise Unchanged(held)
    return held


def expire_key(key_id: str, expires_at_ms: int) -> Script[KeyRow | None]:
    return _change_live_key(key_id, "expires_at", expires_at_ms)


def revoke_key(key_id: str, revoked_at_ms: int) -> Script[KeyRow | None]:
    return _change_live_key(key_id, "revoked_at", revoked_at_ms)


def name_digest_of(row: NamespaceRow) -> bytes:
    return digest(encode_name(row.workspace_id), encode_name(row.name))


def create_namespace(row: NamespaceRow) -> Script[NamespaceRow]:
    version = yield from _next_version()
    name_digest = name_digest_of(row)
    held = yield from find_namespace(name_digest)
    if held is not None:
        raise Unchanged(held)
    key = encode_name(row.id)
    if (yield Statement("SELECT version FROM ratelimit_namespaces WHERE id = ?", (key,))):
        raise InvalidInput("id", row.id, "an id that no other namespace has")
    sql = f"INSERT INTO ratelimit_namespaces ({NAMESPACE_COLUMNS}, name_digest) VALUES (?, ?, ?, ?, ?, ?, ?)"
    values = (
        encode_name(row.workspace_id),
        encode_name(row.name),
        row.created_at_ms,
        row.deleted_at_ms,
        version,
    )
    yield Statement(sql, (key, *values, name_digest))
    return row._replace(version=version)


def delete_namespace(namespace_id: str, deleted_at_ms: int | None) -> Script[bool]:
    version = yield from _next_version()
    key = encode_name(namespace_id)
    if not (yield Statement("SELECT version FROM ratelimit_namespaces WHERE id = ?", (key,))):
        raise Unchanged(False)
    sql = "UPDATE ratelimit_namespaces SET deleted_at = ?, version = ? WHERE id = ?"
    yield Statement(sql, (deleted_at_ms, version, key))
    return True


def _find_override(namespace_id: str, identifier: str) -> Script[Record | None]:
    wanted = digest(encode_name(namespace_id), encode_name(identifier))
    rows = yield Statement(
        f"SELECT {OVERRIDE_COLUMNS} FROM ratelimit_overrides WHERE identifier_digest = ?", (wanted,)
    )
    return rows[0] if rows else None


def set_override(row: OverrideRow) -> Script[OverrideRow]:
    version = yield from _next_version()
    held = yield from _find_override(row.namespace_id, row.identifier)
    if held is not None:
        columns = "quota = ?, duration_ms = ?, deleted_at = NULL, shadow = ?, version = ?"
        sql = f"UPDATE ratelimit_overrides SET {columns} WHERE id = ?"
        # Also over a row whose numbers cannot be read: this repairs it.
        yield Statement(sql, (row.limit, row.duration_ms, int(row.shadow), version, held[0]))
        return row._replace(id=decode_name(held[0]), deleted_at_ms=None, version=version)
    namespace_id, identifier = encode_name(row.namespace_id), encode_name(row.identifier)
    columns = f"{OVERRIDE_COLUMNS}, identifier_digest"
    sql = f"INSERT INTO ratelimit_overrides ({columns}) VALUES (?, ?, ?, ?, ?, NULL, ?, ?, ?)"
    values = (
        encode_name(row.id),
        namespace_id,
        identifier,
        row.limit,
        row.duration_ms,
        int(row.shadow),
        version,
    )
    yield Statement(sql, (*values, digest(namespace_id, identifier)))
    return row._replace(deleted_at_ms=None, version=version)


def delete_override(namespace_id: str, identifier: str, deleted_at_ms: int) -> Script[OverrideRow | None]:
    version = yield from _next_version()
    record = yield from _find_override(namespace_id, identifier)
    held = _Reader().rows("ratelimit_overrides", override_row, [] if record is None else [record])
    if not held or held[0].deleted_at_ms is not None:
        raise Unchanged(None)
    sql = "UPDATE ratelimit_overrides SET deleted_at = ?, version = ? WHERE id = ?"
    yield Statement(sql, (deleted_at_ms, version, encode_name(held[0].id)))
    return held[0]._replace(deleted_at_ms=deleted_at_ms, version=version)


# What is marked, and how.
MARKS: Final = (("ratelimit_overrides", "deleted_at"), ("ratelimit_keys", "revoked_at"))


def purge(cutoff_ms: int) -> Script[int]:
    # Marks are looked for before the writers' lock is taken: no index leads to them, and no writer may wait for it.
    found: list[list[int]] = []
    for table, marked_at in MARKS:
        rows = yield Statement(
            f"SELECT version FROM {table} WHERE {marked_at} < ? LIMIT {PURGE_ROWS}", (cutoff_ms,)
        )
        found.append([int(row[0]) for row in rows])
    ((newest_key,),) = yield Statement("SELECT MAX(version) FROM ratelimit_keys")
    found[1] = [version for version in found[1] if version != newest_key]
    if not any(found):
        raise Unchanged(0)
    yield from _next_version()
    purged: list[int] = []
    for (table, marked_at), versions in zip(MARKS, found, strict=True):
        # Always of one length, so that it stays one prepared statement. Looked at once more: under the lock nothing
        # changes, but until then one may have been restored.
        listed = (versions or [0]) * PURGE_ROWS
        places = ", ".join("?" * PURGE_ROWS)
        chosen = f"FROM {table} WHERE version IN ({places}) AND {marked_at} < ?"
        args = (*listed[:PURGE_ROWS], cutoff_ms)
        gone = yield Statement(f"SELECT version {chosen}", args)
        if gone:
            yield Statement(f"DELETE {chosen}", args)
            purged += [int(row[0]) for row in gone]
    if not purged:
        raise Unchanged(0)
    sql = "UPDATE ratelimit_catalog_purged SET version = ? WHERE id = 1 AND version < ?"
    yield Statement(sql, (max(purged), max(purged)))
    return len(purged)
