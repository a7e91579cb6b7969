"""What can go wrong with a call, and how it is told: the error table and its envelope.

Every error that a client can see is one of the constants here. `Refusal` carries one from where it is found to the
one place that writes it down. An error's `type` is the address of the page that explains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

__all__ = [
    "DOCUMENTATION",
    "PROBLEMS",
    "Answer",
    "FieldError",
    "Problem",
    "Refusal",
    "accepts_problem_json",
    "error_answer",
    "problems_by_suffix",
]

DOCUMENTATION: Final = "https://tidegate.dev/docs/errors/"

# (status, header lines each ended by CRLF, body). A plain tuple: it is made for every request.
Answer = tuple[int, bytes, bytes]

JSON_LINE: Final = b"content-type: application/json\r\n"
PROBLEM_LINE: Final = b"content-type: application/problem+json\r\n"


class Problem(NamedTuple):
    """One row of the error table. Its prose is what the pages about errors are made of; backquotes mark code."""

    status: int
    title: str
    suffix: str
    when: str
    """When it is sent."""
    remedy: str
    """What to do about it."""

    @property
    def type(self) -> str:
        return DOCUMENTATION + self.suffix


INVALID_INPUT: Final = Problem(
    400,
    "Bad Request",
    "unkey/application/invalid_input",
    "The body violates the schema of the operation; or there is no `Authorization` header at all; or, in test mode, "
    "`X-Test-Time` is no time. `errors` says what is wrong: `location` in the schema, `message`, and where there is "
    "one a `fix`. The body is looked at before the key: a wrong body with a wrong key is this error.",
    "Mend what `errors` names; `/openapi.json` has the schemas. Sending the same again gives the same answer.",
)
MALFORMED_AUTHORIZATION: Final = Problem(
    400,
    "Bad Request",
    "unkey/authentication/malformed",
    "There is an `Authorization` header, but it is not `Bearer` (with a capital B), a space and a key.",
    "Send `Authorization: Bearer KEY` with a key of `tidegate keys create`.",
)
MALFORMED_REQUEST: Final = Problem(
    400,
    "Bad Request",
    "user/bad_request/malformed_request",
    "What arrived is not an HTTP/1.1 request, or one that can be read in two ways: no `Host`, a header field twice "
    "that may stand only once. The connection is closed.",
    "`detail` says what the parser met. Look for a proxy that rewrites requests, or for TLS sent to a plain port.",
)
KEY_NOT_FOUND: Final = Problem(
    401,
    "Unauthorized",
    "unkey/authentication/key_not_found",
    "No root key of this server is the one that was sent, or it has been revoked.",
    "`tidegate keys list --all` shows the first characters of each key and its state. Compare the server too: a key "
    "belongs to one database.",
)
INSUFFICIENT_PERMISSIONS: Final = Problem(
    403,
    "Insufficient Permissions",
    "unkey/authorization/insufficient_permissions",
    "The key is good but may not do this. `detail` names the permissions of which one would do.",
    "Make a key with it: `tidegate keys create --permissions A,B`. A new namespace needs "
    "`ratelimit.*.create_namespace` beside `ratelimit.*.limit`.",
)
KEY_DISABLED: Final = Problem(
    403,
    "Key is disabled",
    "unkey/authorization/key_disabled",
    "The key exists and is switched off in the database.",
    "Use another key: `tidegate keys create`.",
)
WORKSPACE_DISABLED: Final = Problem(
    403,
    "Workspace is disabled",
    "unkey/authorization/workspace_disabled",
    "The workspace of the key is switched off, and with it all its keys.",
    "`tidegate workspaces set WORKSPACE --enabled` switches it on again.",
)
FORBIDDEN: Final = Problem(
    403,
    "Forbidden",
    "unkey/authorization/forbidden",
    "The key has expired; or the workspace has as many namespaces, or the namespace as many overrides, as it may.",
    "`detail` says which. Make a new key, or use fewer names: what varies from caller to caller belongs into "
    "`identifier`, not into `namespace`.",
)
ROUTE_NOT_FOUND: Final = Problem(
    404,
    "Not Found",
    "user/bad_request/route_not_found",
    "The server has nothing at this path.",
    "`/docs` lists what there is. Clients want the base URL without `/v2`.",
)
NAMESPACE_NOT_FOUND: Final = Problem(
    404,
    "Not Found",
    "unkey/data/ratelimit_namespace_not_found",
    "An operation on overrides names a namespace that the workspace of the key does not have, or that has been "
    "deleted. Namespaces of other workspaces do not exist for it.",
    "Namespaces are made by their first `limit`, never by an override. `tidegate namespaces list` shows them.",
)
OVERRIDE_NOT_FOUND: Final = Problem(
    404,
    "Not Found",
    "unkey/data/ratelimit_override_not_found",
    "`getOverride` found no override that applies, or the key may not read it; `deleteOverride` found none with "
    "exactly this identifier.",
    "`listOverrides` shows what is set. To delete a pattern send it as it was set, `*` included. To read, the key "
    "needs `read_override`.",
)
METHOD_NOT_ALLOWED: Final = Problem(
    405,
    "Method Not Allowed",
    "user/bad_request/method_not_allowed",
    "The path exists, but not for this method. The `Allow` header names those it takes.",
    "The operations of the API take `POST`.",
)
REQUEST_TIMEOUT: Final = Problem(
    408,
    "Request Timeout",
    "user/bad_request/request_timeout",
    "The request did not arrive completely, or was not answered, within its time. The connection is closed.",
    "Send it again on a new connection. If it happens often, look at the network, and at the load of the server.",
)
NAMESPACE_GONE: Final = Problem(
    410,
    "Resource Gone",
    "unkey/data/ratelimit_namespace_gone",
    "`limit` or `multiLimit` names a namespace that has been deleted. Nothing was counted, also for other items of the "
    "batch.",
    "Use another namespace, or bring it back: `tidegate namespaces restore NAMESPACE`.",
)
BODY_TOO_LARGE: Final = Problem(
    413,
    "Request Entity Too Large",
    "user/bad_request/request_body_too_large",
    "The body is larger than the server takes. The connection is closed.",
    "Send less: no valid call comes near the bound.",
)
URI_TOO_LONG: Final = Problem(
    414,
    "URI Too Long",
    "user/bad_request/request_uri_too_long",
    "The request target is longer than the server takes. The connection is closed.",
    "Parameters belong into the body.",
)
EXPECTATION_FAILED: Final = Problem(
    417,
    "Expectation Failed",
    "user/bad_request/expectation_failed",
    "The request has an `Expect` header with something other than `100-continue`. The connection is closed.",
    "Leave the header out.",
)
WORKSPACE_RATE_LIMITED: Final = Problem(
    429,
    "Too Many Requests",
    "user/too_many_requests/workspace_rate_limited",
    "The workspace has used its quota of API calls. Never sent for a denied check: that is a 200 with "
    "`success: false`.",
    "Wait for as long as `Retry-After` says. `tidegate workspaces set WORKSPACE --quota 1000/minute` changes the "
    "quota, `--quota none` lifts it.",
)
HEADERS_TOO_LARGE: Final = Problem(
    431,
    "Request Header Fields Too Large",
    "user/bad_request/request_headers_too_large",
    "The header fields together are larger, or more, than the server takes. The connection is closed.",
    "Send fewer: usually they are cookies that were meant for another service.",
)
UNEXPECTED_ERROR: Final = Problem(
    500,
    "Internal Server Error",
    "unkey/application/unexpected_error",
    "A fault of the server.",
    "The log of the server has the whole story under the `requestId` of the answer. Please report it.",
)
# The published clients know 500 for a server's fault, whatever its kind, and repeat the call.
SERVICE_UNAVAILABLE: Final = Problem(
    500,
    "Internal Server Error",
    "unkey/application/service_unavailable",
    "The database is away, and this call needs it: it changes an override, makes a namespace when thousands of new "
    "ones are waiting already, or comes before the server has ever read its keys. All other checks go on.",
    "Try again. `/readyz` and `tidegate doctor` say what is down.",
)
# Before a request is even understood: this node has no room for it.
OVERLOADED: Final = Problem(
    503,
    "Service Unavailable",
    "unkey/application/service_unavailable",
    "The server is receiving too many large bodies at once. Bodies of ordinary calls are never refused for it.",
    "Try again, or ask another node.",
)

PROBLEMS: Final = (
    INVALID_INPUT,
    MALFORMED_AUTHORIZATION,
    MALFORMED_REQUEST,
    KEY_NOT_FOUND,
    INSUFFICIENT_PERMISSIONS,
    KEY_DISABLED,
    WORKSPACE_DISABLED,
    FORBIDDEN,
    ROUTE_NOT_FOUND,
    NAMESPACE_NOT_FOUND,
    OVERRIDE_NOT_FOUND,
    METHOD_NOT_ALLOWED,
    REQUEST_TIMEOUT,
    NAMESPACE_GONE,
    BODY_TOO_LARGE,
    URI_TOO_LONG,
    EXPECTATION_FAILED,
    WORKSPACE_RATE_LIMITED,
    HEADERS_TOO_LARGE,
    UNEXPECTED_ERROR,
    SERVICE_UNAVAILABLE,
    OVERLOADED,
)


def problems_by_suffix() -> dict[str, list[Problem]]:
    """The error table by type: one type may come with several statuses."""
    found: dict[str, list[Problem]] = {}
    for problem in PROBLEMS:
        found.setdefault(problem.suffix, []).append(problem)
    return found


class FieldError(msgspec.Struct, omit_defaults=True):
    """One thing that is wrong with a body."""

    location: str
    """Where in the schema: `/properties/limit/minimum`."""
    message: str
    fix: str | None = None


class Refusal(Exception):
    """A call that ends in one of the problems above."""

    def __init__(
        self,
        problem: Problem,
        detail: str,
        *,
        errors: Sequence[FieldError] | None = None,
        headers: bytes = b"",
    ) -> None:
        super().__init__(detail)
        self.problem = problem
        self.detail = detail
        self.errors = errors
        self.headers = headers


class Meta(msgspec.Struct, rename="camel"):
    """What every answer carries beside its data."""

    request_id: str


class ErrorBody(msgspec.Struct, omit_defaults=True):
    """The `error` member. `errors` stands in every 400 and nowhere else."""

    title: str
    detail: str
    status: int
    type: str
    errors: Sequence[FieldError] | None = None


class ErrorEnvelope(msgspec.Struct):
    meta: Meta
    error: ErrorBody


ENCODER: Final = msgspec.json.Encoder()


def accepts_problem_json(accept: bytes) -> bool:
    """Whether an Accept header has `application/problem+json`, `application/*` or `*/*`."""
    for item in accept.split(b","):
        media, *parameters = item.split(b";")
        if media.strip().lower() in {b"application/problem+json", b"application/*", b"*/*"}:
            weights = [p.strip().lower() for p in parameters if p.strip().lower().startswith(b"q=")]
            if not weights or weights[0][2:].strip(b"0.") != b"":
                return True
    return False


def error_answer(refusal: Refusal, request_id: str, accept: bytes, extra_headers: bytes = b"") -> Answer:
    """The refusal on the wire.

    A 429 is always problem+json: that is the only form that the typed error of the published clients reads. A body
    that violates the schema is always plain JSON, for the same reason. All else follows the Accept header.
    """
    problem = refusal.problem
    errors = refusal.errors
    if errors is None and problem.status == 400:
        errors = ()
    body = ENCODER.encode(
        ErrorEnvelope(
            Meta("req_" + request_id),
            ErrorBody(problem.title, refusal.detail, problem.status, problem.type, errors),
        )
    )
    is_problem_json = problem.status == 429 or (
        problem is not INVALID_INPUT and accept != b"" and accepts_problem_json(accept)
    )
    line = PROBLEM_LINE if is_problem_json else JSON_LINE
    return problem.status, line + refusal.headers + extra_headers, body
