"""`tidegate cleanup`: delete expired rows of a ledger, in bounded batches, once or for ever."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import suppress
from typing import Final

import click

from tidegate.cli.databases import ledger_options, opened_ledger, run
from tidegate.cli.durations import DURATION
from tidegate.cli.outcomes import answer, complain, json_option
from tidegate.errors import DependencyError
from tidegate.ports import Ledger
from tidegate.telemetry.secrets import mask

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
@ledger_options
@json_option
def cleanup(url: str, timeout_s: float, every_ms: int | None, grace_ms: int, as_json: bool) -> None:
    """Delete rows of the ledger that no decision can use any more.

    Once, or with --every until SIGTERM or Ctrl-C; then a ledger that is down is reported and tried again, and --json
    answers with one document a round. One such process is enough for all regions; several do no harm.
    """
    run(
        _once(url, timeout_s, grace_ms, as_json)
        if every_ms is None
        else _for_ever(url, timeout_s, grace_ms, every_ms, as_json)
    )


async def _once(url: str, timeout_s: float, grace_ms: int, as_json: bool) -> None:
    async with opened_ledger(url, timeout_s) as ledger:
        await _round(ledger, timeout_s, grace_ms, as_json)


async def _round(ledger: Ledger, timeout_s: float, grace_ms: int, as_json: bool) -> None:
    cutoff_ms = time.time_ns() // 1_000_000 - grace_ms
    started_s = time.monotonic()
    deleted = batches = 0
    while True:
        gone = await ledger.cleanup(cutoff_ms, rows_max=BATCH_ROWS, timeout_s=timeout_s)
        deleted += gone
        batches += 1
        if gone < BATCH_ROWS:
            break
    took_s = time.monotonic() - started_s
    document = {"deleted": deleted, "batches": batches, "cutoff_ms": cutoff_ms, "took_s": round(took_s, 3)}
    answer(as_json, document, f"deleted {deleted} rows in {batches} batches, {took_s:.1f} s")


async def _for_ever(url: str, timeout_s: float, grace_ms: int, every_ms: int, as_json: bool) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    # Where loops know no signals (Windows) Ctrl-C still ends the program.
    with suppress(NotImplementedError):
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
    while not stopped.is_set():
        work = asyncio.create_task(_once(url, timeout_s, grace_ms, as_json))
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
