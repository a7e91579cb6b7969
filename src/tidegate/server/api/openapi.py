"""The OpenAPI 3.1 document of the server, made from the same structs that decode and encode.

`document()` is plain data; `pages` renders it as HTML. Nothing here is on the path of a request.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from tidegate import __version__
from tidegate.server.api.admission import Pagination
from tidegate.server.api.counters import ResetData, UsageData
from tidegate.server.api.operations import MultiLimitData
from tidegate.server.api.overrides import OverrideData
from tidegate.server.api.problems import ErrorBody, FieldError, problems_by_suffix
from tidegate.server.api.problems import Meta as AnswerMeta
from tidegate.server.api.reservations import ReserveData, SettleData
from tidegate.server.api.schema import SCHEMAS

REFERENCE: Final = "#/components/schemas/"


class LimitData(msgspec.Struct, rename={"override_id": "overrideId"}):
    """The answer to `limit`. A denied check is not an error: `success` is false."""

    success: bool
    limit: int
    remaining: int
    reset: int
    override_id: str | UnsetType = UNSET
    exceeded: bool | UnsetType = UNSET


class OverrideIdData(msgspec.Struct, rename="camel"):
    """The answer to `setOverride`."""

    override_id: str


class DeletedData(msgspec.Struct):
    """The answer to `deleteOverride`: nothing."""


class LivenessData(msgspec.Struct):
    """The answer to `liveness`."""

    message: str


class Operation(NamedTuple):
    """One line of the table below."""

    name: str
    summary: str
    description: str
    body: str
    data: str
    """The schema of the answer; with pages, of one item."""
    statuses: tuple[int, ...] = (400, 401, 403, 404, 429, 500)
    has_pages: bool = False


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": REFERENCE + name}


# The statuses of an operation that creates a namespace: only one that was deleted does not exist.
CREATING: Final = (400, 401, 403, 410, 429, 500)
OPERATIONS: Final = (
    Operation(
        "limit",
        "Check a rate limit, and consume",
        "Checks one identifier with a sliding window and consumes `cost` if it fits. A denied check is 200 with "
        "`success: false` and consumes nothing. Needs `ratelimit.*.limit` or `ratelimit.<namespace_id>.limit`; a "
        "namespace that does not exist yet is created with `ratelimit.*.create_namespace`.",
        "LimitBody",
        "LimitData",
        CREATING,
    ),
    Operation(
        "multiLimit",
        "Check several rate limits at once, all or nothing",
        "Checks up to 100 items at one instant. If any of them does not fit, nothing is consumed; each item says "
        "whether it alone would have fitted.",
        "MultiLimitBody",
        "MultiLimitData",
        CREATING,
    ),
    Operation(
        "usage",
        "What counts against a limit, and where it was accepted",
        "The counts behind a decision, without consuming: by this process, this region and other regions in the "
        "current window, what still counts of the previous one, and how old each is. The namespace must exist. Needs "
        "`ratelimit.*.limit` or `ratelimit.<namespace_id>.limit`.",
        "CounterBody",
        "UsageData",
    ),
    Operation(
        "reset",
        "Set a counter back to zero, on all nodes",
        "Forgets what was counted for the identifier under this limit, on every node and in every region within 2 s. "
        "Names the counter as `limit` does: an override decides about its duration. What is reserved stays reserved. "
        "The namespace must exist. Needs `ratelimit.*.reset` or `ratelimit.<namespace_id>.reset`.",
        "CounterBody",
        "ResetData",
    ),
    Operation(
        "reserve",
        "Keep a cost until it is known what was used",
        "For work whose cost is known only afterwards. Reserves the `cost` of up to 20 limits, all or nothing; it "
        "counts like cost until `settle`, `release` or the end of its life. What does not fit is 200 with "
        "`passed: false`. Needs the permissions of `limit`.",
        "ReserveBody",
        "ReserveData",
        CREATING,
    ),
    Operation(
        "settle",
        "End a reservation, and count what was used",
        "Less than was reserved frees the rest, more is counted beyond the limit. May be repeated, on any node: only "
        "the first end counts. A reservation that does not exist any more is a 404, and nothing is counted.",
        "SettleBody",
        "SettleData",
    ),
    Operation(
        "release",
        "End a reservation without counting anything",
        "As `settle` with 0.",
        "ReleaseBody",
        "SettleData",
    ),
    Operation(
        "setOverride",
        "Set an override",
        "Replaces limit and duration for an identifier, or for all that match a pattern with `*`. The literal "
        "identifier wins over patterns; among patterns the one with most literal characters, then the one that sorts "
        "first. With `shadow: true` it is counted and reported, and denies nothing. Needs "
        "`ratelimit.*.set_override` or `ratelimit.<namespace_id>.set_override`.",
        "SetOverrideBody",
        "OverrideIdData",
    ),
    Operation(
        "getOverride",
        "Get the override that applies to an identifier",
        "Literal match first, then the pattern that would apply. Without the permission to read, the response is the "
        "same as if there were none. Needs `ratelimit.*.read_override`, `ratelimit.<namespace_id>.read_override` or "
        "`urn:tidegate:ratelimit:<namespace_id>:override:<override_id>`.",
        "OverrideBody",
        "OverrideData",
    ),
    Operation(
        "listOverrides",
        "List the overrides of a namespace",
        "In pages, in the order of their ids. Needs `ratelimit.*.read_override` or "
        "`ratelimit.<namespace_id>.read_override`.",
        "ListOverridesBody",
        "OverrideData",
        has_pages=True,
    ),
    Operation(
        "deleteOverride",
        "Delete an override",
        "By its stored text, `*` included. Needs `ratelimit.*.delete_override` or "
        "`ratelimit.<namespace_id>.delete_override`.",
        "OverrideBody",
        "DeletedData",
    ),
)

# Statuses that a request can get before it reaches its operation.
TRANSPORT_STATUSES: Final = (408, 413, 414, 417, 431, 503)

STATUS_TEXT: Final = {
    400: "The body violates the schema, or the Authorization header is missing or malformed.",
    401: "The key is unknown.",
    403: "A permission is missing, or the key or its workspace is disabled or has expired.",
    404: "The namespace or the override does not exist.",
    408: "The request did not arrive, or was not answered, in time.",
    410: "The namespace has been deleted.",
    413: "The body is too large.",
    414: "The request target is too long.",
    417: "The `Expect` header has something other than `100-continue`.",
    429: "The workspace has used its quota of API calls; or, for `reserve` and `reset`, holds as many as it may.",
    431: "The headers are too large.",
    500: "An internal error of the server. Calls may be repeated.",
    503: "The server is receiving too many large bodies at once.",
}


def _schemas() -> dict[str, Any]:
    types = [
        LimitData,
        MultiLimitData,
        UsageData,
        ResetData,
        ReserveData,
        SettleData,
        OverrideIdData,
        OverrideData,
        DeletedData,
        LivenessData,
        Pagination,
        AnswerMeta,
        ErrorBody,
        FieldError,
    ]
    _, schemas = msgspec.json.schema_components(types, ref_template=REFERENCE + "{name}")
    # Absent, never null: clients in other languages reject null here.
    schemas["ErrorBody"]["properties"]["errors"] = {"type": "array", "items": _ref("FieldError")}
    schemas["FieldError"]["properties"]["fix"] = {"type": "string"}
    # Examples, not an enumeration, so that a new type breaks no client.
    schemas["ErrorBody"]["properties"]["type"] = {
        "type": "string",
        "format": "uri",
        "description": "What went wrong, as the address of the page that explains it; `/docs/errors` has them all.",
        "examples": [problems[0].type for problems in problems_by_suffix().values()],
    }
    schemas["Error"] = {
        "type": "object",
        "properties": {"meta": _ref("Meta"), "error": _ref("ErrorBody")},
        "required": ["meta", "error"],
    }
    return {**SCHEMAS, **schemas}


def _error_response(status: int) -> dict[str, Any]:
    kinds = (
        ["application/problem+json"] if status == 429 else ["application/json", "application/problem+json"]
    )
    response: dict[str, Any] = {
        "description": STATUS_TEXT[status],
        "content": {kind: {"schema": _ref("Error")} for kind in kinds},
    }
    if status == 429:
        response["headers"] = {
            "Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}
        }
    return response


def _success(data: str, *, has_pages: bool = False) -> dict[str, Any]:
    properties = {"meta": _ref("Meta"), "data": _ref(data)}
    if has_pages:
        properties["data"] = {"type": "array", "items": _ref(data)}
        properties["pagination"] = _ref("Pagination")
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"description": "Done.", "content": {"application/json": {"schema": schema}}}


LIMIT_HEADERS: Final[dict[str, Any]] = {
    "RateLimit-Policy": {
        "description": 'Structured field: `"name";q=quota;w=seconds`.',
        "schema": {"type": "string"},
    },
    "RateLimit": {
        "description": 'Structured field: `"name";r=remaining;t=seconds`.',
        "schema": {"type": "string"},
    },
    "Retry-After": {
        "description": "On a denied check: seconds until this cost would fit.",
        "schema": {"type": "integer"},
    },
}


def _parameter(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "description": description, "schema": schema}


CHECK_PARAMETERS: Final = [
    _parameter("policy", {"type": "string"}, "A policy of the server's check configuration."),
    _parameter("domain", {"type": "string", "minLength": 1}, "A domain of the rules."),
    _parameter(
        "descriptor",
        {"type": "array", "maxItems": 100, "items": {"type": "string", "examples": ["user=ann"]}},
        "`KEY=VALUE`; several entries as `KEY=VALUE&KEY=VALUE`, percent-encoded. May repeat.",
    ),
    _parameter(
        "cost",
        {"type": "integer", "minimum": 0, "maximum": 2**32 - 1, "default": 1},
        "0 checks without consuming.",
    ),
]


def _check() -> dict[str, Any]:
    """`/v1/check`. It has no envelope: gateways understand its status, and read no body."""
    denied = {
        "description": "Denied by a limit. A policy may set another status.",
        "headers": LIMIT_HEADERS,
    }
    statuses = sorted({400, 401, 403, 500, *TRANSPORT_STATUSES})
    responses = {str(status): _error_response(status) for status in statuses}
    responses["400"]["content"]["text/plain"] = {"schema": {"type": "string"}}
    allowed = {key: value for key, value in LIMIT_HEADERS.items() if key != "Retry-After"}
    return {
        "operationId": "check",
        "summary": "Check for a gateway: allowed (200) or denied (429)",
        "description": "Checks all descriptors together, by the rules file: if one limit denies, nothing is consumed. "
        "Give `policy`, or `domain` and `descriptor`. Every method means the same, and a body is ignored. Needs "
        "`ratelimit.*.limit`; the listener of `--check-address` needs no key.",
        "tags": ["check"],
        "security": [{"rootKey": []}],
        "parameters": CHECK_PARAMETERS,
        "responses": {
            "200": {"description": "Yes.", "headers": allowed},
            **responses,
            "429": denied,
        },
    }


def document(*, has_check: bool = False) -> dict[str, Any]:
    """The whole document. `has_check`: of a server that has rules for gateways."""
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        success = _success(operation.data, has_pages=operation.has_pages)
        if operation.name == "limit":
            success["headers"] = LIMIT_HEADERS
        statuses = sorted({*operation.statuses, *TRANSPORT_STATUSES})
        paths[f"/v2/ratelimit.{operation.name}"] = {
            "post": {
                "operationId": operation.name,
                "summary": operation.summary,
                "description": operation.description,
                "tags": ["ratelimit"],
                "security": [{"rootKey": []}],
                "requestBody": {
                    "required": True,
                    "content": {"application/json": {"schema": _ref(operation.body)}},
                },
                "responses": {"200": success} | {str(status): _error_response(status) for status in statuses},
            }
        }
    if has_check:
        paths["/v1/check"] = {"get": _check()}
    paths["/v2/liveness"] = {
        "get": {
            "operationId": "liveness",
            "summary": "Whether the server answers",
            "tags": ["liveness"],
            "security": [],
            "responses": {"200": _success("LivenessData")},
        }
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tidegate",
            "version": __version__,
            "description": "Rate limits that are decided from local memory and converge across nodes and regions.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "securitySchemes": {
                "rootKey": {"type": "http", "scheme": "bearer", "description": "A root key, `tg_…`."}
            },
            "schemas": _schemas(),
        },
    }
