"""`tidegate cleanup`: delete old rows from the shared database, in bounded batches, once or repeatedly.

It deletes expired counts, and overrides and keys that were deleted or revoked long ago.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Final

import click

from tidegate.adapters import clock
from tidegate.adapters.secrets import mask
from tidegate.cli.catalogs import Place, opened_catalog
from tidegate.cli.databases import ledger_options, opened_ledger
from tidegate.cli.durations import DURATION
from tidegate.cli.outcomes import json_option, print_error, print_result
from tidegate.cli.progress import Progress
from tidegate.core.quota import format_duration
from tidegate.errors import DependencyError
from tidegate.ports import Catalog, Ledger

__all__ = ["cleanup"]

# One batch is one statement: more rows would hold locks that publishers wait for.
BATCH_ROWS: Final = 5_000
# A shorter pause would only load the database: rows expire by the minute.
EVERY_MS_MIN: Final = 1_000


@click.command()
@click.option("--every", "every_ms", type=DURATION, help="Repeat with this pause, e.g. 60s, until stopped.")
@click.option(
    "--older-than",
    "grace_ms",
    type=DURATION,
    default="60s",
    show_default=True,
    help="Keep rows that expired more recently than this, because clocks differ.",
)
@click.option(
    "--purge-after",
    "purge_age_ms",
    type=DURATION,
    default="30d",
    show_default=True,
    help="Delete the rows of overrides and keys that were deleted or revoked longer ago than this.",
)
@ledger_options
@json_option
def cleanup(
    url: str, timeout_s: float, every_ms: int | None, grace_ms: int, purge_age_ms: int, as_json: bool
) -> None:
    """Delete expired counts, and the rows of overrides and keys that were deleted or revoked long ago.

    It runs once, or with --every until SIGTERM or Ctrl-C. With --every it reports a database that is down and retries,
    and --json prints one document per run. One process is enough for all regions; several do no harm.
    """
    if every_ms is not None and every_ms < EVERY_MS_MIN:
        raise click.BadParameter(
            f"{format_duration(every_ms)} is too short: use at least 1s", param_hint="--every"
        )
    work = partial(_once, url, timeout_s, grace_ms, purge_age_ms, as_json)
    asyncio.run(work() if every_ms is None else _repeatedly(work, every_ms, as_json))


async def _once(url: str, timeout_s: float, grace_ms: int, purge_age_ms: int, as_json: bool) -> None:
    now_ms = clock.now_ms()
    started_s = time.monotonic()
    with Progress("waiting for the database") as progress:
        async with opened_ledger(url, timeout_s) as ledger:
            deleted, batches = await _delete_expired(ledger, now_ms - grace_ms, timeout_s, progress)
        async with opened_catalog(Place("", url, timeout_s)) as catalog:
            purged = await _purge(catalog, now_ms - purge_age_ms, timeout_s)
    took_s = time.monotonic() - started_s
    document = {
        "deleted": deleted,
        "batches": batches,
        "cutoff_ms": now_ms - grace_ms,
        "purged": purged,
        "took_s": round(took_s, 3),
    }
    text = f"deleted {deleted} rows in {batches} batches, purged {purged} overrides and keys, {took_s:.1f} s"
    print_result(as_json, document, text)


async def _delete_expired(
    ledger: Ledger, cutoff_ms: int, timeout_s: float, progress: Progress
) -> tuple[int, int]:
    """(deleted rows, batches)."""
    deleted = batches = 0
    while True:
        gone = await ledger.cleanup(cutoff_ms, rows_max=BATCH_ROWS, timeout_s=timeout_s)
        deleted += gone
        batches += 1
        progress.text = f"deleted {deleted} expired rows"
        if gone < BATCH_ROWS:
            return deleted, batches


async def _purge(catalog: Catalog, cutoff_ms: int, timeout_s: float) -> int:
    purged = 0
    while gone := await catalog.purge(cutoff_ms, timeout_s=timeout_s):
        purged += gone
    return purged


async def _repeatedly(once: Callable[[], Coroutine[Any, Any, None]], every_ms: int, as_json: bool) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    # Event loops on Windows have no signal handlers; Ctrl-C still ends the program there.
    with suppress(NotImplementedError):
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
    while not stopped.is_set():
        work = asyncio.create_task(once())
        stop = asyncio.create_task(stopped.wait())
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
        try:
            with suppress(asyncio.CancelledError):
                await work
        except DependencyError as error:
            # Only transient errors: a missing schema or a wrong password ends the program.
            print_error(
                as_json,
                type(error).__name__,
                f"{mask(str(error))}; next run in {format_duration(every_ms)}",
            )
        stop.cancel()
        with suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), every_ms / 1000)
