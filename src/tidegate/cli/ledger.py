"""`tidegate ledger`: an overview of the shared database."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from tidegate.adapters import clock
from tidegate.cli.catalogs import Place, all_rows, opened_catalog
from tidegate.cli.databases import ledger_options, opened_ledger, run
from tidegate.cli.outcomes import json_option, print_result
from tidegate.cli.tables import table
from tidegate.core.generations import cell_of
from tidegate.core.model import LedgerRow
from tidegate.core.quota import format_duration
from tidegate.core.sharing import Lease
from tidegate.ports import LedgerOverview

__all__ = ["ledger"]


@click.command()
@click.option(
    "--hottest",
    "hottest_max",
    type=click.IntRange(0, 1000),
    default=10,
    show_default=True,
    help="How many of the highest counts to show.",
)
@click.option(
    "--origin",
    "origin_url",
    envvar="TIDEGATE_ORIGIN",
    help="The region's Redis: also show which node imports for the region, since when, and how far behind.",
)
@ledger_options
@json_option
def ledger(url: str, timeout_s: float, hottest_max: int, origin_url: str | None, as_json: bool) -> None:
    """Show the regions in the database, their last heartbeat, their rows, and the highest counts."""
    overview, names = run(_overview(url, timeout_s, hottest_max))
    document = describe(overview, names)
    if origin_url is not None:
        document["importer"] = describe_lease(run(_lease(origin_url, timeout_s), "waiting for Redis"))
    print_result(as_json, document, "\n".join(_lines(document)))


async def _overview(url: str, timeout_s: float, hottest_max: int) -> tuple[LedgerOverview, Mapping[str, str]]:
    """The overview, and the names of namespaces by id, because a server counts by id."""
    async with opened_ledger(url, timeout_s) as opened:
        now_ms = clock.now_ms()
        overview = await opened.overview(now_ms=now_ms, hottest_max=hottest_max, timeout_s=timeout_s)
    if not overview.hottest:
        return overview, {}
    place = Place("", url, timeout_s)
    async with opened_catalog(place) as catalog:
        rows = await all_rows(catalog, place)
    return overview, {row.id: row.name for row in rows.namespaces}


async def _lease(url: str, timeout_s: float) -> Lease:
    from tidegate.adapters.urls import open_origin

    origin = open_origin(url)
    try:
        # Without a node and a life: this only reads who holds the lease.
        return await origin.lease("", life_ms=0, timeout_s=timeout_s)
    finally:
        await origin.close()


def describe_lease(lease: Lease) -> dict[str, Any]:
    """Who imports for the region, as plain data."""
    is_held = lease.holder != "" and lease.time_ms < lease.until_ms
    imported_at_ms = lease.state.imported_at_ms
    return {
        "node": lease.holder if is_held else None,
        "for_ms": lease.time_ms - lease.since_ms if is_held else None,
        "behind_ms": None if imported_at_ms < 0 else max(0, lease.time_ms - imported_at_ms),
    }


def _importer_line(importer: Mapping[str, Any]) -> str:
    behind = "never" if importer["behind_ms"] is None else f"{format_duration(importer['behind_ms'])} ago"
    if importer["node"] is None:
        return f"no node imports for the region of this Redis; last import: {behind}"
    return f"{importer['node']} imports, for {format_duration(importer['for_ms'])}; last import: {behind}"


def describe(overview: LedgerOverview, names: Mapping[str, str]) -> dict[str, Any]:
    """The overview as plain data. A library that shares the database has no ids: its namespaces are names already."""
    beats = {beat.region: overview.clock_ms - beat.beat_at_ms for beat in overview.regions}
    # A region may have rows but no heartbeat (its nodes have stopped), or a heartbeat but no rows (nothing published).
    regions = [
        {"region": name, "rows": overview.rows.get(name, 0), "lag_ms": beats.get(name)}
        for name in sorted({*beats, *overview.rows})
    ]
    return {
        "clock_ms": overview.clock_ms,
        "regions": regions,
        "rows": sum(overview.rows.values()),
        "expired_rows": overview.expired_rows,
        "hottest": [_described(row, names) for row in overview.hottest],
    }


def _described(row: LedgerRow, names: Mapping[str, str]) -> dict[str, Any]:
    """A row with the sequence of its window. The stored one is negative when the counter was reset in that window."""
    sequence, generation = cell_of(row.sequence, row.duration_ms)
    return {
        **row._asdict(),
        "sequence": sequence,
        "reset_at_ms": generation or None,
        "namespace_name": names.get(row.namespace, row.namespace),
    }


def _window(row: Mapping[str, Any], now_ms: int) -> str:
    """`1 min, ends in 18 s, reset 5 s ago`."""
    ends_ms = (row["sequence"] + 1) * row["duration_ms"] - now_ms
    parts = [
        format_duration(row["duration_ms"]),
        f"ends in {format_duration(ends_ms)}" if ends_ms > 0 else f"ended {format_duration(-ends_ms)} ago",
    ]
    if row["reset_at_ms"] is not None:
        parts.append(f"reset {format_duration(max(0, now_ms - row['reset_at_ms']))} ago")
    return ", ".join(parts)


def _lines(document: dict[str, Any]) -> list[str]:
    regions = [
        [
            region["region"],
            str(region["rows"]),
            "never" if region["lag_ms"] is None else f"{format_duration(max(0, region['lag_ms']))} ago",
        ]
        for region in document["regions"]
    ]
    lines = [
        table(["REGION", "ROWS", "LAST HEARTBEAT"], regions, right=frozenset({1})),
        "",
        f"{document['rows']} live rows, {document['expired_rows']} expired (tidegate cleanup deletes them)",
    ]
    if "importer" in document:
        lines.append(_importer_line(document["importer"]))
    if document["hottest"]:
        headers = ["COUNT", "NAMESPACE", "IDENTIFIER", "WORKSPACE", "REGION", "WINDOW"]
        rows = [
            [
                str(row["regional"]),
                row["namespace_name"],
                row["identifier"],
                row["workspace"],
                row["region"],
                _window(row, document["clock_ms"]),
            ]
            for row in document["hottest"]
        ]
        lines += ["", table(headers, rows, right=frozenset({0}))]
    return lines
