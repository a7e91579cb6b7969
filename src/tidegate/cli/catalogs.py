"""Access of commands to the catalog of a server: keys, namespaces and workspaces.

The database is that of `--ledger`, or the file of an embedded server in `--data-dir`, created if necessary. Commands
work before and while servers run; running servers pick up changes by themselves.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tidegate.cli.outcomes import JSON_KEY, warn
from tidegate.cli.settings import value_options
from tidegate.server.process.config import CATALOG_FILE, catalog_url

if TYPE_CHECKING:
    from tidegate.ports import Catalog, CatalogChanges, WorkspaceRow

__all__ = ["Place", "all_rows", "catalog_options", "find_workspace", "opened_catalog"]

F = TypeVar("F", bound=Callable[..., Any])


class Place:
    """The address of the catalog, and the timeout of its calls."""

    def __init__(self, data_dir: str, ledger: str | None, timeout_s: float) -> None:
        self.data_dir = Path(data_dir)
        self.url = catalog_url(data_dir, ledger)
        self.is_embedded = ledger is None
        self.timeout_s = timeout_s


def catalog_options(command: F) -> F:
    """`--data-dir`, `--ledger`, `--config` and `--timeout`; the command gets a `place`."""

    @click.option(
        "--timeout",
        "timeout_s",
        type=click.FloatRange(0.01, 3600),
        default=10.0,
        show_default=True,
        help="Seconds to wait for the database.",
    )
    @value_options("data_dir", "ledger")
    @wraps(command)
    def wrapped(values: dict[str, Any], timeout_s: float, **rest: Any) -> Any:
        return command(place=Place(values["data_dir"], values["ledger"], timeout_s), **rest)

    return wrapped  # type: ignore[return-value] # the command's signature, with the options in place of `place`


@asynccontextmanager
async def opened_catalog(place: Place, *, create: bool = False) -> AsyncIterator[Catalog]:
    """The catalog, connected. `create` creates an embedded catalog first, never a shared one."""
    from tidegate.adapters.catalogs import open_catalog
    from tidegate.adapters.migrations import migrate
    from tidegate.server.process.first_start import make_private_directory

    if place.is_embedded and not create and not (place.data_dir / CATALOG_FILE).exists():
        raise click.ClickException(
            f"{place.data_dir} has no catalog: pass the --data-dir or --ledger of your server"
        )
    if place.is_embedded and create:
        # It holds digests of keys and counts of identifiers: no other user may read it.
        before = os.umask(0o077)  # as a server does
        try:
            make_private_directory(place.data_dir)
            await migrate(place.url, timeout_s=place.timeout_s)
        finally:
            os.umask(before)
    catalog = open_catalog(place.url)
    try:
        await catalog.open(timeout_s=place.timeout_s)
        yield catalog
    finally:
        await catalog.close()


async def all_rows(catalog: Catalog, place: Place) -> CatalogChanges:
    """All rows of the catalog."""
    whole = await catalog.changes(0, timeout_s=place.timeout_s)
    while not whole.is_complete:
        more = await catalog.changes(whole.version, timeout_s=place.timeout_s)
        whole = more._replace(
            workspaces=whole.workspaces + more.workspaces,
            keys=whole.keys + more.keys,
            namespaces=whole.namespaces + more.namespaces,
            overrides=whole.overrides + more.overrides,
            unreadable=whole.unreadable + more.unreadable,
        )
    if whole.unreadable:
        from tidegate.server.catalog.sync import describe_unreadable

        context = click.get_current_context(silent=True)
        as_json = context is not None and bool(context.meta.get(JSON_KEY))
        warn(as_json, [describe_unreadable(whole.unreadable)])
    return whole


def find_workspace(rows: CatalogChanges, wanted: str) -> WorkspaceRow | None:
    """The workspace with that id, or else with that name. Raises if several have the name, or if a row that cannot
    be read may be that workspace."""
    by_id = [row for row in rows.workspaces if row.id == wanted]
    found = by_id or [row for row in rows.workspaces if row.name == wanted]
    if len(found) > 1:
        ids = ", ".join(row.id for row in found)
        raise click.ClickException(f"several workspaces have the name {wanted!r}: use an id ({ids})")
    if not found and any(table == "ratelimit_workspaces" for table, _ in rows.unreadable):
        # It may be one of these: created anew it would lose its quota, and be enabled.
        raise click.ClickException(
            f"no workspace that can be read has the id or name {wanted!r}: repair or delete the rows of "
            "ratelimit_workspaces that cannot be read, in the database"
        )
    return found[0] if found else None
