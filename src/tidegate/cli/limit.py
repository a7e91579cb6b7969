"""`tidegate limit`: one decision from a running server. Exits 0 if allowed, 1 if denied, 2 on an error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import click

from tidegate.adapters import clock
from tidegate.cli.client import Client, client_options
from tidegate.cli.outcomes import ExitCode, json_option, print_result
from tidegate.cli.quotas import counter_of, quota_options
from tidegate.core.quota import format_duration, format_quota

__all__ = ["describe", "limit"]


POLICY: Final = re.compile(r";q=([0-9]+);w=([0-9]+)$")


def describe(allowed: bool, data: Mapping[str, Any], now_ms: int, rule: str | None = None) -> str:
    """One line about one decision. `rule`: the limit with its window, if that is known."""
    outcome = "allowed" if allowed else "denied"
    ends_in = format_duration(max(0, data["reset"] - now_ms))
    line = f"{outcome}: {data['remaining']} of {rule or data['limit']} left, window ends in {ends_in}"
    if not allowed and "retryAfter" in data:
        retry_after_s = data["retryAfter"]
        line += (
            ", never fits: the cost is above the limit"
            if retry_after_s is None
            else f", retry in {format_duration(retry_after_s * 1000)}"
        )
    return line + (f" (override {data['overrideId']})" if data.get("overrideId") else "")


def with_retry(data: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any]:
    """The answer with `retryAfter`: seconds until the same request would fit; 0 if allowed, None if it never will."""
    wait = headers.get("retry-after")
    return {**data, "retryAfter": 0 if data["success"] else None if wait is None else int(wait)}


def rule_of(headers: Mapping[str, str]) -> str | None:
    """The limit that was applied, an override's included: `100 per minute`. The answer itself has no window."""
    found = POLICY.search(headers.get("ratelimit-policy", ""))
    return None if found is None else format_quota(int(found[1]), int(found[2]) * 1000)


@click.command()
@click.argument("namespace")
@click.argument("identifier")
@quota_options
@click.option(
    "--cost", type=click.IntRange(0), default=1, show_default=True, help="How much to consume; 0 only reads."
)
@client_options
@json_option
def limit(
    client: Client,
    namespace: str,
    identifier: str,
    quota: str,
    duration_ms: int | None,
    cost: int,
    as_json: bool,
) -> ExitCode:
    """Ask a server to allow or deny IDENTIFIER one request.

    \b
    tidegate limit email.send user_123 100/minute
    tidegate limit email.send user_123 100 --duration 60s --cost 5

    Exits 0 if allowed, 1 if denied, 2 on an error. A denial says when to retry. With --json that is `retryAfter`, in
    seconds: 0 if allowed, null if the cost is above the limit and never fits.
    """
    body = counter_of(namespace, identifier, quota, duration_ms) | {"cost": cost}
    response = client.post("ratelimit.limit", body)
    data = with_retry(response.data, response.headers)
    text = describe(data["success"], data, clock.now_ms(), rule_of(response.headers))
    print_result(as_json, data, text)
    return ExitCode.OK if data["success"] else ExitCode.DENIED
