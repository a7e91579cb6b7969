"""The RateLimit-Policy and RateLimit header fields (IETF httpapi draft) and Retry-After, on answers of `limit`.

Structured fields by RFC 9651: the policy's name is a String, the parameters are Integers. What does not change
from request to request is put together once per policy.
"""

from __future__ import annotations

from typing import Final

__all__ = ["INTEGER_MAX", "allowed_line", "denied_line", "policy_lines", "policy_name", "whole_seconds"]

# The largest Integer of a structured field has 15 digits; quotas may have 19.
INTEGER_MAX: Final = 999_999_999_999_999
# A namespace may have a name of 512 characters. Nobody wants that in a header, twice.
NAME_MAX: Final = 64


def policy_name(namespace_name: str, namespace_id: str) -> str:
    """A String of structured fields, quoted: the namespace's name where a header can carry it, else its id."""
    if len(namespace_name) > NAME_MAX or not (namespace_name.isascii() and namespace_name.isprintable()):
        return f'"{namespace_id}"'
    escaped = namespace_name.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def whole_seconds(milliseconds: int) -> int:
    """Rounded up, at least 1, at most what a header may carry: nobody is asked to come back too early."""
    return min(max(1, -(-milliseconds // 1000)), INTEGER_MAX)


def policy_lines(name: str, quota: int, duration_ms: int) -> str:
    """`RateLimit-Policy` in full, and the beginning of `RateLimit` up to its remaining quota."""
    window_s = whole_seconds(duration_ms)
    return f"ratelimit-policy: {name};q={min(quota, INTEGER_MAX)};w={window_s}\r\nratelimit: {name};r="


def allowed_line(remaining: int, reset_in_ms: int) -> str:
    """The rest of `RateLimit` on an allowed call."""
    return f"{min(remaining, INTEGER_MAX)};t={whole_seconds(reset_in_ms)}\r\n"


def denied_line(retry_after_ms: int | None, reset_in_ms: int) -> str:
    """The rest of `RateLimit` on a denied call, with the Retry-After that it must agree with.

    A cost above the limit never fits: then there is no moment to name, and no Retry-After.
    """
    if retry_after_ms is None:
        return f"0;t={whole_seconds(reset_in_ms)}\r\n"
    seconds = whole_seconds(retry_after_ms)
    return f"0;t={seconds}\r\nretry-after: {seconds}\r\n"
