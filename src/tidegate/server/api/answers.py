"""The answer of an operation: its data in an envelope. `limit` and `multiLimit` write their own, for speed."""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from tidegate.server.api.admission import Call
from tidegate.server.api.problems import JSON_LINE, Meta

ENCODE: Final = msgspec.json.Encoder().encode


class Pagination(msgspec.Struct, rename="camel"):
    has_more: bool
    cursor: str | UnsetType = UNSET


class Envelope(msgspec.Struct):
    meta: Meta
    data: object
    pagination: Pagination | UnsetType = UNSET


def answer(call: Call, data: object, pagination: Pagination | UnsetType = UNSET) -> None:
    envelope = Envelope(Meta("req_" + call.request_id), data, pagination)
    call.answer = 200, JSON_LINE + call.lines, ENCODE(envelope)
