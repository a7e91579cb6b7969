"""`tidegate cleanup`: delete what is over from the database of a fleet, in bounded batches, once or for ever.

Expired rows of the ledger; and overrides and keys that were deleted or revoked long ago and are only marks by now.
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
from tidegate.cli.databases import ledger_options, opened_ledger, run
from tidegate.cli.durations import DURATION
from tidegate.cli.outcomes import answer, complain, json_option
from tidegate.errors import DependencyError
from tidegate.ports import Catalog, Ledger

__all__ = ["cleanup"]

# One batch is one statement: more rows would hold locks that publishers wait for.
BATCH_ROWS: Final = 5_000


@click.command()
@click.option("--every", "every_ms", type=DURATION, help="Go on for ever, with this pause, such as 60s.")
@click.option(
    "--older-than",
    "grace_ms",
    type=DURATION,
    default="60s",
    show_default=True,
    help="Keep rows that expired less than this ago: clocks differ.",
)
@click.option(
    "--purge-after",
    "purge_age_ms",
    type=DURATION,
    default="30d",
    show_default=True,
    help="Overrides and keys that were deleted or revoked longer ago than this go for good.",
)
@ledger_options
@json_option
def cleanup(
    url: str, timeout_s: float, every_ms: int | None, grace_ms: int, purge_age_ms: int, as_json: bool
) -> None:
    """Delete rows that no decision can use any more, and what is left of deleted overrides and revoked keys.

    Once, or with --every until SIGTERM or Ctrl-C; then a ledger that is down is reported and tried again, and --json
    answers with one document a round. One such process is enough for all regions; several do no harm.
    """
    work = partial(_once, url, timeout_s, grace_ms, purge_age_ms, as_json)
    run(work() if every_ms is None else _for_ever(work, every_ms, as_json))


async def _once(url: str, timeout_s: float, grace_ms: int, purge_age_ms: int, as_json: bool) -> None:
    now_ms = clock.now_ms()
    started_s = time.monotonic()
    async with opened_ledger(url, timeout_s) as ledger:
        deleted, batches = await _delete_expired(ledger, now_ms - grace_ms, timeout_s)
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
    answer(as_json, document, text)


async def _delete_expired(ledger: Ledger, cutoff_ms: int, timeout_s: float) -> tuple[int, int]:
    """(rows that went, batches it took)."""
    deleted = batches = 0
    while True:
        gone = await ledger.cleanup(cutoff_ms, rows_max=BATCH_ROWS, timeout_s=timeout_s)
        deleted += gone
        batches += 1
        if gone < BATCH_ROWS:
            return deleted, batches


async def _purge(catalog: Catalog, cutoff_ms: int, timeout_s: float) -> int:
    purged = 0
    while gone := await catalog.purge(cutoff_ms, timeout_s=timeout_s):
        purged += gone
    return purged


async def _for_ever(once: Callable[[], Coroutine[Any, Any, None]], every_ms: int, as_json: bool) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    # Where loops know no signals (Windows) Ctrl-C still ends the program.
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
            # Only what may pass by itself: a missing schema or a wrong password ends the program.
            complain(
                as_json,
                type(error).__name__,
                f"{mask(str(error))}; trying again in {every_ms / 1000:g} s",
            )
        stop.cancel()
        with suppress(TimeoutError):
            await asyncio.wait_for(stopped.wait(), every_ms / 1000)
