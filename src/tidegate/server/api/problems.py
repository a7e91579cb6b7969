"""What can go wrong with a call, and how the answer reads: the error table and its envelope.

Every error that a client can see is one of the constants here. `Refusal` carries one to the place that writes the
answer. An error's `type` is the address of the page that explains it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from tidegate.server.messages import JSON_LINE, Answer, Refuse

DOCUMENTATION: Final = "https://tidegate.dev/docs/errors/"

PROBLEM_LINE: Final = b"content-type: application/problem+json\r\n"


class Problem(NamedTuple):
    """One row of the error table, from which the pages about errors are made; backquotes mark code."""

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
    "`X-Test-Time` is not a time. Each item of `errors` has a `location` in the schema, a `message`, and sometimes a "
    "`fix`. The body is checked before the key: a wrong body with a wrong key is this error, with fewer details.",
    "Fix the fields listed in `errors`; `/openapi.json` has the schemas. Sending the same again gives the same error.",
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
    "The request is not HTTP/1.1, or can be read in two ways: `Host` is missing, or a header field that may come once "
    "comes twice. The connection is closed.",
    "`detail` says what the parser found. Look for a proxy that rewrites requests, or for TLS sent to a plain port.",
)
KEY_NOT_FOUND: Final = Problem(
    401,
    "Unauthorized",
    "unkey/authentication/key_not_found",
    "The server has no root key like the one that was sent, or the key has been revoked. At `/metrics`: the token of "
    "the setting `metrics_token` was not sent.",
    "`tidegate keys list --all` shows the first characters of each key and its state. Check the server too: a key "
    "belongs to one database.",
)
INSUFFICIENT_PERMISSIONS: Final = Problem(
    403,
    "Insufficient Permissions",
    "unkey/authorization/insufficient_permissions",
    "The key is valid but does not have the permission. `detail` lists the permissions of which one is enough.",
    "Create a key with it: `tidegate keys create --permissions A,B`. A new namespace needs "
    "`ratelimit.*.create_namespace` beside `ratelimit.*.limit`.",
)
KEY_DISABLED: Final = Problem(
    403,
    "Key is disabled",
    "unkey/authorization/key_disabled",
    "The key exists and is disabled in the database.",
    "Use another key: `tidegate keys create`.",
)
WORKSPACE_DISABLED: Final = Problem(
    403,
    "Workspace is disabled",
    "unkey/authorization/workspace_disabled",
    "The workspace of the key is disabled, and with it all its keys.",
    "`tidegate workspaces set WORKSPACE --enabled` enables it again.",
)
FORBIDDEN: Final = Problem(
    403,
    "Forbidden",
    "unkey/authorization/forbidden",
    "The key has expired; or the workspace has as many namespaces, or the namespace as many overrides, as it may.",
    "`detail` says which. Create a new key, or use fewer names: what differs from caller to caller belongs in "
    "`identifier`, not in `namespace`.",
)
ROUTE_NOT_FOUND: Final = Problem(
    404,
    "Not Found",
    "user/bad_request/route_not_found",
    "The server has nothing at this path.",
    "`/docs` lists all paths. Give clients the base URL without `/v2`.",
)
NAMESPACE_NOT_FOUND: Final = Problem(
    404,
    "Not Found",
    "unkey/data/ratelimit_namespace_not_found",
    "An operation on overrides names a namespace that the workspace of the key does not have, or that has been "
    "deleted. Namespaces of other workspaces are not visible to it.",
    "Namespaces are created by their first `limit`, never by an override. `tidegate namespaces list` shows them.",
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
RESERVATION_NOT_FOUND: Final = Problem(
    404,
    "Not Found",
    "unkey/data/ratelimit_reservation_not_found",
    "`settle` or `release` names a reservation that does not exist any more: its life is over, or it ended more than "
    "ten minutes ago. Or its id is not one that `reserve` has returned. Nothing was counted.",
    "Send the id as `reserve` returned it. Reserve for longer (`life`), and repeat a `settle` that got no response "
    "within ten minutes.",
)
METHOD_NOT_ALLOWED: Final = Problem(
    405,
    "Method Not Allowed",
    "user/bad_request/method_not_allowed",
    "The path does not take this method. The `Allow` header lists the methods that it takes.",
    "The operations of the API take `POST`.",
)
REQUEST_TIMEOUT: Final = Problem(
    408,
    "Request Timeout",
    "user/bad_request/request_timeout",
    "The request did not arrive completely, or was not answered, within its time. The connection is closed.",
    "Send it again on a new connection. If it happens often, check the network and the load of the server.",
)
NAMESPACE_GONE: Final = Problem(
    410,
    "Resource Gone",
    "unkey/data/ratelimit_namespace_gone",
    "`limit` or `multiLimit` names a namespace that has been deleted. Nothing was counted, not even for other items of "
    "the batch.",
    "Use another namespace, or bring it back: `tidegate namespaces restore NAMESPACE`.",
)
BODY_TOO_LARGE: Final = Problem(
    413,
    "Request Entity Too Large",
    "user/bad_request/request_body_too_large",
    "The body is larger than the server accepts. The connection is closed.",
    "Send a smaller body: every valid call is far below the bound.",
)
URI_TOO_LONG: Final = Problem(
    414,
    "URI Too Long",
    "user/bad_request/request_uri_too_long",
    "The request target is longer than the server accepts. The connection is closed.",
    "Send parameters in the body.",
)
EXPECTATION_FAILED: Final = Problem(
    417,
    "Expectation Failed",
    "user/bad_request/expectation_failed",
    "The request has an `Expect` header with something other than `100-continue`. The connection is closed.",
    "Remove the header.",
)
WORKSPACE_RATE_LIMITED: Final = Problem(
    429,
    "Too Many Requests",
    "user/too_many_requests/workspace_rate_limited",
    "The workspace has used its quota of API calls. Never sent for a denied check: that is a 200 with "
    "`success: false`.",
    "Wait for as long as `Retry-After` says. `tidegate workspaces set WORKSPACE --quota 1000/minute` changes the "
    "quota, `--quota none` removes it.",
)
TOO_MANY_RESERVATIONS: Final = Problem(
    429,
    "Too Many Requests",
    "user/too_many_requests/reservations",
    "The workspace holds as many live reservations in the memory of this node as it may. Nothing was reserved. Other "
    "workspaces are not affected.",
    "Settle or release reservations that are done, and give new ones a shorter `life`. An estimate that does not fit "
    "its limit is not this error, but a 200 with `passed: false`.",
)
TOO_MANY_RESETS: Final = Problem(
    429,
    "Too Many Requests",
    "user/too_many_requests/resets",
    "The workspace has as many live resets as it may: each is remembered for at most four windows of its limit. "
    "Nothing was reset. Other workspaces are not affected.",
    "Try again when older resets are over, or allow the identifier more for a while with `setOverride`.",
)
HEADERS_TOO_LARGE: Final = Problem(
    431,
    "Request Header Fields Too Large",
    "user/bad_request/request_headers_too_large",
    "The header fields are larger together, or more, than the server accepts. The connection is closed.",
    "Send fewer: often they are cookies for another service.",
)
UNEXPECTED_ERROR: Final = Problem(
    500,
    "Internal Server Error",
    "unkey/application/unexpected_error",
    "An internal error of the server.",
    "Look up the `requestId` of the response in the log of the server, and report the error.",
)
# The published clients know 500 for every fault of a server, and repeat the call.
SERVICE_UNAVAILABLE: Final = Problem(
    500,
    "Internal Server Error",
    "unkey/application/service_unavailable",
    "The database is down, and this call needs it: it changes an override, creates a namespace when thousands of new "
    "ones are waiting already, brings a key that is new to the server, or comes before the server has read its keys "
    "for the first time. All other checks work.",
    "Try again. `/readyz` shows what is down, `tidegate doctor` why.",
)
OVERLOADED: Final = Problem(
    503,
    "Service Unavailable",
    "unkey/application/service_unavailable",
    "The server is receiving too many large bodies at once (bodies of ordinary calls are still accepted), or all its "
    "connections wait for an answer; then the connection is closed, and only `/livez` and `/readyz` are answered.",
    "Try again, or use another node.",
)

# The problem that a connection means when it refuses a request with this status, before an operation has seen it.
BY_STATUS: Final = {
    400: MALFORMED_REQUEST,
    401: KEY_NOT_FOUND,
    404: ROUTE_NOT_FOUND,
    405: METHOD_NOT_ALLOWED,
    408: REQUEST_TIMEOUT,
    413: BODY_TOO_LARGE,
    414: URI_TOO_LONG,
    417: EXPECTATION_FAILED,
    431: HEADERS_TOO_LARGE,
    500: UNEXPECTED_ERROR,
    503: OVERLOADED,
}

PROBLEMS: Final = tuple(value for value in list(globals().values()) if isinstance(value, Problem))


def problems_by_suffix() -> dict[str, list[Problem]]:
    """The error table by type: one type may have several statuses."""
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


def invalid(location: str, message: str, detail: str = "", *, fix: str | None = None) -> Refusal:
    """The 400 about one field; `detail` is `message` unless it is given."""
    return Refusal(INVALID_INPUT, detail or message, errors=[FieldError(location, message, fix)])


class Meta(msgspec.Struct, rename="camel"):
    """The `meta` member of every answer."""

    request_id: str


class ErrorBody(msgspec.Struct, omit_defaults=True):
    """The `error` member. Every 400 has `errors`, and no other status."""

    title: str
    detail: str
    status: int
    type: str
    errors: Sequence[FieldError] | None = None


class ErrorEnvelope(msgspec.Struct):
    meta: Meta
    error: ErrorBody


ENCODER: Final = msgspec.json.Encoder()
# Media types of an Accept header, and parameters of each, that are looked at. Browsers send about ten types.
ACCEPT_ITEMS_MAX: Final = 32


def accepts_problem_json(accept: bytes) -> bool:
    """Whether an Accept header has `application/problem+json`, `application/*` or `*/*` among its first types."""
    for item in accept.split(b",", ACCEPT_ITEMS_MAX)[:ACCEPT_ITEMS_MAX]:
        media, *parameters = item.split(b";", ACCEPT_ITEMS_MAX)[:ACCEPT_ITEMS_MAX]
        if media.strip().lower() in {b"application/problem+json", b"application/*", b"*/*"}:
            weights = [p.strip().lower() for p in parameters if p.strip().lower().startswith(b"q=")]
            if not weights or weights[0][2:].strip(b"0.") != b"":
                return True
    return False


def error_answer(refusal: Refusal, request_id: str, accept: bytes, lines: bytes = b"") -> Answer:
    """The answer for a refusal; `lines` are further header lines.

    A 429 is always problem+json: the published clients read their typed error in no other form. A body that violates
    the schema is always plain JSON, for the same reason. All others follow the Accept header.
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
    content_type = PROBLEM_LINE if is_problem_json else JSON_LINE
    return problem.status, content_type + refusal.headers + lines, body


def refuser(new_id: Callable[[], str]) -> Refuse:
    """For what reaches no operation: turns a status into the error answer of this API."""

    def refuse(
        status: int, detail: str, accept: bytes, *, lines: bytes = b"", request_id: str | None = None
    ) -> Answer:
        return error_answer(Refusal(BY_STATUS[status], detail, headers=lines), request_id or new_id(), accept)

    return refuse
