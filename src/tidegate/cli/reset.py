"""`tidegate reset`: set the counter of an identifier back to zero, through a running server."""

from __future__ import annotations

import click

from tidegate.cli.client import Client, client_options
from tidegate.cli.outcomes import ExitCode, json_option, print_result
from tidegate.cli.quotas import counter_of, quota_options
from tidegate.core.quota import format_duration

__all__ = ["reset"]


@click.command()
@click.argument("namespace")
@click.argument("identifier")
@quota_options
@client_options
@json_option
def reset(
    client: Client, namespace: str, identifier: str, quota: str, duration_ms: int | None, as_json: bool
) -> ExitCode:
    """Forget what was counted for IDENTIFIER, on every node and in every region. Needs the permission `reset`.

    \b
    tidegate reset email.send user_123 100/minute
    """
    data = client.post("ratelimit.reset", counter_of(namespace, identifier, quota, duration_ms)).data
    window = format_duration(data["duration"])
    shown = f"{identifier} is at zero again in {namespace}, in windows of {window}"
    if not data["confirmed"]:
        shown += "; Redis or the database has not confirmed it yet, and the server repeats it until they do"
    print_result(as_json, data, shown)
    return ExitCode.OK
