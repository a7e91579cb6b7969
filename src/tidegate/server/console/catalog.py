"""Keys, namespaces and overrides in the console: list, search, create, change, delete.

Overrides are changed by the operations of the API itself (`routes` calls them); here is what the API does not have.
Changes need `console.manage`. Law: a new key carries only permissions that its creator holds. A key is never edited in
place: `put_key` replaces the whole row and could undo a revocation that another node has just written. Its expiry can
be changed, by a statement of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from tidegate.core.model import TIME_MS_MAX
from tidegate.core.quota import format_quota
from tidegate.errors import InvalidInput
from tidegate.ports import KeyRow
from tidegate.server.api.admission import Admission, Call, Steps, wait
from tidegate.server.api.problems import INSUFFICIENT_PERMISSIONS, NAMESPACE_NOT_FOUND, Refusal, invalid
from tidegate.server.catalog.keys import (
    CONSOLE_MANAGE,
    checked_permissions,
    key_row,
    new_key,
    why_without_effect,
)
from tidegate.server.catalog.overrides import Override
from tidegate.server.catalog.sync import CatalogSync
from tidegate.server.catalog.view import Caller, NamespaceView

T = TypeVar("T")

ROWS_MAX: Final = 200
NAME_MAX: Final = 512
# Rows looked at between two turns of the event loop.
SLICE: Final = 2_000


class NewKey(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request for a new key."""

    permissions: Annotated[str, Meta(max_length=100_000)]
    name: Annotated[str, Meta(max_length=512)] = ""
    expires_at_ms: Annotated[int, Meta(ge=0)] | None = None


