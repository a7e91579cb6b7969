"""`tidegate overrides`: other limits for some identifiers, on a running server."""

from __future__ import annotations

from typing import Any

import click

from tidegate.cli.client import Client, client_options
from tidegate.cli.outcomes import answer, json_option
from tidegate.cli.quotas import quota_from, quota_options

__all__ = ["overrides"]


def _describe(override: dict[str, Any]) -> str:
    effect = "blocked" if override["limit"] == 0 else f"{override['limit']} per {override['duration']} ms"
    return f"{override['overrideId']}  {override['identifier']}  {effect}"


@click.group()
def overrides() -> None:
    """Set, get, list and delete overrides: other limits for single identifiers or for patterns with `*`."""


@overrides.command("set")
@click.argument("namespace")
@click.argument("identifier")
@quota_options(limit_min=0)
@client_options
@json_option
def set_override(
    client: Client,
    namespace: str,
    identifier: str,
    quota: str | None,
    limit_units: int | None,
    duration_ms: int | None,
    as_json: bool,
) -> None:
    """Give IDENTIFIER, or all that match it (`premium_*`), another limit.

    \b
    tidegate overrides set email.send 'premium_*' 1000/minute
    tidegate overrides set email.send spammer --limit 0 --duration 1m      # blocks
    """
    units, length_ms = quota_from(quota, limit_units, duration_ms)
    body = {"namespace": namespace, "identifier": identifier, "limit": units, "duration": length_ms}
    data = client.post("ratelimit.setOverride", body).data
    answer(as_json, data, data["overrideId"])


@overrides.command("get")
@click.argument("namespace")
@click.argument("identifier")
@client_options
@json_option
def get_override(client: Client, namespace: str, identifier: str, as_json: bool) -> None:
    """Show the override that applies to IDENTIFIER."""
    data = client.post("ratelimit.getOverride", {"namespace": namespace, "identifier": identifier}).data
    answer(as_json, data, _describe(data))


@overrides.command("list")
@click.argument("namespace")
@click.option(
    "--limit", "page_size", type=click.IntRange(1, 100), default=100, show_default=True, help="Page size."
)
@click.option("--cursor", help="Go on from here; without it: all pages from the start.")
@client_options
@json_option
def list_overrides(client: Client, namespace: str, page_size: int, cursor: str | None, as_json: bool) -> None:
    """List the overrides of NAMESPACE: all of them, or with --cursor one page.

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
    text = "\n".join(map(_describe, found)) or "no overrides"
    more = f"\nmore: --cursor {following}" if following is not None else ""
    answer(as_json, {"overrides": found, "cursor": following}, text + more)


@overrides.command("delete")
@click.argument("namespace")
@click.argument("identifier")
@client_options
@json_option
def delete_override(client: Client, namespace: str, identifier: str, as_json: bool) -> None:
    """Delete the override that was set with exactly IDENTIFIER, `*` included."""
    data = client.post("ratelimit.deleteOverride", {"namespace": namespace, "identifier": identifier}).data
    answer(as_json, data, "deleted")
