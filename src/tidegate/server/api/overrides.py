"""The four operations on overrides: set, get, list, delete.

They answer from memory and write to the database. They never create a namespace. `getOverride` without the permission
to read answers exactly what it answers when there is no override, so that a key cannot find out what exists.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from tidegate.server.api.admission import Admission, Call, Pagination, Steps, answer, wait
from tidegate.server.api.problems import OVERRIDE_NOT_FOUND, Refusal, invalid
from tidegate.server.api.schema import (
    PAGE_DEFAULT,
    decode_delete_override,
    decode_get_override,
    decode_list_overrides,
    decode_set_override,
)
from tidegate.server.catalog.keys import override_urn
from tidegate.server.catalog.overrides import PARTS_MAX, Override, parts_of
from tidegate.server.catalog.sync import CatalogSync
from tidegate.server.catalog.view import Caller, NamespaceView
from tidegate.server.messages import Route


class OverrideData(msgspec.Struct, rename="camel"):
    """One override in an answer."""

    override_id: str
    identifier: str
    limit: int
    duration: int
    shadow: bool | UnsetType = UNSET


class OverrideOperations:
    """The operations on overrides."""

    def __init__(self, sync: CatalogSync, admission: Admission) -> None:
        self._sync = sync
        self._admission = admission

    def routes(self) -> list[Route]:
        return self._admission.routes(
            {
                "setOverride": self.set_override,
                "getOverride": self.get_override,
                "listOverrides": self.list_overrides,
                "deleteOverride": self.delete_override,
            }
        )

    def set_override(self, call: Call, body: bytes) -> Steps[None]:
        wanted = yield from self._admission.body(call, decode_set_override, body)
        if parts_of(wanted.identifier) > PARTS_MAX:
            message = f"'identifier' must have at most {PARTS_MAX} texts between two `*`"
            fix = "Use a shorter pattern, or several patterns."
            raise invalid("/properties/identifier", message, "The pattern has too many parts", fix=fix)
        caller = yield from self._admission.admit(call)
        namespace = yield from self._admission.namespace(caller, wanted.namespace, "set_override")
        stored = yield from wait(
            self._sync.set_override,
            namespace,
            wanted.identifier,
            wanted.limit,
            wanted.duration,
            shadow=wanted.shadow is True,
        )
        answer(call, {"overrideId": stored.id})

    def get_override(self, call: Call, body: bytes) -> Steps[None]:
        wanted = yield from self._admission.body(call, decode_get_override, body)
        caller = yield from self._admission.admit(call)
        namespace = yield from self._admission.namespace(caller, wanted.namespace, None)
        found = yield from self._readable(caller, namespace, wanted.identifier)
        if found is None:
            # It may have been set a moment ago. One that may not be read takes the same path, hence the same time.
            yield from wait(self._sync.confirm)
            found = yield from self._readable(caller, namespace, wanted.identifier)
        if found is None:
            raise Refusal(OVERRIDE_NOT_FOUND, "There is no override for this identifier.")
        answer(call, _data(found))

    def list_overrides(self, call: Call, body: bytes) -> Steps[None]:
        wanted = yield from self._admission.body(call, decode_list_overrides, body)
        caller = yield from self._admission.admit(call)
        namespace = yield from self._admission.namespace(
            caller, wanted.namespace, "read_override", deleted_too=True
        )
        size = PAGE_DEFAULT if wanted.limit is UNSET else wanted.limit
        page, following = namespace.page("" if wanted.cursor is UNSET else wanted.cursor, size)
        pagination = Pagination(following is not None, UNSET if following is None else following)
        answer(call, [_data(override) for override in page], pagination)

    def delete_override(self, call: Call, body: bytes) -> Steps[None]:
        wanted = yield from self._admission.body(call, decode_delete_override, body)
        caller = yield from self._admission.admit(call)
        namespace = yield from self._admission.namespace(caller, wanted.namespace, "delete_override")
        if not (yield from wait(self._sync.delete_override, namespace, wanted.identifier)):
            raise Refusal(OVERRIDE_NOT_FOUND, "There is no override for this identifier.")
        answer(call, {})

    def _readable(self, caller: Caller, namespace: NamespaceView, identifier: str) -> Steps[Override | None]:
        """The override that applies to `identifier`, unless the caller may not read it."""
        yield from self._admission.spend(caller.workspace.id, namespace.matcher.cost)
        found = namespace.matcher.find(identifier)
        if found is None or caller.may("read_override", namespace.id):
            return found
        return found if override_urn(namespace.id, found.id) in caller.grants else None


def _data(override: Override) -> OverrideData:
    shadow = True if override.shadow else UNSET
    return OverrideData(override.id, override.identifier, override.limit, override.duration_ms, shadow)
