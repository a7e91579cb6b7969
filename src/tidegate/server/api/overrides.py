"""The four operations on overrides: set, get, list, delete.

They answer from memory and write to the database. A namespace is never created here. `getOverride` without the
permission to read answers exactly what it answers when there is no override: existence is nobody else's business.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from tidegate.server.api.admission import Admission, Admissions, missing_permission
from tidegate.server.api.problems import (
    JSON_LINE,
    NAMESPACE_NOT_FOUND,
    OVERRIDE_NOT_FOUND,
    Answer,
    Meta,
    Refusal,
    error_answer,
)
from tidegate.server.api.schema import (
    PAGE_DEFAULT,
    BodyDecoder,
    ListOverridesBody,
    OverrideBody,
    SetOverrideBody,
    decode_delete_override,
    decode_get_override,
    decode_list_overrides,
    decode_set_override,
)
from tidegate.server.catalog.overrides import Override
from tidegate.server.catalog.permissions import override_urn
from tidegate.server.catalog.sync import CatalogSync
from tidegate.server.catalog.view import Caller, NamespaceView
from tidegate.server.messages import Handler, Head, Route

__all__ = ["OverrideApi"]

ENCODE: Final = msgspec.json.Encoder().encode

T = TypeVar("T")


class OverrideData(msgspec.Struct, rename="camel"):
    """One override in an answer."""

    override_id: str
    identifier: str
    limit: int
    duration: int


class Pagination(msgspec.Struct, rename="camel"):
    has_more: bool
    cursor: str | UnsetType = UNSET


class Envelope(msgspec.Struct):
    meta: Meta
    data: Any
    pagination: Pagination | UnsetType = UNSET


class OverrideApi:
    """The operations on overrides."""

    def __init__(self, sync: CatalogSync, admissions: Admissions) -> None:
        self._sync = sync
        self._admissions = admissions

    def routes(self) -> list[Route]:
        return [
            Route(
                "POST",
                "/v2/ratelimit.setOverride",
                "setOverride",
                self._handler(decode_set_override, self._set),
            ),
            Route(
                "POST",
                "/v2/ratelimit.getOverride",
                "getOverride",
                self._handler(decode_get_override, self._get),
            ),
            Route(
                "POST",
                "/v2/ratelimit.listOverrides",
                "listOverrides",
                self._handler(decode_list_overrides, self._list),
            ),
            Route(
                "POST",
                "/v2/ratelimit.deleteOverride",
                "deleteOverride",
                self._handler(decode_delete_override, self._delete),
            ),
        ]

    def _handler(
        self, decode: BodyDecoder[T], work: Callable[[T, str, Admission], Awaitable[Answer]]
    ) -> Handler:
        def handle(head: Head, body: bytes) -> Answer | Coroutine[Any, Any, Answer]:
            request_id = self._admissions.request_id()
            try:
                call = decode(body)
            except Refusal as refusal:
                return error_answer(refusal, request_id, head.accept)
            return self._admissions.serve(head, request_id, partial(work, call, request_id))

        return handle

    async def _set(self, call: SetOverrideBody, request_id: str, admission: Admission) -> Answer:
        namespace = await self._namespace(call.namespace, admission)
        if not admission.caller.may("set_override", namespace.id):
            raise missing_permission("set_override", namespace)
        stored = await self._sync.set_override(namespace, call.identifier, call.limit, call.duration)
        return _answer(request_id, {"overrideId": stored.id}, admission)

    async def _get(self, call: OverrideBody, request_id: str, admission: Admission) -> Answer:
        namespace = await self._namespace(call.namespace, admission)
        found = _readable(admission.caller, namespace, call.identifier)
        if found is None:
            # It may have been set a moment ago. What may not be read takes the same way, and so the same time.
            await self._sync.confirm()
            found = _readable(admission.caller, namespace, call.identifier)
        if found is None:
            raise Refusal(OVERRIDE_NOT_FOUND, "There is no override for this identifier.")
        return _answer(request_id, _data(found), admission)

    async def _list(self, call: ListOverridesBody, request_id: str, admission: Admission) -> Answer:
        namespace = await self._namespace(call.namespace, admission, deleted_too=True)
        if not admission.caller.may("read_override", namespace.id):
            raise missing_permission("read_override", namespace)
        size = PAGE_DEFAULT if call.limit is UNSET else call.limit
        page, following = namespace.page("" if call.cursor is UNSET else call.cursor, size)
        pagination = Pagination(following is not None, UNSET if following is None else following)
        return _answer(request_id, [_data(override) for override in page], admission, pagination)

    async def _delete(self, call: OverrideBody, request_id: str, admission: Admission) -> Answer:
        namespace = await self._namespace(call.namespace, admission)
        if not admission.caller.may("delete_override", namespace.id):
            raise missing_permission("delete_override", namespace)
        if not await self._sync.delete_override(namespace, call.identifier):
            raise Refusal(OVERRIDE_NOT_FOUND, "There is no override for this identifier.")
        return _answer(request_id, {}, admission)

    async def _namespace(
        self, name: str, admission: Admission, *, deleted_too: bool = False
    ) -> NamespaceView:
        namespace = admission.workspace.namespaces.get(name)
        if namespace is None:
            # Somebody else may have created it a moment ago.
            await self._sync.confirm()
            workspace = self._sync.view.workspaces.get(admission.workspace.id)
            namespace = None if workspace is None else workspace.namespaces.get(name)
        if namespace is None or (namespace.is_deleted and not deleted_too):
            raise Refusal(NAMESPACE_NOT_FOUND, "The namespace was not found.")
        return namespace


def _readable(caller: Caller, namespace: NamespaceView, identifier: str) -> Override | None:
    found = namespace.matcher.find(identifier)
    if found is None or caller.may("read_override", namespace.id):
        return found
    return found if override_urn(namespace.id, found.id) in caller.grants else None


def _data(override: Override) -> OverrideData:
    return OverrideData(override.id, override.identifier, override.limit, override.duration_ms)


def _answer(
    request_id: str, data: object, admission: Admission, pagination: Pagination | UnsetType = UNSET
) -> Answer:
    envelope = Envelope(Meta("req_" + request_id), data, pagination)
    return 200, JSON_LINE + admission.lines, ENCODE(envelope)
