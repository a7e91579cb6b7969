"""`tidegate usage`: what counts against a limit on a running server, and where it was accepted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from tidegate.adapters import clock
from tidegate.cli.client import Client, client_options
from tidegate.cli.outcomes import ExitCode, json_option, print_result
from tidegate.cli.quotas import counter_of, quota_options
from tidegate.core.quota import format_duration, format_quota

__all__ = ["usage"]


def describe(data: Mapping[str, Any], now_ms: int) -> str:
    """The answer as text: one line for the total, and one for each part."""
    rule = format_quota(data["limit"], data["duration"])
    ends_in = format_duration(max(0, data["reset"] - now_ms))
    override = f" (override {data['overrideId']})" if data.get("overrideId") else ""
    others = data["regional"] - data["own"]
    lines = [
        f"{data['used']} of {rule} used, {data['remaining']} left, window ends in {ends_in}{override}",
        f"  this process       {data['own']}",
        f"  its region         {data['regional']}, {others} of it in other processes{_age(data, 'regionalAge')}",
        f"  other regions      {data['foreign']}{_age(data, 'globalAge')}",
    ]
    lines += [f"    {each['region']:<16} {each['count']}{_age(each, 'age')}" for each in data["regions"]]
    lines.append(f"  previous window    {data['carried']}")
    lines.append(f"  reserved           {data['reserved']}")
    return "\n".join(lines)


def _age(data: Mapping[str, Any], name: str) -> str:
    return f", {format_duration(data[name])} ago" if name in data else ""


@click.command()
@click.argument("namespace")
@click.argument("identifier")
@quota_options
@client_options
@json_option
def usage(
    client: Client, namespace: str, identifier: str, quota: str, duration_ms: int | None, as_json: bool
) -> ExitCode:
    """Show what counts against the limit of IDENTIFIER, and where it was accepted. Consumes nothing.

    \b
    tidegate usage email.send user_123 100/minute
    """
    data = client.post("ratelimit.usage", counter_of(namespace, identifier, quota, duration_ms)).data
    print_result(as_json, data, describe(data, clock.now_ms()))
    return ExitCode.OK
