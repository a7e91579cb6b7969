"""`tidegate limit`: one decision from a running server. Exits 0 if allowed, 1 if denied, 2 on an error."""

from __future__ import annotations

from typing import Any

import click

from tidegate.adapters import clock
from tidegate.cli.client import Client, client_options
from tidegate.cli.outcomes import ExitCode, json_option, print_result
from tidegate.cli.quotas import quota_from, quota_options
from tidegate.core.quota import format_duration

__all__ = ["describe", "limit"]


def describe(allowed: bool, data: dict[str, Any], now_ms: int, retry_after_s: str | None = None) -> str:
    """One line about one decision."""
    outcome = "allowed" if allowed else "denied"
    ends_in = format_duration(max(0, data["reset"] - now_ms))
    line = f"{outcome}: {data['remaining']} of {data['limit']} left, window ends in {ends_in}"
    if retry_after_s is not None and not allowed:
        line += f", retry in {format_duration(int(retry_after_s) * 1000)}"
    return line + (f" (override {data['overrideId']})" if data.get("overrideId") else "")


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

    Exits 0 if allowed, 1 if denied, 2 on an error.
    """
    number, window_ms = quota_from(quota, duration_ms)
    body = {
        "namespace": namespace,
        "identifier": identifier,
        "limit": number,
        "duration": window_ms,
        "cost": cost,
    }
    response = client.post("ratelimit.limit", body)
    data = response.data
    retry_after_s = response.headers.get("retry-after")
    print_result(as_json, data, describe(data["success"], data, clock.now_ms(), retry_after_s))
    return ExitCode.OK if data["success"] else ExitCode.DENIED
