"""`tidegate workspaces`: list and change workspaces (tenants), and the quota of their API calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tidegate.cli.catalogs import Place, all_rows, catalog_options, find_workspace, opened_catalog
from tidegate.cli.databases import run
from tidegate.cli.outcomes import json_option, print_result
from tidegate.cli.tables import table
from tidegate.core.quota import format_quota, parse_quota
from tidegate.errors import InvalidInput

if TYPE_CHECKING:
    from tidegate.ports import CatalogChanges, WorkspaceRow

__all__ = ["workspaces"]


def _document(row: WorkspaceRow) -> dict[str, Any]:
    quota = None if row.quota is None else {"limit": row.quota, "duration": row.quota_duration_ms}
    return {"id": row.id, "name": row.name, "enabled": row.enabled, "quota": quota}


def _calls(item: dict[str, Any]) -> str:
    quota = item["quota"]
    return "none" if quota is None else format_quota(quota["limit"], quota["duration"])


def _describe(item: dict[str, Any]) -> str:
    calls = "no API quota" if item["quota"] is None else f"{_calls(item)} API calls"
    return f"{item['id']}  {item['name']!r}  {'enabled' if item['enabled'] else 'disabled'}  {calls}"


@click.group()
def workspaces() -> None:
    """List and change workspaces, in --data-dir (embedded server) or in --ledger."""


@workspaces.command("list")
@catalog_options
@json_option
def list_workspaces(place: Place, as_json: bool) -> None:
    """List workspaces."""
    rows = run(_rows(place))
    found = [_document(row) for row in sorted(rows.workspaces)]
    lines = [
        [item["id"], item["name"], "enabled" if item["enabled"] else "disabled", _calls(item)]
        for item in found
    ]
    text = table(["ID", "NAME", "STATE", "API QUOTA"], lines) if lines else "no workspaces"
    print_result(as_json, {"workspaces": found}, text)


@workspaces.command("set")
@click.argument("workspace")
@click.option(
    "--quota",
    help='API calls allowed for all its keys together, e.g. "1000/minute"; "none" removes the quota.',
)
@click.option("--enabled/--disabled", default=None, help="All keys of a disabled workspace are rejected.")
@catalog_options
@json_option
def set_workspace(
    place: Place, workspace: str, quota: str | None, enabled: bool | None, as_json: bool
) -> None:
    """Change WORKSPACE (id or name), or create it."""
    changes: dict[str, Any] = {}
    if quota is not None:
        limit, duration_ms = (None, None) if quota == "none" else _checked_quota(quota)
        changes |= {"quota": limit, "quota_duration_ms": duration_ms}
    if enabled is not None:
        changes["enabled"] = enabled
    document = _document(run(_set(place, workspace, changes)))
    print_result(as_json, document, _describe(document))


def _checked_quota(quota: str) -> tuple[int, int]:
    from tidegate.core.model import DURATION_MS_MAX
    from tidegate.server.api.schema import INT64_MAX

    limit, duration_ms = parse_quota(quota)
    if duration_ms > DURATION_MS_MAX:
        raise InvalidInput("quota", quota, f"at most {DURATION_MS_MAX // 86_400_000} days, e.g. 1000/minute")
    if limit > INT64_MAX:
        raise InvalidInput("quota", quota, f"at most {INT64_MAX} calls, e.g. 1000/minute")
    return limit, duration_ms


async def _rows(place: Place) -> CatalogChanges:
    async with opened_catalog(place) as catalog:
        return await all_rows(catalog, place)


async def _set(place: Place, workspace: str, changes: dict[str, Any]) -> WorkspaceRow:
    from tidegate.core.model import checked_name
    from tidegate.ports import WorkspaceRow

    checked_name("workspace", workspace)
    async with opened_catalog(place, create=True) as catalog:
        row = find_workspace(await all_rows(catalog, place), workspace)
        if row is None:
            row = WorkspaceRow(workspace, workspace, enabled=True, quota=None, quota_duration_ms=None)
        return await catalog.put_workspace(row._replace(**changes), timeout_s=place.timeout_s)
