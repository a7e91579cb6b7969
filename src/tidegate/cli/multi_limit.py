"""`tidegate multi-limit`: several decisions at once, all or nothing."""

from __future__ import annotations

import json
from typing import IO, Any

import click

from tidegate.adapters import clock
from tidegate.cli.client import Client, client_options
from tidegate.cli.limit import describe
from tidegate.cli.outcomes import ExitCode, json_option, print_result
from tidegate.core.quota import parse_quota

__all__ = ["multi_limit"]


@click.command("multi-limit")
@click.option(
    "--item",
    "items",
    nargs=3,
    multiple=True,
    metavar="NAMESPACE IDENTIFIER QUOTA",
    help="One request of cost 1; repeat the option for more.",
)
@click.option(
    "--file",
    "file",
    type=click.File("r", encoding="utf-8"),
    help="A JSON array of {namespace, identifier, limit, duration, cost?}; - reads stdin.",
)
@client_options
@json_option
def multi_limit(
    client: Client, items: tuple[tuple[str, str, str], ...], file: IO[str] | None, as_json: bool
) -> ExitCode:
    """Get several decisions from a server: if one is denied, nothing is counted.

    \b
    tidegate multi-limit --item email.send user_1 100/minute --item email.send org_9 5000/hour

    Exits 0 if all are allowed, 1 if one is denied, 2 on an error.
    """
    body = _from_file(file) if file is not None else []
    for namespace, identifier, quota in items:
        number, duration_ms = parse_quota(quota)
        body.append(
            {"namespace": namespace, "identifier": identifier, "limit": number, "duration": duration_ms}
        )
    if not body:
        raise click.UsageError("no requests: give --item or --file")
    data = client.post("ratelimit.multiLimit", body).data
    now_ms = clock.now_ms()
    lines = [
        "allowed" if data["passed"] else "denied: nothing was counted",
        *(
            f"  {item['namespace']} {item['identifier']}: {describe(item['passed'], item, now_ms)}"
            for item in data["limits"]
        ),
    ]
    print_result(as_json, data, "\n".join(lines))
    return ExitCode.OK if data["passed"] else ExitCode.DENIED


def _from_file(file: IO[str]) -> list[Any]:
    try:
        document = json.load(file)
    except (ValueError, RecursionError) as error:
        raise click.BadParameter(f"the file is not JSON: {error}", param_hint="--file") from error
    if not isinstance(document, list):
        raise click.BadParameter("expected a JSON array", param_hint="--file")
    return document