class ChangedKey(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request that expires or revokes a key."""

    id: Annotated[str, Meta(min_length=1, max_length=512)]
    expires_at_ms: Annotated[int, Meta(ge=0)] | None = None


class NamedNamespace(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request that creates, deletes or restores a namespace: its name or id."""

    namespace: Annotated[str, Meta(min_length=1, max_length=512)]


class CatalogViews:
    """What the console shows and changes of the catalog, as steps of the API."""

    def __init__(self, sync: CatalogSync, admission: Admission) -> None:
        self._sync = sync
        self._admission = admission

    # Namespaces.

    async def namespaces(self, caller: Caller, parameters: Mapping[str, str]) -> dict[str, Any]:
        text = parameters.get("text", "")
        found = sorted(caller.workspace.by_name.values(), key=lambda each: each.name)
        wanted = [each for each in found if text.casefold() in each.name.casefold() or text == each.id]
        return {"namespaces": _first(wanted, _namespace), "matched": len(wanted), "total": len(found)}

    def create_namespace(self, call: Call, body: bytes) -> Steps[dict[str, Any]]:
        caller = yield from self._manager(call)
        wanted = _decoded(NamedNamespace, body)
        held = caller.workspace.namespaces.get(wanted.namespace)
        if held is not None and held.is_deleted:
            message = "a deleted namespace has this name: restore it, or choose another name"
            raise invalid("/properties/namespace", message)
        if held is None:
            held = yield from wait(self._sync.create_namespace, caller.workspace, wanted.namespace)
        return _namespace(held)

    def mark_namespace(self, call: Call, body: bytes, *, is_deleted: bool) -> Steps[dict[str, Any]]:
        """Delete it, or restore it."""
        caller = yield from self._manager(call)
        held = found_namespace(caller, _decoded(NamedNamespace, body).namespace)
        yield from wait(self._sync.delete_namespace, held, is_deleted=is_deleted)
        return _namespace(held)

    # Overrides: finding them. Changing them is the API's.

    async def overrides(self, caller: Caller, parameters: Mapping[str, str]) -> dict[str, Any]:
        """The overrides whose identifier holds a text, and how many there are."""
        namespace = found_namespace(caller, required(parameters, "namespace"))
        text = parameters.get("text", "")
        wanted = text.casefold()
        found: list[Override] = []
        everything = list(namespace.matcher)
        for start in range(0, len(everything), SLICE):
            part = everything[start : start + SLICE]
            found += [each for each in part if wanted in each.identifier.casefold() or text == each.id]
            await asyncio.sleep(0)
        found.sort(key=lambda each: each.identifier)
        shown = {"overrides": _first(found, _override), "matched": len(found), "total": len(everything)}
        return {"namespace": _namespace(namespace), **shown}

    # Keys.

    async def keys(self, caller: Caller, parameters: Mapping[str, str]) -> dict[str, Any]:
        now_ms = self._admission.now_ms()
        wanted = parameters.get("text", "").casefold()
        rows = self._sync.view.keys_of(caller.workspace.id)
        rows.sort(key=lambda row: (-row.created_at_ms, row.id))
        found = [
            row
            for row in rows
            if any(wanted in each.casefold() for each in (row.name, row.id, row.hint, *row.permissions))
        ]
        shown = _first(found, lambda row: _key(row, now_ms, caller))
        return {"keys": shown, "matched": len(found), "total": len(rows)}

    def create_key(self, call: Call, body: bytes) -> Steps[dict[str, Any]]:
        caller = yield from self._manager(call)
        wanted = _decoded(NewKey, body)
        now_ms = self._admission.now_ms()
        try:
            permissions = checked_permissions(wanted.permissions)
        except InvalidInput as error:
            raise invalid("/properties/permissions", str(error)) from error
        if not permissions:
            message = "a key without permissions can do nothing: choose at least one"
            raise invalid("/properties/permissions", message)
        for permission in permissions:
            if not any(each in caller.grants for each in _wider(permission)):
                detail = f"A key can only get permissions that your key has; it does not have {permission!r}."
                raise Refusal(INSUFFICIENT_PERMISSIONS, detail)
        _check_expiry(wanted.expires_at_ms)
        if wanted.expires_at_ms is not None and wanted.expires_at_ms <= now_ms:
            raise invalid("/properties/expires_at_ms", "this time is in the past: give a later one")
        key = new_key()
        row = key_row(
            f"key_{self._admission.new_id()}", caller.workspace.id, key, wanted.name, permissions, now_ms
        )
        row = row._replace(expires_at_ms=wanted.expires_at_ms)
        stored = yield from wait(self._sync.put_key, row)
        return {"key": key, **_key(stored, now_ms, caller)}

    def expire_key(self, call: Call, body: bytes) -> Steps[dict[str, Any]]:
        caller = yield from self._manager(call)
        wanted = _decoded(ChangedKey, body)
        _check_expiry(wanted.expires_at_ms)
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
            raise invalid("/properties/id", "the workspace has no key with this id")
        return row

    def _manager(self, call: Call) -> Steps[Caller]:
        caller = yield from self._admission.admit(call)
        if CONSOLE_MANAGE not in caller.grants:
            detail = f"Missing permission: the key needs {CONSOLE_MANAGE!r} to change this."
            raise Refusal(INSUFFICIENT_PERMISSIONS, detail)
        return caller


def _decoded(kind: type[Any], body: bytes) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise invalid("/", str(error)[:200]) from error


def _check_expiry(expires_at_ms: int | None) -> None:
    if expires_at_ms is not None and expires_at_ms > TIME_MS_MAX:
        message = f"{expires_at_ms} is after the year 9999: give at most {TIME_MS_MAX}"
        raise invalid("/properties/expires_at_ms", message)


def required(parameters: Mapping[str, str], name: str) -> str:
    """The parameter of a query that must be there."""
    value = parameters.get(name, "")
    if not 0 < len(value) <= NAME_MAX:
        raise invalid(f"/properties/{name}", f"{name!r} must have 1 to {NAME_MAX} characters")
    return value


def found_namespace(caller: Caller, name: str) -> NamespaceView:
    found = caller.workspace.namespaces.get(name)
    if found is None:
        raise Refusal(NAMESPACE_NOT_FOUND, "The namespace was not found.")
    return found


def _first(found: Sequence[T], show: Callable[[T], dict[str, Any]]) -> list[dict[str, Any]]:
    return [show(each) for each in found[:ROWS_MAX]]


def _wider(permission: str) -> Iterator[str]:
    """The permission, and those that include it: who holds one of them may give it to another key."""
    yield permission
    if permission.startswith("urn:tidegate:ratelimit:"):
        yield "ratelimit.*.read_override"
        yield f"ratelimit.{permission.split(':')[3]}.read_override"
    elif permission.startswith("ratelimit."):
        yield f"ratelimit.*.{permission.rpartition('.')[2]}"


def _key_state(row: KeyRow, now_ms: int) -> str:
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
        "without_effect": {
            each: why for each in row.permissions if (why := why_without_effect(each)) is not None
        },
        "state": _key_state(row, now_ms),
        "created_at_ms": row.created_at_ms,
        "expires_at_ms": row.expires_at_ms,
        "revoked_at_ms": row.revoked_at_ms,
        "is_own": row.id == caller.key_id,
    }


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
