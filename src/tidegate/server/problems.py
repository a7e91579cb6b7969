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
    "Answer",
    "FieldError",
    "Problem",
    "Refusal",
    "accepts_problem_json",
    "error_answer",
]

DOCUMENTATION: Final = "https://tidegate.dev/docs/errors/"

# (status, header lines each ended by CRLF, body). A plain tuple: it is made for every request.
Answer = tuple[int, bytes, bytes]

JSON_LINE: Final = b"content-type: application/json\r\n"
PROBLEM_LINE: Final = b"content-type: application/problem+json\r\n"


class Problem(NamedTuple):
    """One row of the error table."""

    status: int
    title: str
    suffix: str

    @property
    def type(self) -> str:
        return DOCUMENTATION + self.suffix


INVALID_INPUT: Final = Problem(400, "Bad Request", "unkey/application/invalid_input")
MALFORMED_AUTHORIZATION: Final = Problem(400, "Bad Request", "unkey/authentication/malformed")
MALFORMED_REQUEST: Final = Problem(400, "Bad Request", "user/bad_request/malformed_request")
KEY_NOT_FOUND: Final = Problem(401, "Unauthorized", "unkey/authentication/key_not_found")
INSUFFICIENT_PERMISSIONS: Final = Problem(
    403, "Insufficient Permissions", "unkey/authorization/insufficient_permissions"
)
KEY_DISABLED: Final = Problem(403, "Key is disabled", "unkey/authorization/key_disabled")
WORKSPACE_DISABLED: Final = Problem(403, "Workspace is disabled", "unkey/authorization/workspace_disabled")
FORBIDDEN: Final = Problem(403, "Forbidden", "unkey/authorization/forbidden")
ROUTE_NOT_FOUND: Final = Problem(404, "Not Found", "user/bad_request/route_not_found")
NAMESPACE_NOT_FOUND: Final = Problem(404, "Not Found", "unkey/data/ratelimit_namespace_not_found")
OVERRIDE_NOT_FOUND: Final = Problem(404, "Not Found", "unkey/data/ratelimit_override_not_found")
METHOD_NOT_ALLOWED: Final = Problem(405, "Method Not Allowed", "user/bad_request/method_not_allowed")
REQUEST_TIMEOUT: Final = Problem(408, "Request Timeout", "user/bad_request/request_timeout")
NAMESPACE_GONE: Final = Problem(410, "Resource Gone", "unkey/data/ratelimit_namespace_gone")
BODY_TOO_LARGE: Final = Problem(413, "Request Entity Too Large", "user/bad_request/request_body_too_large")
URI_TOO_LONG: Final = Problem(414, "URI Too Long", "user/bad_request/request_uri_too_long")
EXPECTATION_FAILED: Final = Problem(417, "Expectation Failed", "user/bad_request/expectation_failed")
WORKSPACE_RATE_LIMITED: Final = Problem(
    429, "Too Many Requests", "user/too_many_requests/workspace_rate_limited"
)
HEADERS_TOO_LARGE: Final = Problem(
    431, "Request Header Fields Too Large", "user/bad_request/request_headers_too_large"
)
UNEXPECTED_ERROR: Final = Problem(500, "Internal Server Error", "unkey/application/unexpected_error")
# The published clients know 500 for a server's fault, whatever its kind, and repeat the call.
SERVICE_UNAVAILABLE: Final = Problem(500, "Internal Server Error", "unkey/application/service_unavailable")

# Before a request is even understood: this node has no room for it.
OVERLOADED: Final = Problem(503, "Service Unavailable", "unkey/application/service_unavailable")


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
