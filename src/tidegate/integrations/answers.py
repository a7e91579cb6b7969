"""What a client gets: header fields, status and body. Pure: values in, values out.

The header fields are those of the limit that has the least left. A denial names every limit that refused, by its
policy, in the problem type of the IETF draft.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, NamedTuple

from tidegate.core.header_fields import INTEGER_MAX, policy_name, policy_value, whole_seconds
from tidegate.core.model import Decision, Limit, checked_int
from tidegate.core.quota import format_duration
from tidegate.errors import InvalidInput

__all__ = ["Answers", "Denial", "Outcome", "closest", "problem_json"]

PROBLEM_TYPE: Final = "https://iana.org/assignments/http-problem-types#quota-exceeded"
NEVER_MS: Final = 1 << 62


class Outcome(NamedTuple):
    """What was decided for one request."""

    allowed: bool
    decisions: Sequence[Decision] = ()
    """Of the limits that are enforced, in the order of the rules; empty if none applied."""
    shadow: Sequence[Decision] = ()
    """Of the limits in shadow mode; empty if the request was denied, because then nothing is counted."""
    closest: Decision | None = None
    """The decision that the header fields are about."""

    @property
    def shadow_denied(self) -> list[Decision]:
        """What shadow mode would have refused."""
        return [decision for decision in self.shadow if decision.exceeded]


def closest(decisions: Sequence[Decision]) -> Decision:
    """The limit that has the least left: of denials the one to wait for longest, else the least room left."""
    if len(decisions) == 1:
        return decisions[0]
    denials = [decision for decision in decisions if not decision]
    if denials:
        return max(denials, key=_wait_ms)
    return min(decisions, key=lambda decision: (decision.remaining, -decision.reset_at_ms))


def _wait_ms(denial: Decision) -> int:
    wait_ms = denial.retry_after_ms
    return NEVER_MS if wait_ms is None else wait_ms


def describe(denial: Decision) -> str:
    """The denial as one sentence."""
    if denial.retry_after_ms is None:
        return f"The limit is {denial.limit}, and this request alone costs more than that."
    if denial.effective <= denial.limit.quota and denial.source == "degraded":
        wait = format_duration(denial.retry_after_ms)
        return f"What was used of {denial.limit} is not known at the moment. Retry in {wait}."
    return f"The limit of {denial.limit} is used up. Retry in {format_duration(denial.retry_after_ms)}."


class Denial(NamedTuple):
    """A denied request, for the function that writes its response."""

    decision: Decision
    """The limit to wait for longest."""
    decisions: Sequence[Decision]
    headers: dict[str, str]
    status: int

    @property
    def detail(self) -> str:
        """The denial as one sentence."""
        return describe(self.decision)


def problem_json(denial: Denial) -> tuple[str, bytes]:
    """The body of a 429 as `application/problem+json` (RFC 9457)."""
    violated = dict.fromkeys(one.limit.namespace for one in denial.decisions if not one)
    document: dict[str, Any] = {
        "type": PROBLEM_TYPE,
        "title": "Too Many Requests",
        "status": denial.status,
        "detail": denial.detail,
        "violated-policies": list(violated),
    }
    wait_ms = denial.decision.retry_after_ms
    if wait_ms is not None:
        document["retry_after_ms"] = wait_ms
    return "application/problem+json", json.dumps(document).encode()


@lru_cache(maxsize=1024)
def _policy(limit: Limit) -> tuple[str, bytes]:
    """The quoted name of a policy, and the value of RateLimit-Policy."""
    name = policy_name(limit.namespace)
    return name, policy_value(name, limit.quota, limit.duration_ms).encode()


@dataclass(frozen=True, kw_only=True)
class Answers:
    """How answers look. `body` gets a `Denial` and returns a content type and bytes."""

    status: int = 429
    headers: bool = True
    """RateLimit-Policy and RateLimit on every answer; Retry-After on a denial is always sent."""
    x_ratelimit: bool = False
    """The older X-RateLimit-Limit, -Remaining and -Reset (seconds since 1970) too."""
    body: Callable[[Denial], tuple[str, bytes]] = field(default=problem_json)

    def __post_init__(self) -> None:
        if checked_int("status", self.status, 400) > 599:
            raise InvalidInput("status", self.status, "a status of an error, 400 to 599")

    def lines(self, decision: Decision) -> list[tuple[bytes, bytes]]:
        """`fields` in lower case and bytes. Its constant part is kept: this runs for every answer."""
        if not decision or self.x_ratelimit or not self.headers:
            fields = self.fields(decision)
            return [(name.lower().encode(), value.encode("latin-1")) for name, value in fields.items()]
        name, policy = _policy(decision.limit)
        seconds = whole_seconds(decision.reset_at_ms - decision.decided_at_ms)
        state = f"{name};r={min(decision.remaining, INTEGER_MAX)};t={seconds}"
        return [(b"ratelimit-policy", policy), (b"ratelimit", state.encode())]

    def fields(self, decision: Decision) -> dict[str, str]:
        """The header fields of one decision."""
        fields = decision.headers()
        if not self.headers:
            fields = {name: value for name, value in fields.items() if name == "Retry-After"}
        if self.x_ratelimit:
            fields["X-RateLimit-Limit"] = str(decision.limit.quota)
            fields["X-RateLimit-Remaining"] = str(decision.remaining)
            fields["X-RateLimit-Reset"] = str(whole_seconds(decision.reset_at_ms))
        return fields

    def denial(self, decisions: Sequence[Decision]) -> Denial:
        """What is known about a refused request."""
        decision = closest(decisions)
        return Denial(decision, decisions, self.fields(decision), self.status)
