"""Keys, namespaces and overrides in the console: list, search, create, change, delete.

Overrides are changed by the operations of the API itself (`routes` calls them); here is what the API does not have.
Changes need `console.manage`. Law: a new key carries only permissions that its creator holds. A key is never edited in
place: `put_key` replaces the whole row and could undo a revocation that another node has just written. Its expiry can
be changed, by a statement of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from tidegate.core.quota import format_quota
from tidegate.errors import InvalidInput
from tidegate.ports import KeyRow
from tidegate.server.api.admission import Admission, Call, Steps, wait
from tidegate.server.api.problems import (
    INSUFFICIENT_PERMISSIONS,
    INVALID_INPUT,
    NAMESPACE_NOT_FOUND,
    FieldError,
    Refusal,
)
from tidegate.server.catalog.keys import (
    CONSOLE_MANAGE,
    checked_permissions,
    digest_of,
    hint_of,
    new_key,
    why_without_effect,
)
from tidegate.server.catalog.overrides import Override
from tidegate.server.catalog.sync import CatalogSync
from tidegate.server.catalog.view import Caller, NamespaceView

ROWS_MAX: Final = 200
# Rows looked at between two turns of the event loop.
SLICE: Final = 2_000


class NewKey(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request for a new key."""

    permissions: Annotated[str, Meta(max_length=100_000)]
    name: Annotated[str, Meta(max_length=512)] = ""
    expires_at_ms: Annotated[int, Meta(ge=0, le=2**53)] | None = None


