"""`tidegate overrides`: different limits for some identifiers, on a running server."""

from __future__ import annotations

from typing import Any

import click

from tidegate.cli.client import Client, client_options
from tidegate.cli.outcomes import json_option, print_result
from tidegate.cli.quotas import quota_from, quota_options
from tidegate.cli.tables import table, visible
from tidegate.core.quota import format_quota

__all__ = ["overrides"]


def _effect(override: dict[str, Any]) -> str:
    effect = "blocked" if override["limit"] == 0 else format_quota(override["limit"], override["duration"])
    return f"{effect}, shadow" if override.get("shadow") else effect


def _describe(override: dict[str, Any]) -> str:
    return f"{override['overrideId']}  {visible(override['identifier'])}  {_effect(override)}"


@click.group()
def overrides() -> None:
    """Set, get, list and delete overrides: different limits for an identifier, or for a pattern with `*`."""


@overrides.command("set")
@click.argument("namespace")
@click.argument("identifier")
@quota_options
@click.option("--shadow", is_flag=True, help="Count and report, deny nothing.")
@client_options
@json_option
def set_override(
    client: Client,
    namespace: str,
    identifier: str,
    quota: str,
    duration_ms: int | None,
    shadow: bool,
    as_json: bool,
) -> None:
    """Set another limit for IDENTIFIER, or for all identifiers that match a pattern (`premium_*`).

    \b
    tidegate overrides set email.send 'premium_*' 1000/minute
    tidegate overrides set email.send spammer 0 --duration 1m      # blocks
    tidegate overrides set email.send '*' 50/minute --shadow       # tries a limit out
    """
    number, window_ms = quota_from(quota, duration_ms, quota_min=0)
    body = {"namespace": namespace, "identifier": identifier, "limit": number, "duration": window_ms}
    if shadow:
        body["shadow"] = True
    data = client.post("ratelimit.setOverride", body).data
    print_result(as_json, data, data["overrideId"])


@overrides.command("get")
@click.argument("namespace")
@click.argument("identifier")
@client_options
@json_option
def get_override(client: Client, namespace: str, identifier: str, as_json: bool) -> None:
    """Show the override that applies to IDENTIFIER."""
    data = client.post("ratelimit.getOverride", {"namespace": namespace, "identifier": identifier}).data
    print_result(as_json, data, _describe(data))


@overrides.command("list")
@click.argument("namespace")
@click.option(
    "--page-size", type=click.IntRange(1, 100), default=100, show_default=True, help="Overrides per request."
)
@click.option("--cursor", help="Print one page, from this cursor; without it, all pages.")
@client_options
@json_option
def list_overrides(client: Client, namespace: str, page_size: int, cursor: str | None, as_json: bool) -> None:
    """List the overrides of NAMESPACE: all, or one page with --cursor.

    With --json: {"overrides": […], "cursor": …}; cursor is null on the last page.
    """
    found: list[dict[str, Any]] = []
    following = cursor
    while True:
        body: dict[str, Any] = {"namespace": namespace, "limit": page_size}
        if following is not None:
            body["cursor"] = following
        document = client.post("ratelimit.listOverrides", body).document
        found += document["data"]
        following = document["pagination"].get("cursor")
        if following is None or cursor is not None:
            break
    rows = [[each["identifier"], _effect(each), each["overrideId"]] for each in found]
    text = table(["IDENTIFIER", "LIMIT", "ID"], rows) if rows else "no overrides"
    more = f"\nnext page: --cursor {following}" if following is not None else ""
    print_result(as_json, {"overrides": found, "cursor": following}, text + more)


@overrides.command("delete")
@click.argument("namespace")
@click.argument("identifier")
@client_options
@json_option
def delete_override(client: Client, namespace: str, identifier: str, as_json: bool) -> None:
    """Delete the override of exactly this IDENTIFIER or pattern."""
    data = client.post("ratelimit.deleteOverride", {"namespace": namespace, "identifier": identifier}).data
    print_result(as_json, data, "deleted")
