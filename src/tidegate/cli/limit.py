"""`tidegate limit`: one decision from a running server. Exits 0 when allowed, 1 when denied, 2 on an error."""

from __future__ import annotations

from typing import Any

import click

from tidegate.adapters import clock
from tidegate.cli.client import Client, client_options
from tidegate.cli.outcomes import ExitCode, answer, json_option
from tidegate.cli.quotas import quota_from, quota_options

__all__ = ["describe", "limit"]


def describe(passed: bool, data: dict[str, Any], now_ms: int) -> str:
    """One line about one decision."""
    reset_s = max(0, data["reset"] - now_ms) / 1000
    override = f" (override {data['overrideId']})" if data.get("overrideId") else ""
    verdict = "allowed" if passed else "denied"
    return f"{verdict}: {data['remaining']} of {data['limit']} left, window ends in {reset_s:.1f} s{override}"


@click.command()
@click.argument("namespace")
@click.argument("identifier")
@quota_options(limit_min=1)
@click.option(
    "--cost", type=click.IntRange(0), default=1, show_default=True, help="0 looks without consuming."
)
@client_options
@json_option
def limit(
    client: Client,
    namespace: str,
    identifier: str,
    quota: str | None,
    limit_units: int | None,
    duration_ms: int | None,
    cost: int,
    as_json: bool,
) -> ExitCode:
    """Ask a server whether IDENTIFIER may go on.

    \b
    tidegate limit email.send user_123 100/minute
    tidegate limit email.send user_123 --limit 100 --duration 60s --cost 5

    Exits 0 when allowed, 1 when denied, 2 on an error.
    """
    units, length_ms = quota_from(quota, limit_units, duration_ms)
    body = {
        "namespace": namespace,
        "identifier": identifier,
        "limit": units,
        "duration": length_ms,
        "cost": cost,
    }
    data = client.post("ratelimit.limit", body).data
    answer(as_json, data, describe(data["success"], data, clock.now_ms()))
    return ExitCode.OK if data["success"] else ExitCode.DENIED