class ChangedKey(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request that expires or revokes a key."""

    id: Annotated[str, Meta(min_length=1, max_length=512)]
    expires_at_ms: Annotated[int, Meta(ge=0, le=2**53)] | None = None


class NamedNamespace(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request that creates, deletes or restores a namespace: its name or id."""

    namespace: Annotated[str, Meta(min_length=1, max_length=512)]


class CatalogViews:
    """What the console shows and changes of the catalog, as steps of the API."""

    def __init__(self, sync: CatalogSync, admission: Admission) -> None:
        self._sync = sync
        self._admission = admission

    # Namespaces.

    def namespaces(self, caller: Caller, text: str) -> dict[str, Any]:
        found = sorted(caller.workspace.by_name.values(), key=lambda each: each.name)
        wanted = [each for each in found if text.casefold() in each.name.casefold() or text == each.id]
        return {
            "total": len(found),
            "matched": len(wanted),
            "namespaces": [_namespace(each) for each in wanted[:ROWS_MAX]],
        }

    def create_namespace(self, call: Call, body: bytes) -> Steps[dict[str, Any]]:
        caller = yield from self._manager(call)
        wanted = _decoded(NamedNamespace, body)
        held = caller.workspace.namespaces.get(wanted.namespace)
        if held is not None and held.is_deleted:
            raise _invalid(
                "namespace", "a deleted namespace has this name: restore it, or choose another name"
            )
        if held is None:
            held = yield from wait(self._sync.create_namespace, caller.workspace, wanted.namespace)
        return _namespace(held)

    def delete_namespace(self, call: Call, body: bytes) -> Steps[dict[str, Any]]:
        return (yield from self._mark_namespace(call, body, is_deleted=True))

    def restore_namespace(self, call: Call, body: bytes) -> Steps[dict[str, Any]]:
        return (yield from self._mark_namespace(call, body, is_deleted=False))

    def _mark_namespace(self, call: Call, body: bytes, *, is_deleted: bool) -> Steps[dict[str, Any]]:
        caller = yield from self._manager(call)
        held = caller.workspace.namespaces.get(_decoded(NamedNamespace, body).namespace)
        if held is None:
            raise Refusal(NAMESPACE_NOT_FOUND, "The namespace was not found.")
        yield from wait(self._sync.delete_namespace, held, is_deleted=is_deleted)
        return _namespace(held)

    # Overrides: finding them. Changing them is the API's.

    async def overrides(self, caller: Caller, namespace: NamespaceView, text: str) -> dict[str, Any]:
        """The overrides whose identifier holds `text`, and how many there are."""
        wanted = text.casefold()
        found: list[Override] = []
        everything = list(namespace.matcher)
        for start in range(0, len(everything), SLICE):
            part = everything[start : start + SLICE]
            found += [each for each in part if wanted in each.identifier.casefold() or text == each.id]
            await asyncio.sleep(0)
        found.sort(key=lambda each: each.identifier)
        return {
            "namespace": _namespace(namespace),
            "total": len(everything),
            "matched": len(found),
            "overrides": [_override(each) for each in found[:ROWS_MAX]],
        }

    # Keys.

    def keys(self, caller: Caller, text: str, now_ms: int) -> dict[str, Any]:
        wanted = text.casefold()
        rows = sorted(
            self._sync.view.keys_of(caller.workspace.id), key=lambda row: (-row.created_at_ms, row.id)
        )
        found = [
            row
            for row in rows
            if any(wanted in each.casefold() for each in (row.name, row.id, row.hint, *row.permissions))
        ]
        return {
            "total": len(rows),
            "matched": len(found),
            "keys": [_key(row, now_ms, caller) for row in found[:ROWS_MAX]],
        }

    def create_key(self, call: Call, body: bytes) -> Steps[dict[str, Any]]:
        caller = yield from self._manager(call)
        wanted = _decoded(NewKey, body)
        now_ms = self._admission.now_ms()
        try:
            permissions = checked_permissions(wanted.permissions)
        except InvalidInput as error:
            raise _invalid("permissions", str(error)) from error
        if not permissions:
            raise _invalid("permissions", "a key without permissions can do nothing: choose at least one")
        for permission in permissions:
            if not _holds(caller.grants, permission):
                raise Refusal(
                    INSUFFICIENT_PERMISSIONS,
                    f"A key can only get permissions that your key has; it does not have {permission!r}.",
                )
        if wanted.expires_at_ms is not None and wanted.expires_at_ms <= now_ms:
            raise _invalid("expires_at_ms", "this time is in the past: give a later one")
        key = new_key()
        row = KeyRow(
            f"key_{self._admission.new_id()}",
            caller.workspace.id,
            digest_of(key),
            wanted.name,
            hint_of(key),
            permissions,
            now_ms,
            wanted.expires_at_ms,
            True,
            None,
        )
        stored = yield from wait(self._sync.put_key, row)
        return {"key": key, **_key(stored, now_ms, caller)}

    def expire_key(self, call: Call, body: bytes) -> Steps[dict[str, Any]]:
        caller = yield from self._manager(call)
        wanted = _decoded(ChangedKey, body)
        row = self._own_key(caller, wanted.id)
        now_ms = self._admission.now_ms()
        at_ms = now_ms if wanted.expires_at_ms is None else wanted.expires_at_ms
        stored = yield from wait(self._sync.expire_key, row.id, at_ms)
        return _key(stored or row, now_ms, caller)

    def revoke_key(self, call: Call, body: bytes) -> Steps[dict[str, Any]]:
        caller = yield from self._manager(call)
        row = self._own_key(caller, _decoded(ChangedKey, body).id)
        stored = yield from wait(self._sync.revoke_key, row.id)
        return _key(stored or row, self._admission.now_ms(), caller)

    def _own_key(self, caller: Caller, key_id: str) -> KeyRow:
        row = self._sync.view.key_by_id(key_id)
        if row is None or row.workspace_id != caller.workspace.id:
            raise _invalid("id", "the workspace has no key with this id")
        return row

    def _manager(self, call: Call) -> Steps[Caller]:
        caller = yield from self._admission.admit(call)
        if CONSOLE_MANAGE not in caller.grants:
            raise Refusal(
                INSUFFICIENT_PERMISSIONS,
                f"Missing permission: the key needs {CONSOLE_MANAGE!r} to change this.",
            )
        return caller


def _decoded(kind: type[Any], body: bytes) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise _invalid("", str(error)[:200]) from error


def _invalid(field: str, message: str) -> Refusal:
    where = f"/properties/{field}" if field else "/"
    return Refusal(INVALID_INPUT, message, errors=[FieldError(where, message)])


def _holds(grants: frozenset[str], permission: str) -> bool:
    """Whether those who hold `grants` may give `permission` to another key."""
    return any(each in grants for each in _wider(permission))


def _wider(permission: str) -> Iterator[str]:
    """The permission, and those that include it."""
    yield permission
    if permission.startswith("urn:tidegate:ratelimit:"):
        yield "ratelimit.*.read_override"
        yield f"ratelimit.{permission.split(':')[3]}.read_override"
    elif permission.startswith("ratelimit."):
        yield f"ratelimit.*.{permission.rpartition('.')[2]}"


def key_state(row: KeyRow, now_ms: int) -> str:
    if row.revoked_at_ms is not None:
        return "revoked"
    if not row.enabled:
        return "disabled"
    return "expired" if row.expires_at_ms is not None and row.expires_at_ms <= now_ms else "active"


def _key(row: KeyRow, now_ms: int, caller: Caller) -> dict[str, Any]:
    """Without its digest: with the secret of the console it would be half of a session."""
    return {
        "id": row.id,
        "name": row.name,
        "hint": row.hint,
        "permissions": list(row.permissions),
        "without_effect": _without_effect(row.permissions),
        "state": key_state(row, now_ms),
        "created_at_ms": row.created_at_ms,
        "expires_at_ms": row.expires_at_ms,
        "revoked_at_ms": row.revoked_at_ms,
        "is_own": row.id == caller.key_id,
    }


def _without_effect(permissions: Sequence[str]) -> Mapping[str, str]:
    return {each: why for each in permissions if (why := why_without_effect(each)) is not None}


def _namespace(namespace: NamespaceView) -> dict[str, Any]:
    return {
        "id": namespace.id,
        "name": namespace.name,
        "created_at_ms": namespace.row.created_at_ms,
        "is_deleted": namespace.is_deleted,
        "overrides": len(namespace.matcher),
    }


def _override(override: Override) -> dict[str, Any]:
    rule = "blocked" if override.limit == 0 else format_quota(override.limit, override.duration_ms)
    if override.shadow:
        rule += ", shadow"
    return {
        "overrideId": override.id,
        "identifier": override.identifier,
        "limit": override.limit,
        "duration": override.duration_ms,
        "shadow": override.shadow,
        "rule": rule,
        "is_pattern": "*" in override.identifier,
    }
