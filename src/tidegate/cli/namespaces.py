"""`tidegate namespaces`: list, delete and restore namespaces. The first request in a namespace creates it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from tidegate.adapters.clock import now_ms
from tidegate.cli.catalogs import Place, all_rows, catalog_options, find_workspace, opened_catalog
from tidegate.cli.databases import run
from tidegate.cli.outcomes import json_option, print_result
from tidegate.cli.tables import table

if TYPE_CHECKING:
    from tidegate.ports import CatalogChanges, NamespaceRow

__all__ = ["namespaces"]


def _document(row: NamespaceRow, rows: CatalogChanges) -> dict[str, Any]:
    overrides = sum(
        1 for item in rows.overrides if item.namespace_id == row.id and item.deleted_at_ms is None
    )
    return {
        "id": row.id,
        "name": row.name,
        "workspace": row.workspace_id,
        "overrides": overrides,
        "deleted": row.deleted_at_ms is not None,
    }


@click.group()
def namespaces() -> None:
    """List, delete and restore namespaces, in --data-dir (embedded server) or in --ledger."""


@namespaces.command("list")
@click.option("--workspace", help="Only namespaces of this workspace, by id or name.")
@click.option("--all", "everything", is_flag=True, help="Include deleted namespaces.")
@catalog_options
@json_option
def list_namespaces(place: Place, workspace: str | None, everything: bool, as_json: bool) -> None:
    """List namespaces with the number of their overrides."""
    rows = run(_rows(place))
    owner = _owner(rows, workspace)
    found = [
        _document(row, rows)
        for row in sorted(rows.namespaces, key=lambda row: (row.workspace_id, row.name))
        if (owner is None or row.workspace_id == owner) and (everything or row.deleted_at_ms is None)
    ]
    lines = [
        [
            item["name"],
            item["id"],
            item["workspace"],
            str(item["overrides"]),
            "deleted" if item["deleted"] else "live",
        ]
        for item in found
    ]
    text = table(["NAME", "ID", "WORKSPACE", "OVERRIDES", "STATE"], lines, right=frozenset({3}))
    print_result(as_json, {"namespaces": found}, text if lines else "no namespaces")


@namespaces.command()
@click.argument("namespace")
@click.option("--workspace", help="Its workspace, by id or name.")
@catalog_options
@json_option
def delete(place: Place, namespace: str, workspace: str | None, as_json: bool) -> None:
    """Delete NAMESPACE, by id or name: `limit` then returns 410 for it. `restore` undoes this."""
    document = run(_mark(place, namespace, workspace, now_ms()))
    print_result(as_json, document, f"{document['id']} deleted")


@namespaces.command()
@click.argument("namespace")
@click.option("--workspace", help="Its workspace, by id or name.")
@catalog_options
@json_option
def restore(place: Place, namespace: str, workspace: str | None, as_json: bool) -> None:
    """Restore a deleted NAMESPACE, with its overrides."""
    document = run(_mark(place, namespace, workspace, None))
    print_result(as_json, document, f"{document['id']} restored")


def _owner(rows: CatalogChanges, workspace: str | None) -> str | None:
    if workspace is None:
        return None
    owner = find_workspace(rows, workspace)
    if owner is None:
        raise click.ClickException(f"no workspace has the id or name {workspace!r}")
    return owner.id


async def _rows(place: Place) -> CatalogChanges:
    async with opened_catalog(place) as catalog:
        return await all_rows(catalog, place)


async def _mark(
    place: Place, wanted: str, workspace: str | None, deleted_at_ms: int | None
) -> dict[str, Any]:
    async with opened_catalog(place) as catalog:
        rows = await all_rows(catalog, place)
        owner = _owner(rows, workspace)
        ours = [row for row in rows.namespaces if owner is None or row.workspace_id == owner]
        found = [row for row in ours if row.id == wanted] or [row for row in ours if row.name == wanted]
        if not found:
            raise click.ClickException(f"no namespace has the id or name {wanted!r}")
        if len(found) > 1:
            raise click.ClickException(
                f"several workspaces have a namespace {wanted!r}: use --workspace or an id"
            )
        await catalog.delete_namespace(found[0].id, deleted_at_ms=deleted_at_ms, timeout_s=place.timeout_s)
        return _document(found[0]._replace(deleted_at_ms=deleted_at_ms), rows)
