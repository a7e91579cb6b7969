"""`tidegate ledger`: an overview of the shared database."""

from __future__ import annotations

from typing import Any

import click

from tidegate.adapters import clock
from tidegate.cli.databases import ledger_options, opened_ledger, run
from tidegate.cli.outcomes import json_option, print_result
from tidegate.core.quota import format_duration
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
@ledger_options
@json_option
def ledger(url: str, timeout_s: float, hottest_max: int, as_json: bool) -> None:
    """Show the regions in the database, their last heartbeat, their rows, and the highest counts."""
    overview = run(_overview(url, timeout_s, hottest_max))
    document = describe(overview)
    print_result(as_json, document, "\n".join(_lines(document)))


async def _overview(url: str, timeout_s: float, hottest_max: int) -> LedgerOverview:
    async with opened_ledger(url, timeout_s) as opened:
        now_ms = clock.now_ms()
        return await opened.overview(now_ms=now_ms, hottest_max=hottest_max, timeout_s=timeout_s)


def describe(overview: LedgerOverview) -> dict[str, Any]:
    """The overview as plain data."""
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
        "hottest": [row._asdict() for row in overview.hottest],
    }


def _lines(document: dict[str, Any]) -> list[str]:
    lines = [f"{'region':<24} {'rows':>10}  last heartbeat"]
    for region in document["regions"]:
        beat = "never" if region["lag_ms"] is None else f"{region['lag_ms'] / 1000:.1f} s ago"
        lines.append(f"{region['region']:<24} {region['rows']:>10}  {beat}")
    lines += [
        "",
        f"{document['rows']} live rows, {document['expired_rows']} expired (tidegate cleanup deletes them)",
    ]
    if document["hottest"]:
        lines += ["", f"{'count':>12}  highest counts"]
        for row in document["hottest"]:
            window = f"window {row['sequence']} of {format_duration(row['duration_ms'])}"
            place = f"{row['workspace']} / {row['namespace']} / {row['identifier']!r}"
            lines.append(f"{row['regional']:>12}  {place}, {window}, region {row['region']}")
    return lines
