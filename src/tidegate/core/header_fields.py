"""The RateLimit-Policy and RateLimit header fields (IETF httpapi draft) and Retry-After.

Structured fields by RFC 9651: the policy's name is a String, the parameters are Integers. `Decision.headers` makes a
dictionary of them; the server writes the same values as lines, the constant part once per policy.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

__all__ = ["INTEGER_MAX", "policy_name", "policy_value", "ratelimit_headers", "whole_seconds"]

# The largest Integer of a structured field has 15 digits; quotas may have 19.
INTEGER_MAX: Final = 999_999_999_999_999
# A namespace may have a name of 512 characters, which is too long for a header that contains it twice.
NAME_MAX: Final = 64


def policy_name(namespace: str, otherwise: str = "") -> str:
    """A quoted String of structured fields: the namespace where a header can carry it.

    Otherwise the name given for that case, or one made from a digest, so that two namespaces keep different names.
    """
    if len(namespace) <= NAME_MAX and namespace.isascii() and namespace.isprintable():
        escaped = namespace.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return f'"{otherwise or blake2b(namespace.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()}"'


def whole_seconds(milliseconds: int) -> int:
    """Rounded up, so that no client comes back too early; at least 1, at most what a header can carry."""
    return min(max(1, -(-milliseconds // 1000)), INTEGER_MAX)


def policy_value(name: str, quota: int, duration_ms: int) -> str:
    """The value of RateLimit-Policy."""
    return f"{name};q={min(quota, INTEGER_MAX)};w={whole_seconds(duration_ms)}"


def ratelimit_headers(
    namespace: str, quota: int, duration_ms: int, remaining: int, reset_in_ms: int, retry_after_ms: int | None
) -> dict[str, str]:
    """All fields of one answer. `retry_after_ms` is None when the request was allowed, or never fits."""
    name = policy_name(namespace)
    seconds = whole_seconds(reset_in_ms if retry_after_ms is None else retry_after_ms)
    fields = {
        "RateLimit-Policy": policy_value(name, quota, duration_ms),
        "RateLimit": f"{name};r={min(remaining, INTEGER_MAX)};t={seconds}",
    }
    if retry_after_ms is not None:
        fields["Retry-After"] = str(seconds)
    return fields
