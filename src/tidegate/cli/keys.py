"""`tidegate keys`: the keys that may call the API. A key is shown once, when created; only its digest is stored."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import click

from tidegate.adapters.clock import now_ms
from tidegate.cli.catalogs import Place, all_rows, catalog_options, find_workspace, opened_catalog
from tidegate.cli.databases import run
from tidegate.cli.durations import DURATION
from tidegate.cli.outcomes import json_option, print_result, warn
from tidegate.cli.tables import table
from tidegate.core.model import TIME_MS_MAX
from tidegate.errors import InvalidInput
from tidegate.server.catalog.keys import checked_permissions, why_without_effect

if TYPE_CHECKING:
    from tidegate.ports import CatalogChanges, KeyRow

__all__ = ["keys"]

# The permissions that the rate limit SDKs need.
DEFAULT: Final = ("ratelimit.*.limit", "ratelimit.*.create_namespace")

NO_KEY: Final = "no key has this id; `tidegate keys list --all` lists all keys"


class Permissions(click.ParamType[tuple[str, ...]]):
    """`A,B`: permissions separated by commas; `all` for all, an empty text for none."""

    name = "permissions"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return checked_permissions(str(value))
        except InvalidInput as error:
            self.fail(str(error), param, ctx)


class Moment(click.ParamType[int]):
    """`30d` from now, or a date: `2027-01-01`, `2027-01-01T12:00:00+01:00` (UTC without an offset)."""

    name = "moment"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value).strip()
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            moment_ms = now_ms() + DURATION.convert(text, param, ctx)
        else:
            if moment.tzinfo is None:
                moment = moment.replace(tzinfo=UTC)
            moment_ms = round(moment.timestamp() * 1000)
        if moment_ms > TIME_MS_MAX:
            self.fail(f"{text!r} is after the year 9999: give an earlier time, e.g. 30d", param, ctx)
        return moment_ms


PERMISSIONS: Final = Permissions()
MOMENT: Final = Moment()


def _iso(moment_ms: int | None) -> str | None:
    if moment_ms is None:
        return None
    # A row from another program may hold any number. It must not keep the others from being listed.
    shown_ms = min(max(moment_ms, 0), TIME_MS_MAX)
    return datetime.fromtimestamp(shown_ms / 1000, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _state(row: KeyRow, at_ms: int) -> str:
    if row.revoked_at_ms is not None:
        return "revoked"
    if not row.enabled:
        return "disabled"
    return "expired" if row.expires_at_ms is not None and row.expires_at_ms <= at_ms else "active"


def _document(row: KeyRow, at_ms: int) -> dict[str, Any]:
    return {
        "id": row.id,
        "workspace": row.workspace_id,
        "name": row.name,
        "hint": row.hint,
        "permissions": list(row.permissions),
        "state": _state(row, at_ms),
        "created": _iso(row.created_at_ms),
        "expires": _iso(row.expires_at_ms),
        "revoked": _iso(row.revoked_at_ms),
    }


@click.group()
def keys() -> None:
    """Create, list, expire and revoke root keys, in --data-dir (embedded server) or in --ledger.

    Works before and while servers run; running servers apply a change within seconds.
    """


@keys.command()
@click.option(
    "--workspace", default="default", show_default=True, help="Id or name; created if it does not exist."
)
@click.option(
    "--permissions",
    type=PERMISSIONS,
    default=",".join(DEFAULT),
    show_default=True,
    metavar="A,B",
    help="ratelimit.SCOPE.ACTION, or the URN of an override, separated by commas; `all` for all, "
    "'' for none. Unknown permissions are stored with a warning; they grant nothing.",
)
@click.option("--name", default="", help="A description of who or what uses the key.")
@click.option("--expires", "expires_at_ms", type=MOMENT, help="30d, or a date such as 2027-01-01.")
@catalog_options
@json_option
def create(
    place: Place,
    workspace: str,
    permissions: tuple[str, ...],
    name: str,
    expires_at_ms: int | None,
    as_json: bool,
) -> None:
    """Create a root key and print it. It cannot be shown again.

    \b
    tidegate keys create --data-dir ./tidegate-data --workspace acme --permissions ratelimit.*.limit --json
    """
    key, row = run(_create(place, workspace, permissions, name, expires_at_ms))
    print_result(as_json, {"key": key, **_document(row, now_ms())}, key)
    if not as_json:
        granted = ", ".join(row.permissions) or "no permissions"
        click.echo(f"{row.id} of workspace {row.workspace_id}: {granted}", err=True)
    warn(as_json, _without_effect(row.permissions))


def _without_effect(permissions: tuple[str, ...]) -> list[str]:
    """Warnings about permissions that grant nothing."""
    if not permissions:
        return ["the key has no permissions: the API will reject all its requests"]
    return [
        f"{permission!r} grants nothing: {why}"
        for permission in permissions
        if (why := why_without_effect(permission)) is not None
    ]


async def _create(
    place: Place, workspace: str, permissions: tuple[str, ...], name: str, expires_at_ms: int | None
) -> tuple[str, KeyRow]:
    from tidegate.core.model import checked_name
    from tidegate.ports import KeyRow, WorkspaceRow
    from tidegate.server.catalog.keys import IdSource, digest_of, hint_of, new_key

    checked_name("workspace", workspace)
    if expires_at_ms is not None and expires_at_ms <= now_ms():
        raise click.BadParameter(
            "this time is in the past: give a later one, e.g. 30d", param_hint="--expires"
        )
    async with opened_catalog(place, create=True) as catalog:
        owner = find_workspace(await all_rows(catalog, place), workspace)
        if owner is None:
            fresh = WorkspaceRow(workspace, workspace, enabled=True, quota=None, quota_duration_ms=None)
            owner = await catalog.put_workspace(fresh, timeout_s=place.timeout_s)
        key = new_key()
        row = KeyRow(
            id=f"key_{IdSource().take()}",
            workspace_id=owner.id,
            digest=digest_of(key),
            name=name,
            hint=hint_of(key),
            permissions=permissions,
            created_at_ms=now_ms(),
            expires_at_ms=expires_at_ms,
            enabled=True,
            revoked_at_ms=None,
        )
        return key, await catalog.put_key(row, timeout_s=place.timeout_s)


@keys.command("list")
@click.option("--workspace", help="Only keys of this workspace, by id or name.")
@click.option("--all", "everything", is_flag=True, help="Include revoked and expired keys.")
@catalog_options
@json_option
def list_keys(place: Place, workspace: str | None, everything: bool, as_json: bool) -> None:
    """List keys, with their first characters only."""
    at_ms = now_ms()
    found = [
        _document(row, at_ms)
        for row in sorted(run(_list(place, workspace)), key=lambda row: (row.created_at_ms, row.id))
        if everything or _state(row, at_ms) in {"active", "disabled"}
    ]
    lines = [
        [
            key["id"],
            key["hint"] + "…",
            key["state"],
            key["workspace"],
            key["name"] or "-",
            key["expires"] or "never",
            ",".join(key["permissions"]) or "-",
        ]
        for key in found
    ]
    headers = ["ID", "KEY", "STATE", "WORKSPACE", "NAME", "EXPIRES", "PERMISSIONS"]
    print_result(as_json, {"keys": found}, table(headers, lines) if lines else "no keys")


async def _list(place: Place, workspace: str | None) -> list[KeyRow]:
    async with opened_catalog(place) as catalog:
        rows = await all_rows(catalog, place)
    if workspace is None:
        return rows.keys
    owner = find_workspace(rows, workspace)
    if owner is None:
        raise click.ClickException(f"no workspace has the id or name {workspace!r}")
    return [row for row in rows.keys if row.workspace_id == owner.id]


@keys.command()
@click.argument("key_id")
@click.option("--at", "expires_at_ms", type=MOMENT, help="30d from now, or a date; now by default.")
@catalog_options
@json_option
def expire(place: Place, key_id: str, expires_at_ms: int | None, as_json: bool) -> None:
    """Let a key expire now, or --at a time. KEY_ID is its id, or the key itself."""
    moment_ms = now_ms() if expires_at_ms is None else expires_at_ms
    row = run(_expire(place, key_id, moment_ms))
    print_result(as_json, _document(row, now_ms()), f"{row.id} expires {_iso(row.expires_at_ms)}")


@keys.command()
@click.argument("key_id")
@catalog_options
@json_option
def revoke(place: Place, key_id: str, as_json: bool) -> None:
    """Revoke a key permanently; all servers reject it within seconds. KEY_ID is its id, or the key itself."""
    row = run(_revoke(place, key_id))
    print_result(as_json, _document(row, now_ms()), f"{row.id} revoked")


async def _expire(place: Place, key_id: str, moment_ms: int) -> KeyRow:
    async with opened_catalog(place) as catalog:
        known = _find_key(await all_rows(catalog, place), key_id)
        row = await catalog.expire_key(known.id, expires_at_ms=moment_ms, timeout_s=place.timeout_s)
    if row is None:
        raise click.ClickException(NO_KEY)
    if row.revoked_at_ms is not None:
        raise click.ClickException(f"{row.id} was revoked {_iso(row.revoked_at_ms)}; create a new key")
    return row


async def _revoke(place: Place, key_id: str) -> KeyRow:
    async with opened_catalog(place) as catalog:
        known = _find_key(await all_rows(catalog, place), key_id)
        row = await catalog.revoke_key(known.id, revoked_at_ms=now_ms(), timeout_s=place.timeout_s)
    if row is None:
        raise click.ClickException(NO_KEY)
    return row


def _find_key(rows: CatalogChanges, wanted: str) -> KeyRow:
    from tidegate.server.catalog.keys import digest_of

    digest = digest_of(wanted)
    for row in rows.keys:
        if wanted == row.id or row.digest == digest:
            return row
    raise click.ClickException(NO_KEY)
